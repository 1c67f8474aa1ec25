"""Another mesh for a recorded run: the same work on each rank, its collectives over other groups of ranks.

A transfer keeps the measured efficiency of its links: its time is the recorded one times the ratio of the
cluster model's times for the new and the old group. The cost of replicas, an all-reduce of each reduced
shard, is the model's, corrected by the ratio of the recorded reduce-scatter to its model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fsdp2prof.analyzers.whatif.changes import Change, Changed, NotApplicableError, rounded
from fsdp2prof.analyzers.whatif.program import Activities, Job, Points, RankProgram
from fsdp2prof.errors import ModelError, UsageError
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.timeline.costs import HostPace, transfer
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings, concat_tables

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

        def activity_ns(program: RankProgram) -> IntArray:
            time = pace.activity_ns(program)
            return np.where(_on_shards(program.activities), rounded(time * kept), time)

        def host_ns(program: RankProgram) -> IntArray:
            updates = program.points.update_ns
            return pace.host_ns(program) - updates + rounded(updates * kept)

        notes, more = _assumptions(old, new, cluster), 0 if kept == 1 else None
        return changed.made(*notes, job=job, more_bytes=more, activity_ns=activity_ns, host_ns=host_ns)

    return Change("mesh", value, f"a mesh of {new}", apply)


def _on_shards(table: Activities) -> BoolArray:
    """Mask of the activities that go over a rank's shards: they grow with them."""
    return table.role.equals("copy_in") | (table.kind.equals("compute") & table.phase.equals("optimizer"))


def _of_layers(program: RankProgram) -> IntArray:
    """Return the collectives of layers."""
    table = program.activities
    return np.flatnonzero(table.kind.equals("collective") & (table.fqn.codes >= 0) & program.launched)


def _recorded_mesh(job: Job) -> MeshSpec:
    """Return shards and replicas by the sizes of the groups that the layers' collectives were in."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for program in job:
        table = program.activities.take(_of_layers(program))
        if min(table.payload_bytes.min(initial=1), table.group_size.min(initial=1)) <= 0:
            raise NotApplicableError("the traces do not say how many bytes or ranks a collective has")
        for op, size in zip(table.op.to_list(), table.group_size.tolist(), strict=True):
            sizes[op or ""].add(size)
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

    def of(self, op: str, recorded: int, transfer_ns: int) -> int:
        """Return the new transfer of a collective with a recorded payload and transfer, in nanoseconds."""
        payload = recorded
        if op == "all_reduce":
            payload = payload * self.old.dp_shard // self.new.dp_shard
        before = self.model(op, recorded, self.old)
        return max(1, round(transfer_ns * self.model(op, payload, self.new) / before))

    def all_reduce(self, recorded: int, transfer_ns: int) -> int:
        """Return the time of reducing a reduce-scatter's result over replicas, in nanoseconds."""
        before = self.model("reduce_scatter", recorded, self.old)
        payload = recorded // self.new.dp_shard
        return max(1, round(transfer_ns * self.model("all_reduce", payload, self.new) / before))


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
        self._next = 1 + max((int(one.activities.meeting.max(initial=-1)) for one in job), default=-1)
        self._known: dict[tuple[object, ...], int] = {}

    def number(self, key: tuple[object, ...]) -> int:
        """Return the number of a collective: its kind, layer, phase, step, place among these, and group."""
        if key not in self._known:
            self._known[key] = self._next
            self._next += 1
        return self._known[key]


