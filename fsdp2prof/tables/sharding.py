"""How the parameters of a job are sharded, recorded or estimated, and the content of a sharded checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardMesh:
    """The ranks that one parameter group is sharded over."""

    text: str
    """Dimensions and sizes: ``dp_replicate=2, dp_shard=4``."""
    shard_dim: str
    """Name of the dimension that shards."""
    ranks: tuple[tuple[int, ...], ...]
    """Shard -> the ranks that hold it: replicas, and tensor-parallel ranks, which hold different parts."""
    replicas: int

    @property
    def shards(self) -> int:
        """Ranks of one shard group."""
        return len(self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterLayout:
    """One parameter as FSDP shards it: in chunks of one dimension."""

    root: int
    group: str
    """FSDP module; the empty string is the root."""
    fqn: str
    global_shape: tuple[int, ...]
    shape: tuple[int, ...]
    """The tensor that FSDP shards: the whole parameter, or a rank's part under tensor parallelism."""
    dim: int
    dtype: str
    reduce_dtype: str | None
    """Gradients are reduced in it; None is the dtype of the unsharded parameter."""
    gather_dtype: str
    requires_grad: bool
    placements: tuple[str, ...]
    """Of the sharded DTensor, a mesh dimension each."""
    mesh: int
    """Index of its mesh in the table."""

    @property
    def size(self) -> int:
        """Rows: elements along the sharded dimension."""
        return self.shape[self.dim]

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        return prod(size for axis, size in enumerate(self.shape) if axis != self.dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingTable:
    """The sharding of a whole job."""

    source: str
    """A run's path or a model's name."""
    world_size: int
    meshes: tuple[ShardMesh, ...]
    parameters: tuple[ParameterLayout, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredChunk:
    """One piece of a tensor, or a whole object that is not a tensor, in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    """Both empty for an object."""
    file: str | None
    """Name of its file; None where the metadata names none."""
    offset: int
    length: int
    """Bytes in the file, headers included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One entry of a checkpoint."""

    name: str
    shape: tuple[int, ...] | None
    """None for an object that is not a tensor."""
    dtype: str | None
    chunks: tuple[StoredChunk, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return 0 if self.shape is None else prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointTable:
    """A distributed checkpoint."""

    path: str
    version: str | None
    entries: tuple[StoredTensor, ...]
    files: dict[str, int]
    """Files beside the metadata -> bytes."""
