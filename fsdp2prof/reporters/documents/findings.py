"""What is worth acting on, the first section of every document that has any."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2prof.reporters.document import Block, Findings, Section, Sentences
from fsdp2prof.results import Finding

__all__ = ["findings_section"]


def findings_section(findings: Sequence[Finding], advice: Sequence[str]) -> list[Section]:
    """Lay out what is worth acting on, and what to look at next; nothing where there is neither."""
    blocks: list[Block] = [Findings(title="Findings", findings=findings)] if findings else []
    blocks += [Sentences(title="What to look at next", lines=advice, style="list")] if advice else []
    return [Section(anchor="findings", title=blocks[0].title, blocks=blocks)] if blocks else []
