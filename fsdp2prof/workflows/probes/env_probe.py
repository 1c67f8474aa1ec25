"""Program that ``check env`` starts on every rank instead of a training: ``-m ...env_probe FOLDER MESH``.

It writes one JSON file per rank.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2prof.recorder.devices import device_info, package_versions
from fsdp2prof.recorder.identity import identify
from fsdp2prof.recorder.settings import relevant_environment
from fsdp2prof.tables.probes import DimensionSum, GatherTime, RankProbe

_REGROUPED = ("dp_shard", "cp", "tp")
"""Dimensions whose ranks experts are dealt out to, ``ep`` of them in a row."""


def mesh_of(device: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """The mesh of all dimensions but ``ep``, the slowest first."""
    shown = {name: size for name, size in sizes.items() if name != "ep"}
    return init_device_mesh(device, tuple(shown.values()), mesh_dim_names=tuple(shown))


def expert_mesh_of(device: str, sizes: Mapping[str, int]) -> DeviceMesh | None:
    """The mesh of the experts over the same ranks: efsdp, whose ranks hold the same experts, and ep.

    Dimensions that are slower than ``dp_shard`` stand before. ``None`` without expert parallelism.
    """
    if sizes.get("ep", 1) == 1:
        return None
    outer = {name: size for name, size in sizes.items() if name not in (*_REGROUPED, "ep")}
    ranks = prod(sizes.get(name, 1) for name in _REGROUPED)
    shape = {**outer, "efsdp": ranks // sizes["ep"], "ep": sizes["ep"]}
    return init_device_mesh(device, tuple(shape.values()), mesh_dim_names=tuple(shape))


_RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 28)
_MOST_ON_CPU = 1 << 24
_REPEATS, _EXCHANGES = 5, 20
_WRITTEN = 64 << 20


def main(folder: Path, mesh: str) -> None:
    """Probe this rank."""
    has_gpu = torch.cuda.is_available()
    identity = identify()
    device = torch.device("cpu")
    if has_gpu:  # Slurm may show each rank its own device alone
        device = torch.device("cuda", identity.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    began = time.monotonic_ns()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    probe = RankProbe(
        rank=dist.get_rank(),
        local_rank=identity.local_rank,
        world_size=dist.get_world_size(),
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(device) if has_gpu else "cpu",
        device_index=device.index,
        device_uuid=device_info("cuda").uuid if has_gpu else None,
        backend=str(dist.get_backend()),
        variables={name: os.environ[name] for name in _RENDEZVOUS if name in os.environ}
        | relevant_environment(),
        versions=package_versions(),
        started_ns=time.time_ns(),
        init_ns=time.monotonic_ns() - began,
    )
    probe.sums = _sums(mesh, device)
    probe.gathers = [_gather(size, device) for size in _SIZES if has_gpu or size <= _MOST_ON_CPU]
    _clock(probe, device)
    _disk(probe, folder)
    (folder / f"rank-{probe.rank}.json").write_bytes(msgspec.json.encode(probe))
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads may abort an interpreter that is already ending


def _sums(mesh: str, device: torch.device) -> list[DimensionSum]:
    """Add up rank + 1 over every dimension, those that expert parallelism regroups ranks into among them."""
    sizes = {"world": dist.get_world_size()}
    if mesh:
        sizes = {name: int(size) for name, size in (item.split("=") for item in mesh.split(","))}
    whole, experts = mesh_of(device.type, sizes), expert_mesh_of(device.type, sizes)
    meshes = dict.fromkeys((name for name in sizes if name != "ep"), whole)
    if experts is not None:
        meshes |= {"efsdp": experts, "ep": experts}
    found = []
    for name, made in meshes.items():
        group = made.get_group(name)
        number = torch.tensor([dist.get_rank() + 1], dtype=torch.int64, device=device)
        dist.all_reduce(number, group=group)
        ranks = dist.get_process_group_ranks(group)
        found.append(DimensionSum(dimension=name, ranks=ranks, total=int(number.item())))
    return found


def _gather(payload: int, device: torch.device) -> GatherTime:
    world = dist.get_world_size()
    shard = torch.zeros(max(1, payload // world), dtype=torch.uint8, device=device)
    whole = torch.empty(shard.numel() * world, dtype=torch.uint8, device=device)
    times = []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        times.append(_timed(lambda: dist.all_gather_into_tensor(whole, shard), device))
    return GatherTime(payload_bytes=whole.numel(), median_ns=int(median(times[1:])), repeats=_REPEATS)


def _timed(work: Callable[[], object], device: torch.device) -> int:
    began = time.monotonic_ns()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return max(1, time.monotonic_ns() - began)


def _clock(probe: RankProbe, device: torch.device) -> None:
    """Measure the clock's offset from rank 0; the fastest of several exchanges bounds the error."""
    for other in range(1, probe.world_size):
        if probe.rank not in (0, other):
            continue
        best: tuple[int, int] | None = None
        for _ in range(_EXCHANGES):
            number = torch.zeros(1, dtype=torch.int64, device=device)
            if probe.rank == 0:
                dist.recv(number, src=other)
                number[0] = time.time_ns()
                dist.send(number, dst=other)
                continue
            sent = time.time_ns()
            dist.send(number, dst=0)
            dist.recv(number, src=0)
            theirs = int(number.item())
            back = time.time_ns()
            if best is None or back - sent < best[1]:
                best = ((sent + back) // 2 - theirs, back - sent)
        if best is not None:
            probe.clock_offset_ns, probe.clock_round_trip_ns = best


def _disk(probe: RankProbe, folder: Path) -> None:
    """Write a file as a recording does, all ranks of a host at once."""
    try:
        probe.disk_free_bytes = shutil.disk_usage(folder).free
        if probe.local_rank:
            return
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.monotonic_ns()
            file.write(bytes(_WRITTEN))
            file.flush()
            os.fsync(file.fileno())
            probe.disk_write_bytes_per_s = _WRITTEN * 10**9 // max(1, time.monotonic_ns() - began)
    except OSError:
        return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
