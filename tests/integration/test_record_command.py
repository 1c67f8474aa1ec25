"""The command under the recorder keeps its streams, its exit code and its environment; no torch in here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.present import present

RECORD = [sys.executable, "-m", "fsdp2prof", "record"]
PATIENCE_S = 240


def record(run, *command, options=(), env=None, **keywords):
    return subprocess.run(
        [*RECORD, "-o", str(run), *options, "--", *map(str, command)],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        **keywords,
    )


def test_streams_and_exit_code_are_the_commands_own(tmp_path):
    code = "import sys; print(input().upper()); print('oops', file=sys.stderr); sys.exit(5)"
    done = record(tmp_path / "run", sys.executable, "-c", code, input="hello\n")
    assert (done.returncode, done.stdout) == (5, "HELLO\n")
    assert done.stderr.splitlines()[0] == "oops"
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (info["state"], info["exit_code"], info["command"][0]) == ("crashed", 5, sys.executable)


def test_a_command_without_fully_shard_is_told_so(tmp_path):
    done = record(tmp_path / "run", sys.executable, "-c", "pass")
    assert done.returncode == 0
    assert done.stderr == "fsdp2prof: no process ever called fully_shard: nothing was recorded\n"
    quiet = record(tmp_path / "quiet", sys.executable, "-c", "pass", options=["-q"])
    assert (quiet.stdout, quiet.stderr) == ("", "")


def test_no_sign_of_life_at_all(tmp_path):
    done = record(tmp_path / "run", "true")
    assert "the recorder started in no process; possible causes: python -I, -E or -S" in done.stderr


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGKILL", "SIGABRT"])
def test_death_by_a_signal_is_128_plus_n(tmp_path, signal_name):
    number = getattr(signal, signal_name)
    done = record(tmp_path / "run", sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})")
    assert done.returncode == 128 + number


def test_ctrl_c_reaches_the_command_once(tmp_path):
    code = (
        "import os, select, signal, time; reader, writer = os.pipe(); os.set_blocking(writer, False);"
        "signal.signal(signal.SIGINT, lambda *_: None); signal.set_wakeup_fd(writer);"
        "print('ready', flush=True); select.select([reader], [], []); time.sleep(1)  # for a second one\n"
        "print(len(os.read(reader, 99)), flush=True)"
    )
    terminal, tty = os.openpty()
    command = [*RECORD, "-o", str(tmp_path / "run"), "--", sys.executable, "-c", code]
    session = subprocess.Popen(
        ["setsid", "--ctty", *command], stdin=tty, stdout=subprocess.PIPE, stderr=tty, text=True
    )
    assert present(session.stdout).readline() == "ready\n"
    os.write(terminal, b"\x03")
    output, _ = session.communicate(timeout=PATIENCE_S)
    os.close(terminal)
    os.close(tty)
    assert (output, session.returncode) == ("1\n", 0)


def test_signal_dispositions_and_process_group_are_inherited(tmp_path):
    code = (
        "import os, signal; blocked = signal.pthread_sigmask(signal.SIG_BLOCK, []);"
        "print(len(blocked), os.getpgrp() == os.getpgid(os.getppid()))"
    )
    assert record(tmp_path / "run", sys.executable, "-c", code).stdout == "0 True\n"


def test_an_ignored_ctrl_c_stays_ignored(tmp_path):
    code = (
        "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN, flush=True); print(input())"
    )
    launcher = subprocess.Popen(
        [*RECORD, "-o", str(tmp_path / "run"), "--", sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert present(launcher.stdout).readline() == "True\n"
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate("went on\n", timeout=PATIENCE_S)
    assert (output, launcher.returncode) == ("went on\n", 0)


def test_a_sitecustomize_later_on_the_path_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.FOUND = __file__\n")
    code = (
        "import sys; print(FOUND); print([p for p in sys.path if 'bootstrap' in p], 'torch' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = record(tmp_path / "run", sys.executable, "-c", code, env=env)
    assert done.stdout == f"{tmp_path / 'sitecustomize.py'}\n[] False\n"


def test_a_sitecustomize_that_fails_is_reported_as_without_the_recorder(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import no_such_module_at_all\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = record(tmp_path / "run", sys.executable, "-c", "print('ran')", env=env)
    assert done.stdout == "ran\n"
    assert "Error in sitecustomize" in done.stderr
    assert "no_such_module_at_all" in done.stderr


def test_an_existing_run_is_refused_and_force_removes_only_a_recording(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.txt").write_text("mine")
    refused = record(run, sys.executable, "-c", "print('ran')")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert (
        refused.stderr
        == f"error: {run}: exists already; choose another, or overwrite it with -f (force=True)\n"
    )
    forced = record(run, sys.executable, "-c", "print('ran')", options=["-f"])
    assert (forced.returncode, forced.stdout) == (1, "")
    assert forced.stderr == f"error: {run}: exists and is not a run directory; -f does not remove it\n"
    (run / "run.json").write_text("{}")
    (run / "rank-00000").mkdir()
    (run / "rank-notes.txt").touch()
    refused = record(run, "true")
    assert "; other nodes of the same run take --node-rank N" in refused.stderr
    assert record(run, sys.executable, "-c", "pass", options=["-f"]).returncode == 0
    assert sorted(file.name for file in run.iterdir()) == ["rank-notes.txt", "run.json", "thesis.txt"]


def test_a_command_that_is_not_there(tmp_path):
    done = record(tmp_path / "run", "no-such-command-anywhere")
    assert done.returncode == 1
    assert done.stderr == "error: no-such-command-anywhere: command not found\n"
    assert not (tmp_path / "run").exists()


def test_a_script_without_its_interpreter(tmp_path):
    done = record(tmp_path / "run", "train.py", "--lr", "1")
    assert done.returncode == 1
    assert done.stderr == (
        "error: train.py: a script needs its interpreter: record -- python train.py --lr 1, "
        "or torchrun ... train.py --lr 1\n"
    )
    assert not (tmp_path / "run").exists()


def test_a_command_that_cannot_start(tmp_path):
    script = tmp_path / "no-interpreter"
    script.write_text("echo\n")
    script.chmod(0o755)
    done = record(tmp_path / "run", script)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {script}: cannot be started (Exec format error); a script needs")
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    "options",
    [["--ranks", "first"], ["--active", "0", "--no-memory"], ["--wait", "-1"], ["--at-step", "-3"]],
)
def test_options_that_cannot_be_meant(tmp_path, options):
    done = record(tmp_path / "run", "true", options=options)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --")
    assert not (tmp_path / "run").exists()


def test_another_node_has_to_say_which_run_it_joins(tmp_path):
    command = [*RECORD, "--node-rank", "1", "--", "true"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr == "error: --node-rank needs -o: the run directory that all nodes share\n"
    assert list(tmp_path.iterdir()) == []


def test_no_command_is_a_usage_error():
    done = subprocess.run(RECORD, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert "Missing argument" in done.stderr


def test_every_way_to_import_fully_shard_is_seen(tmp_path):
    code = """
