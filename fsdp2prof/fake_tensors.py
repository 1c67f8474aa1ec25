"""Tensors that have sizes and no data: what an estimate computes on, and a rehearsal of a model too large."""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fsdp2prof.known_values import KnownValues, TensorsAsNumbers, value_of

_ADVISERS = (
    "torch.distributed.tensor._collective_utils",
    "torch.distributed.tensor._redistribute",
    "transformers",
)
"""Loggers whose warnings are for people who train."""
_REPORTS_AGAIN = "torch._subclasses.fake_tensor"
"""Logs a traceback of every operator that fails; whoever catches the error tells of it."""


_TRANSFORMERS = "transformers.utils.import_utils"
_active: list[FakeTensorMode] = []


def appear_real(import_utils: Any) -> None:
    """Let transformers, whose module of this name is given, run fake tensors as it runs real ones.

    It takes them for an export otherwise: it makes a mask of all pairs of tokens where it would leave causal
    attention to the kernel, and repeats keys and values beside it.
    """
    says = getattr(import_utils, "is_fake_tensor", None)  # 5.0 and newer
    if says is None or getattr(says, "knows", None) is _active:
        return

    def is_fake_tensor(item: Any) -> bool:
        return not _active and bool(says(item))

    is_fake_tensor.knows = _active  # type: ignore[attr-defined]
    import_utils.is_fake_tensor = is_fake_tensor


@contextmanager
def fake_tensors(*, allow_real: bool = False, follow_values: bool = False) -> Iterator[FakeTensorMode]:
    """Make every tensor created inside a fake one: shapes and lifetimes are real, the data is not there.

    DTensor works out its results' shapes with fake tensors of the *global* shape, under the active modes;
    here it does so under none but a fake mode of its own, so that they count neither as this rank's memory
    nor as its work. Where a
    program reads a tensor's value it gets 1. The garbage collector rests meanwhile: what a cycle keeps alive
    does not depend on when it runs. Warnings are for people who train, and are not shown.

    With ``allow_real`` an operator may be given real tensors, which then stand for fake ones of their shape;
    without, that is an error. With ``follow_values`` what is computed of constants alone has its true value.
    """
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_apart(propagator: ShardingPropagator, op_schema: Any) -> Any:
        with _disable_current_modes():
            return propagate(propagator, op_schema)

    with ExitStack() as stack:
        stack.callback(setattr, ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate)
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate_apart  # type: ignore[assignment, method-assign]
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name in _ADVISERS:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        logger = logging.getLogger(_REPORTS_AGAIN)
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=allow_real))
        _active.append(mode)
        stack.callback(_active.pop)
        if _TRANSFORMERS in sys.modules:
            appear_real(sys.modules[_TRANSFORMERS])
        stack.enter_context(_AsOnDevice())  # type: ignore[no-untyped-call]
        if follow_values:
            stack.callback(setattr, FakeTensor, "tolist", FakeTensor.tolist)
            FakeTensor.tolist = _listed  # type: ignore[method-assign, assignment]
            stack.enter_context(KnownValues())  # type: ignore[no-untyped-call]
            stack.enter_context(TensorsAsNumbers())
        yield mode


def _listed(tensor: FakeTensor) -> Any:
    """The numbers of a tensor as lists, read at once as from a device: one wait, not one a number."""
    value = value_of(tensor)
    one = tensor.flatten()[0].item() if tensor.numel() else None
    with no_dispatch():
        return torch.full(tensor.shape, one or 0).tolist() if value is None else value.tolist()


class _AsOnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does what tensors without data do otherwise than those of a device.

    ``tensor.item()`` is 1, in the tensor's type. Waiting for a collective gives back what it was given, for
    which a fake tensor has a second memory.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 1.0 if args[0].is_floating_point() else args[0].dtype is torch.bool or 1


def copy_without(module: nn.Module, shared: Collection[nn.Module] = ()) -> nn.Module:
    """Copy a module on meta, whose tensors are still its own: :func:`materialize_fake` replaces them.

    What is in ``shared`` is not copied either, and not to be run.
    """
    kept: list[object] = [*shared, *module.parameters(), *module.buffers()]
    return deepcopy(module, {id(part): part for part in kept})


def materialize_fake(module: nn.Module, left_out: Collection[nn.Module] = ()) -> None:
    """Put a fake tensor of the same shape in the place of every one on meta; a fake mode is active."""
    skipped = {id(inner) for part in left_out for inner in part.modules()}
    for part in module.modules():
        if id(part) in skipped:
            continue
        for name, parameter in list(part.named_parameters(recurse=False)):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            setattr(part, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype))
