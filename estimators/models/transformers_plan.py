"""Tensor parallelism of a Hugging Face model: its class's own plan, applied by transformers itself.

A plan names modules and parameters, a ``*`` for the layer's number, and a style for each: by columns, by
rows, by vocabulary, and so on. transformers turns the parameters into DTensors and puts the collectives
around the modules' forwards; their cost is found by executing a step.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.models.builtin_plan import undivided_heads
from fsdp2prof.estimators.models.losses import head_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_COLUMNS = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"})
_ROWS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise"})
_PACKED = frozenset({"packed_colwise", "packed_rowwise"})
_EMBEDDINGS = MappingProxyType({"embedding_rowwise": 0, "embedding_colwise": 1})
_WHOLE = frozenset(
    {
        "all_reduce",
        "local_params",
        "mla_kv_a_proj",
        "moe_identity_expert",
        "moe_tp_experts",
        "replicate",
        "replicated_with_grad_allreduce",
        "sequence_parallel",
    }
)
"""Styles that leave a module's own parameters whole."""
_PACKED_TOGETHER = 2
"""Matrices in a packed parameter, each divided separately: gate and up."""


@dataclass(frozen=True, slots=True)
class TransformersPlan:
    """A plan with a rule for every module and parameter by its full name."""

    name: str
    """The model's."""
    rules: Mapping[str, str]
    """Parameters before their modules, as transformers applies them."""
    heads: int
    kv_heads: int
    """1 each if attention is not divided by heads."""
    tied: tuple[str, ...]
    """Parameters that are shared with another: divided by their own rules, then tied again."""
    head: str | None
    """The linear layer that makes the logits, where the model says which it is."""
    parallel: Any
    """transformers' module of tensor parallelism."""
    absent: frozenset[str] = frozenset()
    """Modules that another pipeline stage holds."""

    @property
    def is_analysed(self) -> bool:
        """Whether its collectives are known by formula: they are executed."""
        return False

    def divides_sequence(self, sequence_parallel: bool | None) -> bool:
        """Whether norms and residuals are divided by sequence: transformers' own plans keep them whole."""
        return bool(sequence_parallel)

    def divides_logits(self, loss_parallel: bool | None) -> bool:
        """Whether logits stay divided by vocabulary: if asked; transformers' own plans gather them."""
        return bool(loss_parallel)

    def note(self, sequence_parallel: bool | None) -> str:
        """The division, in one sentence."""
        del sequence_parallel  # refused
        return (
            "tensor parallelism by the class's own plan, applied by transformers: norms and residuals whole "
            "on every rank, sums all-reduced, logits gathered unless loss_parallel is given"
        )

    def refusal(self, ranks: int) -> str | None:
        """Why the model cannot be divided among so many ranks: heads that they do not divide."""
        return undivided_heads(self.name, self.heads, self.kv_heads, ranks)

    def apply(
        self, module: nn.Module, mesh: DeviceMesh, loss_parallel: bool | None, sequence_parallel: bool | None
    ) -> None:
        """Divide the module in place: parameters become DTensors of ``mesh``.

        Raises ``ModelError`` for plans that transformers refuses, and for logits that cannot stay divided.
        """
        elsewhere = tuple(f"{fqn}." for fqn in self.absent)
        rules = {
            fqn: style
            for fqn, style in self.rules.items()
            if fqn not in self.absent and not fqn.startswith(elsewhere)
        }
        in_parallel = self.divides_logits(loss_parallel) and self.head not in self.absent
        apart = self._head_in_parallel(rules) if in_parallel else None
        tied = self.tied if not self.absent else ()
        _untie(module, tied)
        try:
            self.parallel.apply_tensor_parallelism(module, mesh, rules)
            if apart is not None:
                style = self.parallel.ColwiseParallel(
                    input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False
                )
                style.install_forward(module.get_submodule(apart), mesh)
        except (ValueError, AttributeError, KeyError) as error:
            raise ModelError(f"model {self.name}: tensor parallelism failed: {error}") from error
        if tied:
            module.tie_weights()  # type: ignore[operator]

    def _head_in_parallel(self, rules: dict[str, str]) -> str:
        """The head, whose rule is taken out of ``rules``: its logits are to stay DTensors."""
        if self.head is None or rules.pop(self.head, None) not in _COLUMNS:
            raise ModelError(
                f"loss_parallel: the plan of {self.name} does not divide a head by vocabulary: leave it out"
            )
        return self.head

    def local_shape(self, fqn: str, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """Shape that the first rank holds of a parameter of ``shape``."""
        style = self.rules.get(fqn, "replicate")
        dim: int | None = _EMBEDDINGS.get(style)
        if style in _COLUMNS:
            dim = max(len(shape) - 2, 0)
        elif style in _ROWS and len(shape) > 1:
            dim = len(shape) - 1
        if dim is None:
            return shape
        parts = _PACKED_TOGETHER if style in _PACKED and len(shape) > 1 else 1
        return (*shape[:dim], parts * -(-shape[dim] // parts // ranks), *shape[dim + 1 :])

    def with_experts_apart(self, experts: tuple[str, ...]) -> TransformersPlan:
        """The same where expert parallelism deals these modules' experts out whole: its rules win."""
        kept = {
            name: style
            for name, style in self.rules.items()
            if not any(name == fqn or name.startswith(f"{fqn}.") for fqn in experts)
        }
        return replace(self, rules=kept)


def plan_of(name: str, module: nn.Module, blocks: tuple[str, ...], text: Any) -> TransformersPlan | str:
    """The plan of a model, or why it has none that can be executed, as the end of a sentence.

    ``text`` is the configuration of its text model.
    """
    kind, version = type(module).__name__, importlib.import_module("transformers").__version__
    try:
        parallel = importlib.import_module("transformers.distributed.tensor_parallel")
        names = importlib.import_module("transformers.distributed.parallel_utils")
        wildcards = names.replace_layer_number_by_wildcard
        _ = parallel.apply_tensor_parallelism, parallel.ColwiseParallel
    except (ImportError, AttributeError):
        return f"cannot be divided: transformers {version} has no apply_tensor_parallelism; 5.23 has"
    plan = dict(getattr(module, "tp_plan", None) or {})
    rules = _expanded(module, plan, wildcards)
    if not any(rule.startswith(f"{block}.") for block in blocks[:1] for rule in rules):
        only = f" but for {', '.join(plan)}" if plan else ""
        return f"has no tensor-parallel plan{only}: transformers {version} gives {kind} none"
    unknown = set(plan.values()) - _COLUMNS - _ROWS - _WHOLE - set(_EMBEDDINGS)
    if unknown:
        return f"is divided in a style that is not modelled: {min(unknown)} (in the plan of {kind})"
    projections = {name.rpartition(".")[2] for name, style in plan.items() if style == "colwise"}
    by_heads = bool(projections & {"q_proj", "q_b_proj", "qkv_proj", "query_key_value"})
    keys_too = bool(projections & {"k_proj", "qkv_proj", "query_key_value"})
    heads = _common(text, "num_attention_heads")
    return TransformersPlan(
        name=name,
        rules=rules,
        heads=heads if by_heads else 0,
        kv_heads=(_common(text, "num_key_value_heads") or heads) if keys_too else 0,
        tied=tuple(getattr(module, "all_tied_weights_keys", None) or ()),
        head=head_of(module),
        parallel=parallel,
    )


def _common(text: Any, name: str) -> int:
    """A number of heads, 0 if none is given; if layers differ (Gemma 4), a number that divides each."""
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else (text,)
    return gcd(*(int(getattr(layer, name, 0) or 0) for layer in layers))


def _untie(module: nn.Module, names: tuple[str, ...]) -> None:
    """Give modules their own parameters in place of another module's."""
    for fqn in names:
        owner, _, name = fqn.rpartition(".")
        part = module.get_submodule(owner)
        own = getattr(part, name)
        part.register_parameter(name, nn.Parameter(torch.empty_like(own), requires_grad=own.requires_grad))


def _expanded(module: nn.Module, plan: Mapping[str, str], wildcards: Callable[[str], str]) -> dict[str, str]:
    """A rule for each module and parameter that the plan means; a parameter has its module's by default."""
    rules: dict[str, str] = {}
    for fqn, part in module.named_modules():
        style = plan.get(wildcards(fqn))
        for name, _ in part.named_parameters(recurse=False):
            own = f"{fqn}.{name}".lstrip(".")
            chosen = plan.get(wildcards(own), style)
            if chosen is not None:
                rules[own] = chosen
        if style is not None:
            rules[fqn] = style
    return rules
