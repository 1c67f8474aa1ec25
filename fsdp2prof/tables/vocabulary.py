"""The words that columns hold: phases, activities, kinds of collectives, kinds of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


__all__ = ["ACTIVITIES", "CATEGORIES", "OPS", "PHASES"]


PHASES = ("forward", "backward", "optimizer", "other")
"""What the training loop was doing; a forward recomputed inside backward is ``backward``."""

ACTIVITIES = (
    "compute",
    "all_gather",
    "copy_out",
    "reduce",
    "reduce_wait",
    "final_wait",
    "reshard",
    "accumulate",
    "cast",
    "inputs_to_device",
    "hooks",
)
"""What FSDP was doing inside a phase: ``compute`` is the user's own work, the rest are FSDP labels."""

OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send_recv", "other")
"""Kinds of collectives."""

CATEGORIES = (
    "sharded_parameter",
    "sharded_gradient",
    "optimizer_state",
    "unsharded_parameter",
    "unsharded_gradient",
    "all_gather_buffer",
    "reduce_scatter_buffer",
    "activation",
    "input",
    "temporary",
    "unattributed",
)
"""What an allocation holds."""
