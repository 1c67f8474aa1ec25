"""Document of a parity check: where the sharded training first differs, and every step of both."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Document, KeyFigure, Section, Sentences, Table
from fsdp2prof.reporters.documents import builds
from fsdp2prof.results.parity import ParityCheck, ParityRow

_ROWS = 16


@builds(ParityCheck)
def parity_document(parity: ParityCheck) -> Document:
    """Lay out a parity check: the steps, then what differs, then every tensor for data formats."""
    wrong = [row for row in parity.rows if row.state in ("differs", "missing")]
    title = "What differs"
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
    note = "in the order of a step; ratio: sharded over plain"
    return c.table(name, title, columns, rows, note=note, limit=_ROWS, noun="tensor")


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"
