"""What the root modules do in a step: forwards, backwards, and what each backward does with gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from fsdp2prof.manifest import ParamGroupInfo, RootInfo


@dataclass(slots=True)
class GroupCounts:
    """One parameter group in one step."""

    gathers: int = 0
    backward_gathers: int = 0
    """Those made in a backward."""
    post_forward_gathers: int = 0
    """Those of them over the ranks it was resharded to after forward."""
    forwards: int = 0
    """With gradients."""
    evaluations: int = 0
    reductions: int = 0
    reduced_numel: int = 0
    """Elements of this rank's padded shards."""
    distinct_numel: int = 0
    """Elements of those whose gradients were reduced at least once."""
    all_reductions: int = 0
    all_reduced_numel: int = 0
    _seen: set[int] = field(default_factory=set)
    """Positions in the group of parameters whose gradients were reduced."""

    def note_gather(self, *, resharded: bool) -> None:
        """Count an all-gather that begins now."""
        in_backward = torch._C._current_graph_task_id() != -1
        self.gathers += 1
        self.backward_gathers += in_backward
        self.post_forward_gathers += resharded

    def note_reduction(self, group: Any) -> None:
        """Count what the backward of an ``FSDPParamGroup``, which ends now, is about to reduce."""
        if not group.reduce_grads:
            return
        zeros = getattr(group, "reduce_scatter_unused_params", False)  # newer torch alone has it
        reduced = {
            at: one.padded_sharded_param_size.numel()
            for at, one in enumerate(group.fsdp_params)
            if _is_reduced(one, zeros=zeros)
        }
        if reduced:
            numel = sum(reduced.values())
            self.reductions += 1
            self.reduced_numel += numel
            self.distinct_numel += sum(size for at, size in reduced.items() if at not in self._seen)
            self._seen |= reduced.keys()
            if group.all_reduce_grads:
                self.all_reductions += 1
                self.all_reduced_numel += numel


def _is_reduced(parameter: Any, *, zeros: bool) -> bool:
    """Whether an ``FSDPParam`` takes part in its group's reduction."""
    if not hasattr(parameter, "_unsharded_param"):
        return False
    whole = parameter.unsharded_param
    has_gradient = parameter.unsharded_accumulated_grad is not None or whole.grad is not None
    return has_gradient or (zeros and whole.requires_grad)


@dataclass(slots=True)
class StepCounts:
    """One root in one step. A number is None once its parameter groups differed in it."""

    forwards: int = 0
    """With gradients."""
    method_forwards: int = 0
    """Those of them by a method of ``register_fsdp_forward_method``."""
    evaluations: int = 0
    """Forwards without."""
    updates: int = 0
    """Forwards before which parameters had changed since the one before."""
    backwards: int = 0
    """Whatever forwards each follows."""
    gradient_syncs: int | None = 0
    unreduced: int = 0
    """Backwards since the last one that reduced gradients."""
    all_reduces: int | None = 0
    reshards: int | None = 0

    groups: dict[int, GroupCounts] = field(default_factory=dict)
    """By the number of a parameter group among those of the root."""
    sees_groups: bool = True
    """False in a step in which the groups were not watched from its beginning."""

    @property
    def micro_batches(self) -> int:
        """Its backwards; of a root without any its forwards, those with gradients if there are any."""
        return self.backwards or self.forwards or self.evaluations

    def note_backward(self, groups: Sequence[Any]) -> None:
        """Count a backward of these ``FSDPParamGroup`` objects that ends now.

        A pipeline stage reduces once behind the backwards of all its micro-batches, by a call of FSDP's last
        hook that no backward makes: that does not count as another micro-batch.
        """
        in_backward = torch._C._current_graph_task_id() != -1
        self.backwards += in_backward
        trained = [
            group for group in groups if any(one.sharded_param.requires_grad for one in group.fsdp_params)
        ]
        reduces = [group.reduce_grads for group in trained]
        self.gradient_syncs = _more(self.gradient_syncs, reduces)
        self.unreduced = 0 if any(reduces) else self.unreduced + (in_backward and bool(trained))
        self.all_reduces = _more(
            self.all_reduces, [group.reduce_grads and group.all_reduce_grads for group in trained]
        )
        self.reshards = _more(self.reshards, [group.reshard_after_backward for group in groups])


class RootSteps:
    """What every root did in each captured step."""

    def __init__(self) -> None:
        self._steps = 0
        self._seen: dict[int, set[tuple[int | None, ...]]] = {}
        self._updates = Counter[int]()
        self._groups: list[dict[int, dict[int, GroupCounts] | None]] = []

    def add(self, step: Mapping[int, StepCounts]) -> None:
        """Add a captured step: the counts of the roots there are, by index."""
        for index, counts in step.items():
            before = {_IDLE} if self._steps else set()
            self._seen.setdefault(index, before).add(_described(counts))
            self._updates[index] = max(self._updates[index], counts.updates)
        self._steps += 1
        self._groups.append({index: one.groups if one.sees_groups else None for index, one in step.items()})

    def describe(self) -> list[RootInfo]:
        """Say of each root what was the same in all captured steps."""
        return [
            RootInfo(
                root=index,
                updates=self._updates[index],
                **dict(zip(_NAMES, map(_common, zip(*seen, strict=True)), strict=True)),
            )
            for index, seen in sorted(self._seen.items())
        ]

    def describe_groups(self, groups: Iterable[ParamGroupInfo]) -> None:
        """Say of each described group how often it was gathered and ran, if always the same.

        A step in which the groups were not watched from its beginning, the training's first, says nothing.
        """
        numbers: Counter[int] = Counter()
        for info in groups:
            number = numbers[info.root]
            numbers[info.root] += 1
            steps = [step.get(info.root, {}) for step in self._groups]
            seen = [step.get(number, GroupCounts()) for step in steps if step is not None]
            if not seen:
                continue
            counts = {name: _common(getattr(one, name) for one in seen) for name in _GROUP_NAMES}
            for name, count in counts.items():
                setattr(info, name, count)
            info.counts_vary = any(counts[name] is None for name in _OF_COLLECTIVES)


_NAMES = (
    "micro_batches",
    "gradient_syncs",
    "unreduced",
    "all_reduces",
    "reshards",
    "method_forwards",
    "evaluations",
)
"""Of :class:`StepCounts` and of :class:`RootInfo`."""
_GROUP_NAMES = tuple(one.name for one in fields(GroupCounts) if not one.name.startswith("_"))
"""Of :class:`GroupCounts` and of :class:`ParamGroupInfo`."""
_OF_COLLECTIVES = tuple(name for name in _GROUP_NAMES if name not in ("forwards", "evaluations"))


def _described(counts: StepCounts) -> tuple[int | None, ...]:
    return tuple(getattr(counts, name) for name in _NAMES)


_IDLE = _described(StepCounts())


def _more(count: int | None, each: Sequence[bool]) -> int | None:
    if count is None or len(set(each)) > 1:
        return None
    return count + any(each)


def _common(values: Iterable[int | None]) -> int | None:
    found = set(values)
    return found.pop() if len(found) == 1 else None
