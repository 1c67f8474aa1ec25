"""An optimizer that keeps Adam's states of few bits, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2prof.estimators.config.low_bits import MOMENTS, LowBits


class LowBitAdam(Optimizer):
    """Makes the states in the first step and updates nothing: for tensors without data.

    Both moments are codes, an fp32 scale a block and a table of fp32 values. The update runs as one kernel a
    parameter and makes nothing else. Source: ``torchao.optim.adam``, ``subclass_8bit`` and ``subclass_4bit``.
    """

    def __init__(self, parameters: Iterable[Tensor], low: LowBits) -> None:
        super().__init__(list(parameters), {})
        self.low = low

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make what is not there yet."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = _states(parameter, self.low)


def _states(parameter: Tensor, low: LowBits) -> dict[str, Any]:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    states: dict[str, Any] = {"step": torch.zeros(())}
    for name in MOMENTS:
        if not low.is_quantized(local.numel()):
            states[name] = torch.zeros_like(local)
            continue
        codes = torch.zeros(local.numel() * low.bits // 8, dtype=torch.uint8, device=local.device)
        states[name] = codes.view_as(local) if low.bits == 8 else codes
        states[f"{name}_scale"] = torch.zeros(local.numel() // low.block)
        states[f"{name}_map"] = torch.zeros(low.codes)
    return states
