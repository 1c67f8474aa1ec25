"""The Python API: functions that turn a path into a result, and opened recordings.

All names are available as ``fsdp2prof.NAME``. A result has the content of ``--format json``; it displays
itself in a notebook and offers data frames and figures (:class:`~fsdp2prof.results.Shown`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fsdp2prof.analyzers.run_summary import summarize_run
from fsdp2prof.results.comparison import RunComparison
from fsdp2prof.results.memory import MemoryAnalysis
from fsdp2prof.results.run import RunAnalysis, RunSummary
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.results.what_if import WhatIf
from fsdp2prof.workflows import analyze
from fsdp2prof.workflows import compare as comparing
from fsdp2prof.workflows import whatif as replaying
from fsdp2prof.workflows.compare import Chosen
from fsdp2prof.workflows.job.job_files import JobFiles, open_job
from fsdp2prof.workflows.ranks.one_rank import TraceOptions

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Unpack

_Result = TypeVar("_Result", bound="TraceAnalysis | MemoryAnalysis")


def analyze_trace(
    path: str | Path,
    *,
    ranks: Collection[int] | None = None,
    iteration: int | None = None,
    **options: Unpack[TraceOptions],
) -> TraceAnalysis:
    """Analyze traces: the breakdown of the step, and the exposed communication of each layer.

    ``path`` is a run directory, a Kineto trace, or a folder of traces. ``ranks`` and ``steps`` select some of
    them, ``iteration`` one of several profiling cycles; :func:`~fsdp2prof.references` gives the figures that
    speeds are compared with. Raises ``InputError`` or a subclass for missing or unreadable input.
    """
    return analyze.analyze_trace(open_job(path, ranks=ranks, iteration=iteration), **options)


def analyze_memory(
    path: str | Path, *, ranks: Collection[int] | None = None, iteration: int | None = None
) -> MemoryAnalysis:
    """Analyze memory recordings: the peak by layer, phase and kind of tensor.

    ``path`` is a run directory, a memory snapshot, or a folder of snapshots. Raises the same errors as
    :func:`analyze_trace`.
    """
    return analyze.analyze_memory(open_job(path, ranks=ranks, iteration=iteration))


def analyze_run(
    path: str | Path,
    *,
    ranks: Collection[int] | None = None,
    iteration: int | None = None,
    **options: Unpack[TraceOptions],
) -> RunAnalysis:
    """Analyze a run: its command and outcome, its traces and its memory. Raises the same errors as
    :func:`analyze_trace`."""
    return analyze.analyze_run(open_job(path, ranks=ranks, iteration=iteration), **options)


def compare(before: str | Path, after: str | Path, **chosen: Unpack[Chosen]) -> RunComparison:
    """Compare two runs, traces, recordings, estimates, or saved JSON of any of them.

    Raises the same errors as :func:`analyze_trace`, and ``InputError`` if the two have nothing in common.
    """
    return comparing.compare(Path(before), Path(after), **chosen)


def what_if(
    path: str | Path,
    *,
    settings: Sequence[str] = (),
    without: Sequence[str] = (),
    ranks: Collection[int] | None = None,
    iteration: int | None = None,
    steps: Collection[int] | None = None,
) -> WhatIf:
    """Replay a recorded run with changes, or with every single change in turn.

    ``settings`` and ``without`` have the syntax of the command (``["reshard=never"]``, ``["host_syncs"]``).
    Raises the same errors as :func:`analyze_trace`, and ``UsageError`` for an unknown change.
    """
    job = open_job(path, ranks=ranks, iteration=iteration)
    return replaying.what_if(job, settings=settings, without=without, steps=steps)


def load(
    path: str | Path, *, ranks: Collection[int] | None = None, iteration: int | None = None
) -> Recording:
    """Open a run, traces or memory recordings; each part is read on first access.

    Raises ``InputError`` for missing input, ``RunDirectoryError`` for a run that cannot be read.
    """
    return Recording(open_job(path, ranks=ranks, iteration=iteration))


class Analysis(Generic[_Result]):
    """A result whose tables are attributes, as DataFrames; all other attributes are the result's own.

    ``run.trace.by_layer`` is a DataFrame, ``run.trace.verdict`` the sentences, and
    ``run.trace.figure("timeline")`` a chart. ``result`` is the object that :func:`analyze_trace` or
    :func:`analyze_memory` returns.
    """

    def __init__(self, result: _Result) -> None:
        self.result: _Result = result

    def __repr__(self) -> str:
        return f"<{type(self.result).__name__}: {' '.join(self.result.verdict[:1])}>"

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.result), *self.tables})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("result", "tables"):  # which prompts and copying look for
            raise AttributeError(name)
        return self.tables[name] if name in self.tables else getattr(self.result, name)

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Return every table by name, in raw units (``_ns``, ``_bytes``, ``_frac``); unknown values: NA."""
        return self.result.to_pandas()

    def _repr_html_(self) -> str:
        return self.result._repr_html_()


class Recording:
    """A run directory, traces or memory recordings, opened by :func:`load`."""

    def __init__(self, job: JobFiles) -> None:
        self._job = job

    def __repr__(self) -> str:
        return f"fsdp2prof.load({str(self._job.path)!r})"

    def _repr_html_(self) -> str:
        """Analyse everything the job left, and return the first screen."""
        return analyze.analyze_any(self._job)._repr_html_()

    @property
    def path(self) -> Path:
        """Path of the run."""
        return self._job.path

    @cached_property
    def run(self) -> RunSummary | None:
        """Command and outcome of the run; None without a manifest."""
        return None if self._job.run is None else summarize_run(self._job.run)

    @cached_property
    def trace(self) -> Analysis[TraceAnalysis] | None:
        """Analysis of the traces; None without traces. Raises ``TraceError`` if they are unreadable."""
        return Analysis(analyze.analyze_trace(self._job)) if self._job.traces.files else None

    @cached_property
    def memory(self) -> Analysis[MemoryAnalysis] | None:
        """Analysis of the memory recordings; None without any. Raises ``SnapshotError`` if they are
        unreadable."""
        return Analysis(analyze.analyze_memory(self._job)) if self._job.recordings.files else None
