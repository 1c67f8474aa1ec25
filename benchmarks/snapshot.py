"""Time and memory of analysing an allocator snapshot: ours, mosaic, and torch's memory_viz.

Every contestant runs in a process of its own on the same pickle, one after the other:

``ours``        the whole ``analyze memory``: safe load, attribution, exact peak by category, findings
``mosaic``      mosaic's peak analysis of the first device (only with ``--mosaic CHECKOUT``)
``memory_viz``  ``torch.cuda._memory_viz.trace_plot``: loads the pickle and wraps it in a page; the browser
                does the rest
``unpickle``    ``pickle.load`` alone: the floor for everybody who goes through Python objects

    python benchmarks/snapshot.py --make 1000000 /tmp/big.pickle
    python benchmarks/snapshot.py /tmp/big.pickle

Seconds are wall and CPU of the whole process with its imports; "inside" is the wall time after them.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTESTANTS = ("ours", "mosaic", "memory_viz", "unpickle")


def ours(path: Path) -> Callable[[], int]:
    from fsdp2prof.workflows.analyze import analyze_memory
    from fsdp2prof.workflows.job.job_files import open_job

    return lambda: analyze_memory(open_job(path)).ranks[0].peak.allocated_bytes


def mosaic(path: Path) -> Callable[[], int]:
    import logging

    logging.disable(logging.CRITICAL)
    from mosaic.libmosaic.analyzer.memory_abstract import MemoryAbstract

    def run() -> int:
        abstract = MemoryAbstract(memory_snapshot_file=str(path))
        abstract.load_memory_snapshot()
        snapshot = abstract.memory_snapshot
        snapshot.analyze_memory_snapshot(opt="memory_peak")
        return int(snapshot.dynamic_memory_peak + snapshot.static_memory)

    return run


def memory_viz(path: Path) -> Callable[[], int]:
    from torch.cuda._memory_viz import trace_plot

    def run() -> int:
        with path.open("rb") as file:
            return len(trace_plot(pickle.load(file))) and 0  # type: ignore[no-untyped-call]

    return run


def unpickle(path: Path) -> Callable[[], int]:
    def run() -> int:
        with path.open("rb") as file:
            return len(pickle.load(file)) and 0

    return run


def run_one(name: str, path: Path) -> None:
    """Run one contestant in this process and print what it took as JSON."""
    job = {"ours": ours, "mosaic": mosaic, "memory_viz": memory_viz, "unpickle": unpickle}[name](path)
    begin = time.perf_counter()
    peak = job()
    inside = time.perf_counter() - begin
    print(json.dumps({"inside_s": inside, "peak": peak}))


def measure(name: str, path: Path, checkout: Path | None) -> dict[str, Any]:
    """Run a contestant in a process of its own."""
    folders = [str(Path(__file__).parent), *([str(checkout)] if checkout else [])]
    code = f"import sys; sys.path[:0] = {folders!r}; "
    code += f"from pathlib import Path; import snapshot; snapshot.run_one({name!r}, Path({str(path)!r}))"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    # A process of its own for the measurement, so that the peak memory is this contestant's alone.
    child = (
        "import resource, subprocess, sys; done = subprocess.run([sys.executable, '-c', sys.argv[1]]); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(done.returncode)"
    )
    done = subprocess.run([sys.executable, "-c", child, code], capture_output=True, text=True, check=False)
    wall = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    *_, result, kibibytes = done.stdout.strip().splitlines()
    return {
        "wall_s": wall,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_rss_bytes": int(kibibytes) * 1024,
        **json.loads(result),
    }


def make(path: Path, events: int) -> None:
    """Write a snapshot of training steps: allocations of 3,000 stacks, freed in the next step."""
    rng = random.Random(0)
    frames = [{"filename": f"/site-packages/torch/m{i}.py", "line": i, "name": f"f{i}"} for i in range(400)]
    stacks = [rng.sample(frames, 40) for _ in range(3000)]
    trace: list[dict[str, Any]] = []
    alive: list[tuple[int, int, int]] = []
    address = 1 << 40
    while len(trace) < events:
        step: list[tuple[int, int, int]] = []
        for _ in range(1000):
            size, stack = rng.randint(1, 1 << 22), rng.randrange(len(stacks))
            step.append((address + len(step) * (1 << 22), size, stack))
        address ^= 1 << 36
        for action, blocks in (("alloc", step), ("free_requested", alive), ("free_completed", alive)):
            for at, size, stack in blocks:
                trace.append(
                    {
                        "action": action,
                        "addr": at,
                        "size": size,
                        "stream": 0,
                        "time_us": 1_700_000_000_000_000 + len(trace),
                        "compile_context": "N/A",
                        "user_metadata": "",
                        "frames": list(stacks[stack]),
                    }
                )
        alive = step
    held = [
        {"address": at, "size": 1 << 22, "requested_size": size, "state": "active_allocated", "frames": []}
        for at, size, _ in alive
    ]
    segment = {
        "device": 0,
        "address": alive[0][0],
        "total_size": len(held) << 22,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": True,
        "allocated_size": len(held) << 22,
        "active_size": len(held) << 22,
        "frames": [],
        "blocks": held,
    }
    snapshot = {
        "segments": [segment],
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }
    path.write_bytes(pickle.dumps(snapshot, protocol=4))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("--make", type=int, metavar="EVENTS", help="write a synthetic snapshot instead")
    parser.add_argument(
        "--mosaic", type=Path, metavar="CHECKOUT", help="folder that holds the mosaic package"
    )
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    if args.make:
        make(args.snapshot, args.make)
        return
    print(f"{args.snapshot}: {args.snapshot.stat().st_size / 1e6:.0f} MB")
    print(f"{'':12}{'wall':>9}{'CPU':>9}{'inside':>9}{'memory':>10}   peak found")
    best: dict[str, dict[str, Any]] = {}
    for name in CONTESTANTS:
        if name == "mosaic" and args.mosaic is None:
            continue
        runs = [measure(name, args.snapshot, args.mosaic) for _ in range(args.repeat)]
        one = best[name] = min(runs, key=lambda run: run["wall_s"])
        print(
            f"{name:12}{one['wall_s']:7.2f} s{one['cpu_s']:7.2f} s{one['inside_s']:7.2f} s"
            f"{one['peak_rss_bytes'] / 1e6:7.0f} MB   {one['peak'] or '-'}"
        )
    for name, one in best.items():
        if name != "ours":
            print(
                f"{name} / ours: wall {one['wall_s'] / best['ours']['wall_s']:.2f}, "
                f"CPU {one['cpu_s'] / best['ours']['cpu_s']:.2f}, "
                f"memory {one['peak_rss_bytes'] / best['ours']['peak_rss_bytes']:.2f}"
            )


if __name__ == "__main__":
    main()
