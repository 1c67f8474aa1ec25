"""The part of the compiler that callers use without importing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fsdp2prof.errors import ModelError

_Listener = Callable[[int, str, bool], None]

_LISTENER: ContextVar[_Listener | None] = ContextVar("launches", default=None)


@contextmanager
def told_of_launches(listener: _Listener) -> Iterator[None]:
    """Call ``listener`` for each fused kernel: bytes moved, element type, whether it only reorders."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def launched(nbytes: int, dtype: str, moves: bool) -> None:
    """Say that a fused kernel is launched now."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(nbytes, dtype, moves)


Graphs = dict[Any, Callable[..., Any]]
"""Compiled graphs of blocks, by all that they depend on; executions may share them."""


class CannotCompile(ModelError):  # noqa: N818 - an answer: what it saves is guessed then
    """A block whose graph cannot be traced as a whole; says which and why."""
