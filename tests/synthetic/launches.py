"""What FSDP2 leaves on a timeline: its labels, its copies and its collectives with their metadata."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

from synthetic.schedule import DTYPE_BYTES, Layer, Schedule
from synthetic.timeline import (
    ALL_REDUCE,
    COMPUTE,
    LAUNCH_LATENCY_NS,
    REDUCE_SCATTER,
    Collective,
    HostEvent,
    Timeline,
)

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_kernel"
TRITON = "triton_poi_fused_add_mm_relu_0"
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"
COPY_IN_KERNEL = "void at::native::multi_tensor_apply_kernel<CopyFunctor<float, bfloat16>>"
COPY_OUT_KERNEL = "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel"
CHUNK_CAT_KERNEL = "void at::native::chunk_cat_cuda_kernel<float, c10::BFloat16>"
CAST_KERNEL = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>"
ADD_KERNEL = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"

OPERATORS = {
    "layer_norm": "aten::native_layer_norm",
    "CUDAFunctor_add": "aten::add",
    "softmax": "aten::softmax",
}
"""Part of a compute kernel's name -> operator that launches it; any other is a matrix product's."""

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


class Launcher:
    """Launches one rank's work; collectives are coroutines that stop until the last rank arrives."""

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

    # -- labels and launches

    def label(self, name: str, layer: Layer) -> AbstractContextManager[object]:
        if self.s.labels == "none":
            return nullcontext()
        return self.t.range(f"{name} ({layer.fqn})" if layer.fqn else name)

    def bare_label(self, name: str) -> AbstractContextManager[object]:
        return nullcontext() if self.s.labels == "none" else self.t.range(name)

    def copy(self, layer: Layer, stream: int, name: str, op: str) -> None:
        """Launch a copy of FSDP's: without labels in the trace it is compute like any other kernel."""
        with self._owned_by(layer):
            self.t.kernel(
                stream, layer.copy_ns, name, "compute" if self.s.labels == "none" else "fsdp_copy", op
            )

    @contextmanager
    def _owned_by(self, layer: Layer) -> Iterator[None]:
        self.t.owner = None if self.s.labels == "none" else self._qualified(layer.fqn)
        yield
        self.t.owner = None

    @contextmanager
    def on(self, thread: int) -> Iterator[None]:
        before, self.t.thread = self.t.thread, thread
        yield
        self.t.thread = before

    def compute(self, layer: Layer, duration: int, backward: bool) -> None:
        """Launch a module's kernels; their durations differ a little and sum to ``duration``."""
        if self.s.compiled:
            with self.t.range("Torch-Compiled Region: 0/0", "cpu_op"), self._owned_by(layer):
                self.t.now += layer.host_ns
                self.t.launch(COMPUTE, duration, TRITON, "compute", self.t.call("cuLaunchKernel"))
            return
        share = duration // layer.kernels
        for i in range(layer.kernels):
            length = share if i else duration - share * (layer.kernels - 1)
            outer = (
                self.t.range("autograd::engine::evaluate_function: MmBackward0", "cpu_op")
                if backward
                else nullcontext()
            )
            name = layer.kernel_names[i % len(layer.kernel_names)] if layer.kernel_names else GEMM
            operator = next((op for part, op in OPERATORS.items() if part in name), "aten::mm")
            with outer, self.t.range(operator, "cpu_op"), self._owned_by(layer):
                self.t.now += layer.host_ns
                self.t.launch(COMPUTE, length, name, "compute")

    def user_range(self, name: str) -> AbstractContextManager[object]:
        return self.t.range(name) if self.s.user_ranges else nullcontext()

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

    def _issue(self, op: str, layer: Layer, stream: int, group: ProcessGroup, own: bool = False) -> Meeting:
        """Issue a collective of a layer's, or the script's ``own``."""
        name = RANGE[op]
        if self.s.labels == "launch" and not own:
            name = f"FSDP::{op} ({layer.fqn})" if layer.fqn else f"FSDP::{op}"
        with (
            self.t.range(OPERATOR[op], "cpu_op"),
            self.t.range("record_param_comms", "cpu_op", **self._metadata(op, layer, group, host=True)),
            self.t.range(name),
        ):
            return (yield from self.collective(op, layer, stream, group, None, own))

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

    def collective(
        self,
        op: str,
        layer: Layer,
        stream: int,
        group: ProcessGroup,
        graph: HostEvent | None,
        own: bool = False,
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
        described = self.s.metadata and graph is None
        unlabelled = graph is not None or own or self.s.labels == "none"
        collective = Collective(
            op=op,
            fqn=None if unlabelled else self._qualified(layer.fqn),
            phase="other" if unlabelled else self.phase,
            step=self.step,
            group=group.name,
            mesh_dim=group.mesh_dim,
            dtype=dtype,
            payload_bytes=max(in_nelems, out_nelems) * DTYPE_BYTES[dtype] if described else -1,
            ranks=group.ranks,
            seq=seq,
            comms_id=comms_id(group, seq),
            issue=call.start,
            start=start,
            end=end,
            held_by=held_by,
            latest_start=latest,
            stall=None if unlabelled else 0,
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
            copy.args = {"bytes": 1 << 20}
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


def comms_id(group: ProcessGroup, seq: int) -> int:
    """Return an identifier equal on all ranks of one collective, above what a float can hold."""
    return (hash((group.ranks, int(group.name), seq)) & ((1 << 62) - 1)) | (1 << 61) | 1
