"""Tensor parallelism of the built-in models: Megatron's, norms and residuals divided by sequence or whole.

Dense blocks are divided as torchtitan divides them. What every rank runs whole on the whole sequence (the
router's gate, the compressed vectors of latent attention) computes the gradients of this rank's heads and
experts alone: its weights' gradients are summed over the ranks once, not those of its activations each time.
Experts are divided inside each expert, or, where expert parallelism deals them out, the tokens are.

What attention around a ring of context-parallel ranks moves, and which attention runs so.

torch's ring takes causal scaled dot-product attention without a mask of its own: every rank gathers the keys
and values of the whole sequence, one rank's share at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from fsdp2prof.estimators.config.catalog import TransformerConfig
from fsdp2prof.estimators.models.model import LayerPattern, Model

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.distributed.tensor.placement_types import Placement

    from fsdp2prof.estimators.models.experts import ExpertExchange

_COLUMNS = ("wq", "wk", "wv", "w1", "w3", "wq_b", "wkv_b", "output", "tok_embeddings")
_ROWS = ("wo", "w2")
_ALIGNMENT = 8
"""Elements of bf16 in the 16 bytes to which rows of a grouped product are aligned."""
_EXPERT_DIMS = {"w1": 1, "w2": 2, "w3": 1, "b1": 1, "b3": 1}
"""Parameter of stacked experts -> the dimension that is divided."""


def outline_of(config: TransformerConfig) -> Model:
    """A built-in model without its modules: enough for every limit of a mesh, and known without torch."""
    sparse = [config.experts is not None and config.experts.is_in(layer) for layer in range(config.layers)]
    unbuilt: Any = None
    return Model(
        name=config.name,
        module=unbuilt,
        make_batch=unbuilt,
        loss=unbuilt,
        blocks=tuple(f"layers.{index}" for index in range(config.layers)),
        experts=tuple(f"layers.{layer}.feed_forward.experts" for layer, has in enumerate(sparse) if has),
        pattern=LayerPattern.of(sparse),
        config=config,
        tensor_parallel=None if config.family == "gpt" else BuiltinPlan(config),
        no_tensor_parallel="has no tensor-parallel plan here: GPT's blocks have none",
        reach_experts=None if config.experts is None else _reach_experts,
        ring_width=ring_width(config),
    )


def _reach_experts(
    module: nn.Module, experts: Sequence[str], exchange: ExpertExchange, tensor_parallel: DeviceMesh | None
) -> None:
    from fsdp2prof.estimators.models.experts import reach_experts

    del tensor_parallel  # its ranks know their share of the tokens
    reach_experts(module, experts, exchange)


@dataclass(frozen=True, slots=True)
class BuiltinPlan:
    """How a built-in model is divided.

    A tied head is tied again after both of its modules are divided by vocabulary.
    """

    config: TransformerConfig
    absent: frozenset[str] = frozenset()
    """Modules that another pipeline stage holds."""
    experts_apart: bool = False
    """Expert parallelism deals the experts out: each is whole, and the ranks share the tokens."""
    adapted: bool = False
    """Low-rank adapters beside its layers are divided, too."""

    @property
    def is_analysed(self) -> bool:
        """Whether its collectives are known by formula."""
        config = self.config
        return not (config.experts or config.latent or config.sinks or self.adapted)

    def divides_sequence(self, sequence_parallel: bool | None) -> bool:
        """Whether norms and residuals are divided by sequence: true unless switched off."""
        return sequence_parallel is not False

    def divides_logits(self, loss_parallel: bool | None) -> bool:
        """Whether logits stay divided by vocabulary: true unless switched off."""
        return loss_parallel is not False

    def note(self, sequence_parallel: bool | None) -> str:
        """The division, in one sentence."""
        divided = self.divides_sequence(sequence_parallel)
        whole = "norms and residuals whole on every rank, sums all-reduced"
        note = (
            "tensor parallelism executed with "
            f"{'sequence-parallel norms and residuals' if divided else whole}"
        )
        if self.config.latent is not None:
            note += "; latent attention divided by heads behind its compressed vectors, which stay whole"
        if self.config.experts is not None:
            note += "; router whole, " + (
                "experts not divided: each rank routes its share of the tokens"
                if self.experts_apart
                else "each expert divided by its hidden dimension"
            )
        return note

    def refusal(self, ranks: int) -> str | None:
        """Why the model cannot be divided among so many ranks: heads or experts that they do not divide."""
        config = self.config
        experts = None if self.experts_apart else config.experts
        if experts is not None and experts.ffn_dim % (ranks * _ALIGNMENT):
            return (
                f"tp={ranks} cuts the {experts.ffn_dim} of an expert of {config.name} into parts that are "
                f"no multiples of {_ALIGNMENT}, which grouped products need: deal the experts out (ep)"
            )
        return undivided_heads(config.name, config.heads, config.kv_heads, ranks)

    def apply(
        self, module: nn.Module, mesh: DeviceMesh, loss_parallel: bool | None, sequence_parallel: bool | None
    ) -> None:
        """Divide the module in place: parameters become DTensors of ``mesh``."""
        from torch.distributed.tensor.parallel import parallelize_module

        hidden = _hidden(self.divides_sequence(sequence_parallel))
        plan = {**_ends(self.divides_logits(loss_parallel), hidden), **_attention(self.config, hidden)}
        here = {name: plan[name] for name in plan if name not in self.absent}
        parallelize_module(module, mesh, _beside_adapters(module, here, hidden))
        _divide_blocks(module, mesh, self.experts_apart, hidden)
        if self.config.tied and not self.absent:
            module.tie_weights()  # type: ignore[operator]

    def local_shape(self, fqn: str, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """Shape that the first rank holds of a parameter of ``shape``."""
        dim = self._dim(fqn)
        return tuple(-(-size // ranks) if axis == dim else size for axis, size in enumerate(shape))

    def with_experts_apart(self, experts: tuple[str, ...]) -> BuiltinPlan:
        """The same where expert parallelism deals these modules' experts out whole."""
        del experts  # all that there are
        return replace(self, experts_apart=True)

    def _dim(self, fqn: str) -> int | None:
        module, _, kind = fqn.rpartition(".")
        module, _, leaf = module.rpartition(".")
        if leaf in ("base_layer", "lora_a", "lora_b"):
            leaf = module.rpartition(".")[2]
        if leaf == "experts":
            return None if self.experts_apart else _EXPERT_DIMS.get(kind)
        if leaf in _COLUMNS or kind == "sinks":
            return 0
        return 1 if leaf in _ROWS and kind == "weight" else None


