"""Wraps ``fully_shard``; what records is imported when it is first called."""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from fsdp2prof.recorder.rank.training_profilers import training_profilers

__all__ = ["install"]


def install(module: ModuleType) -> None:
    """Wrap ``module.fully_shard``, before anything could bind it, so that its first call starts a session.

    Name, signature, attributes (``fully_shard.state``) and pickling of the function stay as they were. A list
    of modules is never a root: it is seen through the module around it.
    """
    training_profilers.install()  # before one is set up: that cannot be seen later
    original = module.fully_shard

    @wraps(original)
    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        from fsdp2prof.recorder.rank.current import session_of_process

        session = session_of_process()
        result = original(module, *args, **kwargs)
        if session is not None and not isinstance(module, (list, tuple)):
            session.watch(module)
        return result

    module.fully_shard = fully_shard  # type: ignore[attr-defined]
