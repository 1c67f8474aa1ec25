"""Work in the ledger: kernels that could be faster, evaluation, copies, recomputation, and the rest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from math import prod

from fsdp2prof.analyzers.findings import listed
from fsdp2prof.analyzers.layers import named_layer
from fsdp2prof.analyzers.ledger.book import ALL, Book, by_layer, main_layer, main_layers, worst_layer
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.analyzers.ledger.host_rules import RUNS_AUTOGRAD, UPDATING
from fsdp2prof.analyzers.ledger.thresholds import severity_of, worth_telling
from fsdp2prof.analyzers.recorded_groups import ignored_labels, repeated_units, untrained_units
from fsdp2prof.backends import SINGLE_PRECISION, moves_memory
from fsdp2prof.by_key import summed
from fsdp2prof.labels import qualified_fqn
from fsdp2prof.units import dtype_bytes, format_bytes, plural

_GIGA = 1e9
_GENERATES = re.compile(r"generat|rollout|(?<!per_)sampl(?!e_(?:error|loss|weight))|decod", re.IGNORECASE)
"""In the line or the function that runs forwards which a training needs."""
_SERIES = 4
"""Forwards without a backward in a step from which on they may be the training's own, as rollouts are."""
_ONCE = 1.1
"""Times the bytes of all trained parameters, up to which they are gathered once."""
_NESTED = 1.25
"""Times that operators of forward run again in backward, from which on checkpoints are called nested."""


def enter_untrained(book: Book) -> None:
    """Enter backward of units whose gradients no optimizer uses: a teacher that is not frozen."""
    units = {unit: names for one in book.manifests for unit, names in untrained_units(one).items()}
    mine = [
        one
        for cause in ("compute", "fsdp_copy", "host", "communication")
        for one in book.take(cause, partial(_is_untrained, units))
    ]
    names = list(dict.fromkeys(name for names in units.values() for name in names))
    if _is_worth_it(book, sum(one.ns for one in mine), mine):
        frozen = {
            qualified_fqn(group.fqn, group.root, one.root_count)
            for one in book.manifests
            for group in one.param_groups
            if not group.requires_grad
        }
        through = [one for one in mine if one.fqn in frozen]
        only = sum(one.ns for one in through) >= _HALF * sum(one.ns for one in mine)
        key = "backward_untrained/frozen" if only else "backward_untrained"
        book.enter(
            mine,
            key if names else "backward_untrained/inputs",
            {"parameters": len(names)},
            names=listed(names, 3),
            where=main_layers(through) or "frozen layers",
        )
    else:
        book.put_back(mine)


def _is_untrained(units: Collection[str], one: Charge) -> bool:
    return one.why == "untrained" or (
        one.cause == "communication"
        and one.fqn in units
        and (one.phase == "backward" or one.op == "reduce_scatter")
    )


def enter_repeated_forward(book: Book) -> None:
    """Enter forwards of frozen models whose inputs are those of the step before, in every step or in some."""
    repeated = [repeated_units(one) for one in book.manifests]
    units = {unit for one in repeated for unit in one}
    share = min((share for one in repeated for share in one.values()), default=0.0)
    mine = [
        one
        for cause in ("compute", "fsdp_copy", "host", "communication")
        for one in book.take(
            cause,
            lambda one: one.why == "repeated" or (one.cause == "communication" and one.fqn in units),
        )
    ]
    gain = share * sum(one.ns for one in mine)
    if _is_worth_it(book, gain, mine):
        key = "repeated_forward" if share == 1 else "repeated_forward/in_turn"
        book.enter(mine, key, {"repeated_frac": share}, gain_ns=gain, where=main_layers(mine))
    else:
        book.put_back(mine)


