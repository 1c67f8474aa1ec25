"""FSDP2's order of events in a training step, stated once.

The estimates count these events, the search takes a block's collectives from them, recorded collectives are
placed among them, and replays move them. A test holds them against FSDP2 itself, event for event. Source:
``torch.distributed.fsdp._fully_shard`` (``_fsdp_state.py``, ``_fsdp_param_group.py``) of torch 2.7 to 2.13;
the functions below name the methods that they follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from fsdp2prof.vocabulary import AllReduce, Sync


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The ranks a collective runs over."""

    size: int = 1
    mesh_dim: str | None = None
    process_group: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledGroup:
    """What the schedule needs to know of one parameter group, and what the group sends."""

    fqn: str
    """Module name: ``a, b`` of several modules sharded together, empty for the root."""
    root: int = 0
    reshard: bool | int = True
    """``reshard_after_forward`` as it applies to this group: False, True, or a number of ranks."""
    has_backward: bool = True
    """Whether its output depends on a trainable parameter; of a module that runs several times: each time."""
    input_has_gradient: bool = False
    """Whether its first input depends on a trainable parameter of no group that ends before it begins."""
    forward_prefetch: tuple[str, ...] = ()
    """Modules whose groups it prefetches in forward."""
    backward_prefetch: tuple[str, ...] = ()
    """Modules whose groups it prefetches in backward; empty is FSDP's own choice."""
    unshard_in_backward: bool = True
    """False: backward needs none of its parameters and never gathers them."""
    gather_bytes: int = 0
    """Whole all-gather output, padding included."""
    gather_dtype: str = ""
    reduce_bytes: int = 0
    """Whole reduce-scatter input, padding included, trainable parameters only; 0 if all are frozen."""
    reduce_dtype: str = ""
    shard: Axis = field(default_factory=Axis)
    reduce: Axis = field(default_factory=Axis)
    replicate: Axis = field(default_factory=Axis)
    post_forward: Axis = field(default_factory=Axis)
    """Ranks of the backward all-gather when ``reshard`` is an integer."""


class Event(NamedTuple):
    """One event of a step, in the order in which the host issues them."""

    op: Literal["all_gather", "copy_out", "reshard", "reduce_scatter", "all_reduce"]
    """``copy_out``: compute waits for the all-gather, whose output is copied into the parameters."""
    group: ScheduledGroup
    phase: Literal["forward", "backward"]
    over_part: bool = False
    """An all-gather over the ranks of ``post_forward`` only."""

    @property
    def axis(self) -> Axis:
        """Ranks of a collective."""
        if self.op == "all_gather":
            return self.group.post_forward if self.over_part else self.group.shard
        return self.group.reduce if self.op == "reduce_scatter" else self.group.replicate

    @property
    def dtype(self) -> str:
        """Data type of a collective."""
        return self.group.gather_dtype if self.op == "all_gather" else self.group.reduce_dtype

    @property
    def payload_bytes(self) -> int:
        """Whole output of an all-gather, whole input of a reduction."""
        if self.op == "all_gather":
            return self.group.gather_bytes
        return self.group.reduce_bytes // (1 if self.op == "reduce_scatter" else self.group.shard.size)


def stays_gathered(policy: str, *, is_root: bool) -> bool:
    """Whether a group keeps its parameters after forward: all do, none, or (``default``) the root alone.

    ``FSDPState._lazy_init``: backward would gather the root's at once.
    """
    return policy == "never" or (policy == "default" and is_root)


def prefetched_by(position: int, ahead: int) -> int:
    """Return the position of the group whose hook gathers the one at ``position`` of a phase's order.

    By ``set_modules_to_forward_prefetch`` or ``..._backward_prefetch`` with the next ``ahead`` modules; the
    first modules of a phase have fewer before them. FSDP's own choice in backward is 1.
    """
    return max(0, position - ahead)


def steady_step(
    uses: Sequence[ScheduledGroup],
    *,
    micro_batches: int = 1,
    sync: Sync = "last",
    trains: bool = True,
    keep_between: bool = False,
    forwards: int = 1,
    all_reduce: AllReduce = "each",
) -> list[Event]:
    """Return the events of one step after the first, of one root's groups given in post-forward order.

    A group whose module runs several times before a backward is in ``uses`` as often: it is gathered for
    each use, and reduced once, since autograd accumulates in between.

    ``trains=False`` is a model run forward only, without gradients: nothing reshards what its forward kept.
    ``keep_between`` leaves parameters gathered after every backward but the last, as pipeline stages do.
    Of several ``forwards`` a micro-batch the last one is trained, the others run without gradients.
    ``all_reduce`` says which reductions go on over the replicas.
    """
    run = _Run(uses)
    for _ in range(2):  # the first step differs where parameters stay gathered for good
        run.events = []
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            for _ in range(forwards):
                run.forward()
            if trains:
                run.backward(
                    reshards=is_last or not keep_between,
                    reduces=is_last or sync == "each",
                    all_reduces=all_reduce == "each" or (all_reduce == "last" and is_last),
                )
    return run.events


