"""Host time -> (step, phase, module): the one map that everything else joins to.

FSDP2 marks its own work with ``record_function`` labels that carry the module's name; the user's work lies
between them. :func:`build_phases` replays the labels in time order:

- inside a label, time belongs to the innermost one;
- between labels, forward work belongs to the innermost module whose ``pre_forward`` ended and whose
  ``post_forward`` has not begun; backward work to the innermost module between ``pre_backward`` and its
  ``post_backward_*`` labels;
- backward lasts from the first backward label until ``root_post_backward_callback`` ends, on whatever
  threads (on CUDA it has its own); a forward recomputed inside it is backward;
- the loss, between the root's ``post_forward`` and the backward, is forward without a module;
- ``Optimizer.*`` ranges are the optimizer's, except where it calls a closure: the forward and backward
  inside are what their labels say, and what comes before them is not the optimizer's.

With several roots in a process, module names repeat. A range ``fsdp2prof::root (i)`` around a root's forward
(and, where they can be had, around its backward hooks) tells them apart: names become ``root1:layers.0``
(:func:`fsdp2prof.labels.qualified_fqn`). A name seen under one root alone is resolved wherever it appears;
one that several roots share stays unqualified outside such a range, because nothing tells whose it is.

When a rank ran forward, backward and optimizer: the phases merged into the few spans a chart can show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.labels import (
    AUTOGRAD_NODE,
    BACKWARD,
    BEFORE_FORWARD,
    NAMELESS,
    FsdpLabel,
    parse_label,
    qualified_fqn,
)
from fsdp2prof.tables.columns import NEVER, BoolArray, CompactArray, IntArray, Strings, concat_tables
from fsdp2prof.tables.trace import LabelTable, PhaseTable, StepTable

_TRANSFERS = frozenset({"all_gather", "reduce_scatter", "all_reduce"})
"""Labels that a collective itself may carry, on the thread of the backend that carries it out."""
_AFTER_FORWARD = frozenset({"post_forward", "cast_forward_outputs"})
"""Labels that end a module's forward."""
_BEFORE_LOSS = frozenset({"cast_forward_outputs", "optimizer"})
"""Labels that may come between the end of the root's forward and the backward of its loss."""


def build_phases(labels: LabelTable, steps: StepTable, roots: int = 0) -> PhaseTable:
    """Build the phases of one rank from its labels.

    ``steps`` are the steps in host time (labels outside every one have step -1). ``labels`` may hold any
    other ranges too; the ranges of autograd nodes (:data:`AUTOGRAD_NODE`) and of the engine's runs
    (:data:`BACKWARD`), if there, mark backward work that no FSDP label covers (the loss's own backward; all
    of it without FSDP). ``roots`` is how many roots
    the process has, where that is known: the labels need not show all of them.
    """
    labels = labels.take(~transfer_rows(labels))
    parsed = [parse_label(name) for name in labels.name.values]
    rows = _Replay(labels, parsed, steps, roots).run()
    thread, start, end = np.array([row[:3] for row in rows], dtype=np.int64).reshape(-1, 3).T
    states = [row.state for row in rows]
    table = PhaseTable(
        thread=thread,
        start_ns=start,
        end_ns=end,
        step=np.full(len(rows), -1, dtype=np.int64),
        fqn=Strings.intern([state.fqn for state in states]),
        phase=Strings.intern([state.phase for state in states]),
        activity=Strings.intern([state.activity for state in states]),
    )
    weak = np.array([state.weak for state in states], dtype=np.bool_)
    return _with_steps(_with_autograd(table, weak, labels), steps)


def transfer_rows(labels: LabelTable) -> BoolArray:
    """Mask of the labels that name a transfer on a backend's own thread: FSDP's hooks run on other ones."""
    parsed = [parse_label(name) for name in labels.name.values]
    kinds = [None if label is None or label.kind == "root" else label.kind in _TRANSFERS for label in parsed]
    transfer = np.array([kind is True for kind in kinds] + [False], dtype=np.bool_)[labels.name.codes]
    hook = np.array([kind is False for kind in kinds] + [False], dtype=np.bool_)[labels.name.codes]
    return transfer & hook.any() & ~np.isin(labels.thread, labels.thread[hook])


