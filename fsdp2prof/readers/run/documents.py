"""The JSON documents of a run directory, decoded and checked.

What types do not say of a run's documents: fields that belong together, and texts that are times.
Node 0 writes ``run.json``, every further one ``run-node-0000N.json``: each describes its own part of the run.
The lines of ``record --watch`` are read from the end of a file that may be long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.inspect import (
    DataclassType,
    DictType,
    ListType,
    LiteralType,
    NoneType,
    StructType,
    Type,
    UnionType,
    type_info,
)

from fsdp2prof.errors import ModelError, RunDirectoryError
from fsdp2prof.manifest import (
    RUN_SCHEMA,
    ParameterInfo,
    RankManifest,
    RecordingInfo,
    RunInfo,
    State,
    WatchedStep,
)
from fsdp2prof.run_directory import NODE_FILES, RUN_FILE

_MOST_ELEMENTS = 1 << 56
_CLAIM_NOTHING = ("other", "unknown", "info", "depends", "not_distinguishable", "low")
"""Words of a fixed set that hold of anything, the first that it has."""
_ABSENT = object()


def check_document(document: RunInfo | RankManifest | RecordingInfo) -> None:
    """Raise ``ValueError`` with the first thing that no recorder writes."""
    if isinstance(document, RunInfo):
        _check_times(document)
        return
    if isinstance(document, RecordingInfo):
        return
    for group in document.param_groups:
        names = group.mesh.dim_names
        if names is not None and len(names) != len(group.mesh.shape):
            raise ValueError(f"a mesh of {len(group.mesh.shape)} dimensions has {len(names)} names")
        if not group.parameters:
            raise ValueError(f"parameter group {group.fqn!r} has no parameters")
        for parameter in group.parameters:
            _check_parameter(parameter)


def _check_times(info: RunInfo) -> None:
    for text in (info.started_at, info.finished_at):
        if text and datetime.fromisoformat(text).tzinfo is None:
            raise ValueError(f"{text} has no time zone")


def _check_parameter(parameter: ParameterInfo) -> None:
    shapes = (parameter.global_shape, parameter.local_shape, parameter.padded_local_shape)
    if not parameter.global_shape or len(set(map(len, shapes))) > 1:
        raise ValueError(
            f"{parameter.fqn} has shapes of {', '.join(str(len(one)) for one in shapes)} dimensions"
        )
    for shape in shapes:
        if prod(shape) > _MOST_ELEMENTS:
            raise ValueError(f"no tensor has the shape {shape}")
    if len(parameter.all_gather_dtypes) != len(parameter.all_gather_numels):
        raise ValueError(f"{parameter.fqn} is not gathered in as many sizes as dtypes")


_LARGEST = 256 << 20
"""Bytes: a thousand parameter groups take one MiB."""

_Document = TypeVar("_Document", RunInfo, RankManifest, RecordingInfo)
_T = TypeVar("_T")


class UnreadableError(RunDirectoryError):
    """A document that is not the JSON it should be."""


class _Head(msgspec.Struct):
    schema: str


def read_document(file: Path, kind: type[_Document], known_schema: str) -> tuple[_Document, bytes]:
    """Read and decode one document, keys it does not know ignored; return its JSON, too, all words known.

    Raises ``UnreadableError`` for a file that is not such JSON, ``RunDirectoryError`` for a newer schema.
    """
    content = _content(file)
    try:
        _check_schema(file, msgspec.json.decode(content, type=_Head).schema, known_schema)
        document, content, newer = decode_known(content, kind)
        check_document(document)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise UnreadableError(f"{file}: cannot be read ({error}); record the run again") from error
    if newer is not None and not isinstance(document, RecordingInfo):
        document.messages.append(newer)
    return document, content


def _content(file: Path) -> bytes:
    """Return the bytes of a document. Raises ``UnreadableError`` for one that is missing or too large."""
    if file.exists() and not file.is_file():  # opening a pipe would wait for ever
        raise UnreadableError(f"{file}: not a file; record the run again")
    try:
        with file.open("rb") as opened:
            content = opened.read(_LARGEST + 1)
    except OSError as error:
        raise UnreadableError(f"{file}: cannot be read ({error.strerror}); record the run again") from error
    if len(content) > _LARGEST:
        raise UnreadableError(
            f"{file}: cannot be read (more than {_LARGEST >> 20} MiB); record the run again"
        )
    return content


def decode_known(
    content: bytes, kind: type[_T], dec_hook: Callable[[type, Any], Any] | None = None
) -> tuple[_T, bytes, str | None]:
    """Decode a document of this package; return it, its JSON, and a message about unknown values of a
    newer version.

    An unknown value of a fixed set becomes that set's neutral value, if it has one. Otherwise the nearest
    enclosing optional part is left out: an optional field, a row of a list. Raises the errors of
    ``msgspec``.
    """
    try:
        return msgspec.json.decode(content, type=kind, dec_hook=dec_hook), content, None
    except msgspec.ValidationError as error:
        if not str(error).startswith("Invalid enum value"):
            raise
    newer: set[str] = set()
    content = msgspec.json.encode(_known(msgspec.json.decode(content), type_info(kind), "", newer))
    return msgspec.json.decode(content, type=kind, dec_hook=dec_hook), content, newer_words(newer)


def newer_words(words: Iterable[str]) -> str:
    """Say that a document has words that this version does not know."""
    return (
        f"a newer fsdp2prof wrote {', '.join(sorted(words))}, unknown here: upgrade, or this part is missing"
    )


def _known(value: Any, kind: Type, name: str, newer: set[str]) -> Any:
    """Return a value without the words that its type does not know; :data:`_ABSENT` for one of them."""
    if isinstance(kind, LiteralType) and isinstance(value, str) and value not in kind.values:
        newer.add(f"{name} {value!r}")
        return next((word for word in _CLAIM_NOTHING if word in kind.values), _ABSENT)
    if isinstance(kind, UnionType):
        kinds = [one for one in kind.types if not isinstance(one, NoneType)]
        if value is None or len(kinds) > 1:
            return value
        found = _known(value, kinds[0], name, newer)
        return None if found is _ABSENT else found
    if isinstance(kind, (DataclassType, StructType)) and isinstance(value, dict):
        for field in kind.fields:
            if field.encode_name not in value:
                continue
            found = _known(value.pop(field.encode_name), field.type, field.encode_name, newer)
            if found is not _ABSENT:
                value[field.encode_name] = found
            elif field.required:
                return _ABSENT
    elif isinstance(kind, ListType) and isinstance(value, list):
        rows = [_known(row, kind.item_type, name, newer) for row in value]
        return [row for row in rows if row is not _ABSENT]
    elif isinstance(kind, DictType) and isinstance(value, dict):
        pairs = [
            (_known(key, kind.key_type, name, newer), _known(item, kind.value_type, name, newer))
            for key, item in value.items()
        ]
        return {key: item for key, item in pairs if key is not _ABSENT and item is not _ABSENT}
    return value


def _check_schema(file: Path, schema: str, known_schema: str) -> None:
    name, _, number = schema.partition("/")
    known_name, _, known_number = known_schema.partition("/")
    if name != known_name or not number.isdigit():
        raise RunDirectoryError(f"{file}: its schema is {schema!r}, not {known_schema!r}")
    if int(number) > int(known_number):
        raise RunDirectoryError(
            f"{file}: schema {schema} is newer than this fsdp2prof reads ({known_schema}); upgrade fsdp2prof"
        )


def read_lengths(path: Path) -> list[int]:
    """Return the lengths in the file's order. Raises ``ModelError`` if it is not a list of whole numbers."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"lengths {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ModelError(f"lengths {path}: is not text") from None
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    wrong = next((word for word in words if not (word.isascii() and word.isdecimal())), None)
    if wrong is not None:
        raise ModelError(f"lengths {path}: {wrong[:40]!r} is not a whole number; write one length per line")
    if any(len(word) > len(str(1 << 40)) for word in words):
        raise ModelError(f"lengths {path}: no document has more than {1 << 40} tokens")
    return [int(word) for word in words]


