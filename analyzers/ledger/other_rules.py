"""Collectives outside FSDP in the ledger: full_tensor(), barriers, metrics, object collectives, clipping."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod

from fsdp2prof.analyzers.findings import fill, wordings
from fsdp2prof.analyzers.layers import in_phase
from fsdp2prof.analyzers.ledger.book import ALL, Book
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.by_key import summed
from fsdp2prof.manifest import ProcessGroupInfo
from fsdp2prof.units import dtype_bytes, plural
from fsdp2prof.vocabulary import op_label

_MOST_OF_MODEL = 0.5
"""Fraction of the bytes gathered in forward from which gathers outside FSDP count as gathers of the whole
model."""
_SAVES = re.compile(
    r"(?:^|[ (._])(?:\w*save\w*|inner_func)\(\) \("
    r"| in (?:\w*save\w*|checkpoint|(?:write|store|dump|make|take|create|do|maybe)_\w*checkpoint\w*"
    r"|checkpoint_(?:model|state|step)\w*)\(\)\)?$"
)
"""Lines that save: they call such a function, or ``torch.distributed.checkpoint``'s wrapper, or are in one.
``torch.utils.checkpoint.checkpoint()`` and functions that train with it do not."""
_OF_A_SAVE = (
    "compute",
    "host_pause",
    "host",
    "garbage_collection",
    "other_communication",
    "sync",
    "uneven_ranks",
)
_TWICE = 1.5
"""All-gathers of each matrix in a step above which it is gathered twice."""
_SAME_SIZE, _FULL = 0.9, 1 << 10
"""Part of some all-reduces' bytes whose sizes are those of gradients, of this many bytes at least."""
_USUAL_COUNT, _USUAL_BYTES = 2, 64 << 10
"""Collectives a step and bytes of each that every training has: a gradient norm, a mean loss."""
_PART_OF_MODEL, _MODELS = 0.1, ("forward", "backward")
"""Part of some all-reduces' time in each of these phases, from which on they are the model's own."""
_OF_A_MESH = "mesh_"
"""Begins the description that a device mesh gives a process group, before the dimension's name."""
_LAUNCH_MISSING = "its launch is not in the file"


def enter_other_communication(book: Book) -> None:
    """Enter collectives that no FSDP module issued, by kind; those of another parallelism apart."""
    if _unlabelled(book):
        mine = book.take("other_communication")
        following = [one for one in mine if one.at_once and one.op == "all_reduce"]
        count, cost = sum(one.count for one in following) / book.rank_steps, sum(one.ns for one in following)
        if count < _UNBUCKETED or cost < _MOST_OF_MODEL * sum(one.ns for one in mine):
            book.enter(mine, "unattributed_communication")
        else:
            evidence = {"per_step": round(count) + 1}
            book.enter(mine, "unattributed_communication/unbucketed", evidence, gain_ns=cost)
        return
    _other_parallelism(book)
    _checkpoint(book)
    _of_model(book)
    for kind in dict.fromkeys(_kind(one) for one in book.left("other_communication")):
        mine = book.take("other_communication", lambda one, kind=kind: _kind(one) == kind)  # type: ignore[misc]
        _enter(book, kind, mine)


_UNBUCKETED = 32
"""All-reduces a step that directly follow another, from which on they are not those of buckets."""
_A_NUMBER, _MANY = 8, 10
"""Bytes of a number, and all-reduces of one a step that could be a single one."""


def enter_saving(book: Book) -> None:
    """Enter everything that lines which save a checkpoint took, or made others wait for."""
    mine = [one for cause in _OF_A_SAVE for one in book.take(cause, _is_of_a_save)]
    _enter_checkpoint(book, "checkpoint_in_step", mine)


def _is_of_a_save(charge: Charge) -> bool:
    outside = charge.phase == "other" or charge.late_rank is not None
    return outside and charge.site is not None and _SAVES.search(charge.site) is not None


def _enter_checkpoint(book: Book, key: str, mine: list[Charge]) -> None:
    site, traced = book.main_site(mine), book.traced
    saved = {one.step for one in mine if one.ns}
    often = "every step" if saved == traced else f"{len(saved)} of {plural(len(traced), 'traced step')}"
    book.enter(mine, key, {"site": site}, known=site, calm=book.is_seen_once(mine), often=often)


def _unlabelled(book: Book) -> bool:
    attribution = book.analysis.attribution
    return not attribution.attributed or _LAUNCH_MISSING in attribution.unattributed_reasons


