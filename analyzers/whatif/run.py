"""A program run again: the longest path from each cause to its effects.

What the recording measured stays as it is: the host's work between two commands, the time of each kernel, the
transfer of each collective from the arrival of its last rank. When each of them happens follows from what it
waits for: the host's own order, the order of each stream and of each communicator, the waits of FSDP2
(:mod:`~fsdp2prof.analyzers.whatif.waits`), the arrival of the other ranks, and what an activity was seen to
wait for where no rule explains it.

Most activities wait for their launch and for the one before on their stream. A run of these, launched between
two waits of the host, is followed as one: its end is the later of the host's time plus a constant and the end
of the activity before it plus another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.steps import STEP_LABEL
from fsdp2prof.analyzers.whatif.program import Job, RankProgram, Waits
from fsdp2prof.analyzers.whatif.waits import NEEDED, STREAM, launch_order, pairs, waits_of
from fsdp2prof.by_key import grouped
from fsdp2prof.tables.columns import BoolArray, IntArray

_SEEN_NS = 10_000
"""How soon after the end of something an activity starts that waited for it."""
_SEEN_AMONG = 256
"""Launches before an activity among which its cause is looked for."""
_LONG_OVER = -(1 << 62)
_WORTH_A_CAUSE_NS = 20_000
"""A delay for which a cause is looked for."""


def as_recorded(program: RankProgram) -> IntArray:
    """Return the recorded time of every activity; of a collective, its transfer."""
    table = program.activities
    time: IntArray = np.where(table.kind.equals("collective"), table.transfer_ns, table.duration)
    return time


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long things take; as recorded by default."""

    activity_ns: Callable[[RankProgram], IntArray] = as_recorded
    """The time of each kernel or copy; of a collective, its transfer."""
    host_ns: Callable[[RankProgram], IntArray] = lambda program: program.points.work_ns
    """The host's work before each point."""
    one_communicator: bool = True
    """Whether collectives of one process group run one after the other; otherwise only those of one kind."""
    waits_for: frozenset[int] | None = None
    """Ranks that collectives wait for; None is all."""


@dataclass(slots=True)
class RankRun:
    """When everything of one rank happened."""

    program: RankProgram
    begin: IntArray
    """Of each point's interval."""
    end: IntArray
    started: IntArray
    """Of each activity that is launched."""
    ended: IntArray
    lengths: list[int] = field(default_factory=list)
    """Nanoseconds of each analysed step, once requested."""


@dataclass(slots=True)
class Ran:
    """All ranks."""

    ranks: list[RankRun]
    unmet: set[int] = field(default_factory=set)
    """Meetings that ranks reached in different orders, so that some did not wait for the others."""

    @property
    def job(self) -> Job:
        """The programs that ran."""
        return [one.program for one in self.ranks]


def prepare(job: Job) -> Ran:
    """Learn each activity's dependencies beyond the rules, and its waits, from the recorded times.

    Afterwards :func:`run` reproduces every recorded time exactly; return such a run.
    """
    for program in job:
        _learn(program)
    if len(job) == 1:  # without other ranks every activity stays where it was recorded
        return Ran([_recorded(job[0])])
    while (recorded := run(job)).unmet:
        for program in job:
            table = program.activities  # whose launches are not known well enough to wait for them
            unmet = np.isin(table.meeting, list(recorded.unmet))
            program.activities = table.with_columns(
                meeting=np.where(unmet, -1, table.meeting),
                transfer_ns=np.where(unmet, table.duration, table.transfer_ns),
            )
            program.found.clear()
    return recorded


