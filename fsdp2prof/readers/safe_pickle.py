"""Pickles of plain containers, loaded without a chance for what is in them to run or to crash anything.

The C unpickler alone is not safe even if it refuses every class: hashing a tuple nested a million deep
overflows the C stack, one of a few dozen tuples that share their members takes for ever, and a memo index of
four bytes allocates gigabytes. So the opcodes are walked first, by one regular expression at C speed. Allowed
is what allocator snapshots and Flight Recorder dumps need: dictionaries, lists, strings, numbers, tuples of
two integers, and tuples of two names, which nothing may remember: so no tuple holds another one of them.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from isal import igzip, isal_zlib

from fsdp2prof.errors import SnapshotError

_COUNTED = b"|".join(b"\\x%02x.{%d}" % (length, length) for length in range(256))
_INTEGER = rb"(?:K.|M..|J.{4})"
_PAIR = _INTEGER + rb"\x86"  # the second integer of a tuple of two
_STRING = rb"X(?:" + _COUNTED.replace(b".", rb"\x00{3}.") + rb")(?:q.|r.{4})?"  # as C++ writes short ones
_NAME = rb"(?:h.|j.{4}|" + _STRING + rb")"
_NAMES = rb"|" + _NAME + _NAME + rb"\x86(?=[hjX])|" + _STRING
"""A tuple of two names. Another name follows it, so that it is never again on top of the stack, where it
could be memoized."""


@cache
def _plain(*, pairs_of_names: bool) -> re.Pattern[bytes]:
    """Return the opcodes of plain containers; checking pairs of names takes 1.5 times as long."""
    return re.compile(
        rb"(?s:(?:"
        rb"[\x94(a.e}\]N\x88\x89us]"  # memoize, mark, append, stop, containers, None, booleans, set items
        + (_NAMES if pairs_of_names else b"")
        + rb"|h.|j.{4}"  # memo get
        rb"|K.(?:"
        + _PAIR
        + rb")?|M..(?:"
        + _PAIR
        + rb")?|J.{4}(?:"
        + _PAIR
        + rb")?"  # integers, alone or in pairs
        rb"|q.|r.{3}\x00"  # memo put
        rb"|\x8a(?:\x07.{7}|\x06.{6}|\x05.{5}|" + _COUNTED + rb")"  # long integers; addresses and times first
        rb"|\x8c(?:" + _COUNTED + rb")"  # short strings
        rb"|G.{8}|\x95.{8}|\x80."  # floats, frames, protocol
        rb"){1,2000})"
    )


_WITH_OPERAND = frozenset(b"KMJhqj\x8c\x8aG\x95\x80")
"""Opcodes that are plain unless the file ends within them."""
_CHUNK, _LONGEST = 4 << 20, 1024
"""Bytes read at a time; bytes that hold any opcode but a long string."""
_GZIP = b"\x1f\x8b"
_MOST_EXPANSION, _EXPANDS_FREELY_BYTES = 100, 16 << 20
"""Snapshots compress tenfold to twentyfold: a file that grows more is a decompression bomb."""
_UNREADABLE: Any = (OSError, EOFError, isal_zlib.error)  # the stub of isal declares an instance
_LOOKUPS = frozenset(b"ci\x93PQ\x82\x83\x84")
"""Opcodes at which the unpickler would look something up: it is left to say what."""


def load_containers(path: Path, *, pairs_of_names: bool = False) -> Any:
    """Load a pickle, plain or gzip, that contains only builtin containers, strings and numbers.

    It may contain tuples of two integers, and tuples of two names only on request. Raises
    ``SnapshotError``.
    """
    try:
        with path.open("rb") as raw:
            file = _unpacked(raw, path.stat().st_size)
            _check(file, _plain(pairs_of_names=pairs_of_names))
            file.seek(0)
            return _ContainersOnly(file).load()
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        raise SnapshotError(f"{path}: cannot be read: {reason}") from error
    except SnapshotError as error:
        raise SnapshotError(f"{path}: refused: {error}") from None
    except _ERRORS as error:
        reason = str(error) or type(error).__name__
        raise SnapshotError(f"{path}: not a pickle, or a truncated one: {reason}") from error


def _unpacked(file: BinaryIO, size: int) -> BinaryIO:
    """Return a file unchanged, or the contents of a gzip file, which must not be a decompression bomb."""
    packed = file.read(2) == _GZIP
    file.seek(0)
    if not packed:
        return file
    most = _MOST_EXPANSION * size + _EXPANDS_FREELY_BYTES
    with igzip.open(file, "rb") as stream:  # type: ignore[no-untyped-call]
        content = stream.read(most + 1)
    if len(content) > most:
        raise SnapshotError(f"grows more than {_MOST_EXPANSION}-fold when it is decompressed")
    return io.BytesIO(content)


def text(value: Any) -> str:
    """Return a string unchanged. Raises ``TypeError`` for anything else.

    Never ``str(value)``: printing lists that share their members never ends.
    """
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where text is expected")
    return value


_ERRORS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)
"""Errors of the unpickler on an invalid stream."""


class _ContainersOnly(pickle.Unpickler):
    """Refuses to look anything up."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse: looking a class up runs code."""
        raise SnapshotError(f"the pickle refers to {module}.{name}; only plain containers are read")

    def persistent_load(self, identifier: Any) -> NoReturn:
        """Refuse: plain containers need no persistent object."""
        raise SnapshotError("the pickle refers to a persistent object; only plain containers are read")


def _check(file: BinaryIO, plain: re.Pattern[bytes]) -> None:
    """Walk the opcodes of a file; raise at the first that plain containers do not need."""
    length = file.seek(0, io.SEEK_END)
    file.seek(0)
    buffer, position, start = b"", 0, 0  # the buffer begins at byte `start` of the file
    while True:
        if len(buffer) - position < _LONGEST and (more := file.read(_CHUNK)):
            buffer, position, start = buffer[position:] + more, 0, start + position
        if position == len(buffer):
            raise pickle.UnpicklingError("it ends before its end" if length else "the file is empty")
        match = plain.match(buffer, position)
        if match is not None:
            if match.end() > len(buffer) - _LONGEST and (more := file.read(_CHUNK)):
                buffer, position, start = buffer[position:] + more, 0, start + position
                continue  # a pair may go on beyond the buffer
            position = match.end()
            if start + position == length and buffer.endswith(b"."):
                return
            continue
        opcode = buffer[position]
        operand = int.from_bytes(buffer[position + 1 : position + 5], "little")
        if opcode == ord("X"):  # a long string
            start += position + 5 + operand
            if start >= length:
                raise pickle.UnpicklingError("it ends within a string")
            file.seek(start)
            buffer, position = b"", 0
        elif opcode == ord("r") and operand <= length:  # a memo put beyond 2**24 entries
            position += 5
        elif opcode in _LOOKUPS:
            return
        else:
            raise _unwanted(opcode, start + position)


def _unwanted(opcode: int, position: int) -> Exception:
    known = {ord(info.code): info.name for info in pickletools.opcodes}
    if opcode not in known:
        return pickle.UnpicklingError(f"byte {position} is not an opcode")
    if opcode in _WITH_OPERAND:
        return pickle.UnpicklingError(f"it ends within opcode {known[opcode]} at byte {position}")
    return SnapshotError(f"opcode {known[opcode]} at byte {position}; only plain containers are read")
