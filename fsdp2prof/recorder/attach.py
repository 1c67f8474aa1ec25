"""Wraps ``fully_shard`` and ``replicate``; what records is imported when one of them is first called."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from fsdp2prof.recorder.rank.training_profilers import training_profilers

__all__ = ["install"]


def install(module: ModuleType) -> None:
    """Wrap ``fully_shard`` or ``replicate`` of ``module``, before anything could bind it.

    The first call starts a session. Name, signature, attributes (``fully_shard.state``) and pickling of the
    function stay as they were. A list of modules is never a root: it is seen through the module around it.
    """
    training_profilers.install()  # before one is set up: that cannot be seen later
    for name in ("fully_shard", "replicate"):
        if hasattr(module, name):
            setattr(module, name, _watched(getattr(module, name)))


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def wrap(module: Any, *args: Any, **kwargs: Any) -> Any:
        from fsdp2prof.recorder.rank.current import session_of_process

        session = session_of_process()
        result = original(module, *args, **kwargs)
        if session is not None and not isinstance(module, (list, tuple)):
            session.watch(module)
        return result

    return wrap
