"""The device mesh of a run that has not happened."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from math import prod

from fsdp2prof.errors import ModelError

_SIZE = re.compile(r"[0-9]{1,9}")
_MOST_RANKS = 1 << 20
"""Ten times the largest cluster there is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSpec:
    """Sizes of the mesh dimensions, slowest first: pp, dp_replicate, dp_shard, cp, tp; ep lies inside.

    Raises ``ModelError`` if a size is not a positive integer or the mesh has no rank.
    """

    pp: int = 1
    """Pipeline stages."""
    dp_replicate: int = 1
    """HSDP replicas: gradients are all-reduced over them."""
    dp_shard: int = 1
    """Ranks over which FSDP shards."""
    cp: int = 1
    """Context-parallel ranks; FSDP shards over dp_shard x cp, flattened."""
    tp: int = 1
    """Tensor-parallel ranks, sequence parallelism included."""
    ep: int = 1
    """Expert-parallel ranks, neighbours among those of dp_shard x cp x tp: each holds a part of the experts
    whole."""

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ModelError(f"mesh: {field.name}={size!r} must be a positive integer")
        if self.world_size > _MOST_RANKS:
            raise ModelError(f"mesh: {self.world_size} ranks are more than {_MOST_RANKS}")

    @classmethod
    def parse(cls, text: str, world_size: int | None = None) -> MeshSpec:
        """Parse ``dp_replicate=4,dp_shard=8``; names are the fields, in any order.

        One size may be -1: it is ``world_size`` divided by the other sizes. Raises ``ModelError``.
        """
        known = [field.name for field in fields(cls)]
        sizes: dict[str, int] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, equals, size = (part.strip() for part in item.partition("="))
            if equals and size == "-1" and name in known and -1 not in sizes.values():
                sizes[name] = -1
                continue
            if not equals or not _SIZE.fullmatch(size):
                raise ModelError(
                    f"mesh: {item!r} is not NAME=SIZE; write for example dp_replicate=4,dp_shard=8"
                )
            if name not in known:
                raise ModelError(f"mesh: no dimension {name!r}; there are {', '.join(known)}")
            if name in sizes:
                raise ModelError(f"mesh: {name} is given twice")
            sizes[name] = int(size)
        if not sizes:
            raise ModelError("mesh: empty; write for example dp_shard=8")
        return cls(**_completed(sizes, world_size))

    @property
    def fsdp_size(self) -> int:
        """Ranks of one FSDP shard group: dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def expert_fsdp_size(self) -> int:
        """Ranks over which FSDP shards the experts: dp_shard x cp x tp divided by ep.

        Without ep it is :attr:`fsdp_size`: tp divides every expert.
        """
        return self.fsdp_size if self.ep == 1 else self.fsdp_size * self.tp // self.ep

    @property
    def fsdp_dim(self) -> str:
        """Name of the dimension FSDP shards on: ``dp_shard``, or ``dp_shard_cp`` flattened."""
        return "dp_shard" if self.cp == 1 else "dp_shard_cp"

    def sizes(self) -> dict[str, int]:
        """Sizes by name, the slowest first, of the dimensions whose product is the ranks: all but ep."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "ep"}

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    def __str__(self) -> str:
        sizes = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return ",".join(f"{name}={size}" for name, size in sizes if size > 1) or "dp_shard=1"


def _completed(sizes: dict[str, int], world_size: int | None) -> dict[str, int]:
    """Sizes with the rest of the ranks where one is -1; all are checked against a known world size."""
    others = prod(size for name, size in sizes.items() if size > 0 and name != "ep")
    rest = next((name for name, size in sizes.items() if size == -1), None)
    if rest is not None:
        if world_size is None:
            raise ModelError(f"mesh: {rest}=-1 is computed from --world-size: add it")
        if world_size % others:
            raise ModelError(f"mesh: --world-size {world_size} is not a multiple of {others}")
        return {**sizes, rest: world_size // others}
    if world_size is not None and others != world_size:
        raise ModelError(f"mesh: it has {others} ranks, and --world-size is {world_size}")
    return sizes
