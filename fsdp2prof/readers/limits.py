"""Upper limits that no training reaches: analyses loop over labels, devices and events in nested loops."""

from __future__ import annotations

import numpy as np

from fsdp2prof.labels import parse_label
from fsdp2prof.tables.trace import LabelTable

MOST_RANKS = 1 << 24
"""A header that says more says nothing."""
MOST_DEVICES = 256
"""Of one process, with memory in use."""
_MOST_THREADS = 256
"""Of one process, with FSDP's labels: the program's own, autograd's, those of collectives."""
_MOST_OPEN = 4096
"""Labels open at once: modules within modules."""


def too_many_labels(labels: LabelTable) -> str | None:
    """Return the limit that the labels exceed, if any; they are in order of start."""
    steps = np.flatnonzero(labels.name.matches(lambda name: name.startswith("ProfilerStep#")))
    marked = np.unique(np.stack([labels.name.codes[steps], labels.thread[steps]]), axis=1)[0]
    most = int(np.unique(marked, return_counts=True)[1].max(initial=0))
    if most > 1:
        return f"a step on {most} threads; write the trace of each rank to its own file"
    rows = np.flatnonzero(labels.name.matches(lambda name: parse_label(name) is not None))
    threads = len(np.unique(labels.thread[rows]))
    if threads > _MOST_THREADS:
        return f"{threads} threads with FSDP's labels"
    ended = np.searchsorted(np.sort(labels.end_ns[rows]), labels.start_ns[rows], side="right")
    at_once = int((np.arange(1, len(rows) + 1) - ended).max(initial=0))
    return f"{at_once} of FSDP's labels at once" if at_once > _MOST_OPEN else None
