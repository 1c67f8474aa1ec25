"""A trace file as a stream of JSON pieces: gunzip and cut at event boundaries, in bounded memory.

The file is never held whole, and nothing depends on line breaks. A cut is a guess (the last ``}, {``) that
the decode of the piece itself proves: text that ends inside a string or an object is not a list of events.
A piece that is not strict JSON (``nan`` as a bandwidth, a stray byte) is repaired and decoded again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TypeAlias

import msgspec
from isal import isal_zlib

from fsdp2prof.errors import TraceError
from fsdp2prof.run_directory import RUN_FILE

PIECE_BYTES = 1 << 19
"""Decompressed bytes decoded at a time: small enough for the decoded events to stay in the cache."""

_HEAD_BYTES = 1 << 20
_READ_BYTES, _CHUNK_BYTES = 1 << 16, 1 << 17
"""Bytes of a file read at a time, compressed or not: memory of this size is reused, a larger block is
returned to the system and requested again."""
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WBITS = 31
_MOST_EXPANSION, _EXPANDS_FREELY_BYTES = 100, 32 << 20
"""Traces compress ten- to thirtyfold: a file that grows more is made to fill the memory."""
_LONGEST_BYTES = 64 << 20
"""Upper limit of an event, and of the text before the events: a trace is never held whole."""
_SPACE = b" \t\r\n"
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_NAN = re.compile(rb'(":\s*)-?(?:nan|inf(?:inity)?)(?=\s*[,}])', re.IGNORECASE)
_ENCODER = msgspec.json.Encoder(decimal_format="number")
_LONE_SURROGATE = re.compile(r"(\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w)|\\u[dD][89a-fA-F]\w\w")
"""A surrogate escape, and pairs of them, which are characters."""
_MALFORMED: tuple[type[Exception], ...] = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Parse: TypeAlias = Callable[[bytes, int, bool], None]
"""Receives a chunk's text, its number, and whether it is the last; raises ``DecodeError`` if it is
invalid."""


class WrongCutError(Exception):
    """A chunk did not decode while several processes share a file: only a single reader can tell why."""


def decode_pieces(
    path: Path,
    parse: Parse,
    warnings: list[str],
    piece_bytes: int = PIECE_BYTES,
    turn: tuple[int, int] = (0, 1),
) -> None:
    """Call ``parse`` with the pieces of a trace file in order.

    A piece is a JSON list of events; the last is a JSON object whose ``traceEvents`` are the remaining events
    and whose other keys are the file's. With ``turn`` (i, n) only pieces i, i + n, ... are parsed, and the
    last by turn 0: n calls with all turns parse the file once. What a person should know is appended to
    ``warnings``. Raises ``TraceError`` for a file that is missing, empty, truncated or not a trace, and
    :class:`WrongCutError` with several turns.
    """
    index, turns = turn
    ends_early: list[str] = []
    chunks = _chunks(path, min(piece_bytes, _CHUNK_BYTES), ends_early)
    first = _first(path, chunks, ends_early)
    head, first, tail = _open_list(path, b"".join([first, *_until_events(first, chunks)]))
    buffer = bytearray(first)
    number = 0
    try:
        for chunk in chunks:
            if not chunk.strip(b"\0"):
                raise TraceError(f"{path}: holds zeros where events should be; copy or record it again")
            cut = _guessed_cut(buffer) if len(buffer) >= piece_bytes else 0
            if cut and number % turns == index:
                cut = _parse_to(cut, buffer, parse, number, mend=turns == 1)
            if cut:
                number += 1
                del buffer[: len(buffer) - len(buffer[cut:].lstrip(b", \t\r\n"))]
            buffer += chunk
            if len(buffer) > _LONGEST_BYTES + piece_bytes:
                raise TraceError(f"{path}: not a readable Kineto trace: no event ends in {_LONGEST_BYTES} B")
        if index == 0:
            _parse(parse, head + buffer + tail, number, True)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    except _MALFORMED as error:
        if turns > 1:
            raise WrongCutError from None
        if ends_early:
            raise TraceError(f"{path}: {ends_early[0]}; copy or record it again") from None
        raise TraceError(f"{path}: not a readable Kineto trace: {error}") from None
    warnings.extend(f"{path}: {reason}, but all its events are there" for reason in ends_early)


def _parse_to(cut: int, buffer: bytearray, parse: Parse, number: int, *, mend: bool) -> int:
    """Parse the events up to a guessed cut, or to the exact one if the guess was wrong; return the
    position of the cut."""
    try:
        _parse(parse, _list_of(buffer, cut), number, False)
    except _MALFORMED:
        if not mend:
            raise
        cut = _exact_cut(buffer)
        if cut:
            _parse(parse, _list_of(buffer, cut), number, False)
    return cut


def read_head(path: Path) -> bytes:
    """Return the keys that precede the events as a trace object without events.

    Reads at most the first MiB. Raises ``TraceError`` for a file that does not begin like a trace.
    """
    ends_early: list[str] = []
    head, _, tail = _open_list(path, _first(path, _chunks(path, _HEAD_BYTES, ends_early), ends_early))
    if not head:
        run = f"; {path.parent} is a run directory" if path.name == RUN_FILE else ""
        raise TraceError(f"{path}: not a trace: no traceEvents in it{run}")
    return head + b"]" + (tail or b"}")


def _chunks(path: Path, size: int, ends_early: list[str]) -> Iterator[bytes]:
    """Decompressed bytes, about ``size`` at a time; why the stream ended early goes to ``ends_early``."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    with stream:
        first = stream.read(len(_GZIP_MAGIC))
        stream.seek(0)
        if first != _GZIP_MAGIC:
            yield from iter(lambda: stream.read(size), b"")
            return
        member = isal_zlib.decompressobj(wbits=_GZIP_WBITS)
        pending = stream.read(_READ_BYTES)
        expanded = 0
        while pending:
            try:
                chunk = member.decompress(pending, size)
            except isal_zlib.error as error:  # type: ignore[misc]  # its stub declares an instance
                ends_early.append(f"the compressed data is damaged ({error})")
                return
            expanded += len(chunk)
            if expanded > _MOST_EXPANSION * stream.tell() + _EXPANDS_FREELY_BYTES:
                raise TraceError(f"{path}: grows more than {_MOST_EXPANSION}-fold when it is decompressed")
            if chunk:
                yield chunk
            pending = member.unused_data if member.eof else member.unconsumed_tail
            pending = pending or stream.read(_READ_BYTES)
            if member.eof and pending:
                member = isal_zlib.decompressobj(wbits=_GZIP_WBITS)
        if not member.eof:
            ends_early.append("truncated: the compressed file ends early")


