"""What the training waits for while a recording is written, and where it is written first."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fsdp2prof.recorder.rank import captures, tracing

from .one_session import nothing, record

pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.mark.parametrize("said_from_s", [0.2, 3600])
def test_a_pause_is_measured_and_said(tmp_path, monkeypatch, capsys, said_from_s):
    compress = tracing._compress
    raw: list[Path] = []

    def slowly(source: Path, target: Path) -> None:
        raw.append(source)
        time.sleep(0.3)
        compress(source, target)

    monkeypatch.setattr(tracing, "_compress", slowly)
    monkeypatch.setattr(captures, "SAID_FROM_NS", int(said_from_s * 1e9))
    session = record(tmp_path / "run", nothing)
    trace, memory = session.manifest.pauses
    assert (trace.kind, trace.after_step, memory.kind, memory.after_step) == ("trace", 2, "memory", 4)
    assert trace.duration_ns >= 0.3e9
    assert trace.file_bytes == (session.folder / "trace.json.gz").stat().st_size
    assert memory.file_bytes == (session.folder / "memory.npz").stat().st_size
    lines = [line for line in capsys.readouterr().err.splitlines() if "training paused" in line]
    assert len(lines) == (said_from_s < 1)
    if lines:
        assert "while the trace recording was written" in lines[0]
    [file] = raw
    assert tmp_path / "run" not in file.parents, "raw traces stay away from a shared disk"
    assert not file.parent.exists()
    assert {one.name for one in session.folder.iterdir()} == {"manifest.json", "trace.json.gz", "memory.npz"}
