"""Low-rank adapters as an option: ``r=16,targets=q_proj+v_proj``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from fsdp2prof.estimators.config.option import Dtype, Written

QUANTIZED = ("nf4", "bnb-nf4")
"""Bases of 4 bits: torchao's ``NF4Tensor`` and bitsandbytes' ``Linear4bit``."""
EVERY_LAYER = "all-linear"
"""The target that is every linear layer but the head and routers, as in PEFT."""
_NOT_MODELLED = ("fp4", "int4", "int8", "bnb-fp4", "bnb-int8", "gptq", "awq")


class Lora(Written, frozen=True, kw_only=True):
    """Adapters of one rank at the layers of some names."""

    r: int
    targets: tuple[str, ...]
    """Names of linear layers, without their path; patterns of whole names, with *; ``EVERY_LAYER``; or
    ``experts``. A ? follows a name that may be missing."""
    alpha: float
    """Scales the adapters by ``alpha / r``; of no matter to sizes."""
    base: str | None = None
    """Dtype of the frozen weights, or one of ``QUANTIZED`` for the linear layers in blocks; None is that of
    all parameters."""

    runs: int = 1
    """Runs with separate adapters side by side; the batch is the first one's."""

    @property
    def quantized(self) -> str | None:
        """Quantization of the frozen linear layers."""
        return self.base if self.base in QUANTIZED else None

    def __str__(self) -> str:
        base = "" if self.base is None else f",base={self.base}"
        runs = "" if self.runs == 1 else f",runs={self.runs}"
        return f"r={self.r},targets={'+'.join(self.targets)}{base}{runs}"


class LoraText(msgspec.Struct, frozen=True):
    """``r=K,targets=NAME+NAME``, perhaps ``base=DTYPE`` or ``base=nf4``, ``runs=K``; or nothing."""

    @property
    def values(self) -> str:
        """As the user writes it."""
        return "r=K,targets=NAME+..."

    def read(self, value: Any) -> Lora | None:
        """Return the adapters."""
        if value is None or isinstance(value, Lora):
            return value
        given = dict(part.partition("=")[::2] for part in str(value).split(","))
        unknown = sorted(set(given) - {"r", "targets", "base", "runs"})
        if unknown or not given.get("r", "").isdecimal() or int(given["r"]) < 1:
            raise ValueError(f"{value!r} is not r=K,targets=NAME+NAME, with a rank of at least 1")
        targets = tuple(given.get("targets", "").split("+"))
        if not all(targets):
            raise ValueError(f"{value!r} names no targets; write for example r=16,targets=q_proj+v_proj")
        base = given.get("base")
        if base in _NOT_MODELLED:
            modelled = ", base=".join(QUANTIZED)
            raise ValueError(f"base={base} is not modelled; base={modelled} and base=bf16 are")
        rank, runs = int(given["r"]), given.get("runs", "1")
        if not runs.isdecimal() or int(runs) < 1:
            raise ValueError(f"{value!r}: runs={runs} is not a number of runs")
        held = base if base is None or base in QUANTIZED else Dtype().read(base)
        return Lora(r=rank, targets=targets, alpha=2.0 * rank, base=held, runs=int(runs))


def peft_targets(names: Iterable[str]) -> str:
    """Targets for a trainer that adapts the layers that exist: names without a layer are left out."""
    return "+".join(f"{name}?" for name in names)
