"""FSDP2's rules on a timeline: which label opens, what is launched where, and who waits (torch 2.13)."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

from synthetic.schedule import DTYPE_BYTES, Layer, Schedule
from synthetic.timeline import (
    ALL_GATHER,
    ALL_REDUCE,
    AUTOGRAD,
    COMPUTE,
    COPY_IN,
    LAUNCH_LATENCY_NS,
    PG_INTERNAL,
    REDUCE_SCATTER,
    Collective,
    HostEvent,
    Timeline,
)
import itertools

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_kernel"
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"
COPY_IN_KERNEL = "void at::native::multi_tensor_apply_kernel<CopyFunctor<float, bfloat16>>"
COPY_OUT_KERNEL = "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel"
CHUNK_CAT_KERNEL = "void at::native::chunk_cat_cuda_kernel<float, c10::BFloat16>"
CAST_KERNEL = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>"
ADD_KERNEL = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"

NCCL_NAME = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter_Sum", "all_reduce": "AllReduce_Sum"}
PARAM_COMMS_NAME = {
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "all_reduce": "allreduce",
}
OPERATOR = {
    "all_gather": "c10d::_allgather_base_",
    "reduce_scatter": "c10d::_reduce_scatter_base_",
    "all_reduce": "c10d::allreduce_",
}
RANGE = {
    "all_gather": "nccl:_all_gather_base",
    "reduce_scatter": "nccl:_reduce_scatter_base",
    "all_reduce": "nccl:all_reduce",
}
SYMMETRIC_NAME = {
    "all_gather": "multimem_all_gather_kernel",
    "reduce_scatter": "multimem_reduce_scatter_kernel",
    "all_reduce": "multimem_all_reduce_kernel",
}


@dataclass(frozen=True)
class ProcessGroup:
    """A communicator: its name in the trace, its mesh dimension and its ranks."""

    name: str
    description: str
    mesh_dim: str | None
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Arrival:
    """A rank has reached a collective; it resumes with the start of the last rank."""

    group: ProcessGroup
    seq: int
    start: int


Program = Generator[Arrival, int, None]
Meeting = Generator[Arrival, int, Collective]


@dataclass
class Group:
    """A parameter group's state between hooks."""

    layer: Layer
    unsharded: bool = False
    pending: Collective | None = None
    forward_indices: list[int] = field(default_factory=list)
    post_backward: bool = False


