"""Snapshot pickles: histories written by hand, every format, hostile files, and real ones."""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.snapshots import SnapshotBuilder, Training

from fsdp2prof.analyzers.memory.analysis import analyze_memory
from fsdp2prof.analyzers.memory.prepared import allocated_totals, event_times, reserved_totals
from fsdp2prof.errors import SnapshotError
from fsdp2prof.readers.memory.recording import read_memory
from fsdp2prof.recorder.memory.recording_file import write_recording
from fsdp2prof.tables.allocations import MemoryRecording
from fsdp2prof.tables.columns import NEVER
from fsdp2prof.workflows.analyze import analyze_memory as of_job
from fsdp2prof.workflows.job.job_files import open_job


def read(builder: SnapshotBuilder, folder: Path, **options: int) -> MemoryRecording:
    (recording,) = read_memory(builder.write(folder / "snapshot.pickle", **options))
    return recording


def totals(recording: MemoryRecording) -> list[int]:
    return allocated_totals(recording.allocations, recording.events).tolist()


def reserved(recording: MemoryRecording) -> list[int]:
    found = reserved_totals(recording.segments, recording.events)
    assert found is not None
    return found.tolist()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_totals_with_memory_from_before_that_is_freed_inside(tmp_path: Path, protocol: int):
    builder = SnapshotBuilder().alloc(100, 10).free(900, 7).alloc(100 + 512, 20).free(100, 10).alloc(100, 30)
    builder.segment(100, [(512, 30, "active_allocated"), (512, 20, "active_allocated")])
    builder.segment(5000, [(1024, 1000, "active_allocated"), (1024, 0, "inactive")])
    recording = read(builder, tmp_path, protocol=protocol)
    # 1000 stays, 7 was there and goes with event 1; event 2 and 5 complete frees
    assert totals(recording) == [1017, 1010, 1010, 1030, 1020, 1020, 1050]
    assert reserved(recording) == [3072] * 7
    assert not recording.truncated
    assert recording.device == "cuda:0"
    assert recording.allocations.size.tolist() == [1000, 7, 10, 20, 30]
    assert recording.allocations.alloc_order.tolist() == [-1, -1, 0, 3, 6]
    assert recording.allocations.free_order.tolist() == [NEVER, 1, 4, NEVER, NEVER]
    assert recording.blocks.state.to_list() == ["allocated", "allocated", "allocated", "free"]


def test_block_held_across_streams_is_free_but_not_reusable(tmp_path: Path):
    builder = SnapshotBuilder().alloc(100, 10, stream=7).event("free_requested", 100, 10).alloc(612, 5)
    builder.event("free_completed", 100, 10)
    builder.segment(100, [(512, 0, "inactive"), (512, 5, "active_allocated")])
    recording = read(builder, tmp_path)
    assert totals(recording) == [10, 0, 5, 5]
    assert recording.allocations.free_order.tolist() == [1, NEVER]
    assert recording.allocations.release_order.tolist() == [3, NEVER]
    assert recording.allocations.stream.tolist() == [7, 0]


@pytest.mark.parametrize("state", ["active_pending_free", "active_awaiting_free"])
def test_both_names_of_a_pending_free(tmp_path: Path, state: str):
    builder = SnapshotBuilder().alloc(100, 10).event("free_requested", 100, 10)
    recording = read(builder.segment(100, [(512, 10, state)]), tmp_path)
    assert recording.blocks.state.to_list() == ["pending_free"]
    assert totals(recording) == [10, 0]
    assert recording.allocations.release_order.tolist() == [NEVER]


def test_files_without_free_requested_or_times(tmp_path: Path):
    builder = (
        SnapshotBuilder(timed=False).event("snapshot", 0, 0).alloc(100, 10).event("free_completed", 50, 3)
    )
    builder.event("free_completed", 100, 10).event("user_defined", 0, 0)
    recording = read(builder, tmp_path)
    assert totals(recording) == [3, 13, 10, 0, 0]
    assert event_times(recording).tolist() == [-1] * 5
    assert recording.warnings[0].startswith("the snapshot has no times")
    assert recording.end_ns == -1


def test_expandable_segment_mapped_in_pieces_and_unmapped_across_them(tmp_path: Path):
    builder = SnapshotBuilder().event("segment_map", 1000, 100).event("segment_map", 1100, 100)
    builder.event("segment_unmap", 1050, 100).event("segment_map", 1050, 20)
    # 1000-1070 and 1150-1200 are left of it; 300 more were mapped before the history began
    builder.segment(1000, [(70, 0, "inactive")], is_expandable=True)
    builder.segment(1150, [(350, 0, "inactive")], is_expandable=True)
    recording = read(builder, tmp_path)
    assert reserved(recording) == [400, 500, 400, 420]
    assert sum(recording.blocks.size) == 420
    assert recording.segments.expandable.all()


def test_segment_from_before_that_is_released_inside(tmp_path: Path):
    builder = SnapshotBuilder().event("segment_free", 5000, 64).event("segment_alloc", 5000, 32)
    recording = read(builder.segment(5000, [(32, 0, "inactive")]), tmp_path)
    assert reserved(recording) == [0, 32]
    assert recording.segments.alloc_order.tolist() == [-1, 1]


