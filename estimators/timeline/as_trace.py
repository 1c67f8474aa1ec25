"""A simulated step as the tables of a Kineto trace, so that every analysis of a recorded step reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsdp2prof.estimators.simulate.program import Collective, Enter, HostWait, Kernel, Leave, Program, Work
from fsdp2prof.estimators.simulate.streams import Timeline, host_tail_ns
from fsdp2prof.manifest import DeviceInfo, ProcessGroupInfo
from fsdp2prof.tables.columns import Strings
from fsdp2prof.tables.trace import CollectiveArgs, EventTable, LabelTable, MemoryEventTable, ShapeTable, Trace

STEP = 1
"""Number of the one step in a predicted trace."""

_FIRST_STREAM = 7
"""Kineto's number of the default stream."""

_KERNELS = {
    "all_gather": "ncclDevKernel_AllGather_RING",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_RING",
    "all_reduce": "ncclDevKernel_AllReduce_Sum_RING",
    "all_to_all": "ncclDevKernel_SendRecv",
    "send_recv": "ncclDevKernel_SendRecv",
    "broadcast": "ncclDevKernel_Broadcast_RING",
}
_TO_DEVICE = "Memcpy HtoD (Pinned -> Device)"
_METADATA = {
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "all_reduce": "allreduce",
    "all_to_all": "all_to_all",
    "send_recv": "send",
    "broadcast": "broadcast",
}


@dataclass(slots=True)
class Rows:
    """Events while they are collected: one dict a row, columns of :class:`EventTable` by their names."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def host(self, name: str, category: str, start: int, end: int, **more: Any) -> None:
        """Add an event of a host thread."""
        self.rows.append(
            {"thread": 0, "name": name, "category": category, "start_ns": start, "end_ns": end, **more}
        )

    def device(self, name: str, category: str, stream: int, start: int, end: int, **more: Any) -> None:
        """Add an activity of the device."""
        self.rows.append(
            {
                "name": name,
                "category": category,
                "start_ns": start,
                "end_ns": end,
                "device": 0,
                "stream": stream + _FIRST_STREAM,
                **more,
            }
        )


def trace_of(
    program: Program, timeline: Timeline, *, source: str, world_size: int, device_name: str
) -> Trace:
    """Return the trace that a profiler would have written of a simulated step, as number :data:`STEP`."""
    rows = Rows()
    open_labels: list[tuple[str, int]] = []
    sequence: dict[str, int] = {}
    host, host_end = timeline.host_ns.tolist(), timeline.host_end_ns.tolist()
    start, end = timeline.start_ns.tolist(), timeline.end_ns.tolist()
    for position, command in enumerate(program.commands):
        begin, issued = host[position], host_end[position]
        if isinstance(command, Enter):
            open_labels.append((command.name, begin))
        elif isinstance(command, Leave):
            name, since = open_labels.pop()
            rows.host(name, "user_annotation", since, issued)
        elif isinstance(command, HostWait):
            rows.host(command.call, "cuda_runtime", begin, issued)
        elif isinstance(command, Kernel) and command.work is not None and command.work.kind == "host":
            rows.host(recorded_name(command), "cpu_op", begin, issued)
        elif isinstance(command, (Kernel, Collective)) and start[position] >= 0:
            rows.host("cudaLaunchKernel", "cuda_runtime", issued - 1, issued, correlation=position + 1)
            common: dict[str, Any] = {"correlation": position + 1, "external_id": position + 1}
            if isinstance(command, Collective):
                args = metadata_of(command, sequence)
                rows.host("record_param_comms", "cpu_op", begin, issued, external_id=position + 1, args=args)
                name, category = _KERNELS.get(command.op, "ncclDevKernel_Generic"), "kernel"
                common["args"] = args
            else:
                said = {"external_id": position + 1, "inputs": inputs_of(command)}
                rows.host(recorded_name(command), "cpu_op", begin, issued, **said)
                name, category = _kernel_name(command)
            rows.device(name, category, command.stream, start[position], end[position], **common)
    rows.host(f"ProfilerStep#{STEP}", "user_annotation", 0, max(host_end, default=0))
    if host_tail_ns(program, timeline):  # the device waits for the update, until the next step's first copy
        last, copied = max(host_end), len(program.commands) + 1
        rows.host("cudaLaunchKernel", "cuda_runtime", last - 1, last, correlation=copied, external_id=copied)
        rows.device(_TO_DEVICE, "gpu_memcpy", 0, last - 1, last, correlation=copied, external_id=copied)
    return table_of(rows.rows, groups_of(program, "nccl"), source, world_size, "cuda", device_name)


def _kernel_name(kernel: Kernel) -> tuple[str, str]:
    assert kernel.work is not None
    if kernel.work.kind == "host_to_device":
        return _TO_DEVICE, "gpu_memcpy"
    if kernel.work.kind == "device_to_host":
        return "Memcpy DtoH (Device -> Pinned)", "gpu_memcpy"
    return recorded_name(kernel).rpartition("::")[2], "kernel"


def metadata_of(collective: Collective, sequence: dict[str, int]) -> dict[str, Any]:
    """Return a collective's fields in a trace; ``sequence`` counts the collectives of each group."""
    sequence[collective.group] = sequence.get(collective.group, 0) + 1
    return {
        "collective": _METADATA.get(collective.op, collective.op),
        "dtype": collective.dtype,
        "in_nelems": collective.nelems_in,
        "out_nelems": collective.nelems_out,
        "group_size": collective.group_size,
        "process_group": collective.group,
        "process_group_desc": f"mesh_{collective.mesh_dim}" if collective.mesh_dim else "undefined",
        "seq": sequence[collective.group],
    }


