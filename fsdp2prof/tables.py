"""The typed tables every part of the toolkit shares: columns, dtypes, units.

A recorder and an estimator are two producers of the same tables, and analyzers never know which one made
them. A table is a frozen dataclass of equally long columns: ``int64`` times in nanoseconds, ``int64``
bytes, and interned strings (:class:`Strings`). Nothing here computes an analysis.

========================  ================================================================================
:class:`EventTable`       one rank's Kineto events (host ops, annotations, kernels, copies)
:class:`CollectiveArgs`   the collective metadata some events carry (sparse, by event row)
:class:`StepTable`        training steps
:class:`LabelTable`       labelled host ranges (``record_function``), the raw material of phases
:class:`PhaseTable`       host time -> (step, fqn, phase, activity): the one map everything joins to
:class:`CollectiveTable`  one row per collective, attributed
:class:`AllocationTable`  one row per allocation, attributed
:class:`MemoryRecording`  one device's memory history: allocations, segments, blocks, labels, steps, stacks
:class:`ShapeTable`       recorded input shapes of the operators that need them (sparse, by event row)
:class:`MemoryEventTable` Kineto's ``[memory]`` instants
:class:`SyncTable`        what CUDA synchronisation events wait for (sparse, by event row)
:class:`Trace`            everything one trace file holds: the reader's result
========================  ================================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from fsdp2prof.manifest import DeviceInfo, ProcessGroupInfo

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Self

__all__ = [
    "ACTIVITIES",
    "CATEGORIES",
    "GIVEN",
    "NEVER",
    "OPS",
    "PHASES",
    "AllocationTable",
    "BlockTable",
    "BoolArray",
    "CollectiveArgs",
    "CollectiveTable",
    "EventTable",
    "IntArray",
    "LabelTable",
    "MemoryEventTable",
    "PhaseTable",
    "ShapeTable",
    "StepTable",
    "Strings",
    "SyncTable",
    "Table",
    "Trace",
    "concat_strings",
    "concat_tables",
]

IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

NEVER = int(np.iinfo(np.int64).max)
"""The free time and order of an allocation that was still alive when the recording ended."""

PHASES = ("forward", "backward", "optimizer", "other")
"""What the training loop was doing; a forward recomputed inside backward is ``backward``."""

ACTIVITIES = (
    "compute",
    "all_gather",
    "copy_out",
    "reduce",
    "reduce_wait",
    "final_wait",
    "reshard",
    "accumulate",
    "cast",
    "inputs_to_device",
    "hooks",
)
"""What FSDP was doing inside a phase: ``compute`` is the user's own work, the rest are FSDP labels."""

OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send_recv", "other")
"""Kinds of collectives."""

CATEGORIES = (
    "sharded_parameter",
    "sharded_gradient",
    "optimizer_state",
    "unsharded_parameter",
    "unsharded_gradient",
    "all_gather_buffer",
    "reduce_scatter_buffer",
    "activation",
    "input",
    "temporary",
    "unattributed",
)
"""What an allocation holds."""


GIVEN = "given to "
"""Begins the ``op`` of an allocation that no operator made in sight."""


_FEW = 6
"""Distinct values up to which a mask is made by comparing."""


