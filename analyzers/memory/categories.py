"""What every allocation holds: the categories of :data:`fsdp2prof.vocabulary.CATEGORIES`.

The rules follow what FSDP2 allocates where (torch 2.13), in order; the first that holds decides:

==========================================  ==========================================================
known address                               what the manifest says: parameters, gradients, optimizer state,
                                            buffers; a word that this version does not know: unattributed
in ``all_gather``                           all_gather_buffer (the cast copy and the gathered output)
in ``copy_out``                             unsharded_parameter; temporary if freed in the same range
in ``post_forward`` (reshard to int k)      unsharded_parameter (the part this rank keeps)
in ``post_backward_reduce``                 sharded_gradient if it outlives the backward, else
                                            reduce_scatter_buffer
in ``post_backward_accumulate``             unsharded_gradient; so in ``post_backward_reshard`` without sync
in ``inputs_to_device``                     input
in the optimizer                            optimizer_state if it outlives the step, or was there before the
                                            history began, else temporary
elsewhere in backward                       activation if recomputed; unsharded_gradient if reduced,
                                            accumulated or outliving the backward; else temporary.
                                            Outside labels the next allocation of an optimizer or
                                            a forward ends the backward
in forward                                  activation if alive when the backward begins, else temporary
a cuBLAS workspace                          temporary: by its C++ frames; of those from before the history at
                                            most two that are as large: torch keeps one for the forward's
                                            thread and one for the backward's
outside of everything                       parameter_copy if it lasts, and with others of its time has the
                                            sizes of all shards, or of all parameters (an average of
                                            weights, a snapshot);
                                            input if a forward begins in its life; activation if a backward
                                            does (no label tells its forward); else temporary. What a
                                            constructor made there lasts, and its purpose is unknown:
                                            unattributed
no time known, no address known             unattributed, unless sizes prove what it is
                                            (:func:`place_shards`)
==========================================  ==========================================================
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import prod

import numpy as np

from fsdp2prof.analyzers.memory.attribution import Attributed
from fsdp2prof.backends import blas_workspace_bytes
from fsdp2prof.by_key import grouped
from fsdp2prof.labels import qualified_fqn
from fsdp2prof.manifest import RankManifest
from fsdp2prof.tables.allocations import GIVEN, AllocationTable
from fsdp2prof.tables.columns import NEVER, BoolArray, IntArray, Strings
from fsdp2prof.units import dtype_bytes
from fsdp2prof.vocabulary import CATEGORIES

_CATEGORIES = tuple(CATEGORIES)


def categorize(
    attributed: Attributed, manifest: RankManifest | None, ends: IntArray | int
) -> AllocationTable:
    """Return the allocations with category, and with the fqn of the storages in the manifest.

    ``ends`` is the end of the history, or per allocation the failure that ended its step: work that was
    cut short there is classified at that time.
    """
    allocations = attributed.allocations
    rules = _Rules(allocations)
    fqn = allocations.fqn
    if manifest is not None:
        fqn = _known_storages(rules, allocations, manifest)
    _fsdp_rules(rules, attributed, ends)
    if manifest is not None:
        _copy_rules(rules, allocations, manifest)
    op = _workspace_rule(rules, attributed, manifest)
    _lifetime_rules(rules, attributed)
    allocations = allocations.with_columns(category=rules.column(), fqn=fqn, op=op)
    return place_shards(allocations, attributed) if manifest is None else allocations


class _Rules:
    """Category codes, each set once: the first rule that holds decides."""

    def __init__(self, allocations: AllocationTable) -> None:
        self._codes = np.full(len(allocations), -1, dtype=np.int32)

    def put(self, category: str, rows: BoolArray) -> None:
        """Give a category to the rows that have none yet."""
        known = category if category in CATEGORIES else "unattributed"
        self._codes[rows & (self._codes < 0)] = _CATEGORIES.index(known)

    @property
    def open(self) -> BoolArray:
        """Mask of the rows that have no category yet."""
        return self._codes < 0

    def column(self) -> Strings:
        """Return the column; rows without a category are unattributed."""
        codes = np.where(self._codes < 0, _CATEGORIES.index("unattributed"), self._codes)
        return Strings(codes.astype(np.int32), _CATEGORIES)


def _known_storages(rules: _Rules, allocations: AllocationTable, manifest: RankManifest) -> Strings:
    """Apply the manifest's addresses; return the fqn column with the owners of the storages.

    An address names a storage of the beginning, or one of the end if its size agrees too. Of several at one
    address, the first listed is of the beginning.
    """
    known: dict[int, list[tuple[int | None, str, str]]] = {}
    for tensor in manifest.tensors:
        owner = qualified_fqn(tensor.fqn, tensor.root, manifest.root_count)
        known.setdefault(tensor.address, []).append((tensor.nbytes, tensor.category, owner))
    for group in manifest.param_groups:
        for parameter in group.parameters:
            if parameter.address is not None and parameter.address not in known:
                owner = qualified_fqn(group.fqn, group.root, manifest.root_count)
                known[parameter.address] = [(None, "sharded_parameter", owner)]
    fqn = allocations.fqn.to_list()
    first = allocations.alloc_order < 0
    candidate = np.flatnonzero(first | (allocations.free_order == NEVER))
    rows: dict[str, list[int]] = {}
    for row in candidate.tolist():
        listed = known.get(int(allocations.address[row]), [])
        fitting = [one for one in listed if one[0] == int(allocations.size[row])]
        if first[row] and listed:
            _, category, fqn[row] = (fitting or listed)[0]
        elif fitting:
            _, category, fqn[row] = fitting[-1]
        else:
            continue
        rows.setdefault(category, []).append(row)
    for category, chosen in rows.items():
        mask = np.zeros(len(allocations), dtype=np.bool_)
        mask[chosen] = True
        rules.put(category, mask)
    return Strings.intern(fqn)


def _fsdp_rules(rules: _Rules, attributed: Attributed, ends: IntArray | int) -> None:
    """Allocations that FSDP makes itself, by the label they are made in."""
    allocations, phases = attributed.allocations, attributed.phases
    doing = {
        name: allocations.activity.equals(name)
        for name in ("all_gather", "copy_out", "reshard", "reduce", "accumulate", "inputs_to_device")
    }
    at_once = attributed.alloc_row == attributed.free_row
    rules.put("all_gather_buffer", doing["all_gather"])
    rules.put("temporary", doing["copy_out"] & at_once)
    rules.put("unsharded_gradient", doing["reshard"] & allocations.phase.equals("backward"))
    rules.put("unsharded_parameter", doing["copy_out"] | doing["reshard"])
    # FSDP drops its last buffers right after the backward; what lives on into other work is a gradient.
    backward = allocations.phase.equals("backward")
    begins = phases.start_ns[phases.phase.matches(lambda name: name in ("forward", "optimizer"))]
    known = allocations.alloc_order >= 0
    kept = _outlives(allocations, known & ~backward) | (
        allocations.free_ns >= np.minimum(_next_time(begins, allocations.alloc_ns), ends)
    )
    # Where the work ends inside the backward nothing has had the time to live on. Then the gradient is what
    # came last in its range, after the reduce-scatter's input.
    done = _next_time(phases.end_ns[phases.activity.equals("final_wait")], allocations.alloc_ns)
    cut_short = (allocations.free_order == NEVER) & (done > ends)
    backend = allocations.op.matches(lambda name: name.startswith(GIVEN))  # gloo frees when it likes
    rules.put("reduce_scatter_buffer", doing["reduce"] & backend)
    rules.put("sharded_gradient", doing["reduce"] & np.where(cut_short, _last_of_row(attributed), kept))
    rules.put("reduce_scatter_buffer", doing["reduce"])
    rules.put("unsharded_gradient", doing["accumulate"])
    rules.put("input", doing["inputs_to_device"])
    rules.put("activation", backward & attributed.recomputed)
    reduced = attributed.freed_in(("reduce", "accumulate", "reshard"))
    rules.put("unsharded_gradient", backward & (reduced | (kept & ~cut_short)) & (attributed.alloc_row >= 0))


_NEARLY_ALL, _SEVERAL = 0.9, 4
"""Part of the shards' bytes, and number of shards, whose sizes make allocations a copy of the parameters."""


