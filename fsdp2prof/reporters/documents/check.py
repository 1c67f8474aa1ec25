"""Documents of the checks: of a run, of its balance, of gradients, of an environment."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Document, Facts, KeyFigure, Section, Sentences, Table
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.documents.brief import findings_section
from fsdp2prof.reporters.formats import show_frac, show_ns
from fsdp2prof.results.check import (
    BalanceCheck,
    CheckRow,
    EnvironmentCheck,
    ParityCheck,
    ParityRow,
    RunCheck,
    TokenBalance,
    UnshardedRow,
)
from fsdp2prof.units import format_count

_ROWS = 16


@builds(ParityCheck)
def parity_document(parity: ParityCheck) -> Document:
    """Show a parity check: the steps, then the differences, then every tensor for data formats."""
    wrong = [row for row in parity.rows if row.state in ("differs", "missing")]
    title = "Differences"
    hint = None if parity.hint is None else Sentences(title="Likely", lines=[parity.hint])
    return Document(
        title=f"Parity of {parity.model}",
        subtitle=parity.mesh,
        numbers=[
            KeyFigure(value="passed" if parity.passed else "failed", label="parity"),
            KeyFigure(value=f"{parity.world_size:,}", label="ranks"),
        ],
        sections=[
            *c.section("differing", title, _rows("differing", title, wrong), hint),
            Section(anchor="steps", title="Steps", blocks=[_steps(parity)]),
        ],
        data=[_rows("tensors", "Tensors", parity.rows)],
    )


def _steps(parity: ParityCheck) -> Table:
    columns = [
        c.number("step"),
        c.number("plain_loss", "plain\nloss", _loss),
        c.number("sharded_loss", "sharded\nloss", _loss),
        c.count("differing", "differ"),
        c.number("worst_gradient_error", "gradient\nerror", _error),
        c.name("worst_gradient", "worst gradient"),
        c.number("worst_parameter_error", "parameter\nerror", _error),
        c.name("worst_parameter", "worst parameter"),
    ]
    note = "errors relative to the tensor's norm"
    return c.table("steps", "Steps", columns, parity.steps, note=note, noun="step")


def _rows(name: str, title: str, rows: Sequence[ParityRow]) -> Table:
    columns = [
        c.name("name", "tensor"),
        c.number("step", show=lambda step: "start" if step == -1 else str(step)),
        c.text("kind", "of"),
        c.text("state"),
        c.number("rank"),
        c.number("relative_error", "error", _error),
        c.number("tolerance", "rounding", _error),
        c.number("ratio", show=lambda ratio: "-" if ratio is None else f"{ratio:.4g}"),
        c.dtype(),
    ]
    note = "in step order; ratio: sharded over unsharded"
    return c.table(name, title, columns, rows, note=note, limit=_ROWS, noun="tensor")


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


@builds(RunCheck)
def check_document(check: RunCheck) -> Document:
    """Lay out a checked run."""
    return Document(
        title="Check of a run",
        numbers=[
            KeyFigure(value="passed" if check.passed else "failed", label="check"),
            KeyFigure(value=f"{len(check.ranks)} of {check.world_size}", label="ranks"),
        ],
        sections=[
            *findings_section(check.findings),
            *c.section("checks", "Checks", check_table(check.checks)),
            *c.section("unsharded", _WHOLE, _unsharded(check.unsharded)),
        ],
    )


def check_table(checks: Sequence[CheckRow]) -> Table:
    """Lay out checks of any kind."""
    columns = [c.text("name", "check"), c.text("state"), c.count("checked"), c.prose("said", "found")]
    return c.table("checks", "Checks", columns, checks, noun="check")


_WHOLE = "Not sharded"


def _unsharded(rows: Sequence[UnshardedRow]) -> Table:
    columns = [
        c.name("fqn", "tensor"),
        c.text("kind", "of"),
        c.dtype(),
        c.name("shape", of=lambda one: str(one.shape)),
        c.sized("bytes", "size"),
        c.sized("excess_bytes", "more than\nsharded"),
        c.text("requires_grad", "", lambda trained: "trained" if trained else ""),
    ]
    return c.table("unsharded", _WHOLE, columns, rows, note="largest first", limit=_ROWS, noun="tensor")


@builds(EnvironmentCheck)
def environment_check_document(check: EnvironmentCheck) -> Document:
    """Lay out an environment check."""
    gathers, *transports = _communication(check)
    return Document(
        title="Check of an environment",
        subtitle=" ".join(check.command),
        numbers=[
            KeyFigure(value="passed" if check.passed else "failed", label="check"),
            KeyFigure(value=f"{len(check.ranks)} of {check.world_size}", label="ranks"),
        ],
        sections=[
            *findings_section(check.findings),
            Section(anchor="checks", title="Checks", blocks=[check_table(check.checks)]),
            Section(anchor="communication", title="Communication", blocks=[gathers, *transports]),
            Section(anchor="ranks", title="Ranks", blocks=[_ranks(check)]),
        ],
    )


def _communication(check: EnvironmentCheck) -> list[Table]:
    sizes = [
        c.size("payload_bytes", "payload"),
        c.time("median_ns", "time"),
        c.gb_per_s("bus_bytes_per_s", "busbw\nGB/s"),
        c.gb_per_s("expected_bytes_per_s", "usual\nGB/s"),
    ]
    ways = [
        c.name("source", "from"),
        c.name("target", "to"),
        c.text("transport"),
        c.count("pairs", "channels"),
    ]
    note = "median, of the slowest rank"
    gathers = c.table("gathers", "All-gathers over all ranks", sizes, check.gathers, note=note, noun="size")
    title = "NCCL transports"
    transports = c.table("transports", title, ways, check.transports, limit=_ROWS, noun="connection")
    return [gathers, *([transports] if check.transports else ())]


def _ranks(check: EnvironmentCheck) -> Table:
    columns = [
        c.number("rank"),
        c.number("local_rank", "local\nrank"),
        c.name("host"),
        c.name("device"),
        c.time("init_ns", "rendezvous"),
        c.time("clock_offset_ns", "clock\noffset"),
        c.time("clock_uncertainty_ns", "known\nto"),
        c.size("disk_free_bytes", "disk\nfree"),
        c.size("disk_write_bytes_per_s", "written\na second"),
    ]
    note = "clock against rank 0's"
    return c.table("ranks", "Ranks", columns, check.ranks, note=note, limit=_ROWS, noun="rank")


@builds(BalanceCheck)
def balance_document(check: BalanceCheck) -> Document:
    """Show how evenly the work is distributed over the ranks."""
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
            *c.section("ranks", "Ranks", _balanced_ranks(check)),
            *c.section("steps", "Steps", _balanced_steps(check)),
            *c.section("tokens", "Tokens", None if check.tokens is None else _tokens(check.tokens)),
            *c.section("assumptions", "Assumptions", assumed),
        ],
    )


def _balanced_ranks(check: BalanceCheck) -> Table:
    columns = [
        c.number("rank"),
        c.ms("busy_ns", "own work\nms"),
        c.ms("behind_ns", "behind\nms"),
        c.number("slowest_steps", "slowest\nin steps"),
        c.mean("tokens", "tokens"),
        c.mean("computed_tokens", "with\npadding"),
    ]
    note = "mean per step; own work: the step without waiting for communication, idle time included"
    return c.table("ranks", "Ranks", columns, check.ranks, note=note, limit=_ROWS, noun="rank")


def _balanced_steps(check: BalanceCheck) -> Table:
    columns = [
        c.number("step"),
        c.ms("duration_ns", "takes\nms"),
        c.ms("mean_busy_ns", "mean own\nwork ms"),
        c.ms("max_busy_ns", "most own\nwork ms"),
        c.ms("lost_ns", "lost\nms"),
        c.number("slowest_rank", "by\nrank"),
        c.mean("mean_tokens", "mean\ntokens"),
        c.mean("max_tokens", "most\ntokens"),
    ]
    return c.table("steps", "Steps", columns, check.steps, limit=_ROWS, noun="step")


def _tokens(tokens: TokenBalance) -> Facts:
    pairs = {
        "documents": format_count(tokens.documents),
        "steps covered": format_count(tokens.steps),
        "tokens": format_count(tokens.tokens),
        "with padding": format_count(tokens.computed_tokens),
        "padding": f"{show_frac(tokens.padding_frac)}, up to {show_ns(tokens.padding_ns)} of a step",
        "busiest rank above the mean": show_frac(tokens.imbalance_frac),
        "of the ranks' differences explained": show_frac(tokens.explained_frac),
    }
    return Facts(title="Tokens", pairs=pairs)