def _remeshed(program: RankProgram, new: MeshSpec, costs: _Costs, meetings: _Meetings) -> RankProgram:
    """Return one rank's program on the new mesh."""
    table = program.activities
    rows = _of_layers(program)
    changed = ("transfer_ns", "group_size", "meeting", "stream")
    columns = {name: getattr(table, name).copy() for name in changed}
    seen: dict[tuple[object, ...], int] = defaultdict(int)
    added: dict[int, int] = {}
    reduced: list[tuple[int, int]] = []
    named = zip(*(one.take(rows).to_list() for one in (table.op, table.fqn, table.phase)), strict=True)
    for row, (op, fqn, phase) in zip(rows.tolist(), named, strict=True):
        key = op, fqn, phase, int(table.step[row])
        nth = seen[key]
        seen[key] += 1
        payload, time = int(table.payload_bytes[row]), int(table.transfer_ns[row])
        meets = table.meeting[row] >= 0
        replicas = new.dp_replicate, program.rank % new.dp_shard
        if op == "all_reduce" and new.dp_replicate == 1:
            continue
        columns["transfer_ns"][row] = costs.of(op or "", payload, time)
        ranks, group = replicas if op == "all_reduce" else (new.dp_shard, program.rank // new.dp_shard)
        columns["group_size"][row] = ranks
        columns["meeting"][row] = meetings.number((*key, nth, group)) if meets else -1
        if op == "reduce_scatter" and new.dp_replicate > 1 and costs.old.dp_replicate == 1:
            added[row] = len(table) + len(added)
            meeting = meetings.number(("all_reduce", *key[1:], nth, replicas[1])) if meets else -1
            reduced.append((costs.all_reduce(payload, time), meeting))
    _follow(program, columns["stream"], added)
    dropped = _mask_of(program, [] if new.dp_replicate > 1 else rows[table.op.equals("all_reduce")[rows]])
    columns["after"] = np.where(dropped[table.after] & (table.after >= 0), -1, table.after)
    moved = table.with_columns(**columns)
    if added:
        scatters = table.take(np.array([*added]))
        count = len(scatters)
        none, zero = np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.int64)
        time, meeting = np.array(reduced, dtype=np.int64).T
        all_reduces = scatters.with_columns(
            op=Strings.full(count, "all_reduce"),
            group=Strings.full(count, _GROUP),
            payload_bytes=scatters.payload_bytes // new.dp_shard,
            stream=np.full(count, _free_stream(program)),
            group_size=np.full(count, new.dp_replicate),
            meeting=meeting,
            transfer_ns=time,
            rules=zero,
            after=none,
            gap=zero,
        )
        moved = concat_tables([moved, all_reduces])
    return replace(program, points=_points(program, added, dropped), activities=moved)


def _mask_of(program: RankProgram, rows: Sequence[int] | IntArray) -> BoolArray:
    mask = np.zeros(len(program.activities), dtype=np.bool_)
    mask[np.asarray(rows, dtype=np.int64)] = True
    return mask


def _free_stream(program: RankProgram) -> int:
    return 1 + int(program.activities.stream.max(initial=0))


def _points(program: RankProgram, added: dict[int, int], dropped: BoolArray) -> Points:
    """Return the points without the activities that are dropped, with all-reduces after their
    reduce-scatters; on a device, the compute stream waits for them at the end of the backward."""
    points, on_device = program.points, program.on_device
    columns = {}
    for name in ("launches", "awaits", "needs"):
        column = getattr(points, name)
        columns[name] = np.where((column >= 0) & dropped[column], -1, column)
    kept = points.with_columns(**columns)
    ends = points.label.matches(lambda name: name.startswith(_LAST_WAITS)) & ~points.opens & on_device
    scatters = np.append(_mask_of(program, [*added]), False)
    new: dict[str, list[int]] = {"launches": [], "awaits": [], "needs": []}
    work, beside, order = [], [], []
    issued: list[int] = []

    def insert(at: int, place: int, name: str, one: int, work_ns: int = 0) -> None:
        for other, column in new.items():
            column.append(one if other == name else -1)
        work.append(work_ns)
        beside.append(at)
        order.append(2 * at + place)

    for at in np.flatnonzero(ends | scatters[points.launches] | scatters[points.awaits]).tolist():
        launched, awaited = added.get(int(points.launches[at])), added.get(int(points.awaits[at]))
        if ends[at]:
            for one in issued:
                insert(at, -1, "needs", one)
            issued = []
        if launched is not None and on_device:
            issued.append(launched)
            insert(at, 1, "launches", launched, HostPace().collective_ns)
        if awaited is not None and not on_device:
            insert(at, 1, "launches", awaited)
            insert(at, 1, "awaits", awaited)
    count = len(beside)
    none, zero = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.int64)
    there = points.take(np.array(beside, dtype=np.int64))
    inserted = there.with_columns(
        begin=there.end,
        work_ns=np.array(work, dtype=np.int64),
        **dict.fromkeys(("compute_ns", "update_ns"), zero),
        **{name: np.array(column, dtype=np.int64) for name, column in new.items()},
        **dict.fromkeys(("syncs", "joins", "opens"), none),
        label=Strings.full(count, None),
        copy=~none,
    )
    places = np.argsort([*range(0, 2 * len(points), 2), *order], kind="stable")
    return concat_tables([kept, inserted]).take(places)


def _follow(program: RankProgram, stream: IntArray, added: dict[int, int]) -> None:
    """Run the work on a reduced shard (a division, a cast) on its all-reduce's stream, as in FSDP2."""
    table = program.activities
    free, scatter = _free_stream(program), -1
    launched = program.points.launches[program.points.launches >= 0]
    matters = table.kind.equals("collective") | (table.role.codes >= 0)
    for one in launched[matters[launched]].tolist():
        role = table.role[one]
        if one in added:
            scatter = one
        elif scatter >= 0 and role == "reduce" and table.stream[one] == table.stream[scatter]:
            stream[one] = free
        elif role in ("copy_in", "copy_out") or table.kind[one] == "collective":
            scatter = -1
