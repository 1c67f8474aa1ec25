"""FSDP2's rules: which label opens when, what is launched on which stream, and who waits (torch 2.13)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from synthetic.launches import (
    ADAM,
    ADD_KERNEL,
    CAST_KERNEL,
    CHUNK_CAT_KERNEL,
    COPY_IN_KERNEL,
    COPY_OUT_KERNEL,
    GEMM,
    Launcher,
    Program,
)
from synthetic.schedule import Layer
from synthetic.timeline import (
    ALL_GATHER,
    ALL_REDUCE,
    AUTOGRAD,
    COMPUTE,
    COPY_IN,
    INPUT,
    PG_INTERNAL,
    REDUCE_SCATTER,
    Collective,
)


@dataclass
class Group:
    """A parameter group's state between hooks."""

    layer: Layer
    unsharded: bool = False
    pending: Collective | None = None
    forward_indices: list[int] = field(default_factory=list)
    post_backward: bool = False


class Trainer(Launcher):
    """Runs a schedule on one rank's timeline as a coroutine that stops at every collective."""

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
        if self.s.loading_ns:
            with self.t.range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
                self.t.now += self.s.loading_ns
        with self.t.range("aten::to", "cpu_op"), self.t.range("aten::copy_", "cpu_op"):
            stream = INPUT if self.s.input_stream else COMPUTE
            memory = "Pageable" if self.s.pageable_input else "Pinned"
            copied = self.t.launch(stream, self.s.input_ns, f"Memcpy HtoD ({memory} -> Device)", "memcpy")
            if self.s.pageable_input:
                self.t.host[-1].end = self.t.now = copied.end
            if self.s.input_stream:
                self.t.wait_stream(COMPUTE, self.t.tail[INPUT])
        for _ in range(self.s.allocations):
            for name in ("cudaFree", "cudaMalloc"):
                with self.t.range("aten::empty", "cpu_op"):
                    call = self.t.call(name, 0)
                    self.t.now = max(self.t.now, *self.t.tail.values()) + self.s.allocation_ns // 2
                    call.end = self.t.now
        for micro in range(self.s.microbatches):
            last = micro == self.s.microbatches - 1
            reduce = last or self.s.sync_every_microbatch
            models = [Model(self, root) for root in roots]
            for i, model in enumerate(models):
                with self._root_range(i), self.user_range("## forward ##"):
                    yield from model.forward()
            for i, model in reversed([*enumerate(models)]):
                if i in self.s.frozen_roots:
                    continue
                with self.user_range("## backward ##"), self.on(AUTOGRAD), self._root_range(i):
                    yield from model.backward(reduce=reduce, first=micro == 0)
        self.phase = "optimizer"
        self.root_index = 0
        with self.t.range("Optimizer.step#AdamW.step"):
            self._update()
        self.phase = "other"
        yield from self._end_of_step(roots[0])

    def _update(self) -> None:
        if self.s.offload:
            self.t.synchronize(COMPUTE)
            with self.t.range("aten::_fused_adamw_", "cpu_op"):
                self.t.now += self.s.optimizer_ns
            return
        fused = self.s.optimizer_kernels == 1
        for _ in range(self.s.optimizer_kernels):
            self.t.now += self.s.optimizer_host_ns
            length = self.s.optimizer_ns // self.s.optimizer_kernels
            name, op = (ADAM, "aten::_fused_adamw_") if fused else (ADD_KERNEL, "aten::addcdiv_")
            self.t.kernel(COMPUTE, length, name, "compute", op)

    def _end_of_step(self, root: list[Group]) -> Program:
        """Do what the script does besides training, before its next step."""
        for _ in range(self.s.evaluations):
            model = Model(self, root)
            with self.user_range("## evaluation ##"):
                yield from model.forward()
            model.order.clear()
            for group in root:
                group.forward_indices.clear()
        for one in self.s.outside:
            layer = Layer(
                fqn="", numel=one.numel, all_gather_ns=one.transfer_ns, all_reduce_ns=one.transfer_ns
            )
            for _ in range(one.count):
                collective = yield from self._issue(one.op, layer, PG_INTERNAL, self.shard_group, own=True)
                self.t.wait_stream(COMPUTE, collective.end)
        for _ in range(self.s.host_copies):
            Model(self, root)._item()
        if self.s.pause_ns:
            with self.t.range(self.s.pause_range) if self.s.pause_range else nullcontext():
                self.t.now += self.s.pause_ns

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
            gathered = yield from self.collective("all_gather", layer, ALL_GATHER, self.shard_group, call)
            self.t.tail[COMPUTE] = max(self.t.tail[COMPUTE], gathered.end)
            self.t.launch(COMPUTE, layer.forward_ns, GEMM, "compute", call)
        for layer in reversed(layers):
            self.t.launch(COMPUTE, layer.backward_ns, GEMM, "compute", call)
            self.t.tail[REDUCE_SCATTER] = max(self.t.tail[REDUCE_SCATTER], self.t.tail[COMPUTE])
            yield from self.collective("reduce_scatter", layer, REDUCE_SCATTER, self.reduce_group, call)
        self.t.tail[COMPUTE] = max(self.t.tail[COMPUTE], self.t.tail[REDUCE_SCATTER])
        self.t.launch(COMPUTE, self.s.optimizer_ns, ADAM, "compute", call)


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
            with self.x.user_range(f"block {child.layer.fqn}"):
                yield from self._pre_forward(child)
                with self.x.user_range("attention"):
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
            length = 1_500 if self.x.phase == "forward" else self.s.host_copy_ns
            self.t.launch(COMPUTE, length, "Memcpy DtoH (Device -> Pageable)", "memcpy")
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
            if self.s.offload:
                with self.t.range("aten::to", "cpu_op"), self.t.range("aten::copy_", "cpu_op"):
                    name = "Memcpy HtoD (Pinned -> Device)"
                    self.t.launch(copy_in, self.s.offload_ns, name, "memcpy")
            self.x.copy(group.layer, copy_in, COPY_IN_KERNEL, "fsdp::all_gather_copy_in")
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
            self.t.wait_collectives(COMPUTE, group.pending)
            self.x.copy(group.layer, COMPUTE, COPY_OUT_KERNEL, "fsdp::split_with_sizes_copy")
        group.unsharded, group.pending = True, None
        if forward and not self.s.unshard_async_op:
            self.copy_out_done = self.t.tail[COMPUTE]
        else:
            self._gather_streams_wait(self.t.tail[COMPUTE])

    # -- backward

    def backward(self, *, reduce: bool, first: bool) -> Program:
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
                self.x.copy(layer, COMPUTE, ADD_KERNEL, "aten::add_")
        with self.x.label("FSDP::post_backward_reshard", layer):
            group.unsharded = False
        if not reduce:
            return
        if self.reduced:
            with self.x.bare_label(f"FSDP::post_backward_rs_wait ({layer.fqn})"):
                self.t.wait_collectives(COMPUTE, self.reduced.pop(0))
        with self.x.label("FSDP::post_backward_reduce", layer):
            self.x.copy(layer, COMPUTE, CHUNK_CAT_KERNEL, "fsdp::chunk_cat")
            self.t.wait_stream(REDUCE_SCATTER, self.t.tail[COMPUTE])
            scattered = yield from self.x.reduce_scatter(layer)
            self.reduced.append(scattered)
            stream, last = REDUCE_SCATTER, scattered
            if self.s.replicas > 1:
                self.t.wait_stream(ALL_REDUCE, self.t.tail[REDUCE_SCATTER])
                last = yield from self.x.all_reduce(layer)
                stream = ALL_REDUCE
            if self.s.reduce_dtype != self.s.orig_dtype:
                self.x.copy(layer, stream, CAST_KERNEL, "aten::to")
            if self.s.offload:
                with self.t.range("aten::to", "cpu_op"), self.t.range("aten::copy_", "cpu_op"):
                    name = "Memcpy DtoH (Device -> Pinned)"
                    self.t.launch(stream, self.s.offload_ns, name, "memcpy")
            waiting = [*self.post_reduce[stream][0], last] if stream in self.post_reduce else [last]
            self.post_reduce[stream] = (waiting, self.t.tail[stream])

    def _finalize(self) -> None:
        """Make the compute stream wait for what is left: reductions, an event a stream; stray all-gathers."""
        left = [c for waiting, _ in self.post_reduce.values() for c in waiting if c.consumer is None]
        left += [c for c in self.reduced if c.consumer is None and c not in left]
        for _, done in self.post_reduce.values():
            self.t.wait_collectives(COMPUTE, *left, until=done)
            left = []
        for group in self.groups:
            if group.pending is not None:
                self.t.wait_collectives(COMPUTE, group.pending)
                group.pending = None
            group.forward_indices.clear()
        for collective in self.reduced:
            self.t.wait_stream(COMPUTE, collective.end)
        self.post_reduce.clear()
        self.reduced.clear()
        self.order.clear()
