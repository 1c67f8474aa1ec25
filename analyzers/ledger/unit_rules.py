"""FSDP's collectives in the ledger that the set-up explains: mesh, micro-batches, sizes of units, dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from statistics import median

from fsdp2prof.analyzers.layers import block_of, named_layer
from fsdp2prof.analyzers.ledger.book import Book, worst_layer
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.analyzers.recorded_groups import forwards_of_a_backward
from fsdp2prof.by_key import grouped
from fsdp2prof.labels import is_root, qualified_fqn
from fsdp2prof.manifest import ParamGroupInfo
from fsdp2prof.units import dtype_bytes, format_bytes, plural

_HALF = ("bfloat16", "float16")
_MANY_BATCHES = 8
"""Micro-batches of a step from which on gathering parameters once for all of them is proposed; of fewer only
where it costs much on a device: on a CPU nothing hides a gather."""


def enter_setup(book: Book) -> None:
    """Enter the exposed communication that another set-up of FSDP would not have."""
    for rule in (
        _across_nodes,
        _every_micro_batch,
        _gathered_repeatedly,
        _gathered_every_micro_batch,
        _resharded_needlessly,
        _too_fine,
        _too_coarse,
        _in_float32,
    ):
        rule(book)


def is_kind(op: str, phase: str | None = None) -> Callable[[Charge], bool]:
    """Match charges of one kind of collective, of one phase or all."""
    return lambda one: one.op == op and (phase is None or one.phase == phase)


def _across_nodes(book: Book) -> None:
    """Enter shard groups that span hosts although the replicas of a host hold the same shards."""
    hosts = {one.rank: one.host for one in book.manifests}

    def spread(name: str | None, groups: Mapping[str, Sequence[int]]) -> int:
        ranks = groups.get(name or "", ())
        return len({hosts.get(rank, "") for rank in ranks})

    crossing, inside = 0, 0
    for manifest in book.manifests:
        groups = {group.name: group.ranks for group in manifest.process_groups}
        for one in manifest.param_groups:
            if one.shard_world_size > 1 and one.replicate_world_size > 1:
                crossing += spread(one.shard_group, groups) > 1
                inside += spread(one.all_reduce_group, groups) == 1
    if not crossing or crossing != inside:
        return
    mine = book.take("communication", lambda one: one.op in ("all_gather", "reduce_scatter"))
    book.enter(mine, "mesh_across_nodes")


def _every_micro_batch(book: Book) -> None:
    """Enter gradients that are reduced more than once for one update of the parameters."""
    times, known = _reductions(book, "reduce_scatter")
    if times < 2:
        _every_micro_batch_of_some(book)
        return
    all_reduces, _ = _reductions(book, "all_reduce")
    mine = book.take("communication", is_kind("reduce_scatter"), (times - 1, times))
    if all_reduces == times:
        mine += book.take("communication", is_kind("all_reduce"), (times - 1, times))
    first = min(((row.rank, row.step) for row in book.rows("reduce_scatter")), default=(0, 0))
    sizes = [
        row.payload_bytes // row.count
        for row in book.rows("reduce_scatter")
        if (row.rank, row.step) == first and row.count and row.payload_bytes is not None
    ]
    size = sum(sizes) or None
    if _backwards_of_one_forward(book, times):
        mine += book.take("communication", is_kind("all_gather", "backward"), (times - 1, times))
        for cause in ("compute",) if book.on_device else ("compute", "fsdp_copy"):
            mine += book.take(cause, lambda one: one.phase == "backward", (times - 1, times))
        book.enter(mine, "reduced_every_micro_batch/backwards", {"reductions_per_step": times})
        return
    book.enter(
        mine,
        "reduced_every_micro_batch" if known else "reduced_every_micro_batch/unknown",
        {"reductions_per_step": times, "memory_bytes": size},
        memory_bytes=size,
        memory="" if size is None else f"; full gradients ({format_bytes(size)}) then stay in memory",
    )


def _every_micro_batch_of_some(book: Book) -> None:
    """Enter units that reduce in every micro-batch while others of their root do not: only the latter were
    told to wait."""
    manifest = next((one for one in book.manifests if one.param_groups), None)
    if manifest is None or _updates(book):
        return
    counted = {one.root: one.micro_batches or 0 for one in manifest.roots}
    batches = {root: passes for root, passes in counted.items() if passes > 1}
    trained = [
        one
        for one in manifest.param_groups
        if one.requires_grad and one.root in batches and one.forwards == batches[one.root]
    ]
    waiting = {one.root for one in trained if 0 < (one.reductions or 0) < batches[one.root]}
    units = [one for one in trained if one.root in waiting and one.reductions == batches[one.root]]
    mine: list[Charge] = []
    size = 0
    for group in units:
        fqn, passes = qualified_fqn(group.fqn, group.root, manifest.root_count), batches[group.root]
        of_unit = partial(_of_layer, is_kind("reduce_scatter"), fqn)
        mine += book.take("communication", of_unit, (passes - 1, passes))
        size += sum(prod(one.global_shape) * (dtype_bytes(one.dtype) or 0) for one in group.parameters)
    if units:
        book.enter(
            mine,
            "reduced_every_micro_batch/some",
            {"reductions_per_step": batches[units[0].root], "units": len(units), "memory_bytes": size},
            memory_bytes=size,
            name=plural(len(units), "unit"),
            memory=f"; full gradients ({format_bytes(size)}) then stay in memory",
        )


def _backwards_of_one_forward(book: Book, times: int) -> bool:
    """Whether the recorder counts as many backwards as reductions, and no unit has as many forwards."""
    return any(manifest.param_groups for manifest in book.manifests) and all(
        group.forwards == 1 and group.reductions == times
        for manifest in book.manifests
        for group in manifest.param_groups
        if group.requires_grad
    )


def _reductions(book: Book, op: str) -> tuple[int, bool]:
    """Reductions of every layer's gradients per step, and whether the run itself states them.

    An optimizer that calls a closure reduces once per call, and sharpness-aware minimization in each of two
    passes: those are gradients at other parameters, not micro-batches.
    """
    seen = min((row.count for row in book.rows(op) if row.count), default=0)
    if any("LBFGS" in one.class_name for manifest in book.manifests for one in manifest.optimizers):
        return min(seen, 1), True
    told = [one.gradient_syncs for one in book.manifests if one.param_groups]
    batches = [one.micro_batches for one in book.manifests if one.param_groups and one.micro_batches]
    known = any(syncs is not None for syncs in told)
    reductions = min([seen, *(syncs for syncs in told if syncs is not None), *batches]) if known else seen
    return max(min(reductions, 1), reductions // (1 + _updates(book))), known


def _updates(book: Book) -> int:
    """Return how often the parameters change between the forwards of a step, on every rank."""
    each = [[root.updates or 0 for root in one.roots] for one in book.manifests if one.param_groups]
    return min((max(updates, default=0) for updates in each), default=0)


def _gathered_repeatedly(book: Book) -> None:
    """Enter units that run forward several times in a micro-batch and are gathered each time."""
    manifest = next((one for one in book.manifests if one.param_groups), None)
    if manifest is None:
        return
    batches = {one.root: one.micro_batches for one in manifest.roots}
    mine: list[Charge] = []
    found = []
    for group in manifest.param_groups:
        passes = batches.get(group.root)
        if not passes or group.gathers is None or group.evaluations is None or group.index:
            continue
        needed = 2 * passes + group.evaluations
        if group.gathers - needed < passes:
            continue
        fqn = qualified_fqn(group.fqn, group.root, manifest.root_count)
        part = group.gathers - needed, group.gathers
        mine += book.take("communication", partial(_of_layer, is_kind("all_gather"), fqn), part)
        found.append((group.gathers, needed, passes, fqn))
    if book.frac(sum(one.ns for one in mine)) < book.thresholds.min_cost_frac:
        book.put_back(mine)
        return
    gathers, needed, passes, fqn = max(found)
    units = named_layer(fqn) if len(found) == 1 else plural(len(found), "unit")
    forwards = forwards_of_a_backward(manifest)
    are = "is" if len(found) == 1 else "are"
    book.enter(
        mine,
        "gathered_repeatedly" if forwards < 2 else "gathered_repeatedly/forwards",
        {"gathers": gathers, "micro_batches": passes, "units": len(found)},
        fqn=fqn,
        name=units,
        are=are,
        Name=f"{units[0].upper()}{units[1:]} {are}",
        needed=needed,
        forwards=forwards,
        names=", ".join(named_layer(one) for *_, one in found[:4]),
    )


def _gathered_every_micro_batch(book: Book) -> None:
    """Enter units that are gathered again in each micro-batch, where once is enough."""
    manifest = next((one for one in book.manifests if one.param_groups), None)
    if manifest is None:
        return
    batches = {one.root: one.micro_batches or 0 for one in manifest.roots}
    mine: list[Charge] = []
    found, added = [], 0
    for group in manifest.param_groups:
        passes, again = batches.get(group.root, 0), group.evaluations
        if passes < 2 or group.gathers is None or again is None or group.gathers - again < passes:
            continue
        fqn = qualified_fqn(group.fqn, group.root, manifest.root_count)
        part = group.gathers - again - 1, group.gathers
        mine += book.take("communication", partial(_of_layer, is_kind("all_gather"), fqn), part)
        found.append((group.gathers, passes, fqn))
        added += sum(
            (prod(one.global_shape) - prod(one.local_shape))
            * (dtype_bytes(group.param_dtype or one.dtype) or 0)
            for one in group.parameters
        )
    many = any(passes >= _MANY_BATCHES for _, passes, _ in found)
    least = book.thresholds.min_cost_frac if many else book.thresholds.high_cost_frac
    if book.frac(sum(one.ns for one in mine)) < least:
        book.put_back(mine)
        return
    gathers, passes, fqn = max(found)
    units = named_layer(fqn) if len(found) == 1 else plural(len(found), "unit")
    book.enter(
        mine,
        "gathered_every_micro_batch",
        {"gathers": gathers, "micro_batches": passes, "memory_bytes": added},
        fqn=worst_layer(mine),
        memory_bytes=added,
        calm=not many and not book.on_device,
        name=units,
    )


def _resharded_needlessly(book: Book) -> None:
    """Enter the last layer or the root if it is gathered again as soon as backward begins."""
    again: set[str] = set()
    for rows in grouped(((row.rank, row.step), row) for row in book.rows("all_gather")).values():
        forward = [row for row in rows if row.phase == "forward"]
        backward = [row for row in rows if row.phase == "backward"]
        inner = [row for row in backward if row.fqn is not None and not is_root(row.fqn)]
        for row in backward:
            last = bool(forward and inner) and row is inner[0] and row.fqn == forward[-1].fqn
            if row.fqn is not None and (is_root(row.fqn) or (last and book.on_device)):
                again.add(row.fqn)
    gathered = is_kind("all_gather", "backward")
    mine = book.take("communication", lambda one: one.fqn in again and gathered(one))
    if book.frac(sum(one.ns for one in mine)) < book.thresholds.min_cost_frac:
        book.put_back(mine)
        return
    names = ", ".join(named_layer(fqn) for fqn in sorted(again)[:4])
    name = f"{names[:1].upper()}{names[1:]}"
    book.enter(mine, "resharded_needlessly", fqn=worst_layer(mine), names=names, Names=name)


def _of_layer(wanted: Callable[[Charge], bool], fqn: str, charge: Charge) -> bool:
    return charge.fqn == fqn and wanted(charge)


def _has_more(book: Book, cost: int) -> bool:
    """Whether a reported change without loss of precision covers more communication than this."""
    return any(one.told and one.cause == "communication" and one.total_ns >= cost for one in book.entries)


def _in_float32(book: Book) -> None:
    """Enter the bytes that half precision would save: of reductions, or of everything."""
    if not book.on_device:
        return
    half = {row.fqn for row in book.rows("all_gather") if row.dtype in _HALF}
    wide = [row for row in book.rows("reduce_scatter") if row.dtype == "float32" and row.fqn in half]
    gathers = book.rows("all_gather")
    single = bool(gathers) and all(row.dtype == "float32" for row in gathers)
    if wide:
        waited = {
            op: sum(row.wait_ns for row in book.analysis.cross_rank.groups if row.op == op)
            for op in ("all_gather", "reduce_scatter")
        }
        spent = sum(row.total_ns for row in wide) - waited["reduce_scatter"]
        if spent < sum(row.total_ns for row in gathers) - waited["all_gather"]:
            return
        layers = {row.fqn for row in wide}
        mine = book.take(
            "communication", lambda one: one.op == "reduce_scatter" and one.fqn in layers, (1, 2)
        )
        cost = sum(one.ns for one in mine)
        if cost:
            included = "" if book.waits_known else " (waiting for other ranks included)"
            calm = _has_more(book, cost)
            book.enter(mine, "reduce_in_float32", fqn=worst_layer(mine), calm=calm, included=included)
    elif single:
        mine = book.take("communication", lambda one: one.dtype == "float32", (1, 2))
        cost = sum(one.ns for one in mine)
        if cost:
            book.enter(mine, "parameters_in_float32", calm=_has_more(book, cost))


_MANY_UNITS = 16
"""Parameter groups of a model from which on units of less than a mebibyte are called too fine."""
_FINE_PER_BLOCK = 3
"""Number of groups inside one numbered block from which this also applies."""
_TINY_BYTES = 1 << 20
_LARGE_IN_ROOT = 0.1
"""Part of the root's parameters from which on one of them is named."""
_LARGE_UNIT = 1.5
"""Times the mean share of a unit from which on one of a few is larger than the others."""


