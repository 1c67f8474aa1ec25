"""A comparison in sentences: the verdict, and what is equal on both sides."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp2prof.analyzers.layers import in_phase, named_layer
from fsdp2prof.results.comparison import CommChange, CommFigures, RunComparison, StepSpread, TimeChange
from fsdp2prof.units import format_bytes, format_ns, plural
from fsdp2prof.vocabulary import BREAKDOWN_PARTS, category_label, op_label

_SAME = 0.0005
"""Part of a step up to which a change is written as 0.0 %."""


def verdict(comparison: RunComparison) -> list[str]:
    """Say at most three things: the step, what changed most in it, memory."""
    memory = comparison.memory.verdict if comparison.memory is not None else []
    return [*_step(comparison), *_place(comparison), *memory][:3]


def equalities(comparison: RunComparison) -> list[str]:
    """Say what both sides have in common to the byte."""
    lines = []
    rows = comparison.communication
    equal = sum(row.equal for row in rows)
    if equal:
        which = f"all {equal}" if equal == len(rows) else f"{equal} of {len(rows)}"
        lines.append(f"counts, payload and wire bytes of the collectives: {which} rows (layer, phase, op)")
    memory = comparison.memory
    if memory is not None:
        kinds = [
            category_label(row.category or "unattributed")
            for row in memory.by_category
            if row.delta_bytes == 0 and row.before_bytes
        ]
        whole = ["the whole peak"] if memory.delta_bytes == 0 else []
        if kinds:
            lines.append(f"bytes at the peak: {', '.join([*whole, *kinds])}")
    return lines


def _step(comparison: RunComparison) -> Iterator[str]:
    change = comparison.unrecorded_step or comparison.step or comparison.layer_pace
    before, after = comparison.before.spread, comparison.after.spread
    if change is None or before is None or after is None:
        return
    which = f"The {before.measured_on} step"
    if before.measured_on == "layers":
        change = comparison.layer_pace or change
        which = f"From one forward of `{change.part}` to the next the time"
    if change.delta_frac is None or abs(change.delta_frac) < _SAME:
        same = "is" if before.measured_on == "layers" else "takes"
        yield f"{which} {same} {format_ns(change.after_ns)} on both sides."
        return
    sense = "slower" if change.delta_ns > 0 else "faster"
    if before.measured_on == "layers":
        sense = "longer" if change.delta_ns > 0 else "shorter"
    machine = f"; {comparison.machine_changed}" if comparison.machine_changed else ""
    if comparison.beyond_spread is False:
        yield (
            f"No change beyond the spread of the steps: {which[0].lower()}{which[1:]} is "
            f"{format_ns(change.after_ns)} after {format_ns(change.before_ns)} "
            f"({100 * change.delta_frac:+.1f}%; {_range(before)} before, {_range(after)} after){machine}."
        )
        return
    yield (
        f"{which} is {100 * abs(change.delta_frac):.1f}% {sense}: {format_ns(change.after_ns)} after "
        f"{format_ns(change.before_ns)}, {_beyond(comparison, before, after)}{machine}."
    )


def _beyond(comparison: RunComparison, before: StepSpread, after: StepSpread) -> str:
    if comparison.beyond_spread is None:
        return f"too few steps to exclude coincidence ({before.steps} and {after.steps})"
    return f"beyond the spread of the steps ({_range(before)} before, {_range(after)} after)"


def _range(spread: StepSpread) -> str:
    return f"{format_ns(spread.low_ns)} to {format_ns(spread.high_ns)}"


def _place(comparison: RunComparison) -> Iterator[str]:
    if comparison.communication_equal and comparison.step is None:
        rows = plural(len(comparison.communication), "row")
        yield f"Communication is equal: counts, payload and wire bytes of all {rows}."
        return
    step = 0.0 if comparison.step is None else comparison.step.before_ns
    shown = comparison.beyond_spread is not False
    parts = [row for row in comparison.breakdown if shown and abs(row.delta_ns) > _SAME * step]
    timed = [row for row in comparison.communication_folded if row.delta.exposed_ns]
    if parts:
        part = max(parts, key=lambda row: abs(row.delta_ns))
        yield f"Of the traced step, {_part(part)} changed most{_and(timed)}."
        return
    sent = comparison.communication_differing
    if sent:
        row = max(sent, key=lambda row: abs(row.delta.wire_bytes or row.delta.payload_bytes or 0))
        yield f"Communication differs most in the {_collective(row)}: {_sent(row)}."


def _part(row: TimeChange) -> str:
    return f"{BREAKDOWN_PARTS[row.part].label} ({_signed(format_ns(row.delta_ns), row.delta_ns)})"


def _and(timed: list[CommChange]) -> str:
    if not timed:
        return ""
    row = max(timed, key=lambda row: abs(row.delta.exposed_ns or 0))
    delta = row.delta.exposed_ns or 0
    return f"; among collectives, the {_collective(row)} ({_signed(format_ns(delta), delta)} exposed)"


def _collective(row: CommChange) -> str:
    where = f"of {named_layer(row.fqn)}" if row.fqn is not None else "outside every layer"
    return f"{op_label(row.op)} {where} {in_phase(row.phase)}"


def _sent(row: CommChange) -> str:
    return f"{_wire(row.before)} on the wire before, {_wire(row.after)} after"


def _wire(side: CommFigures | None) -> str:
    if side is None:
        return "nothing"
    return "unknown" if side.wire_bytes is None else format_bytes(round(side.wire_bytes))


def _signed(text: str, value: float) -> str:
    return f"+{text}" if value > 0 else text
