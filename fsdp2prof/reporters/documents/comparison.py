"""Documents of a comparison of two runs, traces, recordings or estimates, and of a baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import (
    Block,
    Column,
    Document,
    Facts,
    KeyFigure,
    Section,
    Sentences,
    Table,
    Value,
)
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.documents.memory_comparison import comparison_charts, comparison_tables
from fsdp2prof.reporters.documents.timeline import timelines_section
from fsdp2prof.reporters.formats import show_bytes, show_ns, signed, words
from fsdp2prof.results.comparison import (
    Baseline,
    CommChange,
    CommFigures,
    ComparedInput,
    RankPeakChange,
    RunComparison,
    TimeChange,
)
from fsdp2prof.results.memory_comparison import MemoryDelta
from fsdp2prof.units import format_ns, plural
from fsdp2prof.vocabulary import BREAKDOWN_PARTS, dtype_label

_ROWS = 12
_WHENS = ("before", "after", "delta")


@builds(RunComparison)
def comparison_document(comparison: RunComparison) -> Document:
    """Lay out both sides and their settings, then time, communication and memory."""
    before, after = _names(comparison)
    return Document(
        title="What changed",
        numbers=_numbers(comparison),
        sections=[
            Section(
                anchor="sides",
                title="Compared",
                blocks=[
                    Facts(
                        title="Compared",
                        pairs={"before": _side(comparison.before), "after": _side(comparison.after)},
                    ),
                    *([_settings_table(comparison)] if comparison.settings else []),
                ],
            ),
            *c.section("step", "Step time", _step_table(comparison)),
            *timelines_section({before: comparison.before_timeline, after: comparison.after_timeline}),
            *c.section(
                "communication", "Communication", _exposed_table(comparison), _bytes_table(comparison)
            ),
            *c.section("memory", "Memory", *_memory_blocks(comparison)),
            Section(
                anchor="equal",
                title="Exactly equal",
                blocks=[Sentences(title="Exactly equal", lines=comparison.equalities, style="list")],
            ),
        ],
        data=[_changes(comparison)],
    )


def _names(comparison: RunComparison) -> tuple[str, str]:
    """Name the two sides: where one is a prediction and the other is not, by that."""
    sides = comparison.before, comparison.after
    before, after = ("predicted" if side.kind == "estimate" else "recorded" for side in sides)
    return ("before", "after") if before == after else (before, after)


def _numbers(comparison: RunComparison) -> list[KeyFigure]:
    times = {
        "unrecorded step": comparison.unrecorded_step,
        "traced step": comparison.step,
        "layer to layer": comparison.layer_pace,
        "exposed communication": comparison.exposed,
    }
    numbers = [KeyFigure(value=_growth(row), label=name) for name, row in times.items() if row is not None]
    if comparison.memory is not None:
        change = comparison.memory.delta_bytes
        numbers.append(KeyFigure(value=signed(show_bytes)(change), label="peak memory"))
    return numbers


def _growth(row: TimeChange) -> str:
    if row.delta_frac is None:
        return f"+{format_ns(row.after_ns)}" if row.after_ns else "0"
    return f"{100 * row.delta_frac:+.1f}%"


def _side(side: ComparedInput) -> str:
    facts = [side.kind]
    if side.world_size is not None:
        facts.append(plural(side.world_size, "rank"))
    if side.steps and side.step_min_ns is not None and side.step_max_ns is not None:
        span = f"{format_ns(side.step_min_ns)} to {format_ns(side.step_max_ns)}"
        facts.append(f"{plural(side.steps, 'step window')} of {span}")
    return f"{side.path}: {', '.join(facts)}"


def _settings_table(comparison: RunComparison) -> Table:
    columns = [c.name("name", "setting"), c.name("before"), c.name("after")]
    folded, every = comparison.settings_folded, comparison.settings
    return c.table(
        "settings",
        "Settings that differ",
        columns,
        folded,
        every=every if len(folded) < len(every) else None,
        limit=_ROWS,
        noun="setting",
    )


# Time.


def _step_table(comparison: RunComparison) -> Table | None:
    known = (comparison.step, comparison.unrecorded_step, comparison.layer_pace)
    whole = [row for row in known if row is not None]
    if not comparison.breakdown and not whole:
        return None
    columns = [
        c.text("part", show=_part),
        c.ms("before_ns", "before"),
        c.ms("after_ns", "after"),
        c.signed(c.ms("delta_ns", "change")),
        c.signed(c.percent("delta_frac")),
    ]
    return c.table(
        "step",
        "Step time",
        columns,
        [row for row in comparison.breakdown if row.before_ns or row.after_ns],
        scale=whole,
        note="ms, mean over ranks and steps; communication holds only what no compute hides",
        totals=[{one.name: one.value(row) for one in columns} for row in whole],
        remarks=["The unrecorded step is the median wall time of the steps that pay for no recording."]
        if comparison.unrecorded_step is not None
        else ["The layers' row is the median time from one forward to the next."]
        if comparison.layer_pace is not None
        else [],
    )


def _part(part: str) -> str:
    return words(BREAKDOWN_PARTS)(part).replace("_", " ")


# Communication.


def _exposed_table(comparison: RunComparison) -> Table | None:
    """Return exposed time and stall by layer, where both sides know times."""
    changed = [row for row in comparison.communication_folded if row.delta.exposed_ns or row.delta.stall_ns]
    if comparison.step is None or not changed:
        return None
    return c.table(
        "exposed",
        "Exposed communication by layer",
        [c.layer(), c.text("phase"), c.op(), *_compared(c.ms, exposed_ns="exposed", stall_ns="stall")],
        changed,
        every=[row for row in comparison.communication if row.delta.exposed_ns is not None],
        note="ms, mean per rank and step, largest growth first",
        limit=_ROWS,
    )


def _bytes_table(comparison: RunComparison) -> Table:
    """Return the rows whose counts or bytes differ."""
    columns = [
        c.layer(),
        c.text("phase"),
        c.op(),
        *_compared(c.mean, count="n")[:2],
        *_compared(_shared_unit, payload_bytes="payload")[:2],
        *_compared(_shared_unit, wire_bytes="wire")[:2],
        c.text("kind", "dtype, ranks", of=_kind),
    ]
    differing = comparison.communication_differing
    return c.table(
        "bytes",
        "Collectives that differ",
        columns,
        differing,
        every=[row for row in comparison.communication if not row.equal] if differing else None,
        note="mean per rank and step; layers that are alike share a row, summed",
        limit=_ROWS,
    )


_shared_unit = partial(c.sized, unit="all")


def _compared(column: Callable[..., Column], **measures: str) -> list[Column]:
    """Return the columns of measures before, after and of their change."""
    made = [
        column(f"{when}_{key}", f"{label}\n{'change' if when == 'delta' else when}", of=_side_of(when, key))
        for key, label in measures.items()
        for when in _WHENS
    ]
    return [c.signed(one) if one.name.startswith("delta") else one for one in made]


def _side_of(when: str, measure: str) -> Callable[[CommChange], Value]:
    return lambda row: _measure(getattr(row, when), measure)


def _measure(side: CommFigures | None, measure: str) -> Value:
    """Return a measure of a side; one that has none of a row's collectives has 0 of them."""
    value: Value = 0 if side is None and measure == "count" else getattr(side, measure, None)
    return value


