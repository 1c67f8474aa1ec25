"""The lines of ``record --watch``: a step each, the newest ones of a file that may be long."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fsdp2prof.errors import ModelError
from fsdp2prof.manifest import WatchedStep


def read_lengths(path: Path) -> list[int]:
    """Return the lengths in the file's order. Raises ``ModelError`` if it is not a list of whole numbers."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"lengths {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ModelError(f"lengths {path}: is not text") from None
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    wrong = next((word for word in words if not (word.isascii() and word.isdecimal())), None)
    if wrong is not None:
        raise ModelError(f"lengths {path}: {wrong[:40]!r} is not a whole number; write one length per line")
    if any(len(word) > len(str(1 << 40)) for word in words):
        raise ModelError(f"lengths {path}: no document has more than {1 << 40} tokens")
    return [int(word) for word in words]


_LINE_BYTES = 400
"""More than a line takes."""


def read_last_steps(file: Path, count: int) -> list[WatchedStep]:
    """Return the last ``count`` steps of a rank, in order; a line that is still being written is left out.

    Raises ``OSError`` for a file that cannot be read.
    """
    with file.open("rb") as lines:
        lines.seek(0, 2)
        start = max(0, lines.tell() - count * _LINE_BYTES)
        lines.seek(start)
        whole = lines.read().split(b"\n")[1 if start else 0 : -1]
    steps = []
    for line in whole[-count:]:
        try:
            steps.append(msgspec.json.decode(line, type=WatchedStep))
        except (msgspec.DecodeError, ValueError):
            continue  # cut by a full disk
    return steps