def undivided_heads(name: str, heads: int, kv_heads: int, ranks: int) -> str | None:
    """The reason ``ranks`` cannot share attention by heads, and what frameworks do; ``None`` if they can."""
    if heads % ranks:
        return f"tp={ranks} does not divide the {heads} heads of {name}"
    if kv_heads % ranks:
        return (
            f"tp={ranks} does not divide the {kv_heads} kv_heads of {name}: torchtitan and transformers cut "
            "keys and values by heads, repeat none, and fail there too"
        )
    return None


def _hidden(divided: bool) -> Placement:
    """Placement of residuals (B, S, D): divided by sequence, or whole on every rank."""
    from torch.distributed.tensor import Replicate, Shard

    return Shard(1) if divided else Replicate()


def _ends(loss_parallel: bool, hidden: Placement) -> dict[str, ParallelStyle]:
    from torch.distributed.tensor import Replicate, Shard, parallel

    norms = ("norm", "layers.*.attention_norm", "layers.*.ffn_norm") if hidden.is_shard() else ()
    return {
        "tok_embeddings": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "output": parallel.ColwiseParallel(
            input_layouts=hidden,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
        **{name: parallel.SequenceParallel() for name in norms},
    }


def _attention(config: TransformerConfig, hidden: Placement) -> dict[str, ParallelStyle]:
    from torch.distributed.tensor import Replicate, parallel

    plan: dict[str, Any] = {
        "": parallel.PrepareModuleInput(
            input_layouts=(hidden, None), desired_input_layouts=(Replicate(), None)
        ),
        "wo": parallel.RowwiseParallel(output_layouts=hidden),
    }
    if config.latent is None:
        plan |= {name: parallel.ColwiseParallel() for name in ("wq", "wk", "wv")}
    elif not config.latent.q_rank:
        plan["wq"] = parallel.ColwiseParallel()
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            plan[name] = parallel.SequenceParallel(sequence_dim=2, use_local_output=True)
    return {f"layers.*.attention.{name}".rstrip("."): style for name, style in plan.items()}


def _divide_blocks(module: nn.Module, mesh: DeviceMesh, experts_apart: bool, hidden: Placement) -> None:
    """Divide modules that differ from block to block, and modules that torch has no style for."""
    from fsdp2prof.estimators.models.experts import MixtureOfExperts
    from fsdp2prof.estimators.models.llama import Attention, LatentAttention, TransformerBlock
    from fsdp2prof.estimators.models.local_tensors import distribute_parameters, run_on_local_tensors

    for part in module.modules():
        if isinstance(part, TransformerBlock):
            if isinstance(part.feed_forward, MixtureOfExperts):
                _divide_mixture(part.feed_forward, mesh, experts_apart, hidden)
            else:
                _divide_feed_forward(part.feed_forward, mesh, hidden)
        elif isinstance(part, LatentAttention):
            for name, dim in (("wq_a", None), ("q_norm", None), ("wq_b", 0)):
                inner = getattr(part, name)
                if inner is not None:
                    run_on_local_tensors(inner, mesh, dim)
            for name, dim in (("wkv_a", None), ("kv_norm", None), ("wkv_b", 0)):
                run_on_local_tensors(getattr(part, name), mesh, dim)
        elif isinstance(part, Attention) and part.sinks is not None:
            distribute_parameters(part, mesh, {"sinks": 0})


def _divide_feed_forward(part: nn.Module, mesh: DeviceMesh, hidden: Placement) -> None:
    from torch.distributed.tensor import parallel

    parallel.parallelize_module(part, mesh, _gathered(hidden))
    plan: dict[str, ParallelStyle] = {name: parallel.ColwiseParallel() for name in ("w1", "w3")}
    plan["w2"] = parallel.RowwiseParallel(output_layouts=hidden)
    parallel.parallelize_module(part, mesh, _beside_adapters(part, plan, hidden))


def _beside_adapters(
    module: nn.Module, plan: dict[str, ParallelStyle], hidden: Placement
) -> dict[str, ParallelStyle]:
    """Divide the adapters of a plan's layers, too, as NeMo Automodel does (``parallel_styles.py``).

    By columns, A and B are divided by their outputs, and A's output is gathered. By rows, both are divided by
    their inputs, and the layer's and the adapters' partial sums are reduced together.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard, parallel

    made: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        found = [part for fqn, part in module.named_modules() if fnmatchcase(fqn, name)]
        if not any(hasattr(part, "lora_a") for part in found):
            made[name] = style
        elif isinstance(style, parallel.ColwiseParallel):
            made[f"{name}.base_layer"] = style
            made[f"{name}.lora_a"] = parallel.ColwiseParallel(output_layouts=Replicate())
            made[f"{name}.lora_b"] = parallel.ColwiseParallel()
        else:
            sums: dict[str, Any] = {"output_layouts": Partial(), "use_local_output": False}
            made[f"{name}.base_layer"] = parallel.RowwiseParallel(**sums)
            made[f"{name}.lora_a"] = parallel.RowwiseParallel(output_layouts=Shard(-1))
            made[f"{name}.lora_b"] = parallel.RowwiseParallel(**sums)
            made[name] = parallel.PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=hidden)
    return made


def _gathered(hidden: Placement) -> ParallelStyle:
    from torch.distributed.tensor import Replicate, parallel

    return parallel.PrepareModuleInput(input_layouts=(hidden,), desired_input_layouts=(Replicate(),))


def _divide_mixture(mixture: Any, mesh: DeviceMesh, experts_apart: bool, hidden: Placement) -> None:
    from torch.distributed.tensor import Partial, parallel

    from fsdp2prof.estimators.models.local_tensors import distribute_parameters, run_on_local_tensors

    parallel.parallelize_module(mixture, mesh, _gathered(hidden))
    summed = parallel.PrepareModuleOutput(output_layouts=(Partial(),), desired_output_layouts=(hidden,))
    parallel.parallelize_module(mixture, mesh, summed)
    if mixture.shared_experts is not None:
        plan: dict[str, ParallelStyle] = {name: parallel.ColwiseParallel() for name in ("w1", "w3")}
        plan["w2"] = parallel.RowwiseParallel(output_layouts=Partial())
        parallel.parallelize_module(mixture.shared_experts, mesh, plan)
    run_on_local_tensors(mixture.router.gate, mesh, None)
    if experts_apart:
        mixture.token_ranks, mixture.token_rank = mesh.size(), mesh.get_local_rank()
    else:
        distribute_parameters(mixture.experts, mesh, _EXPERT_DIMS)
        mixture.experts.ranks = mesh.size()


_WINDOWS = ("sliding_window", "attention_chunk_size")


def ring_width(config: TransformerConfig) -> int:
    """Elements of a position's keys and values in a block of a built-in model, all heads together."""
    if config.latent is not None:  # projected to every head before attention
        latent = config.latent
        return config.heads * (latent.nope_dim + latent.rope_dim + latent.value_dim)
    return 2 * config.kv_heads * config.head_dim


def ring_width_of(text: Any, *, eager: bool) -> int | str:
    """The same of a Hugging Face text configuration, or why its attention cannot go around a ring.

    The reason is the end of a sentence that begins with the model's name.
    """
    if eager:
        return "runs its own attention, which does not run on a ring"
    if getattr(text, "is_heterogeneous", False):
        return "has layers whose heads differ, which is not modelled around a ring"
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"has layers of {min(kinds)}, which torch's ring attention does not take"
    for name in _WINDOWS:
        if getattr(text, name, None) and not getattr(text, "layer_types", None):
            return f"has its own mask ({name}), which torch's ring attention does not take"
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    if getattr(text, "kv_lora_rank", None):
        parts = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return heads * sum(int(getattr(text, part)) for part in parts)
    kv_heads = int(getattr(text, "num_key_value_heads", 0) or heads)
    width = int(getattr(text, "head_dim", 0) or 0) or int(text.hidden_size) // max(heads, 1)
    return 2 * kv_heads * width or "does not say how many heads it has"
