"""Adam's states in 8 and 4 bits, and with master weights: the states that torchao, bitsandbytes and TE
keep."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

MOMENTS = ("exp_avg", "exp_avg_sq")
Part: TypeAlias = tuple[str, int, str]
"""A state's name, its elements, and their dtype."""
_LEAST = 4096
"""Smaller tensors, and tensors that blocks do not divide, have states of their own dtype (torchao)."""


class LowBits(msgspec.Struct, frozen=True):
    """How the states' elements are held."""

    bits: int
    block: int
    """Elements that share one fp32 scale: torchao's ``block_size``, bitsandbytes' ``blocksize``."""

    @property
    def codes(self) -> int:
        """Values that codes stand for, in a table of fp32: one for every moment of every shard."""
        return int(2**self.bits)

    @property
    def table_bytes(self) -> int:
        """Of such a table."""
        return 4 * self.codes

    def is_quantized(self, numel: int) -> bool:
        """Whether moments of so many elements, of a shard, are held in so few bits."""
        return numel >= _LEAST and numel % self.block == 0

    def of(self, numel: int, dtype: str) -> list[Part]:
        """Both moments of ``numel`` elements of a shard: codes, scales and tables."""
        parts: list[Part] = []
        for name in MOMENTS:
            if not self.is_quantized(numel):
                parts.append((name, numel, dtype))
                continue
            parts += [
                (name, numel * self.bits // 8, "uint8"),
                (f"{name}_scale", numel // self.block, "float32"),
                (f"{name}_map", self.codes, "float32"),
            ]
        return parts


class MasterWeights(msgspec.Struct, frozen=True):
    """Moments of one dtype with fp32 weights, or with the 16 bits that bf16 weights lack (TE's FusedAdam)."""

    moments: str
    master: str
    """``float32``, or ``int16`` for the remainders of bf16 weights."""

    def of(self, numel: int, dtype: str) -> list[Part]:
        """The states of ``numel`` elements; other weights than bf16 have no remainders."""
        whole = dtype != "bfloat16" and self.master == "int16"
        master = "float32" if whole else self.master
        return [*((name, numel, self.moments) for name in MOMENTS), ("master_param", numel, master)]
