"""Document of a recorded run with changes: each change's gain, and where it comes from."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2prof.by_key import grouped
from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Block, Document, KeyFigure, Section, Sentences, Table
from fsdp2prof.reporters.documents import builds
from fsdp2prof.results.what_if import WhatIf, WhatIfChange
from fsdp2prof.units import format_frac, format_ns, plural
from fsdp2prof.vocabulary import BREAKDOWN_PARTS

_TITLE = "Changes that make it faster"
_GAINS = 0.0005
"""Fraction of a step that is shown as more than 0.0%."""


@builds(WhatIf)
def what_if_document(result: WhatIf) -> Document:
    """Show a change's gain."""
    gains, grounds = _tried(result.tried, _TITLE, asked=True)
    of = " over all ranks" if len(result.ranks) > 1 else ""
    return Document(
        title=f"What if: {result.path}",
        subtitle=f"{plural(len(result.ranks), 'rank')}, {plural(result.steps, 'traced step')}{of}",
        numbers=_numbers(result),
        sections=[
            Section(anchor="what_if", title=_TITLE, blocks=[*gains, *grounds]),
            *_shown(result),
            Section(
                anchor="assumptions", title="Assumptions and error", blocks=[_grounds(result)], detail=True
            ),
        ],
    )


def what_if_section(tried: Sequence[WhatIfChange]) -> list[Section]:
    """Return the sections of the single changes that were tried: their gains and the evidence."""
    gains, grounds = _tried(tried, _TITLE, asked=False)
    lead = "Each change on its own, in a replay of the recorded steps; it may save time of several causes."
    return [
        *c.section("what_if", _TITLE, *gains, lead=lead),
        *c.section("replays", "Assumptions of the replays", *grounds, detail=True),
    ]


def _numbers(result: WhatIf) -> list[KeyFigure]:
    figures = [KeyFigure(value=format_ns(result.step_ns), label="recorded step, mean")]
    first = next((row for row in result.tried if row.change == result.shown), None)
    if first is not None and first.step_ns is not None:
        figures.append(KeyFigure(value=format_ns(first.step_ns), label=_with(first.change)))
    return figures


def _tried(tried: Sequence[WhatIfChange], title: str, *, asked: bool) -> tuple[list[Block], list[Block]]:
    """Return the gains of the changes, the assumptions of the replays, and the changes that could not be
    tried. Those that somebody ``asked`` for are shown even if none gains."""
    applied = [row for row in tried if row.step_ns is not None]
    reasons = grouped((row.reason, row.change) for row in tried if row.step_ns is None)
    others = [f"{', '.join(changes)}: {reason}" for reason, changes in reasons.items()]
    gains = [row for row in applied if (row.gained_frac or 0.0) >= _GAINS]
    settings = [row for row in gains if not row.other_hardware] or (applied if asked else [])
    hardware = [row for row in gains if row.other_hardware and settings is not applied]
    without = [row.change for row in applied if row not in settings and not row.other_hardware]
    blocks: list[Block] = []
    grounds: list[Block] = []
    if settings:
        blocks.append(_table(settings, applied, title if gains else "Replayed changes"))
    if hardware:
        blocks.append(
            Sentences(
                title="With faster hardware",
                lines=[row.sentence(row.change) for row in hardware],
                style="list",
            )
        )
    if without:
        blocks.append(Sentences(title="Without a gain", lines=[", ".join(without)], style="list"))
    shown = [*settings, *hardware]
    notes = list(dict.fromkeys(f"{row.change}: {note}" for row in shown for note in row.assumptions))
    if notes:
        grounds.append(Sentences(title="Assumed", lines=notes, style="list"))
    if others:
        grounds.append(Sentences(title="Does not apply", lines=others, style="list"))
    return blocks, grounds


def _table(rows: Sequence[WhatIfChange], every: Sequence[WhatIfChange], title: str) -> Table:
    columns = [
        c.text("change"),
        c.ms("gained_ns", "gained"),
        *(
            [c.ms("least_gained_ns", "least in\na step"), c.ms("most_gained_ns", "most in\na step")]
            if any(row.least_gained_ns is not None for row in rows)
            else []
        ),
        c.frac("gained_frac", "of the step"),
        c.ms("step_ns", "new step"),
        c.sized("memory_bytes", "memory"),
        c.prose("what", "description"),
    ]
    note = "ms per step, mean over the recorded steps; memory: upper bound per rank"
    return c.table("what_if", title, columns, rows, every=every, note=note, noun="change")


def _shown(result: WhatIf) -> list[Section]:
    if result.shown is None:
        return []
    title = _with(result.shown)
    return c.section("shown", title[0].upper() + title[1:], _parts(result), _layers(result))


def _layers(result: WhatIf) -> Table:
    columns = [
        c.layer(),
        c.text("phase"),
        c.op(),
        c.ms("exposed_before_ns", "exposed\nbefore"),
        c.ms("exposed_after_ns", "exposed\nafter"),
        c.ms("gained_ns", "gained"),
        c.ms("total_before_ns", "total\nbefore"),
        c.ms("total_after_ns", "total\nafter"),
        c.mean("count_before", "n\nbefore"),
        c.mean("count_after", "n\nafter"),
    ]
    note = "ms; mean per rank and step; the largest change first"
    return c.table("what_if_by_layer", "By layer", columns, result.by_layer, note=note, limit=12)


def _parts(result: WhatIf) -> Table:
    before, after = result.breakdown_before_ns, result.breakdown_after_ns
    columns = [
        c.word("part", None, BREAKDOWN_PARTS, of=0),
        c.ms("before_ns", "before", of=1),
        c.ms("after_ns", "after", of=2),
        c.signed(c.ms("change_ns", "change", of=lambda row: row[2] - row[1])),
    ]
    rows = [(part, time, after[part]) for part, time in before.items() if time or after[part]]
    note = "ms; mean per rank and step"
    return c.table("what_if_parts", "Where the step goes", columns, rows, note=note)


def _grounds(result: WhatIf) -> Block:
    error = format_frac(abs(result.replay_error_frac))
    lines = [
        f"replayed without a change, a step takes {format_ns(result.replayed_ns)}: {error} difference",
        *result.assumptions,
    ]
    return Sentences(title="Assumptions and error", lines=lines, style="list")


def _with(change: str) -> str:
    return change if change.startswith("without ") else f"with {change}"
