"""A program run again: the longest path from each cause to its effects.

What the recording measured stays as it is: the host's work between two commands, the time of each kernel, the
transfer of each collective from the arrival of its last rank. When each of them happens follows from what it
waits for: the host's own order, the order of each stream and of each communicator, the waits that FSDP2's
labels stand for (torch.distributed.fsdp, ``_fsdp_param_group.py`` and ``_fsdp_collectives.py``), the
arrival of the other ranks, and what an activity was seen to wait for where no rule explains it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from fsdp2prof.analyzers.steps import STEP_LABEL
from fsdp2prof.analyzers.whatif.program import Activity, Job, Point, RankProgram

_SEEN_NS = 10_000
"""How soon after the end of something an activity starts that waited for it."""
_LONG_OVER = -(1 << 62)
_WORTH_A_CAUSE_NS = 20_000
"""A delay for which a cause is looked for."""


def _as_recorded(activity: Activity) -> int:
    return activity.transfer_ns if activity.kind == "collective" else activity.duration


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long things take; as recorded by default."""

    activity_ns: Callable[[Activity], int] = _as_recorded
    """A kernel's or a copy's time; a collective's transfer."""
    host_ns: Callable[[Point], int] = lambda point: point.work_ns
    one_communicator: bool = True
    """Whether collectives of one process group run one after the other; otherwise only those of one kind."""
    waits_for: frozenset[int] | None = None
    """Ranks that collectives wait for; None is all."""


@dataclass(slots=True)
class RankRun:
    """When everything of one rank happened."""

    program: RankProgram
    begin: list[int] = field(default_factory=list)
    """Of each point's interval."""
    end: list[int] = field(default_factory=list)
    started: dict[int, int] = field(default_factory=dict)
    """Activity -> its start."""
    ended: dict[int, int] = field(default_factory=dict)
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
        state = _Streams(program, Pace())
        before: list[Activity] = []
        found: dict[int, list[tuple[bool, Activity]]] = {}
        for point in program.points:
            state.pass_point(point)
            if (one := point.launches) is None:
                continue
            waits = state.waits_of(one)
            one.rules = wrong = frozenset(rule for rule, other in waits if other.end > one.start)
            ahead = [other.end for rule, other in waits if rule == "stream"]
            one.overlap = max(0, max(ahead, default=one.start) - one.start)
            launched = point.end + program.latency_ns
            one.early = min(0, one.start - launched)
            ready = max([launched + one.early, *(other.end for rule, other in waits if rule not in wrong)])
            if "stream" in wrong:  # it follows what it ran beside, at the distance that they had
                ready = one.start
            if one.start - ready > _WORTH_A_CAUSE_NS:
                cause = _seen_cause(before, one)
                if cause is not None:
                    one.after, ready = (cause,), max(ready, cause.end)
            one.gap = one.start - ready
            found[one.index] = _followed(one, waits)
            state.launch(one)
            before.append(one)
        program.waits = found
        _set_boundary(program)
    if len(job) == 1:  # without other ranks every activity stays where it was recorded
        return Ran([_recorded(job[0])])
    while (recorded := run(job)).unmet:
        for program in job:
            for one in program.activities.values():
                if one.meeting in recorded.unmet:  # its launch is not known well enough to wait for it
                    one.meeting, one.transfer_ns = -1, one.duration
    return recorded


def _followed(one: Activity, waits: Iterable[tuple[str, Activity]]) -> list[tuple[bool, Activity]]:
    """Return an activity's dependencies, and whether it overlaps with them, if the recording agrees."""
    return [(rule in one.rules, other) for rule, other in waits if rule == "stream" or rule not in one.rules]


def _recorded(program: RankProgram) -> RankRun:
    """Return what :func:`run` gives for a prepared program without a change."""
    return RankRun(
        program,
        begin=[point.begin for point in program.points],
        end=[point.end for point in program.points],
        started={index: one.start for index, one in program.activities.items()},
        ended={index: one.end for index, one in program.activities.items()},
        lengths=[end - begin for begin, end in program.windows],
    )


def _set_boundary(program: RankProgram) -> None:
    """Find where the first analysed step begins: earlier times are fixed, and no change affects them."""
    name = f"{STEP_LABEL}{program.steps[0]}" if program.steps else ""
    begins = (point.number for point in program.points if name and point.opens and point.label == name)
    program.boundary = next(begins, -1)


def _seen_cause(before: list[Activity], one: Activity) -> Activity | None:
    """Return the activity that ended just before an activity started, on another stream."""
    found = None
    for other in reversed(before[-256:]):
        late = one.start - other.end
        if other.stream != one.stream and 0 <= late <= _SEEN_NS and (found is None or other.end > found.end):
            found = other
    return found


