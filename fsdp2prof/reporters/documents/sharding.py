"""Documents of a sharding and of a sharded checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.charts.sharding import sharding_chart
from fsdp2prof.reporters.document import Block, Chart, Document, KeyFigure, Section, Table
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.formats import show_bytes, show_op
from fsdp2prof.results.sharding import (
    CheckpointEntry,
    CheckpointFile,
    CheckpointMap,
    CheckpointModel,
    ParameterSharding,
    ShardingMap,
    ShardPiece,
)
from fsdp2prof.units import format_numbers

_ROWS = 24


@builds(ShardingMap)
def sharding_document(sharding: ShardingMap) -> Document:
    """Lay out who holds what."""
    return Document(
        title=f"Sharding of {sharding.source}",
        subtitle="; ".join(mesh.mesh for mesh in sharding.meshes),
        numbers=[
            KeyFigure(value=show_bytes(sharding.bytes), label="parameters"),
            KeyFigure(value=show_bytes(sharding.padding_bytes), label="padding"),
        ],
        sections=[
            Section(anchor="parameters", title="Parameters", blocks=[_parameters(sharding)]),
            Section(anchor="rows", title="Rows", blocks=rows_blocks(sharding), detail=True),
            Section(anchor="ranks", title="Ranks", blocks=[_ranks(sharding)]),
            Section(
                anchor="redistribution",
                title="Redistribution",
                blocks=[_redistributions(sharding)],
                detail=True,
            ),
        ],
    )


def rows_blocks(sharding: ShardingMap, limit: int = _ROWS) -> list[Block]:
    """Return who holds which rows, as a picture and as a table of ``limit`` lines at first."""
    figure = sharding_chart(sharding)
    padding = show_bytes(sharding.padding_bytes)
    uneven = f" except for {padding} of padding" if sharding.padding_bytes else ""
    title = f"Rows are sharded evenly{uneven}"
    note = "blue: full shard; orange: short; red: empty"
    picture = [] if figure is None else [Chart(name="shards", title=title, note=note, figure=figure)]
    return [*picture, replace(_rows(sharding), limit=limit)]


def _parameters(sharding: ShardingMap) -> Table:
    columns = [
        c.name("fqn", "parameter"),
        c.layer("group", "group"),
        c.name("shape", of=lambda one: str(one.shape)),
        c.dtype(),
        c.sized("bytes", "size"),
        c.sized("shard_bytes", "of a\nshard"),
        c.count("rows_per_shard", "rows of\na shard"),
        c.count("full_shards", "full\nshards"),
        c.count("short_shards", "short"),
        c.count("empty_shards", "empty"),
        c.sized("padding_bytes", "padding"),
        c.name("placements"),
    ]
    note = "shards of the sharded dimension; padding summed over them"
    rows = sharding.parameters
    return c.table("parameters", "Parameters", columns, rows, note=note, limit=_ROWS, noun="parameter")


def _rows(sharding: ShardingMap) -> Table:
    columns = [
        c.name("fqn", "parameter", of="0.fqn"),
        c.text("shards", of=lambda row: _shards(row[1])),
        c.name("ranks", of=lambda row: _ranks_of(sharding, *row)),
        c.count("first_row", "first\nrow", of="1.first_row"),
        c.count("rows", "rows of\neach", of="1.rows"),
    ]
    rows = [(one, piece) for one in sharding.parameters for piece in one.pieces]
    note = "neighbouring shards with the same number of rows share a line"
    return c.table("rows", "Rows", columns, rows, note=note, limit=_ROWS, noun="line")


def _shards(piece: ShardPiece) -> str:
    if piece.first_shard == piece.last_shard:
        return str(piece.first_shard)
    return f"{piece.first_shard}-{piece.last_shard}"


def _ranks_of(sharding: ShardingMap, one: ParameterSharding, piece: ShardPiece) -> str:
    held = sharding.meshes[one.mesh].ranks_of_shard
    first, last = held[piece.first_shard], held[piece.last_shard]
    if piece.first_shard == piece.last_shard:
        return format_numbers(first)
    if len(first) == len(last) == 1:
        return f"{first[0]} to {last[0]}"
    return f"({format_numbers(first)}) to ({format_numbers(last)})"


def _ranks(sharding: ShardingMap) -> Table:
    columns = [
        c.number("rank"),
        c.sized("bytes", "holds"),
        c.sized("padded_bytes", "allocates"),
        c.count("empty_parameters", "empty\nparameters"),
    ]
    return c.table("ranks", "Ranks", columns, sharding.ranks, limit=_ROWS, noun="rank")


def _redistributions(sharding: ShardingMap) -> Table:
    columns = [
        c.text("source", "from"),
        c.text("target", "to"),
        c.text("op", "collective", lambda op: "none" if op is None else show_op(op)),
        c.sized("payload_bytes", "payload"),
        c.sized("wire_bytes", "sent by\na rank"),
        c.sized("result_bytes", "a rank\nthen holds"),
        c.prose("meaning"),
    ]
    note = "of all parameters at once"
    rows = sharding.redistributions
    return c.table("redistributions", "Redistribution", columns, rows, note=note, noun="redistribution")


@builds(CheckpointMap)
def checkpoint_document(checkpoint: CheckpointMap) -> Document:
    """Lay out a checkpoint."""
    model = checkpoint.model
    compared = Section(anchor="model", title=_MODEL, blocks=[_differences(model)]) if model else None
    return Document(
        title="Distributed checkpoint",
        subtitle=checkpoint.path,
        numbers=[
            KeyFigure(value=show_bytes(checkpoint.tensor_bytes), label="tensors"),
            KeyFigure(value=show_bytes(checkpoint.bytes), label="files"),
        ],
        sections=[
            *([compared] if compared else ()),
            Section(anchor="entries", title="Entries", blocks=[_entries(checkpoint.entries)]),
            Section(anchor="files", title="Files", blocks=[_files(checkpoint.files)]),
        ],
    )


def _entries(entries: Sequence[CheckpointEntry]) -> Table:
    columns = [
        c.name("name", "entry"),
        c.dtype(),
        c.name("shape", of=lambda one: "object" if one.shape is None else str(one.shape)),
        c.sized("bytes", "size"),
        c.sized("stored_bytes", "stored"),
        c.count("pieces"),
        c.count("files"),
        c.text("covered", "", lambda covered: "not whole" if covered is False else ""),
    ]
    ordered = sorted(entries, key=lambda one: (one.bytes is None, -(one.bytes or one.stored_bytes)))
    note = "largest first; stored: in the files, headers included"
    return c.table("entries", "Entries", columns, ordered, note=note, limit=_ROWS, noun="entry")


def _files(files: Sequence[CheckpointFile]) -> Table:
    columns = [
        c.name("name", "file"),
        c.text("state"),
        c.sized("bytes", "on disk"),
        c.sized("used_bytes", "used"),
        c.sized("needed_bytes", "needed"),
        c.count("entries", "pieces"),
    ]
    note = "needed: up to the end of the last chunk"
    return c.table("files", "Files", columns, files, note=note, limit=_ROWS, noun="file")


_MODEL = "Beside the model"


def _differences(model: CheckpointModel) -> Table:
    columns = [
        c.name("name", "parameter"),
        c.text("kind", "difference"),
        c.name("stored", "checkpoint"),
        c.name("expected", "model"),
    ]
    remarks = [f"With optimizer state: {model.with_optimizer_state:,} of {model.parameters:,} parameters."]
    if model.prefix:
        remarks.insert(0, f"Prefix of the names in the checkpoint: {model.prefix}")
    noun = "difference"
    return c.table("mismatches", _MODEL, columns, model.mismatches, limit=_ROWS, noun=noun, remarks=remarks)
