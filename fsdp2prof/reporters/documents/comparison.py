"""Documents of a comparison of two runs, traces, recordings or estimates, and of a baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.charts.memory import peaks_chart
from fsdp2prof.reporters.document import (
    Block,
    Chart,
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
from fsdp2prof.reporters.documents.links import Finder, Links, section_links
from fsdp2prof.reporters.documents.timeline import timelines_section
from fsdp2prof.reporters.formats import show_bytes, show_ns, signed, words
from fsdp2prof.results.comparison import (
    Baseline,
    CommChange,
    CommFigures,
    ComparedInput,
    MemoryComparison,
    MemoryDelta,
    RankPeakChange,
    RunComparison,
    TimeChange,
)
from fsdp2prof.units import format_bytes, format_ns, plural
from fsdp2prof.vocabulary import BREAKDOWN_PARTS, category_label, dtype_label, layer_name

_MEMORY_ROWS = 12
_UNKNOWN_PLACE = "(unknown)"


@builds(MemoryComparison)
def memory_comparison_document(comparison: MemoryComparison) -> Document:
    """Lay out a comparison of two recordings at their peaks."""
    before, after = comparison.before, comparison.after
    sides = {"before": comparison.before_path, "after": comparison.after_path}
    named = [Facts(title="Compared", pairs=sides)] if all(sides.values()) else []
    tables = comparison_tables(comparison)
    blocks: list[Block] = [*comparison_charts(comparison), *tables] if tables else []
    sections = [
        *(Section(anchor="compared", title=facts.title, blocks=[facts]) for facts in named),
        *([Section(anchor="change", title="Comparison", blocks=blocks)] if blocks else []),
    ]
    return Document(
        title="Memory at the peak, before and after",
        numbers=[
            KeyFigure(value=format_bytes(before.allocated_bytes), label="before"),
            KeyFigure(value=format_bytes(after.allocated_bytes), label="after"),
            KeyFigure(value=signed(show_bytes)(comparison.delta_bytes), label="change"),
        ],
        sections=sections,
        places=lambda: section_links(sections, comparison.verdict, ["change"] * len(comparison.verdict)),
        data=[_memory_changes(comparison)],
    )


def comparison_charts(comparison: MemoryComparison) -> list[Chart]:
    """Return both peaks by category."""
    figure = peaks_chart({"before": comparison.before, "after": comparison.after})
    before, after = comparison.before.allocated_bytes, comparison.after.allocated_bytes
    title = f"The peak went from {format_bytes(before)} to {format_bytes(after)}"
    if before == after:
        title = f"Both peaks are {format_bytes(after)}"
    return [Chart(name="memory_peaks", title=title, figure=figure)] if figure is not None else []


def comparison_tables(comparison: MemoryComparison) -> list[Table]:
    """Return the changes by category, by layer and by place, each where something changed."""
    whole: dict[str, Value] = {
        "before_bytes": comparison.before.allocated_bytes,
        "after_bytes": comparison.after.allocated_bytes,
        "delta_bytes": comparison.delta_bytes,
    }
    layers, folded = comparison.by_layer, comparison.by_layer_folded
    known = any(row.fqn is not None for row in layers)
    by_category = _table("memory_by_category", "Change by kind", c.category(), comparison.by_category, whole)
    by_layer = _table("memory_by_layer", "Change by layer", c.name("layer", of="name"), folded, whole)
    every = _table("memory_by_layer", "Change by layer", c.layer(), layers, whole, everything=True)
    place = c.name("place", "allocated by", of=_place)
    by_place = _table("memory_by_place", "Change by line", place, comparison.by_place, whole)
    tables = [by_category, *([replace(by_layer, unabridged=every)] if known else []), by_place]
    return [table for table in tables if table.rows]


def _table(
    name: str,
    title: str,
    first: Column,
    rows: Iterable[Any],
    whole: dict[str, Value],
    *,
    everything: bool = False,
) -> Table:
    """Return one table of changes; rows without a change only if ``everything`` is requested."""
    columns = [
        first,
        c.size("before_bytes", "before"),
        c.size("after_bytes", "after"),
        c.signed(c.size("delta_bytes", "change")),
    ]
    every = list(rows)
    changed = [row for row in every if row.delta_bytes]
    return c.table(
        name,
        title,
        columns,
        every if everything else changed,
        every=None if everything or len(changed) == len(every) else every,
        note="at the peak of each, largest change first",
        limit=None if everything else _MEMORY_ROWS,
        totals=[{first.name: "all", **whole}],
    )


def _place(row: MemoryDelta) -> str:
    return " at ".join(part for part in (row.op, row.place) if part) or _UNKNOWN_PLACE


def _memory_changes(comparison: MemoryComparison) -> Table:
    """Return all changes as flat rows: grouping, name, bytes before and after, and their difference."""
    parts: dict[str, Sequence[tuple[str, MemoryDelta]]] = {
        "category": [(category_label(str(row.category)), row) for row in comparison.by_category],
        "layer": [(layer_name(row.fqn), row) for row in comparison.by_layer],
        "place": [(_place(row), row) for row in comparison.by_place],
    }
    columns = [
        c.text("by", of=0),
        c.text("name", of=1),
        *(c.text(f"{one}_bytes", of=f"2.{one}_bytes") for one in ("before", "after", "delta")),
    ]
    rows = [(by, name, row) for by, rows in parts.items() for name, row in rows]
    return c.table("changes", "Every change", columns, rows)


_ROWS = 12
_WHENS = ("before", "after", "delta")


@builds(RunComparison)
def comparison_document(comparison: RunComparison) -> Document:
    """Lay out both sides and their settings, then time, communication and memory."""
    before, after = _names(comparison)
    sections = [
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
        *c.section("communication", "Communication", _exposed_table(comparison), _bytes_table(comparison)),
        *c.section("memory", "Memory", *_memory_blocks(comparison)),
        *timelines_section({before: comparison.before_timeline, after: comparison.after_timeline}),
        Section(
            anchor="equal",
            title="Exactly equal",
            blocks=[Sentences(title="Exactly equal", lines=comparison.equalities, style="list")],
        ),
    ]
    return Document(
        title="Comparison",
        numbers=_numbers(comparison),
        sections=sections,
        places=lambda: _places(comparison, sections),
        data=[_changes(comparison)],
    )


def _places(comparison: RunComparison, sections: Sequence[Section]) -> Links:
    """Return the place of each sentence: the step, then the part that changed most, memory."""
    find = Finder(sections)
    of_memory = [] if comparison.memory is None else comparison.memory.verdict
    links = {}
    for i, line in enumerate(comparison.verdict):
        changed = [row.part for row in comparison.breakdown if BREAKDOWN_PARTS[row.part].label in line]
        if line in of_memory:
            links[line] = find.section("memory")
        elif changed:
            links[line] = find.row(("step",), {"part": changed[0]})
        else:
            first = find.section("step") if i == 0 else []
            links[line] = first or find.section("communication")
    return links


def _names(comparison: RunComparison) -> tuple[str, str]:
    """Name the two sides: where one is a prediction and the other is not, by that."""
    sides = comparison.before, comparison.after
    before, after = ("predicted" if side.kind == "estimate" else "recorded" for side in sides)
    return ("before", "after") if before == after else (before, after)


def _numbers(comparison: RunComparison) -> list[KeyFigure]:
    times = {
        "unrecorded step": comparison.unrecorded_step,
        "traced step": comparison.step,
        "forward to forward": comparison.layer_pace,
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
    parts = [row for row in comparison.breakdown if row.before_ns or row.after_ns]
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
        sorted(parts, key=lambda row: -abs(row.delta_ns)),
        scale=whole,
        note="ms, mean over ranks and steps; communication is exposed time only",
        totals=[{one.name: one.value(row) for one in columns} for row in whole],
        remarks=["The unrecorded step is the median wall time of the steps without recording."]
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
        note="mean per rank and step; identical layers are summed in one row",
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
    """Return a value of a side; a side without a row's collectives has 0 of them."""
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
    title = "Stored sums"
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
