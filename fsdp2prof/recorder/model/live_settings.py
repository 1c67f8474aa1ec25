"""The settings of a sharded model that FSDP2 reads anew in every step, so that they can change between steps.

A candidate becomes a list of attribute assignments, made once; to switch is to assign. What the public
setters (``set_reshard_after_forward``, ``set_modules_to_forward_prefetch``, ...) assign is assigned here, so
that any earlier value, an integer ``reshard_after_forward`` too, comes back exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from fsdp2prof.recorder.model.members import named_modules
from fsdp2prof.recorder.model.roots import Root, param_groups
from fsdp2prof.trial import parse_candidate


class NotTriedError(Exception):
    """A candidate that this model cannot have or has already; the message says why."""


class Assignment(NamedTuple):
    """One attribute of one FSDP2 object, and the value that it gets."""

    owner: Any
    name: str
    value: Any

    @property
    def holds(self) -> bool:
        """Whether the attribute has the value."""
        now = getattr(self.owner, self.name)
        return now is self.value or bool(now == self.value)


class Candidate(NamedTuple):
    """Condition that must hold while a candidate is tried."""

    assignments: list[Assignment]
    reduces_last: bool = False
    """Whether gradients are reduced only in the last micro-batch of a step."""


class LiveSettings:
    """The settings of all roots of a process, whose forward order has been noted (``Roots.mark``)."""

    def __init__(self, roots: Sequence[Root]) -> None:
        self._roots = roots
        self._states = [state for root in roots for state in root.states]
        self._groups = [group for state in self._states for group in param_groups(state)]
        self.original = Candidate(self._read())
        """The script's own settings."""

    def candidate(self, text: str) -> Candidate:
        """Return what ``NAME=VALUE`` assigns, everything else as the script has it.

        Raises :class:`NotTriedError` where this torch or this model cannot have it, or has it already.
        """
        name, value = parse_candidate(text)
        if name == "sync":
            return self._reduced_last()
        makers: dict[str, Callable[[str], list[Assignment]]] = {
            "reshard": self._reshard,
            "forward_prefetch": self._forward_prefetch,
            "backward_prefetch": self._backward_prefetch,
            "reduce_scatter_max_input_buffers": self._input_buffers,
            "separate_reduce_scatter_group": self._separate_group,
        }
        changed = makers[name](value)
        if all(one.holds for one in changed):
            raise NotTriedError("the training has this setting already")
        replaced = {(id(one.owner), one.name) for one in changed}
        kept = [one for one in self.original.assignments if (id(one.owner), one.name) not in replaced]
        return Candidate(kept + changed)

    def reduce(self, on: bool) -> None:
        """Reduce gradients in the backwards to come or not, as ``set_requires_gradient_sync`` does."""
        for group in self._groups:
            group.reduce_grads = group.all_reduce_grads = on

    @property
    def full_bytes(self) -> int:
        """Bytes of all parameters gathered, in the dtype of their all-gathers."""
        parameters = [one for group in self._groups for one in group.fsdp_params]
        return sum(
            one._orig_size.numel() * (one.param_dtype or one.orig_dtype).itemsize for one in parameters
        )

    def _read(self) -> list[Assignment]:
        of_group = ("post_forward_mesh_info", "reduce_scatter_max_input_buffers")
        of_state = ("_states_to_forward_prefetch", "_states_to_backward_prefetch")
        owned = [(group, name) for group in self._groups for name in of_group]
        owned += [(state, name) for state in self._states for name in of_state]
        owned += [(mesh, "reduce_scatter_process_group") for mesh in self._meshes()]
        return [
            Assignment(owner, name, getattr(owner, name)) for owner, name in owned if hasattr(owner, name)
        ]

    def _meshes(self) -> list[Any]:
        return list({id(group.mesh_info): group.mesh_info for group in self._groups}.values())

    def _reshard(self, value: str) -> list[Assignment]:
        roots = {id(group) for root in self._roots for group in _own_groups(root)}
        assignments = []
        for group in self._groups:
            stays = value == "never" or (value == "default" and id(group) in roots)
            mesh = None if stays else group.mesh_info
            assignments.append(Assignment(group, "post_forward_mesh_info", mesh))
        return assignments

    def _forward_prefetch(self, value: str) -> list[Assignment]:
        return self._prefetch("_states_to_forward_prefetch", int(value), backward=False)

    def _backward_prefetch(self, value: str) -> list[Assignment]:
        return self._prefetch("_states_to_backward_prefetch", int(value), backward=True)

    def _prefetch(self, name: str, ahead: int, *, backward: bool) -> list[Assignment]:
        assignments = []
        for root in self._roots:
            states = _in_order_of_need(root)
            states = states[::-1] if backward else states
            for index, state in enumerate(states):
                assignments.append(Assignment(state, name, states[index + 1 : index + 1 + ahead]))
        if all(not one.value for one in assignments):
            raise NotTriedError("no order of several sharded modules was seen: there is nothing to prefetch")
        return assignments

    def _input_buffers(self, value: str) -> list[Assignment]:
        name = "reduce_scatter_max_input_buffers"
        if not all(hasattr(group, name) for group in self._groups):
            raise NotTriedError("this setting needs torch 2.13 or newer")
        return [Assignment(group, name, int(value)) for group in self._groups]

    def _separate_group(self, _: str) -> list[Assignment]:
        """Create the process groups as FSDP2's setter does; ranks of one mesh do this together."""
        name = "reduce_scatter_process_group"
        meshes = self._meshes()
        if not all(hasattr(mesh, name) for mesh in meshes):
            raise NotTriedError("this setting needs torch 2.13 or newer")
        before = {id(mesh): getattr(mesh, name) for mesh in meshes}
        if all(group is not None for group in before.values()):
            raise NotTriedError("the training has this setting already")
        created: dict[Any, Any] = {}
        try:
            for group in self._groups:
                group._set_separate_reduce_scatter_group(True, created)
            return [Assignment(mesh, name, getattr(mesh, name)) for mesh in meshes]
        finally:
            for mesh in meshes:
                setattr(mesh, name, before[id(mesh)])

    def _reduced_last(self) -> Candidate:
        if len(self._roots) != 1:
            raise NotTriedError(
                "the training has several models, whose micro-batches cannot be distinguished"
            )
        if not all(group.reduce_grads and group.all_reduce_grads for group in self._groups):
            raise NotTriedError("the training switches gradient sync itself")
        return Candidate(self.original.assignments, reduces_last=True)


def _own_groups(root: Root) -> list[Any]:
    module = root.module
    return [] if module is None else param_groups(module._get_fsdp_state())  # type: ignore[operator]


def _in_order_of_need(root: Root) -> list[Any]:
    """FSDP states in the order in which their all-gathers are needed in forward.

    FSDP keeps the order in which forwards *end*: a module goes before the first module inside it.
    """
    numbered = [(group, state) for state in root.states for group in param_groups(state)]
    ended = dict.fromkeys(numbered[n][1] for n in root.forward_order if n < len(numbered))
    order: list[Any] = []
    for state in ended:
        inside = {id(module) for one in _modules_of(state) for _, module in named_modules(one)}
        first = (n for n, other in enumerate(order) if any(id(one) in inside for one in _modules_of(other)))
        order.insert(next(first, len(order)), state)
    return order


def _modules_of(state: Any) -> list[nn.Module]:
    return list(state._modules)
