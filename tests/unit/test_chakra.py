"""Chakra traces, read back by a decoder of our own: numbers of fields as in the schema."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import call
from synthetic import Schedule, record, transformer, write_run

import fsdp2prof

pytest.importorskip("google.protobuf", reason="protobuf is not installed")

RANKS, STEPS = 4, 2
ALL_GATHER, REDUCE_SCATTER = 2, 7
COMPUTE, COLLECTIVE = 4, 7


def varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at


def fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field; packed and single integers as they stand."""
    at = 0
    while at < len(content):
        key, at = varint(content, at)
        value: Any
        if key & 7 == 0:
            value, at = varint(content, at)
        else:
            assert key & 7 == 2
            size, at = varint(content, at)
            value, at = content[at : at + size], at + size
        yield key >> 3, value


def messages(path: Path) -> Iterator[bytes]:
    content, at = path.read_bytes(), 0
    while at < len(content):
        size, at = varint(content, at)
        yield content[at : at + size]
        at += size


def packed(content: bytes) -> list[int]:
    values, at = [], 0
    while at < len(content):
        value, at = varint(content, at)
        values.append(value)
    return values


def node(content: bytes) -> dict[str, Any]:
    read: dict[str, Any] = {"id": 0, "waits": [], "duration": 0}
    for number, value in fields(content):
        if number == 10:
            attribute = dict(fields(value))
            [kind] = set(attribute) - {1}
            assert kind in (9, 27, 29), "int64, bool, string"
            read[attribute[1].decode()] = attribute[kind]
        elif number == 5:
            read["waits"] += packed(value) if isinstance(value, bytes) else [value]
        else:
            read[{1: "id", 2: "name", 3: "type", 6: "start", 7: "duration"}[number]] = value
    return read


def nodes(path: Path) -> list[dict[str, Any]]:
    about, *rest = messages(path)
    assert 1 in dict(fields(about)), "the version"
    return [node(content) for content in rest]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    schedule = Schedule(roots=(transformer(3),), steps=STEPS)
    job = record(*[schedule] * RANKS, skews=(0, 52_000, -9_000, 0))
    return write_run(job, tmp_path_factory.mktemp("chakra") / "run")


@pytest.fixture(scope="module")
def written(run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    from fsdp2prof.workflows.exports.chakra import export_chakra
    from fsdp2prof.workflows.job.job_files import open_job

    folder = tmp_path_factory.mktemp("written") / "chakra"
    made = export_chakra(open_job(run), folder)
    read = [nodes(folder / f"workload.{rank}.et") for rank in range(RANKS)]
    assert made.nodes == sum(map(len, read))
    assert json.loads((folder / "comm_groups.json").read_text()) == {}
    return read


def test_every_node_waits_for_earlier_ones(written: list[list[dict[str, Any]]]) -> None:
    for rank in written:
        assert [one["id"] for one in rank] == list(range(len(rank)))
        for one in rank:
            assert all(0 <= other < one["id"] for other in one["waits"])
        alone = [one for one in rank if not one["waits"]]
        assert len(alone) == 1, "all but the first wait for something"


def test_collectives_are_the_recorded_ones(run: Path, written: list[list[dict[str, Any]]]) -> None:
    analysis = fsdp2prof.analyze_trace(run)
    for rank, read in enumerate(written):
        sent: Counter[tuple[int, int]] = Counter()
        for one in read:
            if one["type"] == COLLECTIVE:
                sent[one["comm_type"], 0] += 1
                sent[one["comm_type"], 1] += one["comm_size"]
                assert one["is_cpu_op"] == 0
                assert "pg_name" not in one, "all ranks"
        for op, number in (("all_gather", ALL_GATHER), ("reduce_scatter", REDUCE_SCATTER)):
            rows = [row for row in analysis.groups if (row.rank, row.op) == (rank, op)]
            assert sent[number, 0] == sum(row.count for row in rows) > 0
            payload = sum(row.payload_bytes or 0 for row in rows)
            given = payload // RANKS if op == "all_gather" else payload
            assert sent[number, 1] == given > 0


def test_played_back_it_takes_as_long_as_recorded(run: Path, written: list[list[dict[str, Any]]]) -> None:
    """The longest path leaves out latencies and gaps alone: shorter than the recording, never much."""
    analysis = fsdp2prof.analyze_trace(run)
    for rank, read in zip(analysis.ranks, written, strict=True):
        over: list[int] = []
        for one in read:
            over.append(max([over[other] for other in one["waits"]], default=0) + one["duration"])
        recorded = sum(step.duration_ns for step in rank.steps) / 1000
        assert 0.8 * recorded < max(over) <= 1.01 * recorded
        busy = sum(one["duration"] for one in read if one["type"] == COMPUTE and not one["is_cpu_op"])
        steps = [step.breakdown_ns for step in rank.steps]
        assert busy >= sum(part.compute + part.fsdp_copy for part in steps) // 1000, "streams overlap"


def test_what_a_simulation_lacks_is_refused(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "chakra"
    call(capfd, "export", "chakra", run, "--ranks", "1", "-o", target).refused("rank 0", "every rank")
    assert not target.exists()
    assert call(capfd, "export", "chakra", run, "-o", target).code == 0
    call(capfd, "export", "chakra", run, "-o", target).refused("add -f")


def test_groups_of_hsdp_are_numbered_alike_on_all_ranks(tmp_path: Path) -> None:
    """Two replicas of two shards: four groups, none of them all ranks; each collective names its own."""
    from fsdp2prof.workflows.exports.chakra import export_chakra
    from fsdp2prof.workflows.job.job_files import open_job

    schedule = Schedule(roots=(transformer(1),), steps=1, shard=2, replicas=2)
    run = write_run(record(*[schedule] * RANKS), tmp_path / "run")
    assert export_chakra(open_job(run), tmp_path / "chakra").groups == 4
    groups = json.loads((tmp_path / "chakra" / "comm_groups.json").read_text())
    assert sorted(groups) == ["1", "2", "3", "4"]
    pairs = {tuple(ranks) for ranks in groups.values()}
    assert len(pairs) == 4
    assert all(len(pair) == 2 for pair in pairs)
    for rank in range(RANKS):
        for one in nodes(tmp_path / "chakra" / f"workload.{rank}.et"):
            if one["type"] == COLLECTIVE:
                assert rank in groups[one["pg_name"].decode()]


def test_a_collective_of_an_unknown_group_is_written_as_the_time_it_took(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither the traces nor the collectives in them say which pairs of the four ranks talk."""
    schedule = Schedule(roots=(transformer(1),), steps=1, shard=2, replicas=2)
    run = write_run(record(*[schedule] * RANKS), tmp_path / "run")
    assert call(capfd, "export", "chakra", run, "-o", tmp_path / "known").err == ""
    for trace in run.glob("*_trace.json.gz"):
        content = gzip.decompress(trace.read_bytes())
        for where in (b'"pg_config"', b'"Process Group Ranks"'):
            content = content.replace(where, b'"left out"')
        trace.write_bytes(gzip.compress(content))
    said = call(capfd, "export", "chakra", run, "-o", tmp_path / "unknown")
    read = [nodes(tmp_path / name / "workload.0.et") for name in ("known", "unknown")]
    collectives = [sum(one["type"] == COLLECTIVE for one in each) for each in read]
    assert collectives[0] > 0
    assert collectives[1] == 0
    assert f"{RANKS * collectives[0]} collectives of a process group" in said.err
    assert [one["duration"] for one in read[0]] == [one["duration"] for one in read[1]]
