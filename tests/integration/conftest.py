"""Recordings that several integration tests share: each script is recorded once per test session."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from support.recordings import SHORT, STEPS
from support.torch_versions import REPLICAS_TRAIN_ON_CPU

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
SCRIPTS = HERE / "scripts"


@dataclass(frozen=True)
class Recorded:
    """A recorded run and what an independent interception counted in it."""

    run: Path
    counts: list[list[dict]]
    """Per rank, the rows of ``counting/sitecustomize.py`` over all :data:`STEPS` steps."""
    allocator_log: Path
    """What ``allocator/shim.c`` logged, a file per process; empty without a C compiler."""


def training_environment(**extra: str) -> dict[str, str]:
    """Environment of a test's training processes: one thread each, no inherited PYTHONPATH."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**environment, "OMP_NUM_THREADS": "1", **extra}


def torchrun(script: Path, nproc: int, *arguments: str) -> list[str]:
    """Command line of a local torchrun on a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(nproc), str(script), *arguments]


def free_port() -> int:
    """A free port below those that the system assigns, so that no other process is given it."""
    for port in range(10_000 + os.getpid() % 20_000, 32_768):
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def script_path(name: str) -> Path:
    """A script of ``tests/integration/scripts``, or the example ``train_tiny_fsdp2``.

    Skips the test if the installed torch cannot run it.
    """
    if name == "hsdp" and not REPLICAS_TRAIN_ON_CPU:
        pytest.skip("this torch does not train HSDP on a CPU")
    folder = REPOSITORY / "examples" if name == "train_tiny_fsdp2" else SCRIPTS
    return folder / f"{name}.py"


@pytest.fixture(scope="module")
def single_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled_shim(library: Path) -> bool:
    """Compile ``allocator/shim.c`` into ``library``; returns whether there is a compiler for it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return False
    source = HERE / "allocator" / "shim.c"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return True


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Recorded]:
    """Record a script under real torchrun with gloo, once for all workers of the session."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def record(name: str, nproc: int = 2) -> Recorded:
        run = shared / f"recorded-{name}-{nproc}"
        count_directory = shared / f"counted-{name}-{nproc}"
        allocator_log = shared / f"allocated-{name}-{nproc}"
        with (shared / f"recorded-{name}-{nproc}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (run / "run.json").exists():
                count_directory.mkdir(exist_ok=True)
                allocator_log.mkdir(exist_ok=True)
                command = [sys.executable, "-m", "fsdp2prof", "record", *SHORT, "-f", "-o", str(run), "--"]
                command += torchrun(script_path(name), nproc, "--steps", str(STEPS))
                environment = training_environment(
                    PYTHONPATH=str(HERE / "counting"), COUNT_DIRECTORY=str(count_directory)
                )
                shim = shared / f"{name}-{nproc}-shim.so"
                if compiled_shim(shim):
                    environment |= {"LD_PRELOAD": str(shim), "ALLOCATOR_LOG": str(allocator_log)}
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=240, check=False
                )
                assert done.returncode == 0, done.stderr[-4000:]
        counts = [json.loads((count_directory / f"rank{rank}.json").read_text()) for rank in range(nproc)]
        return Recorded(run, counts, allocator_log)

    return record
