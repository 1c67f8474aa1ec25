"""What torch's optimizers keep for a parameter, by arithmetic."""

from __future__ import annotations

from math import prod

from fsdp2prof.estimators.policy import PolicySpec, dtype_bytes

__all__ = ["STATES_OF_PARAMETER_SIZE", "optimizer_state_bytes"]

STATES_OF_PARAMETER_SIZE = {
    "adamw": 2,
    "adam": 2,
    "sgd": 0,
    "sgd-momentum": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "adafactor": 0,
    "none": 0,
}
"""State tensors with the parameter's own shape and dtype: Adam's two moments, one running square, ..."""

_COUNTS_STEPS = ("adamw", "adam", "adagrad", "rmsprop", "adafactor")


def optimizer_state_bytes(policy: PolicySpec, shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of state for one parameter of ``shape`` (whole or a shard), its fp32 step counter left out.

    Adafactor keeps one row and one column of the last two dimensions, or a vector's whole variance.
    """
    numel = STATES_OF_PARAMETER_SIZE[policy.optimizer] * prod(shape)
    if policy.optimizer == "adafactor":
        rows_and_columns = prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]
        numel = rows_and_columns if len(shape) > 1 else prod(shape)
    return numel * dtype_bytes(dtype)


def step_counter_bytes(policy: PolicySpec) -> int:
    """Bytes of the step counter of one parameter: fp32, whole on every rank."""
    return 4 if policy.optimizer in _COUNTS_STEPS else 0
