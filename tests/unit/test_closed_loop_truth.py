"""The synthetic answers themselves, by hand: a closed loop proves nothing if they are wrong.

Durations (ns) of the default schedule: a root of 100,003 forward and 200,009 backward, all-gather 150,001;
three layers of 300,017 forward, 600,031 backward, all-gather 120,013; reduce-scatters 180,007; FSDP copies
7,001 each; input copy 40,009; optimizer 800,003.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic import Schedule, record, transformer, truth_of, write

COPY = 7_001
BASE = Schedule(roots=(transformer(3),))


def test_breakdown_of_a_step_by_hand() -> None:
    """Root and first layer are gathered with nothing to hide behind; the last two reductions wait at the end.

    - The root's all-gather is in the open but for the first layer's copy-in beside it.
    - The first layer's hides behind the root's copy-out and the half of the root's forward before it.
    - The first layer's reduce-scatter hides behind half of the root's backward, the root's behind nothing.
    - Copies in the open: 7 copy-outs and 4 chunk-cats on the compute stream, the copy-ins of the root and of
      the first layer; the other 5 copy-ins run beside compute.
    """
    (recording,) = record(BASE)
    truth = truth_of(recording)
    root_all_gather = 150_001 - COPY
    first_all_gather = 120_013 - COPY - 50_002
    first_reduce_scatter = 180_007 - 100_004
    parts = {
        "compute": 100_003 + 200_009 + 3 * (300_017 + 600_031) + 800_003,
        "fsdp_copy": (7 + 4 + 2) * COPY,
        "exposed_all_gather": root_all_gather + first_all_gather,
        "exposed_reduce_scatter": first_reduce_scatter + 180_007,
        "exposed_all_reduce": 0,
        "exposed_other_comm": 0,
        "exposed_memcpy": 40_009,
        "idle": 0,
    }
    assert [step.breakdown_ns for step in truth.steps.values()] == [parts, parts]
    rows = truth.groups
    assert rows[3, "", "forward", "all_gather"].exposed_ns == root_all_gather
    assert rows[3, "layers.0", "forward", "all_gather"].exposed_ns == first_all_gather
    assert rows[3, "layers.0", "backward", "reduce_scatter"].exposed_ns == first_reduce_scatter
    assert rows[3, "layers.2", "backward", "all_gather"].exposed_ns == 0


def test_stall_includes_what_delays_the_collective() -> None:
    """The compute stream is idle from the end of the input copy: it waits for the copy-in as well."""
    (recording,) = record(BASE)
    assert truth_of(recording).groups[3, "", "forward", "all_gather"].stall_ns == COPY + 150_001


def test_payloads_and_wire_bytes_by_hand() -> None:
    """6M and 4M elements: gathered in bf16 (2 B), reduced in fp32 (4 B), over 4 ranks (3/4 on the wire)."""
    (recording,) = record(BASE)
    rows = truth_of(recording).groups
    root = rows[3, "", "forward", "all_gather"]
    layer = rows[3, "layers.1", "backward", "reduce_scatter"]
    assert (root.payload_bytes, root.wire_bytes) == (12_000_000, 9_000_000)
    assert (layer.payload_bytes, layer.wire_bytes) == (16_000_000, 12_000_000)


def test_hsdp_all_reduces_the_shard() -> None:
    """2 x 2 ranks: the shard of 2M fp32 elements crosses twice, half of it each way."""
    (recording,) = record(Schedule(roots=(transformer(3),), shard=2, replicas=2))
    row = truth_of(recording).groups[3, "layers.1", "backward", "all_reduce"]
    assert (row.payload_bytes, row.wire_bytes) == (8_000_000, 8_000_000)


@pytest.mark.parametrize(
    ("schedule", "all_gathers", "reduce_scatters"),
    [
        (BASE, 4 + 3, 4),
        (Schedule(roots=(transformer(3, reshard=False),)), 4, 4),
        (Schedule(roots=(transformer(3),), microbatches=2), 2 * (4 + 3), 2 * 4),
        (Schedule(roots=(transformer(3),), microbatches=2, sync_every_microbatch=False), 2 * (4 + 3), 4),
        (Schedule(roots=(transformer(3),), checkpoint="outside"), 4 + 3, 4),
    ],
)
def test_number_of_collectives_in_a_step(schedule: Schedule, all_gathers: int, reduce_scatters: int) -> None:
    (recording,) = record(schedule)
    ops = [c.op for c in recording.timeline.collectives if c.step == 3]
    assert (ops.count("all_gather"), ops.count("reduce_scatter")) == (all_gathers, reduce_scatters)


def test_a_rank_waits_for_the_last_one_and_all_end_together() -> None:
    ranks = record(BASE, BASE.scaled(2, "layers.0"))
    for mine, other in zip(*(r.timeline.collectives for r in ranks), strict=True):
        assert mine.end == other.end
        assert mine.latest_start == max(mine.start, other.start)
    assert sum(c.latest_start - c.start for c in ranks[0].timeline.collectives) > 1_000_000


def test_times_are_written_without_loss(tmp_path: Path) -> None:
    (recording,) = record(BASE, skews=[123_456_789])
    events = json.loads(write(recording, tmp_path / "trace.json").read_text(), parse_float=str)["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    first = [int(e["ts"].replace(".", "")) for e in kernels]
    expected = [a.start for a in recording.timeline.device if a.category == "kernel"]
    assert [t - first[0] for t in first] == [t - expected[0] for t in expected]