def _copy_rules(rules: _Rules, allocations: AllocationTable, manifest: RankManifest) -> None:
    """Find copies of the parameters that a script keeps, sharded or whole: made outside of training, between
    two forwards."""
    shards: Counter[int] = Counter()
    wholes: Counter[int] = Counter()
    padded: dict[int, int] = {}
    for one in (one for group in manifest.param_groups for one in group.parameters):
        item = dtype_bytes(one.dtype) or 0
        shards[prod(one.local_shape) * item] += 1
        wholes[prod(one.global_shape) * item] += 1
        padded[prod(one.padded_local_shape) * item] = prod(one.local_shape) * item
    _copies_of(rules, allocations, shards, padded | {size: size for size in shards})
    _copies_of(rules, allocations, wholes, {size: size for size in wholes})


def _copies_of(
    rules: _Rules, allocations: AllocationTable, shards: Counter[int], same: dict[int, int]
) -> None:
    """Find copies of tensors by their sizes; ``same`` are those of allocations, padded or not."""
    whole = sum(size * count for size, count in shards.items())
    if shards.total() < _SEVERAL or not whole:
        return
    first, forward = allocations.alloc_order < 0, allocations.phase.equals("forward")
    begins = ~first & forward
    lasting = first | (_is_outside(allocations) & _outlives(allocations, begins))
    rows = np.flatnonzero(rules.open & lasting & np.isin(allocations.size, list(same)))
    stretch = np.searchsorted(np.sort(allocations.alloc_order[begins]), allocations.alloc_order[rows])
    stretch[first[rows]] = -1
    for one in np.unique(stretch):
        mine = rows[stretch == one]
        sizes = Counter(same[size] for size in allocations.size[mine].tolist())
        copied = sum(size * min(count, shards[size]) for size, count in sizes.items())
        if copied >= _NEARLY_ALL * whole:
            mask = np.zeros(len(allocations), dtype=np.bool_)
            mask[mine] = True
            rules.put("parameter_copy", mask)


