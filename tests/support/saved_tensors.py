"""What autograd saves for backward, counted by its own hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["saved_sizes"]


@contextmanager
def saved_sizes(inputs: list[Tensor]) -> Iterator[list[int]]:
    """Collect the bytes of the storages saved for backward that are no inputs."""
    known = {tensor.untyped_storage()._cdata for tensor in inputs}
    sizes: list[int] = []
    kept: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            kept.append(storage)
            sizes.append(storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
