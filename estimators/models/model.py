"""A model ready to be sharded: a module on the meta device and the inputs for training it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fsdp2prof.estimators.config.catalog import TransformerConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from fsdp2prof.estimators.config.choices import KeptLogits, Loss
    from fsdp2prof.estimators.models.decoder import Decoder
    from fsdp2prof.estimators.models.experts import ExpertExchange

ADAPTERS = (".lora_a.", ".lora_b.", "_lora_a", "_lora_b")
"""In the names of low-rank adapters' parameters."""


@dataclass(frozen=True, slots=True)
class LayerPattern:
    """How the blocks of a model repeat: after the first ``start`` of them, every ``period`` blocks."""

    start: int = 0
    period: int = 1

    @classmethod
    def of(cls, kinds: Sequence[object]) -> LayerPattern:
        """The pattern of a list of kinds with the fewest blocks that describe it."""
        count = len(kinds)
        best = cls(0, max(count, 1))
        for period in range(1, count):
            breaks = [index for index in range(count - period) if kinds[index] != kinds[index + period]]
            start = breaks[-1] + 1 if breaks else 0
            if start + period < best.start + best.period:
                best = cls(start, period)
        return best


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The arguments that one micro-batch gives to the model and to the loss."""

    args: tuple[Tensor, ...] = ()
    """Positional arguments of the model's forward."""
    named: Mapping[str, Tensor] = field(default_factory=dict)
    """Its arguments by name."""
    targets: Tensor | None = None
    """The target of the loss."""
    reference: Tensor | None = None
    """Log-probabilities (B, S) of the targets by a reference model, for the losses that use them."""
    keeps_logits: KeptLogits | None = None
    """Whether the caller keeps the logits that the loss was computed of, and in which dtype."""
    beside: tuple[Tensor, ...] = ()
    """Tensors that live as long but are not arguments of the model: a block mask."""
    kept: list[Tensor] = field(default_factory=list)
    """Where a loss leaves them, in the place of those of the batch before."""