def dependencies(program: RankProgram) -> Iterator[tuple[Point, list[Activity]]]:
    """Walk a prepared program: each point, with what the activity that it launches waits for beside it."""
    waits = program.waits or {}
    for point in program.points:
        one = point.launches
        followed = (
            [] if one is None else [*(other for beside, other in waits[one.index] if not beside), *one.after]
        )
        yield point, followed


def run(job: Job, pace: Pace | None = None) -> Ran:
    """Run all ranks, together where their collectives were matched."""
    pace = pace or Pace()
    members: dict[int, set[int]] = defaultdict(set)
    for program in job:
        for one in program.activities.values():
            if one.meeting >= 0 and (pace.waits_for is None or program.rank in pace.waits_for):
                members[one.meeting].add(program.rank)
    arrivals: dict[int, dict[int, int]] = defaultdict(dict)
    runs = [RankRun(program) for program in job]
    steppers = [_steps(one, pace, members, arrivals) for one in runs]
    waiting = list(steppers)
    result = Ran(runs)
    while waiting:
        before = len(waiting), sum(map(len, arrivals.values()))
        waiting = [one for one in waiting if next(one, True) is not True]
        if (len(waiting), sum(map(len, arrivals.values()))) == before:
            # Ranks diverged: do not wait for a collective that no other rank will reach.
            for meeting, here in arrivals.items():
                if here and not members[meeting] <= set(here):
                    result.unmet.add(meeting)
                    members[meeting] &= set(here)
    return result


def _steps(
    result: RankRun, pace: Pace, members: dict[int, set[int]], arrivals: dict[int, dict[int, int]]
) -> Iterator[None]:
    """Run one rank; yields whenever it waits for another one."""
    program = result.program
    state = _Streams(program, pace)
    rank = program.rank
    known = program.waits if pace.one_communicator else None
    pending: dict[int, Activity] = {}
    given: set[int] = set()
    """Activities launched or begun before the first analysed step: they stay as recorded."""
    before = True
    first = program.windows[0][0] if program.windows and program.on_device else _LONG_OVER
    host = program.points[0].begin if program.points else 0

    def length(one: Activity) -> int:
        return _as_recorded(one) if one.index in given else pace.activity_ns(one)

    def over(one: Activity) -> int | None:
        """When an activity ends; None while that depends on ranks that have not come so far."""
        if one.index not in result.started:
            return _LONG_OVER
        known = result.ended.get(one.index)
        if known is not None:
            return known
        here = arrivals[one.meeting]
        if not members[one.meeting] <= set(here):
            return None
        latest = max([here[rank], *(here[other] for other in members[one.meeting])])
        result.ended[one.index] = latest - program.shift_ns + length(one)
        del pending[one.index]
        return result.ended[one.index]

    for point in program.points:
        if known is None:
            state.pass_point(point)
        before = before and point.number <= program.boundary and not point.copy
        result.begin.append(host)
        if before:
            host = point.end
        else:
            host += pace.host_ns(point)
            if point.awaits is not None:
                while (end := over(point.awaits)) is None:
                    yield None
                host = max(host, end)
        result.end.append(host)
        one = point.launches
        if one is None:
            continue
        if before or one.start < first:
            given.add(one.index)
            start = one.start
        else:
            start = host + program.latency_ns + one.early
            waits = _followed(one, state.waits_of(one)) if known is None else known[one.index]
            for beside, other in waits:
                end = result.ended.get(other.index)
                while end is None and (end := over(other)) is None:
                    yield None
                if beside:  # it ran beside the one before it, and does so no longer than that
                    end = max(end - one.overlap, result.started.get(other.index, _LONG_OVER))
                start = max(start, end)
            for other in one.after:
                while (end := over(other)) is None:
                    yield None
                start = max(start, end)
            start += one.gap
        result.started[one.index] = start
        if one.meeting >= 0:
            pending[one.index] = one
            arrivals[one.meeting][rank] = start + program.shift_ns
        else:
            result.ended[one.index] = start + length(one)
        if known is None:
            state.launch(one)
    for one in list(pending.values()):
        while over(one) is None:
            yield None


