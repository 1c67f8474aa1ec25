"""Phases merged into spans: of one thread, of two that overlap, of several steps."""

from __future__ import annotations

import numpy as np

from fsdp2prof.analyzers.memory.analysis import phase_spans
from fsdp2prof.tables.columns import Strings
from fsdp2prof.tables.trace import PhaseTable


def table(*rows: tuple[int, int, int, int, str | None]) -> PhaseTable:
    """Rows (thread, start, end, step, phase), sorted as phase tables are."""
    ordered = sorted(rows, key=lambda row: row[:2])
    thread, start, end, step = (np.array([row[i] for row in ordered], dtype=np.int64) for i in range(4))
    none = Strings.full(len(rows), None)
    return PhaseTable(
        thread=thread,
        start_ns=start,
        end_ns=end,
        step=step,
        fqn=none,
        phase=Strings.intern(row[4] for row in ordered),
        activity=none,
    )


def spans(*rows: tuple[int, int, int, int, str | None]) -> list[tuple[int, int, int | None, str]]:
    return [(s.start_ns, s.end_ns, s.step, s.phase) for s in phase_spans(table(*rows))]


def test_neighbours_of_one_phase_merge() -> None:
    found = spans((0, 0, 10, 1, "forward"), (0, 12, 20, 1, "forward"), (0, 20, 50, 1, "backward"))
    assert found == [(0, 20, 1, "forward"), (20, 50, 1, "backward")]


def test_the_next_phase_cuts_the_one_that_overlaps() -> None:
    """Backward on a second thread starts while the first one is still inside a forward label."""
    found = spans((0, 0, 30, 1, "forward"), (1, 20, 40, 1, "backward"), (0, 40, 45, 1, "optimizer"))
    assert found == [(0, 20, 1, "forward"), (20, 40, 1, "backward"), (40, 45, 1, "optimizer")]


def test_steps_stay_apart_and_other_has_no_span() -> None:
    found = spans(
        (0, 0, 10, 1, "forward"), (0, 10, 12, 1, "other"), (0, 12, 20, 2, "forward"), (0, 20, 21, -1, None)
    )
    assert found == [(0, 10, 1, "forward"), (12, 20, 2, "forward")]
    assert phase_spans(table()) == []
