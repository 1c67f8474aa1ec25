"""What the script did at an instant of the host: a loop, work outside of training, checks of gradients."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.phases import find_rows
from fsdp2prof.analyzers.trace.loops import find_loops
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.tables import BoolArray, IntArray, Strings

LOOK_NS = 5_000_000
"""The recorder's time between two looks."""
_NEAR_NS = 4 * LOOK_NS
"""Time from the nearest look beyond which it says nothing: a busy machine delays looks."""
_LOOP, _OUTSIDE = 1, 2
WHY = (None, "loop", "outside", "outside_loop")
"""Why the script's own work took time: a loop of small operators, or work outside of training."""
ANOMALY = "anomaly"
HOOK = ", a hook)"
"""How a line ends that a module called, and not as its forward."""
_CHECK = "aten::_is_any_true"
"""What autograd calls on the NaNs of every gradient while anomaly detection is on
(torch/csrc/autograd/engine.cpp), and no script: ``torch.isnan(x).any()`` is ``aten::any``."""


class Script:
    """The script of one rank, as its operators and the recorder's looks at its thread show it."""

    def __init__(self, tables: RankTables) -> None:
        self._tables = tables
        self._loops = find_loops(tables)

    def at(
        self, time: IntArray, outside: BoolArray, *, looped: bool
    ) -> tuple[IntArray, IntArray, tuple[str | None, ...]]:
        """Say what the script did at some times of the host: a reason (of ``WHY``), a site and all sites.

        ``outside``: whether a time is in no forward, backward or optimizer. A loss is of training, too:
        backward follows it.
        """
        sighted, loops = self._tables.sighted, self._loops
        line, away = sighted.lines.nearest(time)
        seen = outside & (away <= _NEAR_NS)
        site = np.where(seen, len(loops.site.values) + sighted.lines.line.lookup(line).codes, -1)
        reason = np.zeros(len(time), dtype=np.int64)
        if looped:
            at = intervals.containing(loops.start_ns, loops.end_ns, time)
            reason[at >= 0] = _LOOP
            site = np.where(site < 0, loops.site.lookup(at).codes, site)
        hooked = (away <= _NEAR_NS) & sighted.lines.line.lookup(line).matches(_is_hook) & ~outside
        site = np.where(hooked, len(loops.site.values) + sighted.lines.line.lookup(line).codes, site)
        in_module = seen & (sighted.callers.nearest(time)[1] <= away)
        reason[outside & (site >= 0) & ~in_module & ~self._before_backward(time)] += _OUTSIDE
        reason[hooked] = _OUTSIDE
        return reason, site, (*loops.site.values, *sighted.lines.line.values)

    def gradient_checks(self) -> list[tuple[int, int]]:
        """Return step and count of the checks that anomaly detection makes of gradients."""
        tables = self._tables
        events, phases, steps = tables.trace.events, tables.phases, tables.analysed
        rows = np.flatnonzero(events.name.equals(_CHECK) & (events.thread >= 0))
        phase = phases.phase.lookup(find_rows(phases, events.thread[rows], events.start_ns[rows]))
        rows = rows[phase.equals("backward")]
        at = intervals.containing(steps.start_ns, steps.end_ns, events.start_ns[rows])
        return list(Counter(steps.step[at[at >= 0]].tolist()).items())

    def _before_backward(self, time: IntArray) -> BoolArray:
        """Whether backward is the next phase of the host."""
        starts, backward = self._starts
        return np.append(backward, False)[np.searchsorted(starts, time, side="right")]

    @cached_property
    def _starts(self) -> tuple[IntArray, BoolArray]:
        phases = self._tables.phases
        rows = np.flatnonzero(~is_outside(phases.phase))
        rows = rows[np.argsort(phases.start_ns[rows], kind="stable")]
        return phases.start_ns[rows], phases.phase.take(rows).equals("backward")


def _is_hook(line: str) -> bool:
    return line.endswith(HOOK)


def is_outside(phase: Strings) -> BoolArray:
    """Whether each time is in no forward, backward or optimizer."""
    return ~phase.matches(lambda name: name in ("forward", "backward", "optimizer"))
