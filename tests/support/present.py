"""What a test knows to be there, although its type allows for None."""

from __future__ import annotations

from typing import TypeVar

from fsdp2prof.manifest import RankManifest
from fsdp2prof.run_directory import RankRecord

Value = TypeVar("Value")


def present(value: Value | None) -> Value:
    """Return the value, which is there."""
    assert value is not None
    return value


def manifest_of(record: RankRecord | None) -> RankManifest:
    """Return the manifest of a rank that came to life."""
    return present(present(record).manifest)
