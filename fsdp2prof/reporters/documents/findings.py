"""What is worth acting on, the first section of every document that has any."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2prof.reporters.document import Block, Findings, Section, Sentences
from fsdp2prof.results import Finding, WhatIfChange
from fsdp2prof.units import format_bytes, format_frac, format_ns

__all__ = ["findings_section"]

_WORTH_MOST = 3
_BOUGHT = ("bandwidth=", "compute=")
"""Changes that nobody makes in a script."""


def findings_section(
    findings: Sequence[Finding], advice: Sequence[str], tried: Sequence[WhatIfChange] = ()
) -> list[Section]:
    """Lay out what is worth acting on, the changes that gain most, and what to look at next.

    Nothing where there is none of it. ``tried`` are changes with what they gain, the most first.
    """
    blocks: list[Block] = [Findings(title="Findings", findings=findings)] if findings else []
    gains = [row for row in tried if row.gained_ns and row.gained_ns > 0]
    worth = [_gain(row) for row in gains if not row.change.startswith(_BOUGHT)][:_WORTH_MOST]
    if worth:
        title = "Changes worth most, tried on this recording"
        blocks.append(Sentences(title=title, lines=worth, style="list"))
    blocks += [Sentences(title="What to look at next", lines=advice, style="list")] if advice else []
    return [Section(anchor="findings", title=blocks[0].title, blocks=blocks)] if blocks else []


def _gain(row: WhatIfChange) -> str:
    """Say what a change gains and costs."""
    memory = ""
    if row.memory_bytes:
        more = "more" if row.memory_bytes > 0 else "less"
        memory = f", {format_bytes(abs(row.memory_bytes))} {more} memory"
    spared = f"{format_ns(row.gained_ns or 0)} ({format_frac(row.gained_frac)}) less of a step"
    return f"`{row.change}`: {row.what}: {spared}{memory}."
