"""What the script did at an instant of the host: a loop, work outside of training, checks of gradients.

Loops are stretches in which a short sequence of small operators repeats. A model repeats, too: its layers. A
sequence counts as a loop if it repeats more often than the FSDP unit that issues it has modules with
parameters; outside every unit, any repetition does. The repetition is found in the names of the outermost
operators, so it needs no stack; the line comes from the recorder's looks at the thread, put together over all
stretches of the same sequence.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.layers import SITE
from fsdp2prof.analyzers.phases import find_rows, is_outside, next_phase
from fsdp2prof.analyzers.recorded_groups import forwards_of_a_backward
from fsdp2prof.analyzers.trace.accounting import ATTENTION, PRODUCTS, outermost
from fsdp2prof.analyzers.trace.evaluation import graph_nodes
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.analyzers.trace.spans import loading, loading_rows
from fsdp2prof.backends import KERNEL_KINDS
from fsdp2prof.by_key import summed
from fsdp2prof.labels import qualified_fqn
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings, Table

LOOK_NS = 5_000_000
"""The recorder's time between two looks."""
_NEAR_NS = 4 * LOOK_NS
"""Time from the nearest look beyond which it says nothing: a busy machine delays looks."""
_LOOP, _OUTSIDE = 1, 2
WHY = (None, "loop", "outside", "outside_loop", *KERNEL_KINDS, "fsdp", "untrained", "repeated", "in_front",
       "loading", "before_update")  # fmt: skip
"""Reason of work's time: a loop of small operators, work outside training, a kind of compute, FSDP's own
work on the host, backward of a unit that no optimizer updates, a frozen model's forward of the same inputs, a
copy before other copies, creating a batch, or a pause that lasts into the optimizer, as clipping gradients on
the host does."""
FIRST_KIND, OF_FSDP, UNTRAINED, REPEATED, IN_FRONT, LOADING, BEFORE_UPDATE = (
    WHY.index(why)
    for why in (KERNEL_KINDS[0], "fsdp", "untrained", "repeated", "in_front", "loading", "before_update")
)
ANOMALY = "anomaly"
ONE_BY_ONE = "one_by_one"
FORWARDS = "forwards"
OF_FORWARD = frozenset(
    f"aten::{name}"
    for name in ("linear", "layer_norm", "group_norm", "batch_norm", "scaled_dot_product_attention", "conv1d",
                 "conv2d", "conv3d")
)  # fmt: skip
"""Operators that autograd's formulas never call: in backward, checkpoints run them again."""
REBUILT = "rebuilt"
_SEED = "aten::random_"
_NOT_OF_ONE = re.compile("_foreach_|_fused_|^aten::(?:view|view_as|alias|detach)$")
"""Operators of many tensors, and what ``to_local()`` calls."""
_CHECK = "aten::_is_any_true"
"""What autograd calls on the NaNs of every gradient while anomaly detection is on
(torch/csrc/autograd/engine.cpp), and no script: ``torch.isnan(x).any()`` is ``aten::any``."""


