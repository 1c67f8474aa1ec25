"""A rank's training step, captured: the program that the simulation runs.

A training step as FSDP2 itself commands it, captured from an execution on fake tensors.

FSDP2 runs its real code: streams, events and waits are those of ``torch.cpu``, which do nothing
by themselves and are watched here, and every operator passes a dispatch mode. What prefetching, resharding or
another torch version change is therefore in the program without a rule of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import DeviceMesh

from fsdp2prof.estimators.compiler.graphs import Graphs, told_of_launches
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.engine import (
    Execution,
    execute,
    fake_rank,
)
from fsdp2prof.estimators.execution.fake_world import (
    HostMemory,
    expert_mesh,
)
from fsdp2prof.estimators.execution.second_models import naming_the_culprit
from fsdp2prof.estimators.execution.stitching import depths_to_execute, run_stitched
from fsdp2prof.estimators.models.model import Model, elements_of
from fsdp2prof.estimators.sharding.wrapping import fold_blocks
from fsdp2prof.estimators.simulate.extend import CannotRepeatError
from fsdp2prof.estimators.simulate.extend_commands import deepened
from fsdp2prof.estimators.simulate.program import (
    Collective,
    Command,
    Enter,
    HostWait,
    Kernel,
    Leave,
    Program,
    Record,
    Wait,
    Work,
    model_flops_of,
)
from fsdp2prof.estimators.techniques.registry import check_parallelism
from fsdp2prof.estimators.timeline.operators import collective_of, group_of, is_on_host, work_of
from fsdp2prof.estimators.timeline.repeats import fewer_micro_batches, with_all_micro_batches
from fsdp2prof.labels import AUTOGRAD_NODE
from fsdp2prof.storage_tracker import Arguments, PlainOperators

_EXCHANGED = "ep"
"""Experts' dimension: all that exchange, over a group that may be another dimension's too."""
_BACKWARD = f"{AUTOGRAD_NODE}: backward"


class Capture:
    """Records the commands that the calling thread issues while the context is active.

    ``mesh_dims`` names the process groups: group name -> mesh dimension. ``host`` tracks work on the host
    and copies to and from it.
    """

    def __init__(self, mesh_dims: dict[str, str], host: HostMemory | None = None) -> None:
        self.commands: list[Command] = []
        self._mesh_dims = mesh_dims
        self._host = host if host is not None and host.is_used else None
        self._copied_to_host: int | None = None
        """Stream of a copy to the host that the host has not waited for."""
        default = torch.cpu.current_stream()
        self._streams: dict[int, tuple[int, object]] = {id(default): (0, default)}
        self._events: dict[int, tuple[int, object]] = {}
        self._event_count = 0
        self._pending: dict[int, int] = {}
        self._in_backward = False
        self._labels: list[str] = []
        self._operators = PlainOperators(self._before, self._operator)
        self._active = ExitStack()

    @property
    def streams(self) -> int:
        """Streams that were used."""
        return len(self._streams)

    def __enter__(self) -> Capture:
        self._active.enter_context(_watched(self))
        self._active.enter_context(self._operators)
        self._active.enter_context(told_of_launches(self._fused))
        return self

    def __exit__(self, *_: object) -> None:
        self._follow_backward()
        self._active.close()

    def enter(self, name: str) -> None:
        """A labelled range begins."""
        self._follow_backward()
        self._labels.append(name)
        self.commands.append(Enter(name))

    def leave(self) -> None:
        """The innermost labelled range ends."""
        self._labels.pop()
        self.commands.append(Leave())

    @property
    def _in_optimizer(self) -> bool:
        """Whether an optimizer steps: the counters that it reads lie on the host."""
        return any(name.startswith("Optimizer.step") for name in self._labels)

    def stream(self, stream: object | None = None) -> int:
        """Return the number of a stream, by default of the current one."""
        stream = torch.cpu.current_stream() if stream is None else stream
        return self._streams.setdefault(id(stream), (len(self._streams), stream))[0]

    def record(self, stream: object | None, event: object | None = None) -> int:
        """Note that an event is recorded on a stream now and return its number."""
        number = self._event_count
        self._event_count += 1
        if event is not None:
            self._events[id(event)] = (number, event)
        self.commands.append(Record(self.stream(stream), number))
        return number

    def wait(self, stream: object | None, event: object) -> None:
        """Note that a stream waits for an event; an event that was never recorded is complete."""
        known = self._events.get(id(event))
        if known is not None:
            self.commands.append(Wait(self.stream(stream), known[0]))

    def host_wait(self, event: object) -> None:
        """Note that the host waits for an event."""
        known = self._events.get(id(event))
        if known is not None:
            self.commands.append(HostWait(self.stream(), known[0]))

    def position(self) -> int:
        """Return how many commands there are before the next."""
        self._follow_backward()
        return len(self.commands)

    def _before(self, func: Any, arguments: Arguments) -> None:
        self._follow_backward()

    def _follow_backward(self) -> None:
        """Put a range around every backward pass, as autograd's own nodes do in a trace."""
        inside = torch._C._current_graph_task_id() >= 0
        if inside != self._in_backward:
            self._in_backward = inside
            self.commands.append(Enter(_BACKWARD) if inside else Leave())

    def _operator(self, func: Any, arguments: Arguments, result: Any) -> None:
        args, kwargs = arguments
        name = func._schema.name if hasattr(func, "_schema") else str(func)
        if name.startswith(("prim::", "profiler::")):
            return
        if name == "_c10d_functional::wait_tensor":
            number = self._pending.pop(args[0].untyped_storage()._cdata, None)
            if number is not None:
                self.commands.append(Wait(self.stream(), number))
            return
        group = group_of(name, args)
        if group is not None:
            self._collective(name, group, args, result)
        elif is_on_host(name):
            self.commands.append(Kernel(self.stream(), name, None))
            if name == "aten::_local_scalar_dense" and not self._in_optimizer:
                self.commands.append(HostWait(self.stream(), call="cudaStreamSynchronize"))
        else:
            work = work_of(func, args, kwargs, result, self._operators.needed)
            kernel = Kernel(self.stream(), name, work)
            self.commands.append(kernel if self._host is None else self._beside_host(kernel, self._host))

    def _beside_host(self, kernel: Kernel, host: HostMemory) -> Kernel:
        """Return a copy over the host's link, or work on the host, which waits for earlier copies to it."""
        if host.copying is not None and kernel.work is not None:
            stream = self.stream(host.copies_on)
            if host.copying == "device_to_host":
                self._copied_to_host = stream
            once = kernel.work.bytes // 2  # each is read here and written there
            return Kernel(stream, kernel.op, Work(host.copying, kernel.work.dtype, once))
        if torch.cpu.current_stream() is not host.stream:
            return kernel
        if self._copied_to_host is not None:
            stream, self._copied_to_host = self._copied_to_host, None
            event, self._event_count = self._event_count, self._event_count + 1
            self.commands += [Record(stream, event), HostWait(stream, event)]
        work = None if kernel.work is None else replace(kernel.work, kind="host")
        return Kernel(kernel.stream, kernel.op, work)

    def _fused(self, nbytes: int, dtype: str, moves: bool) -> None:
        """A kernel that a compiled graph launches in place of operators."""
        self._follow_backward()
        self.commands.append(
            Kernel(self.stream(), "fused", Work("copy" if moves else "pointwise", dtype, nbytes))
        )

    def _collective(self, name: str, group: tuple[str, int], args: tuple[Any, ...], result: Any) -> None:
        made = collective_of(name, args, result)
        if made is None or group[1] == 1:
            return
        event = -1
        if name.startswith("_c10d_functional::"):  # queued on the communicator's own stream, waited for later
            event, self._event_count = self._event_count, self._event_count + 1
            for tensor in result if isinstance(result, (list, tuple)) else [result]:
                self._pending[tensor.untyped_storage()._cdata] = event
        self.commands.append(
            Collective(
                stream=self.stream(),
                group=group[0],
                mesh_dim=_EXCHANGED if made.op == "all_to_all" else self._mesh_dims.get(group[0], ""),
                group_size=group[1],
                event=event,
                op=made.op,
                dtype=made.dtype,
                nelems_in=made.nelems_in,
                nelems_out=made.nelems_out,
                payload_bytes=made.payload_bytes,
            )
        )


