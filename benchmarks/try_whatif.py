"""What ``whatif`` predicts beside what ``try`` measures, on trainings of gloo ranks.

    python -m benchmarks.try_whatif [--steps 160] [--only NAME ...]

Each training is run under ``try`` with the candidates that can be tried on a CPU. The table has the measured
gain of a step with its 95 % interval, the predicted gain, and whether the prediction lies in the interval.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fsdp2prof.results.trial import TrialResult
from fsdp2prof.workflows.trial import trial_of_run

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "integration" / "scripts" / "trying.py"
FIXED_STEPS = 26
"""Steps around the trial: those that settle and those that are recorded."""


@dataclass(frozen=True)
class Training:
    name: str
    ranks: int
    options: tuple[str, ...]
    candidates: tuple[str, ...] = ("reshard=never",)


TRAININGS = (
    Training("4 layers", 2, ("--layers", "4", "--dim", "256")),
    Training("12 layers", 2, ("--layers", "12", "--dim", "256")),
    Training("24 narrow layers", 2, ("--layers", "24", "--dim", "64")),
    Training("4 wide layers", 2, ("--layers", "4", "--dim", "768")),
    Training("2 layers, 4 micro-batches", 2, ("--layers", "2", "--dim", "256", "--micro-batches", "4")),
    Training("8 layers, 2 micro-batches", 2, ("--layers", "8", "--dim", "256", "--micro-batches", "2")),
    Training("6 layers, 4 ranks", 4, ("--layers", "6", "--dim", "256")),
    Training("6 layers, 2 x 2", 4, ("--layers", "6", "--dim", "256", "--replicas", "2")),
    Training(
        "8 layers never resharded", 2, ("--layers", "8", "--dim", "256", "--never"), ("reshard=always",)
    ),
)


def tried(training: Training, steps: int, folder: Path) -> TrialResult:
    """Run one training under ``try``. Raises ``CalledProcessError`` where it fails."""
    run = folder / training.name.replace(" ", "-").replace(",", "")
    sets = [word for one in training.candidates for word in ("--set", one)]
    length = str(steps + FIXED_STEPS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    script = [str(training.ranks), str(SCRIPT), "--steps", length, *training.options]
    command = [sys.executable, "-m", "fsdp2prof", "try", *sets, "--steps", str(steps), "-q", "-o", str(run)]
    subprocess.run(
        [*command, "--", *torchrun, *script],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return trial_of_run(run)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=160, help="of each trial")
    parser.add_argument("--only", nargs="*", help="names of trainings")
    args = parser.parse_args()
    chosen = [one for one in TRAININGS if args.only is None or one.name in args.only]
    print(
        "| training | change | step ms | predicted ms | least to most step | measured ms | 95 % "
        "| rounds | in the interval |"
    )
    print("|---|---|--:|--:|--:|--:|--:|--:|---|")
    inside = total = 0
    with tempfile.TemporaryDirectory() as folder:
        for training in chosen:
            result = tried(training, args.steps, Path(folder))
            for one in result.tried:
                if one.gained_ns is None or one.low_ns is None or one.high_ns is None or not result.step_ns:
                    print(f"| {training.name} | {one.change} | nothing measured: {result.ended} |")
                    continue
                said = "not predicted"
                if one.predicted_ns is not None:
                    holds = one.low_ns <= one.predicted_ns <= one.high_ns
                    inside, total = inside + holds, total + 1
                    said = "yes" if holds else "no"
                predicted, steps = "-", "-"
                if one.predicted_ns is not None:
                    predicted = f"{one.predicted_ns / 1e6:.2f}"
                if one.least_predicted_ns is not None and one.most_predicted_ns is not None:
                    steps = f"{one.least_predicted_ns / 1e6:.2f} to {one.most_predicted_ns / 1e6:.2f}"
                print(
                    f"| {training.name} | {one.change} | {result.step_ns / 1e6:.2f} | {predicted} | {steps} "
                    f"| {one.gained_ns / 1e6:.2f} | {one.low_ns / 1e6:.2f} to {one.high_ns / 1e6:.2f} "
                    f"| {one.rounds} | {said} |",
                    flush=True,
                )
    print(f"\n{inside} of {total} predictions lie in the interval.")


if __name__ == "__main__":
    main()
