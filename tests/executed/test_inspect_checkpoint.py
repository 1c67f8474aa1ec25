"""``inspect checkpoint``: what torch writes, read without the unpickler; and what is spoiled or hostile."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import written_checkpoint
from support.cli import call

from fsdp2prof.analyzers.sharding.checkpoint import map_checkpoint
from fsdp2prof.errors import InputError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.sharding_table import shard_model
from fsdp2prof.readers.checkpoint import METADATA_FILE, ClassName, Record, load_records, read_checkpoint
from fsdp2prof.tables.sharding import CheckpointTable, StoredChunk, StoredTensor

FACTORY = "support.linear_model:factory"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state: dict[str, object] = {
        "model": {"weight": torch.randn(3, 5), "bias": torch.zeros(3, dtype=torch.bfloat16)},
        "optim": {"state": {"weight": {"exp_avg": torch.zeros(3, 5)}}},
        "step": 7,
    }
    return written_checkpoint(tmp_path_factory.mktemp("dcp") / "step-7", state)


def test_what_torch_wrote_is_read_without_the_unpickler(written: Path) -> None:
    found = map_checkpoint(read_checkpoint(written))
    shapes = {one.name: (one.shape, one.dtype, one.bytes, one.covered) for one in found.entries}
    assert shapes == {
        "model.weight": ([3, 5], "float32", 60, True),
        "model.bias": ([3], "bfloat16", 6, True),
        "optim.state.weight.exp_avg": ([3, 5], "float32", 60, True),
        "step": (None, None, None, None),
    }
    assert {one.name: one.state for one in found.files} == {"__0_0.distcp": "whole"}
    assert found.bytes == (written / "__0_0.distcp").stat().st_size


def test_files_that_are_cut_or_gone_are_named(written: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / METADATA_FILE).write_bytes((written / METADATA_FILE).read_bytes())
    gone = map_checkpoint(read_checkpoint(copy))
    assert [one.state for one in gone.files] == ["missing"]
    (copy / "__0_0.distcp").write_bytes((written / "__0_0.distcp").read_bytes()[:-9])
    assert [one.state for one in map_checkpoint(read_checkpoint(copy)).files] == ["truncated"]


class Boxes:
    """Cuts of a 6 x 4 tensor."""

    def __init__(self, *boxes: tuple[int, int, int, int]) -> None:
        self.chunks = tuple(
            StoredChunk(offsets=box[:2], sizes=box[2:], file=None, offset=0, length=0) for box in boxes
        )

    def covered(self) -> bool | None:
        entry = StoredTensor(name="t", shape=(6, 4), dtype="float32", chunks=self.chunks)
        table = CheckpointTable(path="", version=None, entries=(entry,), files={})
        return map_checkpoint(table).entries[0].covered


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 6), st.integers(1, 4)), max_size=4
    )
)
def test_pieces_fill_a_tensor_if_every_element_is_in_one(boxes: list[tuple[int, int, int, int]]) -> None:
    count = torch.zeros(12, 8, dtype=torch.int64)
    for row, column, rows, columns in boxes:
        count[row : row + rows, column : column + columns] += 1
    whole = torch.zeros_like(count)
    whole[:6, :4] = 1
    assert Boxes(*boxes).covered() is torch.equal(count, whole)


@pytest.mark.parametrize(
    "boxes",
    [
        [(0, 0, 4, 4), (4, 0, 2, 4)],
        [(0, 0, 3, 2), (0, 2, 3, 2), (3, 0, 3, 2), (3, 2, 3, 2)],
        [(0, 0, 6, 4), (6, 0, 0, 4)],
    ],
)
def test_shards_of_one_and_two_dimensions_and_empty_ones_fill_it(
    boxes: list[tuple[int, int, int, int]],
) -> None:
    assert Boxes(*boxes).covered() is True


def test_beside_a_model(tmp_path: Path) -> None:
    """Of four weights one is not there, one has another shape, one another dtype; one more is unknown."""
    weights = {f"layers.{i}.weight": torch.zeros(64, 64) for i in range(2)} | {
        "head.weight": torch.zeros(4, 64)
    }
    weights |= {"layers.1.weight": torch.zeros(64, 64, dtype=torch.bfloat16), "other": torch.zeros(1)}
    state = {"app": {"model": weights, "optim": {"state": {"head.weight": {"exp_avg": torch.zeros(4, 64)}}}}}
    model = shard_model(ModelSpec(source=FACTORY), MeshSpec(dp_shard=2), PolicySpec(seq_len=4))
    found = map_checkpoint(read_checkpoint(written_checkpoint(tmp_path / "dcp", state)), model).model
    assert found is not None
    assert (found.prefix, found.parameters, found.matched, found.with_optimizer_state) == (
        "app.model.",
        4,
        1,
        1,
    )
    assert {one.name: (one.kind, one.stored, one.expected) for one in found.mismatches} == {
        "layers.2.weight": ("missing", None, "[64, 64] float32"),
        "layers.1.weight": ("dtype", "[64, 64] bfloat16", "[64, 64] float32"),
        "head.weight": ("shape", "[4, 64] float32", "[3, 64] float32"),
        "app.model.other": ("unexpected", "[1] float32", None),
    }


class Payload:
    """Unpickled by pickle, it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path, str]]:
        return Path.write_text, (self.path, "ran")


def test_nothing_in_the_metadata_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps({"a": Payload(marker)}, protocol=4))
    with pytest.raises(InputError, match="not the metadata"):
        read_checkpoint(tmp_path)
    assert not marker.exists()
    loaded = load_records(pickle.dumps(Payload(marker), protocol=4))
    assert isinstance(loaded, Record)
    assert isinstance(loaded.kind, (ClassName, Record))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04.",
        b"\x80\x04" + b"(" * 100_000 + b"t" * 100_000 + b".",
        b"\x80\x04" + b"]" * 100_000 + b".",
        b"\x80\x04)" + b"\x85" * 500 + b".",
        b"\x80\x04r\xff\xff\xff\xff.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"cos\nsystem\n(S'true'\ntR.",
    ],
    ids=["empty", "no value", "nested", "many", "tuples", "memo", "long", "text protocol"],
)
def test_streams_made_to_harm_are_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / METADATA_FILE).write_bytes(content)
    with pytest.raises(InputError) as refused:
        read_checkpoint(tmp_path)
    assert "\n" not in str(refused.value)


def test_spoiled_metadata_is_refused_or_read(written: Path, tmp_path: Path) -> None:
    original, dice = (written / METADATA_FILE).read_bytes(), random.Random(0)
    for _ in range(200):
        spoiled = bytearray(original)
        for _ in range(dice.randint(1, 4)):
            spoiled[dice.randrange(len(spoiled))] = dice.randrange(256)
        (tmp_path / METADATA_FILE).write_bytes(spoiled)
        with contextlib.suppress(InputError):
            map_checkpoint(read_checkpoint(tmp_path))


def test_metadata_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """Nobody writes to the pipe: reading it would never end."""
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(InputError, match="not a file"):
        read_checkpoint(tmp_path)


def test_a_folder_without_metadata_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    call(capfd, "inspect", "checkpoint", tmp_path).refused(METADATA_FILE, "unfinished")
    call(capfd, "inspect", "checkpoint", tmp_path / "none").refused("not a folder")
