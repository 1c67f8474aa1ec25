"""Runs and results at fsspec URLs (``s3://``, ``gs://``, ``memory://``, ...): download and upload.

Small files are copied when a run is opened. A recording is represented by an empty file of its size, and
:func:`fetched` copies it while it is read, one rank at a time, in the process that reads it. The file
system finds its own credentials (environment, configuration, instance); none is stored.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from fsdp2prof.errors import Fsdp2ProfError, InputError
from fsdp2prof.run_directory import (
    MANIFEST_FILE,
    OOM_SNAPSHOT_FILE,
    PACKED,
    RUN_FILE,
    SNAPSHOT_FILE,
    STORAGE_COUNT_FILE,
    TRACE_FILE,
)
from fsdp2prof.workflows.job.urls import hide_secrets, register, url_of

_MOST_FILES = 2_000_000
_MOST_SMALL_BYTES = 4 << 30
_SNAPSHOTS = (SNAPSHOT_FILE, OOM_SNAPSHOT_FILE)
_RECORDINGS = (TRACE_FILE, STORAGE_COUNT_FILE, *_SNAPSHOTS, *(name + PACKED for name in _SNAPSHOTS))
"""Names of the large files of a recording."""


def open_url(url: str, scratch: Path) -> Path:
    """Copy the files at a URL under ``scratch``; the recordings of a run directory only in name and size.

    Raises ``InputError`` for missing or unreadable input, or if a package is not installed.
    """
    with _telling(url):
        files, root = _file_system(url)
        name = PurePosixPath(root.rstrip("/")).name or "run"
        folder = Path(tempfile.mkdtemp(dir=scratch))
        copy = folder / (name if name not in ("", ".", "..") else "run")
        register(copy, url)
        if files.isfile(root):
            files.get_file(root, str(copy))
            return copy
        found = files.find(root, detail=True)
        if not found:
            raise InputError(f"{hide_secrets(url)}: no such file or folder, or an empty one")
        _copy_folder(files, root, found, copy, url)
    return copy


@contextmanager
def fetched(url: str) -> Iterator[Path]:
    """Copy one file here for the time of the block. Raises ``InputError``."""
    with tempfile.TemporaryDirectory(prefix="fsdp2prof-") as folder:
        with _telling(url):
            files, path = _file_system(url)
            copy = Path(folder) / (PurePosixPath(path).name or "file")
            files.get_file(path, str(copy))
        yield copy


def stage(url: str, scratch: Path) -> Path:
    """Return a local path to write to what :func:`publish` then takes to a URL."""
    name = PurePosixPath(url.partition("://")[2].rstrip("/")).name
    if not name:
        raise InputError(f"{hide_secrets(url)}: names no file; add one")
    path = Path(tempfile.mkdtemp(dir=scratch)) / name
    register(path, url)
    return path


def refuse_existing_url(path: Path) -> None:
    """Raise ``InputError`` if the destination of a staged path exists."""
    url = url_of(path)
    if url is None:
        return
    with _telling(url):
        files, root = _file_system(url)
        if files.exists(root):
            raise InputError(f"{hide_secrets(url)}: exists already; add -f to overwrite it")


def publish(path: Path) -> None:
    """Upload a staged file, or the files of a staged folder, to its URL; do nothing for any other path.

    Raises ``InputError`` if it cannot be written.
    """
    url = url_of(path)
    if url is None or not path.exists():
        return
    with _telling(url, doing="written"):
        files, root = _file_system(url)
        if path.is_file():
            files.put_file(str(path), root)
            return
        for file in sorted(one for one in path.rglob("*") if one.is_file()):
            files.put_file(str(file), f"{root.rstrip('/')}/{file.relative_to(path).as_posix()}")


def _copy_folder(files: Any, root: str, found: Mapping[str, Any], copy: Path, url: str) -> None:
    """Copy the small files of a folder; of a run's recordings leave the sizes."""
    if len(found) > _MOST_FILES:
        raise InputError(f"{hide_secrets(url)}: more than {_MOST_FILES:,} files: no run")
    inside = {_inside(root, path, url): (path, about.get("size") or 0) for path, about in found.items()}
    is_run = any(name.name in (RUN_FILE, MANIFEST_FILE) for name in inside)
    stays = {name for name in inside if is_run and name.name in _RECORDINGS}
    small = sum(size for name, (_, size) in inside.items() if name not in stays)
    if small > _MOST_SMALL_BYTES:
        raise InputError(
            f"{hide_secrets(url)}: {small:,} bytes would be copied; name one file, or a run directory"
        )
    for name in inside:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
    fetch = [name for name in inside if name not in stays]
    files.get([inside[name][0] for name in fetch], [str(copy / name) for name in fetch])
    for name in stays:
        with (copy / name).open("wb") as stream:
            os.truncate(stream.fileno(), inside[name][1])


def _inside(root: str, path: str, url: str) -> PurePosixPath:
    """Return a file's path in its folder. Raises ``InputError`` for a path that leaves the folder."""
    relative = path[len(root.rstrip("/")) :].lstrip("/") if path.startswith(root.rstrip("/")) else ""
    name = PurePosixPath(relative)
    if not relative or ".." in name.parts or "\0" in relative or name.is_absolute():
        raise InputError(f"{hide_secrets(url)}: has a file with an invalid name: {path}")
    return name


def _file_system(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise InputError(f"{hide_secrets(url)}: URLs need fsspec: pip install 'fsdp2prof[remote]'") from None
    files, root = url_to_fs(url)
    return files, str(root)


@contextmanager
def _telling(url: str, doing: str = "read") -> Iterator[None]:
    """Turn whatever a file system raises into one line without secrets."""
    where = hide_secrets(url)
    try:
        yield
    except Fsdp2ProfError:
        raise
    except FileNotFoundError:
        raise InputError(f"{where}: no such file or folder") from None
    except ImportError as error:
        raise InputError(f"{where}: {_safe(error, url)}: pip install 'fsdp2prof[remote]'") from None
    except Exception as error:
        raise InputError(f"{where}: cannot be {doing}: {type(error).__name__}: {_safe(error, url)}") from None


def _safe(error: Exception, url: str) -> str:
    """Return an error's first line without the secrets of the URL."""
    line = next(iter(str(error).splitlines()), "")
    return hide_secrets(line.replace(url, hide_secrets(url)))


def scratch_folder(remove_later: Callable[[Callable[[], None]], object]) -> Path:
    """Make a folder for copies; ``remove_later`` receives the function that removes it."""
    folder = Path(tempfile.mkdtemp(prefix="fsdp2prof-"))
    remove_later(lambda: shutil.rmtree(folder, ignore_errors=True))
    return folder