def _kind(row: CommChange) -> str:
    """Return dtypes and group sizes, of both sides where they differ."""
    dtypes = [", ".join(map(dtype_label, names)) for names in (row.before_dtypes, row.after_dtypes)]
    sizes = [", ".join(map(str, ranks)) for ranks in (row.before_group_sizes, row.after_group_sizes)]
    kinds = [f"{dtype or '-'}, {size or '-'}" for dtype, size in zip(dtypes, sizes, strict=True)]
    return kinds[0] if kinds[0] == kinds[1] else " -> ".join(kinds)


# Memory.


def _memory_blocks(comparison: RunComparison) -> list[Block]:
    memory = comparison.memory
    if memory is None:
        return []
    tables = comparison_tables(memory)
    charts = comparison_charts(memory) if tables else []
    return [_peak_table(comparison), *charts, *tables]


def _peak_table(comparison: RunComparison) -> Table:
    with_reserved = any(row.before_reserved_bytes is not None for row in comparison.peaks)
    sizes = [
        c.size(f"{when}_{what}_bytes", f"{what}\n{'change' if when == 'delta' else when}")
        for what in ("allocated", *(("reserved",) if with_reserved else ()))
        for when in _WHENS
    ]
    columns = [
        c.number("rank", of=_ranks),
        *(c.signed(one) if one.name.startswith("delta") else one for one in sizes),
    ]
    title, note = "Peak memory by rank", "largest growth first"
    return c.table("peaks", title, columns, comparison.peaks, note=note, limit=_ROWS, noun="rank")


