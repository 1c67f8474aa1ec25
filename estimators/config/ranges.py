"""Ends of ranges that no formula gives, from ``ranges.yaml``, each with its source."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from fsdp2prof.estimators.config.documents import packaged


class RangeEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One end of a range."""

    value: float
    source: str


@lru_cache(maxsize=1)
def _known() -> dict[str, RangeEnd]:
    return packaged("fsdp2prof.estimators.config", "ranges.yaml", dict[str, RangeEnd])


def range_end(name: str) -> RangeEnd:
    """The end of a range by its name."""
    return _known()[name]