class Script:
    """The script of one rank, as its operators and the recorder's looks at its thread show it."""

    def __init__(self, tables: RankTables) -> None:
        self._tables = tables
        self._threads = list(_threads(tables))
        self._loops = find_loops(tables, self._threads)

    def at(
        self,
        time: IntArray,
        outside: BoolArray,
        *,
        looped: bool,
        named: BoolArray | None = None,
        placed: BoolArray | None = None,
    ) -> tuple[IntArray, IntArray, tuple[str | None, ...]]:
        """Describe the script's work at some times of the host: a reason (of ``WHY``), a site and all
        sites.

        ``outside``: whether a time is outside any forward, backward or optimizer. A loss is part of
        training, too: backward follows it, perhaps after the next forward. ``named`` times have a site
        wherever they are, and ``placed`` ones that of the loop around them.
        """
        sighted, loops = self._tables.sighted, self._loops
        line, away = sighted.lines.nearest(time)
        seen = (outside if named is None else outside | named) & (away <= _NEAR_NS)
        site = np.where(seen, len(loops.site.values) + sighted.lines.line.lookup(line).codes, -1)
        reason = np.zeros(len(time), dtype=np.int64)
        if looped:
            at = intervals.containing(loops.start_ns, loops.end_ns, time)
            reason[at >= 0] = _LOOP
            site = np.where(site < 0, loops.site.lookup(at).codes, site)
        elif placed is not None:
            at = intervals.containing(loops.start_ns, loops.end_ns, time)
            site = np.where(placed & (site < 0), loops.site.lookup(at).codes, site)
        hooked = (away <= _NEAR_NS) & sighted.lines.line.lookup(line).matches(_is_hook) & ~outside
        site = np.where(hooked, len(loops.site.values) + sighted.lines.line.lookup(line).codes, site)
        in_module = seen & (sighted.callers.nearest(time)[1] <= away)
        reason[outside & (site >= 0) & ~in_module & ~self._of_a_loss(time)] += _OUTSIDE
        reason[hooked] = _OUTSIDE
        reason[outside & (intervals.containing(*self._loading, time) >= 0)] = LOADING
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

    def operators_of_optimizers(self) -> list[tuple[int, int]]:
        """Return step and count of the operators in optimizers that each take one tensor.

        Nothing where they compute matrix products: such an optimizer works on each matrix by its nature.
        """
        tables = self._tables
        found: Counter[int] = Counter()
        for rows, place in self._threads:
            mine = rows[tables.phases.phase.lookup(place).equals("optimizer")]
            names = tables.trace.events.name.take(mine)
            if names.matches(_PRODUCTS.__contains__).any():
                return []
            mine = mine[~names.matches(lambda name: _NOT_OF_ONE.search(name) is not None)]
            at = intervals.containing(
                tables.analysed.start_ns, tables.analysed.end_ns, tables.trace.events.start_ns[mine]
            )
            found.update(tables.analysed.step[at[at >= 0]].tolist())
        return list(found.items())

    def forward_operators(self) -> list[tuple[int, int, int]]:
        """Return step and counts of operators that only a forward calls: in forward, again in backward."""
        tables = self._tables
        counts: dict[int, Counter[str]] = defaultdict(Counter)
        for rows, place in self._threads:
            only = tables.trace.events.name.take(rows).matches(OF_FORWARD.__contains__)
            mine, phase = rows[only], tables.phases.phase.lookup(place[only])
            at = intervals.containing(
                tables.analysed.start_ns, tables.analysed.end_ns, tables.trace.events.start_ns[mine]
            )
            for step, name in zip(tables.analysed.step[at].tolist(), phase.to_list(), strict=True):
                counts[step][name or ""] += 1
        return [(step, of["forward"], of["backward"]) for step, of in counts.items() if of["backward"]]

    def new_iterators(self) -> list[tuple[int, int, str | None]]:
        """Return step, count and line of the data loaders' iterators that are created in it.

        Each draws a seed for its workers before its first batch; batches draw none. The line is the most
        frequent one until that batch arrives.
        """
        tables = self._tables
        events = tables.trace.events
        found: list[tuple[int, str | None]] = []
        batches = loading_rows(tables.trace, tables.phases)
        batches = batches[np.argsort(tables.trace.labels.start_ns[batches], kind="stable")]
        asked, got = tables.trace.labels.start_ns[batches], tables.trace.labels.end_ns[batches]
        for rows, place in self._threads if len(batches) else ():
            drawn = events.name.take(rows).equals(_SEED) & is_outside(tables.phases.phase.lookup(place))
            start = events.start_ns[rows[drawn]]
            batch = np.append(got, 0)[np.searchsorted(asked, start)]
            lines = tables.sighted.lines.seen(start, np.maximum(batch, start + LOOK_NS))
            at = intervals.containing(tables.analysed.start_ns, tables.analysed.end_ns, start)
            found += zip(tables.analysed.step[at].tolist(), lines, strict=True)
        return [(step, count, site) for (step, site), count in Counter(found).items()]

    @cached_property
    def _loading(self) -> tuple[IntArray, IntArray]:
        """When the training got its batches."""
        found = loading(self._tables.trace, self._tables.phases)
        return found.start, found.end

    def _of_a_loss(self, time: IntArray) -> BoolArray:
        """Whether backward is the next phase of the host, or comes after the forwards of several losses."""
        before = next_phase(self._tables.phases, time).equals("backward")
        manifest = self._tables.manifest
        if manifest is None or forwards_of_a_backward(manifest) < 2:
            return before
        phases, nodes = self._tables.phases, graph_nodes(self._tables)
        ends = np.sort(phases.start_ns[phases.phase.matches(lambda name: name in ("backward", "optimizer"))])
        since = np.append(0, ends)[np.searchsorted(ends, time)]
        return before | (np.searchsorted(nodes, time) > np.searchsorted(nodes, since))


