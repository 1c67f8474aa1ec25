"""Built-in configuration -> :class:`Model`: module on meta, token batches, loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.models.builtin_plan import outline_of
from fsdp2prof.estimators.models.catalog import TransformerConfig
from fsdp2prof.estimators.models.gpt import GptTransformer
from fsdp2prof.estimators.models.llama import LlamaTransformer
from fsdp2prof.estimators.models.losses import head_of, loss_of_model
from fsdp2prof.estimators.models.model import Batch, Model

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
    return replace(
        outline_of(config),
        module=module,
        make_batch=partial(token_batch, config.vocab_size),
        loss=partial(loss_of_model, head_of(module)),
    )


def token_batch(vocab_size: int, batch_size: int, seq_len: int, device: torch.device) -> Batch:
    """Random token ids and next tokens, both (B, S) int64."""
    tokens = torch.randint(vocab_size, (batch_size, seq_len), device=device)
    targets = torch.randint(vocab_size, (batch_size, seq_len), device=device)
    return Batch(args=(tokens,), targets=targets)
