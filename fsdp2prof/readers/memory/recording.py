"""Memory files: any of them to a :class:`~fsdp2prof.tables.MemoryRecording`.

A CUDA run leaves the allocator's own pickle (:mod:`fsdp2prof.readers.memory.snapshot`); a CPU run and an
estimate leave ``memory.npz``: every column of the recording as a plain array, strings and scalars in one
JSON header. Neither needs an object to be unpickled.

NumPy archives from anywhere, read strictly: plain one-dimensional arrays of integers and booleans.

``numpy.load`` evaluates headers as Python text, decompresses by any method and allocates whatever a header
says. Here a member is what ``numpy.savez`` and ``savez_compressed`` write of such an array, or it is refused.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from fsdp2prof.errors import SnapshotError
from fsdp2prof.readers.memory.snapshot import check_recording, read_snapshot
from fsdp2prof.tables.allocations import (
    AllocationTable,
    BlockTable,
    MemoryRecording,
    OomTable,
    SegmentTable,
    Stacks,
)
from fsdp2prof.tables.columns import Strings, Table
from fsdp2prof.tables.trace import LabelTable, StepTable

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '(<i8|<i4|\|b1|\|u1)', 'fortran_order': False, "
    rb"'shape': \((\d{1,12}),\), \} *\n",
    re.DOTALL,
)
_LONGEST_HEADER = 256
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_MOST_EXPANSION, _EXPANDS_FREELY_BYTES = 100, 16 << 20
"""Recordings compress fivefold to tenfold: a file that grows more is a decompression bomb."""


def read_npz(path: Path) -> Arrays:
    """Read every array of an archive, by name. Raises ``ValueError`` for anything else, and ``OSError``."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            size = sum(member.file_size for member in members)
            if size > _MOST_EXPANSION * path.stat().st_size + _EXPANDS_FREELY_BYTES:
                raise ValueError(f"grows more than {_MOST_EXPANSION}-fold when it is decompressed")
            return {member.filename.removesuffix(".npy"): _array(archive, member) for member in members}
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise ValueError(f"not a NumPy archive: {error}") from None


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> npt.NDArray[Any]:
    if member.compress_type not in _METHODS:
        raise ValueError(f"{member.filename} is compressed by an unknown method")
    content = archive.read(member)
    header = _HEADER.match(content[:_LONGEST_HEADER])
    if header is None or header.end() != 10 + int.from_bytes(header[1], "little"):
        raise ValueError(f"{member.filename} is not a one-dimensional array of integers")
    dtype, length = np.dtype(header[2].decode()), int(header[3])
    if len(content) != header.end() + length * dtype.itemsize:
        raise ValueError(f"{member.filename} does not have the {length} entries it says it has")
    array: npt.NDArray[Any] = np.frombuffer(content, dtype=dtype, offset=header.end()).copy()
    if dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
        raise ValueError(f"{member.filename} has booleans other than 0 and 1")
    return array


RECORDING_SCHEMA = "fsdp2prof.memory_recording/1"
HEADER = "header"
"""Entry of the archive with a :class:`RecordingHeader`."""
RECORDING_TABLES: dict[str, type[Table]] = {
    "allocations": AllocationTable,
    "segments": SegmentTable,
    "blocks": BlockTable,
    "labels": LabelTable,
    "steps": StepTable,
    "ooms": OomTable,
}
"""Tables of a recording, a column an entry of the archive: ``allocations.size``."""


class RecordingHeader(msgspec.Struct, kw_only=True):
    """Everything of a recording except its numeric columns."""

    schema: str
    source: Literal["cuda_snapshot", "storage_count", "kineto", "estimate"]
    device: str
    events: int
    end_ns: int
    truncated: bool
    settings: dict[str, str]
    warnings: list[str]
    strings: dict[str, list[str]]
    """Values of every string column, by its name in the archive."""


def read_memory(path: Path) -> list[MemoryRecording]:
    """Read any memory file: one recording per device it knows. Raises ``SnapshotError``."""
    try:
        with path.open("rb") as file:
            archive = file.read(4) == b"PK\x03\x04"
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read: {error.strerror}") from error
    return [read_recording(path)] if archive else read_snapshot(path)


def read_recording(path: Path) -> MemoryRecording:
    """Read ``memory.npz``. Raises ``SnapshotError``."""
    try:
        arrays = read_npz(path)
        header = msgspec.json.decode(arrays[HEADER].tobytes(), type=RecordingHeader)
        if header.schema != RECORDING_SCHEMA:
            raise SnapshotError(
                f"{path}: schema {header.schema!r} is not {RECORDING_SCHEMA!r}; "
                "read it with the fsdp2prof that wrote it"
            )
        recording = _recording(arrays, header)
        check_recording(recording)
    except (OSError, KeyError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise SnapshotError(f"{path}: not a memory recording of fsdp2prof ({error})") from error
    return recording


def _recording(arrays: Arrays, header: RecordingHeader) -> MemoryRecording:
    tables = {
        name: kind(
            **{
                field.name: _get(arrays, header, f"{name}.{field.name}", str(field.type))
                for field in fields(kind)  # type: ignore[arg-type]
            }
        )
        for name, kind in RECORDING_TABLES.items()
    }
    return MemoryRecording(
        source=header.source,
        device=header.device,
        **tables,  # type: ignore[arg-type]
        stacks=Stacks(
            _get(arrays, header, "stacks.offsets", "IntArray"),
            _get(arrays, header, "stacks.frames", "Strings"),
        ),
        events=header.events,
        end_ns=header.end_ns,
        truncated=header.truncated,
        settings=header.settings,
        warnings=tuple(header.warnings),
    )


def _get(arrays: Arrays, header: RecordingHeader, name: str, kind: str) -> Any:
    """Return one column; raises ``ValueError`` if its type or string codes contradict the table."""
    array = arrays[name]
    wanted = {"Strings": np.int32, "BoolArray": np.bool_}.get(kind, np.int64)
    if array.dtype != wanted:
        raise ValueError(f"column {name} is {array.dtype}")
    if kind != "Strings":
        return array
    values = tuple(header.strings[name])
    if len(array) and not -1 <= int(array.min()) <= int(array.max()) < len(values):
        raise ValueError(f"column {name} has codes without a string")
    return Strings(array, values)
