"""Another mesh for a recorded run: the same work on each rank, its collectives over other groups of ranks.

A transfer keeps the measured efficiency of its links: its time is the recorded one times the ratio of the
cluster model's times for the new and the old group. The cost of replicas, an all-reduce of each reduced
shard, is the model's, corrected by the ratio of the recorded reduce-scatter to its model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdp2prof.analyzers.whatif.changes import Change, Changed, NotApplicableError
from fsdp2prof.analyzers.whatif.program import Activity, Job, Point, RankProgram
from fsdp2prof.errors import ModelError, UsageError
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.timeline.costs import HostPace, transfer

_SHARDED = ("all_gather", "reduce_scatter")
_GROUP = "dp_replicate of the new mesh"
_LAST_WAITS = "FSDP::root_post_backward_callback"
"""Where the compute stream waits for every reduced gradient."""


def mesh_change(value: str, cluster: Cluster | None) -> Change:
    """Return the change to another mesh of ``dp_shard``, with or without ``dp_replicate`` replicas.

    ``cluster`` is the cluster of GPUs; CPUs need none. Raises ``UsageError`` for another dimension.
    """
    try:
        new = MeshSpec.parse(value)
    except ModelError as error:
        raise UsageError(f"--set mesh={value}: {error}") from None
    if new.tp * new.cp * new.pp * new.ep > 1:
        raise UsageError(
            f"--set mesh={value}: dp_shard and dp_replicate can be changed; for the others use "
            "`estimate step --calibrate RUN --mesh ...`"
        )
    if new.dp_shard == 1:
        raise UsageError(f"--set mesh={value}: over one shard nothing is gathered; give dp_shard=N")

    def apply(changed: Changed) -> Changed:
        old = _recorded_mesh(changed.job)
        if old == new:
            raise NotApplicableError("the run already has this mesh")
        costs = _costs(changed.job, old, new, cluster)
        meetings = _Meetings(changed.job)
        job = [_remeshed(program, new, costs, meetings) for program in changed.job]
        kept = old.dp_shard / new.dp_shard
        pace = changed.pace

        def activity_ns(one: Activity) -> int:
            time = pace.activity_ns(one)
            return round(time * kept) if _on_shards(one) else time

        def host_ns(point: Point) -> int:
            return pace.host_ns(point) - point.update_ns + round(point.update_ns * kept)

        return replace(
            changed,
            job=job,
            pace=replace(pace, activity_ns=activity_ns, host_ns=host_ns),
            memory_bytes=changed.memory_bytes if kept == 1 else None,
            assumptions=(*changed.assumptions, *_assumptions(old, new, cluster)),
        )

    return Change("mesh", value, f"a mesh of {new}", apply)


def _on_shards(one: Activity) -> bool:
    """Whether an activity goes over a rank's shards: it grows with them."""
    return one.role == "copy_in" or (one.kind == "compute" and one.phase == "optimizer")


