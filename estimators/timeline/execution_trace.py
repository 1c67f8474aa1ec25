"""The commands of a training step from a PyTorch execution trace of one rank that trained under FSDP2.

The operators are the trace's, with its shapes; FSDP2's labels in it say which of them copy for an all-gather
or a reduce-scatter, and so on which stream a GPU runs them and what waits for what
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py). Collectives keep their payload; the mesh that is
asked for says among how many ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.simulate.program import (
    Collective,
    Command,
    Enter,
    Kernel,
    Leave,
    Program,
    Record,
    Wait,
)
from fsdp2prof.estimators.timeline.operators import CollectiveSizes, collective_of, is_on_host, work_of
from fsdp2prof.labels import AUTOGRAD_NODE, FsdpLabel, parse_label
from fsdp2prof.tables.probes import ExecutionNode, ExecutionTrace, TensorValue, Value

_COMPUTE, _COPY_IN, _GATHER, _REDUCE, _REPLICATE = range(5)
_STREAMS = 5
_THREAD = "[pytorch|profiler|execution_trace|thread]"
"""Name of the node above all of a thread."""
_SUBCLASS = "PythonSubclass"
"""Name of the node in which a subclass of tensors, DTensor for one, dispatches an operator."""
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def program_of_trace(trace: ExecutionTrace, mesh: MeshSpec, tokens: int) -> Program:
    """Return the commands of one step of a trace; ``tokens`` is the number its rank trained on in a step.

    If there are several steps, the second is used, from the end of one optimizer step to the end of the
    next. Raises ``ModelError`` for a trace without FSDP2's labels, and for a mesh that it does not
    describe.
    """
    if mesh.tp > 1 or mesh.pp > 1 or mesh.cp > 1:
        raise ModelError(
            f"{trace.source}: an execution trace keeps the tp, pp and cp that it ran with: "
            "give --mesh only dp_shard and dp_replicate"
        )
    step = _one_step(trace.nodes)
    builder = _Builder(trace.source, mesh, {node.id: node for node in trace.nodes})
    for node in _operators(step):
        builder.add(node)
    return builder.program(tokens)


def _one_step(nodes: Sequence[ExecutionNode]) -> Sequence[ExecutionNode]:
    optimizers = [at for at, node in enumerate(nodes) if node.name.startswith("Optimizer.step")]
    if len(optimizers) < 2:
        return nodes
    ends = [_end_of(nodes, at) for at in optimizers[:2]]
    return nodes[ends[0] : ends[1]]


def _end_of(nodes: Sequence[ExecutionNode], at: int) -> int:
    """Position behind the last node within a node."""
    inside = {nodes[at].id}
    last = at
    for position in range(at + 1, len(nodes)):
        if nodes[position].parent in inside:
            inside.add(nodes[position].id)
            last = position
    return last + 1


def _operators(nodes: Sequence[ExecutionNode]) -> list[ExecutionNode]:
    """Ranges, and the operators that a device's kernels stand for: none within another of them.

    An operator that torch itself composes of others (``linear``, ``reshape``) is not one, nor is one on whole
    DTensors, which runs another on the shards; what a CPU makes of the rest is hidden within it.
    """
    hidden = _of_other_threads(nodes)
    subclassed = {node.parent for node in nodes if node.name == _SUBCLASS}
    found = []
    for node in nodes:
        if node.parent in hidden:
            hidden.add(node.id)
        elif not node.schema:
            found.append(node)
        elif node.id not in subclassed and not _is_composed(node.schema.partition("(")[0]):
            hidden.add(node.id)
            if not is_on_host(node.name) and _tensors(node.inputs, node.outputs):
                found.append(node)
    return found


def _of_other_threads(nodes: Sequence[ExecutionNode]) -> set[int]:
    """Threads that neither FSDP2 nor autograd labels anything on: those on which gloo copies and adds up."""
    here = {node.id for node in nodes}
    threads = {node.id for node in nodes if node.name == _THREAD}
    threads |= {node.parent for node in nodes if node.parent not in here and node.name != _THREAD}
    thread_of = {thread: thread for thread in threads}
    for node in nodes:
        thread_of.setdefault(node.id, thread_of.get(node.parent, node.parent))
    return threads - {thread_of[node.id] for node in nodes if not node.schema and _is_label(node.name)}


@lru_cache(maxsize=4096)
def _is_composed(operator: str) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CompositeImplicitAutograd"))
    except RuntimeError:  # of a library that is not here
        return False


def _tensors(*values: Sequence[Value]) -> list[TensorValue]:
    flat = [one for part in values for one in part]
    return [
        t for one in flat for t in (one if isinstance(one, tuple) else (one,)) if isinstance(t, TensorValue)
    ]


@dataclass(slots=True)
class _Place:
    """Where in a step a node is."""

    labels: list[int]
    """Ids of the labels around it, from the outside."""
    within: FsdpLabel | None
    """The innermost of FSDP's."""
    backward: bool
    optimizer: bool


