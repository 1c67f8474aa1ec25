"""The supported optimizers: how torch builds them, which state they keep, what runs on shards."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.held_states import LowBits, MasterWeights

if TYPE_CHECKING:
    from torch.optim import Optimizer


@contextmanager
def current_directory_importable() -> Iterator[None]:
    """Also search modules in the current directory, as ``python -m`` does."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


OptimizerImpl = Literal["foreach", "fused", "for-loop"]


class Implementation(msgspec.Struct, frozen=True, kw_only=True):
    """How an optimizer goes over its parameters."""

    flags: Mapping[str, bool]
    """Arguments of the constructor that choose it."""
    counts_on_host: bool
    """Its step counters lie on the host; otherwise on the device."""


IMPLEMENTATIONS: Mapping[OptimizerImpl, Implementation] = {
    "foreach": Implementation(flags={"foreach": True}, counts_on_host=True),
    "fused": Implementation(flags={"foreach": False, "fused": True}, counts_on_host=False),
    "for-loop": Implementation(flags={"foreach": False}, counts_on_host=True),
}


class OptimizerKind(msgspec.Struct, frozen=True, kw_only=True):
    """One of torch's optimizers, with its defaults unless ``options`` say otherwise."""

    class_name: str
    """In ``torch.optim``."""
    options: Mapping[str, float] = msgspec.field(default_factory=dict)
    state: tuple[str, ...]
    """State tensors of every parameter, with its shape and dtype: shards under FSDP."""
    counts_steps: bool
    """It keeps a step counter for every parameter: one fp32 number, replicated on every rank."""
    unsharded: tuple[OptimizerImpl, ...] = ()
    """Implementations that torch has but cannot run on sharded parameters."""
    missing: tuple[OptimizerImpl, ...] = ()
    """Implementations that torch does not have."""

    def build(self, parameters: Iterable[Any], implementation: OptimizerImpl) -> Optimizer:
        """Make it over ``parameters``, or groups of them."""
        import torch

        make: Any = getattr(torch.optim, self.class_name)
        made: Optimizer = make(parameters, lr=1e-4, **self.options, **IMPLEMENTATIONS[implementation].flags)
        return made

    def refusal(self, implementation: OptimizerImpl) -> str | None:
        """Why an implementation cannot train sharded parameters, ``None`` if it can."""
        if implementation in self.missing:
            return f"torch.optim.{self.class_name} has no {implementation} implementation"
        if implementation in self.unsharded:
            return f"torch cannot run {self.class_name} ({implementation}) on sharded parameters"
        return None


class HeldOptimizer(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of Adam whose states another package stores in its own format; needs no such package."""

    source: str
    held: LowBits | MasterWeights

    def build(self, parameters: Iterable[Any], implementation: OptimizerImpl) -> Optimizer:
        """Build an optimizer that keeps the same states over ``parameters``."""
        from fsdp2prof.estimators.config.held_adam import HeldAdam

        return HeldAdam(parameters, self.held)

    def refusal(self, implementation: OptimizerImpl) -> str | None:
        """It has one implementation."""
        return (
            None if implementation == "foreach" else f"{self.source} has no {implementation} implementation"
        )


class OptimizerFactory(msgspec.Struct, frozen=True, kw_only=True):
    """An optimizer of the user's own: ``package.module:factory``, called with the trainable parameters."""

    source: str

    def build(self, parameters: Iterable[Any], implementation: OptimizerImpl) -> Optimizer:
        """Build it over ``parameters``. Raises ``ModelError`` if it cannot be imported or builds no
        optimizer."""
        from torch.optim import Optimizer

        module, _, name = self.source.partition(":")
        try:
            with current_directory_importable():
                made = getattr(import_module(module), name)(list(parameters))
        except Exception as error:  # the user's own code may raise anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ModelError(f"optimizer {self.source}: {reason}") from error
        if not isinstance(made, Optimizer):
            raise ModelError(
                f"optimizer {self.source} made a {type(made).__name__}, not a torch.optim.Optimizer"
            )
        return made

    def refusal(self, implementation: OptimizerImpl) -> str | None:
        """Its own implementation is the only one, and it counts its steps as it likes."""
        return (
            None
            if implementation == "foreach"
            else f"{self.source} decides itself how it goes over parameters"
        )


_ADAM_STATE = ("exp_avg", "exp_avg_sq")

OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind(class_name="AdamW", state=_ADAM_STATE, counts_steps=True),
    "adam": OptimizerKind(class_name="Adam", state=_ADAM_STATE, counts_steps=True),
    "sgd": OptimizerKind(class_name="SGD", state=(), counts_steps=False, unsharded=("fused",)),
    "sgd-momentum": OptimizerKind(
        class_name="SGD",
        options={"momentum": 0.9},
        state=("momentum_buffer",),
        counts_steps=False,
        unsharded=("fused",),
    ),
    "adagrad": OptimizerKind(class_name="Adagrad", state=("sum",), counts_steps=True, unsharded=("fused",)),
    "rmsprop": OptimizerKind(
        class_name="RMSprop", state=("square_avg",), counts_steps=True, missing=("fused",)
    ),
}
"""torch's, by the name in a policy. Adafactor is missing: its factored state does not work on shards."""

_STATES: Mapping[str, LowBits | MasterWeights] = {
    "adam8bit": LowBits(8, 256),
    "adamw8bit": LowBits(8, 256),
    "adam4bit": LowBits(4, 128),
    "adamw4bit": LowBits(4, 128),
    "adamw-master": MasterWeights("float32", "float32"),
    "adamw-master-bf16": MasterWeights("bfloat16", "float32"),
    "adamw-remainders": MasterWeights("float32", "int16"),
    "adamw-remainders-bf16": MasterWeights("bfloat16", "int16"),
}
HELD: Mapping[str, HeldOptimizer] = {
    name: HeldOptimizer(source=name, held=held) for name, held in _STATES.items()
}
"""torchao's with few bits (bitsandbytes' with 8), and Transformer Engine's with its own master weights, or
the remainders that bf16 weights lack, and moments in fp32 or bf16."""
