"""Whether ``torch.compile`` is at work in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from fsdp2prof.recorder.roots import Root

__all__ = ["compiled_modules", "is_used"]


def is_used(roots: Iterable[Root]) -> bool:
    """Tell whether anything was given to ``torch.compile``, called or not, since the process began."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    # What only switches dynamo off is kept there, too, without a backend.
    backends = getattr(frames, "cached_backends", {}).values()
    return any(callable(backend) for backend in backends) or bool(compiled_modules(roots))


def compiled_modules(roots: Iterable[Root]) -> list[str]:
    """Name the modules under the roots that run compiled; a root of its own is the empty string."""
    return [
        name
        for root in roots
        if root.module is not None
        for name, module in root.module.named_modules()
        if _is_compiled(module)
    ]


def _is_compiled(module: nn.Module) -> bool:
    frames: Any = sys.modules["torch._dynamo.eval_frame"]
    return isinstance(module, frames.OptimizedModule) or module._compiled_call_impl is not None
