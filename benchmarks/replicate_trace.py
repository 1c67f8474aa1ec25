"""Make a large Kineto trace from a real one: the same events, repeated in time with consistent identities.

Every copy is shifted by a whole period; ``correlation``, ``External id``, ``Ev Idx`` and flow ids get a
range of their own, so launches find their kernels and flows their ends within each copy. The
``ProfilerStep#N`` ranges are replaced by ``--steps`` long ones that tile the copies, because the cost of some
tools grows with the number of steps.

    python benchmarks/replicate_trace.py BASE.json.gz OUT.json.gz --events 1000000 --steps 3
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

ID_KEYS = ("correlation", "External id", "Ev Idx")
SLOT = re.compile(r'"@(\w+):(-?\d+)@"')


def nanoseconds(value: int | Decimal) -> int:
    return int(Decimal(value) * 1000)


def microseconds(value_ns: int) -> str:
    return f"{value_ns // 1000}.{value_ns % 1000:03d}"


def is_step(event: dict[str, Any]) -> bool:
    return str(event.get("name", "")).startswith("ProfilerStep#")


def render(event: dict[str, Any]) -> list[tuple[str, int]]:
    """Event as text pieces, each followed by a slot: (text before, kind and value of the slot)."""
    slotted = dict(event)
    if event.get("ph") != "M":
        slotted["ts"] = f"@ts:{nanoseconds(event['ts'])}@"
    if "dur" in event:
        slotted["dur"] = event["dur"]
    if event.get("ph") in ("s", "f", "t"):
        slotted["id"] = f"@id:{event['id']}@"
    if "args" in event:
        slotted["args"] = {
            key: f"@id:{value}@" if key in ID_KEYS and isinstance(value, int) else value
            for key, value in event["args"].items()
        }
    args = slotted.pop("args", None)
    head = json.dumps(slotted, default=float)[1:-1]
    body = (
        "" if args is None else ',\n    "args": {\n      ' + json.dumps(args, default=float)[1:-1] + "\n    }"
    )
    return f"  {{\n    {head}{body}\n  }}"


def replicate(base: Path, output: Path, events: int, steps: int) -> int:
    """Write ``output`` with at least ``events`` events in ``steps`` steps; return the number written."""
    opener = gzip.open if base.suffix == ".gz" else open
    with opener(base, "rt", encoding="utf-8") as stream:
        document = json.load(stream, parse_float=Decimal)
    source = document.pop("traceEvents")
    once = [e for e in source if e.get("ph") == "M" or e.get("cat") == "Trace"]
    step_events = [e for e in source if is_step(e)]
    body = [
        e for e in source if e.get("ph") not in ("M", None) and e.get("cat") != "Trace" and not is_step(e)
    ]
    times = [nanoseconds(e["ts"]) for e in body]
    ends = [t + nanoseconds(e.get("dur", 0)) for t, e in zip(times, body, strict=True)]
    start, period = min(times), max(ends) - min(times) + 1000
    ids = [e["args"][k] for e in body for k in ID_KEYS if isinstance(e.get("args", {}).get(k), int)]
    stride = max([*ids, *(e["id"] for e in body if "id" in e), 0]) + 1
    copies = -(-events // len(body))

    templates = [SLOT.split(render(e)) for e in body]
    with gzip.open(output, "wt", encoding="utf-8", compresslevel=6) as out:
        header = json.dumps(document, default=float)[1:-1]
        out.write("{\n" + (header + ",\n" if header else "") + '"traceEvents": [\n')
        out.write("".join(render_plain(e) + ",\n" for e in once))
        for step in range(steps):
            first, last = step * copies // steps, (step + 1) * copies // steps
            out.write(
                render_plain(step_range(step_events, step, start + first * period, start + last * period))
            )
            out.write(",\n")
        for copy in range(copies):
            lines = [fill(template, copy * period, copy * stride) for template in templates]
            out.write(",\n".join(lines) + ("\n" if copy == copies - 1 else ",\n"))
        out.write("]}\n")
    return len(once) + steps + copies * len(body)


def fill(template: list[str], shift_ns: int, shift_id: int) -> str:
    pieces = [template[0]]
    for kind, value, text in zip(template[1::3], template[2::3], template[3::3], strict=True):
        pieces.append(microseconds(int(value) + shift_ns) if kind == "ts" else str(int(value) + shift_id))
        pieces.append(text)
    return "".join(pieces)


def render_plain(event: dict[str, Any]) -> str:
    return json.dumps(event, default=float)


def step_range(step_events: list[dict[str, Any]], step: int, start_ns: int, end_ns: int) -> dict[str, Any]:
    thread = next(
        ({"pid": e["pid"], "tid": e["tid"]} for e in step_events if e["cat"] == "user_annotation"), {}
    )
    if not thread:
        raise SystemExit("the base trace has no ProfilerStep#N range to take the thread from")
    times = {"ts": Decimal(start_ns) / 1000, "dur": Decimal(end_ns - start_ns) / 1000}
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": f"ProfilerStep#{step}",
        **thread,
        **times,
        "args": {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    count = replicate(options.base, options.output, options.events, options.steps)
    print(f"{options.output}: {count} events, {options.steps} steps")


if __name__ == "__main__":
    main()