def _too_fine(book: Book) -> None:
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
    """Return units below one mebibyte, if there are many of them or several in a block."""
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


_STAGE_GROWTH = 6
"""How many times the parameters of the stage before a stage has at most: four where channels double."""


def _too_coarse(book: Book) -> None:
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
    together = len(fqn.split(", ")) > 1  # the script shards these modules as one
    whole = alone and _blocks(book, fqn) < 2 if root else parts == 1 or together or _is_a_stage(fqn, shares)
    book.enter(
        mine,
        key,
        {"payload_bytes": payload, "share_frac": share},
        fqn=fqn,
        gain_ns=(gain * (parts - 1) / parts if parts > 1 else gain) if book.on_device else None,
        basis="bound" if book.on_device else "unknown",
        calm=whole and not book.on_device,
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


def _is_a_stage(fqn: str, shares: Mapping[str, tuple[int, float]]) -> bool:
    """Whether a unit is an item of a list that has another one not much smaller."""
    parent, _, number = fqn.rpartition(".")
    items = (
        payload
        for one, (payload, _) in shares.items()
        if one != fqn and one.rpartition(".")[0] == parent and one.rpartition(".")[2].isdecimal()
    )
    return number.isdecimal() and max(items, default=0) * _STAGE_GROWTH >= shares[fqn][0]


def _parts(book: Book, fqn: str) -> int:
    """Count the blocks, or otherwise the modules, of a unit that could be units; 0 without a manifest."""
    group = next((one for one in book.groups if one.fqn == fqn), None)
    modules = {one.fqn.rpartition(".")[0] for one in group.parameters} if group else set()
    blocks = {block_of(one) for one in modules}
    return len(blocks) if len(blocks) > 1 else len(modules)


def _blocks(book: Book, fqn: str) -> int:
    """Count the numbered modules of a unit, such as ``layers.3``; without a manifest they may be there."""
    group = next((one for one in book.groups if one.fqn == fqn), None)
    if group is None:
        return 2
    blocks = {block_of(one.fqn.rpartition(".")[0]) for one in group.parameters}
    return sum(one.rpartition(".")[2].isdecimal() for one in blocks)


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