def _is_hook(line: str) -> bool:
    """Whether a module called this line, and not as its forward."""
    site = SITE.fullmatch(line)
    return site is not None and site["hook"] is not None


_REPEATS = 16
"""Times that a sequence repeats, from which on it is a loop."""
_SHORT = 4
"""Times from which on it is one if it computes nothing with parameters and comes back, ``_REPEATS`` times a
step in all: attention head by head, in every layer."""
_LONGEST = 64
"""Operators in one pass of a loop."""
_SMALL_NS = 250_000
"""Mean time between two operators above which each counts as separate work."""
_OF_PARAMETERS = frozenset({"aten::linear", "aten::addmm", "aten::embedding"})
_PRODUCTS = frozenset({*PRODUCTS, *_OF_PARAMETERS, "aten::matmul", "aten::layer_norm"})
"""Operators of layers: without a manifest, a sequence with one may be a stack of layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loops(Table):
    """Disjoint stretches of host time in which a loop ran, sorted by start."""

    start_ns: IntArray
    end_ns: IntArray
    operators: IntArray
    site: Strings
    """Python line of the loop, or of the forward that a backward belongs to; null if none was sampled."""


def find_loops(tables: RankTables, threads: Sequence[tuple[IntArray, IntArray]] | None = None) -> Loops:
    """Return the loops of a rank's analysed steps, with the backward of those in a forward or a loss.

    None if nothing separates forward from the optimizer, which goes through its parameters one by one.
    """
    labelled = tables.phases.phase.equals("forward").any()
    threads = threads if threads is not None else list(_threads(tables))
    found = [one for thread in threads for one in _of_thread(tables, *thread)] if labelled else []
    repeats = summed((one.names, one.repeats) for one in found)
    least = _REPEATS * max(1, len(tables.analysed))
    found = [one for one in found if one.repeats >= _REPEATS or repeats[one.names] >= least]
    forward = [one for one in found if one.phase != "backward"]
    lines = _lines(tables, forward)
    origins: dict[str | None, Counter[str]] = defaultdict(Counter)
    for one in forward:
        origins[one.fqn][lines.get(one.names) or ""] += one.end_ns - one.start_ns
    kept = [one for one in found if one.phase != "backward" or one.fqn in origins]
    kept.sort(key=lambda one: (one.start_ns, -one.end_ns))
    disjoint: list[_Loop] = []
    for one in kept:
        if not disjoint or one.start_ns >= disjoint[-1].end_ns:
            disjoint.append(one)
    sites = [
        (lines.get(one.names) if one.phase != "backward" else origins[one.fqn].most_common(1)[0][0]) or None
        for one in disjoint
    ]
    return Loops(
        start_ns=np.array([one.start_ns for one in disjoint], dtype=np.int64),
        end_ns=np.array([one.end_ns for one in disjoint], dtype=np.int64),
        operators=np.array([one.operators for one in disjoint], dtype=np.int64),
        site=Strings.intern(sites),
    )


@dataclass(frozen=True, slots=True)
class _Loop:
    start_ns: int
    end_ns: int
    phase: str
    fqn: str | None
    names: frozenset[str | None]
    operators: int
    repeats: int


def _lines(tables: RankTables, loops: list[_Loop]) -> dict[frozenset[str | None], str]:
    """Return the line seen most in all stretches of the same operators."""
    start = np.array([one.start_ns for one in loops], dtype=np.int64)
    end = np.array([one.end_ns for one in loops], dtype=np.int64)
    votes: dict[frozenset[str | None], Counter[str]] = defaultdict(Counter)
    for one, line in zip(loops, tables.sighted.lines.seen(start, end), strict=True):
        if line is not None:
            votes[one.names][line] += one.end_ns - one.start_ns
    return {names: lines.most_common(1)[0][0] for names, lines in votes.items()}


def _threads(tables: RankTables) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield each thread's outermost operators in the analysed steps, as events, with their rows of phases."""
    events, steps = tables.trace.events, tables.analysed
    operators = np.flatnonzero(events.name.matches(lambda name: name.startswith("aten::")))
    operators = operators[
        (events.thread[operators] >= 0)
        & (intervals.containing(steps.start_ns, steps.end_ns, events.start_ns[operators]) >= 0)
    ]
    for thread in intervals.distinct(events.thread[operators]):
        mine = outermost(events, operators[events.thread[operators] == thread])
        if len(mine) >= _REPEATS:
            yield mine, find_rows(tables.phases, events.thread[mine], events.start_ns[mine])


