"""How a run that has not happened trains: FSDP2 policy, precision, checkpointing, optimizer, batch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from fsdp2prof import units
from fsdp2prof.errors import ModelError

__all__ = [
    "ActivationCheckpointing",
    "Allocator",
    "OptimizerImpl",
    "PolicySpec",
    "Reshard",
    "Sync",
    "dtype_bytes",
]

Reshard = Literal["default", "torchtitan", "always", "never"] | int
"""``default``: fully_shard's own (the root keeps its parameters, others reshard). ``torchtitan``: the last
block keeps them too. An integer reshards to that many ranks."""

Sync = Literal["last", "each"]
OptimizerImpl = Literal["foreach", "fused", "for-loop"]
Allocator = Literal["expandable", "classic"]
ActivationCheckpointing = Literal["none", "full", "op"]

_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp64": "float64"}
_TRAINABLE_DTYPES = ("float32", "bfloat16", "float16", "float64")
_OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum", "adagrad", "rmsprop", "adafactor", "none")


def dtype_bytes(name: str) -> int:
    """Bytes of one element of a torch dtype name. Raises ``ModelError`` for an unknown one."""
    size = units.dtype_bytes(name)
    if size is None:
        raise ModelError(f"unknown dtype {name!r}; known: {', '.join(units.DTYPE_BYTES)}")
    return size


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpec:
    """Everything about training that is neither the model nor the mesh.

    Raises ``ModelError`` with one line if a value is unknown or contradicts another.
    """

    batch_size: int = 1
    """Sequences per rank and micro-batch."""
    seq_len: int = 4096
    """Tokens of one sequence, before context parallelism divides it."""
    grad_accum: int = 1
    """Micro-batches per optimizer step."""
    sync: Sync = "last"
    """Reduce gradients after the last micro-batch only (``set_requires_gradient_sync``) or after each."""
    wrap: tuple[str, ...] = ("block",)
    """Units given to ``fully_shard`` besides the root: ``block``, a class name, a module FQN (``*`` matches
    one name), or ``a+b`` for modules grouped in one call. ``root`` alone wraps only the root."""
    reshard: Reshard = "default"
    reshard_root: bool | None = None
    """``reshard_after_forward`` of the root; ``None`` follows ``reshard``."""
    param_dtype: str | None = "bfloat16"
    """Dtype of the all-gather and of compute; ``None`` is the original dtype."""
    reduce_dtype: str | None = "float32"
    """Dtype of gradient reduction; ``None`` is the gradient's own."""
    orig_dtype: str = "float32"
    """Dtype the model is built in: of the shards, the gradients and the optimizer's state."""
    offload: bool = False
    """``CPUOffloadPolicy``: shards, gradients and optimizer state live in pinned host memory."""
    fp8_all_gather: bool = False
    """Gather the weights of linear layers inside blocks as float8 (float8 tensorwise training)."""
    trainable: str | None = None
    """Regular expression searched in parameter names; parameters without a match are frozen."""
    forward_prefetch: int = 0
    """Blocks prefetched explicitly in forward (``set_modules_to_forward_prefetch``)."""
    backward_prefetch: int = 0
    """Blocks prefetched explicitly in backward; 0 is FSDP's own single one."""
    separate_reduce_scatter_group: bool = False
    """``set_separate_reduce_scatter_group``: a communicator of its own for reduce-scatter."""
    reduce_scatter_buffers: int = 1
    """``set_reduce_scatter_max_input_buffers``: reduce-scatter inputs kept in flight."""
    ac: str = "none"
    """Activation checkpointing: ``none``, ``full``, ``op`` (selective by operator) or ``every:K`` blocks."""
    optimizer: str = "adamw"
    """``adamw``, ``adam``, ``sgd``, ``sgd-momentum``, ``adagrad``, ``rmsprop``, ``adafactor``; ``none``
    trains nothing (forward and backward only)."""
    optimizer_impl: OptimizerImpl = "foreach"
    clip_grad: bool = True
    """Clip the global gradient norm each step (``clip_grad_norm_``, foreach)."""
    loss: str = "full"
    """``full`` logits, or ``chunked:K``: head and cross-entropy over K pieces of the sequence, recomputed."""
    loss_parallel: bool = True
    """Under tensor parallelism keep the logits sharded over the vocabulary."""
    compile: bool = False
    """``torch.compile`` of each block."""
    float8: Literal["tensorwise", "rowwise"] | None = None
    """float8 training of the linear layers inside blocks."""
    allocator: Allocator = "expandable"
    """CUDA caching allocator: ``expandable_segments:True`` or the classic one."""
    pp_stage: int = 0
    """Pipeline stage that is estimated; stage 0 holds the embedding, the last one norm and head."""
    extra_model: str | None = None
    """A second, frozen model run forward without gradients beside the first (a reference policy)."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "orig_dtype"):
            self._normalise_dtype(name)
        for name in ("batch_size", "seq_len", "grad_accum", "reduce_scatter_buffers"):
            self._check_integer(name, 1)
        for name in ("forward_prefetch", "backward_prefetch", "pp_stage"):
            self._check_integer(name, 0)
        self._check_choice("sync", get_args(Sync))
        self._check_choice("optimizer", _OPTIMIZERS)
        self._check_choice("optimizer_impl", get_args(OptimizerImpl))
        self._check_choice("allocator", get_args(Allocator))
        self._check_choice("float8", (None, "tensorwise", "rowwise"))
        self._check_reshard()
        if not self.wrap or not all(self.wrap):
            raise ModelError("wrap: empty; write block, root, class names or module names")
        if self.fp8_all_gather and self.float8 != "tensorwise":
            raise ModelError(
                "fp8_all_gather needs float8=tensorwise: only its weights are gathered as float8"
            )
        _parse_count("ac", self.ac, get_args(ActivationCheckpointing), "every")
        _parse_count("loss", self.loss, ("full",), "chunked")
        if self.trainable is not None:
            try:
                re.compile(self.trainable)
            except re.error as error:
                raise ModelError(
                    f"trainable: {self.trainable!r} is not a regular expression: {error}"
                ) from None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PolicySpec:
        """Build from plain values (a configuration file). ``wrap`` may be a comma-separated string.

        Raises ``ModelError`` for an unknown key.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ModelError(f"policy: unknown option {unknown[0]!r}; there are {', '.join(sorted(known))}")
        options = dict(values)
        if isinstance(options.get("wrap"), str):
            options["wrap"] = tuple(part.strip() for part in options["wrap"].split(","))
        elif "wrap" in options:
            options["wrap"] = tuple(options["wrap"])
        if isinstance(options.get("reshard"), str) and options["reshard"].isdecimal():
            options["reshard"] = int(options["reshard"])
        return cls(**options)

    @property
    def ac_every(self) -> int | None:
        """K of ``every:K``, else ``None``."""
        return _parse_count("ac", self.ac, get_args(ActivationCheckpointing), "every")

    @property
    def loss_chunks(self) -> int | None:
        """K of ``chunked:K``, else ``None``."""
        return _parse_count("loss", self.loss, ("full",), "chunked")

    @property
    def compute_dtype(self) -> str:
        """Dtype of unsharded parameters and of activations."""
        return self.param_dtype or self.orig_dtype

    @property
    def gradient_dtype(self) -> str:
        """Dtype of the reduce-scatter."""
        return self.reduce_dtype or self.compute_dtype

    def _normalise_dtype(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name != "orig_dtype":
            return
        dtype = str(value).lower().removeprefix("torch.")
        dtype = _ALIASES.get(dtype, dtype)
        if dtype not in _TRAINABLE_DTYPES:
            raise ModelError(f"{name}: unknown dtype {value!r}; one of {', '.join(_TRAINABLE_DTYPES)}")
        object.__setattr__(self, name, dtype)

    def _check_integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(f"{name}: {value!r} must be an integer of at least {least}")

    def _check_choice(self, name: str, choices: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ModelError(f"{name}: unknown value {value!r}; one of {', '.join(str(c) for c in choices)}")

    def _check_reshard(self) -> None:
        value = self.reshard
        if isinstance(value, str) and value in ("default", "torchtitan", "always", "never"):
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(
                f"reshard: {value!r} is none of default, torchtitan, always, never or a number of ranks"
            )


def _parse_count(option: str, text: str, words: tuple[str, ...], counted: str) -> int | None:
    if text in words:
        return None
    name, colon, number = text.partition(":")
    if name != counted or not colon or not number.isdecimal() or int(number) < 1:
        raise ModelError(
            f"{option}: unknown value {text!r}; one of {', '.join(words)} or {counted}:K with K >= 1"
        )
    return int(number)
