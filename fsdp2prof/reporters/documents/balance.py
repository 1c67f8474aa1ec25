"""Document of a balance check: the cost of the slowest rank, the ranks, the steps."""

from __future__ import annotations

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Document, Facts, KeyFigure, Sentences, Table
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.documents.brief import findings_section
from fsdp2prof.reporters.formats import show_frac, show_ns
from fsdp2prof.results.balance import BalanceCheck, TokenBalance
from fsdp2prof.units import format_count

_ROWS = 16


@builds(BalanceCheck)
def balance_document(check: BalanceCheck) -> Document:
    """Lay out how evenly the work is spread over the ranks."""
    assumed = Sentences(title="Assumptions", lines=check.assumptions, style="list")
    return Document(
        title=f"Balance of {check.path}",
        subtitle=f"{len(check.ranks)} ranks, {len(check.steps)} {check.measured_on} steps",
        numbers=[
            KeyFigure(value=show_ns(check.lost_ns), label="a step lost to imbalance"),
            KeyFigure(value=show_frac(check.lost_frac), label="of a step"),
        ],
        sections=[
            *findings_section(check.findings, ()),
            *c.section("ranks", "Ranks", _ranks(check)),
            *c.section("steps", "Steps", _steps(check)),
            *c.section("tokens", "Tokens", None if check.tokens is None else _tokens(check.tokens)),
            *c.section("assumptions", "Assumptions", assumed),
        ],
    )


def _ranks(check: BalanceCheck) -> Table:
    columns = [
        c.number("rank"),
        c.ms("busy_ns", "busy\nms"),
        c.ms("behind_ns", "behind\nms"),
        c.number("slowest_steps", "slowest\nin steps"),
        c.mean("tokens", "tokens"),
        c.mean("computed_tokens", "with\npadding"),
    ]
    note = "mean per step, the busiest first"
    return c.table("ranks", "Ranks", columns, check.ranks, note=note, limit=_ROWS, noun="rank")


def _steps(check: BalanceCheck) -> Table:
    columns = [
        c.number("step"),
        c.ms("duration_ns", "takes\nms"),
        c.ms("mean_busy_ns", "mean busy\nms"),
        c.ms("max_busy_ns", "most busy\nms"),
        c.ms("lost_ns", "lost\nms"),
        c.number("slowest_rank", "by\nrank"),
        c.mean("mean_tokens", "mean\ntokens"),
        c.mean("max_tokens", "most\ntokens"),
    ]
    return c.table("steps", "Steps", columns, check.steps, limit=_ROWS, noun="step")


def _tokens(tokens: TokenBalance) -> Facts:
    pairs = {
        "documents": format_count(tokens.documents),
        "steps they reach": format_count(tokens.steps),
        "tokens": format_count(tokens.tokens),
        "with padding": format_count(tokens.computed_tokens),
        "padding": f"{show_frac(tokens.padding_frac)}, up to {show_ns(tokens.padding_ns)} of a step",
        "fullest rank above the mean": show_frac(tokens.imbalance_frac),
        "of the ranks' differences explained": show_frac(tokens.explained_frac),
    }
    return Facts(title="Tokens", pairs=pairs)
