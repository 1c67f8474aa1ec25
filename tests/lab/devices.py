"""Cases that are synthetic traces of GPUs: faults of links, hosts, devices and kernels, of 1 to 64 ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from synthetic import Layer, Outside, Schedule, record
from synthetic.kineto import write_run as write_traces
from synthetic.launches import GEMM

from lab.case import Case
from lab.traces import HEALTHY, MS, US, blocks, schedule, write_run

__all__ = ["DEVICES"]

NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>"
FLOAT_ATTENTION = "fmha_cutlassF_f32_aligned_64x128_rf_sm80(AttentionKernel::Params)"
LAYOUT = "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, float>(int)"
ODD = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>(Params)"
SGEMM = "ampere_sgemm_128x64_tn"
SOFTMAX = "void (anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>"
MIXED = (GEMM, NORM, GEMM, ADD, GEMM, GEMM, SOFTMAX)
COMPILE = "_compile.compile_inner (dynamo_timed)"


def _run(ranks: Sequence[Schedule], nodes: int = 1) -> Callable[[Path], Path]:
    return lambda folder: write_run(folder, ranks, nodes=nodes)


def _bare(ranks: Sequence[Schedule]) -> Callable[[Path], Path]:
    """Traces alone, as the profiler writes them: no manifest says what was set up."""
    return lambda folder: write_traces(record(*ranks), folder)


def _all(one: Schedule) -> list[Schedule]:
    return [one] * (one.shard * one.replicas)


def _but(one: Schedule, rank: int, other: Schedule) -> list[Schedule]:
    """All ranks alike but one."""
    ranks = _all(one)
    ranks[rank] = other
    return ranks


def _fault(
    name: str,
    fault: str,
    causes: str,
    remedy: str,
    much: Schedule | Sequence[Schedule],
    little: Schedule | Sequence[Schedule] | None,
    *,
    place: str = "",
    excused: str = "",
    nodes: int = 1,
    bare: bool = False,
) -> list[Case]:
    cases = []
    for size, one in (("much", much), ("little", little)):
        if one is None:
            continue
        ranks = _all(one) if isinstance(one, Schedule) else one
        cases.append(
            Case(
                name=f"device/{name}/{size}",
                fault=fault,
                size="much" if size == "much" else "little",
                causes=frozenset(causes.split()),
                remedy=remedy,
                place=place,
                write=_bare(ranks) if bare else _run(ranks, nodes),
                excused=frozenset(excused.split()),
            )
        )
    return cases


def _healthy(
    name: str, one: Schedule | Sequence[Schedule], nodes: int = 1, *, bare: bool = False, excused: str = ""
) -> Case:
    ranks = _all(one) if isinstance(one, Schedule) else one
    return Case(
        name=f"device/healthy/{name}",
        fault="healthy",
        size="healthy",
        write=_bare(ranks) if bare else _run(ranks, nodes),
        excused=frozenset(excused.split()),
    )


EIGHT = schedule(blocks(8, all_gather_ns=600 * US, reduce_scatter_ns=900 * US), shard=8)
HYBRID = schedule(blocks(8, all_gather_ns=600 * US, reduce_scatter_ns=900 * US), shard=4, replicas=2)


def _queued(reduce_ns: int) -> Schedule:
    """Backward gathers queue behind reductions of the same communicator, though all would fit."""
    return schedule(
        blocks(
            8,
            numel=400_000_000,
            forward_ns=4 * MS,
            backward_ns=4 * MS,
            all_gather_ns=1500 * US,
            reduce_scatter_ns=reduce_ns,
        ),
        steps=4,
    )


def _uneven(gather_ns: int) -> Schedule:
    """Blocks of which two hold most parameters and compute little."""
    one = schedule(blocks(8, numel=20_000_000))
    for layer in ("layers.2", "layers.5"):
        one = one.changed(layer, numel=400_000_000, all_gather_ns=gather_ns, reduce_scatter_ns=2 * gather_ns)
    return one


def _reduce_slow(all_reduce_ns: int) -> Schedule:
    return schedule(blocks(8, all_reduce_ns=all_reduce_ns), shard=4, replicas=2, steps=4)


def _late(one: Schedule, layer: str, ns: int) -> Schedule:
    return one.changed(layer, late_ns=ns)


def _root(numel: int, gather_ns: int) -> Schedule:
    one = schedule(blocks(8, numel=30_000_000), shard=4)
    return one.changed("", numel=numel, all_gather_ns=gather_ns, reduce_scatter_ns=gather_ns)


def _kernels(names: tuple[str, ...], **fields: Any) -> tuple[Layer, ...]:
    return blocks(kernels=12, kernel_names=names, **fields)


def _slow_links(one: Schedule, factor: float) -> Schedule:
    """All of a rank's transfers take as many times as long."""
    roots = tuple(
        tuple(
            replace(
                layer,
                all_gather_ns=int(layer.all_gather_ns * factor),
                reduce_scatter_ns=int(layer.reduce_scatter_ns * factor),
            )
            for layer in root
        )
        for root in one.roots
    )
    return replace(one, roots=roots)