def _learn(program: RankProgram) -> None:
    waits, table = waits_of(program, learns=True), program.activities
    at, activity = launch_order(program)
    start, end = table.start[activity], table.end[activity]
    one, other, rule = activity[waits.one], activity[waits.other], waits.rule
    wrong, streams = waits.beside, waits.rule == STREAM
    rules = np.zeros(len(table), dtype=np.int64)
    np.bitwise_or.at(rules, one[wrong], 1 << rule[wrong])
    ahead = start.copy()
    np.maximum.at(ahead, waits.one[streams], table.end[other[streams]])
    launched = program.points.end[at] + program.latency_ns
    early = np.minimum(0, start - launched)
    ready = launched + early
    np.maximum.at(ready, waits.one[~wrong], table.end[other[~wrong]])
    # what ran beside the one before on its stream follows it, at the distance that they had
    ready = np.where(rules[activity] >> STREAM & 1, start, ready)
    after = np.full(len(table), -1, dtype=np.int64)
    stream = table.stream[activity]
    ends = np.sort(end, kind="stable")
    near = np.searchsorted(ends, start, side="right") > np.searchsorted(ends, start - _SEEN_NS)
    for number in np.flatnonzero((start - ready > _WORTH_A_CAUSE_NS) & near).tolist():
        cause = _seen_cause(number, start, end, stream)
        if cause is not None:
            after[activity[number]] = activity[cause]
            ready[number] = max(ready[number], end[cause])
    gap, overlap, earlier = (np.zeros(len(table), dtype=np.int64) for _ in range(3))
    gap[activity], overlap[activity], earlier[activity] = start - ready, ahead - start, early
    program.activities = table.with_columns(rules=rules, overlap=overlap, early=earlier, gap=gap, after=after)
    program.contradicted = np.unique(pairs(program, one, other)[wrong & (rule == NEEDED)])
    _set_boundary(program)
    overlapped = (rules[one] >> STREAM & 1).astype(np.bool_)
    program.waits = waits.with_columns(beside=streams & overlapped).take(streams | ~wrong)


def _recorded(program: RankProgram) -> RankRun:
    """Return what :func:`run` gives for a prepared program without a change."""
    points, table = program.points, program.activities
    return RankRun(
        program,
        begin=points.begin,
        end=points.end,
        started=table.start,
        ended=table.end,
        lengths=[end - begin for begin, end in program.windows],
    )


def _set_boundary(program: RankProgram) -> None:
    """Find where the first analysed step begins: earlier times are fixed, and no change affects them."""
    points = program.points
    begins = points.opens & points.label.equals(f"{STEP_LABEL}{program.steps[0]}" if program.steps else "")
    program.boundary = int(points.number[np.argmax(begins)]) if begins.any() else -1


def _seen_cause(number: int, start: IntArray, end: IntArray, stream: IntArray) -> int | None:
    """Return the launch that ended just before another started, on another stream."""
    first = max(0, number - _SEEN_AMONG)
    late = start[number] - end[first:number]
    seen = (late >= 0) & (late <= _SEEN_NS) & (stream[first:number] != stream[number])
    if not seen.any():
        return None
    return first + int(np.flatnonzero(seen & (late == late[seen].min()))[-1])


def dependencies(program: RankProgram) -> dict[int, list[int]]:
    """Return what each activity of a prepared program waits for beside its launch."""
    waits, table = program.waits, program.activities
    assert waits is not None
    _, activity = launch_order(program)
    kept = waits.take(~waits.beside)
    found = grouped(
        (one, other)
        for one, other in zip(activity[kept.one].tolist(), activity[kept.other].tolist(), strict=True)
    )
    for one in np.flatnonzero(table.after >= 0).tolist():
        found[one].append(int(table.after[one]))
    return found


def run(job: Job, pace: Pace | None = None) -> Ran:
    """Run all ranks, together where their collectives were matched."""
    pace = pace or Pace()
    meetings = _Meetings(job, pace)
    runs = [_Rank(one, pace, meetings) for one in job]
    waiting = [one.steps() for one in runs]
    unmet: set[int] = set()
    while waiting:
        before = len(waiting), meetings.arrivals
        waiting = [one for one in waiting if next(one, True) is not True]
        if (len(waiting), meetings.arrivals) == before:
            unmet |= meetings.give_up()
    return Ran([one.result() for one in runs], unmet)


