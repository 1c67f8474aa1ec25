"""Work of the recorder's that the training's modes do not see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from fsdp2prof.storage_tracker import PlainOperators


@contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Hide what is done inside from the training's dispatch and function modes, which may count or raise."""
    theirs = [one for one in _get_current_dispatch_mode_stack() if not isinstance(one, PlainOperators)]
    with torch._C.DisableTorchFunction(), _disable_current_modes() if theirs else nullcontext():
        yield
