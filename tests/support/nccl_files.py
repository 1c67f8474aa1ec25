"""Files as NCCL writes them: records of its Inspector plugin, and lines of its log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fsdp2prof.manifest import MeshInfo, ParameterInfo, ParamGroupInfo, ProcessGroupInfo, RankManifest
from fsdp2prof.readers.job.nccl_inspector import read_inspector
from fsdp2prof.readers.job.nccl_log import read_nccl_logs
from fsdp2prof.tables.nccl import InspectedProcess, NcclLog

COMM = "0x9e7a479f95a66c"
_NAMES = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce"}

Record = tuple[str, int, int, int]
"""Operation, number, bytes of the message, microseconds."""


def inspector_lines(
    rank: int,
    records: Iterable[Record],
    *,
    size: int = 2,
    nodes: int = 1,
    name: str = "unknown",
    version: str = "v4.2",
    dropped: int = 0,
) -> list[str]:
    """One process's log: what a communicator's rank finished, in a version of the output's format."""
    header = {"id": COMM, "comm_name": name, "rank": rank, "n_ranks": size, "nnodes": nodes}
    metadata = {
        "inspector_output_format_version": version,
        "git_rev": "",
        "rec_mechanism": "nccl_profiler_interface",
        "dump_timestamp_us": 1748030377748202,
        "hostname": f"node{rank * nodes // size}",
        "pid": 1000 + rank,
    }
    said = {"header": header, "metadata": metadata}
    bodies = [
        {
            "coll": _NAMES[op],
            "coll_algo": "RING",
            "coll_proto": "SIMPLE",
            "coll_sn": number,
            "coll_msg_size_bytes": message,
            "coll_exec_time_us": us,
            "coll_timing_source": "kernel_gpu",
            "coll_algobw_gbs": 1.0,
            "coll_busbw_gbs": 1.0,
        }
        for op, number, message, us in records
    ]
    stats = {
        "coll_records": len(bodies),
        "coll_dropped_total": dropped,
        "coll_dropped_since_last_dump": dropped,
    }
    lines: list[dict[str, Any]] = [] if version == "v4.0" else [{**said, "dump_stats": stats}]
    context = {} if version == "v4.3" else said
    lines += [{**context, "coll_perf": body} for body in bodies]
    return [json.dumps(line, separators=(",", ":")) for line in lines]


def write_inspector(folder: Path, rank: int, records: Iterable[Record], **options: Any) -> Path:
    path = folder / f"node-pid{1000 + rank}.log"
    path.write_text("\n".join(inspector_lines(rank, records, **options)) + "\n")
    return path


def inspected(folder: Path, ranks: Sequence[Sequence[Record]], **options: Any) -> list[InspectedProcess]:
    return [
        read_inspector(write_inspector(folder, rank, records, size=len(ranks), **options))
        for rank, records in enumerate(ranks)
    ]


def log_lines(
    rank: int,
    *,
    size: int = 4,
    per_node: int = 2,
    near: str = "P2P/CUMEM",
    far: str = "NET/IB/{rank}/GDRDMA",
    said: Sequence[str] = (),
    path_type: str = "NVL",
    calls: int = 0,
) -> list[str]:
    """The log of one rank: it makes a communicator, whose ring goes through ``near`` and ``far``."""
    host, pid, comm = f"node{rank // per_node}", 2000 + rank, f"0x7f{rank:04x}00"
    about = f"comm {comm} rank {rank} nranks {size} cudaDev 0 nvmlDev 0 busId 1a000 commId 0x5eed"
    lines = [
        *said,
        f"[Rank {rank}] ncclCommInitRankConfig {about} - Init START",
        f"comm {comm} rank {rank} nRanks {size} nNodes {size // per_node} localRanks {per_node} MNNVL 0",
        f"Pattern 4, crossNic 0, nChannels 2, bw 24.000000/24.000000, type {path_type}/PIX, sameChannels 1",
    ]
    ring = " ".join(map(str, range(size)))
    lines += [f"Channel {c:02d}/02 : {ring}" for c in range(2) if rank == 0]
    lines += [
        f"Trees [0] 1/-1/-1->{rank}->-1 [1] 1/-1/-1->{rank}->-1",
        "2 coll channels, 2 collnet channels, 0 nvls channels",
    ]
    following = (rank + 1) % size
    for channel in range(2):
        if rank // per_node == following // per_node:
            via = f"Channel {channel:02d}/0 : {rank}[0] -> {following}[1] via {near}"
        else:
            through = far.format(rank=rank)
            via = f"Channel {channel:02d}/0 : {rank}[0] -> {following}[1] [send] via {through}"
        lines.append(via)
    lines += ["Connected all rings, use ring PXN 0 GDR 1", f"ncclCommInitRankConfig {about} - Init COMPLETE"]
    lines += [
        f"AllGather: opCount {number:x} sendbuff 0x7f00 recvbuff 0x7f01 count 1024 datatype 9 op 0 root 0 "
        f"comm {comm} [nranks={size}] stream 0x55"
        for number in range(calls)
    ]
    if calls and rank == 0:
        lines.append("AllGather: 2048 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}")
    return [f"{host}:{pid}:{pid + 7} [0] NCCL INFO {line}" for line in lines]


def logged(folder: Path, size: int = 4, **options: Any) -> NcclLog:
    folder.mkdir(exist_ok=True)
    for rank in range(size):
        (folder / f"nccl.{rank}").write_text("\n".join(log_lines(rank, size=size, **options)) + "\n")
    return read_nccl_logs(sorted(folder.iterdir()))


def manifest(rank: int, *, size: int = 2) -> RankManifest:
    """A root and two equal layers in bf16, reduced in fp32; the layers reshard, the root does not."""
    parts = [("", 3000, False), ("layers.0", 1000, True), ("layers.1", 1000, True)]
    return RankManifest(
        rank=rank,
        world_size=size,
        host="node0",
        pid=1000 + rank,
        process_groups=[
            ProcessGroupInfo(name="0", desc="default_pg", backend="nccl", ranks=list(range(size))),
            ProcessGroupInfo(
                name="1", desc="mesh_dp", backend="nccl", ranks=list(range(size)), mesh_dim="dp"
            ),
        ],
        param_groups=[_group(fqn, numel, again, size) for fqn, numel, again in parts],
    )


def _group(fqn: str, numel: int, reshard: bool, size: int) -> ParamGroupInfo:
    return ParamGroupInfo(
        root=0,
        fqn=fqn,
        index=0,
        group_count=1,
        mesh=MeshInfo(device_type="cuda", shape=[size], dim_names=["dp"], dim_groups=["1"]),
        shard_group="1",
        reduce_scatter_group="1",
        all_reduce_group=None,
        post_forward_group=None,
        shard_world_size=size,
        replicate_world_size=1,
        param_dtype="bfloat16",
        reduce_dtype="float32",
        output_dtype=None,
        reshard_after_forward=reshard,
        offload=False,
        offload_pin_memory=False,
        unshard_async_op=False,
        requires_grad=True,
        parameters=[
            ParameterInfo(
                fqn="weight",
                global_shape=[numel * size],
                local_shape=[numel],
                padded_local_shape=[numel],
                dtype="float32",
                placement="Shard(0)",
                requires_grad=True,
                all_gather_dtypes=["bfloat16"],
                all_gather_numels=[numel],
            )
        ],
    )