def enter_repeated_update(book: Book) -> None:
    """Enter the optimizer's matrix products if every rank computes all of them.

    This is the case if the optimizer gathers the model's matrices once, and issues nothing else that could
    exchange results. A rank of N that computes its share saves (N - 1) / N, minus a second exchange, in the
    proportion of the time without waiting for a core.
    """
    beside = [one for one in book.left("other_communication") if one.phase == "optimizer"]
    trained = sum(
        prod(one.global_shape) * (dtype_bytes(one.dtype) or 0)
        for group in book.groups
        for one in group.parameters
        if one.requires_grad
    )
    gathered = sum(one.bytes for one in beside) / book.rank_steps
    ranks = min((group.shard_world_size for group in book.groups), default=1)
    if not 0 < gathered <= _ONCE * trained or any(one.op != "all_gather" for one in beside if one.bytes):
        return
    mine = book.take("compute", lambda one: one.why == "update")
    own = sum(one.ns for one in mine)
    running = own / max(1, own + sum(one.ns for one in book.waiting_at(mine)))
    gain = own * (ranks - 1) / ranks - running * sum(one.ns for one in beside)
    if _is_worth_it(book, gain, mine):
        book.enter(mine, "repeated_update", gain_ns=gain, ranks=ranks, site=book.main_site(beside))
    else:
        book.put_back(mine)


def enter_work(book: Book) -> None:
    """Enter work outside the training itself, and all charges that no rule took."""
    _evaluation(book)
    _offload(book)
    _copies(book)
    _rest(book)


def _evaluation(book: Book) -> None:
    mine = book.take("evaluation")
    if not any(one.ns for one in mine):
        return
    forwards = sum(one.count for one in mine if one.op is None)
    windows = {(one.rank, one.step) for one in mine if one.op is None and one.count}
    steps = {step for _, step in windows}
    lines = summed((one.site or "", one.count if one.op is None else 0) for one in mine)
    site = max(filter(None, lines), key=lambda line: lines[line], default=None)
    each = forwards / max(1, len(windows))
    often = (
        "every step" if steps == book.traced else f"{len(steps)} of {plural(len(book.traced), 'traced step')}"
    )
    one_alone = round(each, 2) == 1
    needed = site is not None and _GENERATES.search(site) is not None
    generating = needed and each >= _SERIES
    gathers = sum(one.count for one in mine if one.op == "all_gather")
    gathered = gathers >= _HALF * forwards * max(1, len(book.groups))
    keep = gathered and each > 1 and any(group.reshard_after_forward for group in book.groups)
    rows, again = (sum(one.count for one in mine if one.why == why) for why in ("rows", "again"))
    gain = sum(one.ns for one in mine) * again / max(1, rows)
    prefix = again >= _HALF * rows > 0 and _is_worth_it(book, gain, mine)
    graph = any(one.why == "graph" for one in mine)
    bare = " under torch.no_grad() (it keeps a graph), and" if graph else ""
    extra = (
        f"Run the forward that no backward uses, called at {site}," if bare else f"Run the forward at {site}"
    )
    key = "forward_without_backward/generating" if generating else "forward_without_backward"
    gathering = sum(one.ns for one in mine if one.op == "all_gather") if generating and not prefix else ALL
    book.enter(
        mine,
        "forward_without_backward/prefix" if prefix else key if keep or generating else f"{key}/gathered",
        {"forwards_per_step": each, "steps": len(steps), "site": site},
        gain_ns=gain if prefix else gathering,
        calm=((needed or each >= _SERIES) and not gathered and not prefix)
        or (bool(steps) and steps <= _without_some_model(book)),
        run="forward runs" if one_alone else "forwards run",
        whose="its" if one_alone else "their",
        often=often,
        called=f", called at {site}" if site else " (evaluation, generation, or an output that is not used)",
        also=" Keep the model gathered meanwhile (set_reshard_after_forward(False))." if keep else "",
        where=(extra if site else "Evaluate") + bare,
    )


def _without_some_model(book: Book) -> set[int]:
    """Return the steps that reduce no gradient of a root which others reduce: models updated alternately.

    A model may run forward there for another one: a generator for its discriminator.
    """
    reduced: dict[int, set[str]] = {step.step: set() for rank in book.analysis.ranks for step in rank.steps}
    for row in book.rows("reduce_scatter"):
        root, of_several, _ = (row.fqn or "").partition(":")
        if of_several and row.count:
            reduced.setdefault(row.step, set()).add(root)
    roots = set().union(*reduced.values())
    return {step for step, some in reduced.items() if some and some != roots}


