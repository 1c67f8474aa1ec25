"""An optimizer that keeps Adam's states as another one holds them, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2prof.estimators.config.held_states import LowBits, MasterWeights


class HeldAdam(Optimizer):
    """Creates the states in the first step and updates nothing: for tensors without data.

    The update runs as kernels in place and allocates nothing else. Source: ``torchao.optim.adam``,
    ``subclass_8bit`` and ``subclass_4bit``; ``transformer_engine.pytorch.optimizers.fused_adam``.
    """

    def __init__(self, parameters: Iterable[Tensor], held: LowBits | MasterWeights) -> None:
        super().__init__(list(parameters), {})
        self.held = held

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Create the states that do not exist yet."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = self._states(parameter)

    def _states(self, parameter: Tensor) -> dict[str, Any]:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        states: dict[str, Any] = {"step": torch.zeros(())}
        for name, elements, dtype in self.held.of(local.numel(), str(local.dtype).removeprefix("torch.")):
            states[name] = local.new_zeros(elements, dtype=getattr(torch, dtype))
        return states
