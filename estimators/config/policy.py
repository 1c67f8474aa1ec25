"""How a run that has not happened trains: FSDP2 policy, precision, checkpointing, optimizer, batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import (
    PIECES,
    SELECTION,
    ActivationCheckpointing,
    Allocator,
    Attention,
    CheckpointingMode,
    Documents,
    Every,
    ExpertDispatch,
    ExpertShards,
    FlexDocuments,
    Float8,
    InPieces,
    KeptLogits,
    Loss,
    LossMode,
    MaskedDocuments,
    Mlp,
    Norm,
    Prefetch,
    Reshard,
    ReshardRule,
    VarlenDocuments,
    base_of,
)
from fsdp2prof.estimators.config.extra_models import (
    ExtraModel,
    ExtraModels,
    ExtraModelsText,
    ImageSize,
    ImageSizeText,
)
from fsdp2prof.estimators.config.lora import QUANTIZED, Lora, LoraText
from fsdp2prof.estimators.config.model import MOST_LAYERS
from fsdp2prof.estimators.config.optimizers import (
    HELD,
    IMPLEMENTATIONS,
    OPTIMIZERS,
    HeldOptimizer,
    OptimizerFactory,
    OptimizerImpl,
    OptimizerKind,
)
from fsdp2prof.estimators.config.option import (
    ByUnit,
    Dtype,
    Flag,
    Integer,
    Names,
    Number,
    PerUnit,
    Prefetched,
    Regex,
    Text,
    Words,
    YesNo,
    of_batch,
    of_checkpointing,
    of_parallelism,
    of_precision,
    of_sharding,
    of_software,
    of_training,
    options_of,
    plain,
    read_options,
)
from fsdp2prof.estimators.config.pipeline import (
    Interleaved,
    LoopedBfs,
    PipelineSchedule,
    ScheduleWord,
    ZeroBubble,
    schedule_rule,
    stages_of,
)
from fsdp2prof.estimators.torch_rules import TorchRules, torch_rules
from fsdp2prof.vocabulary import Sync

_MOST_TOKENS = 1 << 28
"""Of a rank's micro-batch: its logits have 2**46 elements then, and sizes still fit 64 bits."""
_MOST_REPEATS = 4096
"""Micro-batches of a step: each is executed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpec:
    """Settings of a training besides model and mesh: batch, sharding, precision, checkpointing, optimizer.

    Fields accept the text of the command line (``ac="every:2"``, ``param_dtype="bf16"``) and store typed
    values. Raises ``ModelError`` with one line if a value is unknown or contradicts another.
    """

    batch_size: int = of_batch(
        1,
        Integer(1, _MOST_TOKENS),
        "Sequences per rank and micro-batch; with loss=dpo, pairs of sequences.",
        everyday=True,
        planned=True,
    )
    seq_len: int = of_batch(
        4096,
        Integer(1, _MOST_TOKENS),
        "Tokens per sequence, before context parallelism splits it.",
        everyday=True,
    )
    documents: Documents | None = of_batch(
        None,
        Words(words=(), none=True, counted=(MaskedDocuments, VarlenDocuments, FlexDocuments)),
        "Pack K documents of equal length into each sequence, without attention between documents: by "
        "transformers' mask for SDPA, FlashAttention's variable lengths, or flex attention's block mask.",
    )
    images: int = of_batch(
        0, Integer(0, _MOST_REPEATS), "Images in each sequence, for a Hugging Face model of text and images."
    )
    image_size: ImageSize | None = of_batch(
        None, ImageSizeText(), "Image size in pixels, if the vision tower accepts any size."
    )
    grad_accum: int = of_batch(
        1, Integer(1, _MOST_REPEATS), "Micro-batches per optimizer step.", everyday=True, planned=True
    )
    sync: Sync = of_batch(
        "last",
        Words(words=get_args(Sync)),
        "Reduce gradients only after the last micro-batch, or after each.",
        planned=True,
    )
    wrap: tuple[str, ...] = of_sharding(
        ("block",),
        Names("block, root, class names or module names"),
        "Units to wrap besides the root: block, a class, a module (* matches one name); a+b in one "
        "call; root wraps nothing else.",
        planned=True,
    )
    reshard: Reshard | ByUnit = of_sharding(
        "default",
        PerUnit(Words(words=get_args(ReshardRule), number="a number of ranks"), "default"),
        "Resharding after forward: fully_shard's rule (all but the root), torchtitan's (also not the unit "
        "after the last block, or that block), all, none, or to K ranks; per unit, for example "
        "norm+output=never.",
        planned=True,
    )
    reshard_root: bool | None = of_sharding(
        None, Flag(unset=True, off="--keep-root"), "Overrides --reshard for the root.", planned=True
    )
    param_dtype: str | ByUnit | None = of_precision(
        "bfloat16",
        PerUnit(Dtype(none=True), "bfloat16"),
        "Dtype of the all-gather and of compute; none: the original dtype.",
    )
    reduce_dtype: str | ByUnit | None = of_precision(
        "float32",
        PerUnit(Dtype(none=True), "float32"),
        "Dtype of gradient reduction; none: the gradient's dtype.",
    )
    output_dtype: str | ByUnit | None = of_precision(
        None, PerUnit(Dtype(none=True), None), "Dtype that a unit's outputs are cast to; none: no cast."
    )
    orig_dtype: str = of_precision("float32", Dtype(), "Dtype of the shards, gradients and optimizer state.")
    offload: bool = of_sharding(
        False, Flag(), "CPUOffloadPolicy: shards, gradients and optimizer state in pinned host memory."
    )
    offload_optimizer: bool = of_training(
        False,
        Flag(),
        "The optimizer's state is in pinned host memory, and on the device while it updates (prime-rl's "
        "optim_cpu_offload).",
    )
    offload_activations: bool = of_checkpointing(
        False,
        Flag(),
        "Tensors that forward saves are copied to pinned host memory, and back where backward needs them.",
    )
    lora: Lora | None = of_training(
        None,
        LoraText(),
        "Low-rank adapters for the linear layers of these names, all-linear, or experts; all else is frozen, "
        "in base=DTYPE, or in 4 bits: base=nf4 (torchao), base=bnb-nf4 (bitsandbytes).",
    )
    trainable: str | None = of_training(
        None, Regex(), "Regular expression for the names of trained parameters; others are frozen."
    )
    ac: ActivationCheckpointing = of_checkpointing(
        "none",
        Words(
            words=get_args(CheckpointingMode),
            counted=Every,
            refused=(
                ("memory-budget", "use op, or full and none as the two ends of a budget"),
                ("budget", "use op, or full and none as the two ends of a budget"),
                ("offload", "use full with offload_activations"),
                ("submodule", "use children: each child module of a block, on its own"),
            ),
        ),
        "Activation checkpointing: of every block, of each child module of every block on its own "
        "(fsdp_activation_checkpointing before accelerate 1.15), selective by operator, or of every K-th "
        "block.",
        everyday=True,
        planned=True,
    )
    optimizer: str = of_training(
        "adamw",
        Words(words=(*OPTIMIZERS, *HELD, "none"), factory=True),
        "The optimizer, by name or built by a function of the parameters; none: forward and backward only.",
        everyday=True,
    )
    optimizer_impl: OptimizerImpl = of_training(
        "foreach",
        Words(
            words=tuple(IMPLEMENTATIONS),
            refused=(
                ("in-backward", "use fused with clip_grad=false, which also holds all sharded gradients"),
                ("cpu-offload", "use offload_optimizer, which updates on the device"),
            ),
        ),
        "Optimizer implementation.",
    )
    clip_grad: bool = of_training(True, Flag(), "Clip the global gradient norm each step (foreach).")
    loss: Loss = of_training(
        "full",
        Words(words=get_args(LossMode), counted=PIECES),
        "Cross-entropy over all logits in fp32, (native) their own dtype or with the gradient in their place "
        "(in-place: Liger's, Transformer Engine's), compiled, fused with the head, "
        "or in chunks: K of the sequence, recomputed, kept (torchtune) or with their backward at once "
        "(torchtitan); of K tokens (TRL); of K entries of the vocabulary, or blocks of K by K (prime-rl). "
        "logprobs is for reinforcement learning; dpo takes pairs, chosen and rejected in one batch.",
        everyday=True,
    )
    keep_logits: KeptLogits | None = of_training(
        None,
        Words(words=get_args(KeptLogits), none=True),
        "Logits that the script still holds in backward, until the next forward replaces them: as the "
        "model returns them (own), or the fp32 copy for the loss.",
        memory_only=True,
    )
    loss_parallel: bool | None = of_parallelism(
        None,
        Flag(unset=True),
        "Under tensor parallelism, keep the logits sharded by vocabulary. By default built-in models do, "
        "and Hugging Face plans gather them.",
        planned=True,
    )
    sequence_parallel: bool | None = of_parallelism(
        None,
        Flag(unset=True),
        "Under tensor parallelism, divide norms and residuals by sequence. By default built-in models do, "
        "and Hugging Face plans keep them whole.",
        planned=True,
    )
    forward_prefetch: Prefetch | ByUnit = of_sharding(
        0, PerUnit(Prefetched(MOST_LAYERS), 0), "Blocks prefetched explicitly in forward, or units by name."
    )
    backward_prefetch: Prefetch | ByUnit = of_sharding(
        0,
        PerUnit(Prefetched(MOST_LAYERS), 0),
        "Blocks prefetched explicitly in backward, or units by name; 0: FSDP's implicit prefetch of one.",
    )
    unshard_in_backward: bool | ByUnit = of_sharding(
        True,
        PerUnit(YesNo(), True),
        "Whether parameters are gathered for backward; no for units whose backward needs none, for example "
        "tok_embeddings=no.",
        planned=True,
    )
    separate_reduce_scatter_group: bool = of_sharding(
        False, Flag(), "A separate communicator for reduce-scatter."
    )
    reduce_scatter_buffers: int = of_sharding(1, Integer(1, MOST_LAYERS), "Reduce-scatter inputs in flight.")
    compile: bool = of_software(False, Flag(), "torch.compile of each block.", everyday=True)
    async_tp: bool = of_parallelism(
        False,
        Flag(),
        "Asynchronous tensor parallelism: the compiler overlaps matrix products with their collectives.",
        planned=True,
    )
    float8: Float8 | None = of_precision(
        None,
        Words(
            words=get_args(Float8),
            none=True,
            refused=(("nvfp4", "use mxfp8, which moves twice as many bytes per factor"),),
        ),
        "float8 training of the linear layers inside blocks, by torchao's recipes; mxfp8 is its MX linear.",
    )
    fp8_all_gather: bool = of_precision(
        False, Flag(), "All-gather the weights of linear layers inside blocks as float8."
    )
    torch: str | None = of_software(
        None, Text("VERSION"), "torch version of the run, such as 2.6; by default the installed one."
    )
    attention: Attention = of_software(
        "flash",
        Words(
            words=get_args(Attention),
            refused=(
                ("flash4", "use cudnn, the fastest modelled on Blackwell"),
                ("te", "use cudnn, which Transformer Engine runs"),
                ("transformer-engine", "use cudnn, which it runs"),
                ("flex", "use flash, whose saved tensors are the same size; flex is slower"),
                ("sage", "use flash3"),
            ),
        ),
        "Attention kernel: flash is FlashAttention-2, flash3 FlashAttention-3 on Hopper.",
    )
    attention_is_saved: bool | None = of_checkpointing(
        None,
        Flag(unset=True, off="--attention-is-recomputed"),
        "Whether ac=op saves attention's results; until December 2025 torchtitan's list had only those of "
        "flash and efficient.",
        planned=True,
    )
    ac_saves: tuple[str, ...] | None = of_checkpointing(
        None,
        Names("_c10d_functional.all_to_all_single", none=True),
        "Further operators whose results ac=op saves, such as _c10d_functional.all_to_all_single.",
        planned=True,
    )
    ac_recomputes: tuple[str, ...] | None = of_checkpointing(
        None,
        Names("router.gate", none=True),
        "Linear layers, by part of their name, whose matrix products (and all others of that shape) ac=op "
        "recomputes and does not count.",
        planned=True,
    )
    norm: Norm | None = of_software(
        None,
        Words(words=get_args(Norm), none=True),
        "RMSNorm of the built-in models: separate operators in fp32, or one kernel. Default: composed.",
    )
    repeat_kv: bool = of_software(
        False,
        Flag(),
        "Built-in models copy keys and values to every query head before attention, as torchtitan did until "
        "January 2026; other software lets the kernel read them.",
    )
    mlp: Mlp | None = of_software(
        None,
        Words(words=get_args(Mlp), none=True),
        "SiLU and product of the built-in models' SwiGLU: two operators, or Liger's one kernel. Default: "
        "composed.",
    )
    allocator: Allocator | None = of_software(
        None,
        Words(words=get_args(Allocator), none=True),
        "Segments of the CUDA caching allocator. Default: expandable, with a range that covers both.",
        memory_only=True,
    )
    fused_kernels: bool = of_software(
        False,
        Flag(),
        "Blocks run fused kernels other than torch's (Transformer Engine): ranges begin at what those save.",
    )
    record_streams: bool | None = of_software(
        None,
        Flag(unset=True),
        "Whether NCCL's asynchronous collectives call record_stream. Default: only before torch 2.8.",
        memory_only=True,
    )
    expert_shards: ExpertShards = of_sharding(
        "auto",
        Words(words=get_args(ExpertShards)),
        "Dimension along which FSDP shards stacked experts: experts, or their hidden dimension; auto is "
        "hidden if expert parallelism leaves more ranks than experts, as in torchtitan.",
    )
    expert_dispatch: ExpertDispatch = of_parallelism(
        "all-to-all",
        Words(words=get_args(ExpertDispatch)),
        "How tokens reach experts on other ranks: a copy for each expert (all-to-all), or one for each node "
        "and rank that has any of its experts (once), as DeepEP and HybridEP send them.",
    )
    imbalance: float = of_parallelism(
        1.0,
        Number(1.0),
        "Tokens received by a rank's experts under expert parallelism, as a multiple of the mean.",
    )
    pp_stage: int = of_parallelism(
        0,
        Integer(0, MOST_LAYERS),
        "Pipeline stage to estimate; the first has the embedding, the last has norm and head.",
        planned=True,
    )
    pp_end_layers: int = of_parallelism(
        0,
        Integer(0, MOST_LAYERS),
        "Number of layers that the embedding, and the last norm with the head, count as when blocks are "
        "distributed over stages; torchtitan: 1.",
    )
    pp_schedule: PipelineSchedule = of_parallelism(
        "1f1b",
        Words(
            words=get_args(ScheduleWord),
            counted=(Interleaved, LoopedBfs, ZeroBubble),
            refused=(
                (
                    "dualpipev",
                    "use zbv, which places its stages alike and does not overlap two micro-batches",
                ),
                ("dualpipe", "use zbv, which does not overlap two micro-batches"),
            ),
        ),
        "Pipeline schedule: one stage per rank (1f1b, gpipe, zb1p), two in a V (zbv), or K stages per "
        "rank; zb1p and zbv are zero-bubble schedules.",
        planned=True,
    )
    pp_runs: int = of_parallelism(
        1,
        Integer(1, _MOST_REPEATS),
        "Times per step that the pipeline schedule runs, each with its share of the micro-batches and a "
        "reduction of gradients at its end.",
    )
    extra_model: ExtraModels | None = of_training(
        None,
        ExtraModelsText(),
        "Frozen models that run forward without gradients before each micro-batch: reference and reward "
        "models; self is the trained model (without its adapters, or for old log-probabilities).",
    )

    attention_is_stated: bool = field(default=False, compare=False, repr=False)
    """Whether the user, a file or a stack stated the attention kernel, even the default one."""

    def __post_init__(self) -> None:
        read_options(self)
        if self.sequences * self.seq_len > _MOST_TOKENS:
            raise ModelError(
                f"{self.sequences} sequences of {self.seq_len} tokens are more than {_MOST_TOKENS} tokens"
            )
        if self.image_size is not None and not self.images:
            raise ModelError("image_size: there is no image; add images=N")
        if self.fp8_all_gather and self.float8 != "tensorwise":
            raise ModelError(
                "fp8_all_gather needs float8=tensorwise: only its weights are gathered as float8"
            )
        if self.async_tp and not self.compile:
            raise ModelError("async_tp: the compiler does it; add compile")
        torch_rules(self.torch)
        for name in ("forward_prefetch", "backward_prefetch"):
            if isinstance(base_of(getattr(self, name)), tuple):
                raise ModelError(f"{name}: say which unit prefetches them, as layers.0=layers.1>layers.2")
        if self.record_streams and not self.rules.collectives_record_streams:
            raise ModelError(f"record_streams: torch {self.rules.version} never does; it ended with 2.8")
        if self.ac == "children" and self.compile:
            raise ModelError(
                "ac=children: how a compiled block is partitioned around checkpoints inside it is "
                "not modelled; ac=full is the least, ac=none the most that it saves"
            )
        for name in SELECTION:
            if getattr(self, name) is not None and self.ac != "op":
                raise ModelError(f"{name}: without ac=op nothing chooses what is saved")
        if self.offload and self.offload_optimizer:
            raise ModelError("offload_optimizer: with offload, optimizer state is on the host already")
        if self.keep_logits is not None and (self.loss == "fused" or self.loss_in_pieces):
            raise ModelError(f"keep_logits: loss={self.loss} never makes them whole")
        refusal = self.optimizer_kind and self.optimizer_kind.refusal(self.optimizer_impl)
        if refusal:
            raise ModelError(f"optimizer_impl: {refusal}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PolicySpec:
        """Build from plain values (a configuration file, the command line).

        Raises ``ModelError`` for an unknown key.
        """
        known = options_of(cls)
        unknown = sorted(map(str, set(values) - set(known)))
        if unknown:
            raise ModelError(f"policy: unknown option {unknown[0]!r}; there are {', '.join(sorted(known))}")
        return cls(**values, attention_is_stated="attention" in values)

    def to_mapping(self) -> dict[str, Any]:
        """The plain values :meth:`from_mapping` builds an equal policy from."""
        return plain(self)

    def without_checkpointing(self) -> PolicySpec:
        """The same policy, in which nothing is recomputed."""
        return replace(self, ac="none", attention_is_saved=None, ac_saves=None, ac_recomputes=None)

    @property
    def optimizer_kind(self) -> OptimizerKind | HeldOptimizer | OptimizerFactory | None:
        """The entry in the table of optimizers, or the user's own; ``None`` if nothing is trained."""
        if ":" in self.optimizer:
            return OptimizerFactory(source=self.optimizer)
        return OPTIMIZERS.get(self.optimizer) or HELD.get(self.optimizer)

    @property
    def uses_host(self) -> bool:
        """Whether anything of the training is in host memory."""
        return self.offload or self.offload_optimizer or self.offload_activations

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch: DPO concatenates the chosen and the rejected one of each pair."""
        return self.batch_size * (2 if self.loss == "dpo" else 1)

    @property
    def other_models(self) -> tuple[ExtraModel, ...]:
        """Frozen models beside the trained one, in the order in which they run."""
        return () if self.extra_model is None else self.extra_model.others

    @property
    def runs_itself_before(self) -> bool:
        """Whether each micro-batch first runs the trained model without gradients."""
        return self.extra_model is not None and self.extra_model.runs_itself

    @property
    def freezes(self) -> bool:
        """Whether some parameters are to stay as they are."""
        return self.trainable is not None or self.lora is not None

    @property
    def follows_values(self) -> bool:
        """Whether the model reads values of its batches: image positions, document ends."""
        return self.images > 0 or isinstance(self.documents, MaskedDocuments)

    @property
    def roots(self) -> int:
        """Models that are sharded, each with its own root."""
        return 1 + len(self.other_models)

    @property
    def ac_every(self) -> int | None:
        """K if every K-th block is checkpointed; otherwise ``None``."""
        return self.ac.count if isinstance(self.ac, Every) else None

    def checkpoints(self, block: int) -> bool:
        """Whether a block, counted from 0, is checkpointed: its backward recomputes part of its forward."""
        return self.ac != "none" and (block + 1) % (self.ac_every or 1) == 0

    @property
    def stages_per_rank(self) -> int:
        """Stages that a rank of a pipeline holds."""
        return stages_of(self.pp_schedule)

    @property
    def pipelined(self) -> int:
        """Micro-batches of one run of the pipeline schedule."""
        return self.grad_accum // self.pp_runs

    @property
    def splits_backward(self) -> bool:
        """Whether its pipeline runs a backward in two parts."""
        return schedule_rule(self.pp_schedule).splits_backward

    @property
    def loss_in_pieces(self) -> bool:
        """Whether the loss never has all logits at once, as ``fused`` has not either."""
        return isinstance(self.loss, InPieces)

    @property
    def rules(self) -> TorchRules:
        """The rules of the run's torch version."""
        return torch_rules(self.torch)

    @property
    def leaves_attention_open(self) -> bool:
        """Whether another attention than the default may run: neither it nor torch's version is stated."""
        return self.torch is None and self.attention == "flash" and not self.attention_is_stated

    @property
    def recomputes_attention(self) -> bool:
        """Whether ``ac="op"`` recomputes attention."""
        return self.ac == "op" and self.attention_is_saved is False

    @property
    def records_streams(self) -> bool:
        """Whether asynchronous collectives call ``record_stream``, as far as is known."""
        if self.record_streams is None:
            return self.rules.collectives_record_streams
        return self.record_streams

    @property
    def compute_dtype(self) -> str:
        """Dtype of unsharded parameters and of activations, but for units that have their own."""
        return base_of(self.param_dtype) or self.orig_dtype

    @property
    def product_dtype(self) -> str:
        """Dtype of most matrix products: frozen weights beside adapters may have their own."""
        held = None if self.lora is None or self.lora.base in QUANTIZED else self.lora.base
        return base_of(self.param_dtype) or held or self.orig_dtype

    @property
    def gradient_dtype(self) -> str:
        """Dtype of the reduce-scatter, but for units that have their own."""
        return base_of(self.reduce_dtype) or self.compute_dtype
