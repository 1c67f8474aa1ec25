"""Built-in configuration -> :class:`Model`: module on meta, token batches, loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.models.builtin_plan import BuiltinPlan
from fsdp2prof.estimators.models.catalog import TransformerConfig
from fsdp2prof.estimators.models.experts import reach_experts
from fsdp2prof.estimators.models.gpt import GptTransformer
from fsdp2prof.estimators.models.llama import LlamaTransformer
from fsdp2prof.estimators.models.losses import head_of, loss_of_model
from fsdp2prof.estimators.models.model import Batch, LayerPattern, Model
from fsdp2prof.estimators.models.ring import ring_width

__all__ = ["build_builtin", "meta_construction", "token_batch"]

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
    sparse = [config.experts is not None and config.experts.is_in(layer) for layer in range(config.layers)]
    return Model(
        name=config.name,
        module=module,
        blocks=tuple(f"layers.{index}" for index in range(config.layers)),
        experts=tuple(f"layers.{layer}.feed_forward.experts" for layer, has in enumerate(sparse) if has),
        pattern=LayerPattern.of(sparse),
        config=config,
        make_batch=partial(token_batch, config.vocab_size),
        loss=partial(loss_of_model, head_of(module)),
        tensor_parallel=None if config.family == "gpt" else BuiltinPlan(config),
        no_tensor_parallel="has no tensor-parallel plan here: GPT's blocks have none",
        reach_experts=None if config.experts is None else reach_experts,
        ring_width=ring_width(config),
    )


def token_batch(vocab_size: int, batch_size: int, seq_len: int, device: torch.device) -> Batch:
    """Random token ids and next tokens, both (B, S) int64."""
    tokens = torch.randint(vocab_size, (batch_size, seq_len), device=device)
    targets = torch.randint(vocab_size, (batch_size, seq_len), device=device)
    return Batch(args=(tokens,), targets=targets)