class BlockCounts(NamedTuple):
    """How often a step gathers and reduces one of many equal blocks."""

    forward_gathers: int
    backward_gathers: int
    reductions: int


@lru_cache(maxsize=1 << 10)
def block_counts(
    micro_batches: int, sync: Sync, *, reshard: bool = True, keep_between: bool = False
) -> BlockCounts:
    """Count a block's collectives in a step; the arguments are those of :func:`steady_step`."""
    block = ScheduledGroup(fqn="block", reshard=reshard, reduce_bytes=1)
    events = steady_step([block], micro_batches=micro_batches, sync=sync, keep_between=keep_between)
    kinds = [(event.op, event.phase) for event in events]
    return BlockCounts(
        kinds.count(("all_gather", "forward")),
        kinds.count(("all_gather", "backward")),
        kinds.count(("reduce_scatter", "backward")),
    )


class _State(Enum):
    SHARDED = auto()
    POST_FORWARD = auto()
    UNSHARDED = auto()


@dataclass(slots=True)
class _Use:
    """One forward of a module that has groups, with those of the modules inside it."""

    groups: list[ScheduledGroup]
    parts: list[_Use]
    input_has_gradient: bool
    is_first: bool

    @property
    def trains(self) -> bool:
        return any(group.reduce_bytes for group in self.groups) or any(part.trains for part in self.parts)

    def walk(self) -> Iterator[_Use]:
        """Yield it and everything inside, in the order in which the forwards begin."""
        yield self
        for part in self.parts:
            yield from part.walk()


def _nested(uses: Sequence[ScheduledGroup]) -> list[_Use]:
    """Nest uses, given in the order in which forwards end; a module runs those that it contains."""
    found: list[_Use] = []
    seen: set[int] = set()
    for group in uses:
        is_first = id(group) not in seen
        seen.add(id(group))
        last = found[-1] if found else None
        beside = last is not None and last.groups[0].fqn == group.fqn
        if last is not None and beside and all(other is not group for other in last.groups):
            last.groups.append(group)
            continue
        cut = len(found)
        while cut and _contains(group.fqn, found[cut - 1].groups[0].fqn):
            cut -= 1
        parts = found[cut:]
        del found[cut:]
        has_gradient = group.input_has_gradient or any(use.trains for use in found)
        # a root is given the batch; what other modules are given depends on the parameters before them
        found.append(_Use([group], parts, group.fqn != "" and has_gradient, is_first))
    return found


def _contains(outer: str, inner: str) -> bool:
    if inner == outer or not outer:
        return inner != outer
    prefixes = tuple(f"{name}." for name in outer.split(", "))
    return any(name.startswith(prefixes) for name in inner.split(", "))


