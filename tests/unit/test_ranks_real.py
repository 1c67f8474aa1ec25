"""Ranks compared on real traces, against the same numbers taken straight from the JSON."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.job.job_files import open_job

pytestmark = pytest.mark.real_data


def kernels(path: Path) -> list[tuple[float, float, str, int]]:
    """(start us, end us, kind, elements) of a file's NCCL kernels in order of start, kinds from metadata."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found = [e for e in events if e.get("cat") == "kernel" and "nccl" in e["name"]]
    return sorted(
        (
            e["ts"],
            e["ts"] + e["dur"],
            e["args"].get("Collective name", e["name"]),
            e["args"].get("In msg nelems", 0),
        )
        for e in found
    )


def test_four_ranks_with_metadata(real_data: Path) -> None:
    """DDP on MI300: per rank 6 broadcasts and 15 all-reduces; rank 3 is last to all of them."""
    folder = real_data / "traces" / "ddp4-mi300"
    ranks = [kernels(folder / f"rank{i}.json.gz") for i in range(4)]
    assert [len(rank) for rank in ranks] == [21] * 4
    found = analyze_trace(open_job(folder), workers=1)
    cross = found.cross_rank
    assert (cross.match_key, cross.matched, cross.unmatched) == ("order", 21, 0)
    assert found.attribution.collectives == 84

    raw_wait_us = [0.0] * 4
    for together in zip(*ranks, strict=True):
        assert len({(kind, elements) for _, _, kind, elements in together}) == 1
        latest = max(start for start, *_ in together)
        for i, (start, end, *_) in enumerate(together):
            raw_wait_us[i] += min(latest, end) - start
    offset_us = max(abs(ns) for ns in cross.clock_offset_ns.values()) / 1e3
    assert offset_us < 11, "the ranks share a host: what is left is the spread of their ends"
    for i in range(4):
        assert cross.wait_ns[str(i)] / 1e3 == pytest.approx(raw_wait_us[i], abs=21 * 2 * offset_us)
    assert cross.wait_ns["3"] == 0
    assert cross.stragglers[0].rank == 3
    assert sum(cross.wait_caused_ns.values()) == sum(cross.wait_ns.values())
    assert found.ledger is not None
    late = next(entry for entry in found.ledger.entries if entry.id == "straggler")
    # The hosts of ranks 1 and 2 stop for their devices for 0.2 ms per step: their launches are the limit.
    assert (late.rank, late.told) == (3, False)
    assert late.remedy is not None
    assert late.remedy.gain_ns is not None
    assert late.frac > 0.2
    assert late.remedy.gain_ns < 0.2 * late.ns

    reduced = 4 * sum(elements for _, _, kind, elements in ranks[0] if kind == "allreduce")
    rows = {row.op: row for row in cross.groups}
    assert (rows["all_reduce"].count, rows["broadcast"].count) == (15, 6)
    assert rows["all_reduce"].transfer_ns is not None
    busbw = reduced * 2 * 3 / 4 / (rows["all_reduce"].transfer_ns / 1e9)
    assert rows["all_reduce"].busbw_bytes_per_s == pytest.approx(busbw)
    assert (rows["broadcast"].transfer_ns, rows["broadcast"].busbw_bytes_per_s) == (None, None)


def test_eight_ranks_without_metadata_are_matched_by_verified_order(real_data: Path) -> None:
    folder = real_data / "traces" / "dlrm8-v100"
    ranks = [kernels(path) for path in sorted(folder.glob("worker*"))]
    assert [len(rank) for rank in ranks] == [8] * 8
    cross = analyze_trace(open_job(folder), workers=1).cross_rank
    assert (cross.match_key, cross.matched, cross.unmatched) == ("order", 8, 0)
    assert max(abs(ns) for ns in cross.clock_offset_ns.values()) <= 2_000, "one host, whole microseconds"
    ends = [[end for _, end, *_ in together] for together in zip(*ranks, strict=True)]
    spreads = sorted(max(each) - min(each) for each in ends)
    assert cross.end_spread_ns is not None
    assert cross.end_spread_ns <= 1e3 * spreads[4]
    assert cross.stragglers[0].rank == 7


def test_a_subset_of_ranks_is_compared_among_itself(real_data: Path) -> None:
    cross = analyze_trace(open_job(real_data / "traces" / "ddp4-mi300", ranks=[0, 3]), workers=1).cross_rank
    assert (cross.matched, cross.unmatched) == (21, 0)
    assert sorted(cross.wait_ns) == ["0", "3"]