def _offload(book: Book) -> None:
    """Enter exposed copies between host and device: CPU offload, or the training's own."""
    offloads, mine = book.offloads, book.take("offload")
    size, count = sum(one.bytes for one in mine), sum(one.count for one in mine)
    pinned = all(group.offload_pin_memory for group in book.groups if group.offload)
    layers = [(fqn, ns) for fqn, ns in by_layer(mine) if fqn is not None]
    worst = (layers[0][0] if layers else None) if offloads else main_layer(mine)
    copying = sum(one.whole_ns or one.ns for one in mine if one.op is not None)
    speed = f" at {_rate(size / copying)} GB/s" if size and copying else ""
    amount = (
        f"{format_bytes(size // book.rank_steps)}{speed}" if size else f"{count / book.rank_steps:.3g} copies"
    )
    whose = f", most for {named_layer(worst)} ({book.per_step(layers[0][1])})" if worst is not None else ""
    updating = sum(one.ns for one in mine if one.why == UPDATING)
    offloading = "cpu_offload" if pinned else "cpu_offload/unpinned"
    if updating > _HALF * sum(one.ns for one in mine):
        offloading = "cpu_offload/update"
    needed, free = _room(book)
    room = f": with gradients and states they need {format_bytes(needed)} of the {format_bytes(free)} left"
    room = room if needed < free else " if they fit"
    named = [one.op for one in mine if one.op is not None]
    direct = bool(named) and all(_PINNED in name for name in named)
    in_front = sum(one.ns for one in mine if one.why == "in_front") >= _MOST * sum(one.ns for one in mine)
    of_batches = "host_copies/in_front" if in_front else "host_copies/pinned" if direct else "host_copies"
    book.enter(
        mine,
        offloading if offloads else of_batches,
        {
            "bytes_per_step": size // book.rank_steps,
            "bytes_per_s": size * _GIGA / copying if copying else None,
            "copies_per_step": count / book.rank_steps,
        },
        fqn=worst,
        calm=book.usual_frac(mine) < book.thresholds.min_cost_frac,
        amount=amount,
        whose=whose,
        updating=book.per_step(updating),
        memory_bytes=needed if offloads and needed < free else None,
        room=room,
    )


def _room(book: Book) -> tuple[int, int]:
    """Return the bytes of a rank's offloaded parameters, gradients and states, and those that its device has
    left at the peak of what is reserved; 0 if unknown."""
    one = next((one for one in book.manifests if one.param_groups), None)
    if one is None:
        return 0, 0
    shards = sum(
        prod(parameter.padded_local_shape)
        * (dtype_bytes(parameter.dtype) or 0)
        * (1 + parameter.requires_grad)
        for group in one.param_groups
        if group.offload
        for parameter in group.parameters
    )
    reserved = one.allocator.get("reserved_bytes.all.peak")
    whole = one.device.total_bytes
    free = 0 if whole is None or reserved is None else whole - reserved
    return shards + sum(optimizer.state_bytes for optimizer in one.optimizers), free


_PINNED = "Pinned"
"""In the name of a copy from or to memory that the device reads without the host's help (CUPTI)."""


def _rate(gigabytes: float) -> str:
    return f"{gigabytes:.1f}" if gigabytes >= 1 else f"{gigabytes:.2g}"


