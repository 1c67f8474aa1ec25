"""Results as JSON: the dataclasses of ``fsdp2prof.results``, encoded as they are."""

from __future__ import annotations

import msgspec

from fsdp2prof.results import (
    CheckpointEstimate,
    CommEstimate,
    MemoryAnalysis,
    MemoryEstimate,
    RunAnalysis,
    TraceAnalysis,
)

__all__ = ["render"]


def render(
    result: TraceAnalysis | MemoryAnalysis | RunAnalysis | CommEstimate | CheckpointEstimate | MemoryEstimate,
) -> str:
    """Return the documented JSON, indented, keys in the order of the contract, with a final newline."""
    encoded = msgspec.json.encode(result)
    return msgspec.json.format(encoded, indent=2).decode() + "\n"
