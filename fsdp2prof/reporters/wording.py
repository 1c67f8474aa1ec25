"""The words and colours every output shares: parts of a step, memory categories, operations, dtypes."""

from __future__ import annotations

__all__ = [
    "CATEGORIES",
    "IDLE_CAUSES",
    "LATE_CAUSES",
    "OPS",
    "PARTS",
    "PHASES",
    "category_label",
    "dtype_label",
    "op_label",
    "printable",
]

PARTS: dict[str, tuple[str, str]] = {
    "compute": ("compute", "#4c78a8"),
    "fsdp_copy": ("FSDP copies", "#72b7b2"),
    "exposed_all_gather": ("exposed all-gather", "#e45756"),
    "exposed_reduce_scatter": ("exposed reduce-scatter", "#f58518"),
    "exposed_all_reduce": ("exposed all-reduce", "#eeca3b"),
    "exposed_other_comm": ("exposed other communication", "#b279a2"),
    "exposed_memcpy": ("exposed memcpy", "#9d755d"),
    "idle": ("idle", "#d3d3d3"),
}
"""Part of a step breakdown -> label and colour, in the order of precedence."""

CATEGORIES: dict[str, tuple[str, str]] = {
    "sharded_parameter": ("sharded parameters", "#4c78a8"),
    "sharded_gradient": ("sharded gradients", "#9ecae9"),
    "optimizer_state": ("optimizer state", "#54a24b"),
    "unsharded_parameter": ("unsharded parameters", "#e45756"),
    "unsharded_gradient": ("unsharded gradients", "#ff9d98"),
    "all_gather_buffer": ("all-gather buffers", "#f58518"),
    "reduce_scatter_buffer": ("reduce-scatter buffers", "#ffbf79"),
    "activation": ("activations", "#b279a2"),
    "input": ("inputs", "#eeca3b"),
    "temporary": ("temporaries", "#9d755d"),
    "unattributed": ("unattributed", "#bab0ac"),
}
"""Memory category -> label and colour, lasting ones first."""

PHASES: dict[str, tuple[str, str]] = {
    "forward": ("f", "#c7d9ec"),
    "backward": ("b", "#f6d9b4"),
    "optimizer": ("o", "#cbe5c9"),
}
"""Phase -> its letter and its colour in charts."""

OPS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    "send_recv": "send/recv",
}

LATE_CAUSES = {
    "launch": "began too late to hide",
    "communicator": "queued behind another collective",
    "stream": "queued behind other work",
    "transfer": "slow transfer",
    "peer": "waited for a late peer",
}
"""Why a collective came late -> words."""

IDLE_CAUSES = {
    "host_bound": "nothing launched in time",
    "device_sync": "the host waited for the device",
    "memcpy": "the host waited for a copy",
    "communication": "blocked on communication",
    "queued": "launched, not yet started",
    "profiler": "profiler",
    "unknown": "unknown",
}
"""Why nothing ran -> words."""

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def op_label(op: str) -> str:
    """Return an operation as people write it: ``all-gather``."""
    return OPS.get(op, op)


def dtype_label(dtype: str | None) -> str:
    """Return a dtype's short name (``bf16``), ``-`` for an unknown one."""
    return "-" if dtype is None else _DTYPES.get(dtype, printable(dtype))


def category_label(category: str) -> str:
    """Return a memory category in words."""
    return CATEGORIES[category][0] if category in CATEGORIES else printable(category)


def printable(text: str) -> str:
    """Make untrusted text safe on a terminal: control characters and escapes become visible codes."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
