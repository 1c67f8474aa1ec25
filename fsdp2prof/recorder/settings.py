"""What is recorded, and how the launcher tells the ranks: one environment variable."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from fsdp2prof.errors import UsageError
from fsdp2prof.manifest import RecordOptions, Rehearsal

__all__ = ["ALIVE_VARIABLE", "VARIABLE", "Settings", "is_selected", "validate"]

VARIABLE = "FSDP2PROF_RECORD"
ALIVE_VARIABLE = "FSDP2PROF_ALIVE"
"""Folder in which every Python process of the run leaves an empty file named after its pid."""

_RANKS = re.compile(r"^(all|sample:[1-9]\d*|\d+(,\d+)*)$")


class Settings(msgspec.Struct, kw_only=True):
    """Where a run is recorded to, and its options."""

    run: str
    """Absolute path of the run directory."""
    options: RecordOptions
    node_rank: int = 0
    """Of the launcher: its ranks are told from those of other nodes by it."""
    rehearsal: Rehearsal | None = None
    """The rank that the process stands for; null where the training runs."""

    @property
    def path(self) -> Path:
        """The run directory."""
        return Path(self.run)

    def encode(self) -> str:
        """Return the value of :data:`VARIABLE`."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_environment(cls) -> Settings | None:
        """Return the launcher's settings, or None where no launcher recorded this process."""
        value = os.environ.get(VARIABLE)
        return None if value is None else msgspec.json.decode(value, type=cls)


def validate(options: RecordOptions) -> None:
    """Refuse inconsistent options. Raises ``UsageError``."""
    for name in ("wait", "warmup", "active", "memory_steps"):
        if getattr(options, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} must not be negative")
    if options.start_step is not None and options.start_step < 0:
        raise UsageError("--start-step must not be negative")
    if options.active == 0 and not options.memory:
        raise UsageError("--active 0 with --no-memory records nothing; ask for one of the two")
    if not _RANKS.match(options.ranks):
        raise UsageError(f"--ranks {options.ranks}: write all, a list as 0,3 or sample:K with K > 0")


def is_selected(ranks: str, rank: int, world_size: int) -> bool:
    """Whether ``--ranks`` selects ``rank``; ``sample:K`` spreads K ranks evenly, rank 0 among them."""
    if ranks == "all":
        return True
    if ranks.startswith("sample:"):
        count = min(int(ranks.removeprefix("sample:")), world_size)
        return rank in {index * world_size // count for index in range(count)}
    return rank in map(int, ranks.split(","))
