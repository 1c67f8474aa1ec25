"""The changes that can be tried on a recorded run: their notation, conditions and effects.

A change edits the order of the programs, or the times of their parts, or both; its cost in memory follows
from the bytes of the all-gathers that it keeps.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp2prof.analyzers.layers import block_of, numbered
from fsdp2prof.analyzers.whatif.edits import (
    Gather,
    batches_at_hand,
    gathers,
    prefetched,
    reduced_once,
    resharded,
)
from fsdp2prof.analyzers.whatif.program import Activities, Job, RankProgram
from fsdp2prof.analyzers.whatif.run import Pace
from fsdp2prof.errors import UsageError
from fsdp2prof.labels import is_root
from fsdp2prof.tables.columns import BoolArray, IntArray

_SETTINGS = (
    "reshard, sync, bandwidth, compute, forward_prefetch, backward_prefetch, reduce_dtype, "
    "separate_reduce_scatter_group, wrap, mesh"
)
OTHER_HARDWARE = frozenset({"bandwidth", "compute"})
"""Changes that no script makes."""

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_DEEPEST = 64


class NotApplicableError(Exception):
    """A change that this run cannot have, with the reason."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A job with a change made."""

    job: Job
    pace: Pace
    memory_bytes: int | None
    """More memory at the peak, on one rank, at most; None is not known."""
    assumptions: tuple[str, ...] = ()

    def made(self, *notes: str, job: Job | None = None, more_bytes: int | None = 0, **pace: Any) -> Changed:
        """Return it with another job, parts of another pace, more memory (None: unknown) and assumptions."""
        known = more_bytes is not None and self.memory_bytes is not None
        return Changed(
            job=self.job if job is None else job,
            pace=replace(self.pace, **pace),
            memory_bytes=(self.memory_bytes or 0) + (more_bytes or 0) if known else None,
            assumptions=(*self.assumptions, *notes),
        )


TOGETHER = "together"
"""Name of several changes made at once, whose value is their texts."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change, as it is written on the command line (``forward_prefetch=2``, ``without host_syncs``)."""

    name: str
    value: str
    what: str
    """In words, as the beginning of a sentence: ``explicit forward prefetch of 2``."""
    apply: Callable[[Changed], Changed]
    """Raises :class:`NotApplicableError`."""

    @property
    def text(self) -> str:
        """As it is written on the command line."""
        if self.name == TOGETHER:
            return self.value
        return f"{self.name}={self.value}" if self.name != "without" else f"without {self.value}"


def parse_change(text: str, others: Mapping[str, Callable[[str], Change]] | None = None) -> Change:
    """Parse ``NAME=VALUE``; ``others`` makes changes that need more than a recording, by name.

    Raises ``UsageError``.
    """
    name, equals, value = text.partition("=")
    makers: dict[str, Callable[[str], Change]] = {
        "reshard": _reshard,
        "sync": _sync,
        "bandwidth": _bandwidth,
        "compute": _compute,
        "forward_prefetch": _forward_prefetch,
        "backward_prefetch": _backward_prefetch,
        "reduce_dtype": _reduce_dtype,
        "separate_reduce_scatter_group": _separate,
        "wrap": _wrap,
        **(others or {}),
    }
    if not equals or name not in makers:
        raise UsageError(f"--set {text}: write NAME=VALUE with one of {_SETTINGS}")
    return makers[name](value)


def parse_without(text: str) -> Change:
    """Parse ``host_syncs``, ``data_loader`` or ``straggler:RANK``. Raises ``UsageError``."""
    if text == "host_syncs":
        return Change("without", text, "no synchronizations of the host", _no_host_syncs)
    if text == "data_loader":
        return Change("without", text, "no waiting for the data loader", _no_data_loader)
    match = re.fullmatch(r"straggler:(\d+(?:,\d+)*)", text)
    if match is None:
        raise UsageError(
            f"--without {text}: write host_syncs, data_loader or straggler:RANK (straggler:2,3 for two)"
        )
    ranks = sorted(set(map(int, match[1].split(","))))
    what = f"no waiting for {numbered('rank', ranks)}"
    return Change("without", text, what, lambda changed: _no_stragglers(changed, ranks))


