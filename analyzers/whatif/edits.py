"""Changes to the order of a recorded program: which layers are gathered when, and which are not gathered
at all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fsdp2prof.analyzers.trace.spans import NEXT_BATCH
from fsdp2prof.analyzers.whatif.program import Points, RankProgram
from fsdp2prof.by_key import grouped
from fsdp2prof.labels import FsdpLabel, is_root, parse_label
from fsdp2prof.schedule import prefetched_by, stays_gathered
from fsdp2prof.tables.columns import IntArray, Strings, concat_tables


@dataclass(frozen=True, slots=True)
class Gather:
    """One layer's all-gather with its copies, as ranges of positions in a program's points."""

    fqn: str
    phase: str
    step: int
    issue: range
    """From the label's beginning to its end: copy-in and the collective's launch."""
    copy_out: range
    """Empty if there is none."""
    needed_at: int
    """Position at which the hook that uses it ends; the position after which prefetches for others go."""
    payload_bytes: int


def gathers(program: RankProgram) -> list[Gather]:
    """Return every all-gather of a layer, in the order in which layers need them."""
    if "gathers" not in program.found:
        program.found["gathers"] = _gathers(program)
    return list(program.found["gathers"])


def _gathers(program: RankProgram) -> list[Gather]:
    labels: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for _, label, begin, end in _label_ranges(program.points):
        if label is not None and label.fqn is not None:
            kind = label.activity if label.activity in ("all_gather", "copy_out") else label.kind
            labels.setdefault((kind, label.fqn), []).append((begin, end))
    places, sent = _sent(program)
    phase, step = program.activities.phase, program.activities.step
    payload = program.activities.payload_bytes
    found = []
    for (kind, fqn), ranges in labels.items():
        if kind != "all_gather":
            continue
        copies = sorted(labels.get(("copy_out", fqn), ()))
        hooks: dict[str, list[tuple[int, int]]] = {
            when: labels.get((f"pre_{when}", fqn), []) for when in ("forward", "backward")
        }
        for begin, end in ranges:
            launch, copy = bisect_left(places, begin), bisect_left(copies, (end, -1))
            if launch == len(places) or places[launch] > end or copy == len(copies):
                continue
            first, last = copies[copy]
            collective = sent[launch]
            hook = hooks["backward" if phase[collective] == "backward" else "forward"]
            ends = (hook[at] for at in range(bisect_left(hook, last, key=lambda one: one[1]), len(hook)))
            found.append(
                Gather(
                    fqn=fqn,
                    phase=phase[collective] or "other",
                    step=int(step[collective]),
                    issue=range(begin, end + 1),
                    copy_out=range(first, last + 1),
                    needed_at=next((outer for start, outer in ends if start <= first), last),
                    payload_bytes=int(payload[collective]),
                )
            )
    return sorted(found, key=lambda one: one.needed_at)


def reduced_once(program: RankProgram) -> tuple[RankProgram, dict[str, int]]:
    """Reduce each group's gradients in the last backward before the optimizer's step only.

    As FSDP2 does with ``set_requires_gradient_sync`` false in the others. Their copies into the collective
    stay, for the addition of gradients that comes in their place. Returned beside it: label -> bytes that
    its full gradients take more than its shards of them, -1 where not known.
    """
    table = program.activities
    updates, backwards = _ends_of_backwards(program.points)
    at, sent = _sent(program)
    last: dict[tuple[str, int, int], int] = {}
    reductions = []
    for name, label, begin, end in _label_ranges(program.points):
        if label is None or label.kind != "post_backward_reduce":
            continue
        launch = bisect_left(at, begin)
        if launch < len(at) and at[launch] < end:
            backward, update = bisect_left(backwards, begin), bisect_left(updates, begin)
            one = sent[launch]
            key = name, int(table.step[one]), update
            last[key] = max(last.get(key, 0), backward)
            size, ranks = int(table.payload_bytes[one]), int(table.group_size[one])
            more = size - size // ranks if size >= 0 and ranks > 0 else -1
            reductions.append((key, backward, range(at[launch], end), more))
    dropped = [entry for entry in reductions if entry[1] < last[entry[0]]]
    sizes = {name: size for (name, _, _), _, _, size in dropped}
    return _without(program, [part for _, _, part, _ in dropped]), sizes


def batches_at_hand(program: RankProgram) -> RankProgram:
    """Set the host time to get a batch to zero: launches in that time stay."""
    points = program.points
    inside = _positions(
        range(begin + 1, end + 1)
        for name, _, begin, end in _label_ranges(points)
        if name.startswith(NEXT_BATCH)
    )
    if not len(inside):
        return program
    columns = {}
    for name in ("work_ns", "compute_ns", "update_ns"):
        columns[name] = getattr(points, name).copy()
        columns[name][inside] = 0
    return replace(program, points=points.with_columns(**columns))


def _ends_of_backwards(points: Points) -> tuple[list[int], list[int]]:
    """Return the positions at which parameters are updated, and those at which backwards end."""

    def where(kind: str, *, opens: bool) -> list[int]:
        named = points.label.matches(lambda name: getattr(parse_label(name), "kind", None) == kind)
        at: list[int] = np.flatnonzero(named & (points.opens == opens)).tolist()
        return at

    return where("optimizer", opens=True), where("root_post_backward_callback", opens=False)


def _sent(program: RankProgram) -> tuple[list[int], list[int]]:
    """Return the positions at which collectives are launched, and the collectives."""
    launches = program.points.launches
    at = np.flatnonzero(np.append(program.activities.kind.equals("collective"), False)[launches])
    return at.tolist(), launches[at].tolist()


def _positions(parts: Iterable[Sequence[int]]) -> IntArray:
    return np.fromiter((position for part in parts for position in part), dtype=np.int64)


def _without(program: RankProgram, parts: list[range]) -> RankProgram:
    points = program.points
    left = [(int(points.begin[part[0]]), int(points.end[part[-1]])) for part in parts if part]
    kept = points.take(np.delete(np.arange(len(points)), _positions(parts)))
    return replace(program, points=kept, left_out=[*program.left_out, *left])


def prefetched(program: RankProgram, phase: str, ahead: int) -> RankProgram:
    """Gather each layer ``ahead`` layers before the one that needs it, if its phase has that many.

    As FSDP2 does with ``set_modules_to_forward_prefetch`` and ``set_modules_to_backward_prefetch``: the
    gather is issued when the hook of the earlier layer has its own parameters.
    """
    by_step = grouped((one.step, one) for one in gathers(program) if one.phase == phase)
    placed = [
        (order[prefetched_by(at, ahead)].needed_at, one)
        for _, order in sorted(by_step.items())
        for at, one in enumerate(order)
        if at
    ]
    moved = _positions(one.issue for _, one in placed)
    kept = np.delete(np.arange(len(program.points)), moved)
    behind = np.repeat([at for at, _ in placed], [len(one.issue) for _, one in placed]).astype(np.int64)
    places = np.argsort(np.concatenate([kept, behind]), kind="stable")
    return replace(program, points=program.points.take(np.concatenate([kept, moved])[places]))


def resharded(program: RankProgram, policy: str) -> RankProgram:
    """Keep layers gathered after forward (``never``), only the root (``default``), or none (``always``)."""

    def stays(fqn: str) -> bool:
        return stays_gathered(policy, is_root=is_root(fqn))

    dropped = [one for one in gathers(program) if one.phase == "backward" and stays(one.fqn)]
    if dropped:
        program = _without(program, [part for one in dropped for part in (one.issue, one.copy_out)])
    found = gathers(program)
    missing = _missing(found, {one.fqn for one in found if not stays(one.fqn)})
    if not missing:
        return program
    program = _with_copies(program, missing)
    return prefetched(program, "backward", 1) if program.on_device else program


def _missing(found: list[Gather], wanted: set[str]) -> list[Gather]:
    """Return forward gathers of layers that are not gathered again in the backward of the same step."""
    again = {(one.step, one.fqn) for one in found if one.phase == "backward"}
    return [
        one
        for one in found
        if one.phase == "forward" and one.fqn in wanted and (one.step, one.fqn) not in again
    ]


def _with_copies(program: RankProgram, missing: list[Gather]) -> RankProgram:
    """Gather layers once more before their backward, in the same way as in forward."""
    points, count = program.points, len(program.activities)
    hooks: dict[str, list[int]] = {}
    for position in np.flatnonzero(points.opens).tolist():
        label = parse_label(points.label[position] or "")
        if label is not None and label.kind == "pre_backward" and label.fqn is not None:
            hooks.setdefault(label.fqn, []).append(position)
    rows: list[int] = []
    behind: list[int] = []
    origins: list[int] = []
    refers: dict[str, list[int]] = {"launches": [], "awaits": [], "needs": []}
    for one in missing:
        hook = hooks.get(one.fqn, [])
        at = bisect_left(hook, one.needed_at)
        if at == len(hook):
            continue
        own = [*one.issue, *one.copy_out]
        launched = [origin for origin in points.launches[own].tolist() if origin >= 0]
        image = {origin: count + len(origins) + nth for nth, origin in enumerate(launched)}
        for name, column in refers.items():
            column += [image.get(other, other) for other in getattr(points, name)[own].tolist()]
        origins += launched
        rows += own
        behind += [hook[at]] * len(own)
    again = points.take(np.array(rows, dtype=np.int64)).with_columns(
        **{name: np.array(column, dtype=np.int64) for name, column in refers.items()},
        copy=np.ones(len(rows), dtype=np.bool_),
    )
    order = np.argsort([*range(len(points)), *behind], kind="stable")
    added = program.activities.take(np.array(origins, dtype=np.int64))
    none = np.full(len(added), -1, dtype=np.int64)
    added = added.with_columns(phase=Strings.full(len(added), "backward"), meeting=none, after=none)
    return replace(
        program,
        points=concat_tables([points, again]).take(order),
        activities=concat_tables([program.activities, added]),
    )


def _label_ranges(points: Points) -> Iterator[tuple[str, FsdpLabel | None, int, int]]:
    """Yield every label with the positions of its beginning and end, in the order of the ends."""
    names = points.label.values
    labels = [parse_label(name) for name in names]
    at = np.flatnonzero(points.label.codes >= 0)
    opened: list[list[int]] = [[] for _ in names]
    for position, code, opens in zip(
        at.tolist(), points.label.codes[at].tolist(), points.opens[at].tolist(), strict=True
    ):
        if opens:
            opened[code].append(position)
        elif opened[code]:
            yield names[code], labels[code], opened[code].pop(), position
