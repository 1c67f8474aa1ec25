"""Values of fake tensors that are made of constants: positions, grids, masks of tokens.

A fake tensor has a shape and no data, so that a model which looks at its input (where do the images of this
batch stand, how large are they) cannot run on one. What is computed of constants alone is known, though: it
is computed for real beside the fake tensors, which keep their sizes and lifetimes.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_MOST_ELEMENTS = 1 << 26
"""Of a value that is followed: larger ones (a mask of all pairs of a long sequence) are left unknown."""
_MOST_REALS = 1 << 24
"""The same for numbers that are not whole, as an image's; what weights make of them is not followed."""
_VALUE = "_fsdp2prof_value"
_NO_DATA = (DataDependentOutputException, DynamicOutputShapeException)
_BY_MASK = frozenset({torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor})
_UNSET = ("empty", "new_empty")
_MASKED_SELECT = torch.ops.aten.masked_select.default
_MASKS = (torch.bool, torch.uint8)


_overwritten: WeakSet[UntypedStorage] = WeakSet()
"""Memory of values that something unknown was written into."""


def value_of(tensor: Tensor) -> Tensor | None:
    """The value of a fake tensor if it is followed; a real tensor is its own."""
    if not isinstance(tensor, FakeTensor):
        return tensor if type(tensor) is Tensor and tensor.device.type == "cpu" else None
    value: Tensor | None = getattr(tensor, _VALUE, None)
    return None if value is None or value.untyped_storage() in _overwritten else value


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows values through operators while it is active, above a mode of fake tensors.

    ``item()`` of a known tensor gives its number, and what a known mask or count selects has its true shape.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            return func(*args, **kwargs)  # on real tensors, which are left alone
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(not isinstance(tensor, FakeTensor) and type(tensor) is not Tensor for tensor in given):
            return func(*args, **kwargs)  # unfolds into operators on plain tensors
        values = {id(tensor): value_of(tensor) for tensor in given}
        if any(value is None for value in values.values()) or _has_no_value(func):
            _overwrite(func, args, values)
            return self._masked(func, args, kwargs)
        return self._followed(func, args, kwargs, values)

    def _masked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on data that is not known; by a known mask it selects as many as that says."""
        if func is _MASKED_SELECT and (value := value_of(args[1])) is not None:
            shape = torch.broadcast_shapes(args[0].shape, value.shape)  # type: ignore[no-untyped-call]
            data = args[0].expand(shape)
            with no_dispatch():
                value = value.expand(data.shape)
            return torch.ops.aten.index.Tensor(data, _places(value, data.device))
        if func not in _BY_MASK:
            return func(*args, **kwargs)
        indices: list[Tensor | None] = []
        for index in args[1]:
            value = None if index is None or index.dtype not in _MASKS else value_of(index)
            indices.extend([index] if value is None else _places(value, index.device))
        return func(args[0], indices, *args[2:], **kwargs)

    def _followed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[int, Tensor | None]
    ) -> Any:
        """Run an operator on fake tensors and on their values."""
        try:
            result = func(*args, **kwargs)
        except _NO_DATA:
            result = None
        else:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if not values and not all(map(_is_small, made)):
                return result
            if not all(map(_is_small, made)) and not getattr(func, "is_view", False):
                _overwrite(func, args, values)
                return result
        with no_dispatch():
            known_args, known_kwargs = tree_map_only(
                Tensor, lambda tensor: values[id(tensor)], (args, _on_host(kwargs))
            )
            known = func(*known_args, **known_kwargs)
        if result is None:
            result = tree_map_only(Tensor, _without_data, known)
        for mine, value in zip(tree_leaves(result), tree_leaves(known), strict=True):
            if isinstance(mine, FakeTensor):
                setattr(mine, _VALUE, value)
        return known if not isinstance(known, (Tensor, list, tuple)) and known is not None else result


class TensorsAsNumbers(TorchFunctionMode):
    """Lets ``torch.tensor`` take fake tensors among its numbers, which it would read from memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tensor and args and isinstance(args[0], (list, tuple)):
            args = (tree_map_only(FakeTensor, lambda tensor: tensor.tolist(), args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _places(mask: Tensor, device: torch.device) -> list[Tensor]:
    """An index without data for every dimension of a mask, as selecting by it makes them."""
    with no_dispatch():
        count = int(torch.count_nonzero(mask))
    return list(torch.empty((count, mask.ndim), dtype=torch.int64, device=device).unbind(1))


def _without_data(value: Tensor) -> Tensor:
    """A fake tensor in the shape of a value; a mode of fake tensors is active."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (_MOST_REALS if tensor.is_floating_point() else _MOST_ELEMENTS)


def _has_no_value(func: Any) -> bool:
    """Whether an operator's results follow from nothing: random numbers, memory as it was."""
    name = getattr(getattr(func, "_schema", None), "name", "").partition("::")[2]
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) or name.startswith(_UNSET)


def _overwrite(func: Any, args: tuple[Any, ...], values: dict[int, Tensor | None]) -> None:
    """Forget what an operator writes into that is not followed."""
    for written in _written_by(func, args):
        value = values.get(id(written))
        if value is not None:
            _overwritten.add(value.untyped_storage())


def _written_by(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Tensors that an operator writes into, by its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = zip(schema.arguments, args, strict=False)
    return [
        leaf
        for argument, value in named
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by which a value is made on the host, whatever the fake tensor's device."""
    return {**kwargs, "device": "cpu"} if kwargs.get("device") is not None else kwargs
