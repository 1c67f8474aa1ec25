"""Results as JSON: the dataclasses of ``fsdp2prof.results``, encoded as they are."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fsdp2prof.results import (
    CheckpointEstimate,
    CommEstimate,
    MemoryAnalysis,
    MemoryComparison,
    MemoryEstimate,
    RunAnalysis,
    RunComparison,
    TraceAnalysis,
)

__all__ = ["render"]


Result: TypeAlias = (
    TraceAnalysis
    | MemoryAnalysis
    | MemoryComparison
    | RunAnalysis
    | RunComparison
    | CommEstimate
    | CheckpointEstimate
    | MemoryEstimate
)


def render(result: Result) -> str:
    """Return the documented JSON, indented, keys in the order of the contract, with a final newline."""
    encoded = msgspec.json.encode(result)
    return msgspec.json.format(encoded, indent=2).decode() + "\n"