def _other_parallelism(book: Book) -> None:
    """Enter collectives of tensor, context, expert or pipeline parallelism.

    Gloo's traces name no group: in such a training, collectives that layers issue are assumed to belong to
    that parallelism.
    """
    known = {group.name: group for manifest in book.manifests for group in manifest.process_groups}
    sharding = {
        name
        for group in (one for manifest in book.manifests for one in manifest.param_groups)
        for name in (
            group.shard_group,
            group.reduce_scatter_group,
            group.all_reduce_group,
            group.post_forward_group,
        )
        if name is not None
    }
    everyone = max((len(group.ranks) for group in known.values()), default=0)
    other = {
        name: dimension
        for name, group in known.items()
        if name not in sharding and len(group.ranks) < everyone
        if (dimension := group.mesh_dim or _across(group, [known[one] for one in sharding if one in known]))
    }
    mine = book.take(
        "other_communication",
        lambda one: one.group in other or (bool(other) and one.group is None and one.fqn is not None),
    )
    if len(book.training_alike) > 1:
        sent = book.take("other_communication", lambda one: one.op == "send_recv")
        book.enter(sent, "other_parallelism/stages")
    used = {one.group for one in mine} & other.keys() or other.keys()
    book.enter(mine, "other_parallelism", dimensions=", ".join(sorted({other[str(one)] for one in used})))


def _of_model(book: Book) -> None:
    """Enter all-to-alls that forward and backward both issue: tokens on their way to experts, or heads."""
    mine = book.take("other_communication", lambda one: one.op == "all_to_all")
    phases = {one.phase for one in mine if one.count}
    if phases >= {*_MODELS}:
        book.enter(mine, "other_parallelism/tokens")
    else:
        book.put_back(mine)


def _across(group: ProcessGroupInfo, sharding: Iterable[ProcessGroupInfo]) -> str | None:
    """Return the mesh dimension of a group that shares one rank at most with each group that FSDP uses."""
    if not group.desc.startswith(_OF_A_MESH) or len(group.ranks) < 2:
        return None
    apart = all(len({*group.ranks} & {*one.ranks}) < 2 for one in sharding)
    return group.desc.removeprefix(_OF_A_MESH) if apart else None


def _checkpoint(book: Book) -> None:
    """Enter a checkpoint of full tensors: most of the model is gathered and copied to the host."""
    model = sum(
        row.payload_bytes
        for row in book.rows("all_gather")
        if row.phase == "forward" and row.payload_bytes is not None
    )
    gathered = sum(one.bytes for one in book.left("other_communication") if _gathers_tensors(one))
    if not model or gathered < _MOST_OF_MODEL * model:
        return
    beside = [one for cause in ("sync", "host_pause") for one in book.left(cause) if one.phase == "other"]
    mine = book.take("other_communication", _gathers_tensors)
    if sum(one.ns for one in beside) < sum(one.ns for one in mine):
        book.put_back(mine)
        return
    for cause in ("sync", "host_pause"):
        mine += book.take(cause, lambda one: one.phase == "other")
    _enter_checkpoint(book, "checkpoint_in_step/gathered", mine)


def _gathers_tensors(charge: Charge) -> bool:
    """Whether a charge is an all-gather of tensors; ``all_gather_object`` gathers bytes."""
    return charge.op == "all_gather" and charge.dtype != "uint8"


def _kind(charge: Charge) -> str:
    """Return the kind of a collective outside FSDP, by its operator if that is more specific."""
    operator = charge.operator or ""
    if "barrier" in operator:
        return "barrier"
    return charge.op or "other"


def _of_gradients(book: Book, mine: list[Charge]) -> bool:
    """Whether all-reduces carry tensors that FSDP already reduced: shards of gradients, one by one or
    together."""
    manifest = next((one for one in book.manifests if one.param_groups), None)
    groups = [] if manifest is None else manifest.param_groups
    sizes = {
        prod(one.local_shape) * (dtype_bytes(group.reduce_dtype or one.dtype) or 0)
        for group in groups
        for one in group.parameters
        if one.requires_grad
        and group.reductions
        and (group.replicate_world_size == 1 or group.all_reductions)
    }
    same = [one for one in mine if one.each_bytes in sizes and one.each_bytes >= _FULL]
    part = sum(one.bytes for one in same) / max(1, sum(one.bytes for one in mine))
    return part >= _SAME_SIZE and len({one.each_bytes for one in same}) > 1


def _of_norms(book: Book, mine: list[Charge]) -> bool:
    """Whether all-gathers carry each matrix twice, as for the norms of a weight and of its gradient.

    An optimizer that needs whole matrices (Muon) gathers each once.
    """
    manifest = next((one for one in book.manifests if one.param_groups), None)
    groups = [] if manifest is None else manifest.param_groups
    matrices = [
        prod(one.global_shape) * (dtype_bytes(one.dtype) or 0)
        for group in groups
        for one in group.parameters
        if one.requires_grad and len(one.global_shape) > 1
    ]
    gathered = sum(one.count for one in mine if one.each_bytes in matrices) / book.rank_steps
    return bool(matrices) and gathered > _TWICE * len(matrices)


