"""Python lines of the model and its loss, by what they compute.

The recorder looks at the training's thread every few milliseconds. An operator that runs during a look is of
the line seen; the time of all operators of one name in modules of one name is divided among their lines in
proportion to the looks. Brief operators that no look found, views above all, are of the line of the operator
after them; others that no look found are of no known line. Backward is divided among the forward operators
that its nodes are named after, in proportion to their time.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.layers import SITE
from fsdp2prof.analyzers.phases import find_rows, is_outside, next_phase
from fsdp2prof.analyzers.steps import mean
from fsdp2prof.analyzers.trace.accounting import outermost
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.analyzers.trace.script import LOOK_NS
from fsdp2prof.results.trace import LineRow
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings
from fsdp2prof.tables.trace import EventTable

_NODE = re.compile(r"autograd::engine::evaluate_function: (\w+?)Backward\d*")
_WRAPPERS = ("autograd::", "c10d::")
_SHOWN = 20
_SHORT = 0.001
"""Fraction of a step below which a line is left out."""
_LATE_NS = 100_000
"""Time after an operator, and at most half of its own, in which a look may still be of it: Python's lock
delays looks until one ends."""
_AFTER = 3
"""Operators in a row that no look found."""
_BRIEF = 0.01
"""Fraction of forward and loss below which looks are expected to miss an operator."""
_LEAST, _LEAST_ON_DEVICE = 2, 8
"""Looks, all ranks and steps together, below which a line may be a coincidence. A device's work is found by
its launch alone, which is short."""

Alike = tuple[str, str]
"""Name of an operator, and of the modules that it runs in, without numbers."""


@dataclass(slots=True)
class LineSum:
    """Operators of one name in modules of one name, on one rank."""

    forward_ns: int = 0
    backward_ns: float = 0.0
    looks: Counter[str] = field(default_factory=Counter)
    """Line -> looks that found it in one of these operators."""
    followed_by: Alike | None = None
    """Operators that most often come next."""


LineSums = dict[Alike, LineSum]


def line_sums(tables: RankTables) -> LineSums:
    """Sum what the steps of a rank compute in forward, loss and backward; nothing without looks."""
    lines, events = tables.sighted.lines, tables.trace.events
    rows = _asked_for(tables) if len(lines.start_ns) else np.empty(0, dtype=np.int64)
    if not len(rows):
        return {}
    alike, keys = _alike(tables, rows)
    sums = [LineSum() for _ in keys]
    spent = _inside(tables, rows)
    for key, ns in enumerate(np.bincount(alike, weights=spent, minlength=len(keys)).tolist()):
        sums[key].forward_ns = int(ns)
    looks = 1 + (lines.end_ns - lines.start_ns) // LOOK_NS
    look = np.repeat(np.arange(len(looks)), looks)
    time = lines.start_ns[look] + LOOK_NS * (
        np.arange(len(look)) - np.repeat(np.cumsum(looks) - looks, looks)
    )
    at = np.searchsorted(events.start_ns[rows], time, side="right") - 1
    start, end = events.start_ns[rows[at]], events.end_ns[rows[at]]
    found = (at >= 0) & (time <= end + np.minimum(_LATE_NS, (end - start) // 2))
    for key, line in zip(alike[at[found]].tolist(), lines.line.take(look[found]).to_list(), strict=True):
        if line is not None:
            sums[key].looks[_place(line)] += 1
    pairs = np.unique(np.stack([alike[:-1], alike[1:]]), axis=1, return_counts=True)
    for (key, following), _ in sorted(
        zip(pairs[0].T.tolist(), pairs[1].tolist(), strict=True), key=lambda one: one[1]
    ):
        sums[key].followed_by = keys[following]
    _add_backward(tables, rows, alike, spent, sums)
    return dict(zip(keys, sums, strict=True))


def _asked_for(tables: RankTables) -> IntArray:
    """Return the outermost operators of forward and loss, on the one thread that runs them, by start."""
    events, phases, steps = tables.trace.events, tables.phases, tables.analysed
    threads = intervals.distinct(phases.thread[phases.phase.equals("forward")])
    if len(threads) != 1:
        return np.empty(0, dtype=np.int64)
    operators = (events.thread == threads[0]) & _are_operators(events)
    rows = np.flatnonzero(operators)
    inside = intervals.containing(steps.start_ns, steps.end_ns, events.start_ns[rows]) >= 0
    rows = outermost(events, rows[inside])
    start = events.start_ns[rows]
    phase = phases.phase.lookup(find_rows(phases, events.thread[rows], start))
    of_loss = is_outside(phase) & next_phase(phases, start).equals("backward")
    return rows[phase.equals("forward") | of_loss]


def _are_operators(events: EventTable) -> BoolArray:
    named = events.name.matches(lambda name: "::" in name and not name.startswith(_WRAPPERS))
    return events.category.equals("cpu_op") & named


def _alike(tables: RankTables, rows: IntArray) -> tuple[IntArray, list[Alike]]:
    events, phases = tables.trace.events, tables.phases
    names = events.name.take(rows)
    fqn = phases.fqn.lookup(find_rows(phases, events.thread[rows], events.start_ns[rows]))
    width = len(fqn.values) + 1
    codes, alike = np.unique(names.codes.astype(np.int64) * width + fqn.codes + 1, return_inverse=True)
    folded: dict[Alike, int] = {}
    at = [
        folded.setdefault(
            (names.values[code // width], _folded(fqn.values[code % width - 1] if code % width else "")),
            len(folded),
        )
        for code in codes.tolist()
    ]
    return np.array(at, dtype=np.int64)[alike], list(folded)


def _folded(fqn: str) -> str:
    return re.sub(r"\d+", "*", fqn)


def _inside(tables: RankTables, rows: IntArray) -> IntArray:
    """Return the time of the work that each operator asks for: of its kernels on a device."""
    work, events = tables.work, tables.trace.events
    mine = np.flatnonzero(~work.is_fsdp & ~work.is_memcpy & (work.thread == events.thread[rows[0]]))
    at = intervals.containing(events.start_ns[rows], events.end_ns[rows], work.launch_ns[mine])
    spent = np.zeros(len(rows), dtype=np.int64)
    np.add.at(spent, at[at >= 0], (work.end_ns - work.start_ns)[mine[at >= 0]])
    return spent


def _add_backward(
    tables: RankTables, rows: IntArray, alike: IntArray, spent: IntArray, sums: list[LineSum]
) -> None:
    """Divide the work of each kind of autograd's nodes among the operators that created such nodes."""
    nodes = _time_of_nodes(tables)
    if not nodes:
        return
    events = tables.trace.events
    asked = {name for name, _ in nodes}
    made = np.flatnonzero(
        (events.thread == events.thread[rows[0]])
        & events.category.equals("cpu_op")
        & events.name.matches(lambda name: _plain(name.rpartition("::")[2]) in asked)
    )
    holder = intervals.containing(events.start_ns[rows], events.end_ns[rows], events.start_ns[made])
    made, holder = made[holder >= 0], holder[holder >= 0]
    fqn = tables.phases.fqn.lookup(find_rows(tables.phases, events.thread[made], events.start_ns[made]))
    shares: dict[Alike, Counter[int]] = defaultdict(Counter)
    names = events.name.take(made)
    for name, unit, key, weight in _summed(names, fqn, alike[holder], spent[holder] + 1):
        shares[_plain(name.rpartition("::")[2]), _folded(unit)][key] += weight
    anywhere: dict[str, Counter[int]] = defaultdict(Counter)
    for (name, _), share in shares.items():
        anywhere[name].update(share)
    for (name, unit), ns in nodes.items():
        share = shares.get((name, unit)) or anywhere[name]
        total = sum(share.values())
        for key, weight in share.items():
            sums[key].backward_ns += ns * weight / total