class _Meetings:
    """The collectives in which ranks meet, and the ranks that have come so far."""

    def __init__(self, job: Job, pace: Pace) -> None:
        self.arrivals = 0
        self.missing: dict[int, int] = defaultdict(int)
        """Meeting -> ranks that have not come."""
        self.latest: dict[int, int] = {}
        """Meeting -> when the last of those that came, came."""
        self._begun: set[int] = set()
        self._awaited = {one.rank for one in job if pace.waits_for is None or one.rank in pace.waits_for}
        for program in job:
            if program.rank in self._awaited:
                meetings = program.activities.meeting[program.launched]
                for meeting in meetings[meetings >= 0].tolist():
                    self.missing[meeting] += 1

    def arrive(self, meeting: int, rank: int, time: int) -> None:
        """Note that a rank has come to a meeting."""
        self.arrivals += 1
        self._begun.add(meeting)
        if rank in self._awaited and self.missing[meeting]:
            self.missing[meeting] -= 1
            self.latest[meeting] = max(time, self.latest.get(meeting, time))

    def give_up(self) -> set[int]:
        """Wait no more for meetings that other ranks will not reach, because ranks diverged; return them."""
        unmet = {meeting for meeting in self._begun if self.missing[meeting]}
        self.missing |= dict.fromkeys(unmet, 0)
        return unmet


@dataclass(frozen=True, slots=True)
class _Order:
    """The launches of a program, and the runs of them that are followed as one."""

    at: IntArray
    """Position of each launch's point."""
    activity: IntArray
    fixed: BoolArray
    """Launched or begun before the first analysed step: they stay as recorded."""
    awaits: IntArray
    """Positions of the host's waits."""
    segment: IntArray
    """How many of these come before each launch."""
    rows: IntArray
    """The launches that are followed in runs, by run."""
    first: IntArray
    """Row of each run's first launch in ``rows``."""
    before: IntArray
    """The launch before each run on its stream."""
    single: IntArray
    """The other launches."""
    depends: dict[int, list[int]]
    """What each of these waits for."""
    beside: dict[int, list[int]]
    """What each of these that ran beside others on its stream follows."""

    @classmethod
    def of(cls, program: RankProgram, waits: Waits, first_at: int) -> _Order:
        """Find the runs; points before ``first_at`` stay as recorded."""
        points, table = program.points, program.activities
        at, activity = launch_order(program)
        count = len(at)
        begins = program.windows[0][0] if program.windows and program.on_device else _LONG_OVER
        fixed = (at < first_at) | (table.start[activity] < begins)
        number = np.full(len(table) + 1, -1, dtype=np.int64)
        number[activity] = np.arange(count)
        awaits = np.flatnonzero((points.awaits >= 0) & (np.arange(len(points)) >= first_at))
        awaited = number[points.awaits[awaits]]
        after = number[table.after[activity]]
        after = np.where(after < np.arange(count), after, -1)
        meets = table.meeting[activity] >= 0
        plain = waits.take((waits.rule == STREAM) & ~waits.beside)
        before = np.full(count, -1, dtype=np.int64)
        before[plain.one] = plain.other
        alone = np.bincount(waits.one, minlength=count) == 1
        follows = ~fixed & ~meets & (after < 0) & alone & (before >= 0) & ~meets[before]
        follows[waits.other[waits.beside]] = False
        needed = np.zeros(count + 1, dtype=np.bool_)
        needed[waits.other[~follows[waits.one]]] = True
        needed[awaited] = needed[after] = True
        segment = np.searchsorted(awaits, at, side="right")
        goes_on = follows & follows[before] & ~needed[before] & (segment == segment[before])
        order = np.argsort(table.stream[activity], kind="stable")
        rows = order[follows[order]]
        heads = np.flatnonzero(~goes_on[rows])
        single = np.flatnonzero(~follows)
        depends, beside = (
            _by_launch(waits.one[which], waits.other[which])
            for which in (~follows[waits.one] & ~waits.beside, waits.beside)
        )
        for one in np.flatnonzero(after >= 0).tolist():
            depends.setdefault(one, []).append(int(after[one]))
        before = before[rows[heads]]
        return cls(at, activity, fixed, awaits, segment, rows, heads, before, single, depends, beside)


