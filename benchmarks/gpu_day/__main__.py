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

from benchmarks.gpu_day.wheels import missing_wheels

if missing := missing_wheels():
    sys.exit(f"{sys.executable} lacks {', '.join(missing)}: pip install {' '.join(missing)}")

from benchmarks.gpu_day import folder, live, memory, overhead, recordings, suite
from benchmarks.gpu_day.backend import ALONE, Backend, choose_backend
from benchmarks.gpu_day.day import Day, Outcome
from benchmarks.gpu_day.machine import describe_machine

_PARTS: dict[str, Callable[[Day, Backend], list[Outcome]]] = {
    "recordings": recordings.run,
    "tests": lambda day, _: suite.run(day),
    "live": live.run,
    "memory": lambda day, _: memory.run(day),
    "overhead": overhead.run,
}
"""In the order of what they teach: time may run out."""
_WITH_RANKS = {"recordings", "live", "overhead"}


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
    outcomes: list[Outcome] = []

    def keep(outcome: Outcome) -> None:
        outcomes.append(outcome)
        folder.write(day.folder, machine, backend.why, outcomes)
        folder.pack(day.folder)

    day = Day(folder=args.output.resolve(), machine=machine, end_s=end_s, quick=args.quick, keep=keep)
    backend = choose_backend(day) if _WITH_RANKS & {*chosen} else ALONE
    folder.write(day.folder, machine, backend.why, outcomes)
    folder.pack(day.folder)
    for part in _PARTS:
        if part in chosen:
            _PARTS[part](day, backend)
    folder.remove_scratch(day.folder)
    print("\nSummary", *outcomes, sep="\n")
    counts = Counter(outcome.state for outcome in outcomes)
    ended = ", ".join(f"{count} {state}" for state, count in counts.items())
    print(f"{ended}; see {args.output}/README.md; all of it is in {args.output}.tar")
    sys.exit(1 if counts["failed"] else 0)


if __name__ == "__main__":
    main()
