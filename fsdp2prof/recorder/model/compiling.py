"""What ``torch.compile`` is at work on in this process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

from fsdp2prof.recorder.model.roots import Root

__all__ = ["compiled_modules"]


def compiled_modules(roots: Iterable[Root]) -> list[str] | None:
    """Name the modules under the roots that run compiled, a root itself the empty string.

    None if nothing was given to ``torch.compile`` since the process began, whether it has been called or not;
    empty if what was given is no module under a root.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    # What only switches dynamo off is among them, too, without a backend.
    backends = getattr(frames, "cached_backends", {}).values()
    if not any(callable(backend) for backend in backends):
        return None
    wrapped = {id(item._orig_mod) for item in gc.get_objects() if type(item) is frames.OptimizedModule}
    return [
        name
        for root in roots
        if root.module is not None
        for name, module in root.module.named_modules()
        if id(module) in wrapped or module._compiled_call_impl is not None
    ]
