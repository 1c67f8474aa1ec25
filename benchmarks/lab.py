"""Planted faults and healthy programs of ``tests/lab``, analysed with default options.

``python -m benchmarks.lab [PATTERN ...] [--mended] [--runs FOLDER [--record-only]]`` prints the first cause
of each case, whether it and its remedy are right, and which other causes were named. ``--mended`` applies the
remedy, too, and prints the measured gain beside the promised one. ``--runs`` keeps recordings and reuses
existing ones; ``--record-only`` makes them and judges nothing, for a machine that is there for minutes. The
cases ``gpu/*`` need a GPU, the others none.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]

if TYPE_CHECKING:
    from lab.case import Case
    from lab.judge import Judgement


def cases(patterns: list[str]) -> list[Case]:
    """Return the cases whose names match any of the patterns, all without one."""
    sys.path.insert(0, str(ROOT / "tests"))
    from lab.devices import DEVICES
    from lab.gpu import GPU_TRAININGS
    from lab.memories import MEMORIES
    from lab.traces import TRACES
    from lab.trainings import TRAININGS

    wanted = patterns or ["*"]
    every = [*TRACES, *DEVICES, *MEMORIES, *TRAININGS, *GPU_TRAININGS]
    return [one for one in every if any(fnmatch.fnmatch(one.name, p) for p in wanted)]


def row(one: Judgement) -> str:
    """Format one case."""
    first = one.first or "-"
    marks = f"{_mark(one.cause_right)}  {_mark(one.remedy_right)}"
    gain = f"{_ms(one.promised_ns):>8} {_ms(one.measured_ns):>8}"
    beside = ", ".join(one.beside) or "-"
    return f"{one.case:<28} {first:<28} {marks}   {gain}   {beside}"


def _mark(right: bool) -> str:
    return "yes" if right else "NO "


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.1f}"


def summary(judgements: list[Judgement]) -> str:
    """Count what was right."""
    much = [one for one in judgements if one.size == "much"]
    rest = [one for one in judgements if one.size != "much"]
    lines = []
    if much:
        named = sum(one.cause_right for one in much)
        remedied = sum(one.remedy_right for one in much)
        clean = sum(one.right for one in much)
        lines.append(f"{named} of {len(much)} faults named first, {remedied} with the right remedy")
        lines.append(f"{clean} of {len(much)} with nothing false beside")
    if rest:
        silent = sum(not one.false for one in rest)
        lines.append(f"{silent} of {len(rest)} healthy programs and small faults with nothing false")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="as cuda/* or */healthy/*")
    parser.add_argument("--mended", action="store_true", help="measure each remedy's gain")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep recordings there")
    parser.add_argument("--record-only", action="store_true", help="record into --runs, judge nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the judgements")
    arguments = parser.parse_args()
    chosen = cases(arguments.patterns)
    from lab.judge import judge, make

    judgements = []
    with tempfile.TemporaryDirectory() as temporary:
        runs = arguments.runs or Path(temporary)
        print(f"{'case':<28} {'first cause':<28} cause remedy promised measured   beside (ms)")
        for case in chosen:
            try:
                if arguments.record_only:
                    print(make(case, runs / case.name / "planted"), flush=True)
                    continue
                one = judge(case, runs / case.name, mended=arguments.mended)
            except Exception as error:
                print(f"{case.name:<28} could not be run: {error}", flush=True)
                continue
            judgements.append(one)
            print(row(one), flush=True)
    if judgements:
        print(summary(judgements))
    if arguments.json:
        lines = [{**asdict(one), "right": one.right} for one in judgements]
        arguments.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