_WORKSPACE, _WORKSPACES = "cuBLAS (workspace)", 2


def _workspace_rule(rules: _Rules, attributed: Attributed, manifest: RankManifest | None) -> Strings:
    """Find cuBLAS workspaces, by stack or from before the history; returns the operators with these."""
    allocations = attributed.allocations
    found = attributed.workspace.copy()
    if manifest is not None and manifest.device.type == "cuda" and manifest.tensors_are_all:
        setting = manifest.environment.get("CUBLAS_WORKSPACE_CONFIG")
        size = blas_workspace_bytes(manifest.device.capability, setting)
        early = (allocations.alloc_order < 0) & (allocations.free_order == NEVER)
        found[np.flatnonzero(rules.open & early & (allocations.size == size))[:_WORKSPACES]] = True
    found &= rules.open
    rules.put("temporary", found)
    op = allocations.op.to_list()
    for row in np.flatnonzero(found).tolist():
        op[row] = _WORKSPACE
    return Strings.intern(op)


def _is_outside(allocations: AllocationTable) -> BoolArray:
    return ~allocations.phase.matches(lambda name: name in ("forward", "backward", "optimizer"))


def _lifetime_rules(rules: _Rules, attributed: Attributed) -> None:
    """Classify allocations of the model, the loss and the training loop, by their lifetime."""
    allocations = attributed.allocations
    known = allocations.alloc_order >= 0
    phase = {name: known & allocations.phase.equals(name) for name in ("forward", "backward", "optimizer")}
    rules.put("optimizer_state", phase["optimizer"] & _outlives(allocations, known & ~phase["optimizer"]))
    rules.put("optimizer_state", ~known & allocations.phase.equals("optimizer"))
    rules.put("temporary", phase["optimizer"])
    rules.put("activation", phase["forward"] & _outlives(allocations, phase["backward"]))
    unlabelled = phase["backward"] & (attributed.alloc_row < 0)
    rules.put("unsharded_gradient", unlabelled & _outlives_backward(allocations, phase))
    rules.put("temporary", phase["forward"] | phase["backward"])
    rules.put("unattributed", known & attributed.constructed & allocations.phase.equals("other"))
    if len(attributed.phases):
        rules.put("input", known & _outlives(allocations, phase["forward"]))
        rules.put("activation", known & _outlives(allocations, phase["backward"]))
        rules.put("temporary", known & (allocations.free_order != NEVER))


def _outlives(allocations: AllocationTable, events: BoolArray) -> BoolArray:
    """Mask of the allocations still alive at the next of the allocations ``events``, or at the very end."""
    orders = np.append(np.sort(allocations.alloc_order[events]), NEVER - 1)
    following = orders[np.searchsorted(orders[:-1], allocations.alloc_order, side="right")]
    return np.asarray(allocations.free_order > following)


def _outlives_backward(allocations: AllocationTable, phase: dict[str, BoolArray]) -> BoolArray:
    """Mask of the allocations alive at the next one of a forward or an optimizer, which must have come."""
    after = phase["forward"] | phase["optimizer"]
    last = int(allocations.alloc_order[after].max(initial=-1))
    return _outlives(allocations, after) & (allocations.alloc_order < last)


def _next_time(times: IntArray, after: IntArray) -> IntArray:
    """Return the first of ``times`` not before each time; ``NEVER`` if there is none."""
    ordered = np.append(np.sort(times), NEVER)
    return np.asarray(ordered[np.searchsorted(ordered[:-1], after)], dtype=np.int64)


def _last_of_row(attributed: Attributed) -> BoolArray:
    """Mask of the allocations that no other one of the same phase row follows."""
    row = attributed.alloc_row
    last = np.full(len(attributed.phases) + 1, -1, dtype=np.int64)
    np.maximum.at(last, row, np.arange(len(row)))
    return np.asarray((row >= 0) & (last[row] == np.arange(len(row))))


_LARGEST_RATIO = 2
"""An fp32 shard of one rank next to its bf16 unsharded parameter."""
_DISTINCT_SIZES, _PARAMETERS = 3, 10
"""Fewer sizes or parameters could agree by chance."""
_WITH_ADAM = 3


