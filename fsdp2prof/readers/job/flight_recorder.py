"""Flight Recorder dumps: the pickle that NCCL's watchdog writes, and the JSON of the debug server.

Format: ``torch/csrc/distributed/c10d/FlightRecorder*.hpp``, versions 2.x, and 1.x of torch 2.2 and 2.3, which
numbers process groups and names none (``TraceUtils.h``); torchcomms writes 2.10, too. A pickle is
loaded without executing anything in it. Both are decoded by one strict schema; unknown keys are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from fsdp2prof.errors import FlightRecorderError, SnapshotError
from fsdp2prof.manifest import RANK_LIMIT
from fsdp2prof.readers.safe_pickle import load_containers
from fsdp2prof.tables.flight_recorder import FlightDump, Issued, Sizes

_MOST_BYTES = 512 << 20
_MOST_VALUES = 20_000_000
"""Values in a pickle: a pickle may refer to one list a million times."""
_DEEPEST = 8
_CONTAINERS = (dict, list, tuple)
_BEGINNING = 4096

_OPS = {
    "_all_gather_base": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "ALLGATHER_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "REDUCE_SCATTER_coalesced": "reduce_scatter",
    "allreduce_coalesced": "all_reduce",
    "_broadcast_oop": "broadcast",
    "all_to_all_single": "all_to_all",
    "all_to_all_v_single": "all_to_all",
}
"""torch's names of one operation under its usual one."""

_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}
"""``c10::toString`` of a scalar type to torch's dtype; the others differ in their capitals only."""


class _Frame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    line: int = 0


class _Entry(msgspec.Struct):
    profiling_name: str
    input_sizes: list[list[int]]
    output_sizes: list[list[int]]
    state: str
    collective_seq_id: int = -1
    process_group: tuple[str, str] | None = None
    record_id: int = 0
    seq_id: int = -1
    pg_id: int = 0
    p2p_seq_id: int = 0
    is_p2p: bool = False
    input_dtypes: list[str] = []
    output_dtypes: list[str] = []
    retired: bool = False
    time_created_ns: int = 0
    frames: list[_Frame] = []


class _Group(msgspec.Struct):
    ranks: str | list[int] = ""


class _Dump(msgspec.Struct):
    version: str
    entries: list[_Entry] = []
    pg_config: dict[str, _Group] = {}


def looks_like_dump(path: Path) -> bool:
    """Whether a file begins like a dump: a pickle or an object, with a key that dumps have."""
    try:
        with path.open("rb") as file:
            beginning = file.read(_BEGINNING)
    except OSError:
        return False
    keys = (b"entries", b"pg_config", b"comm_lib_version", b"nccl_version")
    return beginning[:1] in (b"\x80", b"{") and any(key in beginning for key in keys)


def read_dump(path: Path, rank: int) -> FlightDump:
    """Read one rank's dump. Raises ``FlightRecorderError`` for a file that is not one or cannot be read."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise FlightRecorderError(
                f"{path}: too large for a Flight Recorder dump ({path.stat().st_size} bytes)"
            )
        with path.open("rb") as file:
            is_pickle = file.read(1) == b"\x80"
        dump = (
            _from_pickle(path)
            if is_pickle
            else msgspec.json.decode(path.read_bytes(), type=_Dump, strict=False)
        )
        return _typed(dump, path, rank)
    except OSError as error:
        raise FlightRecorderError(f"{path}: cannot be read ({error.strerror})") from error
    except SnapshotError as error:
        raise FlightRecorderError(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise FlightRecorderError(
            f"{path}: not a Flight Recorder dump, or a truncated one: {error}"
        ) from error


def _from_pickle(path: Path) -> _Dump:
    content = load_containers(path, pairs_of_names=True)
    if not isinstance(content, dict):
        raise ValueError("it holds no dictionary")
    _check_size(content)
    return msgspec.convert(content, type=_Dump, strict=False)


def _check_size(content: Any) -> None:
    """Count the values, each as often as it is met; raise ``ValueError`` for more than a dump has."""
    met, level = 0, [content]
    for _ in range(_DEEPEST):
        met += sum(map(len, level))
        if met > _MOST_VALUES:
            raise ValueError("too many values for a dump")
        level = [inner for value in level for inner in _values(value) if isinstance(inner, _CONTAINERS)]
        if not level:
            return
    raise ValueError("nested too deeply")


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _typed(dump: _Dump, path: Path, rank: int) -> FlightDump:
    if dump.version.split(".")[0] not in ("1", "2"):
        raise ValueError(f"its version is {dump.version}; 2 is the newest one known")
    if rank >= RANK_LIMIT:
        raise ValueError(f"its name says rank {rank}, which is not the number of a rank")
    if any(max(entry.collective_seq_id, entry.seq_id) < 0 for entry in dump.entries):
        raise ValueError("an entry has no sequence number")
    groups = {name: ranks for name, group in dump.pg_config.items() if (ranks := _ranks(group.ranks))}
    return FlightDump(
        rank=rank,
        source=str(path),
        groups=groups,
        issued=[_issued(entry) for entry in dump.entries],
        whole=not dump.entries or min(entry.record_id for entry in dump.entries) == 0,
    )


def _ranks(written: str | list[int]) -> tuple[int, ...]:
    """Ranks of a group, which torch writes as the text of a list."""
    listed = written if isinstance(written, list) else msgspec.json.decode(written or "[]", type=list[int])
    if listed and not 0 <= min(listed) <= max(listed) < RANK_LIMIT:
        raise ValueError(f"no group has the ranks {min(listed)} to {max(listed)}")
    return tuple(sorted(listed))


def _issued(entry: _Entry) -> Issued:
    backend, _, name = entry.profiling_name.rpartition(":")
    word = name.split(" ")[0]
    p2p = entry.is_p2p or word in ("send", "recv")
    return Issued(
        group=str(entry.pg_id) if entry.process_group is None else entry.process_group[0],
        group_desc="" if entry.process_group is None else entry.process_group[1],
        seq=entry.p2p_seq_id if p2p else max(entry.collective_seq_id, entry.seq_id),
        backend=backend,
        op=name if p2p else _OPS.get(word, word),
        p2p=p2p,
        input_sizes=_sizes(entry.input_sizes),
        output_sizes=_sizes(entry.output_sizes),
        input_dtypes=tuple(_DTYPES.get(dtype, dtype.lower()) for dtype in entry.input_dtypes),
        output_dtypes=tuple(_DTYPES.get(dtype, dtype.lower()) for dtype in entry.output_dtypes),
        finished=entry.retired or entry.state == "completed",
        created_ns=entry.time_created_ns,
        place=_place(entry.frames),
    )


def _sizes(sizes: list[list[int]]) -> Sizes:
    return tuple(tuple(shape) for shape in sizes)


def _place(frames: list[_Frame]) -> str | None:
    """Return the innermost Python line outside torch."""
    for frame in frames:
        if frame.filename.endswith(".py") and "site-packages/torch/" not in frame.filename:
            return f"{frame.filename}:{frame.line}"
    return None
