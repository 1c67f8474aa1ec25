"""From a job's traces to Chakra execution traces: one file a rank, and the process groups beside them.

A file is a ``GlobalMetadata`` and then one ``Node`` after the other, each after its length as a varint. Of
their schema (``et_def.proto``, package ``ChakraProtoMsg``) the part that is written is declared here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from fsdp2prof import __version__
from fsdp2prof.analyzers.whatif.program import Job
from fsdp2prof.analyzers.whatif.what_if import RecordedRank, replay_job
from fsdp2prof.errors import InputError, UsageError
from fsdp2prof.files import replacing
from fsdp2prof.reporters.chakra import ChakraNode, chakra_nodes
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.notebook import to_pandas
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.workflows.job.job_files import JobFiles
from fsdp2prof.workflows.whatif import recorded_ranks

Kind: TypeAlias = Literal["csv", "parquet"]


def check_folder(folder: Path, kind: Kind, *, force: bool) -> None:
    """Refuse, before any work is done, a folder that holds such files already unless ``force`` is given.

    Raises ``InputError``, or ``UsageError`` without pyarrow for Parquet.
    """
    if kind == "parquet" and find_spec("pyarrow") is None:
        raise UsageError("Parquet needs pyarrow: pip install 'fsdp2prof[parquet]'")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: not a folder; -o takes one to write the tables into")
    if folder.is_dir() and any(folder.glob(f"*.{kind}")) and not force:
        raise InputError(f"{folder}: holds .{kind} files already; add -f to overwrite those of equal names")
    if not folder.absolute().parent.is_dir():
        raise InputError(f"{folder}: its parent folder does not exist")


def export_tables(result: Any, folder: Path, kind: Kind) -> dict[str, int]:
    """Write ``NAME.csv`` or ``NAME.parquet`` for every table; return the tables' names with their rows."""
    try:
        folder.mkdir(exist_ok=True)
        return _csv(result, folder) if kind == "csv" else _parquet(result, folder)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror})") from error


def _csv(result: Any, folder: Path) -> dict[str, int]:
    document = build(result)
    for name in document.tables():
        text = RENDERERS["csv"].render(document, RenderOptions(table=name))
        with replacing(folder / f"{name}.csv") as temporary:
            temporary.write_bytes(text.encode() if isinstance(text, str) else text)
    return {name: len(table.rows) for name, table in document.tables().items()}


def _parquet(result: Any, folder: Path) -> dict[str, int]:
    frames = to_pandas(result)
    for name, frame in frames.items():
        with replacing(folder / f"{name}.parquet") as temporary:
            frame.to_parquet(temporary, engine="pyarrow", index=False)
    return {name: len(frame) for name, frame in frames.items()}


GROUPS_FILE = "comm_groups.json"

_STRING, _INT64, _UINT64, _INT32, _BOOL, _MESSAGE = 9, 3, 4, 5, 8, 11
"""Field types of ``FieldDescriptorProto``."""
_PACKAGE = "ChakraProtoMsg"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChakraExport:
    """Counts of the files written."""

    ranks: int
    nodes: int
    groups: int
    """Process groups that are not all ranks."""
    as_time: int
    """Collectives whose group neither trace nor manifest describes: written as time that passes."""


def export_chakra(job: JobFiles, folder: Path) -> ChakraExport:
    """Write ``workload.RANK.et`` of every rank, and ``comm_groups.json``, into a folder.

    Raises the errors of :func:`~fsdp2prof.workflows.whatif.recorded_ranks`, and ``InputError`` if a rank was
    not recorded, or protobuf is not installed.
    """
    messages = _messages()
    ranks, _ = recorded_ranks(job)
    _require_all(job, ranks)
    names, groups = _groups(job, ranks)
    replayed: Job = replay_job([(one.program, one.analysis.summary) for one in ranks]).job
    folder.mkdir(parents=True, exist_ok=True)
    count = as_time = 0
    for program in replayed:
        with replacing(folder / f"workload.{program.rank}.et") as temporary, temporary.open("wb") as file:
            about = messages["GlobalMetadata"](version="0.0.4")
            about.attr.add(name="schema", string_val=f"fsdp2prof {__version__}")
            file.write(_framed(about))
            for node in chakra_nodes(program, names):
                file.write(_framed(_encoded(messages["Node"](), node)))
                count += 1
                as_time += node.unplaced
    with replacing(folder / GROUPS_FILE) as temporary:
        temporary.write_bytes(msgspec.json.encode(groups))
    return ChakraExport(ranks=len(replayed), nodes=count, groups=len(groups), as_time=as_time)


