"""Kernels that may be communication under an unknown name: those that run beside collectives only."""

from __future__ import annotations

from collections import Counter

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.trace.accounting import WorkTable
from fsdp2prof.analyzers.trace.collectives import Collectives
from fsdp2prof.kernel_names import kernel_name
from fsdp2prof.tables import BoolArray, Trace
from fsdp2prof.units import format_ns
from fsdp2prof.vocabulary import printable

__all__ = ["beside_communication"]

_TORCH = "at::"
"""Namespace of torch's own kernels."""
_OPERATOR = "aten::"
"""What launches compute from torch."""
_NAMED = 3


def beside_communication(trace: Trace, work: WorkTable, collectives: Collectives) -> list[str]:
    """Return one line per stream that carries collectives and, besides, only kernels of unknown purpose.

    A kernel's purpose is known if it is torch's, if an operator or an FSDP label launched it, or if it is a
    copy. Where a stream has such a kernel, it is taken for one that computes.
    """
    streams = intervals.distinct(collectives.table.stream)
    unknown = _unknown(trace, work)
    lines = []
    for stream in streams.tolist():
        computing = (work.stream == stream) & ~work.is_fsdp & ~work.is_memcpy
        if not computing.any() or not unknown[computing].all():
            continue
        time: Counter[str] = Counter()
        lengths = (work.end_ns - work.start_ns)[computing].tolist()
        for name, length in zip(
            trace.events.name.take(work.event[computing]).to_list(), lengths, strict=True
        ):
            time[printable(kernel_name(name or ""))] += length
        names = ", ".join(f"{name} ({format_ns(spent)})" for name, spent in time.most_common(_NAMED))
        more = f" and {len(time) - _NAMED} more" if len(time) > _NAMED else ""
        count = int(computing.sum())
        lines.append(
            (
                f"1 kernel on stream {stream} runs beside communication only and is counted as compute: "
                if count == 1
                else f"{count} kernels on stream {stream} run beside communication only and are counted as "
                "compute: "
            )
            + names
            + more
        )
    return lines


def _unknown(trace: Trace, work: WorkTable) -> BoolArray:
    """Per row of work, whether neither its name nor its launch says that it computes."""
    events = trace.events
    names = events.name.take(work.event)
    known = work.is_fsdp | work.is_memcpy | names.matches(lambda name: _TORCH in name.partition("<")[0])
    operators = np.flatnonzero(events.name.matches(lambda name: name.startswith(_OPERATOR)))
    for thread in intervals.distinct(events.thread[operators]):
        of_thread = operators[events.thread[operators] == thread]
        mine = np.flatnonzero((work.thread == thread) & (work.launch_ns >= 0) & ~known)
        spans = intervals.union(events.start_ns[of_thread], events.end_ns[of_thread])
        known[mine] |= intervals.containing(spans.start, spans.end, work.launch_ns[mine]) >= 0
    return ~known
