"""Everything worth doing on a GPU, and on a CPU what can be done there.

    python -m benchmarks.gpu_day [-o runs/gpu-day] [--minutes 9] [--parts recordings,memory] [--quick]

Exit code 1 if a job failed; one that does not apply here, or for which no time was left, is skipped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu_day import folder, memory, overhead, recordings, suite
from benchmarks.gpu_day.backend import Backend, choose_backend
from benchmarks.gpu_day.day import Day, Outcome
from benchmarks.gpu_day.machine import describe_machine

_PARTS: dict[str, Callable[[Day, Backend], list[Outcome]]] = {
    "recordings": recordings.run,
    "memory": lambda day, _: memory.run(day),
    "tests": lambda day, _: suite.run(day),
    "overhead": overhead.run,
}
"""In the order of what is missed most if time runs out."""


def main() -> None:
    """Do the parts and say how each job ended."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_day",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/gpu-day"))
    parser.add_argument("--minutes", type=float, default=9.0, help="no command runs longer than until then")
    parser.add_argument("--parts", default=",".join(_PARTS), help="some of %(default)s")
    parser.add_argument("--quick", action="store_true", help="only the first job of each part")
    args = parser.parse_args()
    chosen = args.parts.split(",")
    if unknown := set(chosen) - set(_PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(_PARTS)}")
    end_s = time.monotonic() + 60 * args.minutes
    folder.clear(args.output)
    machine = describe_machine()
    day = Day(folder=args.output.resolve(), machine=machine, end_s=end_s, quick=args.quick)
    backend = choose_backend(day)
    outcomes = [outcome for part in _PARTS if part in chosen for outcome in _PARTS[part](day, backend)]
    folder.write(day.folder, machine, backend.why, outcomes)
    print("\nSummary", *outcomes, sep="\n")
    counts = Counter(outcome.state for outcome in outcomes)
    print(f"{', '.join(f'{count} {state}' for state, count in counts.items())}; see {args.output}/README.md")
    sys.exit(1 if counts["failed"] else 0)


if __name__ == "__main__":
    main()
