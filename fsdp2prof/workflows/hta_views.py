"""From a path to one of HolisticTraceAnalysis's views of one rank's trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fsdp2prof.analyzers.hta.critical_path import critical_path
from fsdp2prof.analyzers.hta.idle_causes import idle_causes
from fsdp2prof.analyzers.hta.launch_statistics import launch_statistics
from fsdp2prof.analyzers.hta.trace_diff import trace_diff
from fsdp2prof.errors import InputError
from fsdp2prof.readers.chrome_trace import read_trace
from fsdp2prof.results import CriticalPath, IdleCauses, LaunchStatistics, TraceDiff
from fsdp2prof.tables import Trace
from fsdp2prof.workflows.trace_files import find_traces

__all__ = ["VIEWS", "diff_trace_paths", "view_trace_path"]

VIEWS: dict[str, Callable[[Trace, int | None], CriticalPath | LaunchStatistics | IdleCauses]] = {
    "critical-path": critical_path,
    "launch-statistics": lambda trace, _: launch_statistics(trace),
    "idle-causes": lambda trace, _: idle_causes(trace),
}
"""By the name of the option: a trace and a step (which only the critical path looks at) to the view."""


def view_trace_path(
    path: str | Path, view: str, *, rank: int | None = None, step: int | None = None
) -> CriticalPath | LaunchStatistics | IdleCauses:
    """Compute one of :data:`VIEWS` of a rank's trace, by default the lowest rank's.

    Raises ``InputError`` for a rank that is not there, ``TraceError`` for what cannot be read or computed.
    """
    return VIEWS[view](_read(path, rank), step)


def diff_trace_paths(
    control: str | Path, test: str | Path, *, rank: int | None = None, step: int | None = None
) -> TraceDiff:
    """Compare a step of a rank in two traces, by default the middle step of each one's lowest rank.

    Raises the errors of :func:`view_trace_path`.
    """
    return trace_diff(_read(control, rank), _read(test, rank), control_step=step, test_step=step)


def _read(path: str | Path, rank: int | None) -> Trace:
    files = find_traces(path).files
    chosen = [file for file in files if rank is None or file.rank == rank]
    if not chosen:
        here = ", ".join(str(file.rank) for file in files)
        raise InputError(f"{path}: no rank {rank} in it; it has {here}")
    return read_trace(chosen[0].path, rank=chosen[0].rank)
