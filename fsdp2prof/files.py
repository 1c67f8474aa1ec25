"""Files that appear whole: written under a temporary name, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

__all__ = ["replacing", "scratch", "temporaries", "write_json"]


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """Give a temporary path next to ``path``; what is still there after the block is removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
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
    """Write a struct or dataclass as indented JSON."""
    with replacing(path) as temporary:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def temporaries(folder: Path) -> list[Path]:
    """Return what writers that were killed left behind under temporary names."""
    return [path for path in folder.glob(".*") if path.name.rpartition(".")[2].isdigit()]
