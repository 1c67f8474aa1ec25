"""Wraps ``fully_shard`` and ``replicate``; recording modules are imported when one of them is first
called."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from fsdp2prof.recorder.guard import guard
from fsdp2prof.recorder.rank.training_profilers import training_profilers


def install(module: ModuleType) -> None:
    """Wrap ``fully_shard`` or ``replicate`` of ``module``, before anything could bind it.

    The first call starts a session. Name, signature, attributes (``fully_shard.state``) and pickling of the
    function stay as they were. A list of modules is never a root: it is seen through the module around it.
    """
    # before one is set up: that cannot be seen later
    guard.run_in_dynamo("profilers", training_profilers.install)
    for name in ("fully_shard", "replicate"):
        if hasattr(module, name):
            setattr(module, name, guard.around("recording", getattr(module, name), _wraps))


def _wraps(*given: Any, **named: Any) -> Callable[[bool, Any], None]:
    from fsdp2prof.recorder.rank.ending import session_of_process

    session = session_of_process()
    module: Any = given[0] if given else named.get("module")

    def wrapped(returned: bool, _: Any) -> None:
        if returned and session is not None and not isinstance(module, (list, tuple)):
            session.watch(module)

    return wrapped