def _first(path: Path, chunks: Iterator[bytes], ends_early: list[str]) -> bytes:
    """The first chunk; raises ``TraceError`` if there is nothing in it."""
    chunk = next(chunks, b"")
    if not chunk.strip(_SPACE):
        reason = ends_early[0] if ends_early else "the file is empty"
        raise TraceError(f"{path}: {reason}; copy or record it again")
    return chunk


def _until_events(buffer: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the chunks up to the one in which the events begin: keys before them may be long."""
    start = buffer.lstrip(_SPACE)[:1]
    keep, pending = len(b'"traceEvents" : [') + 64, 0
    while start == b"{" and not _EVENTS_KEY.search(buffer):
        chunk = next(chunks, b"")
        pending += len(chunk)
        if not chunk or pending > _LONGEST_BYTES:
            return
        yield chunk
        buffer = buffer[-keep:] + chunk


def _open_list(path: Path, buffer: bytes) -> tuple[bytes, bytes, bytes]:
    """Split the first bytes into (start of the trace object, events, end of the object)."""
    text = buffer.lstrip(_SPACE)
    if text.startswith(b"["):
        return b'{"traceEvents":[', text[1:], b"}"
    if not text.startswith(b"{"):
        raise TraceError(f"{path}: not a trace: it is not JSON")
    start = _EVENTS_KEY.search(text)
    if start is None:
        return b"", text, b""
    return text[: start.end()], text[start.end() :], b""


def _list_of(buffer: bytearray, cut: int) -> bytes:
    with memoryview(buffer)[:cut] as events:
        return b"".join((b"[", events, b"]"))


def _guessed_cut(buffer: bytearray) -> int:
    """End of the last ``}`` that is followed by ``, {``; 0 if there is none."""
    brace = buffer.rfind(b"{")
    while brace > 0:
        before = buffer[max(0, brace - 64) : brace].rstrip(_SPACE)
        if before.endswith(b","):
            before = before[:-1].rstrip(_SPACE)
            if before.endswith(b"}"):
                return buffer.rfind(b"}", 0, brace) + 1
        brace = buffer.rfind(b"{", 0, brace)
    return 0


def _exact_cut(buffer: bytearray) -> int:
    """End of the last whole event but one, found by walking every token; 0 if there is none.

    Slow, for the rare chunk whose guessed cut is in a string or a nested object.
    """
    depth = last = previous = 0
    for token in _TOKEN.finditer(buffer):
        mark = token.group()
        if mark in (b"{", b"["):
            depth += 1
        elif mark in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                previous, last = last, token.end()
            elif depth < 0:
                break
    return previous


def _parse(parse: Parse, text: bytes, number: int, is_last: bool) -> None:
    """Parse strictly, then with ``nan`` and infinities as null, then through a lenient decoder."""
    try:
        return parse(text, number, is_last)
    except msgspec.ValidationError:
        raise
    except _MALFORMED as error:
        strict = error
    without_nan, found = _NAN.subn(rb"\1null", text)
    if found:
        try:
            return parse(without_nan, number, is_last)
        except _MALFORMED:
            pass
    try:
        readable = _LONE_SURROGATE.sub(lambda pair: pair[1] or r"\ufffd", text.decode(errors="replace"))
        lenient = json.loads(readable, strict=False, parse_float=Decimal, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        raise strict from None
    parse(_ENCODER.encode(lenient), number, is_last)