_LINE_BYTES = 400
"""More than a line takes."""


def read_last_steps(file: Path, count: int) -> list[WatchedStep]:
    """Return the last ``count`` steps of a rank, in order; a line that is still being written is left out.

    Raises ``OSError`` for a file that cannot be read.
    """
    with file.open("rb") as lines:
        lines.seek(0, 2)
        start = max(0, lines.tell() - count * _LINE_BYTES)
        lines.seek(start)
        whole = lines.read().split(b"\n")[1 if start else 0 : -1]
    steps = []
    for line in whole[-count:]:
        try:
            steps.append(msgspec.json.decode(line, type=WatchedStep))
        except (msgspec.DecodeError, ValueError):
            continue  # cut by a full disk
    return steps


_NODE_FILE = re.compile(r"run-node-([0-9]{5,6})\.json")
_BEST_TO_WORST: tuple[State, ...] = ("complete", "other", "partial", "running", "crashed")


def node_ranks(root: Path) -> dict[int, Path]:
    """Return the file of every node that recorded into a run directory, in order of the nodes."""
    files = {
        int(match[1]): file for file in root.glob(NODE_FILES) if (match := _NODE_FILE.fullmatch(file.name))
    }
    if (root / RUN_FILE).is_file():
        files[0] = root / RUN_FILE
    return dict(sorted(files.items()))