def _ranks(row: RankPeakChange) -> Value:
    same = row.before_rank == row.after_rank
    return row.after_rank if same else f"{row.before_rank} -> {row.after_rank}"


# Every change as one flat table, for data.

_NO_PLACE = (None, None)
"""Phase and op of a change that has neither."""


def _changes(comparison: RunComparison) -> Table:
    """Return every change as a row, in raw units; ``fqn``: the layer, memory category, rank or setting."""
    names = ("table", "fqn", "phase", "op", "measure", "before", "after", "delta")
    columns = [
        c.layer(name, name, of=i) if name == "fqn" else c.text(name, of=i) for i, name in enumerate(names)
    ]
    rows = [*_settings(comparison), *_times(comparison), *_communication(comparison), *_memory(comparison)]
    return c.table("changes", "Changes", columns, rows)


def _settings(comparison: RunComparison) -> Iterator[list[Value]]:
    for setting in comparison.settings:
        yield ["settings", setting.name, *_NO_PLACE, "value", setting.before, setting.after, None]


def _times(comparison: RunComparison) -> Iterator[list[Value]]:
    whole = comparison.step, comparison.unrecorded_step, comparison.layer_pace
    for time in (*whole, *comparison.breakdown):
        if time is not None:
            yield ["step", time.part, *_NO_PLACE, "ns", time.before_ns, time.after_ns, time.delta_ns]


def _communication(comparison: RunComparison) -> Iterator[list[Value]]:
    for row in comparison.communication:
        for name in [field.name for field in fields(CommFigures)]:
            sides = [None if side is None else getattr(side, name) for side in (row.before, row.after)]
            yield ["communication", row.fqn, row.phase, row.op, name, *sides, getattr(row.delta, name)]


def _memory(comparison: RunComparison) -> Iterator[list[Value]]:
    for peak in comparison.peaks:
        for name in ("allocated_bytes", "reserved_bytes"):
            values = [getattr(peak, f"{when}_{name}") for when in ("before", "after", "delta")]
            yield ["peak", str(peak.after_rank), *_NO_PLACE, name, *values]
    memory = comparison.memory
    if memory is None:
        return
    for kind in memory.by_category:
        yield ["memory_category", kind.category, *_NO_PLACE, *_sizes(kind)]
    for layer in memory.by_layer:
        yield ["memory_layer", layer.fqn, *_NO_PLACE, *_sizes(layer)]


def _sizes(delta: MemoryDelta) -> list[Value]:
    return ["bytes", delta.before_bytes, delta.after_bytes, delta.delta_bytes]


@builds(Baseline)
def baseline_document(baseline: Baseline) -> Document:
    """Lay out the sums of a run."""
    facts = {
        "of": f"a {baseline.kind}, {', '.join(baseline.devices) or 'device unknown'}",
        "ranks": "unknown" if baseline.world_size is None else str(baseline.world_size),
        "steps": f"{baseline.windows} on {baseline.traced_ranks} traced ranks, summed",
    }
    if baseline.unrecorded_step is not None:
        facts["unrecorded step"] = f"{show_ns(baseline.unrecorded_step.median_ns)} (median)"
    title = "What is kept"
    return Document(
        title="Baseline",
        sections=c.section("baseline", title, Facts(title=title, pairs=facts), *_tables(baseline)),
    )


def _tables(baseline: Baseline) -> list[Table]:
    peak = baseline.peak
    times = [c.word("part", None, BREAKDOWN_PARTS, of=0), c.time("total_ns", "time", of=1)]
    collectives = [
        c.text("phase"),
        c.op(),
        c.count("count"),
        c.size("wire_bytes", "wire"),
        c.time("total_ns", "time"),
        c.time("exposed_ns", "exposed"),
    ]
    kinds = [c.text("category", show=c.category().show, of=0), c.size("bytes", of=1)]
    highest = "Highest peak" if peak is None else f"Highest peak, of rank {peak.rank}"
    return [
        c.table("breakdown", "Steps, summed", times, baseline.breakdown_ns.items()),
        c.table("collectives", "Collectives, summed", collectives, baseline.collectives or ()),
        c.table("peak", highest, kinds, () if peak is None else peak.categories.items()),
    ]
