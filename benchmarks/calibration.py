"""Steps of recorded gloo runs, predicted from the recording of another configuration.

    python benchmarks/calibration.py [--rounds N] [FOLDER]

Records a small transformer under torchrun with several batches, depths, ranks and reshard policies, the first
one twice, in several rounds. Then the first calibrates ``estimate step`` for every other one, and every other
one for the first; the prediction stands beside the mean traced step of the run that has it, recorded in the
same round, and the median of the rounds counts. How far the repeated recording is from the first, of a round,
is the noise of the machine: no prediction can be expected to be closer. Configurations of more ranks than
there are cores are left out: their ranks would take turns.

The C library is told to keep memory that was freed: on a virtual machine touching new pages costs more than
all else that these steps do, and differs from minute to minute.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCABULARY, DIM, HEADS, LENGTH = 1024, 512, 8, 128
STEPS, WARM_UP, ACTIVE = 16, 3, 10


@dataclass(frozen=True)
class Configuration:
    """One run."""

    name: str
    layers: int = 4
    batch: int = 4
    ranks: int = 2
    reshard: bool | None = None

    @property
    def arguments(self) -> list[str]:
        """For the training."""
        reshard = {None: "default", False: "never", True: "always"}[self.reshard]
        return ["--layers", str(self.layers), "--batch", str(self.batch), "--reshard", reshard]


CONFIGURATIONS = (
    Configuration("4 layers, batch 4"),
    Configuration("the same again"),
    Configuration("batch 8", batch=8),
    Configuration("batch 2", batch=2),
    Configuration("2 layers", layers=2),
    Configuration("6 layers", layers=6),
    Configuration("never resharded", reshard=False),
    Configuration("4 ranks", ranks=4),
)


def model(layers: int = 4) -> nn.Module:
    """Return the trained model; ``--model benchmarks.calibration:model``."""
    example: Any = importlib.import_module("examples.train_tiny_fsdp2")
    made: nn.Module = example.TinyTransformer(VOCABULARY, DIM, layers, HEADS)
    return made


def train(arguments: argparse.Namespace) -> None:
    """Train some steps: what each rank runs."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    module = model(arguments.layers)
    reshard = {"default": None, "never": False, "always": True}[arguments.reshard]
    options: dict[str, Any] = {"reshard_after_forward": reshard} if reshard is not None else {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in module.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy, **options)
    fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4)
    times: list[tuple[int, int]] = []
    for _ in range(STEPS):
        began = time.perf_counter_ns(), time.process_time_ns()
        tokens = torch.randint(VOCABULARY, (arguments.batch, LENGTH + 1))
        logits = module(tokens[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.perf_counter_ns() - began[0], time.process_time_ns() - began[1]))
    if arguments.times is not None:
        Path(f"{arguments.times}.{dist.get_rank()}").write_text(json.dumps(times))
    dist.destroy_process_group()
    time.sleep(0.2)


KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Environment in which glibc gives nothing back to the kernel."""


def record(configuration: Configuration, folder: Path) -> Path:
    """Record one configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    run = folder / configuration.name.replace(" ", "-").replace(",", "")
    if run.exists():
        return run
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [sys.executable, "-m", "fsdp2prof", "record", "-o", str(run), "--no-memory", "--wait", str(WARM_UP)]
    command += ["--active", str(ACTIVE), "--", *launcher, str(configuration.ranks)]
    command += ["-m", "benchmarks.calibration", "--train", *configuration.arguments]
    command += ["--times", f"{run}.times"]
    environment = {**os.environ, **KEEPS_MEMORY, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
    return run


def predicted_ns(configuration: Configuration, calibrating: Path) -> int:
    """Predict a configuration's step from another one's recording."""
    from fsdp2prof.workflows.estimate import describe, estimate_step

    policy: dict[str, Any] = {
        "batch_size": configuration.batch,
        "seq_len": LENGTH,
        "clip_grad": False,
        "optimizer_impl": "for-loop",
        "param_dtype": "bfloat16",
        "reduce_dtype": "float32",
    }
    if configuration.reshard is False:
        policy |= {"reshard": "never"}
    given = {
        "model": "benchmarks.calibration:model",
        "layers": configuration.layers,
        "mesh": f"dp_shard={configuration.ranks}",
    }
    return estimate_step(describe(given=given, policy=policy), None, calibrate=calibrating).step_ns


def compare(folder: Path, rounds: int) -> None:
    """Record every configuration and print every prediction beside its recording."""
    from fsdp2prof.workflows.analyze import analyze_trace
    from fsdp2prof.workflows.job_files import open_job

    fitting = [one for one in CONFIGURATIONS if one.ranks <= (os.cpu_count() or 1)]
    steps: list[dict[Configuration, float]] = []
    runs: list[dict[Configuration, Path]] = []
    for number in range(rounds):
        place = folder / f"round-{number + 1}"
        runs.append({one: record(one, place) for one in fitting})
        steps.append(
            {one: analyze_trace(open_job(run)).totals.step_ns or 0.0 for one, run in runs[-1].items()}
        )
    noise = [abs(one[CONFIGURATIONS[1]] / one[CONFIGURATIONS[0]] - 1) for one in steps]
    errors: dict[str, list[float]] = {}
    print("| calibrated on | predicted | recorded ms | predicted ms | error |\n|---|---|--:|--:|--:|")
    for source in fitting:
        for target in fitting:
            if target is source or CONFIGURATIONS[0] not in (source, target):
                continue
            recorded = [one[target] for one in steps]
            predicted = [predicted_ns(target, one[source]) for one in runs]
            each = [made / real - 1 for made, real in zip(predicted, recorded, strict=True)]
            error = median(each)
            errors.setdefault(source.name, []).append(abs(error))
            times = f"{median(recorded) / 1e6:.1f} | {median(predicted) / 1e6:.1f} | {error:+.1%}"
            print(f"| {source.name} | {target.name} | {times} |", flush=True)
    every = [error for some in errors.values() for error in some]
    print(f"\n{len(every)} pairs, medians of {rounds} rounds: median error {median(every):.1%}, ", end="")
    print(f"largest {max(every):.1%}")
    for name, some in errors.items():
        print(f"from {name}: median {median(some):.1%}")
    print(f"the same configuration recorded twice: {median(noise):.1%} apart, at most {max(noise):.1%}")


def main() -> None:
    """Train as a rank, or drive everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--reshard", default="default")
    parser.add_argument("--times")
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments)
    elif arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        compare(arguments.folder, arguments.rounds)
    else:
        with tempfile.TemporaryDirectory() as folder:
            compare(Path(folder), arguments.rounds)


if __name__ == "__main__":
    main()