@dataclass(frozen=True, slots=True)
class Strings:
    """A column of interned strings: ``codes`` (int32, -1 is null) index into ``values``."""

    codes: npt.NDArray[np.int32]
    values: tuple[str, ...]

    @classmethod
    def intern(cls, items: Iterable[str | None]) -> Strings:
        """Build a column from Python strings; ``None`` becomes null."""
        table: dict[str, int] = {}
        codes = [-1 if item is None else table.setdefault(item, len(table)) for item in items]
        return cls(np.asarray(codes, dtype=np.int32), tuple(table))

    @classmethod
    def full(cls, length: int, value: str | None) -> Strings:
        """Build a column of one repeated value."""
        code = -1 if value is None else 0
        return cls(np.full(length, code, dtype=np.int32), () if value is None else (value,))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, row: int) -> str | None:
        code = int(self.codes[row])
        return None if code < 0 else self.values[code]

    def take(self, rows: npt.NDArray[Any]) -> Strings:
        """Select rows by index or mask; the values stay as they are."""
        return Strings(self.codes[rows], self.values)

    def lookup(self, rows: npt.NDArray[Any]) -> Strings:
        """Select rows by index; -1 gives null (as from a join that found nothing)."""
        return Strings(np.append(self.codes, np.int32(-1))[rows], self.values)

    def select(self, rows: npt.NDArray[Any]) -> Strings:
        """Select rows by index, null where the index is -1."""
        return Strings(np.append(self.codes, np.int32(-1))[rows], self.values)

    def matches(self, predicate: Callable[[str], bool]) -> BoolArray:
        """Mask of the rows whose string satisfies ``predicate``, evaluated once per distinct value."""
        hits = [code for code, value in enumerate(self.values) if predicate(value)]
        if len(hits) <= _FEW:
            # Comparing is several times faster than indexing, and needs no 64-bit copy of the codes.
            mask = np.zeros(len(self.codes), dtype=np.bool_)
            for code in hits:
                mask |= self.codes == code
            return mask
        hit = np.zeros(len(self.values) + 1, dtype=np.bool_)
        hit[hits] = True
        return hit[self.codes]

    def equals(self, value: str | None) -> BoolArray:
        """Mask of the rows equal to ``value`` (``None``: the null rows)."""
        if value is None:
            return np.asarray(self.codes < 0)
        return self.matches(lambda item: item == value)

    def to_list(self) -> list[str | None]:
        """Decode to Python strings."""
        lookup = [*self.values, None]
        return [lookup[code] for code in self.codes]