def find_rows(phases: PhaseTable, thread: CompactArray, time_ns: IntArray) -> IntArray:
    """Return the row of ``phases`` that holds each (thread, time); -1 if none does."""
    found = np.full(len(time_ns), -1, dtype=np.int64)
    for one in intervals.distinct(phases.thread):
        first, last = np.searchsorted(phases.thread, [one, one + 1])
        mine = np.flatnonzero(thread == one)
        row = intervals.containing(phases.start_ns[first:last], phases.end_ns[first:last], time_ns[mine])
        found[mine] = np.where(row >= 0, row + first, -1)
    return found


def is_outside(phase: Strings) -> BoolArray:
    """Whether each time is in no forward, backward or optimizer."""
    return ~phase.matches(lambda name: name in ("forward", "backward", "optimizer"))


def next_phase(phases: PhaseTable, time_ns: IntArray) -> Strings:
    """Return the forward, backward or optimizer that begins after each time, on any thread; None without."""
    rows = np.flatnonzero(~is_outside(phases.phase))
    rows = rows[np.argsort(phases.start_ns[rows], kind="stable")]
    return phases.phase.lookup(
        np.append(rows, -1)[np.searchsorted(phases.start_ns[rows], time_ns, side="right")]
    )


class _State(NamedTuple):
    """The attribution of one instant of a thread; ``weak``: autograd's own ranges are more exact."""

    fqn: str | None
    phase: str
    activity: str
    weak: bool = False


class _Row(NamedTuple):
    thread: int
    start: int
    end: int
    state: _State


@dataclass(slots=True)
class _Open:
    """A label that has begun on its thread; ``state`` is null for ranges that only carry a root."""

    position: int
    end: int
    label: FsdpLabel
    fqn: str | None
    state: _State | None
    root: int | None
    closure: int | None
    """For an optimizer: the first of FSDP's labels inside it."""
    around: _Open | None
    """The label around it that has a state."""


