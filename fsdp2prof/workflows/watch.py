"""From the lines of a run's ranks to how the job does."""

from __future__ import annotations

from pathlib import Path

from fsdp2prof.analyzers.watching import watch_steps
from fsdp2prof.errors import RunDirectoryError
from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.readers.run.documents import read_last_steps
from fsdp2prof.results.watch import WatchedRun
from fsdp2prof.run_directory import STEPS_FILE


def watch_run(path: Path, *, window: int, tokens_per_step: int | None = None) -> WatchedRun:
    """Sum up the last ``window`` steps of a run that was recorded with ``--watch``, running or over.

    Raises ``RunDirectoryError`` for a run without such steps.
    """
    run = open_run(path)
    steps, warnings = {}, []
    for record in run.ranks:
        try:
            lines = read_last_steps(record.path / STEPS_FILE, window)
        except OSError:
            lines = []
        if lines:
            steps[record.rank] = lines
        elif record.manifest is None or record.manifest.selected:
            warnings.append(f"rank {record.rank}: no step yet")
    if not steps:
        why = "no rank has completed a step yet" if run.info.options.watch else "start it with record --watch"
        raise RunDirectoryError(f"{path}: nothing to watch: {why}")
    return watch_steps(
        steps,
        path=str(path),
        state=run.info.state,
        window=window,
        tokens_per_step=tokens_per_step,
        warnings=warnings,
    )
