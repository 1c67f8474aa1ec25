"""Ranks reduced on a Dask cluster of two workers, beside the same analysis on one process.

``python -m benchmarks.cluster [--ranks 32,64,128,256] [--layers 24]`` writes synthetic runs, starts a
scheduler and two workers as processes of their own, and analyses each run twice in fresh processes, as
``analyze run --format json`` does. It prints whether the JSON is the same to the byte, wall time a rank, and
the highest resident memory of one process, of the client, and of the fuller worker (since it started).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]


def make_run(root: Path, ranks: int, layers: int) -> int:
    """Write a run of synthetic ranks; returns the bytes of its traces."""
    sys.path.insert(0, str(ROOT / "tests"))
    from synthetic import Schedule, record, transformer, write

    from fsdp2prof.manifest import RankManifest, RunInfo
    from fsdp2prof.run_directory import rank_folder

    schedule = Schedule(roots=(transformer(layers),), shard=ranks)
    root.mkdir()
    (root / "run.json").write_bytes(msgspec.json.encode(RunInfo(state="complete", world_size=ranks)))
    size = 0
    for recording in record(*[schedule] * ranks):
        folder = root / rank_folder(recording.rank)
        folder.mkdir()
        size += write(recording, folder / "trace.json.gz").stat().st_size
        manifest = RankManifest(state="complete", rank=recording.rank, world_size=ranks)
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return size


@contextmanager
def two_workers() -> Iterator[tuple[str, list[int]]]:
    """Start a scheduler and two workers of one thread; gives its address and their process ids."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scheduler.json"
        common = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        dask = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
        processes = [
            subprocess.Popen(
                [
                    *dask,
                    "--host",
                    "127.0.0.1",
                    "--port",
                    "0",
                    "--no-dashboard",
                    "--scheduler-file",
                    str(file),
                ],
                **common,  # type: ignore[call-overload]
            )
        ]
        try:
            while not file.is_file():
                time.sleep(0.1)
            address = str(json.loads(file.read_text())["address"])
            worker = [sys.executable, "-m", "distributed.cli.dask_worker", address]
            options = ["--nthreads", "1", "--no-dashboard", "--local-directory", folder, "--no-nanny"]
            processes += [subprocess.Popen([*worker, *options], **common) for _ in range(2)]  # type: ignore[call-overload]
            yield address, [process.pid for process in processes[1:]]
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                process.wait()


def analysed(run: Path, output: Path, cluster: str | None) -> dict[str, float]:
    """Analyse a run in a fresh process; returns seconds and what that process took."""
    command = [sys.executable, "-m", "benchmarks.cluster", "--one", str(run), "-o", str(output)]
    started = time.monotonic()
    done = subprocess.run(
        [*command, *(["--at", cluster] if cluster else [])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {"wall_s": time.monotonic() - started, **json.loads(done.stdout)}


def analyse_here(run: Path, output: Path, cluster: str | None) -> None:
    """Do one analysis, and say what it took."""
    from fsdp2prof.reporters.documents import build
    from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
    from fsdp2prof.workflows.analyze import analyze_run
    from fsdp2prof.workflows.job.job_files import open_job

    started = time.monotonic()
    result = analyze_run(open_job(run), workers=None if cluster else 1, cluster=cluster)
    output.write_text(str(RENDERERS["json"].render(build(result), RenderOptions())))
    took = time.monotonic() - started
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "inside_s": took,
                "cpu_s": usage.ru_utime + usage.ru_stime,
                "peak_bytes": _highest_bytes(),
            }
        )
    )


def _highest_bytes(process: int | str = "self") -> int:
    """Highest resident memory of a process (``ru_maxrss`` begins with that of the one that started it)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="32,64,128,256")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one is not None:
        analyse_here(chosen.one, chosen.output, chosen.at)
        return
    print(
        "ranks  trace/rank  same  local s/rank  cluster s/rank  client CPU/rank  local, client, worker peak"
    )
    with tempfile.TemporaryDirectory() as folder, two_workers() as (address, workers):
        for ranks in map(int, chosen.ranks.split(",")):
            run = Path(folder) / f"run-{ranks}"
            size = make_run(run, ranks, chosen.layers)
            here, there = Path(folder) / "here.json", Path(folder) / "there.json"
            local, remote = analysed(run, here, None), analysed(run, there, address)
            same = here.read_bytes() == there.read_bytes()
            print(
                f"{ranks:5}  {size / ranks / 1e3:7.0f} kB  {'yes' if same else 'NO':4}  "
                f"{local['inside_s'] / ranks:12.3f}  {remote['inside_s'] / ranks:14.3f}  "
                f"{remote['cpu_s'] / ranks:15.4f}  {local['peak_bytes'] / 2**20:6.0f} MiB  "
                f"{remote['peak_bytes'] / 2**20:7.0f} MiB  "
                f"{max(map(_highest_bytes, workers)) / 2**20:7.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