def _recorded_mesh(job: Job) -> MeshSpec:
    """Return shards and replicas by the sizes of the groups that the layers' collectives were in."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for program in job:
        for one in program.activities.values():
            if one.kind == "collective" and one.fqn is not None:
                sizes[one.op].add(one.group_size)
                if one.payload_bytes <= 0 or one.group_size <= 0:
                    raise NotApplicableError("the traces do not say how many bytes or ranks a collective has")
    shards = sizes["all_gather"] | sizes["reduce_scatter"]
    if not shards:
        raise NotApplicableError("the traces name no layer's all-gather (no FSDP labels)")
    others = sorted(set(sizes) - {*_SHARDED, "all_reduce"})
    if len(shards) > 1 or len(sizes["all_reduce"]) > 1 or any(sizes[op] for op in others):
        raise NotApplicableError(
            "its layers' collectives are over groups of several kinds: use "
            "`estimate step --calibrate RUN --mesh ...`"
        )
    return MeshSpec(dp_replicate=max(sizes["all_reduce"], default=1), dp_shard=max(shards))


def _assumptions(old: MeshSpec, new: MeshSpec, cluster: Cluster | None) -> list[str]:
    notes = [f"each rank does the same work as under {old}; shards are that much larger or smaller"]
    if new.world_size != old.world_size:
        notes.append(
            f"{new.world_size} ranks in place of {old.world_size} train on "
            f"{new.world_size / old.world_size:g} times the tokens a step; those that were not recorded are "
            "as fast as those that were"
        )
    if cluster is None:
        notes.append("transfers by the bytes that a rank sends around a ring, at the recorded speed")
    else:
        network = "" if cluster.network is None else f" and {cluster.network.name} between nodes"
        notes.append(
            f"transfers as recorded, times what {cluster.hardware.name}, {cluster.gpus_per_node} a "
            f"node{network}, take by the model for the new groups over the old ones"
        )
    return notes


# What collectives take.


@dataclass(frozen=True, slots=True)
class _Costs:
    """Times of collectives on the recorded and on the new mesh, before the recording corrects them."""

    old: MeshSpec
    new: MeshSpec
    model: Callable[[str, int, MeshSpec], float]
    """(operation, payload in bytes, mesh) -> time of any unit."""

    def of(self, one: Activity) -> int:
        """Return the new transfer of a recorded collective, in nanoseconds."""
        payload = one.payload_bytes
        if one.op == "all_reduce":
            payload = payload * self.old.dp_shard // self.new.dp_shard
        before = self.model(one.op, one.payload_bytes, self.old)
        return max(1, round(one.transfer_ns * self.model(one.op, payload, self.new) / before))

    def all_reduce(self, scatter: Activity) -> int:
        """Return the time of reducing a reduce-scatter's result over replicas, in nanoseconds."""
        before = self.model("reduce_scatter", scatter.payload_bytes, self.old)
        payload = scatter.payload_bytes // self.new.dp_shard
        return max(1, round(scatter.transfer_ns * self.model("all_reduce", payload, self.new) / before))


def _costs(job: Job, old: MeshSpec, new: MeshSpec, cluster: Cluster | None) -> _Costs:
    if not job[0].on_device:
        return _Costs(old, new, _through_a_ring)
    if cluster is None:
        raise UsageError(
            "--set mesh: name the recorded accelerator with --hardware, and what connects its nodes with "
            "--network"
        )

    def modelled(op: str, payload: int, mesh: MeshSpec) -> float:
        place = cluster.placement(mesh, "dp_replicate" if op == "all_reduce" else "fsdp")
        return transfer(op, payload, place, cluster).ns

    return _Costs(old, new, modelled)


def _through_a_ring(op: str, payload: int, mesh: MeshSpec) -> float:
    """Bytes that gloo sends on each rank: its reduce-scatter is an all-reduce."""
    ranks = mesh.dp_replicate if op == "all_reduce" else mesh.dp_shard
    passes = 1 if op == "all_gather" else 2
    return passes * payload * (ranks - 1) / ranks


# Who meets whom.


class _Meetings:
    """Numbers the collectives in which ranks of the new groups meet."""

    def __init__(self, job: Job) -> None:
        self._next = 1 + max((one.meeting for p in job for one in p.activities.values()), default=-1)
        self._known: dict[tuple[object, ...], int] = {}

    def number(self, one: Activity, nth: int, group: int) -> int:
        """Return the number of the n-th collective of its kind of a layer, step and phase."""
        key = (one.op, one.fqn, one.phase, one.step, nth, group)
        if key not in self._known:
            self._known[key] = self._next
            self._next += 1
        return self._known[key]