class _Builder:
    """Operators in their order to commands."""

    def __init__(self, source: str, mesh: MeshSpec, nodes: dict[int, ExecutionNode]) -> None:
        self._source, self._mesh, self._nodes = source, mesh, nodes
        self._commands: list[Command] = []
        self._open: list[int] = []
        self._events = 0
        self._gathered: dict[str | None, int] = {}
        self._copied_out = -1
        self._reduced: list[int] = []
        self._reducing = False
        self._recorded_ranks = 1
        self._parameters: dict[str | None, int] = {}
        self._model_flops = 0
        self._labels = 0

    def add(self, node: ExecutionNode) -> None:
        """Take the next label or operator."""
        place = self._place(node)
        self._close(place)
        if not node.schema:
            self._enter(node, place)
        elif node.name.startswith("c10d::") and node.schema:
            self._collective(node, place)
        else:
            self._kernel(node, place)

    def program(self, tokens: int) -> Program:
        """Everything that was taken."""
        while self._open:
            self._leave()
        if not self._labels:
            raise ModelError(
                f"{self._source}: no labels of FSDP2 in it: observe a step of the training under fully_shard"
            )
        if self._mesh.dp_replicate > 1 and not any(
            isinstance(one, Collective) and one.stream == _REPLICATE for one in self._commands
        ):
            raise ModelError(
                f"{self._source}: it ran without dp_replicate, so it has no all-reduce of replicas to scale"
            )
        return Program(
            commands=self._commands,
            streams=_STREAMS,
            parameters=sum(self._parameters.values()),
            tokens=tokens,
            model_flops=self._model_flops,
        )

    def _place(self, node: ExecutionNode) -> _Place:
        chain: list[int] = []
        at = node.parent
        while at in self._nodes and self._nodes[at].parent != at and len(chain) < 512:
            if not self._nodes[at].schema and _is_label(self._nodes[at].name):
                chain.append(at)
            at = self._nodes[at].parent
        labels = [parse_label(self._nodes[one].name) for one in chain]
        within = next((one for one in labels if one is not None), None)
        names = [self._nodes[one].name for one in chain]
        return _Place(
            labels=chain[::-1],
            within=within,
            backward=any(name.startswith(AUTOGRAD_NODE) for name in names)
            or any(one is not None and one.is_backward for one in labels),
            optimizer=any(one is not None and one.kind == "optimizer" for one in labels),
        )

    def _event(self, stream: int) -> int:
        self._commands.append(Record(stream, self._events))
        self._events += 1
        return self._events - 1

    def _follow(self, stream: int, other: int) -> None:
        """Let a stream wait for all that is queued on another."""
        self._commands.append(Wait(stream, self._event(other)))

    def _close(self, place: _Place) -> None:
        while self._open and self._open[-1] not in place.labels:
            self._leave()

    def _leave(self) -> None:
        label = parse_label(self._nodes[self._open.pop()].name)
        activity = None if label is None else label.activity
        if activity == "copy_out":
            self._end_copy_out()
        elif activity == "reduce" and self._reducing:
            self._reduced.append(self._event(_REDUCE))
            self._reducing = False
        self._commands.append(Leave())

    def _enter(self, node: ExecutionNode, place: _Place) -> None:
        if not _is_label(node.name):
            return
        self._open.append(node.id)
        self._commands.append(Enter(node.name))
        label = parse_label(node.name)
        if label is None:
            return
        self._labels += label.kind != "optimizer"
        if label.kind == "root_pre_forward":
            self._follow(_COPY_IN, _COMPUTE)
            self._follow(_GATHER, _COMPUTE)
        elif label.activity == "copy_out" and label.fqn in self._gathered:
            self._commands.append(Wait(_COMPUTE, self._gathered.pop(label.fqn)))
        elif label.activity == "reduce_wait" and self._reduced:
            self._commands.append(Wait(_COMPUTE, self._reduced[-1]))
        elif label.activity == "final_wait":
            self._commands += [Wait(_COMPUTE, event) for event in self._reduced]

    def _end_copy_out(self) -> None:
        """The gathered buffer is free again: at once in backward, after the next copy-out in forward."""
        event = self._event(_COMPUTE)
        in_backward = any(self._nodes[one].name.startswith(AUTOGRAD_NODE) for one in self._open)
        free = event if in_backward else self._copied_out
        self._copied_out = event
        if free >= 0:
            self._commands += [Wait(_COPY_IN, free), Wait(_GATHER, free)]

    def _kernel(self, node: ExecutionNode, place: _Place) -> None:
        arguments = tuple(map(_on_meta, node.inputs))
        result = tuple(map(_on_meta, node.outputs))
        try:
            work = work_of(SimpleNamespace(_schema=_schema(node.schema)), arguments, {}, result)
        except (IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"{self._source}: operator {node.name} has other arguments than it takes: {error}"
            ) from None
        if work is not None and place.optimizer:  # on shards, which are smaller on more ranks
            work = replace(work, bytes=work.bytes * self._recorded_ranks // self._mesh.dp_shard)
        if work is not None and work.kind in ("matmul", "attention"):
            self._model_flops += work.flops
        self._commands.append(Kernel(self._stream(place), node.name, work))

    def _stream(self, place: _Place) -> int:
        activity = None if place.within is None else place.within.activity
        if activity == "all_gather":
            return _COPY_IN
        return _REDUCE if activity == "reduce" and self._reducing else _COMPUTE

    def _collective(self, node: ExecutionNode, place: _Place) -> None:
        try:
            sizes = collective_of(
                node.name, tuple(map(_on_meta, node.inputs)), tuple(map(_on_meta, node.outputs))
            )
        except (KeyError, IndexError, AttributeError, RuntimeError):
            return
        if sizes is None:
            return
        activity = None if place.within is None else place.within.activity
        fqn = None if place.within is None else place.within.fqn
        if sizes.op == "all_gather" and activity == "all_gather":
            self._recorded_ranks = max(self._recorded_ranks, sizes.nelems_out // max(1, sizes.nelems_in))
            self._parameters[fqn] = sizes.nelems_out
            self._follow(_GATHER, _COPY_IN)
            self._append(sizes, _GATHER, "dp_shard", self._mesh.dp_shard)
            self._gathered[fqn] = self._event(_GATHER)
        elif sizes.op == "reduce_scatter" and activity == "reduce":
            self._follow(_REDUCE, _COMPUTE)
            self._append(sizes, _REDUCE, "dp_shard", self._mesh.dp_shard)
            self._reducing = True
        elif sizes.op == "all_reduce" and activity == "reduce":
            self._follow(_REPLICATE, _REDUCE)
            scaled = _scaled(sizes, self._recorded_ranks, self._mesh.dp_shard)
            self._append(scaled, _REPLICATE, "dp_replicate", self._mesh.dp_replicate)
            self._follow(_REDUCE, _REPLICATE)
        else:
            self._append(sizes, _COMPUTE, "", self._mesh.dp_shard * self._mesh.dp_replicate)

    def _append(self, sizes: CollectiveSizes, stream: int, dim: str, ranks: int) -> None:
        if ranks < 2:
            return
        if sizes.op == "all_gather":
            sizes = replace(sizes, nelems_in=-(-sizes.nelems_out // ranks))
        elif sizes.op == "reduce_scatter":
            sizes = replace(sizes, nelems_out=-(-sizes.nelems_in // ranks))
        self._commands.append(
            Collective(
                stream=stream,
                op=sizes.op if sizes.op in _COLLECTIVES else "other",
                group=dim or "default",
                mesh_dim=dim,
                group_size=ranks,
                dtype=sizes.dtype,
                nelems_in=sizes.nelems_in,
                nelems_out=sizes.nelems_out,
                payload_bytes=sizes.payload_bytes,
            )
        )


def _scaled(sizes: CollectiveSizes, recorded: int, ranks: int) -> CollectiveSizes:
    """A shard's all-reduce with the shards of another number of ranks."""

    def of(size: int) -> int:
        return size * recorded // ranks

    return replace(
        sizes,
        nelems_in=of(sizes.nelems_in),
        nelems_out=of(sizes.nelems_out),
        payload_bytes=of(sizes.payload_bytes),
    )


def _is_label(name: str) -> bool:
    return parse_label(name) is not None or name.startswith(AUTOGRAD_NODE)


@lru_cache(maxsize=4096)
def _schema(text: str) -> Any:
    return torch._C.parse_schema(text)


def _on_meta(value: Value) -> Any:
    """A tensor of the same shape without data; other values unchanged."""
    if isinstance(value, TensorValue):
        return torch.empty_strided(
            value.shape, value.stride, dtype=getattr(torch, value.dtype), device="meta"
        )
    return [_on_meta(one) for one in value] if isinstance(value, tuple) else value