def _copies(book: Book) -> None:
    """Enter FSDP's copies between buffers and parameters: units that stay gathered save those of backward."""
    mine = book.take("fsdp_copy")
    again: dict[str, int] = {}
    for row in book.rows("all_gather"):
        if row.phase == "backward" and row.count and row.fqn is not None:
            again.setdefault(row.fqn, (row.payload_bytes or 0) // row.count)
    much = book.on_device and book.frac(sum(one.ns for one in mine)) >= book.thresholds.high_cost_frac
    book.enter(
        mine,
        "fsdp_copies",
        fqn=worst_layer(mine),
        gain_ns=sum(one.ns for one in mine if one.phase == "forward" and one.fqn in again),
        memory_bytes=sum(again.values()) or None,
        remedy=much,
        calm=not much,
    )


def _recompute(book: Book) -> None:
    """Enter recomputed forwards; those recomputed more than once have a remedy."""
    mine = book.take("recompute")
    ran, again = (
        sum(one.count for one in mine if one.why == "forwards" and one.phase == phase)
        for phase in ("forward", "backward")
    )
    times = again / ran if ran else 1.0
    if times < _NESTED:
        book.enter(mine, "recomputation")
        return
    gain = sum(one.ns for one in mine) * (times - 1) / times
    book.enter(mine, "nested_checkpoints", gain_ns=gain, times=times)


def _rest(book: Book) -> None:
    """Enter recomputation, launch latency, useful compute, and unexplained time."""
    _recompute(book)
    named = {"queued": "launch_latency", "unknown": "unknown_idle"}
    for cause in (*named, "compute"):
        mine = book.take(cause)
        book.enter(mine, named.get(cause, cause), fqn=worst_layer(mine))


_MUCH, _MOST = 0.3, 0.5
"""Part of compute from which on products without tensor cores are named whatever they gain, and memory-bound
kernels are."""
_TENSOR_CORES = 7 / 8
"""Part of products in float32 that tensor cores save at most in TF32, or in float16 on a V100: they are eight
times as fast (data sheets of A100 and V100)."""
_HALF_PRECISION = 15 / 16
"""The same in bfloat16, 15 to 16 times as fast (data sheets of A100 and H100)."""
_HALF = 0.5
_PARTS = 1_000_000
_NOTABLE = 1 / 3
"""Part of memory-bound kernels in one layer from which on it is named."""
_SAVED_BY_FLASH = 2 / 3
"""Part of attention's time that a fused kernel saves at least: it is 3 to 10 times as fast (FlashAttention-2,
section 4.1)."""
_STORED = 3 / 4
"""Part of products that are stored and then summed which a matrix product saves at least: it reads factors
and writes sums, each at most an eighth of what is written and read again."""
_APPLIED = 1 / 2
"""Part of the products for gradients of frozen weights that an adapter applied to activations saves: its own
products are thin, but read and write the activations several times more."""
_BLUESTEIN = 3 / 4
"""Part of such a Fourier transform that padding saves at least: Bluestein's algorithm makes two transforms
of at least twice the length."""
_OLD = re.compile(r"^(?:volta|turing)_")
"""Begins names of kernels of devices whose tensor cores take neither bfloat16 nor TF32 (cuBLAS)."""


def enter_kernels(book: Book) -> None:
    """Enter the compute of kernels that another setting would make faster."""
    _of_kind(book, "float64", "compute_in_float64" if book.on_device else "compute_in_float64/cpu", _HALF)
    _of_kind(book, "one_hot", "one_hot_products", 1)
    _padding(book)
    _ignored_labels(book)
    _of_kind(book, "unused_logits", "unused_logits", 1)
    _of_kind(book, "frozen_gradient", "frozen_gradients", _APPLIED)
    _all_experts(book)
    _masked_attention(book)
    _of_kind(book, "returned_weights", "attention_weights", _HALF)
    _of_kind(book, "contraction", "stored_products", _STORED)
    _of_kind(book, "distances", "stored_products/distances", _STORED)
    if not book.on_device:
        return
    _without_tensor_cores(book)
    if _computes_in_half(book):
        _of_kind(book, "attention_in_float32", "attention_in_float32", _TENSOR_CORES)
    _of_kind(book, "scores", "attention_scores", _SAVED_BY_FLASH)
    _of_kind(book, "bluestein", "fourier_lengths", _BLUESTEIN)
    _of_kind(book, "layout", "layout_conversions", 1)
    _of_kind(book, "unaligned", "unaligned_products", _HALF)
    _of_kind(book, "indexed", "indexed_gradients", 1)
    _of_kind(book, "sliced", "sliced_gradients", 1)
    _unfused(book)


def _computes_in_half(book: Book) -> bool:
    """Whether parameters are gathered in half precision, as far as that is known."""
    dtypes = {group.param_dtype or one.dtype for group in book.groups for one in group.parameters}
    return not dtypes or bool(dtypes & {"bfloat16", "float16"})


def _kernels(book: Book, kind: str, takes: Callable[[str], object]) -> tuple[list[Charge], float]:
    """Take the compute in kernels of a kind and return its part of all; without events, go by their names."""
    mine = book.take("compute", lambda one: one.why == kind)
    if mine:
        others = (one for _, one in book.booked if one.cause == "compute")
        whole = sum(one.ns for one in (*mine, *book.left("compute"), *others))
        return mine, sum(one.ns for one in mine) / max(1, whole)
    compute = [one for one in book.analysis.kernels if one.kind == "compute"]
    spent = sum(one.total_ns for one in compute if one.name and takes(one.name))
    part = spent / max(1, sum(one.total_ns for one in compute))
    return book.take("compute", part=(round(part * 1e9), 1_000_000_000)) if part else [], part


def _gain_ns(book: Book, mine: Iterable[Charge], saved: float) -> int:
    """Return the gain of saving a part of some compute.

    While the device waits for the host's launches, shorter kernels only make it idle longer: up to that
    time, by phase, they gain nothing.
    """
    idle, spent = Counter[tuple[int, int, str]](), Counter[tuple[int, int, str]]()
    for cause, one in book.booked:
        idle[one.rank, one.step, one.phase] += one.ns if cause == "host" and book.on_device else 0
    for one in mine:
        spent[one.rank, one.step, one.phase] += one.ns
    return sum(max(0, int(saved * ns) - idle[place]) for place, ns in spent.items())


def _is_worth_it(book: Book, gain_ns: float, mine: Sequence[Charge]) -> bool:
    """Whether a gain of some charges is worth a word, with that part of the waiting for their processor."""
    own = sum(one.ns for one in mine)
    whole = own + sum(one.ns for one in book.waiting_at(mine))
    part = book.frac(gain_ns * whole / own) if own else 0.0
    return worth_telling(severity_of(part, book.thresholds, book.on_device))


def _of_kind(book: Book, kind: str, key: str, saved: float) -> None:
    """Enter compute of one kind if another setting would save a worthwhile part of it."""
    mine = book.take("compute", lambda one: one.why == kind)
    gain = _gain_ns(book, mine, saved)
    if _is_worth_it(book, gain, mine):
        site = book.main_site(one for one in mine if not RUNS_AUTOGRAD.search(one.site or ""))
        book.enter(mine, key, {"site": site}, fqn=main_layer(mine), gain_ns=gain, where=main_layers(mine))
    else:
        book.put_back(mine)


def _ignored_labels(book: Book) -> None:
    """Enter the logits of all positions where the loss ignores most of their labels."""
    known = [labels for one in book.manifests if (labels := ignored_labels(one)) is not None]
    if not known:
        return
    share = sum(one.ignored_frac for one in known) / len(known)
    mine = book.take("compute", lambda one: one.why == "ignored")
    gain = _gain_ns(book, mine, share)
    if _is_worth_it(book, gain, mine):
        book.enter(mine, "ignored_labels", {"ignored_frac": share}, fqn=main_layer(mine), gain_ns=gain)
    else:
        book.put_back(mine)


def _padding(book: Book) -> None:
    """Enter the part of forward and backward that computes padding beyond the longest row of a batch."""
    shares = [share for one in book.manifests for share in one.padding if share is not None]
    share = min(shares, default=0.0)
    if not share:
        return
    mine = book.take(
        "compute",
        lambda one: one.phase in ("forward", "backward") and one.why in (None, "memory"),
        part=(round(share * _PARTS), _PARTS),
    )
    if _is_worth_it(book, sum(one.ns for one in mine), mine):
        book.enter(mine, "padding", {"padded_frac": share})
    else:
        book.put_back(mine)


def _all_experts(book: Book) -> None:
    """Enter experts that compute all tokens, though their router chooses some of them for each token."""
    counts = summed((one.why, one.count) for one in book.left("compute") if not one.ns)
    experts, chosen = counts["all_experts"], counts["chosen"]
    book.take("compute", lambda one: one.why == "chosen")
    mine = book.take("compute", lambda one: one.why == "all_experts")
    gain = _gain_ns(book, mine, (experts - chosen) / experts) if experts else 0
    if _is_worth_it(book, gain, mine):
        each = experts // max(1, sum(1 for one in mine if not one.ns))
        book.enter(
            mine,
            "all_experts",
            {"experts": each, "chosen": each * chosen // experts},
            fqn=main_layer(mine),
            gain_ns=gain,
            where=main_layers(mine),
        )
    else:
        book.put_back(mine)


def _masked_attention(book: Book) -> None:
    """Enter attention that computes pairs which its mask hides: as many as the recorder counted, or half."""
    masks = [
        one
        for manifest in book.manifests
        for one in manifest.unsharded or ()
        if one.dtype == "bool" and one.true_frac is not None
    ]
    seen = max((one.true_frac or 0.0 for one in masks), default=None)
    mine = book.take("compute", lambda one: one.why == "masked")
    gain = _gain_ns(book, mine, _HALF if seen is None else 1 - seen)
    if _is_worth_it(book, gain, mine):
        book.enter(
            mine,
            "masked_attention",
            {"masked_frac": None if seen is None else 1 - seen},
            fqn=main_layer(mine),
            gain_ns=gain,
            basis=None if seen is None else "bound",
            known=seen is not None,
            where=main_layers(mine),
        )
    else:
        book.put_back(mine)


def _without_tensor_cores(book: Book) -> None:
    mine, part = _kernels(book, "float32", SINGLE_PRECISION.search)
    old = any(_OLD.search(one.name or "") for one in book.analysis.kernels)
    gain = _gain_ns(book, mine, _TENSOR_CORES if old else _HALF_PRECISION)
    if part < _MUCH and not _is_worth_it(book, gain, mine):
        book.put_back(mine)
        return
    key = "float32_without_tensor_cores"
    book.enter(mine, f"{key}/old" if old else key, {"compute_frac": part}, fqn=main_layer(mine), gain_ns=gain)


def _unfused(book: Book) -> None:
    """Enter memory-bound kernels where they take most of compute, with where most of them run."""
    mine, part = _kernels(book, "memory", moves_memory)
    gain = _gain_ns(book, mine, _HALF)
    if part < _MOST or not _is_worth_it(book, gain, mine):
        book.put_back(mine)
        return
    outside = [one for one in mine if one.fqn is None and one.phase != "optimizer"]
    all_compute = [*mine, *book.left("compute")]
    labelled = any(one.fqn for one in all_compute) and any(one.phase == "backward" for one in all_compute)
    beside = labelled and sum(one.ns for one in outside) >= _MOST * sum(one.ns for one in mine)
    site = book.main_site(outside) if beside else None
    looped = [one for one in mine if one.site is not None and one.phase in ("forward", "backward")]
    if sum(one.ns for one in looped) >= _MOST * sum(one.ns for one in mine):
        site = book.main_site(looped)
        book.enter(
            mine,
            "memory_bound_kernels/loop",
            {"compute_frac": part, "site": site},
            fqn=main_layer(mine),
            gain_ns=gain,
        )
        return
    worst, there = next((one for one in by_layer(mine) if one[0] is not None), (None, 0))
    worst = worst if there >= _NOTABLE * sum(one.ns for one in mine) else None
    key = "memory_bound_kernels"
    book.enter(
        mine,
        f"{key}/loss" if beside else f"{key}/root" if worst == "" else key,
        {"compute_frac": part, "site": site},
        fqn=worst,
        gain_ns=gain,
        seen=f", at {site}" if site else "",
        spent=book.per_step(there),
    )
