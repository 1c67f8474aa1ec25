"""FSDP's collectives in the ledger that the set-up explains: units, dtypes, mesh, micro-batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from statistics import median

from fsdp2prof.analyzers.ledger.book import Book, Remedy, Said, by_layer
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.analyzers.wording import named_layer
from fsdp2prof.labels import is_root
from fsdp2prof.manifest import ParamGroupInfo
from fsdp2prof.results.communication import GroupRow
from fsdp2prof.units import dtype_bytes, format_bytes, format_frac

__all__ = ["enter_setup", "is_kind", "worst_layer"]

_HALF = ("bfloat16", "float16")
_MANY_UNITS = 16
"""Parameter groups of a model from which on units of less than a mebibyte are called too fine."""
_FINE_PER_BLOCK = 3
"""Groups inside one numbered block from which on they are called so, too."""
_TINY_BYTES = 1 << 20
_LARGE_IN_ROOT = 0.1
"""Part of the root's parameters from which on one of them is named."""


def enter_setup(book: Book) -> None:
    """Enter the exposed communication that another set-up of FSDP would not have."""
    for rule in (
        _across_nodes,
        _every_micro_batch,
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
    """Shard groups over several hosts, where replicas of one host hold the same shards."""
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
    cost = sum(one.ns for one in mine)
    problem = (
        "The mesh shards across hosts and replicates inside them: all-gathers and reduce-scatters "
        "go over the "
        f"network, exposed for {book.per_step(cost)}, and only the smaller all-reduce stays on a host."
    )
    change = (
        "Turn the mesh: init_device_mesh(device, (hosts, ranks of a host), "
        "mesh_dim_names=(replicate, shard)), "
        "so that each host holds all shards."
    )
    book.enter(
        Said(
            id="mesh_across_nodes",
            cause="communication",
            title="sharding across hosts",
            problem=problem,
            remedy=Remedy(
                change=change, gain_ns=cost, reason="all of their exposed time; the all-reduce gets slower"
            ),
            confidence="medium",
            why_sure="hosts and groups are recorded, the speed inside a host is not",
        ),
        mine,
    )


def _every_micro_batch(book: Book) -> None:
    """Gradients that are reduced more than once for one update of the parameters."""
    times, known = _reductions(book, "reduce_scatter")
    if times < 2:
        return
    all_reduces, _ = _reductions(book, "all_reduce")
    mine = book.take("communication", is_kind("reduce_scatter"), (times - 1, times))
    if all_reduces == times:
        mine += book.take("communication", is_kind("all_reduce"), (times - 1, times))
    cost = sum(one.ns for one in mine)
    first = min(((row.rank, row.step) for row in book.rows("reduce_scatter")), default=(0, 0))
    sizes = [
        row.payload_bytes // row.count
        for row in book.rows("reduce_scatter")
        if (row.rank, row.step) == first and row.count and row.payload_bytes is not None
    ]
    problem = (
        f"Gradients are reduced {times} times a step{', once a micro-batch' if known else ''}: the "
        f"reductions before the last are exposed for {book.per_step(cost)}."
    )
    condition = "" if known else "If these are micro-batches of one update: "
    memory = f"; full gradients ({format_bytes(sum(sizes))}) then stay in memory" if sizes else ""
    change = (
        f"{condition}{'c' if condition else 'C'}all set_requires_gradient_sync(False) in all micro-batches "
        f"but the last{memory}."
    )
    remedy = Remedy(
        change=change,
        gain_ns=cost,
        reason="the exposed time of these reductions; adding gradients up costs some of it",
        memory_bytes=sum(sizes) or None,
        what_if="sync=last",
    )
    book.enter(
        Said(
            id="reduced_every_micro_batch",
            cause="communication",
            title="reducing gradients every micro-batch",
            problem=problem,
            remedy=remedy,
            fqn=worst_layer(mine),
            evidence={"reductions_per_step": times, "memory_bytes": sum(sizes) or None},
        ),
        mine,
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


def _resharded_needlessly(book: Book) -> None:
    """A layer whose forward ends last, or the root, gathered again as soon as backward begins."""
    again: set[str] = set()
    for rows in _by_rank_step(book.rows("all_gather")).values():
        forward = [row for row in rows if row.phase == "forward"]
        backward = [row for row in rows if row.phase == "backward"]
        inner = [row for row in backward if row.fqn is not None and not is_root(row.fqn)]
        for row in backward:
            last = bool(forward and inner) and row is inner[0] and row.fqn == forward[-1].fqn
            if row.fqn is not None and (is_root(row.fqn) or (last and book.on_device)):
                again.add(row.fqn)
    for fqn in sorted(again):
        again_gathered = is_kind("all_gather", "backward")
        mine = book.take("communication", partial(_of_layer, again_gathered, fqn))
        cost = sum(one.ns for one in mine)
        name = named_layer(fqn)
        if book.frac(cost) < book.thresholds.min_cost_frac:
            book.put_back(mine)
            continue
        remedy = Remedy(
            change=f"Keep {name} gathered: reshard_after_forward=False.",
            gain_ns=cost,
            reason="the exposed time of its second all-gather",
            what_if="reshard=default",
        )
        problem = (
            f"{name[0].upper()}{name[1:]} is resharded at the end of forward only to be gathered again as "
            f"backward begins: {book.per_step(cost)} of waiting."
        )
        title = f"gathering {name} twice"
        book.enter(
            Said(
                id="resharded_needlessly",
                cause="communication",
                title=title,
                problem=problem,
                remedy=remedy,
                fqn=fqn,
            ),
            mine,
        )


def _of_layer(wanted: Callable[[Charge], bool], fqn: str, charge: Charge) -> bool:
    return charge.fqn == fqn and wanted(charge)


def _by_rank_step(rows: Iterable[GroupRow]) -> dict[tuple[int, int], list[GroupRow]]:
    grouped: dict[tuple[int, int], list[GroupRow]] = defaultdict(list)
    for row in rows:
        grouped[row.rank, row.step].append(row)
    return grouped


def _too_fine(book: Book) -> None:
    """Many units that carry little: each pays the latency of a collective and FSDP's own work."""
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
    problem = (
        f"{len(fine)} units of {format_bytes(payload)} on average take "
        f"{count / book.rank_steps:.3g} collectives a step: latency, not bandwidth, sets their time, "
        f"{book.per_step(cost)}."
    )
    remedy = Remedy(
        change="Apply fully_shard to larger modules, or to several together: fully_shard([a, b]).",
        gain_ns=cost * (len(fine) - merged) / len(fine),
        reason=f"with {merged} units in place of {len(fine)}, if each takes as long as one does now",
    )
    book.enter(
        Said(
            id="wrapping_too_fine",
            cause="communication",
            title=f"{len(fine)} small FSDP units",
            problem=problem,
            remedy=remedy,
            confidence="medium",
            why_sure="the time of larger units is extrapolated",
            evidence={
                "collectives_per_step": int(count // book.rank_steps),
                "mean_payload_bytes": payload,
                "units": len(fine),
                "layers": sorted(fine)[:5],
            },
        ),
        [*mine, *copies],
    )


def _tiny_units(book: Book) -> set[str]:
    """Units of less than a mebibyte, where the manifest has many of them or several a block."""
    sizes: dict[str, int] = {}
    for row in book.rows("all_gather"):
        if row.count and row.payload_bytes is not None and row.fqn is not None and not is_root(row.fqn):
            sizes.setdefault(row.fqn, row.payload_bytes // row.count)
    tiny = {fqn for fqn, size in sizes.items() if size < _TINY_BYTES}
    if 2 * len(tiny) <= len(sizes):
        return set()
    blocks = Counter(".".join(_block(fqn)) for fqn in tiny)
    per_block = median(blocks.values()) if blocks else 0
    return (
        tiny
        if len(tiny) >= _MANY_UNITS
        or (per_block >= _FINE_PER_BLOCK and len(tiny) >= book.thresholds.small_count)
        else set()
    )


def _block(fqn: str) -> list[str]:
    """The beginning of a name up to its first number: the block that a module is in."""
    parts = fqn.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return parts[: number + 1]


def _below_the_knee(book: Book) -> set[str]:
    """Layers whose collectives are small, many, and slower than the bandwidth of larger ones."""
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


def _too_coarse(book: Book) -> None:
    """One unit with most parameters: nothing of the model can run while it is gathered."""
    shares = _payload_shares(book)
    if not shares:
        return
    fqn, (payload, share) = max(shares.items(), key=lambda item: item[1][1])
    root, alone = is_root(fqn), len(shares) == 1
    if share < (book.thresholds.root_frac if root else book.thresholds.coarse_frac):
        return
    ops = ("all_gather",) if root and not alone else ("all_gather", "reduce_scatter", "all_reduce")
    mine = book.take("communication", lambda one: one.fqn == fqn and one.op in ops)
    cost = sum(one.ns for one in mine)
    name = named_layer(fqn)
    if alone:
        problem = (
            f"All parameters ({format_bytes(payload)}) are in one FSDP unit, {name}, and are gathered "
            "together"
        )
        change = "Apply fully_shard to the blocks inside before the module around them."
        named, title = "wrapping_too_coarse", "one FSDP unit for the whole model"
    elif root:
        large = _large_in_root(book, fqn)
        inside = f": {', '.join(f'`{one}`' for one in large)}" if large else ""
        problem = (
            f"The root unit holds {format_frac(share)} of all parameters ({format_bytes(payload)}){inside}, "
            "which no fully_shard call wraps by itself"
        )
        change = f"Apply fully_shard to {_modules(large)} before the root."
        named, title = "root_holds_most", "a root unit that holds much of the model"
    else:
        problem = f"One unit, {name}, holds {format_frac(share)} of all parameters ({format_bytes(payload)})"
        change = (
            f"Apply fully_shard to the modules inside {name}, too: its blocks, or its large Linear layers."
            if _has_parts(book, fqn)
            else f"{name[0].upper()}{name[1:]} has no modules inside to wrap: gather it earlier "
            "(set_modules_to_forward_prefetch, set_modules_to_backward_prefetch on the blocks before it), or "
            "split it into several modules."
        )
        named, title = "wrapping_too_coarse", f"one large FSDP unit, {name}"
    exposed = book.per_step(cost)
    shown = (
        f"its collectives are exposed for {exposed}" if book.on_device else f"its collectives take {exposed}"
    )
    why = "" if book.on_device else " (on a CPU they are not hidden either way)"
    remedy = Remedy(
        change=change,
        gain_ns=cost if book.on_device else None,
        reason="all but the first unit's collectives can be hidden then"
        if book.on_device
        else "overlap cannot be measured on a CPU; less is gathered at a time",
        basis="bound" if book.on_device else "unknown",
    )
    book.enter(
        Said(
            id=named,
            cause="communication",
            title=title,
            problem=f"{problem}; {shown}{why}.",
            remedy=remedy,
            fqn=fqn,
            confidence="high" if book.on_device else "medium",
            why_sure="units and sizes are recorded",
            evidence={"payload_bytes": payload, "share_frac": share},
        ),
        mine,
    )


def _has_parts(book: Book, fqn: str) -> bool:
    """Whether a unit has several modules that could be units; unknown without a manifest is yes."""
    group = next((one for one in book.groups if one.fqn == fqn), None)
    if group is None:
        return True
    return len({one.fqn.rpartition(".")[0] for one in group.parameters}) > 1


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


def _has_more(book: Book, cost: int) -> bool:
    """Whether a change that costs no precision is told for more communication than this."""
    return any(one.told and one.cause == "communication" and one.total_ns >= cost for one in book.entries)


def _in_float32(book: Book) -> None:
    """Bytes that half precision would save: of reductions, or of everything."""
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
        if not cost:
            return
        included = "" if book.waits_known else " (waiting for other ranks included)"
        problem = (
            "Gradients are reduced in float32 while parameters are gathered in half precision: "
            "reduce-scatter "
            f"takes more time than all-gather{included}, and half of its bytes are exposed for "
            f"{book.per_step(cost)}."
        )
        change = "Set MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), if training stays stable with it."
        remedy = Remedy(
            change=change,
            gain_ns=cost,
            reason="half of the exposed reduce-scatter",
            what_if="reduce_dtype=bfloat16",
        )
        book.enter(
            Said(
                id="reduce_in_float32",
                cause="communication",
                title="reducing gradients in float32",
                problem=problem,
                remedy=remedy,
                fqn=worst_layer(mine),
                calm=_has_more(book, cost),
                confidence="medium",
                why_sure="time is taken to grow with bytes",
            ),
            mine,
        )
    elif single:
        mine = book.take("communication", lambda one: one.dtype == "float32", (1, 2))
        cost = sum(one.ns for one in mine)
        if not cost:
            return
        problem = (
            "Parameters are gathered and gradients reduced in float32; half of the bytes are exposed for "
            f"{book.per_step(cost)}."
        )
        change = (
            "Pass mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16) to fully_shard; shards "
            "stay float32."
        )
        remedy = Remedy(
            change=change, gain_ns=cost, reason="half of the exposed communication; products get faster, too"
        )
        book.enter(
            Said(
                id="parameters_in_float32",
                cause="communication",
                title="communication in float32",
                problem=problem,
                remedy=remedy,
                calm=_has_more(book, cost),
                confidence="medium",
                why_sure="time is taken to grow with bytes",
            ),
            mine,
        )


def worst_layer(charges: Sequence[Charge]) -> str | None:
    """Return the layer with most of some charges."""
    return by_layer(charges)[0][0] if charges else None
