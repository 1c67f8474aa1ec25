"""Rates by op, process group and size."""

from __future__ import annotations

import numpy as np
import pytest
from support.traces import TraceBuilder

from fsdp2prof.analyzers.trace.analysis import bandwidth_rows
from fsdp2prof.analyzers.trace.rank_tables import rank_tables
from fsdp2prof.tables.trace import CollectiveTable

NCCL = "ncclDevKernel_Generic"


def collectives(*rows: tuple[str, int, int]) -> CollectiveTable:
    """(metadata name, bytes of the input, duration) on 4 ranks, one after the other."""
    trace = TraceBuilder()
    at = 1000
    for name, nbytes, duration in rows:
        trace.device(
            NCCL, at, at + duration, 10, collective=name, dtype="Byte", in_nelems=nbytes,
            group_size=4, process_group="1",
        )  # fmt: skip
        at += 10_000
    return rank_tables(trace.build()).collectives.table


def unmatched(table: CollectiveTable) -> np.ndarray:
    return np.full(len(table), -1, dtype=np.int64)


def rated(
    table: CollectiveTable, waits: np.ndarray | None = None, *, known: bool = True
) -> tuple[CollectiveTable, np.ndarray, np.ndarray]:
    """One rank's collectives, its waits, and whether all ranks of their group were compared."""
    return table, unmatched(table) if waits is None else waits, np.full(len(table), known)


def test_algbw_is_payload_and_busbw_wire_over_the_duration() -> None:
    table = collectives(("_allgather_base", 100, 200))
    (row,) = bandwidth_rows([rated(table)], peak_bus_bytes_per_s=4e9)
    assert (row.op, row.process_group, row.group_size, row.dtype) == ("all_gather", "1", 4, "uint8")
    assert (row.payload_bytes, row.count) == (400, 1)
    assert row.algbw_bytes_per_s == pytest.approx(400 / 200e-9)
    assert row.busbw_bytes_per_s == pytest.approx(300 / 200e-9)
    assert row.of_best_frac == 1
    assert row.of_peak_frac == pytest.approx(1.5 / 4)


def test_busbw_is_of_the_transfer_and_rates_are_medians_over_ranks() -> None:
    first = collectives(("allreduce", 800, 400), ("allreduce", 800, 200), ("allreduce", 80, 100))
    second = collectives(("allreduce", 800, 300))
    waits = np.array([300, 0, 0])
    large, small = bandwidth_rows([rated(first, waits), rated(second)])  # most bytes first
    assert (large.payload_bytes, large.count) == (800, 3)
    assert large.algbw_bytes_per_s == pytest.approx(800 / 300e-9)
    assert large.busbw_bytes_per_s == pytest.approx(1200 / 200e-9), "of 100, 200 and 300 ns"
    assert large.best_busbw_bytes_per_s == pytest.approx(1200 / 100e-9)
    assert large.of_best_frac == pytest.approx(0.5)
    assert (large.ranks, small.ranks) == ([0, 1], [0])
    assert small.busbw_bytes_per_s == pytest.approx(120 / 100e-9)
    assert small.of_best_frac == pytest.approx(1.2 / 12), "against the best of its op and group at any size"
    assert small.of_peak_frac is None


def test_a_broadcast_has_no_busbw_and_an_unknown_size_no_row() -> None:
    table = collectives(("broadcast", 64, 10), ("allreduce", -1, 10))
    (row,) = bandwidth_rows([rated(table)])
    assert (row.op, row.busbw_bytes_per_s, row.best_busbw_bytes_per_s, row.of_best_frac) == (
        "broadcast", None, None, None,
    )  # fmt: skip
    assert row.algbw_bytes_per_s == pytest.approx(6.4e9)
    assert bandwidth_rows([]) == []


def test_a_rate_that_may_be_waiting_is_held_against_nothing() -> None:
    table = collectives(("allreduce", 800, 400), ("allreduce", 800, 200))
    (row,) = bandwidth_rows([rated(table, known=False)], peak_bus_bytes_per_s=4e9)
    assert row.busbw_bytes_per_s == pytest.approx(4.5e9), "of 3 and 6 GB/s: a lower bound"
    assert (row.waits_known, row.of_best_frac, row.of_peak_frac) == (False, None, None)
    whole = np.array([False, True])
    (row,) = bandwidth_rows([(table, unmatched(table), whole)], peak_bus_bytes_per_s=4e9)
    assert row.waits_known
    assert row.busbw_bytes_per_s == pytest.approx(6e9)
    assert row.of_peak_frac == pytest.approx(1.5)
