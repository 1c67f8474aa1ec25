"""Cases that are synthetic traces of two H100s: a healthy schedule, and one deviation each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from synthetic import Layer, Outside, Schedule, record, transformer, write

from fsdp2prof.manifest import (
    DeviceInfo,
    MeshInfo,
    OptimizerInfo,
    ParameterInfo,
    ParamGroupInfo,
    ProcessGroupInfo,
    RankManifest,
    RootInfo,
    RunInfo,
)
from fsdp2prof.run_directory import MANIFEST_FILE, RUN_FILE, TRACE_FILE, rank_folder
from lab.case import Case

__all__ = ["TRACES", "write_run"]

MS = 1_000_000
US = 1_000
LAYERS = 6
DTYPES = {"BFloat16": "bfloat16", "Float": "float32"}
H100_BYTES = 84_942_979_072


def blocks(count: int = LAYERS, **fields: Any) -> tuple[Layer, ...]:
    """A small root and equal blocks that compute 2 and 4 ms around collectives of 0.2 and 0.4 ms."""
    common: dict[str, Any] = {
        "numel": 40_000_000,
        "forward_ns": 2 * MS + 17,
        "backward_ns": 4 * MS + 31,
        "all_gather_ns": 200 * US + 3,
        "reduce_scatter_ns": 400 * US + 7,
        "all_reduce_ns": 100 * US + 9,
    }
    root, *children = transformer(count, **(common | fields))
    children[-1] = replace(children[-1], reshard=False)
    return (replace(root, numel=4_000_000, all_gather_ns=40 * US + 1), *children)


def schedule(layers: tuple[Layer, ...] | None = None, **fields: Any) -> Schedule:
    """Five steps of one root on two ranks."""
    return Schedule(roots=(blocks() if layers is None else layers,), **({"steps": 5, "shard": 2} | fields))


HEALTHY = schedule()


def write_run(folder: Path, ranks: Sequence[Schedule], *, nodes: int = 1, across: bool = False) -> Path:
    """Write a run directory: traces, and manifests that say what a recorder would.

    Neighbouring ranks share a node, or with ``across`` the nodes take turns, so that shards cross them.
    """
    folder.mkdir(parents=True)
    world = ranks[0].shard * ranks[0].replicas
    info = RunInfo(state="complete", exit_code=0, world_size=world, hosts=[f"node{i}" for i in range(nodes)])
    (folder / RUN_FILE).write_bytes(msgspec.json.encode(info))
    for recording in record(*ranks):
        place = folder / rank_folder(recording.rank)
        place.mkdir()
        write(recording, place / TRACE_FILE)
        node, local = divmod(recording.rank, world // nodes)
        if across:
            local, node = divmod(recording.rank, nodes)
        manifest = _manifest(recording.rank, recording.schedule, node, local)
        (place / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
    return folder


def _manifest(rank: int, s: Schedule, node: int, local: int) -> RankManifest:
    groups = _process_groups(rank, s)
    updates = 1 if s.microbatches > 1 and not s.sync_every_microbatch else s.microbatches
    return RankManifest(
        state="complete",
        rank=rank,
        local_rank=local,
        world_size=s.shard * s.replicas,
        node_rank=node,
        host=f"node{node}",
        versions={"torch": "2.13.0", "cuda": "12.8"},
        device=DeviceInfo(
            type="cuda", index=local, name="NVIDIA H100 80GB HBM3", total_bytes=H100_BYTES, capability="9.0"
        ),
        process_groups=groups,
        param_groups=[
            _param_group(index, layer, s, groups) for index, root in enumerate(s.roots) for layer in root
        ],
        optimizers=[
            OptimizerInfo(
                class_name="AdamW",
                state_bytes=8 * sum(one.numel for root in s.roots for one in root) // s.shard,
                param_groups=1,
                parameters=s.optimizer_kernels if s.optimizer_kernels > 1 else sum(map(len, s.roots)),
                defaults={"foreach": "False" if s.optimizer_kernels > 1 else "None"},
            )
        ],
        micro_batches=s.microbatches,
        roots=[
            RootInfo(root=index, micro_batches=s.microbatches, gradient_syncs=updates)
            for index in range(len(s.roots))
        ],
    )


def _process_groups(rank: int, s: Schedule) -> list[ProcessGroupInfo]:
    first = rank // s.shard * s.shard
    shard = ProcessGroupInfo(
        name="1",
        desc="mesh_dp_shard",
        backend="nccl",
        ranks=[*range(first, first + s.shard)],
        mesh_dim="dp_shard",
    )
    if s.replicas == 1:
        return [shard]
    across = [rank % s.shard + s.shard * i for i in range(s.replicas)]
    return [
        shard,
        ProcessGroupInfo(
            name="2", desc="mesh_dp_replicate", backend="nccl", ranks=across, mesh_dim="dp_replicate"
        ),
    ]


def _param_group(root: int, layer: Layer, s: Schedule, groups: list[ProcessGroupInfo]) -> ParamGroupInfo:
    columns = 1000
    rows = layer.numel // columns
    original = DTYPES[s.orig_dtype]
    parameter = ParameterInfo(
        fqn=f"{layer.fqn}.weight" if layer.fqn else "weight",
        global_shape=[rows, columns],
        local_shape=[rows // s.shard, columns],
        padded_local_shape=[-(-rows // s.shard), columns],
        dtype=original,
        placement="Shard(dim=0)",
        requires_grad=root not in s.frozen_roots,
        all_gather_dtypes=[DTYPES[s.param_dtype]],
        all_gather_numels=[layer.numel // s.shard],
        optimized=True,
    )
    hybrid = s.replicas > 1
    param_dtype, reduce_dtype = DTYPES[s.param_dtype], DTYPES[s.reduce_dtype]
    return ParamGroupInfo(
        root=root,
        fqn=layer.fqn,
        index=0,
        group_count=1,
        mesh=MeshInfo(
            device_type="cuda",
            shape=[s.replicas, s.shard] if hybrid else [s.shard],
            dim_names=["dp_replicate", "dp_shard"] if hybrid else ["dp_shard"],
            dim_groups=["2", "1"] if hybrid else ["1"],
        ),
        shard_group=groups[0].name,
        reduce_scatter_group=groups[0].name,
        all_reduce_group=groups[1].name if hybrid else None,
        post_forward_group=None,
        shard_world_size=s.shard,
        replicate_world_size=s.replicas,
        param_dtype=None if param_dtype == original else param_dtype,
        reduce_dtype=None if reduce_dtype == param_dtype else reduce_dtype,
        output_dtype=None,
        reshard_after_forward=layer.reshard if layer.reshard is not None else bool(layer.fqn),
        offload=s.offload,
        offload_pin_memory=s.offload,
        unshard_async_op=s.unshard_async_op,
        requires_grad=root not in s.frozen_roots,
        parameters=[parameter],
        forward_prefetch=list(layer.forward_prefetch),
        backward_prefetch=list(layer.backward_prefetch),
    )


def _writer(ranks: Sequence[Schedule], nodes: int = 1, across: bool = False) -> Callable[[Path], Path]:
    return lambda folder: write_run(folder, ranks, nodes=nodes, across=across)


def _both(one: Schedule) -> list[Schedule]:
    return [one] * (one.shard * one.replicas)


def _fault(
    fault: str,
    causes: str,
    remedy: str,
    much: Schedule | Sequence[Schedule],
    little: Schedule | Sequence[Schedule] | None,
    *,
    mended: Schedule = HEALTHY,
    place: str = "",
    excused: str = "",
    nodes: int = 1,
    name: str = "",
) -> list[Case]:
    """One planted fault at its two sizes."""
    cases = []
    for size, ranks in (("much", much), ("little", little)):
        if ranks is None:
            continue
        all_ranks = _both(ranks) if isinstance(ranks, Schedule) else ranks
        cases.append(
            Case(
                name=f"cuda/{name or fault.replace(' ', '-')}/{size}",
                fault=fault,
                size="much" if size == "much" else "little",
                causes=frozenset(causes.split()),
                remedy=remedy,
                place=place,
                write=_writer(all_ranks, nodes, across=size == "much"),
                write_mended=_writer(_both(mended), nodes),
                excused=frozenset(excused.split()),
            )
        )
    return cases


def _healthy(name: str, kind: str, one: Schedule | Sequence[Schedule], nodes: int = 1) -> Case:
    ranks = _both(one) if isinstance(one, Schedule) else one
    return Case(name=f"cuda/healthy/{name}", fault=kind, size="healthy", write=_writer(ranks, nodes))


def _whole(gather_ns: int, reduce_ns: int) -> tuple[Layer, ...]:
    """One group of everything: gathered before any compute, reduced after all of it."""
    return (
        Layer(
            fqn="",
            numel=2_440_000_000,
            forward_ns=12 * MS,
            backward_ns=24 * MS,
            all_gather_ns=gather_ns,
            reduce_scatter_ns=reduce_ns,
            kernels=36,
        ),
    )


def _leaves(count: int, compute_ns: int, gather_ns: int) -> tuple[Layer, ...]:
    """Many groups of a few hundred kilobytes each."""
    return blocks(
        count,
        numel=200_000,
        forward_ns=compute_ns,
        backward_ns=2 * compute_ns,
        all_gather_ns=gather_ns,
        reduce_scatter_ns=gather_ns,
        kernels=1,
    )


def _host_bound(host_ns: int, **fields: Any) -> Schedule:
    return schedule(blocks(kernels=20, host_ns=host_ns, **fields))


def _busy_host(**fields: Any) -> Schedule:
    """Blocks whose launches take the host most of the time that the device computes."""
    return schedule(blocks(kernels=10, host_ns=60 * US, forward_ns=MS, backward_ns=2 * MS, **fields))


def _late_host() -> Schedule:
    """Blocks before which the host needs as long as the device computes: prefetching ends no step earlier."""
    return schedule(blocks(late_ns=3 * MS, forward_ns=3 * MS, all_gather_ns=2 * MS))


def _with_ends(gather_ns: int, reduce_ns: int) -> Schedule:
    """Embedding and head as groups of their own."""
    root, *children = blocks()
    ends = [
        Layer(
            fqn=name,
            numel=300_000_000,
            forward_ns=100 * US,
            backward_ns=200 * US,
            all_gather_ns=gather_ns,
            reduce_scatter_ns=reduce_ns,
        )
        for name in ("embedding", "head")
    ]
    return schedule((root, ends[0], *children, ends[1]))


def _one_slow(factor: float) -> list[Schedule]:
    return [HEALTHY, HEALTHY.scaled(factor)]


def _micro_batches(sync: bool, reduce_ns: int) -> Schedule:
    return schedule(blocks(reduce_scatter_ns=reduce_ns), microbatches=4, sync_every_microbatch=sync, steps=3)


def _wide(gather_ns: int, reduce_ns: int) -> Schedule:
    """One block of many times the parameters of the others, and hardly more compute."""
    return HEALTHY.changed(
        "layers.3", numel=800_000_000, all_gather_ns=gather_ns, reduce_scatter_ns=reduce_ns
    )


def _hybrid(all_reduce_ns: int, gather_ns: int = 200 * US, reduce_ns: int = 400 * US) -> Schedule:
    layers = blocks(all_gather_ns=gather_ns, reduce_scatter_ns=reduce_ns, all_reduce_ns=all_reduce_ns)
    return schedule(layers, replicas=2, steps=3)


TRACES: list[Case] = [
    *_fault(
        "slow data loader on all ranks",
        "data_loader",
        "worker|prefetch|loader",
        replace(HEALTHY, loading_ns=90 * MS),
        replace(HEALTHY, loading_ns=100 * US),
        name="loader-all",
    ),
    *_fault(
        "slow data loader on one rank",
        "data_loader straggler",
        "worker|prefetch|loader",
        [HEALTHY, replace(HEALTHY, loading_ns=90 * MS)],
        [HEALTHY, replace(HEALTHY, loading_ns=100 * US)],
        name="loader-one",
    ),
    *_fault("straggler", "straggler", "rank 1|clock|input", _one_slow(2.0), _one_slow(1.001)),
    *_fault(
        "host bound",
        "host_bound",
        "compile|graph|batch",
        _host_bound(400 * US),
        _host_bound(20 * US),
        mended=_host_bound(20 * US),
    ),
    *_fault(
        ".item() in each block",
        "host_sync",
        "item|synchron|host",
        schedule(blocks(sync=True, all_gather_ns=1500 * US)),
        HEALTHY.changed("layers.5", sync=True),
        mended=schedule(blocks(all_gather_ns=1500 * US)),
        name="item",
    ),
    *_fault(
        "gradients reduced every micro-batch",
        "reduced_every_micro_batch",
        "set_requires_gradient_sync",
        _micro_batches(sync=True, reduce_ns=9 * MS),
        _micro_batches(sync=True, reduce_ns=200 * US),
        mended=_micro_batches(sync=False, reduce_ns=9 * MS),
        name="sync",
    ),
    *_fault(
        "whole model in one unit",
        "wrapping_too_coarse",
        "wrap|fully_shard",
        schedule(_whole(14 * MS, 28 * MS)),
        schedule(_whole(150 * US, 150 * US)),
        name="whole",
    ),
    *_fault(
        "tiny units",
        "wrapping_too_fine",
        "larger|together|coarser",
        schedule(_leaves(60, 40 * US, 90 * US)),
        schedule(_leaves(60, 400 * US, 20 * US)),
        mended=schedule(
            blocks(numel=2_000_000, forward_ns=400 * US, backward_ns=800 * US, all_gather_ns=200 * US)
        ),
        name="tiny",
    ),
    *_fault(
        "embedding and head in the root",
        "root_holds_most wrapping_too_coarse root_not_resharded",
        "embedding|head|root|wrap",
        HEALTHY.changed("", numel=600_000_000, all_gather_ns=30 * MS, reduce_scatter_ns=40 * MS),
        HEALTHY.changed("", numel=60_000_000, all_gather_ns=100 * US, reduce_scatter_ns=100 * US),
        mended=_with_ends(15 * MS, 20 * MS),
        name="root",
    ),
    *_fault(
        "fp32 reductions",
        "reduce_in_float32 reduce_scatter_too_long",
        "bfloat16|reduce_dtype",
        schedule(blocks(reduce_scatter_ns=9 * MS)),
        HEALTHY,
        mended=schedule(blocks(reduce_scatter_ns=4500 * US), reduce_dtype="BFloat16"),
        name="fp32-reduce",
    ),
    *_fault(
        "fp32 parameters",
        "parameters_in_float32 communication_bound",
        "bfloat16|mixed|param_dtype",
        schedule(
            blocks(numel=400_000_000, all_gather_ns=6 * MS, reduce_scatter_ns=6 * MS), param_dtype="Float"
        ),
        schedule(blocks(forward_ns=8 * MS, backward_ns=16 * MS), param_dtype="Float"),
        mended=schedule(blocks(all_gather_ns=3 * MS, reduce_scatter_ns=3 * MS), reduce_dtype="BFloat16"),
        name="fp32-parameters",
    ),
    *_fault(
        "full_tensor() every step",
        "all_gather_outside_fsdp",
        "full_tensor|outside|state_dict",
        replace(HEALTHY, outside=(Outside(op="all_gather", count=40, transfer_ns=600 * US),)),
        replace(HEALTHY, outside=(Outside(op="all_gather", count=1, transfer_ns=60 * US),)),
        name="full-tensor",
    ),
    *_fault(
        "metric all-reduce every step",
        "all_reduce_outside_fsdp",
        "metric|outside|less often|step",
        replace(HEALTHY, outside=(Outside(op="all_reduce", count=60, transfer_ns=400 * US, numel=2),)),
        replace(HEALTHY, outside=(Outside(op="all_reduce", count=1, transfer_ns=30 * US, numel=2),)),
        name="metric",
    ),
    *_fault(
        "evaluation every step",
        "forward_without_backward",
        "evaluat|less often|every",
        replace(HEALTHY, evaluations=3),
        None,
        name="evaluation",
    ),
    *_fault(
        "host pause",
        "host_pause garbage_collection",
        "collect|gc|host|out of the step",
        replace(HEALTHY, pause_ns=50 * MS),
        replace(HEALTHY, pause_ns=200 * US),
        name="pause",
    ),
    *_fault(
        "CPU offload",
        "cpu_offload host_copies",
        "offload",
        replace(HEALTHY, offload=True, offload_ns=9 * MS, optimizer_ns=20 * MS),
        None,
        name="offload",
    ),
    *_fault(
        "unbalanced layers",
        "wrapping_too_coarse",
        "layers.3|wrap|split",
        _wide(6 * MS, 12 * MS),
        _wide(400 * US, 400 * US),
        mended=schedule(blocks(all_gather_ns=1200 * US, reduce_scatter_ns=2400 * US)),
        place=r"layers\.3",
        name="unbalanced",
    ),
    *_fault(
        "sharding across nodes",
        "mesh_across_nodes all_reduce_exposed",
        "node|mesh|replica",
        _hybrid(200 * US, gather_ns=9 * MS, reduce_ns=18 * MS),
        _hybrid(200 * US),
        nodes=2,
        mended=_hybrid(2 * MS),
        name="mesh",
    ),
    *_fault(
        "logging host transfers",
        "host_sync",
        "item|host|synchron",
        replace(_busy_host(), host_copies=1500),
        replace(HEALTHY, host_copies=1),
        mended=_busy_host(),
        name="logging",
    ),
    *_fault(
        "optimizer per tensor",
        "optimizer_per_tensor host_bound",
        "foreach|fused",
        replace(HEALTHY, optimizer_kernels=3000, optimizer_host_ns=25 * US, optimizer_ns=3 * MS),
        replace(HEALTHY, optimizer_kernels=40, optimizer_host_ns=4 * US),
        name="foreach",
    ),
    *_fault(
        "recompilation",
        "recompilation",
        "dynamic|compile",
        replace(HEALTHY, pause_ns=80 * MS, pause_range="_compile.compile_inner (dynamo_timed)"),
        replace(HEALTHY, pause_ns=100 * US, pause_range="_compile.compile_inner (dynamo_timed)"),
        name="recompile",
    ),
    *_fault(
        "checkpoint saved in the step",
        "checkpoint_in_step all_gather_outside_fsdp host_pause host_sync",
        "asynchron|async|less often|full_tensor|save|out of the step",
        replace(
            HEALTHY,
            outside=(Outside(op="all_gather", count=6, transfer_ns=2 * MS),),
            host_copies=6,
            pause_ns=60 * MS,
        ),
        None,
        name="save",
    ),
    *_fault(
        "slow link",
        "slow_transfer",
        "link|network|rank",
        replace(
            HEALTHY,
            roots=(blocks(all_gather_ns=MS),),
            slow_transfer=frozenset({("all_gather", "layers.2"), ("reduce_scatter", "layers.2")}),
        ),
        None,
    ),
    _healthy("plain", "transformer", HEALTHY),
    _healthy("hsdp", "HSDP inside a node", _hybrid(100 * US)),
    _healthy("compiled", "compiled blocks", schedule(blocks(), compiled=True)),
    _healthy("accumulation", "4 micro-batches", _micro_batches(sync=False, reduce_ns=400 * US)),
    _healthy("checkpoint", "checkpointing, memory unknown", replace(HEALTHY, checkpoint="inside")),
    _healthy("async", "unshard_async_op", schedule(unshard_async_op=True)),
    _healthy("bf16", "bf16 reductions", schedule(reduce_dtype="BFloat16")),
    _healthy("rccl", "RCCL", schedule(flavour="rccl")),
    _healthy("two-roots", "two models", Schedule(roots=(blocks(3), blocks(3, prefix="critic")), steps=5,
                                                shard=2, mark_roots=True)),
    _healthy("ranges", "annotations of the user's own", schedule(user_ranges=True)),
    _healthy("input-stream", "inputs on a stream of their own", schedule(input_stream=True)),
    _healthy("late-host", "gathers launched late, but hidden", _late_host()),
    _healthy("one-rank-trace", "one rank of two recorded", [HEALTHY]),
]  # fmt: skip
"""Every synthetic case."""
