"""From a recorded run, a model or a checkpoint's folder to how it is sharded."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from fsdp2prof import vocabulary
from fsdp2prof.analyzers.sharding.checkpoint import map_checkpoint
from fsdp2prof.analyzers.sharding.layout import lay_out_shards
from fsdp2prof.analyzers.sharding.recorded import sharding_of_run
from fsdp2prof.estimators.config.catalog import BUILTIN_MODELS, published_models
from fsdp2prof.estimators.config.hardware import HardwareSpec, known_hardware, known_networks
from fsdp2prof.readers.checkpoint import read_checkpoint
from fsdp2prof.readers.run.directory import read_sharded_manifests
from fsdp2prof.results.catalog import (
    CatalogAccelerator,
    CatalogModel,
    CatalogNetwork,
    CatalogWord,
    CategoryCatalog,
    HardwareCatalog,
    ModelCatalog,
)
from fsdp2prof.results.sharding import CheckpointMap, ShardingMap
from fsdp2prof.tables.sharding import ShardingTable
from fsdp2prof.workflows.description import Described

_GIGA = 10**9

_CONCEPTS = {
    "memory": vocabulary.CATEGORIES,
    "phase": vocabulary.PHASES,
    "operation": vocabulary.OPS,
    "step": vocabulary.BREAKDOWN_PARTS,
    "idle": vocabulary.IDLE_CAUSES,
    "late": vocabulary.LATE_CAUSES,
    "remedy": vocabulary.REMEDIES,
}


def list_models() -> ModelCatalog:
    """Return every known model."""
    names = [field.name for field in fields(CatalogModel)]
    return ModelCatalog(
        models=[
            CatalogModel(**{name: getattr(config, name) for name in names})
            for config in BUILTIN_MODELS.values()
        ],
        by_transformers=list(published_models()),
    )


def list_hardware() -> HardwareCatalog:
    """Return every accelerator, once whatever its aliases, and every network."""
    specs = {spec.name: spec for spec in known_hardware().values()}
    return HardwareCatalog(
        accelerators=[_accelerator(spec) for spec in specs.values()],
        networks=[
            CatalogNetwork(
                name=network.name,
                bytes_per_s=round(network.gb_per_s * _GIGA),
                achieved_frac=network.achieved_frac,
                source=network.source,
            )
            for network in known_networks().values()
        ],
    )


def list_categories() -> CategoryCatalog:
    """Return the words that columns and keys hold."""
    return CategoryCatalog(
        words=[
            CatalogWord(concept=concept, word=word, label=said.label)
            for concept, words in _CONCEPTS.items()
            for word, said in words.items()
        ]
    )


def _accelerator(spec: HardwareSpec) -> CatalogAccelerator:
    rate = spec.memory_gb_per_s
    return CatalogAccelerator(
        name=spec.name,
        aliases=list(spec.aliases),
        memory_bytes=spec.memory_bytes,
        memory_bytes_per_s=None if rate is None else round(rate * _GIGA),
        link_bytes_per_s=spec.link_bytes_per_s,
        flops=spec.flops,
        achieved=bool(spec.achieved_tflops),
        source=spec.source,
    )


def inspect_run_sharding(path: Path) -> ShardingMap:
    """Return each rank's shards in a recorded run. Raises ``RunDirectoryError`` without a parameter group."""
    return lay_out_shards(sharding_of_run(str(path), read_sharded_manifests(path)))


def inspect_sharding(described: Described) -> ShardingMap:
    """Return each rank's shards of a model. Raises ``ModelError`` for a model that cannot be built."""
    return lay_out_shards(_table(described))


def inspect_checkpoint(path: Path, described: Described | None) -> CheckpointMap:
    """Return a checkpoint's contents and a model's gaps in it. Raises ``InputError`` for another folder."""
    table = read_checkpoint(path)
    return map_checkpoint(table, None if described is None else _table(described))


def _table(described: Described) -> ShardingTable:
    spec = described.spec()
    from fsdp2prof.estimators.sharding_table import shard_model

    return shard_model(spec.model, spec.mesh, spec.policy)
