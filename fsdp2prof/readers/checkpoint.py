"""A folder that ``torch.distributed.checkpoint`` wrote: its metadata and its files, no tensor loaded.

Files are looked up by name among those of the folder: what the metadata says of a path leads nowhere else.

The metadata is a pickle of dataclasses, read without the unpickler: :func:`load_records` interprets its
opcodes and builds inert values. A class is a name, an object of it a :class:`Record` that holds what the
pickle says of it, and nothing is imported, called or hashed but strings, numbers and records. Every opcode
costs constant time and memory.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2prof.errors import InputError
from fsdp2prof.tables.sharding import CheckpointTable, StoredChunk, StoredTensor

METADATA_FILE = ".metadata"
_MOST_BYTES = 1 << 28
"""Upper limit of metadata: about that of four million chunks."""
_MOST_DIMENSIONS, _LARGEST = 64, 1 << 60

_Location = tuple[str, int, int]


def read_checkpoint(path: Path) -> CheckpointTable:
    """Read the metadata of a distributed checkpoint. Raises ``InputError`` for anything else."""
    if not path.is_dir():
        raise InputError(f"{path}: not a folder; give the folder that torch.distributed.checkpoint wrote")
    file = path / METADATA_FILE
    try:
        if file.exists() and not file.is_file():  # a pipe, a device: reading might never end
            raise InputError(f"{file}: not a file")
        size = file.stat().st_size
        if size > _MOST_BYTES:
            raise InputError(f"{file}: {size:,} bytes are more than the {_MOST_BYTES:,} that are read")
        content = file.read_bytes()
        files = {one.name: one.stat().st_size for one in path.iterdir() if one.is_file() and one != file}
    except FileNotFoundError:
        raise InputError(
            f"{path}: no {METADATA_FILE} in it: not a distributed checkpoint, or unfinished"
        ) from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from None
    try:
        return _table(path, load_records(content), files)
    except (InputError, TypeError, ValueError, KeyError, IndexError) as error:
        raise InputError(f"{file}: not the metadata of a distributed checkpoint: {error}") from None


def _table(path: Path, metadata: Any, files: dict[str, int]) -> CheckpointTable:
    state = _state(metadata, "Metadata")
    locations = _locations(_typed(state.get("storage_data") or {}, dict))
    entries = tuple(
        _entry(_typed(name, str), _typed(stored, Record), locations)
        for name, stored in _typed(state["state_dict_metadata"], dict).items()
    )
    version = state.get("version")
    return CheckpointTable(
        path=str(path),
        version=version if isinstance(version, str) else None,
        entries=entries,
        files=dict(sorted(files.items())),
    )


def _entry(
    name: str, stored: Record, locations: dict[tuple[str, tuple[int, ...]], _Location]
) -> StoredTensor:
    if stored.kind.name == "BytesStorageMetadata":
        return StoredTensor(
            name=name, shape=None, dtype=None, chunks=(_chunk((), (), locations.get((name, ()))),)
        )
    state = _state(stored, "TensorStorageMetadata")
    chunks = []
    for chunk in _typed(state["chunks"], list):
        said = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _sizes(said["offsets"]), _sizes(said["sizes"])
        chunks.append(_chunk(offsets, sizes, locations.get((name, offsets))))
    return StoredTensor(
        name=name, shape=_sizes(state["size"]), dtype=_dtype(state["properties"]), chunks=tuple(chunks)
    )


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], location: _Location | None) -> StoredChunk:
    file, offset, length = location or (None, 0, 0)
    return StoredChunk(offsets=offsets, sizes=sizes, file=file, offset=offset, length=length)


def _locations(storage: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...]], _Location]:
    """(name, offsets) -> location; an object has no offsets."""
    found: dict[tuple[str, tuple[int, ...]], _Location] = {}
    for index, info in storage.items():
        key, place = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        offsets = () if key.get("offset") is None else _sizes(key["offset"])
        where = (_typed(place["relative_path"], str), _whole(place["offset"]), _whole(place["length"]))
        found[_typed(key["fqn"], str), offsets] = where
    return found


def _state(record: Any, kind: str) -> dict[str, Any]:
    """The fields of a record of a class."""
    if not isinstance(record, Record) or record.kind.name != kind:
        raise InputError(f"a {kind} is missing")
    state = record.state
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state = state[1]  # a class with slots
    return dict(_typed(state, dict))


def _sizes(value: Any) -> tuple[int, ...]:
    """A ``torch.Size``."""
    if not isinstance(value, Record) or value.kind.name != "Size" or len(value.arguments) != 1:
        raise InputError("a torch.Size is missing")
    sizes = value.arguments[0]
    if not isinstance(sizes, (tuple, list)) or len(sizes) > _MOST_DIMENSIONS:
        raise InputError("an invalid torch.Size")
    return tuple(map(_whole, sizes))


def _dtype(properties: Any) -> str | None:
    """Dtype of the tensor's properties: their first field, however the properties were pickled."""
    state = properties.state if isinstance(properties, Record) else None
    if isinstance(state, tuple) and state:
        found = state[0]
    elif isinstance(state, dict):
        found = state.get("dtype")
    else:
        found = None
    return found.name if isinstance(found, ClassName) and found.module == "torch" else None


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise InputError("an invalid size or offset")
    return value


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise InputError(f"expected a {kind.__name__}, found a {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True)
class ClassName:
    """A class or a function that the pickle names; it is never looked up."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Record:
    """An object: its class, the arguments that made it, and its state."""

    kind: ClassName
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] | None = None
    """Items set on it as on a dictionary; None for none."""


class _Mark:
    """Where a sequence on the stack begins."""


_MARK = _Mark()

_FEW_OBJECTS, _BYTES_AN_OBJECT = 1000, 4
"""A pickle that makes more objects than this from its bytes is made to fill the memory."""


def load_records(content: bytes) -> Any:
    """Return the content of a pickle, with objects as records. Raises ``InputError`` for anything that is
    not a pickle."""
    try:
        return _Machine(_FEW_OBJECTS + len(content) // _BYTES_AN_OBJECT).run(content)
    except InputError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, AttributeError, EOFError) as error:
        raise InputError(f"not a pickle, or a truncated one ({error})") from None


class _Machine:
    def __init__(self, most_objects: int) -> None:
        self.left = most_objects
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for opcode, argument, position in pickletools.genops(content):
            if opcode.name == "STOP":
                return self.stack.pop()
            handler = _HANDLERS.get(opcode.name)
            if handler is None:
                raise InputError(f"opcode {opcode.name} at byte {position} does not occur in checkpoints")
            handler(self, argument)
        raise InputError("it ends before its end")

    def since_mark(self) -> list[Any]:
        position = len(self.stack) - 1
        while self.stack[position] is not _MARK:
            position -= 1
            if position < 0:
                raise InputError("a sequence without a beginning")
        items = self.stack[position + 1 :]
        del self.stack[position:]
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_new(self, value: Any) -> None:
        """Push an object that takes its own memory."""
        self.left -= 1
        if self.left < 0:
            raise InputError("more objects than fit in its size")
        self.stack.append(value)

    def mark(self, _: Any) -> None:
        self.stack.append(_MARK)

    def take(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise InputError("an opcode without its operands")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        return items

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def append(self, _: Any) -> None:
        (item,) = self.take(1)
        _expect(self.stack[-1], list).append(item)

    def appends(self, _: Any) -> None:
        items = self.since_mark()
        _expect(self.stack[-1], list).extend(items)

    def set_item(self, _: Any) -> None:
        self.set(list(self.take(2)))

    def set_items(self, _: Any) -> None:
        self.set(self.since_mark())

    def set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Record):
            mapping: dict[Any, Any] = target.items or {}
            target.items = mapping
        else:
            mapping = _expect(target, dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, int, float, bytes, Record, type(None))):
                raise InputError(f"a {type(key).__name__} as a key")
            mapping[key] = value

    def class_name(self, _: Any) -> None:
        module, name = self.take(2)
        self.push_new(ClassName(_expect(module, str), _expect(name, str)))

    def old_class_name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.push_new(ClassName(module, name))

    def make(self, _: Any) -> None:
        kind, arguments = self.take(2)
        self.push_new(Record(_expect(kind, ClassName), _expect(arguments, tuple)))

    def build(self, _: Any) -> None:
        (state,) = self.take(1)
        _expect(self.stack[-1], Record).state = state


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise InputError(f"expected a {kind.__name__}, found a {type(value).__name__}")
    return value


def _constant(value: Any) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.push(value)


def _tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.push_new(machine.take(count))


def _nothing(_: _Machine, __: Any) -> None:
    """Protocol and frames carry no value."""


_VALUES = (
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "SHORT_BINBYTES",
    "BINBYTES",
)
_HANDLERS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(_VALUES, _Machine.push),
    "PROTO": _nothing,
    "FRAME": _nothing,
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_LIST": lambda machine, _: machine.push_new([]),
    "EMPTY_DICT": lambda machine, _: machine.push_new({}),
    "MARK": _Machine.mark,
    "TUPLE": lambda machine, _: machine.push_new(tuple(machine.since_mark())),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "MEMOIZE": _Machine.memoize,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "BINGET": lambda machine, index: machine.push(machine.memo[index]),
    "LONG_BINGET": lambda machine, index: machine.push(machine.memo[index]),
    "STACK_GLOBAL": _Machine.class_name,
    "GLOBAL": _Machine.old_class_name,
    "NEWOBJ": _Machine.make,
    "REDUCE": _Machine.make,
    "BUILD": _Machine.build,
}
