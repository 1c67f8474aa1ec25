"""Steps of recorded gloo runs, predicted from the recording of another configuration.

    python benchmarks/calibration.py [--rounds N] [FOLDER]

Records a small transformer under torchrun with several batches, depths, ranks and reshard policies, the first
one twice, in several rounds. Then the first calibrates ``estimate step`` for every other one, and every other
one for the first; the prediction is printed beside the mean traced step of the run that has it, of the
same round, and the median of the rounds counts. How far the repeated recording is from the first, of a round,
is the noise of the machine: no prediction can be expected to be closer. Configurations of more ranks than
there are cores are left out: their ranks would take turns.

A step also waits whenever other programs have the processors. So ranks note how long their own threads ran,
and the table has the error with that part of a recording taken out, too: of "busy time".

The C library keeps freed memory: on a virtual machine touching new pages costs more than
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
    command = [
        sys.executable,
        "-m",
        "fsdp2prof",
        "record",
        "-o",
        str(run),
        "--no-memory",
        "--wait",
        str(WARM_UP),
    ]
    command += ["--active", str(ACTIVE), "--", *launcher, str(configuration.ranks)]
    command += ["-m", "benchmarks.calibration", "--train", *configuration.arguments]
    command += ["--times", f"{run}.times"]
    environment = {**os.environ, **KEEPS_MEMORY, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
    return run


def predicted_ns(configuration: Configuration, calibrating: Path) -> int:
    """Predict a configuration's step from another one's recording."""
    from fsdp2prof.workflows.description import describe
    from fsdp2prof.workflows.estimate import estimate_step

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


@dataclass(frozen=True)
class Recorded:
    """One recording."""

    run: Path
    step_ns: float
    """Mean of the traced steps."""
    stretch: float
    """The same steps' time over what their ranks' processors were busy."""

    @classmethod
    def of(cls, run: Path) -> Recorded:
        """Read it."""
        from fsdp2prof.workflows.analyze import analyze_trace
        from fsdp2prof.workflows.job.job_files import open_job

        steps = [
            step
            for file in sorted(run.parent.glob(f"{run.name}.times.*"))
            for step in json.loads(file.read_text())[WARM_UP + 1 : WARM_UP + 1 + ACTIVE]
        ]
        stretch = sum(wall for wall, _ in steps) / sum(busy for _, busy in steps)
        return cls(run, analyze_trace(open_job(run)).totals.step_ns or 0.0, stretch)

    @property
    def busy_ns(self) -> float:
        """A step's time with the processors never taken by others."""
        return self.step_ns / self.stretch


def compare(folder: Path, rounds: int) -> None:
    """Record every configuration and print every prediction beside its recording."""
    fitting = [one for one in CONFIGURATIONS if one.ranks <= (os.cpu_count() or 1)]
    recorded: list[dict[Configuration, Recorded]] = []
    for number in range(rounds):
        place = folder / f"round-{number + 1}"
        recorded.append({one: Recorded.of(record(one, place)) for one in fitting})
    first, again = CONFIGURATIONS[:2]
    errors: list[tuple[float, float]] = []
    print("| calibrated on | predicted | recorded ms | predicted ms | error | error of busy time |")
    print("|---|---|--:|--:|--:|--:|")
    for source in fitting:
        for target in fitting:
            if target is source or first not in (source, target):
                continue
            real = [one[target] for one in recorded]
            made = [predicted_ns(target, one[source].run) for one in recorded]
            error = median(p / r.step_ns - 1 for p, r in zip(made, real, strict=True))
            sources = [one[source] for one in recorded]
            busy = median(p / s.stretch / r.busy_ns - 1 for p, s, r in zip(made, sources, real, strict=True))
            errors.append((abs(error), abs(busy)))
            times = f"{median(r.step_ns for r in real) / 1e6:.1f} | {median(made) / 1e6:.1f}"
            print(f"| {source.name} | {target.name} | {times} | {error:+.1%} | {busy:+.1%} |", flush=True)
    noise = [abs(one[again].step_ns / one[first].step_ns - 1) for one in recorded]
    busy_noise = [abs(one[again].busy_ns / one[first].busy_ns - 1) for one in recorded]
    stretches = [one.stretch for each in recorded for one in each.values()]
    print(
        f"\n{len(errors)} pairs, medians of {rounds} rounds; a recording's time is {min(stretches):.1f} to ",
        end="",
    )
    print(f"{max(stretches):.1f} times what its processors were busy")
    for name, index, apart in (("time", 0, noise), ("busy time", 1, busy_noise)):
        sizes = [one[index] for one in errors]
        print(f"{name}: median error {median(sizes):.1%}, largest {max(sizes):.1%}; ", end="")
        print(f"the same configuration recorded twice is {median(apart):.1%} apart, at most {max(apart):.1%}")


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
