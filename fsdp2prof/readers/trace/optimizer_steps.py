"""Steps of a trace whose script never called ``prof.step()``: from one optimizer update to the next."""

from __future__ import annotations

import numpy as np

from fsdp2prof.readers.trace.event_columns import Columns, Piece, Share
from fsdp2prof.tables.columns import IntArray

_STEP, _UPDATE, _LABEL = "ProfilerStep#", "Optimizer.step#", "user_annotation"
_ABSENT = ("device", "stream", "correlation", "external_id", "bytes")
_FEWEST = 3
"""Updates from which on they are of steps: two may be of two models in one step."""
_AT_ONCE = 0.1
"""Part of the usual time between updates below which two are of one step: several optimizers."""


def add_steps(share: Share) -> bool:
    """Add ``ProfilerStep#N`` ranges between the ends of updates; False if a trace has steps or few updates.

    What runs before the first update, which may be a part of a step, and after the last one is in no step.
    """
    updates = {code for name, code in share.names.items() if name.startswith(_UPDATE)}
    if not updates or any(name.startswith(_STEP) for name in share.names):
        return False
    label = share.categories.get(_LABEL, -1)
    found: list[Columns] = []
    for piece in share.pieces.values():
        columns = piece.events
        rows = np.isin(columns["name"], list(updates)) & (columns["category"] == label)
        found.append({name: column[rows] for name, column in columns.items()})
    rows = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
    order = np.argsort(rows["start_ns"], kind="stable")
    order = order[(rows["tid"] == rows["tid"][order[:1]])[order]]
    start = rows["start_ns"][order].astype(np.int64)
    ends = _last_of_each_step(start, np.maximum.accumulate(start + rows["duration_ns"][order]))
    if len(ends) < _FEWEST:
        return False
    count = len(ends) - 1
    columns = {name: np.full(count, -1 if name in _ABSENT else rows[name][order[0]]) for name in rows}
    columns |= {"start_ns": ends[:-1], "duration_ns": np.diff(ends)}
    columns["name"] = share.names.codes([f"{_STEP}{number + 1}" for number in range(count)], count)
    share.pieces[max(share.pieces) + 1] = Piece(columns, memory={}, metadata=[], shapes=[], syncs=[])
    return True


def _last_of_each_step(starts: IntArray, ends: IntArray) -> IntArray:
    """Ends of updates after which the next one does not follow at once, nor is inside."""
    gaps = starts[1:] - ends[:-1]
    apart = gaps > _AT_ONCE * np.percentile(gaps, 90) if len(gaps) else np.empty(0, dtype=np.bool_)
    last: IntArray = ends[np.append(apart, True)]
    return last