def place_shards(allocations: AllocationTable, attributed: Attributed) -> AllocationTable:
    """Give category and fqn to blocks from before the history that can only be parameters or Adam's states.

    Every parameter of ``n`` unsharded bytes has a shard of ``r * n`` bytes, with one ratio ``r`` for the
    whole model: ranks and dtypes are the same everywhere. If exactly one ratio turns the sizes of all
    unsharded parameters into sizes of blocks that were there before the history began, as often as each
    occurs, those are the shards; two more sets of the same sizes are Adam's states. Blocks of equal size are
    interchangeable, so layers and categories add up whichever block is whose. Parameters outlive the last
    step; without FSDP the gradients of one backward take their place with the ratio 1. Of the other blocks of
    these sizes, gradients of the step before are freed before that backward, and states that an optimizer
    replaces after it.
    """
    model = _first_unsharded(allocations, attributed)
    sharded = len(model) > 0
    if not sharded:
        model = _gradients_of_step(allocations)
    before = (allocations.alloc_order < 0) & allocations.category.equals("unattributed")
    lasting = allocations.free_order > _last_work(allocations)
    rows = np.flatnonzero(before & lasting)
    found = _ratio(allocations.size[model], allocations.size[rows])
    if found is None or not (sharded or found[0] == 1):
        return allocations
    ratio, copies = found
    categories = ["sharded_parameter" if sharded else "unsharded_parameter"]
    if copies == _WITH_ADAM:
        categories += ["optimizer_state", "optimizer_state"]
    category, fqn = allocations.category.to_list(), allocations.fqn.to_list()
    by_size = grouped((int(allocations.size[row]), row) for row in rows.tolist())
    for name in categories:
        for parameter in model.tolist():
            row = by_size[int(int(allocations.size[parameter]) * ratio)].pop(0)
            category[row], fqn[row] = name, allocations.fqn[parameter]
    if not sharded:
        backward = int(allocations.alloc_order[model].min())
        for row in np.flatnonzero(before & ~lasting & np.isin(allocations.size, allocations.size[model])):
            early = allocations.free_order[row] < backward
            category[row] = "unsharded_gradient" if early else "optimizer_state"
    codes = [_CATEGORIES.index(str(name)) for name in category]
    return allocations.with_columns(
        category=Strings(np.array(codes, dtype=np.int32), _CATEGORIES), fqn=Strings.intern(fqn)
    )


def _last_work(allocations: AllocationTable) -> int:
    """Order of the last allocation of a forward, a backward or an optimizer."""
    work = (allocations.alloc_order >= 0) & ~_is_outside(allocations)
    return int(allocations.alloc_order[work].max(initial=-1))


def _gradients_of_step(allocations: AllocationTable) -> IntArray:
    """Rows of the gradients outside FSDP that are alive when the optimizer first allocates."""
    steps = allocations.alloc_order[(allocations.alloc_order >= 0) & allocations.phase.equals("optimizer")]
    first = int(steps.min(initial=NEVER))
    alive = (allocations.alloc_order < first) & (allocations.free_order > first)
    return np.flatnonzero(alive & allocations.category.equals("unsharded_gradient"))


def _first_unsharded(allocations: AllocationTable, attributed: Attributed) -> IntArray:
    """Rows of the unsharded parameters of every module, from the first time it was unsharded."""
    copied = allocations.category.equals("unsharded_parameter") & allocations.activity.equals("copy_out")
    rows = np.flatnonzero(copied & (attributed.alloc_row >= 0))
    first: dict[int, int] = {}
    for fqn, phase_row in zip(
        allocations.fqn.codes[rows].tolist(), attributed.alloc_row[rows].tolist(), strict=True
    ):
        first.setdefault(fqn, phase_row)
    firsts = np.array([first[fqn] for fqn in allocations.fqn.codes[rows].tolist()], dtype=np.int64)
    return np.asarray(rows[attributed.alloc_row[rows] == firsts], dtype=np.int64)


def _ratio(unsharded: IntArray, before: IntArray) -> tuple[Fraction, int] | None:
    """Return the one ratio that fits and the number of whole sets there are; ``None`` if none or several."""
    sizes, blocks = Counter(unsharded.tolist()), Counter(before.tolist())
    if len(sizes) < _DISTINCT_SIZES or len(unsharded) < _PARAMETERS:
        return None
    largest = max(sizes)
    fits: list[tuple[Fraction, int]] = []
    for block in blocks:
        ratio = Fraction(block, largest)
        shards = {size * ratio: count for size, count in sizes.items()}
        if ratio > _LARGEST_RATIO or any(shard.denominator != 1 for shard in shards):
            continue
        copies = min(blocks[int(shard)] // count for shard, count in shards.items())
        if copies:
            fits.append((ratio, copies))
    return fits[0] if len(fits) == 1 else None
