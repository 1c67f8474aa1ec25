"""A command run alone and under the recorder: it must end the same, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from fsdp2prof.readers.run.directory import open_run

from .conftest import training_environment

__all__ = ["RECORD", "compare", "ended", "one_rank", "processes_that_mention"]

RECORD = [sys.executable, "-m", "fsdp2prof", "record", "--wait", "0", "--warmup", "1", "--active", "1"]


def one_rank(**extra: str) -> dict[str, str]:
    """Environment of a training without a launcher of its own."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return training_environment(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", **address, **extra)


def ended(command: list[str], folder: Path, **options: object) -> tuple[int, bytes]:
    """Exit code and stdout of a command in a folder of its own, in a session of its own.

    Signals begin at their defaults, whoever started the tests; ``preexec_fn`` may set them otherwise.
    """
    folder.mkdir()
    prepare = options.pop("preexec_fn", None)

    def begin() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        if callable(prepare):
            prepare()

    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        timeout=200,
        check=False,
        start_new_session=True,
        preexec_fn=begin,
        **{"stdin": subprocess.DEVNULL, "env": one_rank(), **options},  # type: ignore[call-overload]
    )
    return done.returncode, done.stdout


def compare(tmp_path: Path, command: list[str], *, state: set[str], **options: object) -> Path:
    """Run alone and recorded; returns the run directory, which is read."""
    run = tmp_path / "run"
    alone = ended(command, tmp_path / "alone", **options)
    recorded = ended([*RECORD, "-o", str(run), "--", *command], tmp_path / "recorded", **options)
    code = alone[0] if alone[0] >= 0 else 128 - alone[0]
    assert recorded == (code, alone[1])
    assert list((tmp_path / "recorded").rglob("*")) == list((tmp_path / "alone").rglob("*")) == []
    assert processes_that_mention(str(run)) == []
    if run.exists():
        opened = open_run(run)
        assert opened.info.state in state, opened.messages
        assert opened.info.exit_code == code
        assert list(run.rglob(".*")) == []
    return run


def processes_that_mention(text: str) -> list[str]:
    """Processes, by number, whose environment has a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if text.encode() in environment and folder.name != str(os.getpid()):
            found.append(folder.name)
    return found
