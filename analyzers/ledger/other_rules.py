"""Collectives outside FSDP in the ledger: full_tensor(), barriers, metrics, object collectives, clipping."""

from __future__ import annotations

import re
from collections import defaultdict
from math import prod

from fsdp2prof.analyzers.ledger.book import Book, Remedy
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.units import dtype_bytes
from fsdp2prof.vocabulary import op_label

_MOST_OF_MODEL = 0.5
"""Part of the bytes that forward gathers, from which on gathers outside FSDP are of the whole model."""
_SAVES = re.compile(
    r"(?:^|[ (._])(?:\w*save\w*|inner_func)\(\) in "
    r"|\((?:\w*save\w*|checkpoint|(?:write|store|dump|make|take|create|do|maybe)_\w*checkpoint\w*"
    r"|checkpoint_(?:model|state|step)\w*)\)$"
)
"""Lines that save: they call such a function, or ``torch.distributed.checkpoint``'s wrapper, or are in one.
``torch.utils.checkpoint.checkpoint()`` and functions that train with it do not."""
_OF_A_SAVE = ("host_pause", "host", "garbage_collection", "other_communication", "sync", "uneven_ranks")
_SAME_SIZE, _FULL = 0.9, 1 << 10
"""Part of some all-reduces' bytes whose sizes are those of gradients, of this many bytes at least."""
_USUAL_COUNT, _USUAL_BYTES = 2, 64 << 10
"""Collectives a step and bytes of each that every training has: a gradient norm, a mean loss."""
_PART_OF_MODEL, _MODELS = 0.1, ("forward", "backward")
"""Part of some all-reduces' time in each of these phases, from which on they are the model's own."""
_LAUNCH_MISSING = "its launch is not in the file"


def enter_other_communication(book: Book) -> None:
    """Enter collectives that no FSDP module issued, by kind; those of another parallelism apart."""
    if _unlabelled(book):
        mine = book.take("other_communication")
        if mine:
            cost = book.per_step(sum(one.ns for one in mine))
            problem = f"Unattributed collectives are exposed for {cost}."
            title = "collectives without a layer"
            book.enter(
                mine,
                id="unattributed_communication",
                cause="other_communication",
                title=title,
                problem=problem,
                calm=True,
                confidence="low",
                why_sure="the trace does not name FSDP modules, or lacks launches",
            )
        return
    _other_parallelism(book)
    _checkpoint(book)
    for kind in dict.fromkeys(_kind(one) for one in book.left("other_communication")):
        mine = book.take("other_communication", lambda one, kind=kind: _kind(one) == kind)  # type: ignore[misc]
        _enter(book, kind, mine)


def enter_saving(book: Book) -> None:
    """Enter everything that lines which save a checkpoint took, or made others wait for."""
    mine = [one for cause in _OF_A_SAVE for one in book.take(cause, _is_of_a_save)]
    if not mine:
        return
    site = book.main_site(mine)
    _enter_checkpoint(
        book,
        mine,
        f"Each step saves a checkpoint at {site}: {book.per_step(sum(one.ns for one in mine))}.",
        "everything at this line, and the waiting of other ranks for it",
    )


def _is_of_a_save(charge: Charge) -> bool:
    outside = charge.phase == "other" or charge.late_rank is not None
    return outside and charge.site is not None and _SAVES.search(charge.site) is not None


def _enter_checkpoint(book: Book, mine: list[Charge], problem: str, reason: str) -> None:
    site = book.main_site(mine)
    book.enter(
        mine,
        id="checkpoint_in_step",
        cause="other_communication",
        title="a checkpoint in the step",
        problem=problem,
        remedy=Remedy(
            change="Save every few hundred steps, shards instead of full tensors "
            "(torch.distributed.checkpoint), and in the background (async_save).",
            reason=reason,
        ),
        confidence="high" if site else "medium",
        why_sure="the line is recorded"
        if site
        else "inferred from the gathered tensors and from where the host waits",
        evidence={"site": site},
    )


def _unlabelled(book: Book) -> bool:
    attribution = book.analysis.attribution
    return not attribution.attributed or _LAUNCH_MISSING in attribution.unattributed_reasons


def _other_parallelism(book: Book) -> None:
    """Groups of tensor, context, expert or pipeline parallelism: their collectives are the model's own."""
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
        name
        for name, group in known.items()
        if name not in sharding and group.mesh_dim is not None and len(group.ranks) < everyone
    }
    mine = book.take("other_communication", lambda one: one.group in other)
    if not mine:
        return
    names = sorted({str(known[one.group].mesh_dim) for one in mine if one.group in known})
    cost = book.per_step(sum(one.ns for one in mine))
    problem = f"Collectives of the mesh dimension {', '.join(names)}, beside FSDP's, are exposed for {cost}."
    book.enter(
        mine,
        id="other_parallelism",
        cause="other_communication",
        title=f"collectives of {', '.join(names)}",
        problem=problem,
        calm=True,
    )


