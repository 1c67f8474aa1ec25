"""Floating-point operations from recorded shapes: what was computed, and how fast.

Counts are those of ``torch.utils.flop_counter``: a multiply-add is two, attention is not halved when causal.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

import msgspec
import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.tables import IntArray, StepTable, Trace

PRODUCTS = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::bmm": 0,
    "aten::baddbmm": 1,
    "aten::_scaled_mm": 0,
    "aten::_grouped_mm": 0,
    "aten::_scaled_grouped_mm": 0,
}
"""Matrix products -> position of their first factor."""
ATTENTION = re.compile(r"aten::_scaled_dot_product_\w+?_attention(?:_for_cpu)?(_backward)?")
"""Attention; its first group is there in a backward one."""
_MOST = 1 << 56
"""A minute of the fastest accelerator; and a step's sum fits 64 bits."""
_UNSIZED = ("aten::convolution", "aten::convolution_backward")
"""Operators whose output size their recorded inputs do not give."""


def step_flops(trace: Trace, steps: StepTable) -> IntArray:
    """Return the operations of each host-time step; -1 where they are not known.

    Unknown without recorded shapes, and where the recorded inputs do not say how much was computed.
    """
    events, shapes = trace.events, trace.shapes
    names = events.name.take(shapes.event)
    pairs: dict[tuple[int, int], int] = {}
    for key in zip(names.codes.tolist(), shapes.dims.codes.tolist(), strict=True):
        if key not in pairs:
            pairs[key] = operations(names.values[key[0]], shapes.dims.values[key[1]])
    keys = zip(names.codes.tolist(), shapes.dims.codes.tolist(), strict=True)
    known = np.array([pairs[key] for key in keys], dtype=np.int64)
    unsized = events.name.matches(lambda name: name in _UNSIZED)
    counted = events.name.matches(lambda name: name in PRODUCTS or ATTENTION.fullmatch(name) is not None)
    counted[shapes.event] = False
    lost = np.concatenate([np.flatnonzero(unsized | counted), shapes.event[known < 0]])
    total = np.zeros(len(steps) + 1, dtype=np.int64)
    missing = np.zeros(len(steps) + 1, dtype=np.int64)
    np.add.at(total, _step(trace, steps, shapes.event), np.maximum(known, 0))
    np.add.at(missing, _step(trace, steps, lost), 1)
    found = np.where((missing == 0) & (total > 0), total, -1)
    return found[:-1]


def step_operators(trace: Trace, steps: StepTable) -> IntArray:
    """Return how many operators each host-time step calls, those inside others included."""
    step = _step(
        trace, steps, np.flatnonzero(trace.events.name.matches(lambda name: name.startswith("aten::")))
    )
    return np.bincount(step[step >= 0], minlength=len(steps))


def _step(trace: Trace, steps: StepTable, rows: IntArray) -> IntArray:
    return intervals.containing(steps.start_ns, steps.end_ns, trace.events.start_ns[rows])


def operations(name: str, dims: str) -> int:
    """Return the operations of a call from its ``Input Dims`` (JSON); 0 if it is not counted, -1 unknown."""
    attention = ATTENTION.fullmatch(name)
    if name not in PRODUCTS and attention is None:
        return 0
    shapes = msgspec.json.decode(dims)
    if attention:
        count = _attention(shapes, backward=attention[1] is not None)
    else:
        count = _product(shapes, PRODUCTS[name])
    return count if count <= _MOST else -1


def _product(shapes: list[Any], first: int) -> int:
    if len(shapes) < first + 2 or not all(_is_shape(shape, 2) for shape in shapes[first : first + 2]):
        return -1
    left, right = shapes[first], shapes[first + 1]
    return int(2 * prod(left) * right[-1])


def _attention(shapes: list[Any], *, backward: bool) -> int:
    """Two products forward (scores, values); five backward (scores again, and the four gradients)."""
    first = 1 if backward else 0
    if len(shapes) < first + 3 or not all(_is_shape(shape, 4) for shape in shapes[first : first + 3]):
        return -1
    query, key, value = shapes[first : first + 3]
    scores = 2 * prod(query[:3]) * key[2]
    return int(scores * (3 * query[3] + 2 * value[3] if backward else query[3] + value[3]))


def _is_shape(shape: Any, least: int) -> bool:
    return isinstance(shape, list) and len(shape) >= least and all(isinstance(size, int) for size in shape)
