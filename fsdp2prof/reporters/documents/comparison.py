"""Document of two runs, traces, recordings or estimates against each other."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2prof.reporters.document import Block, Document, Facts, KeyFigure, Section, Sentences, Table, Value
from fsdp2prof.reporters.documents.comparison_rows import changes_table
from fsdp2prof.reporters.documents.memory_comparison import comparison_charts, comparison_tables
from fsdp2prof.reporters.formats import (
    MS,
    bytes_column,
    decimals,
    largest,
    layer_column,
    mean_count,
    name_column,
    number_column,
    show_bytes,
    show_ms,
    show_op,
    show_percent,
    signed,
    text_column,
)
from fsdp2prof.results import CommChange, CommFigures, ComparedInput, RunComparison, SettingChange, TimeChange
from fsdp2prof.units import format_ns, plural
from fsdp2prof.vocabulary import BREAKDOWN_PARTS, dtype_label

__all__ = ["comparison_document"]

_ROWS = 12


def comparison_document(comparison: RunComparison) -> Document:
    """Lay out what is compared and how it was set up, then time, communication and memory."""
    return Document(
        kind="compare",
        title="What changed",
        verdict=comparison.verdict,
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
                    *_settings_table(comparison),
                ],
            ),
            *_sections("step", "Step time", _step_table(comparison)),
            *_sections(
                "communication",
                "Communication",
                [*_exposed_table(comparison), *_bytes_table(comparison)],
            ),
            *_sections("memory", "Memory", _memory_blocks(comparison)),
            Section(
                anchor="equal",
                title="Exactly equal",
                blocks=[Sentences(title="Exactly equal", lines=comparison.equalities, style="list")],
            ),
        ],
        warnings=comparison.warnings,
        result=comparison,
        data=[changes_table(comparison)],
    )


def _sections(anchor: str, title: str, blocks: Sequence[Block]) -> list[Section]:
    return [Section(anchor=anchor, title=title, blocks=blocks)] if blocks else []


def _numbers(comparison: RunComparison) -> list[KeyFigure]:
    times = {
        "unrecorded step": comparison.unrecorded_step,
        "traced step": comparison.step,
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


def _settings_table(comparison: RunComparison) -> list[Table]:
    def laid(changes: Sequence[SettingChange], unabridged: Table | None = None) -> Table:
        return Table(
            name="settings",
            title="Set up otherwise",
            columns=[
                name_column("name", "setting"),
                name_column("before", "before"),
                name_column("after", "after"),
            ],
            rows=[[change.name, change.before, change.after] for change in changes],
            limit=_ROWS,
            noun="setting",
            unabridged=unabridged,
        )

    folded, every = comparison.settings_folded, comparison.settings
    if not every:
        return []
    return [laid(folded, laid(every) if len(folded) < len(every) else None)]


# Time.


def _step_table(comparison: RunComparison) -> list[Table]:
    whole, unrecorded = comparison.step, comparison.unrecorded_step
    known = [row for row in (*comparison.breakdown, whole, unrecorded) if row is not None]
    if not known:
        return []
    digits = decimals(largest(time for row in known for time in (row.before_ns, row.after_ns)) / MS)
    parts = [row for row in comparison.breakdown if row.before_ns or row.after_ns]
    return [
        Table(
            name="step",
            title="Step time",
            note="ms, mean over ranks and steps; communication holds only what no compute hides",
            columns=[
                text_column("part", "part", _part),
                number_column("before_ns", "before", show_ms(digits)),
                number_column("after_ns", "after", show_ms(digits)),
                number_column("delta_ns", "change", signed(show_ms(digits))),
                number_column("delta_frac", "%", signed(show_percent)),
            ],
            rows=[_time_row(row) for row in parts],
            totals=[_time_row(row) for row in (whole, unrecorded) if row is not None],
            remarks=["The unrecorded step is the median wall time of the steps that pay for no recording."]
            if unrecorded is not None
            else [],
        )
    ]


def _part(part: str) -> str:
    return BREAKDOWN_PARTS[part].label if part in BREAKDOWN_PARTS else part.replace("_", " ")


def _time_row(row: TimeChange) -> list[Value]:
    return [row.part, row.before_ns, row.after_ns, row.delta_ns, row.delta_frac]


# Communication.


def _exposed_table(comparison: RunComparison) -> list[Table]:
    """Exposed time and stall by layer, where both sides know times."""

    def laid(rows: Sequence[CommChange], unabridged: Table | None = None) -> Table:
        sides = [side for row in rows for side in (row.before, row.after) if side is not None]
        show = show_ms(decimals(largest(side.total_ns for side in sides) / MS))
        labels = ("exposed\nbefore", "exposed\nafter", "change", "stall\nbefore", "stall\nafter", "change")
        return Table(
            name="exposed",
            title="Exposed communication by layer",
            note="ms, mean per rank and step, largest growth first",
            columns=[
                layer_column(),
                text_column("phase", "phase"),
                text_column("op", "op", show_op),
                *(
                    number_column(name, label, signed(show) if name.startswith("delta") else show)
                    for name, label in zip(_columns("exposed_ns", "stall_ns"), labels, strict=True)
                ),
            ],
            rows=[[row.fqn, row.phase, row.op, *_values(row, "exposed_ns", "stall_ns")] for row in rows],
            limit=_ROWS,
            unabridged=unabridged,
        )

    changed = [row for row in comparison.communication_folded if row.delta.exposed_ns or row.delta.stall_ns]
    if comparison.step is None or not changed:
        return []
    timed = [row for row in comparison.communication if row.delta.exposed_ns is not None]
    return [laid(changed, laid(timed))]


def _bytes_table(comparison: RunComparison) -> list[Table]:
    """Rows whose counts or bytes differ."""

    def laid(rows: Sequence[CommChange], unabridged: Table | None = None) -> Table:
        sizes = [value for row in rows for value in _values(row, "payload_bytes", "wire_bytes")]
        known = [value for value in sizes if isinstance(value, (int, float))]
        return Table(
            name="bytes",
            title="Collectives that differ",
            note="mean per rank and step; layers that are alike share a row, summed",
            columns=[
                layer_column(),
                text_column("phase", "phase"),
                text_column("op", "op", show_op),
                number_column("before_count", "n\nbefore", mean_count),
                number_column("after_count", "n\nafter", mean_count),
                bytes_column("before_payload_bytes", "payload\nbefore", known),
                bytes_column("after_payload_bytes", "payload\nafter", known),
                bytes_column("before_wire_bytes", "wire\nbefore", known),
                bytes_column("after_wire_bytes", "wire\nafter", known),
                text_column("kind", "dtype, ranks"),
            ],
            rows=[
                [
                    row.fqn,
                    row.phase,
                    row.op,
                    *_pair(row, "count"),
                    *_pair(row, "payload_bytes"),
                    *_pair(row, "wire_bytes"),
                    _kind(row),
                ]
                for row in rows
            ],
            limit=_ROWS,
            unabridged=unabridged,
        )

    differing = comparison.communication_differing
    if not differing:
        return []
    return [laid(differing, laid([row for row in comparison.communication if not row.equal]))]


def _columns(*measures: str) -> list[str]:
    return [f"{when}_{measure}" for measure in measures for when in ("before", "after", "delta")]


def _values(row: CommChange, *measures: str) -> list[Value]:
    return [value for measure in measures for value in (*_pair(row, measure), getattr(row.delta, measure))]


def _pair(row: CommChange, measure: str) -> list[Value]:
    return [_measure(side, measure) for side in (row.before, row.after)]


def _measure(side: CommFigures | None, measure: str) -> Value:
    """A side that has none of a row's collectives has 0 of them."""
    value: Value = 0 if side is None and measure == "count" else getattr(side, measure, None)
    return value