def _by_launch(one: IntArray, other: IntArray) -> dict[int, list[int]]:
    """Return the dependencies of each launch; ``one`` is in order."""
    first = np.flatnonzero(np.diff(one, prepend=-1))
    bounds, others = [*first.tolist(), len(one)], other.tolist()
    return {
        launch: others[begin:end]
        for launch, begin, end in zip(one[first].tolist(), bounds, bounds[1:], strict=False)
    }


_RUN, _AWAIT, _SINGLE, _OTHER = range(4)


class _Rank:
    """One rank while it runs."""

    def __init__(self, program: RankProgram, pace: Pace, meetings: _Meetings) -> None:
        points, table = program.points, program.activities
        self._program, self._meetings = program, meetings
        early = (points.number <= program.boundary) & ~points.copy
        self._first = first = len(points) if early.all() else int(np.argmin(early))
        waits = program.waits if pace.one_communicator else None
        if waits is None:
            waits = waits_of(program, one_communicator=pace.one_communicator)
        if not pace.one_communicator or "order" not in program.found:
            order = _Order.of(program, waits, first)
            if pace.one_communicator:
                program.found["order"] = order
        else:
            order = program.found["order"]
        self._order: _Order = order
        work = pace.host_ns(program).copy()
        work[:first] = 0
        self._host = np.cumsum(work)
        start = points.begin[0] if len(points) else 0
        self._bases = [int(points.end[first - 1] if first else start)]
        """The host's time before its work: the first, and after each wait."""
        activity = order.activity
        self._fixed_start = table.start[activity]
        length = np.where(order.fixed, as_recorded(program)[activity], pace.activity_ns(program)[activity])
        self._length, self._gap, self._overlap = length, table.gap[activity], table.overlap[activity]
        self._offset = self._host[order.at] + program.latency_ns + table.early[activity]
        self._meeting = table.meeting[activity]
        self._ends: list[int | None] = []
        """Of every launch so far; None while that depends on ranks that have not come so far."""
        self._starts = [0] * len(order.at)

    def steps(self) -> Iterator[None]:
        """Run; yields whenever the rank waits for another one."""
        order, program = self._order, self._program
        ends = self._ends = list[int | None]([_LONG_OVER]) * len(order.at)
        starts, bases, base = self._starts, self._bases, self._bases[0]
        length, gap, meeting = self._length.tolist(), self._gap.tolist(), self._meeting.tolist()
        fixed, recorded = order.fixed.tolist(), self._fixed_start.tolist()
        depends, beside, nothing = order.depends, order.beside, list[int]()
        for what, one, offset, more, other in zip(*self._events(), strict=True):
            start = base + offset
            if what == _RUN:
                end = ends[other] + more
                ends[one] = start if start > end else end
                continue
            if what == _AWAIT:
                while (over := self._over(one) if one >= 0 else _LONG_OVER) is None:
                    yield None
                base = max(base, over - offset)
                bases.append(base)
                continue
            if what == _SINGLE:
                for before in depends.get(one, nothing):
                    over = ends[before]
                    while over is None and (over := self._over(before)) is None:
                        yield None
                    if over > start:
                        start = over
                starts[one] = start = start + more
                ends[one] = start + other
                continue
            if fixed[one]:
                start = recorded[one]
            else:
                for other in depends.get(one, nothing):
                    over = ends[other]
                    while over is None and (over := self._over(other)) is None:
                        yield None
                    if over > start:
                        start = over
                if one in beside:
                    for other in beside[one]:
                        while (over := self._over(other)) is None:
                            yield None
                        # it ran beside the one before it, and does so no longer than that
                        start = max(start, over - int(self._overlap[one]), starts[other])
                start += gap[one]
            starts[one] = start
            if meeting[one] >= 0:
                ends[one] = None
                self._meetings.arrive(meeting[one], program.rank, start + program.shift_ns)
            else:
                ends[one] = start + length[one]
        for one in np.flatnonzero(self._meeting >= 0).tolist():
            while ends[one] is None and self._over(one) is None:
                yield None

    def _over(self, one: int) -> int | None:
        """When a launch ends."""
        end = self._ends[one]
        if end is None:
            meeting = int(self._meeting[one])
            if not self._meetings.missing[meeting]:
                came = self._starts[one]
                latest = self._meetings.latest.get(meeting, _LONG_OVER) - self._program.shift_ns
                end = self._ends[one] = max(came, latest) + int(self._length[one])
        return end

    def _events(self) -> Iterator[list[int]]:
        """Yield five columns of what happens, in the order of the host's points.

        A run: its last launch, its end after the host's time and after the end of the launch before it, and
        that launch. A wait: what is awaited (-1 is nothing), and the host's work. Another launch: itself, its
        offset from the host's time, its gap and its length; it is of another kind if it is fixed, meets other
        ranks, or ran beside another.
        """
        order = self._order
        rows, first = order.rows, order.first
        last = np.append(first[1:], len(rows))[: len(first)] - 1
        took, before = self._took()
        end = np.maximum.reduceat(self._offset[rows] - before, first) + took[last] if len(first) else first
        table, points = self._program.activities, self._program.points
        number = np.full(len(table), -1, dtype=np.int64)
        number[order.activity] = np.arange(len(order.activity))
        awaits, single = order.awaits, order.single
        awaited = number[points.awaits[awaits]]
        awaited = np.where(order.at[awaited] < awaits, awaited, -1) if len(order.at) else awaited
        nothing = np.zeros(len(awaits), dtype=np.int64)
        what = np.repeat([_RUN, _AWAIT, _SINGLE], [len(first), len(awaits), len(single)])
        special = order.fixed | (self._meeting >= 0)
        special[[*order.beside]] = True
        what[len(what) - len(single) :][special[single]] = _OTHER
        columns = (
            what,
            np.concatenate([rows[last], awaited, single]),
            np.concatenate([end, self._host[awaits], self._offset[single]]),
            np.concatenate([took[last] - before[first], nothing, self._gap[single]]),
            np.concatenate([order.before, nothing, self._length[single]]),
        )
        place = np.concatenate([order.at[rows[last]], awaits, order.at[single]])
        by_place = np.argsort(place, kind="stable")
        yield from (column[by_place].tolist() for column in columns)

    def _took(self) -> tuple[IntArray, IntArray]:
        """Time of all launches in runs up to each one with it, and without it."""
        rows = self._order.rows
        took = self._gap[rows] + self._length[rows]
        total = np.cumsum(took)
        return total, total - took

    def result(self) -> RankRun:
        """Return when everything happened, after the last step."""
        order, points = self._order, self._program.points
        end = np.array(self._ends, dtype=np.int64)
        start = np.array(self._starts, dtype=np.int64)
        bases = np.array(self._bases, dtype=np.int64)
        rows, first = order.rows, order.first
        if len(rows):
            took, before = self._took()
            counts = np.diff(first, append=len(rows))
            origin = np.repeat(end[order.before] - before[first], counts)
            # how much later than right after the launch before its run each launch may begin
            late = bases[order.segment[rows]] + self._offset[rows] - before - origin
            np.maximum(late, 0, out=late)
            floor = np.cumsum(np.maximum.reduceat(late, first) + 1)
            floor = np.repeat(np.concatenate([[0], floor[:-1]]), counts)
            late = np.maximum.accumulate(late + floor) - floor
            end[rows] = late + origin + took
            start[rows] = end[rows] - self._length[rows]
        size = len(self._program.activities)
        started, ended = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        started[order.activity], ended[order.activity] = start, end
        host = self._host + bases[np.searchsorted(order.awaits, np.arange(len(points)), side="right")]
        host[: self._first] = points.end[: self._first]
        begin = np.concatenate([points.begin[:1], host[:-1]])
        return RankRun(self._program, begin, host, started, ended)


