"""Model states by arithmetic: what a shard, its gradient and torch's optimizers keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from fsdp2prof.estimators.sharding import ParameterGroup
from fsdp2prof.estimators.spec.policy import PolicySpec, dtype_bytes

__all__ = ["ModelStates", "model_states", "optimizer_state_bytes", "step_counter_bytes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStates:
    """Bytes one rank keeps between steps, padding included; on the host under offload."""

    parameter_bytes: int
    gradient_bytes: int
    """While gradients exist: from backward to ``zero_grad``."""
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def model_states(groups: Iterable[ParameterGroup], policy: PolicySpec) -> ModelStates:
    """Sum the padded shards of one rank, their gradients in the original dtype, and optimizer state."""
    parameters = [parameter for group in groups for parameter in group.parameters]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return ModelStates(
        parameter_bytes=sum(p.padded_shard_numel * dtype_bytes(p.dtype) for p in parameters),
        gradient_bytes=sum(p.padded_shard_numel * dtype_bytes(p.dtype) for p in trained),
        optimizer_bytes=sum(
            optimizer_state_bytes(policy, (p.shard_rows(0), *p.shape[1:]), p.dtype) for p in trained
        ),
    )


def optimizer_state_bytes(policy: PolicySpec, shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of state for one parameter of ``shape`` (whole or a shard), its step counter left out."""
    kind = policy.optimizer_kind
    return 0 if kind is None else len(kind.state) * prod(shape) * dtype_bytes(dtype)


def step_counter_bytes(policy: PolicySpec) -> int:
    """Bytes of the step counter of one parameter: fp32, whole on every rank."""
    kind = policy.optimizer_kind
    return dtype_bytes("float32") if kind is not None and kind.counts_steps else 0
