"""Changes to the order of a recorded program: which layers are gathered when, and which are not gathered
at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fsdp2prof.analyzers.trace.spans import NEXT_BATCH
from fsdp2prof.analyzers.whatif.program import Activity, Point, RankProgram
from fsdp2prof.labels import is_root, parse_label
from fsdp2prof.schedule import prefetched_by, stays_gathered


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
    for name, begin, end in _label_ranges(program.points):
        label = parse_label(name)
        if label is not None and label.fqn is not None:
            kind = label.activity if label.activity in ("all_gather", "copy_out") else label.kind
            labels.setdefault((kind, label.fqn), []).append((begin, end))
    found = []
    for (kind, fqn), ranges in labels.items():
        for begin, end in ranges if kind == "all_gather" else ():
            launched = [p.launches for p in program.points[begin : end + 1] if p.launches is not None]
            collective = next((one for one in launched if one.kind == "collective"), None)
            after = [inner for inner in labels.get(("copy_out", fqn), ()) if inner[0] >= end]
            if collective is None or not after:
                continue
            first, last = min(after)
            hook = "pre_backward" if collective.phase == "backward" else "pre_forward"
            ends = [outer for start, outer in labels.get((hook, fqn), ()) if start <= first and last <= outer]
            found.append(
                Gather(
                    fqn=fqn,
                    phase=collective.phase,
                    step=collective.step,
                    issue=range(begin, end + 1),
                    copy_out=range(first, last + 1),
                    needed_at=ends[0] if ends else last,
                    payload_bytes=collective.payload_bytes,
                )
            )
    return sorted(found, key=lambda one: one.needed_at)


def reduced_once(program: RankProgram) -> tuple[RankProgram, dict[str, int]]:
    """Reduce each group's gradients in the last backward before the optimizer's step only.

    As FSDP2 does with ``set_requires_gradient_sync`` false in the others. Their copies into the collective
    stay, for the addition of gradients that comes in their place. Returned beside it: label -> bytes that
    its full gradients take more than its shards of them, -1 where not known.
    """
    backwards = _backwards(program)
    last: dict[tuple[str, int, int], int] = {}
    reductions = []
    for name, begin, end in _label_ranges(program.points):
        label = parse_label(name)
        if label is None or label.kind != "post_backward_reduce":
            continue
        launched = [at for at in range(begin, end) if _sends(program.points[at])]
        if launched:
            backward, update = backwards[begin]
            one = program.points[launched[0]].launches
            assert one is not None
            key = name, one.step, update
            last[key] = max(last.get(key, 0), backward)
            known = one.payload_bytes >= 0 and one.group_size > 0
            more = one.payload_bytes - one.payload_bytes // one.group_size if known else -1
            reductions.append((key, backward, range(launched[0], end), more))
    dropped = [entry for entry in reductions if entry[1] < last[entry[0]]]
    sizes = {name: size for (name, _, _), _, _, size in dropped}
    return _without(program, [part for _, _, part, _ in dropped]), sizes


def batches_at_hand(program: RankProgram) -> RankProgram:
    """Set the host time to get a batch to zero: launches in that time stay."""
    inside = {
        position
        for name, begin, end in _label_ranges(program.points)
        if name.startswith(NEXT_BATCH)
        for position in range(begin + 1, end + 1)
    }
    if not inside:
        return program
    points = [
        replace(point, work_ns=0, compute_ns=0, update_ns=0) if at in inside else point
        for at, point in enumerate(program.points)
    ]
    return replace(program, points=points)


def _backwards(program: RankProgram) -> list[tuple[int, int]]:
    """Of each point, how many backwards ended before it, and how many times parameters were updated."""
    counts, backwards, updates = [], 0, 0
    for point in program.points:
        counts.append((backwards, updates))
        label = parse_label(point.label) if point.label else None
        if label is not None and point.opens:
            updates += label.kind == "optimizer"
        elif label is not None:
            backwards += label.kind == "root_post_backward_callback"
    return counts


def _sends(point: Point) -> bool:
    return point.launches is not None and point.launches.kind == "collective"


def _without(program: RankProgram, parts: list[range]) -> RankProgram:
    gone = {position for part in parts for position in part}
    left = [(program.points[part[0]].begin, program.points[part[-1]].end) for part in parts if part]
    kept = _with_points(program, [p for at, p in enumerate(program.points) if at not in gone])
    return replace(kept, left_out=[*program.left_out, *left])


def prefetched(program: RankProgram, phase: str, ahead: int) -> RankProgram:
    """Gather each layer ``ahead`` layers before the one that needs it, if its phase has that many.

    As FSDP2 does with ``set_modules_to_forward_prefetch`` and ``set_modules_to_backward_prefetch``: the
    gather is issued when the hook of the earlier layer has its own parameters.
    """
    placed: dict[int, list[Gather]] = {}
    gone: set[int] = set()
    for step in sorted({step for _, step in _phases(program)}):
        order = [one for one in gathers(program) if one.phase == phase and one.step == step]
        for at, one in enumerate(order[1:], 1):
            placed.setdefault(order[prefetched_by(at, ahead)].needed_at, []).append(one)
            gone |= set(one.issue)
    points: list[Point] = []
    for at, point in enumerate(program.points):
        if at not in gone:
            points.append(point)
        for one in placed.get(at, ()):
            points += [program.points[position] for position in one.issue]
    return _with_points(program, points)


def resharded(program: RankProgram, policy: str) -> RankProgram:
    """Keep layers gathered after forward (``never``), only the root (``default``), or none (``always``)."""

    def stays(fqn: str) -> bool:
        return stays_gathered(policy, is_root=is_root(fqn))

    dropped = [one for one in gathers(program) if one.phase == "backward" and stays(one.fqn)]
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
    points = list(program.points)
    number = max(program.activities) + 1
    activities = dict(program.activities)
    insertions: dict[int, list[Point]] = {}
    for one in missing:
        at = _pre_backward(program.points, one)
        if at is None:
            continue
        images: dict[int, Activity] = {}
        copies = []
        for position in (*one.issue, *one.copy_out):
            point = program.points[position]
            launched = point.launches
            if launched is not None:
                image = replace(
                    launched, index=number, phase="backward", meeting=-1, after=(), origin=launched.index
                )
                images[launched.index] = activities[number] = image
                number += 1
            copies.append(
                replace(
                    point,
                    launches=None if launched is None else images[launched.index],
                    awaits=_image(point.awaits, images),
                    needs=_image(point.needs, images),
                    copy=True,
                )
            )
        insertions.setdefault(at, []).extend(copies)
    made: list[Point] = []
    for at, point in enumerate(points):
        made.append(point)
        made += insertions.get(at, ())
    return replace(program, points=made, activities=activities)


def _image(one: Activity | None, images: dict[int, Activity]) -> Activity | None:
    return None if one is None else images.get(one.index, one)


def _pre_backward(points: list[Point], gather: Gather) -> int | None:
    """Position of the beginning of a layer's pre-backward hook after its forward."""
    for at in range(gather.needed_at, len(points)):
        point = points[at]
        if point.opens:
            label = parse_label(point.label)
            if label is not None and label.kind == "pre_backward" and label.fqn == gather.fqn:
                return at
    return None


def _with_points(program: RankProgram, points: list[Point]) -> RankProgram:
    launched = {p.launches.index for p in points if p.launches is not None}
    kept = {index: one for index, one in program.activities.items() if index in launched}
    return replace(program, points=points, activities=kept)


def _phases(program: RankProgram) -> set[tuple[str, int]]:
    return {(one.phase, one.step) for one in program.activities.values() if one.kind == "collective"}


def _label_ranges(points: list[Point]) -> Iterator[tuple[str, int, int]]:
    """Yield every label with the positions of its beginning and end, in the order of the ends."""
    opened: dict[str, list[int]] = {}
    for at, point in enumerate(points):
        if not point.label:
            continue
        if point.opens:
            opened.setdefault(point.label, []).append(at)
        elif opened.get(point.label):
            yield point.label, opened[point.label].pop(), at
