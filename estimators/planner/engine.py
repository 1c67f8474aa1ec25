"""A plan's calls of the execution engine: in this process, or in those of a workflow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from fsdp2prof.errors import ModelError

Call: TypeAlias = tuple[Callable[[Any], Any], Any]
"""A function of the engine and what it is given."""
Engine: TypeAlias = Callable[[Sequence[Call]], list[Any]]
"""Runs the execution engine on several inputs, at once where there are processes for it. Returns the results
of all calls, in order; a call that cannot run returns its ``ModelError``."""


def in_this_process(calls: Sequence[Call]) -> list[Any]:
    """The engine without processes."""
    return [run_one(call) for call in calls]


def run_one(call: Call) -> Any:
    """Return what a call does, or the ``ModelError`` that it raises."""
    function, item = call
    try:
        return function(item)
    except ModelError as error:
        return error
