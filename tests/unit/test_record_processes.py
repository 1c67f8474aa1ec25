"""Why a rank never came to life."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fsdp2prof.manifest import RankManifest
from fsdp2prof.recorder.launch.host_processes import RankProcess, RankProcesses, end_orphans
from fsdp2prof.recorder.settings import VARIABLE


def process(*arguments, python_path="/bootstrap"):
    return RankProcess(1, 0, ("/usr/bin/python3", *arguments), python_path)


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [(("-I", "train.py"), "-I"), (("-u", "-E", "train.py"), "-E"), (("-uI", "-m", "train"), "-I")],
)
def test_isolated(arguments, flag):
    assert process(*arguments).why_silent("/bootstrap").startswith(f"`python {flag}` disables it")


@pytest.mark.parametrize(
    "arguments", [("train.py", "-I"), ("-m", "train", "-E"), ("-W", "ignore", "x.py"), ("-Xdev", "x.py")]
)
def test_not_isolated(arguments):
    assert process(*arguments).why_silent("/bootstrap").startswith("python -I, -E or -S, a foreign")


def test_python_path_was_reset():
    assert "PYTHONPATH was reset" in process("x.py", python_path="/mine").why_silent("/bootstrap")


def test_a_foreign_sitecustomize_stands_first(tmp_path):
    (tmp_path / "sitecustomize.py").touch()
    why = process("x.py", python_path=f"{tmp_path}{os.pathsep}/bootstrap").why_silent("/bootstrap")
    assert why.startswith(f"{tmp_path / 'sitecustomize.py'} precedes the recorder's own")


def test_orphans_are_found_and_ended():
    import socket

    settings = f"settings of {os.getpid()}"
    environment = {**os.environ, VARIABLE: settings, "RANK": "3"}
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)
    watch = RankProcesses(settings)
    watch._next = 0.0
    while not watch.seen:
        watch.look()
        watch._next = 0.0
    assert [one.rank for one in watch.silent(set())] == [3]
    assert watch.silent({sleeper.pid}) == []
    manifest = RankManifest(rank=3, host=socket.gethostname(), pid=sleeper.pid)
    assert end_orphans([manifest], "of another run") == []
    assert sleeper.poll() is None
    assert end_orphans([manifest], settings) == [3]
    assert sleeper.wait(60) == -15