class _Streams:
    """The launches so far, and therefore the dependencies of the next activity."""

    def __init__(self, program: RankProgram, pace: Pace) -> None:
        self._on_device, self._compute_stream = program.on_device, program.compute_stream
        self._one_communicator = pace.one_communicator
        self._tails: dict[int, list[Activity]] = {}
        """Stream -> its last activity: several if activities overlapped in the recording."""
        self._communicator: dict[tuple[str, str], Activity] = {}
        self._told: list[Activity] = []
        """Collectives that the compute stream must wait for since its last work."""
        self._copied_in: Activity | None = None
        self._copied_out: list[Activity] = []
        self._reduced: Activity | None = None
        self._aside: Activity | None = None
        self._joined: Activity | None = None

    def pass_point(self, point: Point) -> None:
        """Note the waits that streams are given at a point."""
        if point.needs is not None:
            self._told.append(point.needs)
        if point.joins:
            self._joined = self._last(self._compute_stream)
        if (
            self._aside is not None
            and not point.opens
            and point.label.startswith("FSDP::root_post_backward_callback")
        ):
            self._told.append(self._aside)

    def waits_of(self, one: Activity) -> list[tuple[str, Activity]]:
        """Return an activity's dependencies, each with the name of its rule."""
        ahead = self._tails.get(one.stream, ()) if self._on_device else ()
        found = [("stream", other) for other in ahead]
        if one.kind == "collective":
            computed = self._last(self._compute_stream)
            last = self._communicator.get(self._key(one))
            found += [("communicator", last)] if last is not None else []
            copied = self._copied_in if one.op == "all_gather" else self._aside
            if one.op == "all_reduce" and self._reduced is not None:
                found.append(("reduced", self._reduced))
            given = computed if copied is None or one.fqn is None else copied
            found += [("input", given)] if given is not None else []
        elif one.stream == self._compute_stream:
            found += [(f"told {other.index}", other) for other in self._told]
        elif one.role == "copy_in":
            if self._joined is not None:
                found.append(("joined", self._joined))
            back = 1 if one.phase == "backward" else 2
            if len(self._copied_out) >= back:
                found.append(("copied out", self._copied_out[-back]))
        elif one.role == "reduce":
            computed = self._last(self._compute_stream)
            if self._reduced is not None:
                found.append(("reduced", self._reduced))
            elif computed is not None:
                found.append(("gradients", computed))
        return found

    def launch(self, one: Activity) -> None:
        """Note that an activity was launched."""
        beside: list[Activity] = []
        if "stream" in one.rules:
            beside = [other for other in self._tails.get(one.stream, ()) if other.end > one.start]
        self._tails[one.stream] = [*beside, one]
        if one.kind == "collective":
            self._communicator[self._key(one)] = one
            if one.op in ("reduce_scatter", "all_reduce"):
                self._reduced = one
        elif one.role == "copy_in" and one.stream != self._compute_stream:
            self._copied_in = one
        elif one.role == "copy_out":
            self._copied_out.append(one)
            self._reduced = None
        elif one.role == "reduce":
            self._aside = one
        if one.stream == self._compute_stream:
            self._told = []
            if one.kind == "compute":
                self._reduced = None

    def _last(self, stream: int) -> Activity | None:
        tails = self._tails.get(stream)
        return tails[-1] if tails else None

    def _key(self, one: Activity) -> tuple[str, str]:
        return one.group, "" if self._one_communicator else one.op


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
        self._activities = _by_step(ran.program.activities.values())
        self._recorded = _by_step(ran.program.recorded.values())

    def begin(self, step: int) -> int:
        """Nanoseconds that a step begins later."""
        if not self._ran.program.on_device:
            return self._label(step, opens=True)
        now = min(self._ran.started[one.index] for one in _of_step(self._activities, step))
        return now - min(one.start for one in _of_step(self._recorded, step))

    def end(self, step: int) -> int:
        """Nanoseconds that a step ends later.

        On a device it ends where the next begins, the last one with the last activity launched in it.
        """
        if not self._ran.program.on_device:
            return self._label(step, opens=False)
        later = [other for other in self._recorded if other > step]
        if later and step in self._recorded:
            return self.begin(min(later))
        now = max(self._ran.ended[one.index] for one in _of_step(self._activities, step))
        return now - max(one.end for one in _of_step(self._recorded, step))

    def _label(self, step: int, *, opens: bool) -> int:
        """How much later the label of a step opens or closes; without one, the last interval ends."""
        ran, name = self._ran, f"{STEP_LABEL}{step}"
        for point, end in zip(ran.program.points, ran.end, strict=True):
            if point.label == name and point.opens == opens:
                return end - point.end
        return ran.end[-1] - ran.program.points[-1].end if ran.end and not opens else 0


def _by_step(activities: Iterable[Activity]) -> dict[int, list[Activity]]:
    found: dict[int, list[Activity]] = defaultdict(list)
    for one in activities:
        found[one.step].append(one)
    return found


def _of_step(activities: dict[int, list[Activity]], step: int) -> list[Activity]:
    """Activities launched in a step; all if the whole trace is one step."""
    return activities[step] if step in activities else [*chain.from_iterable(activities.values())]
