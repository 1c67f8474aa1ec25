"""Digests of what a model gets: ranks that read the same data have the same ones, and so have steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.autograd import _profiler_enabled

from fsdp2prof.recorder.model.members import unseen_by_modes

_TYPES = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8}
)
"""Types whose bytes are read."""
_SAMPLE, _TENSORS, _DEEPEST = 1 << 10, 8, 3
"""Elements of a tensor that are read, spread over it, tensors of a forward, and how deep containers hold
them."""

_IGNORED = -100


@unseen_by_modes()
def input_digest(*inputs: Any) -> str | None:
    """Return a hash of samples of a forward's tensors; None where they say nothing.

    Reads only plain tensors, and none while a profiler runs, CUDA captures a graph, or torch reports
    synchronizations.
    """
    digest, varies = hashlib.blake2b(digest_size=8), False
    with torch.no_grad():
        for tensor in islice(_tensors(inputs, _DEEPEST), _TENSORS):
            sample = _sample(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            size = tensor.element_size()
            varies |= sample != sample[:size] * (len(sample) // size)
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + sample)
    return digest.hexdigest() if varies else None


@unseen_by_modes()
def ignored_labels(*inputs: Any) -> float | None:
    """Return the share of a forward's labels that the loss ignores, in samples; None without such labels.

    Labels are integers with the value that ``cross_entropy`` ignores unless told otherwise.
    """
    with torch.no_grad():
        for tensor in islice(_tensors(inputs, _DEEPEST), _TENSORS):
            if tensor.dtype in (torch.int64, torch.int32):
                labels = _sample(tensor)
                ignored = int((labels == _IGNORED).sum())
                if ignored:
                    return ignored / labels.numel()
    return None


class Identity(NamedTuple):
    """A tensor as a forward gets it, without keeping it alive: what it is a view of, and the view."""

    base: ref[torch.Tensor]
    view: tuple[int, torch.Size, int]
    """Version of the base, shape and offset of the view."""


def identities(*inputs: Any) -> list[Identity]:
    """Return a forward's tensors as far as they are plain; reads none of them."""
    found = []
    for tensor in islice(_tensors(inputs, _DEEPEST, reading=False), _TENSORS):
        base = tensor if tensor._base is None else tensor._base
        if not base.is_inference():
            view = base._version, tensor.shape, int(tensor.storage_offset())
            found.append(Identity(ref(base), view))
    return found


def are_same(before: Sequence[Identity], now: Sequence[Identity]) -> bool:
    """Whether two forwards get the same tensors, not changed in between; False without any."""
    # References are not compared by themselves: equal ones would compare their tensors.
    return len(before) == len(now) > 0 and all(
        one.base() is other.base() is not None and one.view == other.view
        for one, other in zip(before, now, strict=True)
    )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()[_spread(tensor.shape)].cpu()


def _spread(shape: Sequence[int]) -> tuple[slice, ...]:
    """Return which elements of a tensor are read: every n-th of each dimension, few enough in all."""
    dims = list(range(len(shape)))
    each = dict.fromkeys(dims, 1)
    left = _SAMPLE
    for at, dim in enumerate(sorted(dims, key=lambda dim: shape[dim])):
        most = max(1, int(left ** (1 / (len(dims) - at))))
        each[dim] = -(-shape[dim] // most)
        left //= -(-shape[dim] // each[dim])
    return tuple(slice(None, None, each[dim]) for dim in dims)


def _tensors(inputs: Any, depth: int, *, reading: bool = True) -> Iterator[torch.Tensor]:
    for one in inputs.values() if type(inputs) is dict else inputs:
        if type(one) is torch.Tensor:
            if one.dtype in _TYPES and (is_readable(one) if reading else is_plain(one)):
                yield one
        elif depth and type(one) in (tuple, list, dict):
            yield from _tensors(one, depth - 1, reading=reading)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense, and none that a transform of functions wraps."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not wrapped and tensor.layout is torch.strided


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain and dense, and reading it disturbs no profiler, CUDA graph or sync report."""
    if not is_plain(tensor) or not tensor.numel() or _profiler_enabled():
        return False
    if tensor.device.type == "cuda":
        return not torch.cuda.is_current_stream_capturing() and not torch.cuda.get_sync_debug_mode()
    return tensor.device.type == "cpu"