@contextmanager
def _watched(capture: Capture) -> Iterator[None]:
    """Show ``capture`` the streams', the events' and the labels' calls."""
    stream, event = torch.cpu.Stream, torch.cpu.Event
    enter, leave = record_function.__enter__, record_function.__exit__

    def wait_stream(self: Any, other: Any) -> None:
        number = capture.record(other)
        capture.commands.append(Wait(capture.stream(self), number))

    def record_event(self: Any, recorded: Any = None) -> Any:
        recorded = torch.cpu.Event() if recorded is None else recorded
        capture.record(self, recorded)
        return recorded

    def wait_event(self: Any, awaited: Any) -> None:
        capture.wait(self, awaited)

    def record(self: Any, on: Any = None) -> None:
        capture.record(on, self)

    def wait(self: Any, on: Any = None) -> None:
        capture.wait(on, self)

    def entered(label: record_function) -> Any:
        capture.enter(label.name)
        return enter(label)  # type: ignore[no-untyped-call]

    def left(label: record_function, kind: Any, error: Any, trace: Any) -> Any:
        result = leave(label, kind, error, trace)
        capture.leave()
        return result

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (stream, "wait_stream", wait_stream),
        (stream, "record_event", record_event),
        (stream, "wait_event", wait_event),
        (event, "record", record),
        (event, "wait", wait),
        (event, "synchronize", lambda self: capture.host_wait(self)),
        (record_function, "__enter__", entered),
        (record_function, "__exit__", left),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, replacement in replaced:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def capture_stitched(
    spec: ModelSpec, mesh: MeshSpec, policy: PolicySpec, full: Model, *, graphs: Graphs | None = None
) -> Program:
    """As :func:`capture_step`; a deep model's middle blocks are repeated where they are found to be alike.

    ``full`` is the model as built. Raises ``ModelError`` for a model, mesh or policy that cannot be run.
    """
    policy = fold_blocks(policy, full.blocks)
    return run_stitched(
        lambda model: capture_step(model, mesh, policy, graphs=graphs),
        lambda first, second, blocks, period: deepened(first, second, full.blocks, blocks, period),
        spec,
        mesh,
        policy,
        full,
    )[0]


