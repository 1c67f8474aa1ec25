"""Adam's states in 8 and 4 bits, as far as memory goes: what torchao and bitsandbytes keep."""

from __future__ import annotations

from dataclasses import dataclass

MOMENTS = ("exp_avg", "exp_avg_sq")
_LEAST = 4096
"""Smaller tensors, and those that blocks do not divide, keep states of their own dtype (torchao)."""


@dataclass(frozen=True, slots=True)
class LowBits:
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

    def moments_bytes(self, numel: int, width: int) -> int:
        """Of both moments of ``numel`` elements of ``width`` bytes, of a shard: codes, scales, tables."""
        if not self.is_quantized(numel):
            return len(MOMENTS) * numel * width
        return len(MOMENTS) * (numel * self.bits // 8 + 4 * numel // self.block + self.table_bytes)