def groups_of(program: Program, backend: str) -> tuple[ProcessGroupInfo, ...]:
    """Return the process groups of a program's collectives."""
    found = {c.group: c for c in program.commands if isinstance(c, Collective)}
    return tuple(
        ProcessGroupInfo(
            name=name,
            desc=f"mesh_{c.mesh_dim}" if c.mesh_dim else "undefined",
            backend=backend,
            ranks=[],
            mesh_dim=c.mesh_dim or None,
        )
        for name, c in found.items()
    )


def table_of(
    rows: list[dict[str, Any]],
    groups: tuple[ProcessGroupInfo, ...],
    source: str,
    world_size: int,
    device_type: str,
    device_name: str,
) -> Trace:
    """Put events into a trace of rank 0."""
    rows = sorted(rows, key=lambda row: (row["start_ns"], -row["end_ns"]))

    def integers(name: str, of: Iterable[dict[str, Any]]) -> Any:
        return np.array([row.get(name, -1) for row in of], dtype=np.int64)

    events = EventTable(
        name=Strings.intern(row["name"] for row in rows),
        category=Strings.intern(row["category"] for row in rows),
        **{
            name: integers(name, rows)
            for name in (
                "start_ns", "end_ns", "thread", "device", "stream", "correlation", "external_id", "bytes",
            )
        },
    )  # fmt: skip
    described = [(index, row["args"]) for index, row in enumerate(rows) if "args" in row]
    numbers = ("in_nelems", "out_nelems", "group_size", "seq", "comms_id", "is_async")
    texts = ("collective", "dtype", "process_group", "process_group_desc", "ranks")
    labels = events.category.equals("user_annotation")
    columns: dict[str, Any] = {name: integers(name, (args for _, args in described)) for name in numbers}
    columns |= {name: Strings.intern(args.get(name) for _, args in described) for name in texts}
    return Trace(
        capture="made",
        source=source,
        rank=0,
        world_size=world_size,
        device=DeviceInfo(type=device_type, index=None if device_type == "cpu" else 0, name=device_name),
        process_groups=groups,
        base_time_ns=0,
        events=events,
        collective_args=CollectiveArgs(
            event=np.array([index for index, _ in described], dtype=np.int64),
            **columns,
        ),
        labels=LabelTable(
            thread=events.thread[labels].astype(np.int64),
            start_ns=events.start_ns[labels],
            end_ns=events.end_ns[labels],
            name=events.name.take(labels),
        ),
        shapes=_shapes(rows),
        memory=MemoryEventTable.empty(),
        threads=("host", "worker"),
        warnings=(),
    )


def _shapes(rows: list[dict[str, Any]]) -> ShapeTable:
    known = [(index, row["inputs"]) for index, row in enumerate(rows) if row.get("inputs") is not None]
    return ShapeTable(
        event=np.array([index for index, _ in known], dtype=np.int64),
        dims=Strings.intern(dims for _, (dims, _) in known),
        types=Strings.intern(types for _, (_, types) in known),
    )


_OF_HOSTS = "_for_cpu"
"""Part of the name of the host's flash attention, which replaces the device's here."""
_PLAIN = ("aten::mm", "aten::_scaled_mm")
_BIASED = ("aten::addmm", "aten::baddbmm")
_BATCHED = ("aten::bmm", "aten::baddbmm")


def recorded_name(kernel: Kernel) -> str:
    """Return the operator's name as an accelerator would record it."""
    return kernel.op.replace(_OF_HOSTS, "")


def inputs_of(kernel: Kernel) -> tuple[str, str] | None:
    """Return ``Input Dims`` and ``Input type`` as JSON texts; None for other operators."""
    work = kernel.work
    if work is None or work.kind not in ("matmul", "attention"):
        return None
    shapes = _attention(work) if work.kind == "attention" else _product(kernel.op, work)
    if not shapes:
        return None
    types = [work.dtype] * len(shapes)
    return json.dumps(shapes, separators=(",", ":")), json.dumps(types, separators=(",", ":"))


def _product(op: str, work: Work) -> list[list[int]]:
    batch, m, n, k = work.shape
    if op in _PLAIN or op == "aten::addmm":
        factors = [[batch * m, k], [k, n]]
    elif op in _BATCHED:
        factors = [[batch, m, k], [batch, k, n]]
    elif op == "aten::_grouped_mm":
        factors = [[batch * m, k], [batch, k, n]]
    else:
        return []
    return [[n], *factors] if op in _BIASED else factors


def _attention(work: Work) -> list[list[int]]:
    batch, heads, queries, keys, depth, kv_heads, value_depth = work.shape
    query, key = [batch, heads, queries, depth], [batch, kv_heads, keys, depth]
    value, result = [batch, kv_heads, keys, value_depth], [batch, heads, queries, value_depth]
    return [result, query, key, value] if work.backward else [query, key, value]