def test_ring_buffer_that_lost_the_beginning(tmp_path: Path):
    builder = SnapshotBuilder().alloc(612, 5)
    builder.segment(100, [(512, 9, "active_allocated"), (512, 5, "active_allocated")])
    assert not read(builder, tmp_path).truncated
    frames = [{"filename": "train.py", "line": 3, "name": "step"}]
    builder.segments[0]["blocks"][0]["frames"] = frames  # recorded when it was allocated, so was its event
    recording = read(builder, tmp_path)
    assert recording.truncated
    assert recording.stacks[int(recording.allocations.stack[0])] == ("train.py:3:step",)


def test_several_devices_private_pools_tags_and_windows_paths(tmp_path: Path):
    frames = [
        {"filename": "??", "line": 0, "name": "torch::unwind::unwind()"},
        {"filename": "??", "line": 0, "name": "at::_ops::empty_memory_format::redispatch(...)"},
        {"filename": "??", "line": 0, "name": "at::_ops::linear::call(at::Tensor const&)"},
        {"filename": "C:\\train\\model.py", "line": 12, "name": "forward"},
        {"filename": "C:\\train\\main.py", "line": 80, "name": "<module>"},
    ]
    one = SnapshotBuilder(device=1).alloc(100, 10, user_metadata="layer 3", pool_id=(2, 0), frames=frames)
    one.alloc(200, 11, user_metadata="", frames=list(frames))
    snapshot = one.snapshot()
    zero = SnapshotBuilder().segment(5000, [(64, 60, "active_allocated")], segment_pool_id=(0, 1))
    snapshot["segments"] = zero.segments
    (tmp_path / "two.pickle").write_bytes(pickle.dumps(snapshot))
    first, second = read_memory(tmp_path / "two.pickle")
    assert (first.device, second.device) == ("cuda:0", "cuda:1")
    assert first.allocations.pool.to_list() == ["large (0, 1)"]
    assert second.allocations.pool.to_list() == ["(2, 0)", None]
    assert second.allocations.tag.to_list() == ["layer 3", None]
    assert second.allocations.op.to_list() == ["aten::linear", "aten::linear"]
    assert second.allocations.stack.tolist() == [0, 0]
    assert second.stacks[0][3:] == ("C:\\train\\model.py:12:forward", "C:\\train\\main.py:80:<module>")


def test_annotations_become_labels_and_steps(tmp_path: Path):
    builder = SnapshotBuilder().label("END", "before the history").label("START", "ProfilerStep#3")
    builder.label("START", "outer").label("START", "outer").label("END", "outer").alloc(100, 10)
    builder.label("END", "ProfilerStep#3").label("START", "ProfilerStep#x").segment(
        100, [(512, 10, "inactive")]
    )
    recording = read(builder, tmp_path)
    labels = recording.labels
    assert labels.name.to_list() == ["ProfilerStep#3", "outer", "outer", "ProfilerStep#x"]
    assert (labels.end_ns - labels.start_ns)[[0, 2]].tolist() == [5000, 1000]
    assert (labels.end_ns[[1, 3]] == NEVER).all()
    assert recording.steps.step.tolist() == [3]


def test_archive_round_trip(tmp_path: Path):
    builder = SnapshotBuilder().label("START", "a").alloc(100, 10).event("oom", 0, 99, device_free=5)
    recording = read(builder.segment(100, [(512, 10, "active_allocated")]), tmp_path)
    write_recording(tmp_path / "memory.npz", recording)
    (again,) = read_memory(tmp_path / "memory.npz")
    for name in ("allocations", "segments", "blocks", "labels", "steps", "ooms"):
        assert getattr(again, name).to_pandas().equals(getattr(recording, name).to_pandas()), name
    assert again.ooms.requested.tolist() == [99]
    assert again.ooms.device_free.tolist() == [5]
    assert (again.source, again.device, again.events, again.end_ns) == (
        "cuda_snapshot",
        "cuda:0",
        2,
        1_000_003_000,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"snapshot.pickle", "memory.npz"}


def shared_lists() -> list[object]:
    """A list whose text has 2**60 parts."""
    item: list[object] = []
    for _ in range(60):
        item = [item, item]
    return item


