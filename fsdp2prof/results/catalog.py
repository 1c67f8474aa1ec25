"""Results of ``inspect models|hardware|categories``: the built-in names."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogModel:
    """Shape of a built-in model."""

    name: str
    family: str
    parameters: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    context: int
    tied: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCatalog(Shown):
    """Every known model."""

    schema: str = "fsdp2prof.inspect.models/1"
    models: list[CatalogModel]
    """Those that are built in."""
    by_transformers: list[str]
    """Names of those that transformers builds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogAccelerator:
    """Figures of an accelerator; null if unpublished."""

    name: str
    aliases: list[str]
    memory_bytes: int
    memory_bytes_per_s: int | None
    link_bytes_per_s: int | None
    """Bandwidth to peers within a node, in one direction."""
    flops: dict[str, int]
    """Torch dtype -> peak operations per second."""
    achieved: bool
    """Whether the rate of large matrix products is published; otherwise a share of the peak is assumed."""
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogNetwork:
    """Network between nodes."""

    name: str
    bytes_per_s: int
    """Line rate of one NIC, in one direction."""
    achieved_frac: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareCatalog(Shown):
    """Every accelerator and network."""

    schema: str = "fsdp2prof.inspect.hardware/1"
    accelerators: list[CatalogAccelerator]
    networks: list[CatalogNetwork]


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogWord:
    """A value of a column or key."""

    concept: str
    word: str
    label: str
    """Label for the value in text output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoryCatalog(Shown):
    """All values of columns and keys, by concept."""

    schema: str = "fsdp2prof.inspect.categories/1"
    words: list[CatalogWord]
