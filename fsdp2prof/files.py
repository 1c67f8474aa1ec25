"""Files that appear whole: written under a temporary name, then renamed."""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_watcher: ContextVar[Callable[[int, int], None] | None] = ContextVar("fsdp2prof_progress", default=None)


@contextmanager
def watched(watcher: Callable[[int, int], None]) -> Iterator[None]:
    """Call ``watcher(done, of)`` as the work inside goes on."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def counted(results: Iterable[T], of: Sized) -> Iterator[T]:
    """Pass results on as they come, and tell how many of them there are; one alone is not worth telling."""
    watcher, total = _watcher.get(), len(of)
    for done, result in enumerate(results, 1):
        if watcher is not None and total > 1:
            watcher(done, total)
        yield result


_UNDECODED = re.compile("[\udc80-\udcff]")
"""How Python keeps a byte that it could not decode."""


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """Give a temporary path next to ``path``, of this thread's own; it is removed after the block."""
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path next to ``path`` to write to; it becomes ``path`` if the block succeeds."""
    with scratch(path) as temporary:
        yield temporary
        temporary.replace(path)


def write_json(path: Path, document: object) -> None:
    r"""Write a struct or dataclass as indented JSON; bytes that are not text appear as ``\xe9``."""
    try:
        text = msgspec.json.encode(document)
    except UnicodeEncodeError:
        text = msgspec.json.encode(_readable(msgspec.to_builtins(document)))
    with replacing(path) as temporary:
        temporary.write_bytes(msgspec.json.format(text, indent=1) + b"\n")


def scratch_prefix(pid: int) -> str:
    """Return how the names begin of what a process writes for a moment into ``$TMPDIR``."""
    return f"fsdp2prof-{pid}-"


def remove_scratch(pid: int) -> None:
    """Remove what a process that was killed left in this machine's ``$TMPDIR``."""
    for folder in Path(tempfile.gettempdir()).glob(f"{scratch_prefix(pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def temporaries(folder: Path) -> list[Path]:
    """Return what writers that were killed left behind under temporary names."""
    return [path for path in folder.glob(".*") if path.name.rpartition(".")[2].isdigit()]


def _readable(item: Any) -> Any:
    if isinstance(item, str):
        escaped = _UNDECODED.sub(lambda match: f"\\x{ord(match[0]) - 0xDC00:02x}", item)
        return escaped.encode(errors="backslashreplace").decode()
    if isinstance(item, list):
        return [_readable(value) for value in item]
    if isinstance(item, dict):
        return {_readable(key): _readable(value) for key, value in item.items()}
    return item
