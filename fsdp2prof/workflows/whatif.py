"""From a recorded run to the gain of changes to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from fsdp2prof.analyzers.trace.analysis import analyze_tables
from fsdp2prof.analyzers.trace.rank_tables import rank_tables
from fsdp2prof.analyzers.whatif import what_if as replays
from fsdp2prof.analyzers.whatif.changes import parse_change, parse_without
from fsdp2prof.analyzers.whatif.recorded import program_of
from fsdp2prof.analyzers.whatif.what_if import RecordedRank
from fsdp2prof.errors import TraceError
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.mesh_change import mesh_change
from fsdp2prof.results.what_if import WhatIf
from fsdp2prof.workflows.job.job_files import JobFiles, require
from fsdp2prof.workflows.job.one_job import RankFile
from fsdp2prof.workflows.ranks.one_rank import cut_short, read_rank_trace


def what_if(
    job: JobFiles,
    *,
    settings: Sequence[str] = (),
    without: Sequence[str] = (),
    cluster: Cluster | None = None,
    steps: Collection[int] | None = None,
) -> WhatIf:
    """Replay a recorded job with changes, or with each single change; ``cluster`` is for another mesh of
    GPUs.

    Raises ``TraceError`` if no trace can be read or contains a step, ``UsageError`` for an unknown change
    and ``InputError`` for a change that does not apply.
    """
    others = {"mesh": partial(mesh_change, cluster=cluster)}
    changes = [*(parse_change(text, others) for text in settings), *map(parse_without, without)]
    ranks, warnings = recorded_ranks(job, steps=steps)
    return replays.what_if(
        ranks,
        str(job.path),
        changes=changes,
        warnings=[*job.messages, *warnings],
    )


def recorded_ranks(
    job: JobFiles, *, steps: Collection[int] | None = None
) -> tuple[list[RecordedRank], list[str]]:
    """Read every rank's trace; an unreadable one gives a warning. Raises ``TraceError`` if none can be
    read."""
    if not job.traces.files:
        raise TraceError(job.traces.absent)
    ranks, warnings = [], list(job.traces.warnings)
    for file in job.traces.files:
        try:
            ranks.append(_recorded(job, file, steps))
        except TraceError as error:
            warnings.append(str(error))
    if not ranks:
        raise TraceError(warnings[-1])
    require(job.path, "step", steps, {step for one in ranks for step in one.program.steps})
    if not any(rank.analysis.rank.steps and len(rank.program.points) for rank in ranks):
        raise TraceError(f"{job.path}: these traces hold no step to replay")
    return ranks, warnings


def _recorded(job: JobFiles, file: RankFile, steps: Collection[int] | None) -> RecordedRank:
    manifest = job.manifests.get(file.rank)
    trace = read_rank_trace(file)
    left_out = cut_short(trace, manifest) if steps is None else []
    tables = rank_tables(trace, manifest, "steps", steps, left_out)
    analysis = analyze_tables(tables, default_rank=file.rank)
    return RecordedRank(tables=tables, program=program_of(tables, analysis.summary), analysis=analysis)
