"""Results of ``inspect sharding`` and ``inspect checkpoint``."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPiece:
    """Adjacent shards that hold equally many rows of a parameter."""

    first_shard: int
    last_shard: int
    first_row: int
    """First row of the first of these shards; each further one begins where the previous one ends."""
    rows: int
    """Rows of each of these shards; 0 is empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSharding:
    """One parameter and its shards."""

    root: int
    fqn: str
    group: str
    """FSDP module it belongs to; the empty string is the root."""
    global_shape: list[int]
    shape: list[int]
    """Shape of the sharded tensor: the whole parameter, or a rank's part under tensor parallelism."""
    dtype: str
    requires_grad: bool
    placements: list[str]
    """Placements of the DTensor, one per mesh dimension, slowest first."""
    mesh: int
    """Index of the mesh in ``meshes``."""
    dim: int
    """Sharded dimension; ``rows`` are its elements."""
    shards: int
    rows_per_shard: int
    """Rows of a full shard; shorter ones are padded to it in the all-gather."""
    full_shards: int
    short_shards: int
    """Number of shards with fewer rows, but not none."""
    empty_shards: int
    bytes: int
    """Bytes of all shards, without padding."""
    shard_bytes: int
    """Bytes of a full shard, which every rank sends, in the original dtype."""
    padding_bytes: int
    """Padding of all shards."""
    pieces: list[ShardPiece]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRanks:
    """A mesh that parameters are sharded on."""

    mesh: str
    shard_dim: str
    shards: int
    replicas: int
    ranks_of_shard: list[list[int]]
    """Shard -> ranks that hold it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """Total that one rank holds of all parameters."""

    rank: int
    bytes: int
    """Bytes without padding."""
    padded_bytes: int
    """Bytes that FSDP allocates."""
    empty_parameters: int
    """Number of parameters of which it holds no rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Redistribution:
    """Cost of redistributing all parameters of a mesh from one placement to another."""

    mesh: int
    source: str
    target: str
    op: str | None
    """Collective; null if no rank sends anything."""
    payload_bytes: int
    """Payload of the whole, including padding where the collective sends it."""
    wire_bytes: int
    """Bytes sent by each rank."""
    result_bytes: int
    """Bytes that each rank then holds."""
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingMap(Shown):
    """Rows of every parameter on every rank."""

    schema: str = "fsdp2prof.inspect.sharding/1"
    verdict: list[str]
    source: str
    """Path of the run, or name of the model."""
    world_size: int
    bytes: int
    """Bytes of all parameters, one copy, without padding; under tensor parallelism of one rank's part."""
    padding_bytes: int
    meshes: list[ShardRanks]
    parameters: list[ParameterSharding]
    ranks: list[RankShare]
    redistributions: list[Redistribution]
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEntry:
    """One tensor or object in a checkpoint."""

    name: str
    shape: list[int] | None
    """Shape; null for an object that is not a tensor."""
    dtype: str | None
    bytes: int | None
    """Bytes of the tensor; null for an object or a dtype of unknown size."""
    stored_bytes: int
    """Bytes in the files, headers included."""
    pieces: int
    files: int
    covered: bool | None
    """Whether the chunks cover the tensor exactly, without gap or overlap; null for an object, or if it is
    split along more than eight dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFile:
    """One file of a checkpoint."""

    name: str
    bytes: int | None
    """Size on disk; null if missing."""
    used_bytes: int
    """Bytes that the metadata refers to."""
    needed_bytes: int
    """End of its last chunk."""
    entries: int
    state: str
    """``whole``, ``truncated`` (it ends before its last chunk), ``missing``, or ``unused``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMismatch:
    """A difference between checkpoint and model."""

    name: str
    kind: str
    """``missing`` (only in the model), ``unexpected`` (only in the checkpoint), ``shape`` or ``dtype``."""
    stored: str | None
    expected: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointModel:
    """Comparison of a checkpoint with a model."""

    model: str
    prefix: str
    """Prefix of the checkpoint's names before the model's names."""
    parameters: int
    matched: int
    with_optimizer_state: int
    """Number of parameters with optimizer entries in the checkpoint."""
    mismatches: list[CheckpointMismatch]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMap(Shown):
    """Contents of a distributed checkpoint."""

    schema: str = "fsdp2prof.inspect.checkpoint/1"
    verdict: list[str]
    path: str
    version: str | None
    bytes: int
    """Size of its files."""
    tensor_bytes: int
    """Bytes of all tensors; a dtype of unknown size counts as zero."""
    entries: list[CheckpointEntry]
    files: list[CheckpointFile]
    model: CheckpointModel | None
    """Comparison with a model; null without one."""
    warnings: list[str]
