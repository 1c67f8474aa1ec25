"""Documents of estimates: memory, communication, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2prof.reporters.document import Document, Facts, KeyFigure, Section, Sentences, Table
from fsdp2prof.reporters.formats import (
    bar_column,
    bytes_column,
    count_column,
    layer_column,
    number_column,
    show_bytes,
    show_category,
    show_dtype,
    show_frac,
    show_op,
    signed,
    text_column,
)
from fsdp2prof.results import (
    CheckpointEstimate,
    CommEstimate,
    CommRow,
    EstimatedMesh,
    EstimatedModel,
    EstimatedPolicy,
    MemoryEstimate,
)
from fsdp2prof.units import format_bytes, format_count, plural
from fsdp2prof.vocabulary import FITS, dtype_label, layer_name

__all__ = ["checkpoint_document", "comm_document", "memory_document"]

_LAYER_ROWS = 12


def memory_document(estimate: MemoryEstimate) -> Document:
    """Lay out a memory estimate: the peak, whether it fits, what fills it."""
    return Document(
        kind="memory_estimate",
        title=f"Memory of one rank of {estimate.model.name}",
        subtitle=_subtitle(estimate.model, estimate.mesh, estimate.policy, estimate.device),
        verdict=estimate.verdict,
        numbers=_memory_numbers(estimate),
        sections=[
            Section(
                anchor="advice",
                title="What to change",
                blocks=[Sentences(title="What to change", lines=estimate.advice, style="list")],
            ),
            Section(
                anchor="peak",
                title="What fills the peak",
                lead="Categories and layers sum exactly to the bytes in use at the peak.",
                blocks=[_category_table(estimate), _stream_table(estimate)],
            ),
            Section(anchor="steps", title="Step by step", blocks=[_step_table(estimate), _layer_table(estimate)]),
            _given(estimate.model, estimate.mesh, estimate.policy, estimate.assumptions),
        ],
        result=estimate,
    )


def comm_document(estimate: CommEstimate) -> Document:
    """Lay out a communication estimate: sums by operation, then layers."""
    total = estimate.total
    numbers = [
        KeyFigure(value=format_bytes(total.wire_bytes), label="sent by a rank in a step"),
        KeyFigure(value=format_bytes(total.payload_bytes), label="payload"),
        KeyFigure(value=format_count(total.count), label="collectives"),
    ]
    return Document(
        kind="comm_estimate",
        title="Communication of one rank in one step",
        subtitle=_subtitle(estimate.model, estimate.mesh, estimate.policy),
        verdict=estimate.verdict,
        numbers=numbers,
        sections=[
            Section(
                anchor="communication",
                title="Communication",
                lead="Payload is an all-gather's whole output, a reduce-scatter's whole input; wire is what "
                "the rank sends.",
                blocks=[_operation_table(estimate), _collective_table(estimate)],
            ),
            Section(
                anchor="advice",
                title="What would send less",
                blocks=[Sentences(title="What would send less", lines=estimate.advice, style="list")],
            ),
            _given(estimate.model, estimate.mesh, estimate.policy, estimate.assumptions),
        ],
        result=estimate,
        data=[_group_table(estimate)],
    )