def _checkpoint(book: Book) -> None:
    """Most of the model gathered outside FSDP and taken to the host: a checkpoint of full tensors."""
    model = sum(
        row.payload_bytes
        for row in book.rows("all_gather")
        if row.phase == "forward" and row.payload_bytes is not None
    )
    gathered = sum(one.bytes for one in book.left("other_communication") if one.op == "all_gather")
    if not model or gathered < _MOST_OF_MODEL * model:
        return
    beside = [one for cause in ("sync", "host_pause") for one in book.left(cause) if one.phase == "other"]
    mine = book.take("other_communication", lambda one: one.op == "all_gather")
    if sum(one.ns for one in beside) < sum(one.ns for one in mine):
        book.put_back(mine)
        return
    for cause in ("sync", "host_pause"):
        mine += book.take(cause, lambda one: one.phase == "other")
    _enter_checkpoint(
        book,
        mine,
        "The step gathers most of the model outside FSDP and copies it to the host, as a checkpoint of full "
        f"tensors does: {book.per_step(sum(one.ns for one in mine))}.",
        "all gathers, copies and pauses outside forward, backward and optimizer",
    )


def _kind(charge: Charge) -> str:
    """Kind of a collective outside FSDP: its operator's where that says more than the kind of transfer."""
    operator = charge.operator or ""
    if "barrier" in operator:
        return "barrier"
    return charge.op or "other"


_CALLS = {
    "full_tensor": "Call {call} every few hundred steps, or work on the sharded tensor (to_local(), DTensor "
    "operations).",
    "barrier": "Remove {call} from the step: collectives keep the ranks in order.",
    "all_gather_object": "Gather objects ({call}) every few hundred steps.",
    "all_reduce": "Call {call} less often, or put the values into one tensor and reduce that once.",
}
"""What to change, by the function that the script calls."""
_CHANGES = {
    "all_gather": "These are usually metrics, full_tensor(), a state dict, or all_gather_object(): "
    "do them every few hundred steps, or on the sharded tensors.",
    "all_reduce": "These are usually metrics, or norms taken parameter by parameter: log less often, put the "
    "values into one tensor and reduce that once.",
    "barrier": "Remove barrier() from the step: collectives keep the ranks in order.",
    "broadcast": "These are usually objects or seeds: send them once, before training.",
    "reduce_scatter": "These are redistributions of DTensors outside FSDP: keep tensors in one placement.",
}


def _of_gradients(book: Book, mine: list[Charge]) -> bool:
    """Whether all-reduces carry what FSDP reduced: shards of gradients, one by one or all together."""
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


def _own_count(book: Book) -> float:
    """Count FSDP's collectives a step: on gloo, a few small ones beside them cost what their latency is."""
    return sum(one.count for one in book.left("communication")) / book.rank_steps


def _at(site: str, change: str) -> str:
    """Return the change at a line that calls one of torch's functions, if it names one."""
    called, calls, _ = site.partition("() in ")
    if calls and called in _CALLS:
        return _CALLS[called].format(call=site)
    if calls and "state_dict" in called:
        return (
            f"Call {site} every few hundred steps, and save shards instead of full tensors "
            "(torch.distributed.checkpoint, async_save)."
        )
    return f"At {site}: {change[0].lower()}{change[1:]}"


def _enter(book: Book, kind: str, mine: list[Charge]) -> None:
    cost = sum(one.ns for one in mine)
    count = sum(one.count for one in mine) / book.rank_steps
    phases: dict[str, int] = defaultdict(int)
    for one in mine:
        phases[one.phase] += one.ns
    where = ", ".join(sorted(phases, key=lambda phase: -phases[phase]))
    site = book.main_site(mine)
    by = f" by {site}" if site else f" ({where})"
    called = "barrier" if kind == "barrier" else op_label(kind)
    noun = f"{called}{'' if round(count, 2) == 1 else 's'}"
    problem = f"{count:.3g} {noun} a step are issued outside FSDP{by} and take {book.per_step(cost)}."
    size = sum(one.bytes for one in mine) / max(1, sum(one.count for one in mine))
    change = _CHANGES.get(kind, "These are another parallelism, or code of the script: do them less often.")
    if site:
        change = _at(site, change)
    again = kind == "all_reduce" and _of_gradients(book, mine)
    if again:
        problem += " Their sizes are those of the gradients' shards, which FSDP has reduced already."
        change = f"Delete {site or 'these all-reduces'}: FSDP reduces gradients in backward."
    elif kind == "all_reduce" and all(phases[phase] >= _PART_OF_MODEL * cost for phase in _MODELS):
        problem += " The model's forward and backward issue them, as synchronized batch statistics do."
        change = (
            f"Send all values of a layer in one tensor{f' at {site}' if site else ''}, or use statistics of "
            "the rank's own batch (GroupNorm, BatchNorm without synchronization)."
        )
    by_optimizer = max(phases, key=lambda phase: phases[phase]) == "optimizer"
    if by_optimizer:
        problem += " The optimizer issues them: it needs more than a shard of each parameter."
    few = not book.on_device and count < _own_count(book)
    usual = (few or count <= _USUAL_COUNT) and size <= _USUAL_BYTES
    remedy = None
    if not by_optimizer and not usual:
        remedy = Remedy(change=change, reason="all of their exposed time")
    book.enter(
        mine,
        id=f"{kind}_outside_fsdp",
        cause="other_communication",
        title=f"{called}s outside FSDP",
        problem=problem,
        remedy=remedy,
        confidence="high" if site else "medium",
        why_sure="the line is recorded" if site else "the caller is not recorded",
        evidence={"per_step": count, "phases": where, "site": site},
    )