class _Run:
    """The states of one root's groups, through forwards and backwards."""

    def __init__(self, uses: Sequence[ScheduledGroup]) -> None:
        self.events: list[Event] = []
        self._uses = _nested(uses)
        self._modules: dict[str, list[ScheduledGroup]] = {}
        """Groups of each module, in the order of ``FSDPStateContext.all_states``."""
        for use in (inner for outer in self._uses for inner in outer.walk()):
            self._modules.setdefault(use.groups[0].fqn, use.groups)
        self._states = {id(group): _State.SHARDED for group in uses}
        self._waiting: set[int] = set()
        """All-gathers that were issued and not waited for."""
        self._order: list[ScheduledGroup] = []
        """``FSDPCommContext.post_forward_order``."""
        self._indices: dict[int, list[int]] = {id(group): [] for group in uses}
        self._began: set[int] = set()
        """Groups in the state ``PRE_BACKWARD``."""
        self._ended: set[int] = set()
        """Groups in the state ``POST_BACKWARD``."""
        self._accumulated: set[int] = set()

    def forward(self) -> None:
        """Run the model's forward."""
        for use in self._uses:
            self._forward(use)

    def backward(self, *, reshards: bool, reduces: bool, all_reduces: bool) -> None:
        """Run autograd, and at its end ``FSDPState._root_post_backward_final_callback``.

        Groups whose inputs have no gradient (the root's, for one) end there. ``reshards`` is also whether
        this backward is the last one (``set_is_last_backward``).
        """
        self._sync = reshards, reduces, all_reduces
        for use in reversed(self._uses):
            self._backward(use)
        for groups in self._modules.values():
            for group in reversed(groups):
                if id(group) not in self._ended:
                    self._post_backward(group, has_gradient=True)
        self._began.clear()
        self._ended.clear()
        if reshards:  # FSDPParamGroup.finalize_backward drops what was gathered in vain
            self._waiting.clear()
            self._order.clear()
            self._indices = {group: [] for group in self._indices}

    def _forward(self, use: _Use) -> None:
        """``FSDPState._pre_forward``, the modules inside, ``FSDPState._post_forward``."""
        for group in use.groups:
            self._unshard(group, "forward")
            self._wait(group, "forward")
        for name in use.groups[0].forward_prefetch:
            for group in self._modules.get(name, ()):
                self._unshard(group, "forward")
        for part in use.parts:
            self._forward(part)
        for group in use.groups:
            if group.reshard is not False:
                after = _State.SHARDED if group.reshard is True else _State.POST_FORWARD
                self._reshard(group, "forward", after)
            self._indices[id(group)].append(len(self._order))
            self._order.append(group)

    def _backward(self, use: _Use) -> None:
        """``FSDPState._pre_backward``, the modules inside in reverse, ``FSDPParamGroup.post_backward``.

        A module is taken to return a tensor of its own. Hooks on one that it returns from a module inside
        fire in the order of forward, so that the inner module would be gathered before it.
        """
        if use.groups[0].has_backward:
            for group in use.groups:
                self._pre_backward(group)
            for name in use.groups[0].backward_prefetch:
                for group in reversed(self._modules.get(name, ())):
                    self._unshard(group, "backward")
        for part in reversed(use.parts):
            self._backward(part)
        if use.groups[0].has_backward and use.input_has_gradient:
            for group in reversed(use.groups):
                # a gradient that several uses add to is there when the backward of the first use ends
                self._post_backward(group, has_gradient=use.is_first)

    def _pre_backward(self, group: ScheduledGroup) -> None:
        if id(group) in self._began:
            return
        self._began.add(id(group))
        self._ended.discard(id(group))
        self._unshard(group, "backward")
        self._wait(group, "backward")
        if not group.backward_prefetch:
            for target in self._next_in_backward(group):
                self._unshard(target, "backward")

    def _next_in_backward(self, group: ScheduledGroup) -> Iterator[ScheduledGroup]:
        """``FSDPParamGroup._backward_prefetch``: the group before it in forward.

        Of a module's several groups the second does it for all, and takes all those of the module before.
        """
        if not self._indices[id(group)]:
            return
        index = self._indices[id(group)].pop()
        beside = self._modules[group.fqn]
        if len(beside) == 1:
            yield from self._order[index - 1 : index]
        elif beside[1] is group:
            others = [one for one in self._order[index::-1] if one.fqn != group.fqn]
            for target in others:
                if target.fqn != others[0].fqn:
                    return
                yield target

    def _post_backward(self, group: ScheduledGroup, *, has_gradient: bool) -> None:
        reshards, reduces, all_reduces = self._sync
        self._began.discard(id(group))
        self._ended.add(id(group))
        if reshards:
            self._reshard(group, "backward", _State.SHARDED)
        if not group.reduce_bytes or not (has_gradient or id(group) in self._accumulated):
            return
        if not reduces:
            self._accumulated.add(id(group))
            return
        self._accumulated.discard(id(group))
        self.events.append(Event("reduce_scatter", group, "backward"))
        if all_reduces:
            self.events.append(Event("all_reduce", group, "backward"))

    def _unshard(self, group: ScheduledGroup, phase: Literal["forward", "backward"]) -> None:
        """``FSDPParamGroup.unshard``: nothing where parameters are there or on their way."""
        state = self._states[id(group)]
        if state is _State.UNSHARDED or id(group) in self._waiting:
            return
        if phase == "backward" and not group.unshard_in_backward:
            return
        self._waiting.add(id(group))
        self.events.append(Event("all_gather", group, phase, state is _State.POST_FORWARD))

    def _wait(self, group: ScheduledGroup, phase: Literal["forward", "backward"]) -> None:
        """``FSDPParamGroup.wait_for_unshard``."""
        if id(group) in self._waiting:
            self._waiting.remove(id(group))
            self._states[id(group)] = _State.UNSHARDED
            self.events.append(Event("copy_out", group, phase))

    def _reshard(self, group: ScheduledGroup, phase: Literal["forward", "backward"], after: _State) -> None:
        """``FSDPParamGroup.reshard``."""
        if self._states[id(group)] is not after:
            self._states[id(group)] = after
            self.events.append(Event("reshard", group, phase))
