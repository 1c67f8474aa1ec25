"""NCCL's log (``NCCL_DEBUG=INFO``): what it connects which ranks with."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

__all__ = ["read_transports"]

_LINE = re.compile(
    r"Channel \d+(?:/\d+)? : (\d+)\[[^\]]*\] -> (\d+)\[[^\]]*\](?: \[(?:send|receive)\])? via (\S+)"
)
_MOST_BYTES = 64 << 20


def read_transports(files: list[Path]) -> Counter[tuple[int, int, str]]:
    """Count the channels of every (rank, rank, transport) in some logs; both ends log a network's."""
    found: Counter[tuple[int, int, str]] = Counter()
    for file in files:
        with file.open("rb") as log:
            text = log.read(_MOST_BYTES).decode(errors="replace")
        found.update((int(one[1]), int(one[2]), one[3]) for one in _LINE.finditer(text))
    return found
