"""Make a large Kineto trace from a real one: the same events, repeated in time with consistent identities.

Every copy is shifted by a whole period; ``correlation``, ``External id``, ``Ev Idx`` and flow ids get a range
of their own in each copy, so launches find their kernels and flows their ends. The ``ProfilerStep#N`` ranges
are replaced by ``--steps`` long ones that tile the copies: the cost of some tools grows with the number
of steps. A folder of ranks becomes a folder of large ranks, all with as many copies.

    python benchmarks/replicate_trace.py BASE.json.gz OUT.json.gz --events 1000000 --steps 3
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

ID_KEYS = ("correlation", "External id", "Ev Idx")
SLOT = re.compile(r'"@(\w+):(-?\d+)@"')
"""A number that differs between copies: what it is, and its value in the base trace (times in ns)."""

Event = dict[str, Any]


def nanoseconds(value: int | Decimal) -> int:
    return int(Decimal(value) * 1000)


def template(event: Event) -> list[str]:
    """Event as text, in Kineto's layout, split at its slots: text, kind, value, text, ..."""
    slotted = dict(event)
    slotted["ts"] = f"@ts:{nanoseconds(event['ts'])}@"
    if event["ph"] in ("s", "f", "t"):
        slotted["id"] = f"@id:{event['id']}@"
    args = slotted.pop("args", None)
    text = json.dumps(slotted, default=float)[1:-1]
    if args is not None:
        ids = {key: f"@id:{args[key]}@" for key in ID_KEYS if isinstance(args.get(key), int)}
        text += ',\n    "args": {\n      ' + json.dumps({**args, **ids}, default=float)[1:-1] + "\n    }"
    return SLOT.split(f"  {{\n    {text}\n  }}")


def fill(parts: list[str], shift_ns: int, shift_id: int, show: Callable[[int], str]) -> str:
    """A template's text in the copy with these shifts."""
    pieces = [parts[0]]
    for kind, value, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        pieces += [show(int(value) + shift_ns) if kind == "ts" else str(int(value) + shift_id), text]
    return "".join(pieces)


def whole_microseconds(value_ns: int) -> str:
    return str(value_ns // 1000)


def fractional_microseconds(value_ns: int) -> str:
    return f"{value_ns // 1000}.{value_ns % 1000:03d}"


def replicate(
    base: Path, output: Path, events: int, steps: int, copies: int | None = None
) -> tuple[int, int]:
    """Write ``output`` with at least ``events`` events (or as many copies); return its events and copies."""
    opener = gzip.open if base.suffix == ".gz" else open
    with opener(base, "rt", encoding="utf-8") as stream:
        document = json.load(stream, parse_float=Decimal)
    source = document.pop("traceEvents")
    step_events = [e for e in source if str(e.get("name", "")).startswith("ProfilerStep#")]
    thread = next({"pid": e["pid"], "tid": e["tid"]} for e in step_events if e["cat"] == "user_annotation")
    once = [e for e in source if e["ph"] == "M" or e.get("cat") == "Trace"]
    left_out = {id(e) for e in [*step_events, *once]}
    body = [e for e in source if id(e) not in left_out]

    times = [nanoseconds(e["ts"]) for e in body]
    show = whole_microseconds if all(time % 1000 == 0 for time in times) else fractional_microseconds
    end = max(time + nanoseconds(e.get("dur", 0)) for time, e in zip(times, body, strict=True))
    start, period = min(times), -(-(end - min(times)) // 1000) * 1000
    ids = [e["args"][key] for e in body for key in ID_KEYS if isinstance(e.get("args", {}).get(key), int)]
    stride = max([*ids, *(e["id"] for e in body if "id" in e)]) + 1
    copies = copies or -(-events // len(body))

    edges = [start + period * (step * copies // steps) for step in range(steps + 1)]
    for step, (first, last) in enumerate(pairwise(edges)):
        times_us = {"ts": Decimal(first) / 1000, "dur": Decimal(last - first) / 1000}
        name = f"ProfilerStep#{step}"
        once.append({"ph": "X", "cat": "user_annotation", "name": name, **thread, **times_us, "args": {}})
    templates = [template(e) for e in body]
    with gzip.open(output, "wt", encoding="utf-8", compresslevel=6) as out:
        header = json.dumps(document, default=float)[1:-1]
        out.write("{\n" + (header + ",\n" if header else "") + '"traceEvents": [\n')
        out.write("".join(fill(template(e), 0, 0, show) + ",\n" for e in once))
        for copy in range(copies):
            text = ",\n".join(fill(parts, copy * period, copy * stride, show) for parts in templates)
            out.write(text + ("\n" if copy == copies - 1 else ",\n"))
        out.write("]}\n")
    return len(once) + copies * len(body), copies


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path, help="a trace with ProfilerStep#N ranges, or a folder of them")
    parser.add_argument("output", type=Path, help="a .json.gz, or a folder for a folder")
    parser.add_argument("--events", type=int, default=1_000_000, help="of each trace")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    if options.base.is_dir():
        options.output.mkdir(parents=True)
        pairs = [(file, options.output / file.name) for file in sorted(options.base.glob("*.json.gz"))]
    else:
        pairs = [(options.base, options.output)]
    copies = None
    for base, output in pairs:
        count, copies = replicate(base, output, options.events, options.steps, copies)
        print(f"{output}: {count} events, {options.steps} steps")


if __name__ == "__main__":
    main()