def _require_all(job: JobFiles, ranks: Sequence[RecordedRank]) -> None:
    here = {one.program.rank for one in ranks}
    world = max([job.traces.world_size or 0, *(rank + 1 for rank in here)])
    missing = sorted(set(range(world)) - here)
    if missing:
        some = ", ".join(map(str, missing[:5])) + ("..." if missing[5:] else "")
        raise InputError(
            f"{job.path}: {len(missing)} of {world} ranks have no trace (rank {some}), and a simulation "
            "needs one for every rank: record with --ranks all"
        )


def _groups(
    job: JobFiles, ranks: Sequence[RecordedRank]
) -> tuple[dict[tuple[int, str], str | None], dict[str, list[int]]]:
    """Number the process groups that are not all ranks, from 1; those of unknown ranks have no entry."""
    world = list(range(len(ranks)))
    numbers: dict[tuple[int, ...], str] = {}
    names: dict[tuple[int, str], str | None] = {}
    unknown: set[tuple[int, str]] = set()
    for one in ranks:
        manifest = job.manifests.get(one.program.rank)
        known = [*one.tables.trace.process_groups, *(manifest.process_groups if manifest else ())]
        members = {group.name: sorted(group.ranks) for group in known if group.ranks}
        table = one.program.activities
        table = table.take(table.kind.equals("collective"))
        for group, size in zip(table.group.to_list(), table.group_size.tolist(), strict=True):
            key = one.program.rank, group or ""
            if key in names or key in unknown:
                continue
            found = members.get(group or "")
            if found is None and size == len(world):
                found = world
            if found is None:
                unknown.add(key)
                continue
            names[key] = None if found == world else numbers.setdefault(tuple(found), str(len(numbers) + 1))
    return names, {number: list(found) for found, number in numbers.items()}


def _encoded(message: Any, node: ChakraNode) -> Any:
    message.id, message.name, message.type = node.id, node.name, node.type
    message.data_deps.extend(node.waits_for)
    message.start_time_micros, message.duration_micros = node.start_us, node.duration_us
    message.attr.add(name="is_cpu_op", bool_val=node.on_host)
    if node.comm_type is not None:
        message.attr.add(name="comm_type", int64_val=node.comm_type)
        message.attr.add(name="comm_size", int64_val=node.comm_bytes or 0)
        if node.group is not None:
            message.attr.add(name="pg_name", string_val=node.group)
    return message


def _framed(message: Any) -> bytes:
    content: bytes = message.SerializeToString()
    return bytes(_varint(len(content))) + content


def _varint(value: int) -> Iterator[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value


@cache
def _messages() -> dict[str, Any]:
    """Return the classes of the messages, made from their fields. Raises ``InputError`` without protobuf."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ModuleNotFoundError as error:
        raise InputError("`export chakra` needs protobuf: pip install 'fsdp2prof[chakra]'") from error
    file = descriptor_pb2.FileDescriptorProto(
        name="fsdp2prof/et_def.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
        for field_name, (number, kind, repeated) in fields.items():
            added = message.field.add(name=field_name, number=number, label=3 if repeated else 1)
            if isinstance(kind, str):
                added.type, added.type_name = _MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                added.type = kind
            if field_name.endswith("_val"):
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _FIELDS
    }


_FIELDS: dict[str, dict[str, tuple[int, int | str, bool]]] = {
    "AttributeProto": {
        "name": (1, _STRING, False),
        "int64_val": (9, _INT64, False),
        "bool_val": (27, _BOOL, False),
        "string_val": (29, _STRING, False),
    },
    "GlobalMetadata": {"version": (1, _STRING, False), "attr": (2, "AttributeProto", True)},
    "Node": {
        "id": (1, _UINT64, False),
        "name": (2, _STRING, False),
        "type": (3, _INT32, False),
        "data_deps": (5, _UINT64, True),
        "start_time_micros": (6, _UINT64, False),
        "duration_micros": (7, _UINT64, False),
        "attr": (10, "AttributeProto", True),
    },
}
"""Message -> field -> number, type, whether it is repeated; an enum is an int32 on the wire."""
