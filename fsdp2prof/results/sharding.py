"""Results of ``inspect sharding`` and ``inspect checkpoint``."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results.shown import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPiece:
    """Neighbouring shards that hold equally many rows of a parameter each."""

    first_shard: int
    last_shard: int
    first_row: int
    """Of the first of these shards; each further one begins where the one before it ends."""
    rows: int
    """Of every one of them; 0 holds nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSharding:
    """One parameter, cut into shards."""

    root: int
    fqn: str
    group: str
    """FSDP module it belongs to; the empty string is the root."""
    global_shape: list[int]
    shape: list[int]
    """What FSDP cuts: the whole parameter, or a rank's part under tensor parallelism."""
    dtype: str
    requires_grad: bool
    placements: list[str]
    """Of the DTensor, a mesh dimension each, the slowest first."""
    mesh: int
    """Index in ``meshes``."""
    dim: int
    """Dimension that is cut; ``rows`` are its elements."""
    shards: int
    rows_per_shard: int
    """Of a full shard; shorter ones are padded to it in the all-gather."""
    full_shards: int
    short_shards: int
    """Shards with fewer rows, but some."""
    empty_shards: int
    bytes: int
    """Of all shards, padding left out."""
    shard_bytes: int
    """Of a full shard: what every rank sends, in the original dtype."""
    padding_bytes: int
    """Of all shards together."""
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
    """What one rank holds of all parameters."""

    rank: int
    bytes: int
    """Padding left out."""
    padded_bytes: int
    """What FSDP allocates."""
    empty_parameters: int
    """Parameters of which it holds nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Redistribution:
    """What it costs to bring all parameters of a mesh from one placement to another."""

    mesh: int
    source: str
    target: str
    op: str | None
    """Collective; null where no rank has to send anything."""
    payload_bytes: int
    """Of the whole, padding included where the collective sends it."""
    wire_bytes: int
    """Sent by each rank."""
    result_bytes: int
    """What each rank then holds."""
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingMap(Shown):
    """Who holds what of every parameter."""

    schema: str = "fsdp2prof.inspect.sharding/1"
    verdict: list[str]
    source: str
    """A run's path or a model's name."""
    world_size: int
    bytes: int
    """Of all parameters, one copy, padding left out; under tensor parallelism of one rank's part."""
    padding_bytes: int
    meshes: list[ShardRanks]
    parameters: list[ParameterSharding]
    ranks: list[RankShare]
    redistributions: list[Redistribution]
    warnings: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEntry:
    """One tensor or object."""

    name: str
    shape: list[int] | None
    """Null for an object that is not a tensor."""
    dtype: str | None
    bytes: int | None
    """Of the tensor; null for an object or a dtype of unknown size."""
    stored_bytes: int
    """In the files, headers included."""
    pieces: int
    files: int
    covered: bool | None
    """Whether the pieces fill the tensor exactly, without gap or overlap; null for an object, and where they
    are cut along more than eight dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFile:
    """One file."""

    name: str
    bytes: int | None
    """On the disk; null where it is missing."""
    used_bytes: int
    """That the metadata points at."""
    needed_bytes: int
    """Where the last piece in it ends."""
    entries: int
    state: str
    """``whole``, ``truncated`` (it ends before the last piece does), ``missing``, or ``unused``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMismatch:
    """Where checkpoint and model differ."""

    name: str
    kind: str
    """``missing`` (the model has it alone), ``unexpected`` (the checkpoint alone), ``shape`` or ``dtype``."""
    stored: str | None
    expected: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointModel:
    """The checkpoint beside a model."""

    model: str
    prefix: str
    """What the names of the checkpoint have before the model's."""
    parameters: int
    matched: int
    with_optimizer_state: int
    """Parameters for which the checkpoint has entries of an optimizer."""
    mismatches: list[CheckpointMismatch]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointMap(Shown):
    """What a distributed checkpoint holds."""

    schema: str = "fsdp2prof.inspect.checkpoint/1"
    verdict: list[str]
    path: str
    version: str | None
    bytes: int
    """Of its files."""
    tensor_bytes: int
    """Of all tensors; one of a dtype of unknown size counts as none."""
    entries: list[CheckpointEntry]
    files: list[CheckpointFile]
    model: CheckpointModel | None
    """Null without a model to compare with."""
    warnings: list[str]