def _two_groups(factor: float) -> list[Schedule]:
    """Two shard groups, one of them on slow links."""
    base = schedule(blocks(8, all_gather_ns=1200 * US, reduce_scatter_ns=2400 * US), shard=4, replicas=2)
    return [base] * 4 + [_slow_links(base, factor)] * 4


PCIE = schedule(
    blocks(
        8,
        numel=100_000_000,
        all_gather_ns=9 * MS,
        reduce_scatter_ns=18 * MS,
        forward_ns=6 * MS,
        backward_ns=12 * MS,
    ),
    shard=2,
)
"""Two H100s whose gathers of 200 MB reach 11 GB/s."""

DEVICES: list[Case] = [
    *_fault(
        "queued",
        "backward gathers behind reductions on one communicator",
        "all_gather_queued reduce_scatter_queued reduce_in_float32",
        "separate_reduce_scatter|bfloat16",
        _queued(4 * MS),
        _queued(300 * US),
    ),
    *_fault(
        "queued-bare",
        "the same, traces alone",
        "all_gather_queued reduce_scatter_queued reduce_in_float32",
        "separate_reduce_scatter|bfloat16",
        _queued(4 * MS),
        _queued(300 * US),
        bare=True,
    ),
    *_fault(
        "uneven",
        "blocks of very uneven size",
        "wrapping_too_coarse all_gather_launched_late "
        "all_gather_behind_stream all_gather_queued reduce_scatter_queued reduce_scatter_too_long "
        "all_gathers_back_to_back reduce_in_float32",
        r"split|inside|prefetch|wrap|separate|bfloat16",
        _uneven(9 * MS),
        _uneven(400 * US),
    ),
    *_fault(
        "replicas",
        "slow links between HSDP replicas",
        "all_reduce_exposed",
        "replica",
        _reduce_slow(9 * MS),
        _reduce_slow(300 * US),
        nodes=2,
    ),
    *_fault(
        "late-loader",
        "one of eight ranks loads late",
        "data_loader straggler",
        "rank 5|worker",
        _but(EIGHT, 5, replace(EIGHT, loading_ns=60 * MS)),
        _but(EIGHT, 5, replace(EIGHT, loading_ns=150 * US)),
        place="rank 5",
    ),
    *_fault(
        "late-kernels",
        "one of eight devices is slow",
        "straggler",
        "clock|temperature",
        _but(EIGHT, 3, EIGHT.scaled(1.3)),
        _but(EIGHT, 3, EIGHT.scaled(1.002)),
        place="rank 3",
    ),
    *_fault(
        "late-layer",
        "one of eight devices is slow in one layer",
        "straggler",
        "clock|temperature",
        _but(EIGHT, 3, EIGHT.scaled(4, only="layers.4")),
        _but(EIGHT, 3, EIGHT.scaled(1.03, only="layers.4")),
        place="rank 3",
    ),
    *_fault(
        "late-host",
        "one of eight hosts pauses in forward",
        "straggler host_pause",
        "rank 6|out of the step",
        _but(EIGHT, 6, _late(EIGHT, "layers.3", 75 * MS)),
        _but(EIGHT, 6, _late(EIGHT, "layers.3", 100 * US)),
        place="rank 6",
    ),
    *_fault(
        "late-host-bare",
        "the same, traces alone",
        "straggler host_pause",
        "rank 6|out of the step",
        _but(EIGHT, 6, _late(EIGHT, "layers.3", 75 * MS)),
        _but(EIGHT, 6, _late(EIGHT, "layers.3", 100 * US)),
        place="rank 6",
        bare=True,
    ),
    *_fault(
        "late-collection",
        "one of eight ranks pauses at the end of its step",
        "straggler host_pause garbage_collection",
        "rank 1|out of the step|collect",
        _but(EIGHT, 1, replace(EIGHT, pause_ns=90 * MS)),
        _but(EIGHT, 1, replace(EIGHT, pause_ns=150 * US)),
        place="rank 1",
    ),
    *_fault(
        "launches",
        "host-bound launches of small kernels, one rank traced",
        "host_bound",
        "compile|graph|batch",
        [
            schedule(
                blocks(
                    kernels=60,
                    kernel_names=MIXED,
                    host_ns=90 * US,
                    forward_ns=1200 * US,
                    backward_ns=2400 * US,
                )
            )
        ],
        [schedule(blocks(kernels=60, kernel_names=MIXED, host_ns=9 * US))],
    ),
    *_fault(
        "item-bare",
        ".item() in every layer, traces alone",
        "host_sync",
        "item|synchron",
        schedule(blocks(8, sync=True, all_gather_ns=1500 * US, kernels=12, host_ns=60 * US)),
        HEALTHY.changed("layers.2", sync=True),
        bare=True,
    ),
    *_fault(
        "pageable",
        "inputs from pageable memory",
        "host_sync host_copies",
        "pin|non_blocking",
        schedule(pageable_input=True, input_ns=25 * MS),
        schedule(pageable_input=True, input_ns=30 * US),
    ),
    *_fault(
        "pinned-input",
        "large inputs copied in line",
        "host_copies",
        "ahead|non_blocking|prefetch",
        schedule(input_ns=25 * MS),
        schedule(input_ns=60 * US),
    ),
    *_fault(
        "offload-bare",
        "CPU offload, traces alone",
        "cpu_offload host_copies",
        "offload|device",
        schedule(offload=True, offload_ns=9 * MS, optimizer_ns=20 * MS),
        None,
        bare=True,
    ),
    *_fault(
        "logging",
        "large copies to the host for logging",
        "host_sync host_copies",
        "item|host|step",
        replace(HEALTHY, host_copies=4, host_copy_ns=8 * MS),
        replace(HEALTHY, host_copies=1, host_copy_ns=20 * US),
    ),
    *_fault(
        "allocator",
        "the allocator frees and gets blocks in each step",
        "allocator_stalls host_sync",
        "alloc|memory|expandable",
        replace(HEALTHY, allocations=12, allocation_ns=2 * MS),
        replace(HEALTHY, allocations=1, allocation_ns=20 * US),
    ),
    *_fault(
        "fp32-products",
        "products in float32 without tensor cores",
        "float32_without_tensor_cores",
        "bfloat16|matmul_precision",
        schedule(_kernels((SGEMM,))),
        schedule(_kernels((*[GEMM] * 39, SGEMM))),
    ),
    *_fault(
        "fp32-attention",
        "rotary tables make queries and keys float32",
        "attention_in_float32",
        "bfloat16",
        schedule(_kernels((GEMM, FLOAT_ATTENTION))),
        schedule(_kernels((*[GEMM] * 39, FLOAT_ATTENTION))),
    ),
    *_fault(
        "channels-first",
        "convolutions on channels first",
        "layout_conversions",
        "channels_last",
        schedule(_kernels((GEMM, GEMM, LAYOUT))),
        schedule(blocks(kernels=40, kernel_names=(*[GEMM] * 39, LAYOUT))),
    ),
    *_fault(
        "odd-vocabulary",
        "a vocabulary that 8 does not divide",
        "unaligned_products",
        "multiple of 8",
        schedule(_kernels((GEMM, ODD))),
        schedule(blocks(kernels=40, kernel_names=(*[GEMM] * 39, ODD))),
    ),
    *_fault(
        "fp32-reduce",
        "reductions in float32 over eight ranks",
        "reduce_in_float32 reduce_scatter_too_long",
        "bfloat16",
        schedule(blocks(8, reduce_scatter_ns=7 * MS), shard=8, separate_reduce_scatter_group=True),
        schedule(blocks(8, reduce_scatter_ns=500 * US), shard=8),
    ),
    *_fault(
        "unfused-bare",
        "thousands of optimizer kernels, traces alone",
        "host_bound optimizer_per_tensor optimizer",
        "fused|foreach",
        replace(HEALTHY, optimizer_kernels=4000, optimizer_host_ns=12 * US, optimizer_ns=5 * MS),
        replace(HEALTHY, optimizer_kernels=8),
        bare=True,
    ),
    *_fault(
        "unfused",
        "thousands of optimizer kernels",
        "host_bound optimizer_per_tensor optimizer",
        "fused|foreach",
        replace(HEALTHY, optimizer_kernels=4000, optimizer_host_ns=12 * US, optimizer_ns=5 * MS),
        None,
    ),
    *_fault(
        "full-tensor",
        "full_tensor() of every parameter, eight ranks, traces alone",
        "all_gather_outside_fsdp",
        "full_tensor|state_dict",
        replace(EIGHT, outside=(Outside(op="all_gather", count=60, transfer_ns=900 * US, numel=40_000_000),)),
        replace(EIGHT, outside=(Outside(op="all_gather", count=1, transfer_ns=90 * US),)),
        bare=True,
    ),
    *_fault(
        "evaluation",
        "a forward without backward in every step, eight ranks, traces alone",
        "forward_without_backward",
        "evaluat",
        replace(EIGHT, evaluations=1),
        None,
        bare=True,
    ),
    *_fault(
        "tiny",
        "200 units of a few layers",
        "wrapping_too_fine",
        "larger|together|coarser",
        schedule(
            blocks(
                120,
                numel=300_000,
                forward_ns=60 * US,
                backward_ns=120 * US,
                all_gather_ns=110 * US,
                reduce_scatter_ns=140 * US,
                kernels=2,
                host_ns=4 * US,
            ),
            shard=8,
            steps=3,
        ),
        schedule(
            blocks(
                40,
                numel=300_000,
                forward_ns=900 * US,
                backward_ns=1800 * US,
                all_gather_ns=20 * US,
                reduce_scatter_ns=30 * US,
                kernels=2,
            ),
            shard=8,
            steps=3,
        ),
    ),
    *_fault(
        "root",
        "embedding and head in the root, four ranks",
        "root_holds_most root_not_resharded",
        "embedding|head|root|wrap",
        _root(800_000_000, 25 * MS),
        _root(40_000_000, 200 * US),
    ),
    *_fault(
        "copies",
        "copy-out takes longer than compute",
        "fsdp_copies",
        "copy|shard|larger|batch|wrap",
        schedule(blocks(copy_ns=1500 * US)),
        schedule(blocks(copy_ns=30 * US)),
    ),
    *_fault(
        "elementwise",
        "memory-bound kernels take most of compute",
        "elementwise_kernels memory_bound_kernels",
        "compile|fus",
        schedule(_kernels((GEMM, NORM, ADD, ADD))),
        schedule(_kernels((*[GEMM] * 11, NORM))),
    ),
    *_fault(
        "sync",
        "gradients reduced every micro-batch, eight ranks, traces alone",
        "reduced_every_micro_batch",
        "set_requires_gradient_sync",
        schedule(blocks(8, reduce_scatter_ns=6 * MS), shard=8, microbatches=4, steps=3),
        schedule(blocks(8, reduce_scatter_ns=200 * US), shard=8, microbatches=4, steps=3),
        bare=True,
    ),
    *_fault(
        "slow-group",
        "one of two nodes has slow links",
        "slow_links slow_transfer slow_group straggler",
        "link|network|rank",
        _two_groups(6),
        _two_groups(1.02),
        nodes=2,
    ),
    *_fault(
        "pcie",
        "gathers at the rate of PCIe on devices with NVLink",
        "slow_links communication_bound",
        "link|NVLink|P2P|topology|batch|dtype",
        PCIE,
        None,
    ),
    *_fault(
        "recompile",
        "compiling in a traced step on one of two ranks",
        "recompilation straggler",
        "dynamic|compile",
        [HEALTHY, replace(HEALTHY, pause_ns=90 * MS, pause_range=COMPILE)],
        [HEALTHY, replace(HEALTHY, pause_ns=100 * US, pause_range=COMPILE)],
    ),
    *_fault(
        "metrics",
        "small all-reduces of metrics in each step, 16 ranks",
        "all_reduce_outside_fsdp",
        "metric|less often|step",
        schedule(
            blocks(4),
            shard=16,
            steps=3,
            outside=(Outside(op="all_reduce", count=40, transfer_ns=500 * US, numel=1),),
        ),
        schedule(
            blocks(4),
            shard=16,
            steps=3,
            outside=(Outside(op="all_reduce", count=1, transfer_ns=40 * US, numel=1),),
        ),
    ),
    *_fault(
        "two-late",
        "two of eight devices are slow",
        "straggler",
        "ranks 2 and 5",
        [EIGHT.scaled(1.3) if rank in (2, 5) else EIGHT for rank in range(8)],
        None,
    ),
    *_fault(
        "allocator-one",
        "the allocator of one of eight ranks frees and gets blocks in each step",
        "allocator_stalls",
        "expandable",
        _but(EIGHT, 4, replace(EIGHT, allocations=8, allocation_ns=6 * MS)),
        None,
        place="rank 4",
    ),
    *_fault(
        "offload",
        "CPU offload on eight ranks",
        "cpu_offload",
        "offload",
        replace(EIGHT, offload=True, offload_ns=6 * MS, optimizer_ns=50 * MS),
        None,
    ),
    *_fault(
        "bound",
        "more communication than compute on 16 ranks",
        "communication_bound",
        "batch|dtype",
        schedule(
            blocks(8, numel=200_000_000, all_gather_ns=7 * MS, reduce_scatter_ns=11 * MS), shard=16, steps=3
        ),
        None,
    ),
    _healthy(
        "teacher",
        Schedule(
            roots=(blocks(3), blocks(3, prefix="teacher")),
            steps=4,
            shard=4,
            mark_roots=True,
            frozen_roots=frozenset({1}),
        ),
        bare=True,
    ),
    _healthy("input-stream", replace(EIGHT, input_stream=True, input_ns=5 * MS)),
    _healthy("slightly-uneven", [EIGHT.scaled(1 + 0.002 * (rank % 3)) for rank in range(8)]),
    _healthy("two", HEALTHY),
    _healthy("eight", EIGHT),
    _healthy(
        "sixteen", schedule(blocks(8, all_gather_ns=900 * US, reduce_scatter_ns=1800 * US), shard=16, steps=4)
    ),
    _healthy("thirty-two", schedule(blocks(4), shard=8, replicas=4, steps=3), nodes=4),
    _healthy("sixty-four", schedule(blocks(3), shard=64, steps=3), nodes=8),
    _healthy("alone", [EIGHT]),
    _healthy("alone-bare", [EIGHT], bare=True),
    _healthy("bare", EIGHT, bare=True),
    _healthy("single", schedule(blocks(all_gather_ns=2 * US, reduce_scatter_ns=2 * US), shard=1)),
    _healthy("rccl", schedule(blocks(8), shard=8, flavour="rccl"), bare=True),
    _healthy("rccl-old", schedule(blocks(8), shard=8, flavour="rccl_old", metadata=False), bare=True),
    _healthy("unnamed", schedule(blocks(8), shard=4, metadata=False), bare=True),
    _healthy("unlabelled", schedule(blocks(8), shard=4, labels="none"), bare=True),
    _healthy("unlabelled-unnamed", schedule(blocks(8), shard=4, labels="none", metadata=False), bare=True),
    _healthy("compiled", schedule(blocks(8), shard=8, compiled=True)),
    _healthy("graph", schedule(blocks(8), shard=4, graph=True)),
    _healthy("symmetric", schedule(blocks(8), shard=8, flavour="symmetric_memory")),
    _healthy("copy-engine", schedule(blocks(8), shard=4, flavour="copy_engine")),
    _healthy("one-step", schedule(blocks(8), shard=8, steps=1)),
    _healthy(
        "late-gathers",
        schedule(blocks(8, late_ns=3500 * US, forward_ns=3 * MS, all_gather_ns=2500 * US), shard=8),
    ),
    _healthy(
        "long-blocks",
        schedule(blocks(4, forward_ns=40 * MS, backward_ns=80 * MS, kernels=40), shard=4, steps=3),
    ),
    _healthy("checkpointed", schedule(blocks(8), shard=8, checkpoint="outside")),
    _healthy("hybrid", HYBRID, nodes=2),
    _healthy(
        "accumulating", schedule(blocks(8), shard=8, microbatches=4, sync_every_microbatch=False, steps=3)
    ),
    _healthy("fused-sync-once", replace(HEALTHY, host_copies=1)),
]
"""Every case of this kind."""
