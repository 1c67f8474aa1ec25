"""Parts of a model, found without its methods, which an override may replace, and without its modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from fsdp2prof.storage_tracker import PlainOperators


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what ``nn.Module.named_modules`` does: each module once, by its first name."""
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        name, one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield name, one
        inside = reversed(_own(one, "_modules").items())
        waiting += [(f"{name}.{key}".lstrip("."), child) for key, child in inside if child is not None]


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what ``nn.Module.named_parameters`` does: each parameter once, by its first name."""
    return _named_tensors(module, "_parameters")


def named_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what ``nn.Module.named_buffers`` does: each buffer once, by its first name."""
    return _named_tensors(module, "_buffers")


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that a module holds itself."""
    return ((name, one) for name, one in _own(module, "_parameters").items() if one is not None)


def _named_tensors(module: nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for fqn, one in named_modules(module):
        for name, tensor in _own(one, kind).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{fqn}.{name}".lstrip("."), tensor


def _own(module: nn.Module, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")[kind]
    return found


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Hide what is done inside from the training's dispatch and function modes, which may count or raise."""
    theirs = [one for one in _get_current_dispatch_mode_stack() if not isinstance(one, PlainOperators)]
    with torch._C.DisableTorchFunction(), _disable_current_modes() if theirs else nullcontext():
        yield