class _Replay:
    """Replays the labels of all threads in time order and writes a row at every change of state."""

    def __init__(
        self, labels: LabelTable, parsed: list[FsdpLabel | None], steps: StepTable, roots: int
    ) -> None:
        known = np.array([label is not None for label in parsed] + [False], dtype=np.bool_)
        index = np.flatnonzero(known[labels.name.codes])
        index = index[np.lexsort((index, -labels.end_ns[index], labels.start_ns[index]))]
        kept = [parsed[code] for code in labels.name.codes[index].tolist()]
        self.labels = [label for label in kept if label is not None]
        self.thread: list[int] = labels.thread[index].tolist()
        self.start: list[int] = labels.start_ns[index].tolist()
        self.end: list[int] = labels.end_ns[index].tolist()
        # A label belongs to the step it begins in; one outside every step belongs to none.
        self.step = intervals.containing(steps.start_ns, steps.end_ns, labels.start_ns[index]).tolist()
        self.step_end: list[int] = steps.end_ns.tolist()
        self.neighbours = _neighbours(self.thread, self.labels)
        self.root_has_group = any(label.kind == "pre_forward" and label.fqn == "" for label in self.labels)
        self.owners = self._find_owners()
        self.roots = max([roots, *(index + 1 for index in self.owners)])
        self.rows: list[_Row] = []
        self.stacks: dict[int, list[_Open]] = {thread: [] for thread in self.thread}
        self.written: int | None = None
        """Time up to which rows are written, on all threads."""
        self.active: int | None = None
        self.reached = -1
        self.forward: list[str] = []
        self.backward: list[str] = []
        self.in_backward = False
        self.before_loss = False
        self.finishing: str | None = None

    def run(self) -> list[_Row]:
        """Replay everything; return the rows in the order they ended."""
        for position, start in enumerate(self.start):
            self._close_until(start)
            if position and self.step[position] != self.step[position - 1]:
                self._end_step(self.step[position - 1], start)
            self._advance(start)
            self._begin(position)
        self._close_until(None)
        return self.rows

    def _begin(self, position: int) -> None:
        label, thread = self.labels[position], self.thread[position]
        stack = self.stacks[thread]
        root = label.root if label.kind == "root" else (stack[-1].root if stack else None)
        end = min(self.end[position], stack[-1].end) if stack else self.end[position]
        self.active, self.finishing = thread, None
        self.before_loss &= label.kind == "optimizer"
        if label.kind == "module_forward" and not stack:
            self.in_backward, self.backward = False, []
        if label.is_backward and not self.in_backward:
            self.in_backward, self.forward = True, []
        fqn = self._module(position, root)
        state: _State | None = None
        if label.kind == "optimizer":
            state = _State(None, "optimizer", "compute")
        elif label.kind != "root":
            state = _State(fqn, "backward" if self.in_backward else "forward", label.activity)
        modules = self.backward if self.in_backward else self.forward
        if fqn in modules:
            if label.kind == "post_forward":
                # Modules above it on the stack left no post_forward: their forward ended with this one's.
                del modules[modules.index(fqn) :]
            elif label.kind.startswith("post_backward"):
                modules.remove(fqn)
        closure = self._closure(position) if label.kind == "optimizer" else None
        around = stack[-1] if stack else None
        if around is not None and around.state is None:
            around = around.around
        stack.append(_Open(position, end, label, fqn, state, root, closure, around))
        self.reached = position

    def _finish(self, opened: _Open) -> None:
        kind, fqn = opened.label.kind, opened.fqn
        modules = self.backward if self.in_backward else self.forward
        # A root without parameters of its own has no pre_forward: its forward begins here.
        opens_root = kind == "root_pre_forward" and not self.root_has_group and not modules
        if kind in ("pre_forward", "pre_backward") or opens_root:
            if fqn is not None and fqn not in modules:
                modules.append(fqn)
        elif kind.startswith("post_backward"):
            following = self.neighbours[opened.position].next
            if following is not None and self.labels[following].kind.startswith("post_backward"):
                same = self._module(following, opened.root) == fqn
                self.finishing = fqn if same else None
        elif kind in _AFTER_FORWARD and not self.in_backward and not self.forward:
            self.before_loss = self._backward_follows(opened.position)
        elif kind == "root_post_backward_callback":
            self.in_backward, self.backward = False, []

    def _backward_follows(self, position: int) -> bool:
        """Whether nothing but the optimizer's ``zero_grad`` lies between a root's forward and a backward."""
        following = (self.labels[index] for index in range(position + 1, len(self.labels)))
        return next((one.is_backward for one in following if one.kind not in _BEFORE_LOSS), False)

    def _context(self) -> _State | None:
        """The attribution of work between labels, on the thread with the latest label."""
        if self.in_backward:
            if self.finishing is not None:
                return _State(self.finishing, "backward", "hooks")
            only_root = None if self.roots > 1 else ""
            return _State(self.backward[-1] if self.backward else only_root, "backward", "compute")
        if self.forward:
            return _State(self.forward[-1], "forward", "compute")
        return _State(None, "forward", "compute", weak=True) if self.before_loss else None

    def _advance(self, now: int) -> None:
        """Write the row of every thread that ends now."""
        since = self.written
        if since is None or now <= since:
            self.written = now if since is None else since
            return
        self.written = now
        for thread, stack in self.stacks.items():
            inside = stack[-1] if stack else None
            if inside is not None and inside.state is None:
                inside = inside.around
            if inside is not None and not self._leaves_to_closure(inside):
                state = inside.state
            else:
                state = self._context() if thread == self.active else None
            if state is not None:
                self.rows.append(_Row(thread, since, now, state))

    def _closure(self, position: int) -> int | None:
        """Return the first of FSDP's labels that begins inside an optimizer's range, on whatever thread."""
        for index in range(position + 1, len(self.labels)):
            if self.start[index] >= self.end[position]:
                return None
            if self.labels[index].kind not in ("optimizer", "root"):
                return index
        return None

    def _leaves_to_closure(self, opened: _Open) -> bool:
        """Whether time in a label is its closure's: an optimizer updates after it has called that."""
        if opened.closure is None:
            return False
        return self.reached < opened.closure or self._context() is not None

    def _close_until(self, now: int | None) -> None:
        """End the labels that end by ``now`` (``None``: all), earliest first."""
        while True:
            stack: list[_Open] = []
            for one in self.stacks.values():
                if one and (not stack or one[-1].end < stack[-1].end):
                    stack = one
            if not stack:
                return
            if now is not None and stack[-1].end > now:
                return
            self._advance(stack[-1].end)
            self._finish(stack.pop())

    def _end_step(self, step: int, now: int) -> None:
        """Modules do not stay open over a step's end, whatever label was lost in a crash."""
        self._advance(min(self.step_end[step], now) if step >= 0 else now)
        self.forward, self.backward, self.in_backward = [], [], False
        self.before_loss, self.finishing = False, None

    def _module(self, position: int, root: int | None) -> str | None:
        """Module a label belongs to, qualified by its root if there are several."""
        label = self.labels[position]
        fqn: str | None = label.fqn
        if label.kind in NAMELESS:
            near = self.neighbours[position]
            borrowed = near.module_after if label.kind in BEFORE_FORWARD else near.module_before
            if borrowed is not None and (label.kind != "root_pre_forward" or self.in_backward):
                return self._module(borrowed, root)
            modules = self.backward if self.in_backward else self.forward
            if label.kind != "root_pre_forward" and modules:
                return modules[-1]
            fqn = ""
        if fqn is None or self.roots < 2:
            return fqn
        if root is None:
            candidates = [index for index, names in self.owners.items() if fqn in names]
            root = candidates[0] if len(candidates) == 1 else None
        return fqn if root is None else qualified_fqn(fqn, root, self.roots)

    def _find_owners(self) -> dict[int, set[str]]:
        """Names that each root's modules have, from the labels inside our own root ranges."""
        owners: dict[int, set[str]] = {}
        reach: dict[int, tuple[int, int]] = {}
        for thread, end, label in zip(self.thread, self.end, self.labels, strict=True):
            if label.root is not None:
                reach[thread] = (end, label.root)
                owners.setdefault(label.root, set())
            elif thread in reach and end <= reach[thread][0] and label.fqn is not None:
                owners[reach[thread][1]].add(label.fqn)
        return owners