def mean_step_ns(ran: Ran, ranks: frozenset[int] | None = None) -> float:
    """Return the mean step of all ranks, or of those in ``ranks``, by the definition of a recorded one.

    Steps that were run again take what the recorded ones took, plus what their end moved by, less what their
    beginning moved by. Where nothing ends later, a beginning that comes earlier makes no step longer: it was
    hidden behind the step before.
    """
    chosen = [one for one in ran.ranks if ranks is None or one.program.rank in ranks]
    count = sum(len(one.program.windows) for one in chosen)
    return sum(map(_steps_ns, chosen)) / count if count else 0.0


def mean_steps_ns(ran: Ran, ranks: frozenset[int] | None = None) -> dict[int, float]:
    """Return each analysed step, a mean over the ranks that have it; their mean is that of
    :func:`mean_step_ns`."""
    lengths: dict[int, list[int]] = {}
    for one in ran.ranks:
        if ranks is None or one.program.rank in ranks:
            for step, length in zip(one.program.steps, _each_step_ns(one), strict=True):
                lengths.setdefault(step, []).append(length)
    return {step: sum(each) / len(each) for step, each in lengths.items()}


def _steps_ns(ran: RankRun) -> int:
    return sum(_each_step_ns(ran))


def _each_step_ns(ran: RankRun) -> list[int]:
    """Each analysed step of a rank; a border between two that follow each other moves neither's sum."""
    if ran.lengths:
        return ran.lengths
    program = ran.program
    moved = _Moved(ran)
    first = before = 0
    for at, (step, (begin, end)) in enumerate(zip(program.steps, program.windows, strict=True)):
        if at == 0 or not _follows(program, at):
            first = before = moved.begin(step)
        later = moved.end(step)
        ran.lengths.append(end - begin + later - before)
        before = later
        if at + 1 == len(program.steps) or not _follows(program, at + 1):
            ran.lengths[-1] -= max(0, later - first) if later <= 0 else 0
    return ran.lengths


