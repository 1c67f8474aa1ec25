"""From the files of a job to one of HolisticTraceAnalysis's views of one rank's trace."""

from __future__ import annotations

from collections.abc import Callable

from fsdp2prof.analyzers.hta.views import critical_path, idle_causes, launch_statistics, trace_diff
from fsdp2prof.errors import TraceError
from fsdp2prof.results.hta import CriticalPath, IdleCauses, LaunchStatistics, TraceDiff
from fsdp2prof.tables.trace import Trace
from fsdp2prof.workflows.job.job_files import JobFiles
from fsdp2prof.workflows.ranks.one_rank import read_rank_trace

VIEWS: dict[str, Callable[[Trace, int | None], CriticalPath | LaunchStatistics | IdleCauses]] = {
    "critical-path": critical_path,
    "launch-statistics": lambda trace, _: launch_statistics(trace),
    "idle-causes": lambda trace, _: idle_causes(trace),
}
"""By the name of the option: a trace and a step (which only the critical path looks at) to the view."""


def view_trace(
    job: JobFiles, view: str, *, step: int | None = None
) -> CriticalPath | LaunchStatistics | IdleCauses:
    """Compute one of :data:`VIEWS` for the trace of a job's lowest rank.

    Raises ``TraceError`` for a trace that cannot be read or analysed.
    """
    return VIEWS[view](_read(job), step)


def diff_traces(control: JobFiles, test: JobFiles, *, step: int | None = None) -> TraceDiff:
    """Compare a step of two jobs' lowest ranks, by default the middle step of each.

    Raises the errors of :func:`view_trace`.
    """
    return trace_diff(_read(control), _read(test), control_step=step, test_step=step)


def _read(job: JobFiles) -> Trace:
    if not job.traces.files:
        raise TraceError(job.traces.absent)
    return read_rank_trace(job.traces.files[0])
