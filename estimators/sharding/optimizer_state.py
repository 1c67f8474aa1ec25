"""Calculated optimizer state: the state that torch's optimizers keep for a parameter."""

from __future__ import annotations

from math import prod

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.optimizers import HeldOptimizer, OptimizerFactory, OptimizerKind
from fsdp2prof.estimators.config.policy import PolicySpec, dtype_bytes


def optimizer_state_bytes(policy: PolicySpec, shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of state for one parameter of ``shape`` (whole or a shard), without its step counter.

    Raises ``ModelError`` for optimizers whose state can only be found by running them.
    """
    kind = policy.optimizer_kind
    if isinstance(kind, OptimizerFactory):
        raise ModelError(f"optimizer {kind.source}: its state is known by running it alone")
    if isinstance(kind, HeldOptimizer):
        return sum(elements * dtype_bytes(held) for _, elements, held in kind.held.of(prod(shape), dtype))
    return 0 if kind is None else len(kind.state) * prod(shape) * dtype_bytes(dtype)


def step_counter_bytes(policy: PolicySpec) -> int:
    """Bytes of the step counter of one parameter: fp32, replicated on every rank."""
    kind = policy.optimizer_kind
    counts = isinstance(kind, HeldOptimizer) or (isinstance(kind, OptimizerKind) and kind.counts_steps)
    return dtype_bytes("float32") if counts else 0