def _follows(program: RankProgram, at: int) -> bool:
    """Whether an analysed step begins where the one before it ends."""
    touches = program.windows[at][0] == program.windows[at - 1][1]
    return touches or program.steps[at] == program.steps[at - 1] + 1


class _Moved:
    """How much later the steps of a rank begin and end than they were recorded."""

    def __init__(self, ran: RankRun) -> None:
        self._ran = ran
        table = ran.program.activities
        self._launched, self._was = ran.program.launched, np.arange(len(table)) < ran.program.recorded
        self._recorded = intervals.distinct(table.step[self._was])

    def begin(self, step: int) -> int:
        """Nanoseconds that a step begins later."""
        ran = self._ran
        if not ran.program.on_device:
            return self._label(step, opens=True)
        now = ran.started[self._of_step(self._launched, step)].min()
        return int(now - ran.program.activities.start[self._of_step(self._was, step)].min())

    def end(self, step: int) -> int:
        """Nanoseconds that a step ends later.

        On a device it ends where the next begins, the last one with the last activity launched in it.
        """
        ran = self._ran
        if not ran.program.on_device:
            return self._label(step, opens=False)
        later = self._recorded[self._recorded > step]
        if len(later) and step in self._recorded:
            return self.begin(int(later[0]))
        now = ran.ended[self._of_step(self._launched, step)].max()
        return int(now - ran.program.activities.end[self._of_step(self._was, step)].max())

    def _of_step(self, among: BoolArray, step: int) -> BoolArray:
        """Activities launched in a step; all if the whole trace is one step."""
        own: BoolArray = among & (self._ran.program.activities.step == step)
        return own if own.any() else among

    def _label(self, step: int, *, opens: bool) -> int:
        """How much later the label of a step opens or closes; without one, the last interval ends."""
        points, end = self._ran.program.points, self._ran.end
        found = points.label.equals(f"{STEP_LABEL}{step}") & (points.opens == opens)
        if found.any():
            at = int(np.argmax(found))
            return int(end[at] - points.end[at])
        return int(end[-1] - points.end[-1]) if len(end) and not opens else 0