import inspect, pickle, sys
import torch.distributed.fsdp, torch.distributed._composable.fsdp
from torch.distributed.fsdp import fully_shard as a
from torch.distributed._composable.fsdp import fully_shard as b
from torch.distributed._composable.fsdp.fully_shard import fully_shard as c
from torch.distributed.fsdp._fully_shard import fully_shard as d
from torch.distributed.fsdp._fully_shard._fully_shard import fully_shard as e
seen = {id(f) for f in (a, b, c, d, e, torch.distributed.fsdp.fully_shard)}
print(len(seen), a.__wrapped__.__module__, callable(a.state), pickle.loads(pickle.dumps(a)) is a)
print(list(inspect.signature(a).parameters)[:3], "fsdp2prof.recorder.rank.session" in sys.modules)
"""
    done = record(tmp_path / "run", sys.executable, "-c", code)
    module = "torch.distributed.fsdp._fully_shard._fully_shard"
    assert done.stdout == f"1 {module} True True\n['module', 'mesh', 'reshard_after_forward'] False\n"


def test_the_recorder_comes_before_any_import_of_a_child(tmp_path):
    script = Path(tmp_path, "parent.py")
    script.write_text(
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import os; print(os.environ[\"PYTHONPATH\"])'], check=True)\n"
    )
    done = record(tmp_path / "run", sys.executable, script)
    assert done.stdout.split(os.pathsep)[0].strip().endswith("recorder/bootstrap")
