"""A recorded rank as a Chakra execution trace: what ran, how long, and what it waited for.

The schema is ``et_def.proto`` of MLCommons Chakra. What ASTRA-sim takes for the size of a collective is what
a rank gives in: the shard of an all-gather, the whole of a reduce-scatter or all-reduce (its ``Ring.cc``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fsdp2prof.analyzers.whatif.program import RankProgram
from fsdp2prof.analyzers.whatif.run import dependencies
from fsdp2prof.errors import InputError
from fsdp2prof.vocabulary import layer_name, op_label, printable

COMPUTE, COLLECTIVE = 4, 7
"""``COMP_NODE`` and ``COMM_COLL_NODE`` of ``NodeType``."""

_TYPES = {"all_reduce": 0, "all_gather": 2, "broadcast": 5, "all_to_all": 6, "reduce_scatter": 7}
"""Numbers of ``CollectiveCommType``."""

_NS_IN_US = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class ChakraNode:
    """A node; times in whole microseconds, as the schema has them."""

    id: int
    name: str
    type: int
    waits_for: Sequence[int]
    """Nodes, all of them earlier in the file."""
    duration_us: int
    start_us: int
    on_host: bool
    comm_type: int | None = None
    comm_bytes: int | None = None
    group: str | None = None
    """Name of its process group; null for that of all ranks."""
    unplaced: bool = False
    """A collective whose group is not known, written as the time that it took."""


@dataclass(slots=True)
class _Lane:
    """Whole microseconds of something that goes on: what rounding leaves is carried to the next."""

    rest_ns: int = 0

    def round(self, time_ns: int) -> int:
        whole, self.rest_ns = divmod(self.rest_ns + time_ns, _NS_IN_US)
        return whole


@dataclass(slots=True)
class _Writer:
    program: RankProgram
    groups: Mapping[tuple[int, str], str | None]
    """(rank, process group) -> its name among all ranks' groups; null is all ranks, no entry not known."""
    ids: dict[int, int] = field(default_factory=dict)
    """Activity -> node."""
    lanes: dict[int, _Lane] = field(default_factory=dict)
    host: _Lane = field(default_factory=_Lane)
    last_host: int | None = None
    awaited: list[int] = field(default_factory=list)
    nodes: int = 0

    def write(self) -> Iterator[ChakraNode]:
        causes, points = dependencies(self.program), self.program.points
        work_ns, begin = 0, None
        columns = (points.begin, points.work_ns, points.awaits, points.launches)
        for begins, work, awaited, launched in zip(*(column.tolist() for column in columns), strict=True):
            work_ns += work
            begin = begins if begin is None else begin
            if awaited < 0 and launched < 0:
                continue
            yield from self._host_work(work_ns, begin)
            work_ns, begin = 0, None
            if awaited in self.ids:
                self.awaited.append(self.ids[awaited])
            if launched >= 0:
                yield self._activity(launched, causes.get(launched, ()))
        yield from self._host_work(work_ns, begin or 0)

    def _host_work(self, work_ns: int, begin: int) -> Iterator[ChakraNode]:
        """Write the host's work, unless it is less than a microsecond and nothing was waited for before."""
        duration = self.host.round(work_ns)
        if not duration and not self.awaited:
            return
        before = [] if self.last_host is None else [self.last_host]
        node = ChakraNode(
            id=self._next(),
            name="host",
            type=COMPUTE,
            waits_for=[*before, *self.awaited],
            duration_us=duration,
            start_us=(begin + self.program.shift_ns) // _NS_IN_US,
            on_host=True,
        )
        self.last_host, self.awaited = node.id, []
        yield node

    def _activity(self, row: int, causes: Sequence[int]) -> ChakraNode:
        given = [] if self.last_host is None else [self.last_host]
        waits = [self.ids[cause] for cause in causes if cause in self.ids]
        waits = list(dict.fromkeys([*given, *self.awaited, *waits]))
        table = self.program.activities
        recorded = table.kind[row] == "collective"
        group = self.program.rank, table.group[row] or ""
        is_collective = recorded and group in self.groups
        lane = self.lanes.setdefault(-1 if recorded else int(table.stream[row]), _Lane())
        duration = table.transfer_ns[row] if recorded else table.end[row] - table.start[row]
        node = ChakraNode(
            id=self._next(),
            name=self._name(row),
            type=COLLECTIVE if is_collective else COMPUTE,
            waits_for=waits,
            duration_us=lane.round(max(0, int(duration))),
            start_us=(int(table.start[row]) + self.program.shift_ns) // _NS_IN_US,
            on_host=False,
            comm_type=self._type(row) if is_collective else None,
            comm_bytes=self._given_bytes(row) if is_collective else None,
            group=self.groups[group] if is_collective else None,
            unplaced=recorded and not is_collective,
        )
        self.ids[row] = node.id
        return node

    def _next(self) -> int:
        self.nodes += 1
        return self.nodes - 1

    def _name(self, row: int) -> str:
        table = self.program.activities
        kind = table.kind[row]
        what = op_label(table.op[row] or "") if kind == "collective" else kind
        return printable(f"{what} {layer_name(table.fqn[row])} {table.phase[row]}")

    def _type(self, row: int) -> int:
        table = self.program.activities
        op = table.op[row] or ""
        if op not in _TYPES:
            raise InputError(
                f"rank {self.program.rank}: Chakra needs the peers and the kind of {op_label(op)} "
                f"({table.phase[row]}), which the trace lacks"
            )
        return _TYPES[op]

    def _given_bytes(self, row: int) -> int:
        table = self.program.activities
        payload, ranks = int(table.payload_bytes[row]), int(table.group_size[row])
        if payload < 0:
            raise InputError(
                f"rank {self.program.rank}: the size of the {op_label(table.op[row] or '')} of "
                f"{layer_name(table.fqn[row])} is not in the trace: record with --shapes"
            )
        return payload // ranks if table.op[row] == "all_gather" and ranks > 0 else payload


def chakra_nodes(program: RankProgram, groups: Mapping[tuple[int, str], str | None]) -> Iterator[ChakraNode]:
    """Return a prepared rank's nodes, each after those that it waits for.

    Raises ``InputError`` for a collective that the schema or the trace does not say enough of.
    """
    yield from _Writer(program, groups).write()
