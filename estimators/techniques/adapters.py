"""Low-rank adapters beside a model's linear layers, whose own weights are frozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.lora import Lora
from fsdp2prof.estimators.models.builtin import meta_construction
from fsdp2prof.estimators.models.model import ADAPTERS, Model


class LoraLinear(nn.Module):
    """A frozen linear layer with ``scale * B A x`` added, A and B of rank r."""

    def __init__(self, base: nn.Linear, lora: Lora) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(base.in_features, lora.r, bias=False)
        self.lora_b = nn.Linear(lora.r, base.out_features, bias=False)
        self.scale = lora.alpha / lora.r
        self.left_out = False
        """Transform as the frozen layer alone does."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position."""
        if self.left_out:
            frozen: Tensor = self.base_layer(x)
            return frozen
        out: Tensor = self.base_layer(x) + self.lora_b(self.lora_a(x)) * self.scale
        return out


COMMON_NAMES = {
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "lm_head": "output",
}
"""Names of linear layers in Hugging Face's Llama, and theirs in the built-in models, which are Meta's."""


def with_adapters(model: Model, lora: Lora | None, orig_dtype: str, compute_dtype: str) -> Model:
    """Put adapters of ``orig_dtype`` beside the targets, in place; the base gets the dtype asked for.

    What is not quantized beside a quantized base is held in ``compute_dtype``.

    Raises ``ModelError`` for a target that no linear layer is named.
    """
    if lora is None:
        return model
    modules = dict(model.module.named_modules())
    for target in lora.targets:
        names = {target, COMMON_NAMES.get(target)}
        found = [
            fqn
            for fqn, part in modules.items()
            if fqn.rpartition(".")[2] in names and isinstance(part, nn.Linear) and not _is_idle(fqn, model)
        ]
        stacked = {name for fqn in model.experts for name, _ in modules[fqn].named_parameters(recurse=False)}
        if not found and names & {*stacked, "experts"}:
            raise ModelError(f"lora: adapters of stacked experts ({target}) are not modelled: leave it out")
        if not found:
            there = {fqn.rpartition(".")[2] for fqn, part in modules.items() if isinstance(part, nn.Linear)}
            raise ModelError(
                f"lora: no linear layer of {model.name} is named {target!r}; "
                f"it has {', '.join(sorted(there))}"
            )
        for fqn in found:
            parent, _, name = fqn.rpartition(".")
            base = modules[fqn]
            assert isinstance(base, nn.Linear)
            with meta_construction(orig_dtype):
                adapted = LoraLinear(base, lora)
            modules[parent].register_module(name, adapted)
    if lora.base is not None:
        _hold_base_in(model.module, lora.base if lora.quantized is None else compute_dtype)
    return model


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Run a model as it was before its adapters."""
    adapted = [part for part in module.modules() if isinstance(part, LoraLinear)]
    for part in adapted:
        part.left_out = True
    try:
        yield
    finally:
        for part in adapted:
            part.left_out = False


def _is_idle(fqn: str, model: Model) -> bool:
    return any(fqn.startswith(f"{idle}.") for idle in model.idle)


def _hold_base_in(module: nn.Module, dtype: str) -> None:
    """Replace all parameters but the adapters'; what modules share stays shared."""
    held: dict[nn.Parameter, nn.Parameter] = {}
    for fqn, part in module.named_modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if not any(adapter in f".{fqn}.{name}" for adapter in ADAPTERS):
                cast = held.setdefault(parameter, nn.Parameter(parameter.detach().to(getattr(torch, dtype))))
                part.register_parameter(name, cast)
