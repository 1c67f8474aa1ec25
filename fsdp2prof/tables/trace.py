"""The content of a Kineto trace, in columns, and a rank's work in FSDP2's terms: steps, phases,
collectives."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from fsdp2prof.manifest import DeviceInfo, ProcessGroupInfo
from fsdp2prof.tables.columns import CompactArray, IntArray, Strings, Table


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
    host time is one ``searchsorted``. Time outside every row is phase ``other`` and fqn None.
    """

    thread: IntArray
    start_ns: IntArray
    end_ns: IntArray
    step: IntArray
    """Step number; -1 outside every step."""
    fqn: Strings
    """FSDP module; the empty string is the root; None: outside every module."""
    phase: Strings
    """One of :data:`~fsdp2prof.vocabulary.PHASES`."""
    activity: Strings
    """One of :data:`~fsdp2prof.vocabulary.ACTIVITIES`."""


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
    """Layer whose parameters it carries: None when unattributed, the empty string for the root."""
    phase: Strings
    op: Strings
    """One of :data:`~fsdp2prof.vocabulary.OPS`."""
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
class EventTable(Table):
    """One rank's complete events, one row each, sorted by ``start_ns`` (outer before inner on ties)."""

    start_ns: IntArray
    """Nanoseconds since the trace's own epoch (``baseTimeNanoseconds`` is not added)."""
    end_ns: IntArray
    name: Strings
    category: Strings
    """Kineto's ``cat``: ``cpu_op``, ``user_annotation``, ``kernel``, ``gpu_memcpy``, ``cuda_runtime``, ..."""
    thread: CompactArray
    """Index of the (pid, tid) pair for host events; -1 on a device."""
    device: CompactArray
    """Device index for device activities; -1 on the host."""
    stream: CompactArray
    """Stream of a device activity; -1 on the host."""
    correlation: CompactArray
    """Joins a device activity to its launch; -1 if there is none."""
    external_id: CompactArray
    """Joins a launch or a device activity to its operator; -1 if there is none."""
    bytes: CompactArray
    """Bytes of a memory copy or set; -1 elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveArgs(Table):
    """Collective metadata of events: ``record_param_comms``, ``c10d::*``, NCCL kernels, ``gloo:*``."""

    event: IntArray
    """Row of the event in its :class:`EventTable`."""
    collective: Strings
    """Collective name as written (``_allgather_base``, ...); None where only shapes are known."""
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
class ShapeTable(Table):
    """Recorded inputs of operators whose sizes are needed: ``c10d::*``, products, attention, embeddings,
    scatters.
    Those of all operators that take a tensor in float64, too.

    Shapes repeat a lot, so they stay compact JSON text, interned: decode each distinct value once.
    """

    event: IntArray
    """Row of the event in its :class:`EventTable`, ascending."""
    dims: Strings
    """``Input Dims`` as JSON text without spaces: ``[[128,64],[64,32],[]]``; null if it is not a shape."""
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
    """The events that ``cuda_sync`` events wait for, if the profiler was set to record them."""

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
    """From the file's ``distributedInfo``; None when it has none."""
    world_size: int | None
    device: DeviceInfo
    """``cuda`` (CUDA or ROCm), ``xpu``, ... if the file contains device activity, otherwise ``cpu``."""
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
    """Notes about the file for users, one line each."""
    syncs: SyncTable = dataclasses.field(default_factory=SyncTable.empty)
    capture: Literal["drained", "cut", "made"] = "drained"
    """``drained``: the recording ended when the device had done all its work, as torch's profiler does;
    ``cut``: it ended while the device may have worked; ``made``: inferred, not recorded."""
    torch_version: str | None = None
    """That recorded it; None where the file does not say."""
