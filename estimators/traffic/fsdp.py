"""FSDP2's collectives of one training step, derived from its sharding states.

A group is sharded, unsharded, or (``reshard_after_forward=K``) sharded over K ranks. Whether an all-gather
happens depends on that state alone, so walking the groups through forward and backward counts every
collective exactly; prefetching changes when a group is gathered, and whether only for frozen groups that
backward would not have touched. Source: ``torch.distributed.fsdp._fully_shard`` of torch 2.6-2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from fsdp2prof.estimators.config.choices import Sync
from fsdp2prof.estimators.config.policy import dtype_bytes
from fsdp2prof.results.estimate import CommRow

__all__ = ["AllReduce", "Axis", "GroupTraffic", "Ledger", "reduce_unit", "walk_step"]

AllReduce = Literal["each", "last", "never"]
"""Every reduction of a step is all-reduced, or the last one, or none (``set_requires_all_reduce``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The ranks a collective runs over."""

    size: int
    mesh_dim: str | None
    process_group: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTraffic:
    """What one parameter group sends, whatever it was derived from."""

    root: int
    fqn: str
    gather_bytes: int
    """Whole all-gather output, padding included."""
    gather_dtype: str
    reduce_numel: int
    """Whole reduce-scatter input in elements, padding included, trainable parameters only."""
    reduce_dtype: str
    reshard: bool | int
    has_backward: bool
    """Whether its output depends on a trainable parameter."""
    shard: Axis
    reduce: Axis
    replicate: Axis
    post_forward: Axis
    """Ranks of the backward all-gather when ``reshard`` is an integer."""
    backward_prefetch: tuple[str, ...] | None = None
    """Groups it prefetches in backward; ``None`` is FSDP's own choice, the one before it in forward."""
    unshard_in_backward: bool = True
    """False: backward needs none of its parameters and never gathers them."""


@dataclass(slots=True)
class Ledger:
    """Collectives summed by row key, in order of first appearance."""

    rows: dict[tuple[object, ...], list[int]] = field(default_factory=dict)

    def add(
        self,
        *,
        root: int,
        fqn: str | None,
        phase: str,
        op: str,
        axis: Axis,
        dtype: str,
        payload_bytes: int,
        count: int = 1,
        wire_bytes: int | None = None,
    ) -> None:
        """Add ``count`` equal collectives; wire bytes follow from the op unless given. One rank: nothing."""
        if axis.size == 1 or count == 0:
            return
        if wire_bytes is None:
            passes = 2 if op == "all_reduce" else 1
            wire_bytes = passes * payload_bytes * (axis.size - 1) // axis.size
        key = (root, fqn, phase, op, axis.process_group, axis.mesh_dim, dtype, axis.size)
        row = self.rows.setdefault(key, [0, 0, 0])
        row[0] += count
        row[1] += count * payload_bytes
        row[2] += count * wire_bytes

    def add_sum(self, group: GroupTraffic, op: str, axis: Axis, *, count: int, elements: int) -> None:
        """Add ``count`` reductions of a group that have so many elements together, not all equally many."""
        if axis.size == 1 or count == 0:
            return
        payload = elements * dtype_bytes(group.reduce_dtype)
        passes = 2 if op == "all_reduce" else 1
        key = (
            *(group.root, group.fqn, "backward", op),
            *(axis.process_group, axis.mesh_dim, group.reduce_dtype, axis.size),
        )
        row = self.rows.setdefault(key, [0, 0, 0])
        row[:] = [row[0] + count, row[1] + payload, row[2] + passes * payload * (axis.size - 1) // axis.size]

    def add_forward_of(self, other: Ledger, root: int) -> None:
        """Add what ``other`` has of forward, as of the root with that index."""
        for (_, fqn, phase, *rest), sums in other.rows.items():
            if phase == "forward":
                row = self.rows.setdefault((root, fqn, phase, *rest), [0, 0, 0])
                row[:] = [mine + more for mine, more in zip(row, sums, strict=True)]

    def to_rows(self) -> list[CommRow]:
        """The rows as results."""
        names = ("root", "fqn", "phase", "op", "process_group", "mesh_dim", "dtype", "group_size")
        return [
            CommRow(
                **dict(zip(names, key, strict=True)),  # type: ignore[arg-type]
                count=count,
                payload_bytes=payload,
                wire_bytes=wire,
            )
            for key, (count, payload, wire) in self.rows.items()
        ]


class _State(Enum):
    SHARDED = auto()
    POST_FORWARD = auto()
    UNSHARDED = auto()


def walk_step(
    groups: Sequence[GroupTraffic],
    ledger: Ledger,
    *,
    micro_batches: int,
    sync: Sync,
    trains: bool = True,
    keep_between: bool = False,
    forwards: int = 1,
    all_reduce: AllReduce = "each",
) -> None:
    """Add one steady step's collectives of one root's groups, given in post-forward order, to ``ledger``.

    A group whose module runs several times before a backward stands in ``groups`` as often: it is gathered
    for each use, and reduced once, since autograd accumulates in between.

    ``trains=False`` is a model run forward only, without gradients: nothing reshards what its forward kept.
    ``keep_between`` leaves parameters gathered after every backward but the last, as pipeline stages do.
    Of several ``forwards`` a micro-batch the last one is trained, the others run without gradients.
    ``all_reduce`` says which reductions go on over the replicas.
    """
    passes = _Passes(groups, keep_between=keep_between)
    for book in (Ledger(), ledger):  # the first step differs where parameters stay gathered for good
        waiting = False
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            for _ in range(forwards):
                passes.forward(book)
            if not trains:
                continue
            passes.backward(book)
            if forwards > 1:
                passes.prefetch_across(book)
            if is_last or not keep_between:
                passes.reshard()
            if not is_last and sync != "each":
                waiting = True
                continue
            replicated = all_reduce == "each" or (all_reduce == "last" and is_last)
            for group in reversed(passes.distinct):
                times = 2 if waiting and passes.reduces_early(group) else 1
                reduce_unit(group, book, times=times, replicated=replicated)
            waiting = False


class _Passes:
    """The sharding states of one root's groups, through forwards and backwards."""

    def __init__(self, uses: Sequence[GroupTraffic], *, keep_between: bool) -> None:
        self._uses = uses
        self._keep_between = keep_between
        self.distinct = list({id(group): group for group in uses}.values())
        """The groups, each once, by their first use."""
        self._states = {id(group): _State.SHARDED for group in uses}

    def forward(self, ledger: Ledger) -> None:
        """Gather what is not there, and reshard it behind each use."""
        for group in self._uses:
            self._gather(group, ledger, "forward")
            if group.reshard is not False:
                self._states[id(group)] = _State.SHARDED if group.reshard is True else _State.POST_FORWARD

    def backward(self, ledger: Ledger) -> None:
        """Gather what is not there, and reshard it behind earlier uses whose inputs get gradients."""
        for index in range(len(self._uses) - 1, -1, -1):
            group = self._uses[index]
            if not group.has_backward:
                continue
            self._gather(group, ledger, "backward")
            for target in self._prefetched(index):
                # A frozen group that backward never reaches is gathered all the same, once, and dropped.
                if not target.has_backward:
                    self._gather(target, ledger, "backward")
            if self._is_used_before(index) and self._input_has_gradient(index) and not self._keep_between:
                self._states[id(group)] = _State.SHARDED

    def prefetch_across(self, ledger: Ledger) -> None:
        """The first group in forward order takes the last one of the forward before for the next in backward.

        That one's backward is over, so that it is gathered in vain; the root's is not.
        """
        first, last = self._uses[0], self._uses[-1]
        if not first.has_backward or first.backward_prefetch is not None or last.fqn == "" or last is first:
            return
        if last.has_backward:
            self._states[id(last)] = _State.SHARDED
        self._gather(last, ledger, "backward")

    def reshard(self) -> None:
        """Free everything, as the end of a backward does."""
        self._states = {id(group): _State.SHARDED for group in self._uses}

    def reduces_early(self, group: GroupTraffic) -> bool:
        """Whether its backward ends once before its gradients are there, and reduces what had accumulated."""
        last = max(index for index, use in enumerate(self._uses) if use is group)
        return self._is_used_before(last) and self._input_has_gradient(last)

    def _is_used_before(self, index: int) -> bool:
        return any(use is self._uses[index] for use in self._uses[:index])

    def _input_has_gradient(self, index: int) -> bool:
        """A root is given the batch; what other modules are given depends on the parameters before them."""
        return self._uses[index].fqn != "" and any(use.reduce_numel for use in self._uses[:index])

    def _prefetched(self, index: int) -> Sequence[GroupTraffic]:
        """What the group of a use takes ahead in backward, where nothing is named: the group before it.

        Of a module's several groups the second does it for all, and takes all those of the module before.
        """
        own = self._uses[index]
        if own.backward_prefetch is not None:
            return [group for group in self.distinct if group.fqn in own.backward_prefetch]
        beside = [group for group in self.distinct if group.fqn == own.fqn]
        if len(beside) == 1:
            return (self._uses[index - 1],) if index else ()
        if beside[1] is not own:
            return ()
        before = [use for use in self._uses[:index] if use.fqn != own.fqn]
        return [use for use in before if use.fqn == before[-1].fqn]

    def _gather(self, group: GroupTraffic, ledger: Ledger, phase: str) -> None:
        state = self._states[id(group)]
        if phase == "backward" and not group.unshard_in_backward:
            return
        self._states[id(group)] = _State.UNSHARDED
        if state is _State.UNSHARDED:
            return
        ledger.add(
            root=group.root,
            fqn=group.fqn,
            phase=phase,
            op="all_gather",
            axis=group.shard if state is _State.SHARDED else group.post_forward,
            dtype=group.gather_dtype,
            payload_bytes=group.gather_bytes,
        )


def reduce_unit(group: GroupTraffic, ledger: Ledger, *, times: int, replicated: bool = True) -> None:
    """Add a group's reduce-scatters, and over replicas its all-reduces."""
    if group.reduce_numel == 0:
        return
    payload = group.reduce_numel * dtype_bytes(group.reduce_dtype)
    for op, axis, size in (
        ("reduce_scatter", group.reduce, payload),
        ("all_reduce", group.replicate, payload // group.shard.size),
    ):
        ledger.add(
            root=group.root,
            fqn=group.fqn,
            phase="backward",
            op=op,
            axis=axis,
            dtype=group.reduce_dtype,
            payload_bytes=size,
            count=times if op == "reduce_scatter" or replicated else 0,
        )
