"""Document of a step estimate: how long, what bounds it, and the predicted step like a recorded one."""

from __future__ import annotations

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Document, Facts, KeyFigure, Section, Sentences, Table
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.documents.estimate import config_section
from fsdp2prof.reporters.documents.trace import trace_data, trace_sections
from fsdp2prof.results.step_estimate import StepEstimate
from fsdp2prof.units import format_frac, format_ns, plural
from fsdp2prof.vocabulary import KERNEL_BOUNDS


@builds(StepEstimate)
def step_estimate_document(estimate: StepEstimate) -> Document:
    """Lay out a step estimate."""
    return Document(
        title="Step time",
        subtitle=_what(estimate),
        numbers=_numbers(estimate),
        sections=[
            *config_section(estimate.config),
            Section(anchor="estimate", title="Estimate", blocks=[_facts(estimate), _kernels(estimate)]),
            *trace_sections(estimate.trace, predicted=True),
            Section(
                anchor="assumptions",
                title="Assumptions",
                blocks=[
                    Sentences(title="Not known, and varied", lines=estimate.range.unknown, style="list"),
                    Sentences(title="Assumptions", lines=estimate.assumptions, style="list"),
                ],
            ),
        ],
        data=trace_data(estimate.trace),
    )


def _what(estimate: StepEstimate) -> str:
    use = estimate.hardware
    nodes = "" if use.nodes == 1 else f" on {plural(use.nodes, 'node')}, {use.network}"
    ranks = estimate.mesh.world_size
    return f"{estimate.model.name}, {ranks:,} x {use.name}{nodes}"


def _numbers(estimate: StepEstimate) -> list[KeyFigure]:
    figures = [
        KeyFigure(value=format_ns(estimate.step_ns), label="a step"),
        KeyFigure(value=f"{estimate.tokens_per_s_per_gpu:,.0f}", label="tokens/s per GPU"),
    ]
    if estimate.mfu is not None:
        figures.append(KeyFigure(value=format_frac(estimate.mfu), label="MFU"))
    return figures


def _facts(estimate: StepEstimate) -> Facts:
    low, high = format_ns(estimate.range.low_ns), format_ns(estimate.range.high_ns)
    between = "nothing varied" if low == high else f"{low} to {high} depending on unknowns"
    pairs = {
        "step": f"{format_ns(estimate.step_ns)}, {between}",
        "speed": f"{estimate.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, "
        f"{estimate.tokens_per_step:,} tokens a step",
        "MFU, HFU": f"{format_frac(estimate.mfu)}, {format_frac(estimate.hfu)}",
    }
    if estimate.bubble_ns:
        share = format_frac(estimate.bubble_ns / estimate.step_ns)
        pairs["pipeline bubble"] = f"{format_ns(estimate.bubble_ns)}, {share} of the step"
    return Facts(title="Speed", pairs=pairs)


def _kernels(estimate: StepEstimate) -> Table:
    columns = [
        c.word("bound_by", "bound by", KERNEL_BOUNDS, of=0),
        c.ms("duration_ns", "ms", of=1),
        c.frac("step_frac", "of the step", of=lambda row: row[1] / estimate.step_ns),
        c.bar("step_frac", of=lambda row: row[1] / estimate.step_ns),
    ]
    rows = sorted(estimate.kernels_ns.items(), key=lambda item: -item[1])
    return c.table("kernels", "What the compute stream's kernels are bound by", columns, rows)
