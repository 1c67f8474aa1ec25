"""Every operator that runs on plain tensors, seen before and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

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
        self._observers: tuple[Callable[..., None], Callable[..., None]] | None = before, after
        self._has_left = False

    def leave(self) -> bool:
        """Observe nothing more, and leave torch's stack of modes where this mode is on top of it.

        It is not on top inside an operator, on another thread, or below a mode of the program, which torch
        would take off the stack instead. There this mode stays and does nothing until it is left again.
        Returns whether it has left.
        """
        self._observers = None
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._has_left = True
        return self._has_left

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if hasattr(kind, "__tensor_flatten__"):
                return NotImplemented
        arguments = (args, kwargs or {})
        if (observers := self._observers) is None:
            return func(*args, **arguments[1])
        before, after = observers
        before(func, arguments)
        result = func(*args, **arguments[1])
        after(func, arguments, result)
        return result