class Trainer:
    """Runs a schedule on one rank's timeline as a coroutine that stops at every collective."""

    def __init__(self, timeline: Timeline, schedule: Schedule) -> None:
        self.t = timeline
        self.s = schedule
        self.step = -1
        self.phase = "other"
        self.root_index = 0
        self.sequence: dict[str, int] = {}
        shard, rank = schedule.shard, timeline.rank
        first = rank // shard * shard
        across = tuple(rank % shard + shard * i for i in range(schedule.replicas))
        self.shard_group = ProcessGroup("1", "mesh_dp_shard", "dp_shard", tuple(range(first, first + shard)))
        self.reduce_group = (
            ProcessGroup("5", "undefined", None, self.shard_group.ranks)
            if schedule.separate_reduce_scatter_group
            else self.shard_group
        )
        self.replicate_group = ProcessGroup("2", "mesh_dp_replicate", "dp_replicate", across)

    # -- the step

    def run(self) -> Program:
        roots = [[Group(layer) for layer in root] for root in self.s.roots]
        for step in range(self.s.first_step, self.s.first_step + self.s.steps):
            self.step = step
            with self.t.range(f"ProfilerStep#{step}"):
                if self.s.graph:
                    yield from self._graph_step()
                else:
                    yield from self._step(roots)
        self.step = -1

    def _step(self, roots: list[list[Group]]) -> Program:
        self.phase = "other"
        with self.t.range("aten::to", "cpu_op"), self.t.range("aten::copy_", "cpu_op"):
            self.t.launch(COMPUTE, self.s.input_ns, "Memcpy HtoD (Pinned -> Device)", "memcpy")
        for micro in range(self.s.microbatches):
            last = micro == self.s.microbatches - 1
            reduce = last or self.s.sync_every_microbatch
            models = [Model(self, root) for root in roots]
            for i, model in enumerate(models):
                with self._root_range(i):
                    yield from model.forward()
            for i, model in reversed([*enumerate(models)]):
                with self.on(AUTOGRAD), self._root_range(i):
                    yield from model.backward(reduce=reduce, first=micro == 0, last=last)
        self.phase = "optimizer"
        self.root_index = 0
        with self.t.range("Optimizer.step#AdamW.step"):
            self.t.kernel(COMPUTE, self.s.optimizer_ns, ADAM, "compute", "aten::_fused_adamw_")
        self.phase = "other"

    @contextmanager
    def _root_range(self, index: int) -> Iterator[None]:
        self.root_index = index
        with self.t.range(f"fsdp2prof::root ({index})") if self.s.mark_roots else nullcontext():
            yield

    def _graph_step(self) -> Program:
        """Replay the first root's forward and backward as one graph: no hook runs, nothing is labelled."""
        call = self.t.call("cudaGraphLaunch", 9_001)
        layers = self.s.roots[0]
        for layer in layers:
            gathered = yield from self._collective("all_gather", layer, ALL_GATHER, self.shard_group, call)
            self.t.tail[COMPUTE] = max(self.t.tail[COMPUTE], gathered.end)
            self.t.launch(COMPUTE, layer.forward_ns, GEMM, "compute", call)
        for layer in reversed(layers):
            self.t.launch(COMPUTE, layer.backward_ns, GEMM, "compute", call)
            self.t.tail[REDUCE_SCATTER] = max(self.t.tail[REDUCE_SCATTER], self.t.tail[COMPUTE])
            yield from self._collective("reduce_scatter", layer, REDUCE_SCATTER, self.reduce_group, call)
        self.t.tail[COMPUTE] = max(self.t.tail[COMPUTE], self.t.tail[REDUCE_SCATTER])
        self.t.launch(COMPUTE, self.s.optimizer_ns, ADAM, "compute", call)

    # -- labels and launches

    def label(self, name: str, layer: Layer) -> AbstractContextManager[object]:
        if self.s.labels == "none":
            return nullcontext()
        return self.t.range(f"{name} ({layer.fqn})" if layer.fqn else name)

    def bare_label(self, name: str) -> AbstractContextManager[object]:
        return nullcontext() if self.s.labels == "none" else self.t.range(name)

    def copy(self, stream: int, duration: int, name: str, op: str) -> None:
        """Launch a copy of FSDP's: without labels in the trace it is compute like any other kernel."""
        self.t.kernel(stream, duration, name, "compute" if self.s.labels == "none" else "fsdp_copy", op)

    @contextmanager
    def on(self, thread: int) -> Iterator[None]:
        before, self.t.thread = self.t.thread, thread
        yield
        self.t.thread = before

    def compute(self, layer: Layer, duration: int, backward: bool) -> None:
        """Launch a module's kernels; their durations differ a little and sum to ``duration``."""
        share = duration // layer.kernels
        for i in range(layer.kernels):
            length = share if i else duration - share * (layer.kernels - 1)
            outer = (
                self.t.range("autograd::engine::evaluate_function: MmBackward0", "cpu_op")
                if backward
                else nullcontext()
            )
            with outer, self.t.range("aten::mm", "cpu_op"):
                self.t.now += layer.host_ns
                self.t.launch(COMPUTE, length, GEMM, "compute")

    # -- collectives

    def _qualified(self, fqn: str) -> str:
        """Return a module's name in the answers: its root's index tells equal names apart."""
        return f"root{self.root_index}:{fqn}" if self.s.mark_roots else fqn

    def _sizes(self, op: str, layer: Layer) -> tuple[int, int, str]:
        if op == "all_gather":
            return layer.numel // self.s.shard, layer.numel, self.s.param_dtype
        if op == "reduce_scatter":
            return layer.numel, layer.numel // self.s.shard, self.s.reduce_dtype
        return layer.numel // self.s.shard, layer.numel // self.s.shard, self.s.reduce_dtype

    def all_gather(self, layer: Layer, stream: int) -> Meeting:
        return (yield from self._issue("all_gather", layer, stream, self.shard_group))

    def reduce_scatter(self, layer: Layer) -> Meeting:
        return (yield from self._issue("reduce_scatter", layer, REDUCE_SCATTER, self.reduce_group))

    def all_reduce(self, layer: Layer) -> Meeting:
        return (yield from self._issue("all_reduce", layer, ALL_REDUCE, self.replicate_group))

    def _issue(self, op: str, layer: Layer, stream: int, group: ProcessGroup) -> Meeting:
        name = RANGE[op]
        if self.s.labels == "launch":
            name = f"FSDP::{op} ({layer.fqn})" if layer.fqn else f"FSDP::{op}"
        with (
            self.t.range(OPERATOR[op], "cpu_op"),
            self.t.range("record_param_comms", "cpu_op", **self._metadata(op, layer, group, host=True)),
            self.t.range(name),
        ):
            return (yield from self._collective(op, layer, stream, group, None))

    def _metadata(self, op: str, layer: Layer, group: ProcessGroup, host: bool) -> dict[str, object]:
        if not self.s.metadata:
            return {}
        in_nelems, out_nelems, dtype = self._sizes(op, layer)
        seq = self.sequence.get(group.name, 0) + 1
        values: dict[str, object] = {
            "Collective name": PARAM_COMMS_NAME[op],
            "In msg nelems": in_nelems,
            "Out msg nelems": out_nelems,
            "Group size": len(group.ranks),
            "dtype": dtype,
            "In split size": "[]",
            "Out split size": "[]",
            "Process Group Name": group.name,
            "Process Group Description": group.description,
            "Process Group Ranks": str(list(group.ranks)),
            "Seq": seq,
            "Comms Id": comms_id(group, seq),
        }
        if host:
            values |= {
                "Rank": self.t.rank,
                "Is asynchronized op": self.s.unshard_async_op and op == "all_gather",
            }
        return values

    def _collective(
        self, op: str, layer: Layer, stream: int, group: ProcessGroup, graph: HostEvent | None
    ) -> Meeting:
        in_nelems, out_nelems, dtype = self._sizes(op, layer)
        args = {} if graph else self._metadata(op, layer, group, host=False)
        self.sequence[group.name] = seq = self.sequence.get(group.name, 0) + 1
        call = graph or self.t.call("cudaLaunchKernelExC")
        transfer = {
            "all_gather": layer.all_gather_ns,
            "reduce_scatter": layer.reduce_scatter_ns,
            "all_reduce": layer.all_reduce_ns,
        }[op] * (4 if (op, layer.fqn) in self.s.slow_transfer else 1)
        ready: dict[Literal["launch", "stream", "communicator"], int] = {
            "launch": call.start + LAUNCH_LATENCY_NS,
            "stream": self.t.tail[stream],
            "communicator": self.t.communicator[group.name],
        }
        held_by = max(ready, key=lambda reason: ready[reason])
        start = ready[held_by]
        latest = yield Arrival(group, seq, start)
        end = latest + transfer
        unlabelled = graph is not None or self.s.labels == "none"
        collective = Collective(
            op=op,
            fqn=None if unlabelled else self._qualified(layer.fqn),
            phase="other" if unlabelled else self.phase,
            step=self.step,
            group=group.name,
            mesh_dim=group.mesh_dim,
            dtype=dtype,
            payload_bytes=max(in_nelems, out_nelems) * DTYPE_BYTES[dtype],
            group_size=len(group.ranks),
            seq=seq,
            comms_id=comms_id(group, seq),
            issue=call.start,
            start=start,
            end=end,
            held_by=held_by,
            latest_start=latest,
        )
        self.t.collectives.append(collective)
        self.t.tail[stream] = start
        if self.s.flavour == "copy_engine" and op == "all_gather":
            self._copies(collective, stream, len(group.ranks) - 1, call)
        else:
            kernel = self.t.launch(stream, end - start, self._kernel_name(op, dtype), "comm", call)
            kernel.start, kernel.end, kernel.args, kernel.collective = start, end, args, collective
        self.t.tail[stream] = end
        self.t.communicator[group.name] = end
        return collective

    def _copies(self, collective: Collective, stream: int, peers: int, call: HostEvent) -> None:
        """Gather by copy engine: one peer copy after another, no kernel and no metadata."""
        cuts = [collective.start + (collective.end - collective.start) * i // peers for i in range(peers + 1)]
        for start, end in itertools.pairwise(cuts):
            copy = self.t.launch(stream, end - start, "Memcpy PtoP (Device -> Device)", "memcpy", call)
            copy.kind, copy.start, copy.end, copy.collective = "comm", start, end, collective
            copy.args = {"bytes": collective.payload_bytes // (peers + 1)}
            call = self.t.call("cudaMemcpyAsync") if end < collective.end else call

    def _kernel_name(self, op: str, dtype: str) -> str:
        suffix = "RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        return {
            "nccl": f"ncclDevKernel_{NCCL_NAME[op]}_{'bf16' if dtype == 'BFloat16' else 'f32'}_{suffix}",
            "copy_engine": f"ncclDevKernel_{NCCL_NAME[op]}_{suffix}",
            "rccl": "ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)",
            "rccl_old": "rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)",
            "symmetric_memory": SYMMETRIC_NAME[op],
        }[self.s.flavour]


class Model:
    """One root's forward and backward: FSDP2's hooks in the order torch runs them."""

    def __init__(self, trainer: Trainer, groups: list[Group]) -> None:
        self.x = trainer
        self.t = trainer.t
        self.s = trainer.s
        self.groups = groups
        self.root, *self.children = groups
        self.copy_out_done: int | None = None
        """The deferred copy-out event of implicit forward prefetching."""
        self.order: list[Group] = []
        self.reduced: list[Collective] = []
        self.post_reduce: dict[int, tuple[list[Collective], int]] = {}

    # -- forward

    def forward(self) -> Program:
        self.x.phase = "forward"
        head = self.root.layer.forward_ns // 2
        self.t.now += self.root.layer.late_ns
        with self.x.bare_label("FSDP::root_pre_forward"):
            self.t.wait_stream(COPY_IN, self.t.tail[COMPUTE])
            self.t.wait_stream(ALL_GATHER, self.t.tail[COMPUTE])
            with self.x.bare_label("FSDP::inputs_to_device"):
                self.t.now += 400
        yield from self._pre_forward(self.root)
        self.x.compute(self.root.layer, self.root.layer.forward_ns - head, backward=False)
        for child in self.children:
            self.t.now += child.layer.late_ns
            yield from self._pre_forward(child)
            self.x.compute(child.layer, child.layer.forward_ns, backward=False)
            if child.layer.sync:
                self._item()
            self._post_forward(child)
        self.x.compute(self.root.layer, head, backward=False)
        self._post_forward(self.root)
        if self.copy_out_done is not None:
            self._gather_streams_wait(self.copy_out_done)
            self.copy_out_done = None
        self.x.phase = "other"

    def _item(self) -> None:
        with self.t.range("aten::item", "cpu_op"), self.t.range("aten::_local_scalar_dense", "cpu_op"):
            self.t.launch(COMPUTE, 1_500, "Memcpy DtoH (Device -> Pageable)", "memcpy")
            self.t.synchronize(COMPUTE)

    def _pre_forward(self, group: Group) -> Program:
        with self.x.bare_label("FSDP::cast_forward_inputs"):
            self.t.now += 300
        with self.x.label("FSDP::pre_forward", group.layer):
            yield from self._unshard(group)
            self._wait_for_unshard(group, forward=True)
        for fqn in group.layer.forward_prefetch:
            yield from self._prefetch(fqn, "forward")

    def _post_forward(self, group: Group) -> None:
        with self.x.label("FSDP::post_forward", group.layer):
            reshard = group.layer.reshard if group.layer.reshard is not None else group is not self.root
            if reshard:
                group.unsharded = False
            group.forward_indices.append(len(self.order))
            self.order.append(group)

    # -- unshard

    def _prefetch(self, fqn: str, direction: str) -> Program:
        target = next(group for group in self.groups if group.layer.fqn == fqn)
        with self.x.bare_label(f"FSDP::{direction}_prefetch for {fqn}"):
            yield from self._unshard(target)

    def _unshard(self, group: Group) -> Program:
        if group.pending is not None or group.unsharded:
            return
        copy_in, gather = (COMPUTE, COMPUTE) if self.s.unshard_async_op else (COPY_IN, ALL_GATHER)
        outer = self.x.label("FSDP::all_gather", group.layer) if self.s.labels == "host" else nullcontext()
        with outer:
            self.x.copy(copy_in, group.layer.copy_ns, COPY_IN_KERNEL, "fsdp::all_gather_copy_in")
            if copy_in != gather:
                self.t.wait_stream(gather, self.t.tail[copy_in])
            if self.s.unshard_async_op:
                self.t.wait_stream(PG_INTERNAL, self.t.tail[COMPUTE])
                gather = PG_INTERNAL
            group.pending = yield from self.x.all_gather(group.layer, gather)

    def _gather_streams_wait(self, until: int) -> None:
        self.t.wait_stream(COPY_IN, until)
        self.t.wait_stream(ALL_GATHER, until)

    def _wait_for_unshard(self, group: Group, forward: bool) -> None:
        if group.pending is None:
            return
        if forward and self.copy_out_done is not None:
            self._gather_streams_wait(self.copy_out_done)
            self.copy_out_done = None
        with self.x.label("FSDP::all_gather_copy_out", group.layer):
            self.t.wait_collective(COMPUTE, group.pending)
            self.x.copy(COMPUTE, group.layer.copy_ns, COPY_OUT_KERNEL, "fsdp::split_with_sizes_copy")
        group.unsharded, group.pending = True, None
        if forward and not self.s.unshard_async_op:
            self.copy_out_done = self.t.tail[COMPUTE]
        else:
            self._gather_streams_wait(self.t.tail[COMPUTE])

    # -- backward

    def backward(self, *, reduce: bool, first: bool, last: bool) -> Program:
        self.x.phase = "backward"
        tail = self.root.layer.backward_ns // 2
        yield from self._pre_backward(self.root)
        self.x.compute(self.root.layer, self.root.layer.backward_ns - tail, backward=True)
        for child in reversed(self.children):
            yield from self._backward_of(child, reduce=reduce, first=first)
        self.x.compute(self.root.layer, tail, backward=True)
        with self.x.bare_label("FSDP::root_post_backward_callback"):
            for group in self.groups:
                if not group.post_backward:
                    yield from self._post_backward(group, reduce=reduce, first=first)
                group.post_backward = False
            if last:
                self._finalize()
        self.x.phase = "other"

    def _backward_of(self, child: Group, *, reduce: bool, first: bool) -> Program:
        self.t.now += child.layer.late_backward_ns
        if self.s.checkpoint == "outside":
            yield from self._pre_forward(child)
            self.x.compute(child.layer, child.layer.forward_ns, backward=False)
            with self.x.label("FSDP::post_forward", child.layer):
                self.t.now += 200
        yield from self._pre_backward(child)
        if self.s.checkpoint == "inside":
            self.x.compute(child.layer, child.layer.forward_ns, backward=False)
        self.x.compute(child.layer, child.layer.backward_ns, backward=True)
        yield from self._post_backward(child, reduce=reduce, first=first)
        child.post_backward = True

    def _pre_backward(self, group: Group) -> Program:
        with self.x.label("FSDP::pre_backward", group.layer):
            yield from self._unshard(group)
            self._wait_for_unshard(group, forward=False)
            index = group.forward_indices.pop()
            if not group.layer.backward_prefetch and index > 0:
                yield from self._prefetch(self.order[index - 1].layer.fqn, "backward")
        for fqn in group.layer.backward_prefetch:
            yield from self._prefetch(fqn, "backward")

    def _post_backward(self, group: Group, *, reduce: bool, first: bool) -> Program:
        layer = group.layer
        with self.x.label("FSDP::post_backward_accumulate", layer):
            if not (first or self.s.sync_every_microbatch):
                self.x.copy(COMPUTE, layer.copy_ns, ADD_KERNEL, "aten::add_")
        with self.x.label("FSDP::post_backward_reshard", layer):
            group.unsharded = False
        if not reduce:
            return
        if self.reduced:
            with self.x.bare_label(f"FSDP::post_backward_rs_wait ({layer.fqn})"):
                self.t.wait_collective(COMPUTE, self.reduced.pop(0))
        with self.x.label("FSDP::post_backward_reduce", layer):
            self.x.copy(COMPUTE, layer.copy_ns, CHUNK_CAT_KERNEL, "fsdp::chunk_cat")
            self.t.wait_stream(REDUCE_SCATTER, self.t.tail[COMPUTE])
            scattered = yield from self.x.reduce_scatter(layer)
            self.reduced.append(scattered)
            stream, last = REDUCE_SCATTER, scattered
            if self.s.replicas > 1:
                self.t.wait_stream(ALL_REDUCE, self.t.tail[REDUCE_SCATTER])
                last = yield from self.x.all_reduce(layer)
                stream = ALL_REDUCE
            if self.s.reduce_dtype != self.s.orig_dtype:
                self.x.copy(stream, layer.copy_ns, CAST_KERNEL, "aten::to")
            waiting = [*self.post_reduce[stream][0], last] if stream in self.post_reduce else [last]
            self.post_reduce[stream] = (waiting, self.t.tail[stream])

    def _finalize(self) -> None:
        """Make the compute stream wait for what is left of the reductions, in the order they end."""
        left = [c for waiting, _ in self.post_reduce.values() for c in waiting if c.consumer is None]
        left += [c for c in self.reduced if c not in left]
        for collective in sorted(left, key=lambda c: c.end):
            self.t.wait_collective(COMPUTE, collective)
        for _, done in self.post_reduce.values():
            self.t.wait_stream(COMPUTE, done)
        self.post_reduce.clear()
        self.reduced.clear()
        self.order.clear()


def comms_id(group: ProcessGroup, seq: int) -> int:
    """Return an identifier equal on all ranks of one collective, above what a float can hold."""
    return (hash((group.ranks, int(group.name), seq)) & ((1 << 62) - 1)) | (1 << 61) | 1
