"""The root modules of a process, in order of first forward, and the ranges that tell them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.autograd.profiler import record_function

from fsdp2prof.labels import root_label
from fsdp2prof.manifest import LabelsInfo
from fsdp2prof.recorder.guard import guard
from fsdp2prof.recorder.model.inputs import (
    Identity,
    Padding,
    are_same,
    identities,
    ignored_labels,
    input_digest,
    need_only_inputs,
)
from fsdp2prof.recorder.model.members import named_parameters, unseen_by_modes
from fsdp2prof.recorder.model.step_counts import GroupCounts, StepCounts

_COMPARED = 2
"""Forwards of a root, outside captured steps, whose inputs are compared between ranks; if it is frozen, of
different steps."""
_STEPS_COMPARED = 32
"""Steps whose inputs are compared with those of the step before."""


class Range(record_function):
    """A range in the trace, open until :meth:`close`; modes of the training's do not see it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            self.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the range."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            self.__exit__(None, None, None)


class Root:
    """A module that FSDP's lazy initialization made a root; it is not kept alive."""

    def __init__(self, index: int, module: nn.Module) -> None:
        self.index = index
        self.ranges: list[Range] = []
        """Open ranges around its running forwards, outermost first."""
        self.counts = StepCounts()
        """What it did in the running step; of backwards what was while roots are marked."""
        self.forward_order: tuple[int, ...] = ()
        """Its parameter groups, by index, as their forwards ended before a backward; noted while marked."""
        self._forwards_in_order = 0
        self.inputs: list[str | None] = []
        """Digests of what its first forwards get: with gradients, or of a frozen root the first of a step."""
        self.labels: LabelsInfo | None = None
        self.padding = Padding()
        self.reused: list[bool] = []
        """Whether the first forward of each step gets the tensors of the step before."""
        self._given: list[Identity] | None = None
        self.only_inputs: dict[int, bool] = {}
        """Frozen parameter groups, by index: whether their backward leads to inputs alone."""
        self.is_wrapped = False
        """Whether the hooks of its backward are watched."""
        self._only_trained = False
        self._version: int | None = None
        """Of a trained parameter, as the latest forward with gradients found it."""
        self._module = ref(module)

    def note_forward_order(self) -> None:
        """Note FSDP's own order of the forwards that the backward which ends now belongs to.

        FSDP clears it with the last backward of a step's micro-batches. An evaluation's forwards are in it
        too, so the order after one is not used.
        """
        states = self.states
        order = getattr(states[0]._comm_ctx, "post_forward_order", []) if states else []
        numbers = {id(group): n for n, group in enumerate(g for state in states for g in param_groups(state))}
        if self._only_trained and order:
            self.forward_order = tuple(numbers[id(group)] for group in order if id(group) in numbers)
            self._forwards_in_order = self.counts.forwards
        self._only_trained = bool(states) and states[0]._state_ctx.is_last_backward

    def end_step(self) -> StepCounts:
        """Return what it did since the last call, and start over.

        Where forwards of several micro-batches went ahead of the first backward, as in a pipeline, FSDP's
        order holds them all: it is cut to those of one.
        """
        counts, self.counts = self.counts, StepCounts()
        seen, order = self._forwards_in_order, self.forward_order
        if counts.backwards and seen and counts.forwards % counts.backwards == 0:
            length = len(order) * (counts.forwards // counts.backwards) // seen
            if 0 < length < len(order) and order == order[:length] * (len(order) // length):
                self.forward_order, self._forwards_in_order = order[:length], 0
        return counts

    def note_version(self) -> None:
        """Note before a forward with gradients whether a trained parameter changed since the one before."""
        parameter, before = self.trained_parameter(), self._version
        both = [parameter, getattr(parameter, "_local_tensor", None)]  # a script may change either
        known = parameter is not None and not any(one is not None and one.is_inference() for one in both)
        self._version = sum(one._version for one in both if one is not None) if known else None
        if self.counts.forwards and None not in (before, self._version):
            self.counts.updates += before != self._version

    def evaluated(self) -> None:
        """A forward without gradients begins."""
        self.counts.evaluations += 1
        self._only_trained = False

    def close_range(self) -> None:
        """Leave the innermost range around a running forward, if there is one."""
        if self.ranges:
            self.ranges.pop().close()

    @property
    def module(self) -> nn.Module | None:
        """The module, or None once the training has dropped it."""
        return self._module()

    @unseen_by_modes()
    def note_inputs(self, inputs: Any, named: Any) -> None:
        """Note a digest of what a forward gets: any with gradients, or a frozen root's first of a step."""
        module = self.module
        if module is not None and len(self.inputs) < _COMPARED:
            frozen = not any(one.requires_grad for _, one in named_parameters(module))
            if self._is_first if frozen else torch.is_grad_enabled():
                self.inputs.append(input_digest(inputs, named))
                if not frozen:
                    self.labels = self.labels or ignored_labels(inputs, named)
                    self.padding.note(inputs, named)

    @unseen_by_modes()
    def note_reuse(self, inputs: Any, named: Any) -> None:
        """Note whether the first forward of a step gets the very tensors of the step before, unchanged."""
        if self._is_first and len(self.reused) < _STEPS_COMPARED:
            given = identities(inputs, named)
            if self._given is not None:
                self.reused.append(are_same(self._given, given))
            self._given = given

    @property
    def _is_first(self) -> bool:
        return self.counts.forwards + self.counts.evaluations == 1

    def trained_parameter(self) -> torch.Tensor | None:
        """Return one of its sharded parameters that has gradients; None before its first forward."""
        groups = (group for state in self.states for group in param_groups(state))
        trained = (one.sharded_param for group in groups for one in group.fsdp_params)
        return next((one for one in trained if one.requires_grad), None)

    @property
    def label(self) -> str:
        """Name of the range around its forward and its backward hooks."""
        return root_label(self.index)

    @property
    def states(self) -> list[Any]:
        """Its ``FSDPState`` objects in module order; empty before its first forward and after its end.

        Torch 2.7 lists the one state of several modules wrapped together once for each of them.
        """
        module = self.module
        return [] if module is None else list(dict.fromkeys(_state(module)._state_ctx.all_states))


class Roots:
    """Watches the forwards of wrapped modules, and of roots only as soon as they are known.

    ``on_forward`` is called where the forward of a root begins, if gradients are enabled.
    """

    def __init__(self, on_forward: Callable[[], None]) -> None:
        self._on_forward = on_forward
        self._roots: WeakKeyDictionary[nn.Module, Root] = WeakKeyDictionary()
        self._hooks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        self._count = 0
        self._marking = False
        self._after_hooks: list[Any] = []
        self._wrapped: list[tuple[ref[Any], str]] = []
        """States and groups of FSDP's, which are not kept alive, and their wrapped methods."""
        self._states: WeakSet[Any] = WeakSet()
        """Whose methods are wrapped; modules that were sharded together have one."""
        guard.when_off("roots", lambda: self.mark(False))

    def __iter__(self) -> Iterator[Root]:
        return iter(sorted(self._roots.values(), key=lambda root: root.index))

    def watch(self, module: nn.Module) -> None:
        """Watch a module that ``fully_shard`` was applied to, on its own (a root is never in a list)."""
        if module not in self._hooks:
            hook = guard.hook("recording", self._before_forward)
            self._hooks[module] = nn.Module.register_forward_pre_hook(
                module, hook, prepend=True, with_kwargs=True
            )
            self._watch_methods(module)

    def end_step(self) -> dict[int, StepCounts]:
        """Return what each root did since the last call, by its index, and start over."""
        return {root.index: root.end_step() for root in self}

    def mark(self, on: bool) -> None:
        """Begin or end marking: a range around each root's forward, a count of its backwards.

        FSDP's own labels name modules relative to their root, and the root not at all; so with several roots
        their backward hooks also have ranges.
        """
        if on == self._marking:
            return
        self._marking = on
        if not on:
            for hook in self._after_hooks:
                hook.remove()
            self._after_hooks.clear()
            for root in self:
                root.is_wrapped = False
                while root.ranges:
                    root.close_range()
            for owner, name in self._wrapped:
                if (there := owner()) is not None:
                    delattr(there, name)
            self._wrapped.clear()
            return
        for root in self:
            self._close_after_forward(root)
            self._wrap_backward(root, ranges=len(self._roots) > 1)

    def remove(self) -> None:
        """Stop watching."""
        self.mark(False)
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        for state in list(self._states):
            self._leave_methods(state)

    def _watch_methods(self, module: nn.Module) -> None:
        """Also observe methods of ``register_fsdp_forward_method``: they call the state, not module hooks."""
        state = _state(module)
        if state in self._states:
            return
        self._states.add(state)

        def before(module: nn.Module, *inputs: Any, **named: Any) -> None:
            self._before_forward(module, *inputs, **named)
            if torch.is_grad_enabled() and (root := self._roots.get(module)) is not None:
                root.counts.method_forwards += 1

        def after(module: nn.Module, *_: Any, **__: Any) -> Callable[[bool, Any], None]:
            return lambda *_: self._after_forward(module)

        state._pre_forward = guard.around("recording", state._pre_forward, before)
        state._post_forward = guard.around("roots", state._post_forward, after)

    def _leave_methods(self, state: Any) -> None:
        if state in self._states:
            self._states.discard(state)
            del state._pre_forward, state._post_forward

    def _before_forward(self, module: nn.Module, *inputs: Any, **named: Any) -> None:
        if _state(module)._is_root is False:
            self._hooks[module].remove()
            self._leave_methods(_state(module))
            return
        if torch.is_grad_enabled():
            self._on_forward()
        guard.run("roots", self._count_forward, module)
        if (root := self._roots.get(module)) is not None:
            guard.run("inputs", root.note_reuse, inputs, named)
            if not self._marking:
                guard.run("inputs", root.note_inputs, inputs, named)

    def _count_forward(self, module: nn.Module) -> None:
        root = self._roots.get(module)
        if root is None:
            root = self._roots[module] = Root(self._count, module)
            self._count += 1
            if self._marking:
                self._close_after_forward(root)
        if torch.is_grad_enabled():
            root.note_version()
            root.counts.forwards += 1
        else:
            root.evaluated()
        if self._marking:
            root.ranges.append(Range(root.label))

    def _close_after_forward(self, root: Root) -> None:
        close = guard.hook("roots", lambda module, *_: self._after_forward(module))
        if (module := root.module) is not None:
            self._after_hooks.append(nn.Module.register_forward_hook(module, close, always_call=True))

    def _after_forward(self, module: nn.Module) -> None:
        """Wrap the hooks of a root that is new since marking began: it has states after its first forward."""
        root = self._roots.get(module)
        if root is None:
            return
        root.close_range()
        if self._marking and not root.is_wrapped and root.states:
            self._wrap_backward(root, ranges=len(self._roots) > 1)
            root.counts.sees_groups = False

    def _wrap_backward(self, root: Root, *, ranges: bool) -> None:
        def enter(*_: Any) -> Callable[[bool, Any], None]:
            label = Range(root.label)
            return lambda *_: label.close()

        def count() -> None:
            root.counts.note_backward([group for state in root.states for group in param_groups(state)])
            root.note_forward_order()

        def in_range(method: Callable[..., Any]) -> Callable[..., Any]:
            return guard.around("roots", method, enter) if ranges else method

        root.is_wrapped = True
        groups = [group for state in root.states for group in param_groups(state)]
        for number, group in enumerate(groups):
            self._count_group(root, number, group, in_range)
        for state in root.states:
            final_callback = in_range(state._root_post_backward_final_callback)
            final_callback = guard.around("roots", final_callback, count)
            self._replace(state, "_root_post_backward_final_callback", final_callback)
            if ranges:
                self._replace(state, "_pre_backward", in_range(state._pre_backward))

    def _count_group(
        self,
        root: Root,
        number: int,
        group: Any,
        in_range: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        def counts() -> GroupCounts:
            return root.counts.groups.setdefault(number, GroupCounts())

        def unshard(*_: Any, **__: Any) -> Callable[[bool, Any], None] | None:
            if group._all_gather_result is not None:
                return None
            resharded = group.is_sharded_post_forward

            def gathered(*_: Any) -> None:
                if group._all_gather_result is not None:
                    counts().note_gather(resharded=resharded)

            return gathered

        def post_backward(*_: Any, **__: Any) -> None:
            counts().note_reduction(group)

        frozen = not any(one.sharded_param.requires_grad for one in group.fsdp_params)

        def pre_forward(*inputs: Any, **named: Any) -> None:
            if not torch.is_grad_enabled():
                counts().evaluations += 1
                return
            counts().forwards += 1
            if frozen and number not in root.only_inputs:
                root.only_inputs[number] = bool(guard.run("inputs", need_only_inputs, inputs, named))

        self._replace(group, "unshard", guard.around("roots", group.unshard, unshard))
        self._replace(group, "pre_forward", guard.around("roots", group.pre_forward, pre_forward))
        counted = guard.around("roots", group.post_backward, post_backward)
        self._replace(group, "post_backward", in_range(counted))

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        setattr(owner, name, method)
        self._wrapped.append((ref(owner), name))


def param_groups(state: Any) -> list[Any]:
    """Return the ``FSDPParamGroup`` objects of a state: none, one, or (torch >= 2.10) several."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [group] if (group := state._fsdp_param_group) is not None else []
    return list(groups)


def _state(module: nn.Module) -> Any:
    return module._get_fsdp_state()  # type: ignore[operator]