def _time_of_nodes(tables: RankTables) -> dict[Alike, int]:
    """Return the work inside autograd's nodes: by operator, as :func:`_plain` writes it, and module."""
    events, work = tables.trace.events, tables.work
    nodes = np.flatnonzero(events.name.matches(lambda name: _NODE.fullmatch(name) is not None))
    steps = tables.windows
    found: dict[Alike, int] = defaultdict(int)
    for thread in intervals.distinct(events.thread[nodes]):
        mine = nodes[events.thread[nodes] == thread]
        mine = mine[np.argsort(events.start_ns[mine], kind="stable")]
        ran = np.flatnonzero((work.thread == thread) & ~work.is_fsdp & ~work.is_memcpy)
        ran = ran[intervals.containing(steps.start_ns, steps.end_ns, work.start_ns[ran]) >= 0]
        at = intervals.containing(events.start_ns[mine], events.end_ns[mine], work.launch_ns[ran])
        ran, at = ran[at >= 0], at[at >= 0]
        names, fqn = events.name.take(mine[at]), tables.phases.fqn.lookup(work.phase_row[ran])
        spent = (work.end_ns - work.start_ns)[ran]
        for name, unit, _, ns in _summed(names, fqn, np.zeros(len(ran), dtype=np.int64), spent):
            node = _NODE.fullmatch(name)
            assert node is not None
            found[_plain(node[1]), _folded(unit)] += ns
    return found