@pytest.mark.parametrize("where", ["frame", "setting", "annotation", "tag", "pool", "segment"])
def test_lists_that_print_for_ever_are_refused(tmp_path: Path, where: str):
    builder = (
        SnapshotBuilder().alloc(100, 10).label("START", "a").segment(100, [(512, 10, "active_allocated")])
    )
    snapshot, endless = builder.snapshot(), shared_lists()
    event, segment = snapshot["device_traces"][0][0], snapshot["segments"][0]
    if where == "frame":
        event["frames"] = [{"filename": endless, "line": 1, "name": "f"}]
    elif where == "setting":
        snapshot["allocator_settings"]["max_split_size"] = endless
    elif where == "annotation":
        snapshot["external_annotations"][0]["name"] = endless
    elif where == "tag":
        event["user_metadata"] = endless
    elif where == "pool":
        event["pool_id"] = endless
    else:
        segment["segment_type"] = endless
    path = tmp_path / "endless.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    with pytest.raises(SnapshotError, match=r"not an allocator snapshot: TypeError"):
        read_memory(path)


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch hacked",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(Evil()), "refused"),
        (pickle.dumps({"segments": [Evil()], "device_traces": []}), "refused"),
        (pickle.dumps(np.zeros(3)), "refused"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", "refused: the pickle refers to builtins.eval"),
        (b"\x80\x04K\x01Q.", "refused: the pickle refers to a persistent object"),
        (pickle.dumps({"segments": [], "device_traces": [[]]})[:-9], "truncated"),
        (pickle.dumps({"segments": [], "device_traces": [[]]})[:-3], "truncated one: it ends before its end"),
        (b"", "truncated"),
        (b"hello", "refused: opcode LIST at byte 2"),
        (b"\xff\xd8\xff", "not a pickle, or a truncated one: byte 0 is not an opcode"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f", "refused: opcode BINUNICODE8 at byte 2"),
        (b"\x80\x04X\xff\xff\xff\x7f.", "truncated"),
        (b"\x80\x04]r\xff\xff\xff\xff.", "refused: opcode LONG_BINPUT at byte 3"),
        (b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".", "not an allocator snapshot"),
        # hashing this key overflows the C stack, hashing the next takes 2**60 additions
        (b"\x80\x04})" + b"\x85" * 1_000_000 + b"K\x01s.", "refused: opcode EMPTY_TUPLE at byte 3"),
        (b"\x80\x04}K\x01K\x01\x86" + b"\x94h\x00\x86" * 60 + b"K\x01s.", "refused: opcode TUPLE2"),
        (b"\x80\x04(K\x01\x91.", "refused: opcode FROZENSET"),
        (pickle.dumps([1, 2]), "not an allocator snapshot"),
        (pickle.dumps({"segments": [], "device_traces": [[]]}), "no memory and no history"),
        (pickle.dumps({"segments": [], "device_traces": [[{"addr": 1}]]}), "not an allocator snapshot"),
        (pickle.dumps({"segments": [3], "device_traces": []}), "not an allocator snapshot"),
        (pickle.dumps({"segments": 3, "device_traces": 4}), "not an allocator snapshot"),
        (
            pickle.dumps(
                {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1 << 70, "size": 1}]]}
            ),
            "not an allocator snapshot",
        ),
        (b"PK\x03\x04 no archive", "not a memory recording"),
    ],
)
def test_bad_file_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.pickle"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=message) as caught:
        read_memory(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "hacked").exists()


def test_a_snapshot_without_a_history_says_that_it_shows_no_peak(tmp_path: Path):
    path = tmp_path / "snapshot.pickle"
    block = {"address": 4096, "size": 1024, "requested_size": 1024, "state": "active_allocated", "frames": []}
    segment = {"device": 0, "address": 4096, "total_size": 1024, "stream": 0, "blocks": [block]}
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[]]}))
    (recording,) = read_memory(path)
    (warning,) = recording.warnings
    assert "no history: it shows memory when it was written, not the peak" in warning
    (found,) = [one for one in analyze_memory([(0, recording, None)]).findings if one.id == "unattributed"]
    assert "has no history" in found.message


def test_missing_file(tmp_path: Path):
    with pytest.raises(SnapshotError, match=r"none.pickle: cannot be read: No such file"):
        read_memory(tmp_path / "none.pickle")


@pytest.mark.real_data
def test_every_real_snapshot_ends_with_what_its_blocks_say(real_data: Path):
    """The history's last total equals the allocated blocks, the reserved total the segments: two accounts."""
    files = sorted((real_data / "snapshots").rglob("*.pickle"))
    assert len(files) >= 6
    for path in files:
        (recording,) = read_memory(path)
        blocks = recording.blocks
        held = blocks.take(blocks.state.equals("allocated"))
        assert totals(recording)[-1] == held.requested.sum(), path
        assert recording.warnings == (), path
        if path.name != "generated_by_mosaic.pickle":  # whose blocks do not fill its segments
            assert reserved(recording)[-1] == blocks.size.sum(), path
        assert min(totals(recording)) >= 0


def test_a_snapshot_packed_with_gzip_reads_as_it_is(tmp_path: Path) -> None:
    plain = Training().get("x", 900).write(tmp_path / "snapshot.pickle")
    packed = tmp_path / "snapshot.pickle.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    (found,), (expected,) = read_memory(packed), read_memory(plain)
    assert found.allocations.size.tolist() == expected.allocations.size.tolist()
    whole = of_job(open_job(packed)).ranks[0].peak.allocated_bytes
    assert whole == of_job(open_job(plain)).ranks[0].peak.allocated_bytes > 0
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(SnapshotError, match="cannot be read"):
        read_memory(packed)
    packed.write_bytes(gzip.compress(bytes(64 << 20)))
    with pytest.raises(SnapshotError, match="grows more than 100-fold"):
        read_memory(packed)