def _kind(row: CommChange) -> str:
    """Dtypes and group sizes, of both sides where they differ."""
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
    return [*_peak_table(comparison), *charts, *tables]


def _peak_table(comparison: RunComparison) -> list[Table]:
    if not comparison.peaks:
        return []
    names = ("before_allocated_bytes", "after_allocated_bytes", "delta_allocated_bytes")
    reserved = ("before_reserved_bytes", "after_reserved_bytes", "delta_reserved_bytes")
    with_reserved = any(row.before_reserved_bytes is not None for row in comparison.peaks)
    shown = (*names, *(reserved if with_reserved else ()))
    return [
        Table(
            name="peaks",
            title="Peak memory by rank",
            note="largest growth first",
            columns=[
                number_column("rank", "rank"),
                *(
                    number_column(
                        name, _size_label(name), signed(show_bytes) if "delta" in name else show_bytes
                    )
                    for name in shown
                ),
            ],
            rows=[
                [
                    row.after_rank
                    if row.before_rank == row.after_rank
                    else f"{row.before_rank} -> {row.after_rank}",
                    *(getattr(row, name) for name in shown),
                ]
                for row in comparison.peaks
            ],
            limit=_ROWS,
            noun="rank",
        )
    ]


def _size_label(name: str) -> str:
    when, what, _ = name.split("_")
    return f"{what}\n{'change' if when == 'delta' else when}"