def _summed(
    names: Strings, fqn: Strings, key: IntArray, weight: IntArray
) -> Iterator[tuple[str, str, int, int]]:
    """Yield the sum of the weights for each name, module and key that occur together."""
    width, most = len(fqn.values) + 1, int(key.max(initial=0)) + 1
    combined = (names.codes.astype(np.int64) * width + fqn.codes + 1) * most + key
    distinct, place = np.unique(combined, return_inverse=True)
    sums = np.bincount(place, weights=weight, minlength=len(distinct))
    for code, total in zip(distinct.tolist(), sums.tolist(), strict=True):
        where, one = divmod(code, most)
        name, unit = divmod(where, width)
        yield names.values[name], fqn.values[unit - 1] if unit else "", one, int(total)


def _plain(name: str) -> str:
    """``_softmax``, ``SoftmaxBackward0`` without its ending -> ``softmax``."""
    return name.replace("_", "").lower()


def _place(line: str) -> str:
    """Leave out what a line calls, which differs from look to look."""
    site = SITE.fullmatch(line)
    if site is None or not site["call"]:
        return line
    return line.partition("() (")[2].removesuffix(")")


def line_rows(ranks: Iterable[LineSums], windows: int, step_ns: float, *, on_device: bool) -> list[LineRow]:
    """Combine ranks: means over ``windows``, longest first, at most 20."""
    total: LineSums = {}
    for rank in ranks:
        for key, one in rank.items():
            entry = total.setdefault(key, LineSum(followed_by=one.followed_by))
            entry.forward_ns += one.forward_ns
            entry.backward_ns += one.backward_ns
            entry.looks += one.looks
    forward: defaultdict[str, float] = defaultdict(float)
    backward: defaultdict[str, float] = defaultdict(float)
    looks: Counter[str] = Counter()
    brief_ns = _BRIEF * sum(one.forward_ns for one in total.values())
    for one in total.values():
        looks += one.looks
        votes = _votes(one, total, brief_ns)
        for line, count in votes.items():
            share = count / sum(votes.values())
            forward[line] += one.forward_ns * share
            backward[line] += one.backward_ns * share
    rows = [
        LineRow(
            line=line,
            forward_ns=mean(forward[line], windows),
            backward_ns=mean(backward[line], windows),
            step_frac=(forward[line] + backward[line]) / windows / step_ns,
        )
        for line, count in looks.items()
        if count >= (_LEAST_ON_DEVICE if on_device else _LEAST)
    ]
    rows = [row for row in rows if row.step_frac >= _SHORT]
    return sorted(rows, key=lambda row: (-row.step_frac, row.line))[:_SHOWN]


def _votes(one: LineSum, total: Mapping[Alike, LineSum], brief_ns: float) -> Counter[str]:
    """Return the looks at some operators, or at those after them if they are too brief for any."""
    for _ in range(_AFTER):
        if one.looks or one.followed_by is None or one.forward_ns > brief_ns:
            break
        one = total[one.followed_by]
    return one.looks
