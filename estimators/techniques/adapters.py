"""Low-rank adapters beside a model's linear layers, whose own weights are frozen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.lora import EVERY_LAYER, Lora
from fsdp2prof.estimators.models.builtin import meta_construction
from fsdp2prof.estimators.models.experts import ALIGNMENT, GroupedExperts
from fsdp2prof.estimators.models.losses import head_of
from fsdp2prof.estimators.models.model import ADAPTERS, Model


class LoraLinear(nn.Module):
    """A frozen linear layer with ``scale * B A x`` added, A and B of rank r."""

    def __init__(self, base: nn.Linear, lora: Lora) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(base.in_features, lora.r, bias=False)
        self.lora_b = nn.Linear(lora.r, base.out_features, bias=False)
        for one in range(1, lora.runs):
            for name, like in (("lora_a", self.lora_a), ("lora_b", self.lora_b)):
                self.register_parameter(f"of_run_{one}_{name}", nn.Parameter(torch.empty_like(like.weight)))
        self.runs = lora.runs
        self.scale = lora.alpha / lora.r
        self.left_out = False
        """Transform like the frozen layer without adapters."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position."""
        if self.left_out:
            frozen: Tensor = self.base_layer(x)
            return frozen
        if self.runs == 1:
            low: Tensor = self.lora_b(self.lora_a(x))
        else:
            low = F.linear(F.linear(x, self._first_of_all("lora_a")), self._first_of_all("lora_b"))
        out: Tensor = self.base_layer(x) + low * self.scale
        return out

    def _first_of_all(self, name: str) -> Tensor:
        """The first run's matrix of all runs' in one tensor, as prime-rl's MultiLoRALinear makes it."""
        others = [getattr(self, f"of_run_{one}_{name}") for one in range(1, self.runs)]
        return torch.stack([getattr(self, name).weight, *others])[0]


COMMON_NAMES = {
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "lm_head": "output",
    "self_attn": "attention",
    "mlp": "feed_forward",
    "shared_expert": "shared_experts",
}
"""Names of layers in Hugging Face's Llama, and theirs in the built-in models, which are Meta's."""
_OF_EXPERTS = {"w1", "w2", "w3"}
_NO_ADAPTERS = (
    "adapters of stacked experts are modelled in built-in models only; without them the estimate is a lower "
    "bound"
)


def with_adapters(model: Model, lora: Lora | None, orig_dtype: str, compute_dtype: str) -> Model:
    """Put adapters of ``orig_dtype`` beside the targets, in place; the base gets the requested dtype.

    Parameters of a quantized base that are not quantized have ``compute_dtype``.

    As in PEFT, a name that only stacked experts have adapts nothing. Raises ``ModelError`` for a target that
    matches no layer, and if nothing is adapted.
    """
    if lora is None:
        return model
    modules = dict(model.module.named_modules())
    layers = [
        fqn for fqn, part in modules.items() if isinstance(part, nn.Linear) and not _is_idle(fqn, model)
    ]
    for text in lora.targets:
        target = text.removesuffix("?")
        names = {target, ".".join(COMMON_NAMES.get(part, part) for part in target.split("."))}
        if target == EVERY_LAYER or "*" in target:
            found = _matching(layers, "*" if target == EVERY_LAYER else target, model)
        else:
            ends = tuple(f".{name}" for name in names)
            found = [fqn for fqn in layers if f".{fqn}".endswith(ends)]
        if target == "experts" and model.experts:
            parts = [modules[fqn] for fqn in model.experts]
            if text.endswith("?") and not all(isinstance(part, GroupedExperts) for part in parts):
                model = replace(model, notes=(*model.notes, _NO_ADAPTERS))
            else:
                _adapt_experts(model, lora, orig_dtype)
        elif not found and not (text.endswith("?") or (model.experts and names & _OF_EXPERTS)):
            there = {fqn.rpartition(".")[2] for fqn in layers}
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
    if not any(name in f".{fqn}" for fqn, _ in model.module.named_parameters() for name in ADAPTERS):
        raise ModelError(
            f"lora: no linear layer of {model.name} is named {'+'.join(lora.targets)}; "
            "the target experts adapts stacked experts"
        )
    if lora.base is not None:
        _hold_base_in(model.module, lora.base if lora.quantized is None else compute_dtype)
    return model


def _matching(layers: Sequence[str], pattern: str, model: Model) -> list[str]:
    """Layers whose name, or Hugging Face's name for it, matches a pattern; never the head or a router."""
    heads = {"output" if model.config is not None else head_of(model.module)}
    others = {ours: theirs for theirs, ours in COMMON_NAMES.items()} if model.config is not None else {}
    return [
        fqn
        for fqn in layers
        if fqn not in heads
        and ".router." not in f".{fqn}"
        and (
            fnmatchcase(fqn, pattern)
            or fnmatchcase(".".join(others.get(part, part) for part in fqn.split(".")), pattern)
        )
    ]


def _adapt_experts(model: Model, lora: Lora, orig_dtype: str) -> None:
    """Put adapters beside every projection of the stacked experts."""
    if lora.r % ALIGNMENT:
        raise ModelError(f"lora: r={lora.r}: grouped products of experts need a multiple of {ALIGNMENT}")
    for part in (model.module.get_submodule(fqn) for fqn in model.experts):
        if not isinstance(part, GroupedExperts):
            raise ModelError(f"lora: {_NO_ADAPTERS}")
        with meta_construction(orig_dtype):
            part.add_adapters(lora.r, lora.runs, lora.alpha / lora.r)


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Run a model as it was before its adapters."""
    adapted = [part for part in module.modules() if isinstance(part, (LoraLinear, GroupedExperts))]
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
    """Replace all parameters except the adapters'; shared parameters stay shared."""
    held: dict[nn.Parameter, nn.Parameter] = {}
    for fqn, part in module.named_modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if not any(adapter in f".{fqn}.{name}" for adapter in ADAPTERS):
                cast = held.setdefault(parameter, nn.Parameter(parameter.detach().to(getattr(torch, dtype))))
                part.register_parameter(name, cast)