def read_run_info(root: Path) -> tuple[RunInfo, list[str]]:
    """Read the description of the run as a whole, and its messages.

    Raises ``RunDirectoryError`` for a file that cannot be read or was written by a newer fsdp2prof.
    """
    nodes = {rank: read_document(file, RunInfo, RUN_SCHEMA)[0] for rank, file in node_ranks(root).items()}
    messages = []
    if 0 not in nodes:
        of = " of node 0" if nodes else ""
        messages.append(f"{RUN_FILE} is missing: the command and the outcome of the run are unknown{of}")
    info = merge_nodes(nodes)
    if info.state == "running" and nodes:
        running = [_name(rank, node) for rank, node in nodes.items() if node.state == "running"]
        of = f" of {', '.join(running)}" if len(nodes) > 1 else ""
        messages.append(f"the run{of} has not ended, or was killed before it wrote its outcome")
    return info, [*info.messages, *messages]


def merge_nodes(nodes: dict[int, RunInfo]) -> RunInfo:
    """Merge the nodes of one run.

    The state is the worst of theirs, the exit code the first that is not 0; command, options and
    environment are those of the lowest node; a message that does not name its rank gets the name of its
    node.
    """
    if len(nodes) <= 1:
        return next(iter(nodes.values()), RunInfo())
    infos = list(nodes.values())
    codes = [info.exit_code for info in infos]
    ended = [info.finished_at for info in infos if info.finished_at is not None]
    worlds = [info.world_size for info in infos if info.world_size is not None]
    first = infos[0]
    return RunInfo(
        schema=first.schema,
        command=first.command,
        state=max((info.state for info in infos), key=_BEST_TO_WORST.index),
        exit_code=next((code for code in codes if code), None if None in codes else 0),
        started_at=min((info.started_at for info in infos if info.started_at), key=_time, default=""),
        finished_at=max(ended, key=_time) if len(ended) == len(infos) else None,
        hosts=list(dict.fromkeys(host for info in infos for host in info.hosts)),
        world_size=max(worlds, default=None),
        versions=first.versions,
        environment=first.environment,
        options=first.options,
        wrappers=sorted({name for info in infos for name in info.wrappers}),
        messages=_messages(nodes),
    )


def _messages(nodes: dict[int, RunInfo]) -> list[str]:
    first = next(iter(nodes.values()))
    latest_start = max((_time(info.started_at) for info in nodes.values() if info.started_at), default=None)
    messages = []
    for rank, info in nodes.items():
        name = _name(rank, info)
        messages += [text if text.startswith("rank") else f"{name}: {text}" for text in info.messages]
        if info.options != first.options:
            messages.append(f"{name}: recorded with different options from {_name(min(nodes), first)}")
        if latest_start is not None and info.finished_at and _time(info.finished_at) < latest_start:
            messages.append(
                f"{name}: ended before another node started, so it is from an older run; record again with -f"
            )
    return messages


def _name(rank: int, info: RunInfo) -> str:
    return f"node {rank} ({', '.join(info.hosts)})" if info.hosts else f"node {rank}"


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
