"""Kineto (Chrome) trace files as tables: ``read_trace(path) -> Trace``.

CUDA, ROCm and CPU/gloo traces of torch 1.12 and newer, plain or gzip. Times are exact integer nanoseconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fsdp2prof.errors import TraceError
from fsdp2prof.manifest import DeviceInfo, ProcessGroupInfo
from fsdp2prof.readers import kineto_schema as schema
from fsdp2prof.readers.columns import (
    EventColumns,
    Interner,
    MemoryColumns,
    TextTimeNeededError,
    ThreadNumbers,
    int_column,
)
from fsdp2prof.readers.event_args import SparseArgs
from fsdp2prof.readers.event_stream import PIECE_BYTES, decode_pieces, read_head
from fsdp2prof.tables import EventTable, LabelTable, Trace

__all__ = ["peek_rank", "read_trace"]

_DEVICE_RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})


def read_trace(path: str | Path, piece_bytes: int = PIECE_BYTES) -> Trace:
    """Read one rank's trace file.

    Decodes ``piece_bytes`` of JSON at a time, so that memory is bounded by the columns kept. Raises
    ``TraceError`` for a file that is missing, empty, truncated, or not a Kineto trace.
    """
    path = Path(path)
    if path.is_dir():
        raise TraceError(f"{path}: is a folder; name one trace file")
    builder = _Builder()
    warnings: list[str] = []
    for _ in decode_pieces(path, builder.add, warnings, piece_bytes):
        pass
    return builder.finish(path, warnings)


def peek_rank(path: str | Path) -> tuple[int | None, int | None]:
    """Return (rank, world size) as the start of a trace file says; None where it does not.

    Reads no more than the start. Raises ``TraceError`` for a file that does not begin like a trace.
    """
    try:
        distributed = schema.DOCUMENT.decode(read_head(Path(path))).distributed_info
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: not a readable Kineto trace: {error}") from None
    return _integer(distributed, "rank"), _integer(distributed, "world_size")


class _Builder:
    """Collects the pieces of one file."""

    def __init__(self) -> None:
        pids, tids = Interner(), Interner()
        self._pids, self._tids = pids, tids
        self._events = EventColumns(pids, tids)
        self._memory = MemoryColumns(pids, tids)
        self._sparse = SparseArgs()
        self._header = schema.Header()
        self._text_times = False

    def add(self, text: bytes, is_last: bool) -> None:
        """Decode one piece into columns; raises ``msgspec.DecodeError`` if it is not one."""
        events = self._decode(text, is_last)
        try:
            self._keep(events)
        except TextTimeNeededError:
            self._text_times = True
            self._keep(self._decode(text, is_last))

    def _decode(self, text: bytes, is_last: bool) -> list[Any]:
        if not is_last:
            decoder = schema.EXACT_EVENTS if self._text_times else schema.EVENTS
            return decoder.decode(text)  # type: ignore[no-any-return]
        document = (schema.EXACT_DOCUMENT if self._text_times else schema.DOCUMENT).decode(text)
        self._header = document
        return document.events  # type: ignore[no-any-return]

    def _keep(self, events: list[Any]) -> None:
        complete = [e for e in events if type(e) in schema.COMPLETE_TYPES and e.cat != "Trace"]
        memory = [e for e in events if type(e) in schema.INSTANT_TYPES and e.name == "[memory]"]
        args = [e.args for e in complete]
        first = self._events.add(complete, args)
        self._sparse.add(complete, args, first)
        if memory:
            self._memory.add(memory)

    def finish(self, path: Path, warnings: list[str]) -> Trace:
        """Assemble the tables."""
        threads = ThreadNumbers(self._pids, self._tids)
        events, position = self._events.finish(threads)
        if not len(events):
            raise TraceError(f"{path}: holds no events; was the profiler stopped before a step was recorded?")
        if self._events.negative_durations:
            warnings.append(
                f"{path}: {self._events.negative_durations} events end before they start; taken as empty"
            )
        is_label = events.category.equals("user_annotation") & (events.thread >= 0)
        distributed = self._header.distributed_info
        return Trace(
            source=str(path),
            rank=_integer(distributed, "rank"),
            world_size=_integer(distributed, "world_size"),
            device=_device(events, self._header.device_properties),
            process_groups=_process_groups(distributed),
            base_time_ns=int_column([self._header.base_time_ns])[0].item(),
            collective_args=self._sparse.collective_args(position),
            shapes=self._sparse.shapes(position),
            memory=self._memory.finish(threads),
            labels=LabelTable(
                thread=events.thread[is_label],
                start_ns=events.start_ns[is_label],
                end_ns=events.end_ns[is_label],
                name=events.name.take(is_label),
            ),
            events=events,
            threads=tuple(threads.names),
            warnings=tuple(warnings),
        )


def _integer(info: Any, key: str) -> int | None:
    value = info.get(key) if isinstance(info, dict) else None
    return value if isinstance(value, int) else None


def _process_groups(info: Any) -> tuple[ProcessGroupInfo, ...]:
    """Process groups of ``distributedInfo.pg_config``, which is a list, or JSON text in some versions."""
    configs = info.get("pg_config") if isinstance(info, dict) else None
    if isinstance(configs, str):
        try:
            configs = msgspec.json.decode(configs)
        except msgspec.DecodeError:
            configs = None
    groups = []
    for config in configs if isinstance(configs, list) else []:
        ranks = config.get("ranks", [])
        groups.append(
            ProcessGroupInfo(
                name=str(config.get("pg_name", "")),
                desc=str(config.get("pg_desc", "")),
                backend=str(config.get("backend_config", config.get("backend", ""))),
                ranks=[r for r in ranks if isinstance(r, int)] if isinstance(ranks, list) else [],
            )
        )
    return tuple(groups)


def _device(events: EventTable, properties: Any) -> DeviceInfo:
    """The device most kernels ran on, with what ``deviceProperties`` says about it."""
    used = events.device[events.device >= 0]
    if not len(used):
        on_gpu = events.category.matches(lambda category: category in _DEVICE_RUNTIME).any()
        return DeviceInfo(type="cuda" if on_gpu else "cpu")
    index = int(np.bincount(used).argmax())
    known = [p for p in properties if isinstance(p, dict)] if isinstance(properties, list) else []
    match = [p for p in known if p.get("id") == index]
    if not match and len({p.get("name") for p in known}) == 1:
        match = known
    if not match:
        return DeviceInfo(type="cuda", index=index)
    major, minor = match[0].get("computeMajor"), match[0].get("computeMinor")
    return DeviceInfo(
        type="cuda",
        index=index,
        name=str(match[0].get("name", "")),
        total_bytes=_integer(match[0], "totalGlobalMem"),
        capability=None if major is None else f"{major}.{minor}",
    )
