"""Every operator that runs on plain tensors, seen before and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Arguments", "PlainOperators"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What an operator is given: by position, by name."""


class PlainOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``before(operator, arguments)`` and ``after(operator, arguments, result)`` around every operator.

    A DTensor and its like are not seen themselves: they unfold into operators on plain tensors, which are.
    """

    supports_higher_order_operators = True

    def __init__(
        self, before: Callable[[Any, Arguments], None], after: Callable[[Any, Arguments, Any], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = before
        self._after = after

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if hasattr(kind, "__tensor_flatten__"):
                return NotImplemented
        arguments = (args, kwargs or {})
        self._before(func, arguments)
        result = func(*args, **arguments[1])
        self._after(func, arguments, result)
        return result
