"""Work in other processes: results in order, errors of ours as they are, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from fsdp2prof import worker_processes as processes
from fsdp2prof.errors import TraceError
from fsdp2prof.readers.trace.chrome_trace import read_trace
from fsdp2prof.units import parse_bytes
from fsdp2prof.worker_processes import Task, map_in_processes, usable_cores

pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture(params=["fork", "interpreter"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kinds of child, whatever else runs in this process."""
    monkeypatch.setattr(processes, "_may_fork", lambda: request.param == "fork")
    return str(request.param)


def test_results_come_in_the_order_of_the_items() -> None:
    assert list(map_in_processes(parse_bytes, ["1k", "2k", "3k", "4k", "5k"], 2)) == [
        1024,
        2048,
        3072,
        4096,
        5120,
    ]
    assert list(map_in_processes(parse_bytes, ["1k", "2k"], 1)) == [1024, 2048]
    assert list(map_in_processes(parse_bytes, [], 4)) == []


def test_the_work_is_done_elsewhere_on_one_core() -> None:
    assert Task(os.getpid).result() != os.getpid()
    assert Task(usable_cores).result() == 1


def test_an_error_of_ours_arrives_as_it_is() -> None:
    with pytest.raises(TraceError, match=r"nothing\.json: cannot be read"):
        Task(read_trace, "nothing.json").result()


def test_what_it_prints_does_not_disturb_its_result(capfd: pytest.CaptureFixture[str]) -> None:
    assert Task(print, "words").result() is None
    assert capfd.readouterr().err == "words\n"


def test_a_fork_is_not_made_beside_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert not processes._may_fork()
        assert Task(abs, -4).result() == 4
    finally:
        stop.set()
        thread.join()


def test_a_death_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="exit code 3"):
        Task(os._exit, 3).result()
    with pytest.raises(RuntimeError, match="exit code 1"):
        Task(int, "no number").result()
    assert "no number" in capfd.readouterr().err


def test_leaving_early_ends_the_others() -> None:
    """Waiting for them would run into the limit that every test has."""
    with closing(map_in_processes(time.sleep, [0.01, 600, 600], 3)) as results:
        assert next(results) is None


def test_a_script_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from fsdp2prof.worker_processes import Task\n"
        f"with Path({str(tmp_path / 'runs')!r}).open('a') as log: log.write('x')\n"
        "print(Task(max, 3, 5).result())\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert (done.stdout, (tmp_path / "runs").read_text()) == ("5\n", "x")


_KILLED_PARENT = """
import os, signal, time
from fsdp2prof import worker_processes
worker_processes._may_fork = lambda: {forks}
task = worker_processes.Task(time.sleep, 0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_whose_parent_was_killed_says_nothing(kind: str) -> None:
    script = _KILLED_PARENT.format(forks=kind == "fork")
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    _, said = parent.communicate(timeout=60)  # until the worker has closed it, too
    assert said == b""


def test_a_fork_is_made_beside_what_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if threading.active_count() > 1 or "torch" in sys.modules or sys.platform != "linux":
        pytest.skip("this process may not fork")
    called = threading.Event()
    with processes.repeated(called.set, 0.001):
        assert called.wait(60)
        assert processes._may_fork()
        assert [Task(abs, -number).result() for number in range(20)] == [*range(20)]
    assert threading.active_count() == 1