class TensorParallel(Protocol):
    """How a model is divided among tensor-parallel ranks."""

    @property
    def is_analysed(self) -> bool:
        """Whether its collectives follow from a formula; otherwise the step is executed to count them."""

    def divides_sequence(self, sequence_parallel: bool | None) -> bool:
        """Whether norms and residuals are divided by sequence, as ``sequence_parallel`` asks or as the plan
        has it."""

    def note(self, sequence_parallel: bool | None) -> str:
        """The division, in one sentence."""

    def divides_logits(self, loss_parallel: bool | None) -> bool:
        """Whether logits stay divided by vocabulary, as ``loss_parallel`` asks or as the plan has it."""

    def refusal(self, ranks: int) -> str | None:
        """Why the model cannot be divided among so many ranks, ``None`` if it can."""

    def apply(
        self, module: nn.Module, mesh: DeviceMesh, loss_parallel: bool | None, sequence_parallel: bool | None
    ) -> None:
        """Divide the module in place: parameters become DTensors of ``mesh``.

        Raises ``ModelError`` for modules that cannot be divided in this way.
        """

    def local_shape(self, fqn: str, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """Shape that the first rank holds of a parameter of ``shape``."""

    def with_experts_apart(self, experts: tuple[str, ...]) -> TensorParallel:
        """The same where expert parallelism deals these modules' experts out whole."""


def elements_of(module: nn.Module) -> int:
    """Elements of all parameters, those of packed weights counted one by one."""
    packed: int = sum(getattr(part, "unpacked_more", 0) for part in module.modules())
    return packed + sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePart:
    """What a stage of a pipeline has of a rank's model."""

    blocks: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model ready to be sharded: the module and the inputs for training it."""

    name: str
    module: nn.Module
    """On the meta device, in the original dtype, parameters frozen as the policy asks by the caller."""
    blocks: tuple[str, ...]
    """FQNs of the repeated layers in forward order; empty if none repeat."""
    towers: tuple[str, ...] = ()
    """FQNs of repeated layers beside them (a vision tower's); ``block`` wraps these too."""
    idle: tuple[str, ...] = ()
    """Modules that the batches do not pass through: their parameters get no gradient."""
    experts: tuple[str, ...] = ()
    """Modules whose parameters are experts, stacked along dimension 0."""
    expert_ranks: int = 1
    """Ranks that these experts are divided among; the module holds this rank's."""
    reach_experts: Callable[[nn.Module, Sequence[str], ExpertExchange, DeviceMesh | None], None] | None = None
    """Lets ``experts`` of the module exchange tokens with ranks that hold others."""
    no_expert_parallel: str = "has no expert-parallel plan"
    """Why there is none, as the end of a sentence that begins with its name."""
    pattern: LayerPattern = LayerPattern()
    config: TransformerConfig | None
    """Shape of the transformer, if known."""
    make_batch: Callable[[int, int, torch.device], Batch]
    """(batch size, sequence length, device) -> one micro-batch."""
    loss: Callable[[nn.Module, Batch, Loss], Tensor]
    """(module, batch, ``PolicySpec.loss``) -> scalar loss; runs the forward.

    Raises ``ModelError`` for a loss that the model cannot have."""
    tensor_parallel: TensorParallel | None = None
    """How tensor-parallel ranks divide it; ``None`` if it has no plan."""
    no_tensor_parallel: str = "has no tensor-parallel plan"
    """Why there is none, as the end of a sentence that begins with its name."""
    decoder: Decoder | None = None
    """How a pipeline cuts it, where its ``config`` does not say."""
    no_pipeline: str = "is not known to be a chain of blocks that a pipeline cuts"
    """Why a pipeline cannot cut it, as the end of a sentence that begins with its name."""
    ring_width: int = 0
    """Elements of a position's keys and values in one block, all heads, as attention around a ring of
    context-parallel ranks moves them; 0 if it cannot run so."""
    no_ring: str = "is not known to run attention around a ring"
    """Why it cannot, as the end of a sentence that begins with its name."""
    inputs: str = "tokens only"
    """The content of its batches."""
    absent: str = "image"
    """The input that its idle modules need."""
    notes: tuple[str, ...] = ()
    """Assumptions of an estimate of the model, one sentence each."""
    references: tuple[str, ...] = ()
    """Parts in plain torch that other libraries' kernels usually replace, one sentence each."""
    stages: tuple[StagePart, ...] = ()
    """Its stages in order, where it is several of a pipeline."""
    roots: tuple[Any, ...] = ()
    """Modules that FSDP sharded as roots: its own, or a view of each stage; none before."""

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Assumptions of an estimate of the model, including its idle modules."""
        notes = (*self.notes, *self.references)
        if not self.idle:
            return notes
        idle = f"{', '.join(self.idle)}, which are held sharded without gradients"
        return (*notes, f"{self.inputs}: no {self.absent} passes through {idle}")

    def divides_logits(self, ranks: int, loss_parallel: bool | None) -> bool:
        """Whether each of ``ranks`` tensor-parallel ranks has a part of the vocabulary's logits."""
        plan = self.tensor_parallel
        return ranks > 1 and plan is not None and plan.divides_logits(loss_parallel)

    @property
    def width(self) -> int | None:
        """Elements of a token's hidden state, which pipeline stages send; None if none can."""
        if self.config is not None:
            return self.config.dim
        return None if self.decoder is None else self.decoder.width

    def ring_share(self, tp: int, *, repeat_kv: bool) -> int:
        """Elements of a position's keys and values of one block, on the heads of one of ``tp`` ranks.

        With ``repeat_kv`` a built-in model has copied them to every query head.
        """
        repeats = self.config.heads // self.config.kv_heads if repeat_kv and self.config is not None else 1
        return self.ring_width * repeats // tp

    def hidden_length(self, ranks: int, tokens: int, sequence_parallel: bool | None) -> int:
        """Of a sequence's ``tokens``, those whose hidden state a tensor-parallel rank of ``ranks`` has."""
        plan = self.tensor_parallel
        divides = plan is not None and plan.divides_sequence(sequence_parallel)
        return tokens // ranks if divides else tokens

    @property
    def expert_count(self) -> int:
        """Experts of a block that this rank holds."""
        if self.config is not None and self.config.experts is not None:
            return self.config.experts.count // self.expert_ranks
        experts = self.module.get_submodule(self.experts[0])
        return int(next(experts.parameters(recurse=False)).shape[0])

    @property
    def running_towers(self) -> tuple[str, ...]:
        """Towers that batches pass through."""
        idle = tuple(f"{fqn}." for fqn in self.idle)
        return tuple(fqn for fqn in self.towers if not fqn.startswith(idle))

    @property
    def parameters(self) -> int:
        """Elements of all parameters, those of experts on other ranks among them."""
        here = elements_of(self.module)
        if self.expert_ranks == 1:
            return here
        modules = [self.module.get_submodule(fqn) for fqn in self.experts]
        local = sum(parameter.numel() for module in modules for parameter in module.parameters())
        return here + (self.expert_ranks - 1) * local
