"""Document of a packing estimate: one row a way to make sequences."""

from __future__ import annotations

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Document, Facts, Section, Sentences
from fsdp2prof.reporters.documents import builds
from fsdp2prof.results.packing import PackingEstimate
from fsdp2prof.units import format_count
from fsdp2prof.vocabulary import packing_label


@builds(PackingEstimate)
def packing_estimate_document(estimate: PackingEstimate) -> Document:
    """Lay out a packing estimate: one row a way to make sequences."""
    columns = [
        c.text("name", "method", packing_label),
        c.count("sequences"),
        c.count("tokens"),
        c.count("padding_tokens", "padding"),
        c.frac("padding_frac", "of tokens"),
        c.bar("padding_frac"),
        c.count("cut_documents", "cut"),
        c.frac("useful_pairs_frac", "useful attention"),
    ]
    given = {
        "documents": format_count(estimate.documents),
        "tokens": format_count(estimate.tokens),
        "mean length": f"{estimate.mean:,.1f}",
        "longest": format_count(estimate.longest),
        "longer than a sequence": f"{format_count(estimate.truncated_documents)}, of which "
        f"{format_count(estimate.truncated_tokens)} tokens are cut off",
    }
    what = "What was estimated"
    assumed = Sentences(title="Assumptions", lines=estimate.assumptions, style="list")
    methods = c.table("methods", "By method", columns, estimate.methods)
    return Document(
        title="Packing",
        subtitle=f"sequences of {format_count(estimate.seq_len)} tokens, batches of {estimate.batch_size}",
        sections=[
            Section(anchor="methods", title="Padding", blocks=[methods]),
            Section(anchor="given", title=what, blocks=[Facts(title=what, pairs=given), assumed]),
        ],
    )