def _of_ignored(book: Book, mine: list[Charge], count: float) -> bool:
    """Whether all-reduces carry gradients of parameters that FSDP ignores, one by one."""
    manifest = next((one for one in book.manifests if one.param_groups), None)
    held = [] if manifest is None else manifest.unsharded or []
    ignored = [one.nbytes for one in held if one.kind == "parameter" and one.requires_grad]
    same = sum(one.count for one in mine if one.each_bytes in ignored)
    return (
        len(ignored) > 1
        and count >= _SAME_SIZE * len(ignored)
        and same >= _SAME_SIZE * sum(one.count for one in mine)
    )


def _own_count(book: Book) -> float:
    """Count FSDP's collectives per step: on gloo, a few small ones beside them cost only their latency."""
    return sum(one.count for one in book.left("communication")) / book.rank_steps


def _change(kind: str, site: str | None) -> str:
    """Return the remedy, specific to the torch function that the line calls if it names one."""
    texts = wordings("ledger")
    change = texts.get(f"outside_fsdp/{kind}", texts["outside_fsdp/other"])["change"]
    if site is None:
        return change
    called, calls, _ = site.partition("() (")
    called = "state_dict" if "state_dict" in called else called
    if calls and (at := texts.get(f"outside_fsdp/{called}()")):
        return fill(at["change"], {"site": site})
    return f"At {site}: {change[0].lower()}{change[1:]}"


def _enter(book: Book, kind: str, mine: list[Charge]) -> None:
    cost = sum(one.ns for one in mine)
    count = sum(one.count for one in mine) / book.rank_steps
    phases = summed((one.phase, one.ns) for one in mine)
    order = sorted(phases, key=lambda phase: -phases[phase])
    where = ", ".join(order)
    said = " and ".join(in_phase(phase) for phase in order)
    site = book.main_site(one for one in mine if one.phase == order[0])
    by = f" by {site}" if site else f" {said}"
    called = "barrier" if kind == "barrier" else op_label(kind)
    noun = f"{called}{'' if round(count, 2) == 1 else 's'}"
    more = ""
    size = sum(one.bytes for one in mine) / max(1, sum(one.count for one in mine))
    change = _change(kind, site)
    again = kind == "all_reduce" and _of_gradients(book, mine)
    by_optimizer = order[0] == "optimizer"
    norms = by_optimizer and kind == "all_gather" and _of_norms(book, mine)
    by_model = all(phases[phase] >= _PART_OF_MODEL * cost for phase in _MODELS)
    numbers = kind == "all_reduce" and size <= _A_NUMBER and count >= _MANY
    gain, saved = cost * (count - 1) / count if numbers and by_optimizer else ALL, "all of them"
    if again:
        more += " Their sizes are those of the gradients' shards, which FSDP has already reduced."
        change = f"Delete {site or 'these all-reduces'}: FSDP reduces gradients in backward."
    elif kind == "all_reduce" and _of_ignored(book, mine, count):
        more += (
            " Their sizes are those of the parameters that FSDP ignores, whose gradients it does not reduce."
        )
        change = fill(wordings("ledger")["outside_fsdp/ignored"]["change"], {"site": site})
    elif kind in ("all_gather", "reduce_scatter") and by_model:
        more += " The model's forward and backward issue them, as for DTensors that change their placement."
        change = _change("redistributed", site)
    elif kind == "all_reduce" and by_model:
        more += " The model's forward and backward issue them, as synchronized batch statistics do."
        change = fill(wordings("ledger")["outside_fsdp/in_model"]["change"], {"site": site})
        gain, saved = sum(one.ns for one in mine if one.at_once), "those that directly follow another"
    elif numbers and by_optimizer:
        more += " The optimizer issues them, one number each, as for a norm per parameter."
        change = fill(wordings("ledger")["outside_fsdp/norms"]["change"], {"site": site})
    elif kind == "broadcast" and count >= _MANY and size <= _USUAL_BYTES:
        change = fill(wordings("ledger")["outside_fsdp/broadcasts"]["change"], {"site": site})
    elif numbers:
        change = f"{wordings('ledger')['outside_fsdp/numbers']['change']} Or {change[0].lower()}{change[1:]}"
    elif norms:
        more += " The optimizer gathers each matrix twice, as for the norms of a weight and its gradient."
        change = fill(wordings("ledger")["outside_fsdp/whole"]["change"], {"site": site})
    elif by_optimizer:
        more += " The optimizer issues them, because it needs more than its shard of each parameter."
    few = not book.on_device and kind != "barrier" and count < _own_count(book)
    usual = (few or count <= _USUAL_COUNT) and size <= _USUAL_BYTES
    book.enter(
        mine,
        "outside_fsdp",
        {"per_step": count, "phases": where, "site": site},
        gain_ns=gain,
        remedy=(numbers or norms or not by_optimizer) and not usual,
        calm=book.is_seen_once(mine),
        known=site,
        kind=kind,
        called=called,
        issued=book.how_many(mine).format(noun),
        by=by,
        more=more,
        change=change,
        saved=saved,
    )
