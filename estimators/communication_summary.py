"""Totals of a step's collectives: by operation, with similar layers combined, and as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fsdp2prof.analyzers.layers import FOLD_FROM, families, family_name, in_phase, named_layer
from fsdp2prof.by_key import grouped
from fsdp2prof.results.estimate import (
    CommEstimate,
    CommRow,
    CommTotals,
    EstimatedMesh,
    EstimatedModel,
    EstimatedPolicy,
)
from fsdp2prof.units import dtype_bytes, format_bytes, format_frac
from fsdp2prof.vocabulary import op_label

_WORTH_NAMING = 0.001
"""Part of all wire bytes from which an operation is worth naming."""

_MODEL_PARALLEL = ("tp", "cp", "pp")
"""Mesh dimensions whose collectives move activations, whatever FSDP does."""


def summarise(
    rows: list[CommRow],
    *,
    model: EstimatedModel,
    mesh: EstimatedMesh,
    policy: EstimatedPolicy,
    assumptions: list[str],
) -> CommEstimate:
    """Assemble the result from its rows."""
    folded = fold_layers(rows)
    per_step = totals(rows)
    total = CommTotals(
        count=sum(one.count for one in per_step.values()),
        payload_bytes=sum(one.payload_bytes for one in per_step.values()),
        wire_bytes=sum(one.wire_bytes for one in per_step.values()),
        wire_frac=1.0 if any(one.wire_bytes for one in per_step.values()) else None,
    )
    advice = _advice(rows, policy)
    return CommEstimate(
        model=model,
        mesh=mesh,
        policy=policy,
        verdict=[*_verdict(total, per_step, folded), *advice[:1]],
        total=total,
        per_step=per_step,
        groups=rows,
        groups_folded=folded,
        advice=advice,
        assumptions=assumptions,
    )


def totals(rows: Iterable[CommRow]) -> dict[str, CommTotals]:
    """Sum rows by op."""
    alike = grouped((row.op, row) for row in rows)
    wire = sum(row.wire_bytes for same in alike.values() for row in same)
    return {
        op: CommTotals(
            count=sum(row.count for row in same),
            payload_bytes=sum(row.payload_bytes for row in same),
            wire_bytes=sum(row.wire_bytes for row in same),
            wire_frac=sum(row.wire_bytes for row in same) / wire if wire else None,
        )
        for op, same in alike.items()
    }


def fold_layers(rows: Sequence[CommRow]) -> list[CommRow]:
    """Fold layers of one model whose names differ in one number and that send the same; (no layer) last."""
    layers = grouped(((row.root, row.fqn), row) for row in rows)
    keys = list(layers)
    alike = families([(fqn, (root, *map(_what, layers[root, fqn]))) for root, fqn in keys])
    groups = [part for same in alike for part in ([same] if len(same) >= FOLD_FROM else [[i] for i in same])]
    groups.sort(key=lambda group: (keys[group[0]][1] is None, keys[group[0]][0], group[0]))
    return [row for group in groups for row in _summed([layers[keys[i]] for i in group])]


def _what(row: CommRow) -> CommRow:
    """A row without the name of its layer."""
    return replace(row, fqn=None)


def _summed(layers: Sequence[Sequence[CommRow]]) -> list[CommRow]:
    """Sum alike layers, row by row."""
    if len(layers) == 1:
        return list(layers[0])
    return [
        replace(
            same[0],
            fqn=family_name([row.fqn for row in same]),
            layers=len(same),
            count=sum(row.count for row in same),
            payload_bytes=sum(row.payload_bytes for row in same),
            wire_bytes=sum(row.wire_bytes for row in same),
        )
        for same in zip(*layers, strict=True)
    ]


def _verdict(total: CommTotals, per_step: dict[str, CommTotals], folded: Sequence[CommRow]) -> list[str]:
    if not total.wire_bytes:
        return ["There is no communication: every group has one rank."]
    parts = sorted(per_step.items(), key=lambda item: -item[1].wire_bytes)
    sent = [(op_label(op), format_frac(part.wire_frac)) for op, part in parts if _is_named(part)]
    most = max(folded, key=lambda row: row.wire_bytes)
    share = most.wire_bytes / total.wire_bytes
    part = "Most of it" if share > 1 / 2 else "The largest part"
    return [
        f"A rank sends {format_bytes(total.wire_bytes)} in a step: {', '.join(map(' '.join, sent))}.",
        f"{part} is the {op_label(most.op)} of {named_layer(most.fqn)} {in_phase(most.phase)}: "
        f"{format_bytes(most.wire_bytes)} ({format_frac(share)}).",
    ]


def _is_named(part: CommTotals) -> bool:
    return part.wire_frac is not None and part.wire_frac >= _WORTH_NAMING


def _advice(rows: Sequence[CommRow], policy: EstimatedPolicy) -> list[str]:
    """Changes that would send less, largest saving first; each on its own, and exact."""
    own = [row for row in rows if row.fqn is not None and row.mesh_dim not in _MODEL_PARALLEL]
    reduced = sum(row.wire_bytes for row in own if row.op in ("reduce_scatter", "all_reduce"))
    options = [
        _reduce_once(reduced, policy),
        _keep_gathered(own),
        _reduce_narrow(reduced, policy),
    ]
    return [text for saved, text in sorted(options, key=lambda option: -option[0]) if saved > 0]


def _reduce_once(reduced: int, policy: EstimatedPolicy) -> tuple[int, str]:
    if policy.sync != "each" or policy.grad_accum is None:
        return 0, ""
    saved = reduced * (policy.grad_accum - 1) // policy.grad_accum
    return saved, (
        f"Reducing gradients after the last of {policy.grad_accum} micro-batches (sync=last) saves "
        f"{format_bytes(saved)}, and keeps unsharded gradients in between."
    )


def _keep_gathered(own: Sequence[CommRow]) -> tuple[int, str]:
    """Return the saving of gathering a group once per backward, after which FSDP2 reshards it.

    A root without a backward (a frozen model) is never resharded: its groups stay gathered permanently.
    """
    passes: Counter[object] = Counter()
    for row in own:
        if row.phase == "backward":
            passes[row.root] = max(passes[row.root], row.count)
            if row.op == "all_gather":
                passes[row.root, row.fqn] = max(passes[row.root, row.fqn], row.count)
    saved = kept = 0
    for row in own:
        if row.op != "all_gather":
            continue
        saved += row.wire_bytes
        if row.phase == "forward":
            needed = min(row.count, passes[row.root, row.fqn] or passes[row.root])
            saved -= needed * row.wire_bytes // row.count
            kept += row.payload_bytes // row.count
    return saved, (
        f"Keeping parameters gathered from forward to backward (reshard=never) saves {format_bytes(saved)}, "
        f"and holds {format_bytes(kept)} of them."
    )


def _reduce_narrow(reduced: int, policy: EstimatedPolicy) -> tuple[int, str]:
    wide, narrow = (dtype_bytes(name or "") for name in (policy.reduce_dtype, policy.param_dtype))
    if wide is None or narrow is None or wide <= narrow:
        return 0, ""
    saved = reduced * (wide - narrow) // wide
    return saved, (
        f"Reducing gradients in {policy.param_dtype} (reduce_dtype) saves {format_bytes(saved)}, at the "
        "price of precision."
    )