def _of_thread(tables: RankTables, rows: IntArray, place: IntArray) -> Iterator[_Loop]:
    """Yield the loops of one thread's operators, the shortest sequence first."""
    events, phases = tables.trace.events, tables.phases
    names = events.name.take(rows)
    fqn, phase = phases.fqn.lookup(place), phases.phase.lookup(place)
    own = phases.activity.lookup(place).equals("compute")
    width = len(names.values) + 1
    where = (phase.codes + 1).astype(np.int64) * (len(fqn.values) + 2) + fqn.codes + 1
    key = where * width + names.codes
    step = intervals.containing(tables.analysed.start_ns, tables.analysed.end_ns, events.start_ns[rows])
    modules = _modules(tables)
    taken, of_fsdp = np.zeros(len(rows), dtype=np.bool_), (place >= 0) & ~own
    for period in range(1, min(_LONGEST, len(rows) // _SHORT) + 1):
        same = (key[period:] == key[:-period]) & (step[period:] == step[:-period])
        least = _REPEATS if period == 1 else _SHORT
        for first, last in _runs(same, (least - 1) * period):
            last += period
            if taken[first:last].any() or phase[first] == "optimizer" or of_fsdp[first:last].any():
                continue
            start, end = int(events.start_ns[rows[first]]), int(events.end_ns[rows[last - 1]])
            repeats = (last - first) // period
            inside = frozenset(names[at] for at in range(first, first + period))
            layers = modules.get(fqn[first] or "") if fqn[first] is not None else 0
            stack = repeats <= layers if layers is not None else any(_of_layer(name or "") for name in inside)
            if repeats < _REPEATS:
                stack = any(_has_parameters(name or "") for name in inside)
            if stack or end - start > _SMALL_NS * (last - first):
                continue
            taken[first:last] = True
            yield _Loop(start, end, phase[first] or "other", fqn[first], inside, last - first, repeats)


def _has_parameters(name: str) -> bool:
    return name in _OF_PARAMETERS or "conv" in name or "norm" in name


def _of_layer(name: str) -> bool:
    return name in _PRODUCTS or "conv" in name or ATTENTION.fullmatch(name) is not None


def _runs(same: BoolArray, least: int) -> Iterator[tuple[int, int]]:
    """Yield ``[first, last)`` of each run of true values of at least a given length."""
    if np.count_nonzero(same) < least:
        return
    edges = np.flatnonzero(np.diff(same.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    yield from edges[edges[:, 1] - edges[:, 0] >= least].tolist()


def _modules(tables: RankTables) -> dict[str, int]:
    """Return how many modules with parameters each FSDP unit has, by the unit's name."""
    manifest = tables.manifest
    if manifest is None:
        return {}
    found: dict[str, set[str]] = defaultdict(set)
    for group in manifest.param_groups:
        named = qualified_fqn(group.fqn, group.root, manifest.root_count)
        found[named] |= {one.fqn.rpartition(".")[0] for one in group.parameters}
    return {name: len(inside) for name, inside in found.items()}