def single_changes(job: Job, stragglers: Sequence[int] = ()) -> list[Change]:
    """Return every single change worth trying on a run, whether it applies or not.

    Late ranks go one by one and all together: where two are late, the others wait for either.
    """
    texts = [
        "forward_prefetch=1", "forward_prefetch=2", "backward_prefetch=2", "reshard=never", "reshard=default",
        "reshard=always", "sync=last", "reduce_dtype=bfloat16", "separate_reduce_scatter_group=yes",
        "wrap=blocks", "bandwidth=2x", "compute=1.2x",
    ]  # fmt: skip
    late = [[rank] for rank in stragglers] if len(job) > 1 else []
    if 1 < len(stragglers) < len(job):
        late.append(sorted(stragglers))
    return [
        *(parse_change(text) for text in texts),
        parse_without("host_syncs"),
        parse_without("data_loader"),
        *(parse_without(f"straggler:{','.join(map(str, ranks))}") for ranks in late),
    ]


def _factor(name: str, value: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)x|inf", value)
    factor = inf if value == "inf" else float(match[1]) if match else 0.0
    if not factor:
        raise UsageError(f"--set {name}={value}: write a factor, for example {name}=2x")
    return factor


def _number(name: str, value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= _DEEPEST:
        raise UsageError(f"--set {name}={value}: write how many layers ahead, 1 to {_DEEPEST}")
    return int(value)


# How long things take.


def _compute(value: str) -> Change:
    factor = _factor("compute", value)

    def apply(changed: Changed) -> Changed:
        pace = changed.pace

        def activity_ns(program: RankProgram) -> IntArray:
            time = pace.activity_ns(program)
            return np.where(program.activities.kind.equals("compute"), rounded(time / factor), time)

        def host_ns(program: RankProgram) -> IntArray:
            computes = program.points.compute_ns
            return pace.host_ns(program) - computes + rounded(computes / factor)

        note = "every compute kernel or operator speeds up by this factor"
        return changed.made(note, activity_ns=activity_ns, host_ns=host_ns)

    return Change("compute", value, f"compute {value} as fast", apply)


def _bandwidth(value: str) -> Change:
    factor = _factor("bandwidth", value)

    def apply(changed: Changed) -> Changed:
        floor = latencies(_sizes(changed))
        pace = changed.pace

        def activity_ns(program: RankProgram) -> IntArray:
            time = pace.activity_ns(program)
            sent = program.activities.kind.equals("collective")
            latency = np.minimum(time, _of_groups(program.activities, floor))
            return np.where(sent, latency + rounded((time - latency) / factor), time)

        known = any(floor.values())
        note = (
            "latency is unchanged: estimated from the times of two message sizes"
            if known
            else "latency scales too: the run's message sizes do not separate it from bandwidth"
        )
        meetings = np.concatenate([p.activities.meeting[rows] for p, rows in _sent(changed)])
        unmet = int((meetings < 0).sum())
        notes = [note]
        if unmet:
            notes.append(f"{unmet} of {len(meetings)} collectives include an unknown wait for other ranks")
        return changed.made(*notes, activity_ns=activity_ns)

    return Change("bandwidth", value, f"links {value} as fast", apply)


def rounded(time: npt.NDArray[np.floating[Any]]) -> IntArray:
    """Return whole nanoseconds."""
    whole: IntArray = np.rint(time).astype(np.int64)
    return whole


def latencies(sent: Iterable[tuple[str, str, int, int]]) -> dict[tuple[str, str], int]:
    """Return (op, group) -> the time of a collective of no size: a line through the medians by payload.

    Collectives are given as op, group, payload and time. Between 0 and the shortest one; 0 where a group
    sends fewer than two sizes.
    """
    sizes: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for op, group, payload, time in sent:
        if payload > 0:
            sizes[op, group][payload].append(time)
    found = {}
    for key, by_size in sizes.items():
        pairs = sorted((size, median(times)) for size, times in by_size.items())
        if len(pairs) < 2 or not all(a < b for (_, a), (_, b) in pairwise(pairs)):
            continue
        (low, fast), (high, slow) = pairs[0], pairs[-1]
        intercept = fast - low * (slow - fast) / (high - low)
        found[key] = int(min(max(0.0, intercept), min(time for _, time in pairs)))
    return found


def _sizes(changed: Changed) -> Iterator[tuple[str, str, int, int]]:
    """Yield op, group, payload and transfer of every collective, as :func:`latencies` takes them."""
    for program, rows in _sent(changed):
        table = program.activities
        yield from zip(
            (op or "" for op in table.op.take(rows).to_list()),
            (group or "" for group in table.group.take(rows).to_list()),
            table.payload_bytes[rows].tolist(),
            table.transfer_ns[rows].tolist(),
            strict=True,
        )


def _of_groups(table: Activities, floor: Mapping[tuple[str, str], int]) -> IntArray:
    """Return the latency of each activity's operation and group; 0 where it is not known."""
    latency = np.zeros(len(table), dtype=np.int64)
    for (op, group), time in floor.items():
        latency[table.op.equals(op) & table.group.equals(group)] = time
    return latency


def _reduce_dtype(value: str) -> Change:
    dtype = _DTYPES.get(value, value)
    if dtype not in _BYTES:
        raise UsageError(f"--set reduce_dtype={value}: write one of {', '.join(_BYTES)}")

    def apply(changed: Changed) -> Changed:
        reduced = {}
        for program, rows in _sent(changed):
            table = program.activities
            own = table.op.equals("reduce_scatter") & (table.fqn.codes >= 0)
            reduced[program.rank] = rows[(own & table.dtype.matches(_BYTES.__contains__))[rows]]
        if not any(map(len, reduced.values())):
            raise NotApplicableError("the traces name no layer's reduce-scatter (no FSDP labels)")
        dtypes = {
            one for p in changed.job for one in p.activities.dtype.take(reduced[p.rank]).to_list() if one
        }
        if dtypes == {dtype}:
            raise NotApplicableError(f"no layer's gradients are reduced in a dtype other than {dtype}")
        pace = changed.pace

        def activity_ns(program: RankProgram) -> IntArray:
            time, table = pace.activity_ns(program), program.activities
            own = _mask(program, reduced[program.rank])
            for one in dtypes:
                mine = own & table.dtype.equals(one)
                time = np.where(mine, time * _BYTES[dtype] // _BYTES[one], time)
            return time

        note = "reduce-scatter time scales with its bytes; casts are unchanged"
        return changed.made(note, activity_ns=activity_ns)

    return Change("reduce_dtype", value, f"reducing gradients in {dtype}", apply)


# Who waits for whom.


def _no_host_syncs(changed: Changed) -> Changed:
    if not any(program.points.syncs.any() for program in changed.job):
        raise NotApplicableError("no call in this run synchronizes the host with the device")
    job = []
    copies: dict[int, IntArray] = {}
    for program in changed.job:
        points = program.points
        awaited = points.awaits[points.syncs & (points.awaits >= 0)]
        copies[program.rank] = awaited[program.activities.role.equals("to_host")[awaited]]
        points = points.with_columns(
            awaits=np.where(points.syncs, -1, points.awaits), syncs=np.zeros(len(points), dtype=np.bool_)
        )
        job.append(replace(program, points=points))
        job[-1].waits = program.waits  # launches keep their order
    if not any(map(len, copies.values())):
        return changed.made(job=job)
    pace = changed.pace

    def activity_ns(program: RankProgram) -> IntArray:
        time: IntArray = pace.activity_ns(program).copy()
        time[copies[program.rank]] = 0
        return time

    note = "the copies to the host that were waited for are left out, too"
    return changed.made(note, job=job, activity_ns=activity_ns)


def _no_data_loader(changed: Changed) -> Changed:
    job = [batches_at_hand(program) for program in changed.job]
    if all(after is before for after, before in zip(job, changed.job, strict=True)):
        raise NotApplicableError("no step in this run gets a batch from a DataLoader")
    return changed.made(job=job)


def _no_stragglers(changed: Changed, late: Sequence[int]) -> Changed:
    ranks = {program.rank for program in changed.job}
    if not ranks.issuperset(late):
        text = ",".join(map(str, late))
        raise UsageError(f"--without straggler:{text}: only ranks {sorted(ranks)} have traces")
    left = (changed.pace.waits_for or frozenset(ranks)) - set(late)
    if not left:
        raise NotApplicableError("this needs the trace of another rank")
    if not any((program.activities.meeting[program.launched] >= 0).any() for program in changed.job):
        raise NotApplicableError("the ranks' collectives could not be matched")
    is_never = "is never the last; its own steps" if len(late) == 1 else "are never the last; their steps"
    note = f"{numbered('rank', late)} {is_never} are left out, before and after"
    return changed.made(note, waits_for=left)


def _separate(value: str) -> Change:
    if value not in ("yes", "true"):
        raise UsageError(f"--set separate_reduce_scatter_group={value}: write yes")

    def apply(changed: Changed) -> Changed:
        _need_device(changed)
        groups: dict[str | None, set[str | None]] = defaultdict(set)
        for program in changed.job:
            table = program.activities
            table = table.take(table.kind.equals("collective") & (table.fqn.codes >= 0) & program.launched)
            for group, op in zip(table.group.to_list(), table.op.to_list(), strict=True):
                groups[group].add(op)
        if not any({"all_gather", "reduce_scatter"} <= ops for ops in groups.values()):
            raise NotApplicableError("all-gathers and reduce-scatters do not share a communicator")
        note = "collectives that now run at the same time do not slow each other"
        return changed.made(note, more_bytes=None, one_communicator=False)

    return Change(
        "separate_reduce_scatter_group", value, "a separate communicator for reduce-scatters", apply
    )


def _wrap(value: str) -> Change:
    if value != "blocks":
        raise UsageError(f"--set wrap={value}: write blocks")

    def apply(changed: Changed) -> Changed:
        floor = latencies(_sizes(changed))
        merged = {program.rank: _units_of_blocks(program) for program in changed.job}
        if not any(merged.values()):
            raise NotApplicableError(
                "every block is already one FSDP unit, or the traces do not name the units"
            )
        pace = changed.pace

        def activity_ns(program: RankProgram) -> IntArray:
            time, table = pace.activity_ns(program), program.activities
            together: IntArray = time.copy()
            latency = _of_groups(table, floor)
            for units in merged[program.rank]:
                times = time[units].tolist()
                carrier = units[0] if table.op[units[0]] == "all_gather" else units[-1]
                together[units] = 0
                least = min([*times, int(latency[carrier])])
                together[carrier] = sum(times) - least * (len(times) - 1)
            return together

        sizes = [
            np.maximum(0, program.activities.payload_bytes[units])
            for program in changed.job
            for units in merged[program.rank]
        ]
        more = 2 * max(int(each.sum() - each.max()) for each in sizes)  # a unit in use, and the next one
        note = (
            "a block's units are gathered with its first and reduced with its last, one latency each; "
            "the host work per unit stays, so the gain is a lower bound"
        )
        return changed.made(note, more_bytes=more, activity_ns=activity_ns)

    return Change("wrap", value, "one FSDP unit for each block", apply)


def _units_of_blocks(program: RankProgram) -> list[list[int]]:
    """Return the collectives of each block that has several FSDP units, in the order in which they ran."""
    seen: Counter[tuple[object, ...]] = Counter()
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    table = program.activities
    moves = table.op.equals("all_gather") | table.op.equals("reduce_scatter")
    rows = np.flatnonzero(table.kind.equals("collective") & moves & program.launched)
    rows = rows[np.argsort(table.start[rows], kind="stable")]
    columns = (table.phase, table.op, table.fqn, table.group)
    named = zip(*(column.take(rows).to_list() for column in columns), strict=True)
    for one, step, (phase, op, fqn, group) in zip(
        rows.tolist(), table.step[rows].tolist(), named, strict=True
    ):
        if not fqn or is_root(fqn):
            continue
        unit = step, phase, op, fqn
        found[step, phase, op, group, block_of(fqn), seen[unit]].append(one)
        seen[unit] += 1
    return [units for units in found.values() if len(units) > 1]


# What is gathered when.


def _need_device(changed: Changed) -> None:
    if not all(program.on_device for program in changed.job):
        raise NotApplicableError("not replayed on a CPU, where collectives block their caller")


def _sent(changed: Changed) -> list[tuple[RankProgram, IntArray]]:
    """Every rank with its collectives. Raises ``NotApplicableError`` if there is none, as with one rank."""
    sent = [
        (program, np.flatnonzero(program.activities.kind.equals("collective") & program.launched))
        for program in changed.job
    ]
    if not any(len(rows) for _, rows in sent):
        raise NotApplicableError("this run has no collectives")
    return sent


def _mask(program: RankProgram, rows: IntArray) -> BoolArray:
    """Mask of some recorded activities."""
    mask = np.zeros(len(program.activities), dtype=np.bool_)
    mask[rows] = True
    return mask


def _gathers(changed: Changed) -> list[list[Gather]]:
    _sent(changed)
    found = [gathers(program) for program in changed.job]
    if not any(found):
        raise NotApplicableError("the traces name no layer's all-gather (no FSDP labels)")
    return found


def _forward_prefetch(value: str) -> Change:
    return _prefetch("forward", _number("forward_prefetch", value))


def _backward_prefetch(value: str) -> Change:
    return _prefetch("backward", _number("backward_prefetch", value))


def _prefetch(phase: str, ahead: int) -> Change:
    def apply(changed: Changed) -> Changed:
        _need_device(changed)
        found = [[one for one in rank if one.phase == phase] for rank in _gathers(changed)]
        if max(map(len, found)) < 2:
            raise NotApplicableError(f"fewer than two layers are gathered in {phase}")
        now = 1 if phase == "backward" else 0  # groups that are gathered ahead of need by themselves
        more = _largest([one for one in found[0] if one.fqn != found[0][0].fqn], ahead - now)
        job = [prefetched(program, phase, ahead) for program in changed.job]
        return changed.made(job=job, more_bytes=more)

    return Change(f"{phase}_prefetch", str(ahead), f"explicit {phase} prefetch of {ahead}", apply)


def _largest(found: Sequence[Gather], count: int) -> int:
    """Bytes of the largest gathered layers."""
    by_layer = {one.fqn: max(0, one.payload_bytes) for one in found}
    return sum(sorted(by_layer.values(), reverse=True)[: max(0, count)])


def _reshard(value: str) -> Change:
    if value not in ("never", "default", "always"):
        raise UsageError(f"--set reshard={value}: write never, default or always")

    def apply(changed: Changed) -> Changed:
        before = _gathers(changed)
        job = [resharded(program, value) for program in changed.job]
        after = [gathers(program) for program in job]
        if [len(one) for one in before] == [len(one) for one in after]:
            raise NotApplicableError("the run already does this")
        return changed.made(job=job, more_bytes=_kept_bytes(after[0]) - _kept_bytes(before[0]))

    return Change(
        "reshard",
        value,
        {
            "never": "never resharding after forward",
            "default": "resharding all but the root after forward",
            "always": "resharding everything after forward",
        }[value],
        apply,
    )


def _kept_bytes(found: Sequence[Gather]) -> int:
    """Gathered bytes that stay from forward to backward: of the layers that are not gathered again.

    The loss, where memory is often fullest, holds no other; elsewhere a layer or two more are gathered.
    """
    again = {one.fqn for one in found if one.phase == "backward"}
    return sum({one.fqn: max(0, one.payload_bytes) for one in found if one.fqn not in again}.values())


# What is reduced when.


def _sync(value: str) -> Change:
    if value != "last":
        raise UsageError(f"--set sync={value}: write last")

    def apply(changed: Changed) -> Changed:
        made = [reduced_once(program) for program in changed.job]
        if not any(sizes for _, sizes in made):
            raise NotApplicableError("no layer's gradients are reduced more than once between two updates")
        sizes = max((list(sizes.values()) for _, sizes in made), key=sum)
        more = sum(sizes) if all(size >= 0 for size in sizes) else None
        note = "accumulating a layer's full gradients takes as long as copying them into their reduction"
        return changed.made(note, job=[program for program, _ in made], more_bytes=more)

    return Change("sync", value, "reducing gradients in the last micro-batch only", apply)
