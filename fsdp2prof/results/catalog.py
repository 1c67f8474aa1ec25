"""Results of ``inspect models|hardware|categories``: what the tool knows by name."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results.shown import Shown


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
    """Every built-in model."""

    schema: str = "fsdp2prof.inspect.models/1"
    models: list[CatalogModel]


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogAccelerator:
    """Figures of an accelerator; null where none is published."""

    name: str
    aliases: list[str]
    memory_bytes: int
    memory_bytes_per_s: int | None
    link_bytes_per_s: int | None
    """Bandwidth to peers inside a node, one direction."""
    flops: dict[str, int]
    """Torch dtype -> peak operations per second."""
    achieved: bool
    """Whether what large matrix products reach was published; else a share of the peak is assumed."""
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogNetwork:
    """Network between nodes."""

    name: str
    bytes_per_s: int
    """Line rate of one NIC, one direction."""
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
    """A word that a column or key may hold."""

    concept: str
    word: str
    label: str
    """For people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoryCatalog(Shown):
    """The words of the toolkit, by concept."""

    schema: str = "fsdp2prof.inspect.categories/1"
    words: list[CatalogWord]