def _remeshed(program: RankProgram, new: MeshSpec, costs: _Costs, meetings: _Meetings) -> RankProgram:
    """Return one rank's program on the new mesh."""
    seen: dict[tuple[object, ...], int] = defaultdict(int)
    images: dict[int, Activity] = {}
    added: dict[int, Activity] = {}
    free = 1 + max(program.activities, default=0)
    stream = 1 + max((one.stream for one in program.activities.values()), default=0)
    for index, one in sorted(program.activities.items()):
        if one.kind != "collective" or one.fqn is None:
            continue
        nth = seen[one.op, one.fqn, one.phase, one.step]
        seen[one.op, one.fqn, one.phase, one.step] += 1
        if one.op == "all_reduce":
            if new.dp_replicate > 1:
                images[index] = _moved(
                    one, costs.of(one), new.dp_replicate, meetings, nth, program.rank % new.dp_shard
                )
            continue
        images[index] = _moved(one, costs.of(one), new.dp_shard, meetings, nth, program.rank // new.dp_shard)
        if one.op == "reduce_scatter" and new.dp_replicate > 1 and costs.old.dp_replicate == 1:
            reduced = replace(
                one,
                index=free,
                op="all_reduce",
                group=_GROUP,
                payload_bytes=one.payload_bytes // new.dp_shard,
                stream=stream,
                rules=frozenset(),
                after=(),
                gap=0,
            )
            added[index] = _moved(
                reduced, costs.all_reduce(one), new.dp_replicate, meetings, nth, program.rank % new.dp_shard
            )
            free += 1
    dropped = {
        index
        for index, one in program.activities.items()
        if one.op == "all_reduce" and one.fqn is not None and new.dp_replicate == 1
    }
    return _rewritten(program, images, added, dropped)


def _moved(one: Activity, time: int, ranks: int, meetings: _Meetings, nth: int, group: int) -> Activity:
    meeting = meetings.number(one, nth, group) if one.meeting >= 0 else -1
    return replace(one, transfer_ns=time, group_size=ranks, meeting=meeting)


def _rewritten(
    program: RankProgram, images: dict[int, Activity], added: dict[int, Activity], dropped: set[int]
) -> RankProgram:
    """Put changed activities in the place of recorded ones, and all-reduces behind their reduce-scatters."""
    _follow(program.points, images, added)

    def image(one: Activity | None) -> Activity | None:
        return None if one is None or one.index in dropped else images.get(one.index, one)

    for one in images.values():
        one.after = tuple(found for cause in one.after if (found := image(cause)) is not None)
    points: list[Point] = []
    awaiting: dict[int, Activity] = {}
    issued: list[Activity] = []
    for point in program.points:
        launched, awaited = point.launches, point.awaits
        if point.label.startswith(_LAST_WAITS) and not point.opens and program.on_device:
            points += [replace(_at(point), needs=one) for one in issued]
            issued = []
        made = replace(point, launches=image(launched), awaits=image(awaited), needs=image(point.needs))
        points.append(made)
        if launched is not None and launched.index in added:
            issued.append(added[launched.index])
            if program.on_device:
                points += _issues(point, added[launched.index], on_device=True)
            else:
                awaiting[launched.index] = added[launched.index]
        if awaited is not None and awaited.index in awaiting:
            points += _issues(point, awaiting.pop(awaited.index), on_device=False)
    activities = {index: images.get(index, one) for index, one in program.activities.items()}
    activities = {index: one for index, one in activities.items() if index not in dropped}
    activities |= {one.index: one for one in added.values()}
    return replace(program, points=points, activities=activities)


def _issues(point: Point, one: Activity, *, on_device: bool) -> list[Point]:
    """Return the points at which the host issues an all-reduce, and on a CPU waits for it."""
    if on_device:
        return [replace(_at(point), work_ns=HostPace().collective_ns, launches=one)]
    return [replace(_at(point), launches=one), replace(_at(point), awaits=one)]


def _at(point: Point) -> Point:
    """Return a time just after a recorded interval of the host."""
    return Point(number=point.number, begin=point.end, end=point.end, work_ns=0, copy=True)


def _follow(points: Sequence[Point], images: dict[int, Activity], added: dict[int, Activity]) -> None:
    """Run the work on a reduced shard (a division, a cast) on its all-reduce's stream, as in FSDP2."""
    scatter: Activity | None = None
    for point in points:
        one = point.launches
        if one is None:
            continue
        if one.index in added:
            scatter = one
        elif scatter is not None and one.role == "reduce" and one.stream == scatter.stream:
            images[one.index] = replace(one, stream=added[scatter.index].stream)
        elif one.role in ("copy_in", "copy_out") or one.kind == "collective":
            scatter = None