class Table:
    """Base of the tables: equal lengths checked once, row selection, and a DataFrame for people."""

    __slots__ = ()

    def __post_init__(self) -> None:
        lengths = {field.name: len(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{type(self).__name__}: columns differ in length: {lengths}")

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]

    @classmethod
    def empty(cls) -> Self:
        """Build a table of no rows."""
        columns: dict[str, Any] = {}
        for field in fields(cls):  # type: ignore[arg-type]
            kind = {"Strings": Strings.full(0, None), "BoolArray": np.zeros(0, dtype=np.bool_)}
            columns[field.name] = kind.get(str(field.type), np.zeros(0, dtype=np.int64))
        return cls(**columns)

    def take(self, rows: npt.NDArray[Any]) -> Self:
        """Select rows by index array or mask."""
        columns = {}
        for field in fields(self):  # type: ignore[arg-type]
            column = getattr(self, field.name)
            columns[field.name] = column.take(rows) if isinstance(column, Strings) else _select(column, rows)
        return type(self)(**columns)

    def with_columns(self, **columns: Any) -> Self:
        """Return a copy with some columns replaced."""
        return replace(self, **columns)  # type: ignore[type-var]

    def to_pandas(self) -> pd.DataFrame:
        """Return the table as a DataFrame, strings decoded (imports pandas)."""
        import pandas as pd

        data = {}
        for field in fields(self):  # type: ignore[arg-type]
            column = getattr(self, field.name)
            data[field.name] = column.to_list() if isinstance(column, Strings) else column
        return pd.DataFrame(data)


def _select(column: Any, rows: npt.NDArray[Any]) -> Any:
    if isinstance(column, np.ndarray):
        return column[rows]
    index = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
    return tuple(column[int(i)] for i in index)


@dataclass(frozen=True, kw_only=True, slots=True)
class EventTable(Table):
    """One rank's complete events, one row each, sorted by ``start_ns`` (outer before inner on ties)."""

    start_ns: IntArray
    """Nanoseconds since the trace's own epoch (``baseTimeNanoseconds`` is not added)."""
    end_ns: IntArray
    name: Strings
    category: Strings
    """Kineto's ``cat``: ``cpu_op``, ``user_annotation``, ``kernel``, ``gpu_memcpy``, ``cuda_runtime``, ..."""
    thread: IntArray
    """Index of the (pid, tid) pair for host events; -1 on a device."""
    device: IntArray
    """Device index for device activities; -1 on the host."""
    stream: IntArray
    """Stream of a device activity; -1 on the host."""
    correlation: IntArray
    """Joins a device activity to its launch; -1 where there is none."""
    external_id: IntArray
    """Joins a launch or a device activity to its operator; -1 where there is none."""
    bytes: IntArray
    """Bytes of a memory copy or set; -1 elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveArgs(Table):
    """Collective metadata of events: ``record_param_comms``, ``c10d::*``, NCCL kernels, ``gloo:*``."""

    event: IntArray
    """Row of the event in its :class:`EventTable`."""
    collective: Strings
    """Collective name as written (``_allgather_base``, ...); null where only shapes are known."""
    dtype: Strings
    """Element type as written (``BFloat16``, ``c10::BFloat16``, ...)."""
    in_nelems: IntArray
    """Elements of this rank's input; -1 unknown."""
    out_nelems: IntArray
    """Elements of this rank's output; -1 unknown."""
    group_size: IntArray
    """Ranks in the process group; -1 unknown."""
    process_group: Strings
    """Process group name."""
    process_group_desc: Strings
    """Process group description (``mesh_dp_shard``, ``default_pg``)."""
    ranks: Strings
    """Ranks as written, possibly truncated."""
    seq: IntArray
    """Sequence number in the group; -1 unknown."""
    comms_id: IntArray
    """Identifier equal on all ranks of one collective; -1 unknown."""
    is_async: IntArray
    """1 asynchronous, 0 not, -1 unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTable(Table):
    """Training steps of one rank in order."""

    step: IntArray
    """Step number as labelled; 0 for a whole-trace window."""
    start_ns: IntArray
    end_ns: IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelTable(Table):
    """Labelled host ranges of one rank: ``FSDP::*``, ``ProfilerStep#N``, optimizer steps, autograd nodes.

    From a Kineto trace, from a snapshot's ``external_annotations`` or from the recorder's own log.
    """

    thread: IntArray
    start_ns: IntArray
    end_ns: IntArray
    name: Strings


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTable(Table):
    """Host time -> (step, fqn, phase, activity).

    Rows are disjoint per thread (the innermost label wins) and sorted by (thread, start), so that a join by
    host time is one ``searchsorted``. Time outside every row is phase ``other`` and fqn null.
    """

    thread: IntArray
    start_ns: IntArray
    end_ns: IntArray
    step: IntArray
    """Step number; -1 outside every step."""
    fqn: Strings
    """FSDP module; the empty string is the root, null is no module."""
    phase: Strings
    """One of :data:`PHASES`."""
    activity: Strings
    """One of :data:`ACTIVITIES`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveTable(Table):
    """One row per collective of one rank, sorted by ``start_ns``."""

    start_ns: IntArray
    """Start on the device (CPU: of the worker's ``gloo:*`` range)."""
    end_ns: IntArray
    issue_ns: IntArray
    """Host time of the issuing operator; -1 when its launch is not in the file."""
    step: IntArray
    """-1 outside every step."""
    fqn: Strings
    """Layer whose parameters it carries: null when unattributed, the empty string for the root."""
    phase: Strings
    op: Strings
    """One of :data:`OPS`."""
    process_group: Strings
    mesh_dim: Strings
    dtype: Strings
    """torch name without the module: ``bfloat16``, ``float32``."""
    group_size: IntArray
    payload_bytes: IntArray
    """all-gather: whole output; reduce-scatter: whole input; all-reduce: the tensor; -1 unknown."""
    wire_bytes: IntArray
    """Sent per rank: payload (n-1)/n; all-reduce 2(n-1)/n; -1 unknown."""
    stream: IntArray
    seq: IntArray
    comms_id: IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationTable(Table):
    """One row per allocation of one device, sorted by ``alloc_order``.

    ``*_order`` is the position in the allocator's own history: always known, unique, and what a peak is
    computed from. ``*_ns`` is host time and may be missing (-1) in old snapshots. An allocation alive before
    the history began has order -1 and time -1; one alive at its end has :data:`NEVER` for both.
    """

    alloc_order: IntArray
    free_order: IntArray
    alloc_ns: IntArray
    free_ns: IntArray
    size: IntArray
    """Requested bytes."""
    address: IntArray
    stream: IntArray
    pool: Strings
    """Allocator pool as written; null is the default pool."""
    step: IntArray
    """Step that allocated it; -1 unknown."""
    phase: Strings
    fqn: Strings
    activity: Strings
    """FSDP activity that allocated it, one of :data:`ACTIVITIES`; null unknown."""
    category: Strings
    """One of :data:`CATEGORIES`."""
    op: Strings
    """Operator or innermost frame that allocated it; null unknown. :data:`GIVEN` and an operator: made out of
    sight, inside a backend or another library, and first seen as that operator's argument."""
    stack: IntArray
    """Row of the stack in the recording's :class:`Stacks`; -1 unknown."""
    tag: Strings
    """``user_metadata`` the recorder set when it was allocated; null where nobody did."""
    release_order: IntArray
    """When the block could be reused: after ``free_order`` while another stream still needed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentTable(Table):
    """Memory the allocator took from the device (reserved), one row per segment or mapped range.

    Orders and times as in :class:`AllocationTable`. Empty where there is no caching allocator.
    """

    alloc_order: IntArray
    free_order: IntArray
    alloc_ns: IntArray
    size: IntArray
    address: IntArray
    stream: IntArray
    pool: Strings
    """``small``, ``large`` or a private pool's id as written; null unknown."""
    expandable: BoolArray


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTable(Table):
    """Blocks of the segments when the recording ended, sorted by address; fragmentation is read from it."""

    address: IntArray
    size: IntArray
    """Bytes of the block, rounding included."""
    requested: IntArray
    """Bytes asked for; equal to ``size`` where the file does not say, 0 in free blocks."""
    state: Strings
    """``allocated``, ``pending_free`` (freed, still needed by another stream) or ``free``."""
    segment: IntArray
    """Address of its segment."""
    stream: IntArray
    pool: Strings
    expandable: BoolArray
    stack: IntArray
    """Row of the stack that allocated it; -1 unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OomTable(Table):
    """Requests the allocator could not serve."""

    order: IntArray
    time_ns: IntArray
    requested: IntArray
    device_free: IntArray
    """Bytes the driver still had; -1 unknown."""
    stream: IntArray
    stack: IntArray
    op: Strings
    """Operator or innermost Python frame that asked; null unknown."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """Distinct call stacks, innermost frame first: stack ``i`` is ``frames[offsets[i]:offsets[i + 1]]``."""

    offsets: IntArray
    frames: Strings

    @classmethod
    def empty(cls) -> Stacks:
        """Build a list of no stacks."""
        return cls(np.zeros(1, dtype=np.int64), Strings.full(0, None))

    @classmethod
    def intern(cls, stacks: Iterable[Sequence[str]]) -> Stacks:
        """Build the list from sequences of frame texts."""
        lengths: list[int] = [0]
        frames: list[str] = []
        for stack in stacks:
            frames.extend(stack)
            lengths.append(len(stack))
        return cls(np.cumsum(np.asarray(lengths, dtype=np.int64)), Strings.intern(frames))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> tuple[str, ...]:
        codes = self.frames.codes[int(self.offsets[row]) : int(self.offsets[row + 1])]
        return tuple(self.frames.values[code] for code in codes)


MemorySource: TypeAlias = Literal["cuda_snapshot", "storage_count", "kineto", "estimate"]
"""Who counted: the CUDA allocator, the storage tracker, Kineto's memory events, or a fake execution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRecording:
    """One device's memory history, whoever made it: what every memory analysis starts from."""

    source: MemorySource
    device: str
    """``cuda:0``, ``cpu``."""
    allocations: AllocationTable
    """As recorded; step, phase, fqn, activity and category are filled in by the analyzers."""
    segments: SegmentTable
    blocks: BlockTable
    labels: LabelTable
    """Host ranges on the clock of the allocations; empty where the file has none."""
    steps: StepTable
    stacks: Stacks
    ooms: OomTable
    events: int
    """Length of the history: every order is below it."""
    end_ns: int
    """Host time of its end; -1 unknown."""
    truncated: bool
    """The ring buffer lost the beginning of the history."""
    settings: dict[str, str]
    """Allocator settings as written."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeTable(Table):
    """Recorded inputs of the operators whose sizes are needed: ``c10d::*``, matrix products, attention.

    Shapes repeat a lot, so they stay compact JSON text, interned: decode each distinct value once.
    """

    event: IntArray
    """Row of the event in its :class:`EventTable`, ascending."""
    dims: Strings
    """``Input Dims`` as JSON text without spaces: ``[[128,64],[64,32],[]]``."""
    types: Strings
    """``Input type`` as JSON text without spaces: ``["c10::BFloat16","Scalar"]``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEventTable(Table):
    """Kineto's ``[memory]`` instants in time order: one row per allocation or free."""

    time_ns: IntArray
    """Nanoseconds on the clock of :attr:`EventTable.start_ns`."""
    thread: IntArray
    """Index of the (pid, tid) pair, as in :class:`EventTable`."""
    device: IntArray
    """Device index; -1 is the host."""
    address: IntArray
    bytes: IntArray
    """Positive for an allocation, negative for a free."""
    allocated_bytes: IntArray
    """``Total Allocated`` after it; -1 unknown."""
    reserved_bytes: IntArray
    """``Total Reserved`` after it; -1 unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncTable(Table):
    """What ``cuda_sync`` events wait for, if the profiler was told to record them."""

    event: IntArray
    """Row of the event in its :class:`EventTable`, ascending."""
    wait_on_stream: IntArray
    """Stream the CUDA event was recorded on; -1 unknown."""
    record_correlation: IntArray
    """Correlation of the ``cudaEventRecord`` it waits for; -1 unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Everything one Kineto trace file holds, in columns; one rank."""

    source: str
    """Path it was read from."""
    rank: int | None
    """From the file's ``distributedInfo``; null when it has none."""
    world_size: int | None
    device: DeviceInfo
    """``cuda`` (CUDA or ROCm) when the file holds device activity, else ``cpu``."""
    process_groups: tuple[ProcessGroupInfo, ...]
    """From ``distributedInfo.pg_config``; empty in older traces."""
    base_time_ns: int
    """``baseTimeNanoseconds``: add it to a time to get the host's clock; 0 where the file has none."""
    events: EventTable
    collective_args: CollectiveArgs
    labels: LabelTable
    """Every host ``user_annotation``: ``FSDP::*``, ``ProfilerStep#N``, ``Optimizer.step#*``, ``nccl:*``,
    ``gloo:*`` (on gloo's worker threads), the user's own ranges. Sorted by start, outer before inner."""
    shapes: ShapeTable
    memory: MemoryEventTable
    threads: tuple[str, ...]
    """Name of each thread index: ``pid/tid`` as written."""
    warnings: tuple[str, ...]
    """What a person should know about the file, one line each."""
    syncs: SyncTable = dataclasses.field(default_factory=SyncTable.empty)


_TableT = TypeVar("_TableT", bound=Table)


def concat_tables(tables: Sequence[_TableT]) -> _TableT:
    """Concatenate tables of one type, in order; at least one."""
    columns: dict[str, Any] = {}
    for field in fields(tables[0]):  # type: ignore[arg-type]
        parts = [getattr(table, field.name) for table in tables]
        if isinstance(parts[0], Strings):
            columns[field.name] = concat_strings(parts)
        elif isinstance(parts[0], np.ndarray):
            columns[field.name] = np.concatenate(parts)
        else:
            columns[field.name] = tuple(item for part in parts for item in part)
    return type(tables[0])(**columns)


def concat_strings(columns: Sequence[Strings]) -> Strings:
    """Concatenate interned columns, merging their values."""
    table: dict[str, int] = {}
    codes = []
    for column in columns:
        lookup = np.asarray([table.setdefault(v, len(table)) for v in column.values] + [-1], dtype=np.int32)
        codes.append(lookup[column.codes])
    merged = np.concatenate(codes) if codes else np.empty(0, dtype=np.int32)
    return Strings(merged, tuple(table))
