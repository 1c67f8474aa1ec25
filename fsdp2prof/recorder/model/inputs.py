"""Digests of what a model gets: ranks that read the same data have the same ones, and so have steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.autograd import _profiler_enabled

from fsdp2prof.manifest import LabelsInfo
from fsdp2prof.recorder.model.members import unseen_by_modes

_TYPES = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8}
)
"""Types whose bytes are read."""
_SAMPLE, _TENSORS, _DEEPEST = 1 << 10, 8, 3
"""Elements of a tensor that are read, spread over it, tensors of a forward, and how deep containers hold
them."""

_IGNORED = -100
_MATRIX = 2


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
def ignored_labels(*inputs: Any) -> LabelsInfo | None:
    """Describe a forward's labels if the loss ignores some, from samples; None without such labels.

    Labels are integers with the value that ``cross_entropy`` ignores unless told otherwise.
    """
    with torch.no_grad():
        for tensor in islice(_tensors(inputs, _DEEPEST), _TENSORS):
            if tensor.dtype in (torch.int64, torch.int32):
                labels = _sample(tensor)
                ignored = int((labels == _IGNORED).sum())
                if ignored:
                    return LabelsInfo(positions=tensor.numel(), ignored_frac=ignored / labels.numel())
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


class Padding:
    """Columns of tokens that hold one value in every row at their end, in the inputs of some forwards."""

    def __init__(self) -> None:
        self._columns = self._padded = 0

    @unseen_by_modes()
    def note(self, *inputs: Any) -> None:
        """Count those of a forward's largest matrices of integers, the fewest of any of one shape."""
        with torch.no_grad():
            read = list(islice(_tensors(inputs, _DEEPEST), _TENSORS))
            tokens = [one for one in read if one.dim() == _MATRIX and not one.is_floating_point()]
            largest = max((one.shape for one in tokens), key=lambda shape: shape.numel(), default=None)
            equal = (one for one in tokens if one.shape == largest)
            ends = [end for one in equal if (end := _constant_end(one)) is not None]
        if largest is not None and ends:
            self._columns += largest.numel()
            self._padded += min(ends) * largest[0]

    @property
    def share(self) -> float | None:
        """Of all tokens; None without any."""
        return self._padded / self._columns if self._columns else None


def _constant_end(tokens: torch.Tensor) -> int | None:
    """Return the columns at either end in which every row has the same value; None if all are 0, or labels.

    A mask of ones says that nothing is padding.
    """
    for turned in (tokens, tokens.flip(1)):
        value = turned[0, -1]
        others = (turned != value).any(0).nonzero()
        if value == _IGNORED:
            return None
        if not len(others):
            return 0 if value else None
        if (columns := tokens.shape[1] - 1 - int(others[-1])) > 1:  # one may begin or end each row
            return columns
    return 0


_MOST_NODES = 2000
"""Of an autograd graph that are looked at."""


@unseen_by_modes()
def need_only_inputs(*inputs: Any) -> bool:
    """Whether a forward's inputs need gradients that reach no parameter, only inputs before them.

    False where checkpointing hides what is behind an input, or the graph is large.
    """
    given = islice(_tensors(inputs, _DEEPEST, reading=False), _TENSORS)
    needed = [one for one in given if one.requires_grad]
    leaves = sum(one.grad_fn is None for one in needed)
    left = [one.grad_fn for one in needed if one.grad_fn is not None]
    seen = set(left)
    while left and len(seen) <= _MOST_NODES:
        node = left.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.nn.Parameter) or "Checkpoint" in node.name():
            return False
        leaves += variable is not None
        new = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= new
        left += new
    return leaves > 0 and not left


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
