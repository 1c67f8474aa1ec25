"""However a training ends: recorded, it ends as it does alone, leaves nothing behind, and can be read."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp2prof.readers.run.directory import open_run

from .alone_and_recorded import RECORD, compare, ended, processes_that_mention
from .conftest import script_path, torchrun, training_environment

pytestmark = pytest.mark.slow


def script(*arguments: str) -> list[str]:
    return [sys.executable, str(script_path("endings")), *arguments]


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ("none", "complete"),
        ("raise", "crashed"),
        ("interrupt", "crashed"),
        ("exit", "crashed"),
        ("os_exit", "crashed"),
        ("os_exit_well", "partial"),
        ("abort", "crashed"),
        ("SIGKILL", "crashed"),
        ("SIGTERM", "crashed"),
        ("SIGHUP", "crashed"),
        ("SIGQUIT", "crashed"),
        ("fork", "complete"),
        ("spawn", "complete"),
        ("forkserver", "complete"),
        ("subprocess", "complete"),
        ("thread", "complete"),
        ("no_folder", "complete"),
        ("handler", "complete"),
        ("handled", "complete"),
        ("handled_late", "complete"),
        ("handled_from_now_on", "complete"),
        ("chained", "complete"),
        ("where_default", "complete"),
        ("handler_put_back", "crashed"),
        ("pipes_closed", "complete"),
    ],
)
def test_of_one_rank(tmp_path: Path, how: str, state: str) -> None:
    compare(tmp_path, script("--how", how), state={state, "partial"} if state == "crashed" else {state})


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_of_a_few_steps(tmp_path: Path, steps: int) -> None:
    compare(tmp_path, script("--steps", str(steps)), state={"partial"})


@pytest.mark.parametrize("flag", ["-E", "-S", "-I"])
def test_of_interpreters_that_keep_things_out(tmp_path: Path, flag: str) -> None:
    """``-S`` leaves out site-packages: the training itself fails the same way."""
    command = [sys.executable, flag, *script()[1:]]
    compare(tmp_path, command, state={"partial", "crashed"})


def test_of_a_run_directory_that_is_deleted_in_the_middle(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = script("--how", "deleted", "--folder", str(run))
    recorded = ended([*RECORD, "-o", str(run), "--", *command], tmp_path / "recorded")
    alone = ended(script(), tmp_path / "alone")
    assert recorded == alone


def test_of_a_disk_that_becomes_read_only(tmp_path: Path) -> None:
    """Remounted in the middle: the exit code and the output are the training's own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs tmpfs {disk} && exec "$@"', "sh"]
    if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root and a kernel that allows it")
    training = script("--how", "read_only", "--folder", str(disk))
    alone = ended([*mounted, *training], tmp_path / "alone")
    record = [*RECORD, "-o", str(disk / "run"), "--"]
    assert ended([*mounted, *record, *training], tmp_path / "recorded") == alone
    assert alone[0] == 0


@pytest.mark.parametrize("limit", ["nr_inodes=4", "size=12k"])
def test_of_a_small_disk(tmp_path: Path, limit: str) -> None:
    """There is room for ``run.json`` and little else: nothing of the training's changes, and that is said."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o {limit} tmpfs {disk} && exec "$@"'
    mounted = ["unshare", "-m", "sh", "-c", mount, "sh"]
    if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root and a kernel that allows it")
    alone = ended(script(), tmp_path / "alone")
    said = tmp_path / "said"
    record = ["sh", "-c", f'exec "$@" 2>{said}', "sh", *RECORD, "--watch", "--summary"]
    record += ["-o", str(disk / "run"), "--"]
    assert ended([*mounted, *record, *script()], tmp_path / "recorded") == alone
    assert alone[0] == 0
    assert "No space left on device" in said.read_text()
    assert "was removed" not in said.read_text()


def test_of_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    """No file may grow beyond 16 KiB: the trace does not fit, the training does not notice."""

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, 16 << 10))

    compare(tmp_path, script(), state={"partial"}, preexec_fn=small)


def test_of_few_file_descriptors(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))

    compare(tmp_path, script(), state={"complete"}, preexec_fn=few)


def test_with_stdin_closed(tmp_path: Path) -> None:
    compare(tmp_path, script(), state={"complete"}, stdin=None, preexec_fn=lambda: os.close(0))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_of_signals_that_the_parent_ignores(tmp_path: Path, number: signal.Signals) -> None:
    """A shell's nohup: what is ignored stays ignored, and the training goes on."""
    compare(
        tmp_path,
        script("--how", number.name),
        state={"complete"},
        preexec_fn=lambda: signal.signal(number, signal.SIG_IGN),
    )


def test_of_a_record_inside_a_record(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    command = [*RECORD, "-o", str(inner), "--", *script()]
    alone = ended(script(), tmp_path / "alone")
    assert ended([*RECORD, "-o", str(tmp_path / "run"), "--", *command], tmp_path / "recorded") == alone
    assert open_run(inner).info.state == "complete"


def test_of_two_records_into_one_directory(tmp_path: Path) -> None:
    run = compare(tmp_path, script("--steps", "4"), state={"complete"})
    before = (run / "run.json").read_bytes()
    shutil.rmtree(tmp_path / "recorded")
    code, output = ended([*RECORD, "-o", str(run), "--", *script()], tmp_path / "recorded")
    assert (code, output) == (1, b"")
    assert (run / "run.json").read_bytes() == before


OF_FOUR = [(how, 4) for how in ("raise", "SIGTERM", "SIGKILL")]
SEVERAL = [("raise", 2), ("SIGKILL", 2), ("agent", 2), *OF_FOUR, ("none", 16)]


@pytest.mark.parametrize(("how", "ranks"), SEVERAL)
def test_of_several_ranks(tmp_path: Path, how: str, ranks: int) -> None:
    """``agent`` ends torchrun itself: its ranks, which nobody ends alone, do not outlive the recording."""
    command = torchrun(script_path("endings"), ranks, "--how", how)
    state = {"complete"} if how == "none" else {"crashed"}
    if how != "agent":
        compare(tmp_path, command, state=state, env=training_environment())
        return
    run = tmp_path / "run"
    code, _ = ended(
        [*RECORD, "-o", str(run), "--", *command], tmp_path / "recorded", env=training_environment()
    )
    assert code == 128 + signal.SIGKILL
    assert open_run(run).info.state == "crashed"
    assert processes_that_mention(str(run)) == []


def test_of_a_restart(tmp_path: Path) -> None:
    """The second attempt of torchrun's is the one that is kept."""
    command = torchrun(script_path("endings"), 1, "--how", "restart")
    command.insert(command.index("--standalone"), "--max-restarts=1")
    compare(tmp_path, command, state={"complete"}, env=training_environment())
