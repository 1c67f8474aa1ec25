"""FSDP's collectives in the ledger that the set-up explains: mesh, micro-batches, resharding, dtypes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod

from fsdp2prof.analyzers.layers import named_layer
from fsdp2prof.analyzers.ledger.book import Book, worst_layer
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.analyzers.ledger.size_rules import too_coarse, too_fine
from fsdp2prof.labels import is_root, qualified_fqn
from fsdp2prof.results.communication import GroupRow
from fsdp2prof.units import dtype_bytes, format_bytes, plural

_HALF = ("bfloat16", "float16")
_MANY_BATCHES = 8
"""Micro-batches of a step from which on gathering parameters once for all of them is proposed."""


def enter_setup(book: Book) -> None:
    """Enter the exposed communication that another set-up of FSDP would not have."""
    for rule in (
        _across_nodes,
        _every_micro_batch,
        _gathered_repeatedly,
        _gathered_every_micro_batch,
        _resharded_needlessly,
        too_fine,
        too_coarse,
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
        if not book.on_device:
            mine += book.take("fsdp_copy", lambda one: one.phase == "backward", (times - 1, times))
        book.enter(mine, "reduced_every_micro_batch/backwards", {"reductions_per_step": times})
        return
    book.enter(
        mine,
        "reduced_every_micro_batch" if known else "reduced_every_micro_batch/unknown",
        {"reductions_per_step": times, "memory_bytes": size},
        memory_bytes=size,
        memory="" if size is None else f"; full gradients ({format_bytes(size)}) then stay in memory",
    )


def _backwards_of_one_forward(book: Book, times: int) -> bool:
    """Whether the recorder counts as many backwards as reductions, and no unit's forward as often."""
    return any(manifest.param_groups for manifest in book.manifests) and all(
        group.forwards == 1 and group.reductions == times
        for manifest in book.manifests
        for group in manifest.param_groups
        if group.requires_grad
    )


def _reductions(book: Book, op: str) -> tuple[int, bool]:
    """How often every layer's gradients are reduced in a step, and whether the run itself says so.

    An optimizer that calls a closure reduces once a call: those are evaluations of the loss at other
    parameters, not micro-batches.
    """
    seen = min((row.count for row in book.rows(op) if row.count), default=0)
    if any("LBFGS" in one.class_name for manifest in book.manifests for one in manifest.optimizers):
        return min(seen, 1), True
    told = [one.gradient_syncs for one in book.manifests if one.param_groups]
    batches = [one.micro_batches for one in book.manifests if one.param_groups and one.micro_batches]
    if any(syncs is not None for syncs in told):
        return min([seen, *(syncs for syncs in told if syncs is not None), *batches]), True
    return seen, False


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
    names = f"{units[0].upper()}{units[1:]} {'is' if len(found) == 1 else 'are'}"
    book.enter(
        mine,
        "gathered_repeatedly",
        {"gathers": gathers, "micro_batches": passes, "units": len(found)},
        fqn=fqn,
        name=units,
        Name=names,
        needed=needed,
        names=", ".join(named_layer(one) for *_, one in found[:4]),
    )


def _gathered_every_micro_batch(book: Book) -> None:
    """Enter units that are gathered again in each of many micro-batches, where once is enough."""
    manifest = next((one for one in book.manifests if one.param_groups), None)
    if manifest is None:
        return
    batches = {one.root: one.micro_batches or 0 for one in manifest.roots}
    mine: list[Charge] = []
    found, added = [], 0
    for group in manifest.param_groups:
        passes, again = batches.get(group.root, 0), group.evaluations
        if passes < _MANY_BATCHES or group.gathers is None or again is None or group.gathers - again < passes:
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
    if book.frac(sum(one.ns for one in mine)) < book.thresholds.min_cost_frac:
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
        name=units,
    )


def _resharded_needlessly(book: Book) -> None:
    """Enter the last layer or the root where it is gathered again as soon as backward begins."""
    again: set[str] = set()
    for rows in _by_rank_step(book.rows("all_gather")).values():
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


def _by_rank_step(rows: Iterable[GroupRow]) -> dict[tuple[int, int], list[GroupRow]]:
    grouped: dict[tuple[int, int], list[GroupRow]] = defaultdict(list)
    for row in rows:
        grouped[row.rank, row.step].append(row)
    return grouped


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
