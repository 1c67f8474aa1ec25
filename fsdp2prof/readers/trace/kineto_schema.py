"""The parts of a Kineto trace that are used, as typed JSON: msgspec decodes these and skips the rest.

Events are a union tagged by ``ph``: complete events (``X``), instants (``i``, of which ``[memory]`` is
used), and everything else (flows, metadata), which costs no more than skipping. Values that some writers
give as text or omit are ``Any`` here and become integers when columns are built.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

Identifier: TypeAlias = int | float | str | None
"""Of a process or thread; torch writes numbers and, for its own tracks, names."""
NO_TEXT = msgspec.Raw(b"")
"""The value of a ``Raw`` field the event does not have."""


class Args(msgspec.Struct, frozen=True, gc=False):
    """Kept ``args`` of a complete event."""

    external_id: Any = msgspec.field(default=-1, name="External id")
    correlation: Any = -1
    device: Any = None
    stream: Any = None
    bytes: Any = -1
    input_dims: msgspec.Raw = msgspec.field(default=NO_TEXT, name="Input Dims")
    input_types: msgspec.Raw = msgspec.field(default=NO_TEXT, name="Input type")
    collective: Any = msgspec.field(default=None, name="Collective name")
    dtype: Any = None
    in_nelems: Any = msgspec.field(default=-1, name="In msg nelems")
    out_nelems: Any = msgspec.field(default=-1, name="Out msg nelems")
    group_size: Any = msgspec.field(default=-1, name="Group size")
    process_group: Any = msgspec.field(default=None, name="Process Group Name")
    process_group_desc: Any = msgspec.field(default=None, name="Process Group Description")
    ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    seq: Any = msgspec.field(default=-1, name="Seq")
    comms_id: Any = msgspec.field(default=-1, name="Comms Id")
    is_async: Any = msgspec.field(default=-1, name="Is asynchronized op")
    wait_on_stream: Any = None
    record_correlation: Any = msgspec.field(default=-1, name="wait_on_cuda_event_record_corr_id")


class MemoryArgs(msgspec.Struct, frozen=True, gc=False):
    """``args`` of a ``[memory]`` instant."""

    device_type: Any = msgspec.field(default=0, name="Device Type")
    device_id: Any = msgspec.field(default=-1, name="Device Id")
    address: Any = msgspec.field(default=-1, name="Addr")
    bytes: Any = msgspec.field(default=0, name="Bytes")
    allocated: Any = msgspec.field(default=-1, name="Total Allocated")
    reserved: Any = msgspec.field(default=-1, name="Total Reserved")


_NO_ARGS = Args()
_NO_MEMORY = MemoryArgs()


class Complete(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A complete event; times in microseconds."""

    cat: str = ""
    name: str = ""
    pid: Identifier = -1
    tid: Identifier = -1
    ts: int | float = 0
    dur: int | float = 0
    args: Args = _NO_ARGS


class Instant(msgspec.Struct, gc=False, tag_field="ph", tag="i"):
    """An instant event."""

    name: str = ""
    pid: Identifier = -1
    tid: Identifier = -1
    ts: int | float = 0
    args: MemoryArgs = _NO_MEMORY


class ExactComplete(Complete, gc=False, tag_field="ph", tag="X"):
    """A complete event with its time as text: float64 cannot hold its nanoseconds."""

    ts: msgspec.Raw = NO_TEXT  # type: ignore[assignment]


class ExactInstant(Instant, gc=False, tag_field="ph", tag="i"):
    """An instant event with its time as text."""

    ts: msgspec.Raw = NO_TEXT  # type: ignore[assignment]


_OTHER = tuple(
    msgspec.defstruct(f"Phase_{ord(ph)}", [], gc=False, tag_field="ph", tag=ph)
    for ph in sorted({*string.ascii_letters, "(", ")"} - {"X", "i"})
)


class Header(msgspec.Struct):
    """Keys of the trace object beside ``traceEvents``."""

    distributed_info: Any = msgspec.field(default=None, name="distributedInfo")
    device_properties: Any = msgspec.field(default=None, name="deviceProperties")
    base_time_ns: Any = msgspec.field(default=0, name="baseTimeNanoseconds")
    torch_version: Any = None


@dataclass(frozen=True, slots=True)
class EventKinds:
    """Event types and the decoders that make them."""

    complete: type[Complete]
    instant: type[Instant]
    events: Any
    """Decoder of a list of events."""
    document: Any
    """Decoder of a whole trace object: a :class:`Header` with ``events``."""


def _kinds(complete: type[Complete], instant: type[Instant]) -> EventKinds:
    events: Any = list[complete | instant | _union(_OTHER)]  # type: ignore[misc]
    document = msgspec.defstruct(
        "Document", [("events", events, msgspec.field(name="traceEvents"))], bases=(Header,), kw_only=True
    )
    decoders = msgspec.json.Decoder(events), msgspec.json.Decoder(document)
    return EventKinds(complete, instant, *decoders)


def _union(types: tuple[type, ...]) -> Any:
    union: Any = types[0]
    for item in types[1:]:
        union = union | item
    return union


FLOAT_TIMES = _kinds(Complete, Instant)
TEXT_TIMES = _kinds(ExactComplete, ExactInstant)
