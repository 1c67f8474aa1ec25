"""The dependencies of a program's activities: streams, communicators, and the waits of FSDP2.

The waits are those that FSDP2's labels stand for (torch.distributed.fsdp, ``_fsdp_param_group.py`` and
``_fsdp_collectives.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.whatif.program import RankProgram, Waits
from fsdp2prof.tables.columns import BoolArray, IntArray

STREAM, COMMUNICATOR, REDUCED, INPUT, NEEDED, JOINED, COPIED_OUT = range(7)
"""Rules, in the order in which an activity's dependencies are listed."""

_LAST_WAITS = "FSDP::root_post_backward_callback"


def waits_of(program: RankProgram, *, one_communicator: bool = True, learns: bool = False) -> Waits:
    """Return the dependencies of all launches by the rules, in order.

    ``learns`` marks those that the recording contradicts as ``beside``; otherwise those that it was seen to
    contradict are left out, and only waits for a stream can be beside.
    """
    launches = _Launches(program, one_communicator=one_communicator, learns=learns)
    found = [*launches.waits()]
    one = np.concatenate([a for a, _, _ in found])
    other = np.concatenate([b for _, b, _ in found])
    rule = np.repeat([kind for _, _, kind in found], [len(a) for a, _, _ in found])
    order = np.lexsort((rule, one))
    waits = Waits(one[order], other[order], rule[order], np.zeros(len(one), dtype=np.bool_))
    if learns:
        return waits.with_columns(beside=launches.end[waits.other] > launches.begin[waits.one])
    wrong = contradicted(program, launches.activity[waits.one], launches.activity[waits.other], waits.rule)
    return waits.with_columns(beside=wrong).take((waits.rule == STREAM) | ~wrong)


def contradicted(program: RankProgram, one: IntArray, other: IntArray, rule: IntArray) -> BoolArray:
    """Mask of the dependencies between activities that the recording was seen to contradict."""
    rules = (program.activities.rules[one] >> rule & 1).astype(np.bool_)
    needed = np.isin(pairs(program, one, other), program.contradicted) if len(program.contradicted) else False
    mask: BoolArray = np.where(rule == NEEDED, needed, rules)
    return mask


def pairs(program: RankProgram, one: IntArray, other: IntArray) -> IntArray:
    """Return one number for each dependency; copies have that of the activity that they are copies of."""
    numbers: IntArray = program.activities.origin[one] << 32 | other
    return numbers


def launch_order(program: RankProgram) -> tuple[IntArray, IntArray]:
    """Return the positions of the points that launch something, and what each of them launches."""
    at = np.flatnonzero(program.points.launches >= 0)
    return at, program.points.launches[at]


