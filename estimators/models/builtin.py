"""Built-in configuration -> :class:`Model`: module on meta, token batches, loss, tensor-parallel plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.models.catalog import TransformerConfig
from fsdp2prof.estimators.models.gpt import GptTransformer
from fsdp2prof.estimators.models.llama import LlamaTransformer
from fsdp2prof.estimators.models.losses import loss_of_model
from fsdp2prof.estimators.models.model import Batch, LayerPattern, Model
from fsdp2prof.estimators.spec.policy import Chunked, Loss

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["BuiltinPlan", "build_builtin", "meta_construction", "token_batch", "token_loss"]

_COLUMNS = ("wq", "wk", "wv", "w1", "w3")
_ROWS = ("wo", "w2")


_RANDOM = {
    *(getattr(Tensor, name) for name in ("normal_", "uniform_", "random_", "bernoulli_", "exponential_")),
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.kaiming_uniform_,
}


class _NoData(TorchFunctionMode):
    """Leave tensors as they are where they would be filled at random: on meta there is nothing to fill.

    torch's meta kernels of these are Python and import the compiler, which takes seconds. ``torch.tensor``
    gives an empty one of its shape, since fake tensors do not know one that it makes on meta.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        if func is torch.tensor and "device" not in kwargs:
            return torch.empty_like(func(*args, **kwargs, device="cpu"), device="meta")
        return func(*args, **kwargs)


@contextmanager
def meta_construction(orig_dtype: str) -> Iterator[None]:
    """Construct modules on the meta device with floating-point parameters of ``orig_dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, orig_dtype))
    try:
        with torch.device("meta"), _NoData():
            yield
    finally:
        torch.set_default_dtype(before)


def build_builtin(config: TransformerConfig, seq_len: int, orig_dtype: str) -> Model:
    """Build a built-in model. Raises ``ModelError`` for more positions than the model has."""
    if config.family == "gpt" and seq_len > config.context:
        raise ModelError(
            f"{config.name} has {config.context} learned positions: seq_len {seq_len} is too long"
        )
    with meta_construction(orig_dtype):
        module = GptTransformer(config) if config.family == "gpt" else LlamaTransformer(config, seq_len)
    parallel = config.family != "gpt" and not (config.experts or config.latent)
    sparse = [config.experts is not None and config.experts.is_in(layer) for layer in range(config.layers)]
    return Model(
        name=config.name,
        module=module,
        blocks=tuple(f"layers.{index}" for index in range(config.layers)),
        experts=tuple(f"layers.{layer}.feed_forward.experts" for layer, has in enumerate(sparse) if has),
        pattern=LayerPattern.of(sparse),
        config=config,
        make_batch=partial(token_batch, config.vocab_size),
        loss=token_loss,
        tensor_parallel=BuiltinPlan(config) if parallel else None,
        no_tensor_parallel="has no tensor-parallel plan here: " + _undivided(config),
    )


def _undivided(config: TransformerConfig) -> str:
    if config.experts:
        return "its experts are divided by ep, or given as a Hugging Face configuration by tp"
    return "latent attention has none" if config.latent else "GPT's blocks have none"


def token_batch(vocab_size: int, batch_size: int, seq_len: int, device: torch.device) -> Batch:
    """Random token ids and next tokens, both (B, S) int64."""
    tokens = torch.randint(vocab_size, (batch_size, seq_len), device=device)
    targets = torch.randint(vocab_size, (batch_size, seq_len), device=device)
    return Batch(args=(tokens,), targets=targets)


def token_loss(module: nn.Module, batch: Batch, how: Loss) -> Tensor:
    """Loss of the next token; what is chunked runs the head inside of the model's own forward."""
    if isinstance(how, Chunked):
        loss: Tensor = module(*batch.args, batch.targets, how.count)
        return loss
    return loss_of_model("output", module, batch, how)


@dataclass(frozen=True, slots=True)
class BuiltinPlan:
    """Megatron-style tensor parallelism with sequence-parallel norms and residuals, as torchtitan applies it.

    A tied head is tied again after both of its modules are divided by vocabulary.
    """

    config: TransformerConfig
    absent: frozenset[str] = frozenset()
    """Modules that another pipeline stage holds."""

    @property
    def is_analysed(self) -> bool:
        """Whether its collectives are known by formula."""
        return True

    @property
    def note(self) -> str:
        """What is divided and how, in one sentence."""
        return "tensor parallelism executed with sequence-parallel norms and residuals"

    def refusal(self, ranks: int) -> str | None:
        """Why the model cannot be divided among so many ranks: heads that they do not divide."""
        return undivided_heads(self.config.name, self.config.heads, self.config.kv_heads, ranks)

    def apply(self, module: nn.Module, mesh: DeviceMesh, loss_parallel: bool) -> None:
        """Divide the module in place: parameters become DTensors of ``mesh``."""
        from torch.distributed.tensor.parallel import parallelize_module

        plan = _tensor_parallel_plan(self.config, loss_parallel)
        parallelize_module(module, mesh, {name: plan[name] for name in plan if name not in self.absent})
        if self.config.tied and not self.absent:
            assert isinstance(module, LlamaTransformer)
            module.tie_weights()

    def local_shape(self, fqn: str, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """Shape that the first rank holds of a parameter of ``shape``."""
        dim = _tensor_parallel_dim(fqn)
        return tuple(-(-size // ranks) if axis == dim else size for axis, size in enumerate(shape))


def undivided_heads(name: str, heads: int, kv_heads: int, ranks: int) -> str | None:
    """Why ``ranks`` cannot share attention by heads, and what frameworks do; ``None`` if they can."""
    if heads % ranks:
        return f"tp={ranks} does not divide the {heads} heads of {name}"
    if kv_heads % ranks:
        return (
            f"tp={ranks} does not divide the {kv_heads} kv_heads of {name}: torchtitan and transformers cut "
            "keys and values by heads, repeat none, and fail there too"
        )
    return None


def _tensor_parallel_plan(config: TransformerConfig, loss_parallel: bool) -> dict[str, ParallelStyle]:
    """Megatron-style tensor parallelism with sequence-parallel norms and residuals."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
    }
    for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
        plan[f"layers.*.{name}"] = ColwiseParallel()
    for name in ("attention.wo", "feed_forward.w2"):
        plan[f"layers.*.{name}"] = RowwiseParallel(output_layouts=Shard(1))
    if config.qk_norm:
        plan["layers.*.attention.q_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan["layers.*.attention.k_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan


def _tensor_parallel_dim(fqn: str) -> int | None:
    module, _, kind = fqn.rpartition(".")
    leaf = module.rpartition(".")[2]
    if leaf in _COLUMNS or leaf in ("output", "tok_embeddings"):
        return 0
    return 1 if leaf in _ROWS and kind == "weight" else None