@dataclass(slots=True)
class _Neighbours:
    """Rows around a label on its thread."""

    next: int | None = None
    module_after: int | None = None
    """The ``pre_forward`` that follows labels without a name."""
    module_before: int | None = None
    """The ``post_forward`` just before."""


def _neighbours(thread: list[int], labels: list[FsdpLabel]) -> list[_Neighbours]:
    near = [_Neighbours() for _ in labels]
    latest: dict[int, int] = {}
    for position, one in enumerate(thread):
        previous = latest.get(one)
        if previous is not None:
            near[previous].next = position
            if labels[previous].kind == "post_forward":
                near[position].module_before = previous
        latest[one] = position
    for position in reversed(range(len(labels))):
        following = near[position].next
        if following is not None:
            kind = labels[following].kind
            if kind == "pre_forward":
                near[position].module_after = following
            elif kind in BEFORE_FORWARD:
                near[position].module_after = near[following].module_after
    return near


def _with_autograd(table: PhaseTable, weak: BoolArray, labels: LabelTable) -> PhaseTable:
    """Add backward rows for autograd's own ranges where no label is more exact.

    The loss ends where its backward begins: with the first node, whatever its thread.
    """
    node = labels.name.matches(lambda name: name.startswith(AUTOGRAD_NODE) or name == BACKWARD)
    if not node.any():
        return table
    begins = np.append(np.sort(labels.start_ns[node]), NEVER)
    loss_end = np.minimum(begins[np.searchsorted(begins, table.start_ns)], table.end_ns)
    loss_end = np.where(weak, loss_end, table.end_ns)
    rest = np.flatnonzero(loss_end < table.end_ns)
    pieces = [table.with_columns(end_ns=loss_end).take(table.start_ns < loss_end)]
    pieces += [
        _backward(int(table.thread[row]), loss_end[row : row + 1], table.end_ns[row : row + 1])
        for row in rest
    ]
    known = concat_tables(pieces)
    for thread in intervals.distinct(labels.thread[node]):
        mine, here = node & (labels.thread == thread), known.thread == thread
        nodes = intervals.union(labels.start_ns[mine], labels.end_ns[mine])
        unknown = intervals.subtract(nodes, intervals.union(known.start_ns[here], known.end_ns[here]))
        pieces.append(_backward(int(thread), unknown.start, unknown.end))
    return concat_tables(pieces)


def _backward(thread: int, start: IntArray, end: IntArray) -> PhaseTable:
    return PhaseTable(
        thread=np.full(len(start), thread, dtype=np.int64),
        start_ns=start,
        end_ns=end,
        step=np.full(len(start), -1, dtype=np.int64),
        fqn=Strings.full(len(start), None),
        phase=Strings.full(len(start), "backward"),
        activity=Strings.full(len(start), "compute"),
    )


def _with_steps(table: PhaseTable, steps: StepTable) -> PhaseTable:
    """Cut rows at step boundaries, number them, and sort by (thread, start)."""
    edges = np.concatenate([steps.start_ns, steps.end_ns])
    row, start, end = intervals.cut(table.start_ns, table.end_ns, edges)
    inside = intervals.containing(steps.start_ns, steps.end_ns, start)
    number = np.where(inside >= 0, np.append(steps.step, -1)[inside], -1)
    table = table.take(row).with_columns(start_ns=start, end_ns=end, step=number)
    return table.take(np.lexsort((table.start_ns, table.thread)))