def capture_step(
    spec: ModelSpec, mesh: MeshSpec, policy: PolicySpec, *, graphs: Graphs | None = None
) -> Program:
    """Train two steps as rank 0 of ``mesh`` on fake tensors and return the second one's commands.

    With ``graphs`` blocks run as compiled ones do, and keep their graphs there. Of a pipeline's micro-batches
    so many are executed that the others are like them. Raises ``ModelError`` for a model, mesh or policy that
    cannot be run.
    """
    policy = replace(policy, float8=None, fp8_all_gather=False)  # its casts and products are put in later
    fewer = fewer_micro_batches(mesh, policy)
    capture, parameters, begins = _captured(spec, mesh, fewer, graphs)
    if fewer != policy:
        try:
            capture.commands = with_all_micro_batches(capture.commands, begins, mesh, fewer, policy)
        except CannotRepeatError:
            capture, parameters, _ = _captured(spec, mesh, policy, graphs)
    return _program(capture, parameters, policy)


def _captured(
    spec: ModelSpec, mesh: MeshSpec, policy: PolicySpec, graphs: Graphs | None
) -> tuple[Capture, int, list[int]]:
    """Return the capture, the model's parameters and where the work of a pipeline begins."""
    begins: list[int] = []
    with fake_rank(spec, mesh, policy, graphs=graphs) as rank:
        loop = rank.loop()
        with naming_the_culprit(spec):
            loop.forward_backward()
            loop.update()
            with Capture(_mesh_dims(rank.mesh, expert_mesh(mesh)), rank.host) as capture:
                if loop.stage is not None:
                    loop.stage.before_work = lambda: begins.append(capture.position())
                loop.forward_backward()
                loop.update()
        parameters = elements_of(rank.model.module)
    return capture, parameters, begins


def execute_and_capture(
    spec: ModelSpec, mesh: MeshSpec, policy: PolicySpec, full: Model
) -> tuple[Execution, Program] | None:
    """Return a model's memory and its commands, from one execution instead of one for each.

    ``full`` is the model as built. ``None`` if the two are not executed in full and unchanged: deep
    models, a compiled or a float8 one, stages of a pipeline. Raises ``ModelError`` as
    :func:`capture_step`.
    """
    check_parallelism(full, mesh, policy)
    policy = fold_blocks(policy, full.blocks)
    differs = (
        policy.compile or policy.float8 is not None or policy.other_models or policy.uses_host or mesh.pp > 1
    )
    if differs or depths_to_execute(spec, mesh, policy, full) is not None:
        return None
    captures: list[Capture] = []

    def capture(device_mesh: DeviceMesh) -> Capture:
        captures.append(Capture(_mesh_dims(device_mesh, expert_mesh(mesh))))
        return captures[0]

    execution = execute(spec, mesh, policy, watched=capture)
    return execution, _program(captures[0], full.parameters, policy)


def _program(capture: Capture, parameters: int, policy: PolicySpec) -> Program:
    return Program(
        commands=capture.commands,
        streams=capture.streams,
        parameters=parameters,
        tokens=policy.sequences * policy.seq_len * policy.grad_accum,
        model_flops=model_flops_of(capture.commands),
    )


def _mesh_dims(*meshes: DeviceMesh | None) -> dict[str, str]:
    """Name of a process group -> the mesh dimension it belongs to, the first that has it.

    A dimension over the whole world shares its group with every other such.
    """
    names: dict[str, str] = {}
    for mesh in meshes:
        if mesh is not None:
            assert mesh.mesh_dim_names is not None
            names = {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names} | names
    return names
