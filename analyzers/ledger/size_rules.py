"""Sizes of FSDP units in the ledger: many that carry little, or one with most of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from statistics import median

from fsdp2prof.analyzers.layers import block_of
from fsdp2prof.analyzers.ledger.book import Book
from fsdp2prof.labels import is_root
from fsdp2prof.manifest import ParamGroupInfo
from fsdp2prof.units import dtype_bytes

_MANY_UNITS = 16
"""Parameter groups of a model from which on units of less than a mebibyte are called too fine."""
_FINE_PER_BLOCK = 3
"""Number of groups inside one numbered block from which this also applies."""
_TINY_BYTES = 1 << 20
_LARGE_IN_ROOT = 0.1
"""Part of the root's parameters from which on one of them is named."""
_LARGE_UNIT = 1.5
"""Times the mean share of a unit from which on one of a few is larger than the others."""


def too_fine(book: Book) -> None:
    """Enter many small units: each pays the latency of a collective and FSDP's own work."""
    fine = _tiny_units(book) or _below_the_knee(book)
    if not fine:
        return
    mine = book.take("communication", lambda one: one.fqn in fine)
    copies = [] if book.on_device else book.take("fsdp_copy", lambda one: one.fqn in fine)
    cost = sum(one.ns for one in [*mine, *copies])
    rows = [
        row
        for op in ("all_gather", "reduce_scatter")
        for row in book.rows(op)
        if row.fqn in fine and row.count
    ]
    count = sum(row.count for row in rows)
    known = [row for row in rows if row.payload_bytes is not None]
    payload = sum(row.payload_bytes or 0 for row in known) // max(1, sum(row.count for row in known))
    merged = max(1, min(len(fine) // 4, 8))
    book.enter(
        [*mine, *copies],
        "wrapping_too_fine",
        {
            "collectives_per_step": int(count // book.rank_steps),
            "mean_payload_bytes": payload,
            "units": len(fine),
            "layers": sorted(fine)[:5],
        },
        gain_ns=cost * (len(fine) - merged) / len(fine),
        collectives=count / book.rank_steps,
        merged=merged,
    )


def _tiny_units(book: Book) -> set[str]:
    """Return units below one mebibyte, where there are many of them or several in a block."""
    sizes: dict[str, int] = {}
    for row in book.rows("all_gather"):
        if row.count and row.payload_bytes is not None and row.fqn is not None and not is_root(row.fqn):
            sizes.setdefault(row.fqn, row.payload_bytes // row.count)
    tiny = {fqn for fqn, size in sizes.items() if size < _TINY_BYTES}
    if 2 * len(tiny) <= len(sizes):
        return set()
    blocks = Counter(block_of(fqn) for fqn in tiny)
    per_block = median(blocks.values()) if blocks else 0
    return (
        tiny
        if len(tiny) >= _MANY_UNITS
        or (per_block >= _FINE_PER_BLOCK and len(tiny) >= book.thresholds.small_count)
        else set()
    )


def _below_the_knee(book: Book) -> set[str]:
    """Return layers with many small collectives, slower than the bandwidth of larger ones."""
    limits = book.thresholds
    slow = {
        (row.op, row.process_group, row.dtype, row.payload_bytes)
        for row in book.analysis.bandwidth
        if row.payload_bytes < limits.small_payload_bytes
        and min(row.of_best_frac or 1.0, row.of_peak_frac or 1.0) < limits.knee_frac
    }
    rows = [
        row
        for row in [*book.rows("all_gather"), *book.rows("reduce_scatter")]
        if row.payload_bytes is not None
        and row.count  # 0 where only the time of another step's is in this one
        and (row.op, row.process_group, row.dtype, row.payload_bytes // row.count) in slow
    ]
    layers = {row.fqn for row in rows if row.fqn is not None}
    count = sum(row.count for row in rows)
    many = count and count >= limits.small_count * book.rank_steps and len(layers) >= limits.small_count
    return layers if many and book.on_device else set()


def too_coarse(book: Book) -> None:
    """Enter one unit with most parameters: no layer can run while it is gathered."""
    shares = _payload_shares(book)
    if not shares:
        return
    fqn, (payload, share) = max(shares.items(), key=lambda item: item[1][1])
    root, alone = is_root(fqn), len(shares) == 1
    least = book.thresholds.root_frac if root else book.thresholds.coarse_frac
    if share < (least if root or alone else max(least, _LARGE_UNIT / len(shares))):
        return
    ops = ("all_gather",) if root and not alone else ("all_gather", "reduce_scatter", "all_reduce")
    mine = book.take("communication", lambda one: one.fqn == fqn and one.op in ops)
    cost = sum(one.ns for one in mine)
    parts = _parts(book, fqn)
    key, large = "wrapping_too_coarse", _large_in_root(book, fqn) if root else []
    if alone:
        key = "wrapping_too_coarse/alone"
    elif root:
        key = "root_holds_most"
    elif parts == 1:
        key = "wrapping_too_coarse/one_module"
    exposed, gain = book.per_step(cost), book.hideable_ns(mine)
    book.enter(
        mine,
        key,
        {"payload_bytes": payload, "share_frac": share},
        fqn=fqn,
        gain_ns=(gain * (parts - 1) / parts if parts > 1 else gain) if book.on_device else None,
        basis="bound" if book.on_device else "unknown",
        calm=parts == 1 and not root and not book.on_device,
        known=book.on_device,
        exposed=f"its collectives are exposed for {exposed}"
        if book.on_device
        else f"its collectives take {exposed} (on a CPU they are not hidden either way)",
        why="overlap cannot be measured on a CPU"
        if not book.on_device
        else "compute of the same phase can hide no more"
        + (f", and the first of {parts} units stays exposed" if parts > 1 else ""),
        inside=f": {', '.join(f'`{one}`' for one in large)}" if large else "",
        modules=_modules(large),
    )


def _parts(book: Book, fqn: str) -> int:
    """Count the blocks, or else the modules, of a unit that could be units; 0 without a manifest."""
    group = next((one for one in book.groups if one.fqn == fqn), None)
    modules = {one.fqn.rpartition(".")[0] for one in group.parameters} if group else set()
    blocks = {block_of(one) for one in modules}
    return len(blocks) if len(blocks) > 1 else len(modules)


def _payload_shares(book: Book) -> dict[str, tuple[int, float]]:
    """Layer -> payload of one forward all-gather and its share of all layers'."""
    payloads: dict[str, int] = {}
    for row in book.rows("all_gather"):
        if row.phase == "forward" and row.count and row.payload_bytes is not None and row.fqn is not None:
            payloads.setdefault(row.fqn, row.payload_bytes // row.count)
    total = sum(payloads.values())
    return {fqn: (payload, payload / total) for fqn, payload in payloads.items()} if total else {}


def _large_in_root(book: Book, fqn: str) -> list[str]:
    """Modules of the root's own large parameters, the largest first."""
    group = next((one for one in book.groups if is_root(one.fqn) or one.fqn == fqn), None)
    if group is None:
        return []
    sizes = _module_sizes(group)
    whole = sum(sizes.values())
    return [
        name
        for name, size in sorted(sizes.items(), key=lambda item: -item[1])
        if size >= _LARGE_IN_ROOT * whole
    ][:4]


def _module_sizes(group: ParamGroupInfo) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for one in group.parameters:
        module = one.fqn.rpartition(".")[0]
        if module:
            sizes[module] += prod(one.global_shape) * (dtype_bytes(one.dtype) or 0)
    return dict(sizes)


def _modules(names: Sequence[str]) -> str:
    """Name modules, or the usual ones where the run does not say."""
    shown = [f"`{name}`" for name in names]
    if not shown:
        return "its large modules (usually the embedding and the head)"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