class _Launches:
    """The launches of a program in order; a launch's number is its place in it."""

    def __init__(self, program: RankProgram, *, one_communicator: bool, learns: bool) -> None:
        self._program, self._one_communicator, self._learns = program, one_communicator, learns
        self.at, self.activity = launch_order(program)
        table = program.activities
        self.begin, self.end = table.start[self.activity], table.end[self.activity]
        self._stream = table.stream[self.activity]
        self._computes = self._stream == program.compute_stream
        self._collective = table.kind.equals("collective")[self.activity]
        roles = {name: table.role.equals(name)[self.activity] for name in ("copy_in", "copy_out", "reduce")}
        self._copies_in, self._copies_out, self._reduces = roles.values()
        self._computed = _latest(self._computes)
        reducing = (table.op.equals("reduce_scatter") | table.op.equals("all_reduce"))[self.activity]
        over = self._copies_out | (self._computes & table.kind.equals("compute")[self.activity])
        reduced = _latest(reducing & self._collective)
        self._reduced = np.where(reduced > _latest(over), reduced, -1)

    def waits(self) -> Iterator[tuple[IntArray, IntArray, int]]:
        """Yield launches, the launches that each of them waits for, and the rule."""
        if self._program.on_device:
            yield *self._of_streams(), STREAM
        table = self._program.activities
        sent = np.flatnonzero(self._collective)
        rows = self.activity[sent]
        groups = table.group.codes[rows].astype(np.int64) << 32
        keys = groups if self._one_communicator else groups | (table.op.codes[rows] + 1)
        before = _previous(keys)
        yield *_known(sent, np.where(before >= 0, sent[before], -1)), COMMUNICATOR
        total = sent[table.op.equals("all_reduce")[rows]]
        yield *_known(total, self._reduced[total]), REDUCED
        gathers, named = table.op.equals("all_gather")[rows], table.fqn.codes[rows] >= 0
        copies_in = _latest(self._copies_in & ~self._computes & ~self._collective)
        copied = np.where(gathers, copies_in[sent], _latest(self._reduces)[sent])
        yield *_known(sent, np.where(named & (copied >= 0), copied, self._computed[sent])), INPUT
        yield *self._needed(), NEEDED
        beside = ~self._collective & ~self._computes
        into = np.flatnonzero(beside & self._copies_in)
        yield *_known(into, self._joined(into)), JOINED
        yield *_known(into, self._copied_out(into)), COPIED_OUT
        reduce = np.flatnonzero(beside & self._reduces)
        yield *_known(reduce, self._reduced[reduce]), REDUCED
        alone = reduce[self._reduced[reduce] < 0]
        yield *_known(alone, self._computed[alone]), INPUT

    def _of_streams(self) -> tuple[IntArray, IntArray]:
        """Each launch waits for the one before on its stream, and for all others that it overlapped."""
        before = _previous(self._stream)
        all_launches = np.arange(len(before))
        if self._learns:
            overlaps = (before >= 0) & (self.end[before] > self.begin)
        else:
            overlaps = (self._program.activities.rules[self.activity] >> STREAM & 1).astype(np.bool_)
        several = np.isin(self._stream, intervals.distinct(self._stream[overlaps]))
        one, other = _known(all_launches[~several], before[~several])
        ones, others = [one], [other]
        for stream in intervals.distinct(self._stream[several]):
            tails = self._tails(np.flatnonzero(self._stream == stream).tolist(), overlaps.tolist())
            table = np.array([*tails], dtype=np.int64).reshape(-1, 2)
            ones.append(table[:, 0])
            others.append(table[:, 1])
        return np.concatenate(ones), np.concatenate(others)

    def _tails(self, launches: Sequence[int], overlaps: Sequence[bool]) -> Iterator[tuple[int, int]]:
        """Yield the dependencies of a stream whose activities overlapped in the recording."""
        tails: list[int] = []
        begin, end = self.begin.tolist(), self.end.tolist()
        for one in launches:
            yield from ((one, other) for other in tails)
            running = [other for other in tails if end[other] > begin[one]]
            tails = [*(running if self._learns or overlaps[one] else []), one]

    def _needed(self) -> tuple[IntArray, IntArray]:
        """The first launch on the compute stream after a wait of that stream."""
        points = self._program.points
        places = np.full(len(self._program.activities), -1, dtype=np.int64)
        places[self.activity] = np.arange(len(self.activity))
        ends = points.label.matches(lambda name: name.startswith(_LAST_WAITS)) & ~points.opens
        needs, last = np.flatnonzero(points.needs >= 0), np.flatnonzero(ends)
        at = np.concatenate([needs, last])
        aside = _latest(self._reduces, last=True)[np.searchsorted(self.at, last)]
        other = np.concatenate([places[points.needs[needs]], aside])
        order = np.argsort(at, kind="stable")
        at, other = at[order], other[order]
        computing = np.append(np.flatnonzero(self._computes), -1)
        one = computing[np.searchsorted(computing[:-1], np.searchsorted(self.at, at))]
        told = (one >= 0) & ~np.append(self._collective, True)[one] & (other >= 0) & (other < one)
        return one[told], other[told]

    def _joined(self, launches: IntArray) -> IntArray:
        """The last launch on the compute stream where the streams of all-gathers last joined it."""
        joins = np.flatnonzero(self._program.points.joins)
        computed = _latest(self._computes, last=True)[np.searchsorted(self.at, joins)]
        return np.append(computed, -1)[np.searchsorted(joins, self.at[launches], side="right") - 1]

    def _copied_out(self, launches: IntArray) -> IntArray:
        """The copy out of the gathered buffer that a copy into it must not overtake."""
        copies = np.flatnonzero(self._copies_out)
        backward = self._program.activities.phase.equals("backward")[self.activity[launches]]
        row = np.searchsorted(copies, launches) - np.where(backward, 1, 2)
        return np.where(row >= 0, np.append(copies, -1)[np.maximum(row, 0)], -1)


def _known(one: IntArray, other: IntArray) -> tuple[IntArray, IntArray]:
    there = other >= 0
    return one[there], other[there]


def _latest(mask: BoolArray, *, last: bool = False) -> IntArray:
    """Return the number of the last launch in ``mask`` before each one, or -1; ``last``: also after all."""
    latest = np.maximum.accumulate(np.where(mask, np.arange(len(mask)), -1))
    before: IntArray = np.concatenate([[-1], latest if last else latest[:-1]])
    return before[: len(mask) + last]


def _previous(keys: IntArray) -> IntArray:
    """Return the last row before each one with the same key; -1 if there is none."""
    order = np.argsort(keys, kind="stable")
    same = keys[order[1:]] == keys[order[:-1]]
    before: IntArray = np.full(len(keys), -1, dtype=np.int64)
    before[order[1:][same]] = order[:-1][same]
    return before
