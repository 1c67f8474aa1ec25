"""From a recorded run, and the lengths of its documents, to how evenly its ranks are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from fsdp2prof.analyzers.balance import RankStep, StepTokens, tokens_of_steps
from fsdp2prof.analyzers.balance import check_balance as judge
from fsdp2prof.errors import InputError, RunDirectoryError
from fsdp2prof.manifest import RankManifest
from fsdp2prof.readers.run.documents import read_last_steps, read_lengths
from fsdp2prof.results.check import BalanceCheck
from fsdp2prof.run_directory import STEPS_FILE
from fsdp2prof.workflows.analyze import analyze_ranks
from fsdp2prof.workflows.job.job_files import JobFiles

_MOST_STEPS = 10_000
_LONGEST_NS = 10**18
"""The longest step accepted as plausible: 30 years."""


def check_balance(
    job: JobFiles,
    *,
    lengths: Path | None = None,
    batch_size: int = 1,
    seq_len: int | None = None,
    steps: int = 1000,
) -> BalanceCheck:
    """Compare the ranks' own work over the last ``steps`` watched steps, or over the traced ones if none
    were watched.

    Raises ``InputError`` or a subclass for a run without either, and for lengths that do not apply to it.
    """
    measured = _watched(job, min(steps, _MOST_STEPS))
    measured_on: Literal["watched", "traced"] = "watched"
    warnings = list(job.messages)
    if not measured and not job.traces.files:
        raise RunDirectoryError(
            f"{job.path}: no traces, and no steps of `record --watch` with their waiting times"
        )
    traced, flops = _traced(job) if job.traces.files else ({}, [])
    if not measured:
        measured, measured_on = traced, "traced"
    dealt: Mapping[int, list[StepTokens]] = {}
    assumptions = ["a rank's own work is its step time without waiting for communication"]
    documents = 0
    if lengths is not None:
        read = read_lengths(lengths)
        documents = len(read)
        ranks, micro_batches = _data_ranks(job, sorted(measured)), _micro_batches(job)
        of_step = ranks * batch_size * micro_batches
        wanted = sorted(set.union(*(set(one) for one in measured.values())))
        dealt = tokens_of_steps(
            read, wanted, ranks=ranks, batch_size=batch_size, micro_batches=micro_batches, seq_len=seq_len
        )
        if not dealt:
            raise InputError(
                f"{lengths}: {documents:,} lengths do not reach step {wanted[0]}: a step takes {of_step:,}"
            )
        if len(dealt) < len(wanted):
            warnings.append(f"{lengths.name} reaches {len(dealt)} of {len(wanted)} steps")
        assumptions += [
            f"step 0 takes the first {of_step:,} documents; document i goes to rank i mod {ranks} "
            "(DistributedSampler, not shuffled)",
            f"{micro_batches} x {batch_size} documents per step and rank",
            "padded to the longest of a micro-batch" if seq_len is None else f"padded to {seq_len:,} tokens",
        ]
    return judge(
        measured,
        path=str(job.path),
        measured_on=measured_on,
        tokens=dealt or None,
        documents=documents,
        flops=flops,
        assumptions=assumptions,
        warnings=warnings,
    )


def _watched(job: JobFiles, count: int) -> dict[int, dict[int, RankStep]]:
    """Watched steps of every rank with waiting times, without the slower recorded steps."""
    measured: dict[int, dict[int, RankStep]] = {}
    for record in job.run.ranks if job.run is not None else ():
        try:
            lines = read_last_steps(record.path / STEPS_FILE, count)
        except OSError:
            continue
        known = {
            line.step: RankStep(duration_ns=line.duration_ns, busy_ns=line.duration_ns - line.exposed_ns)
            for line in lines
            if line.kind == "plain"
            and line.exposed_ns is not None
            and 0 <= line.exposed_ns <= line.duration_ns <= _LONGEST_NS
        }
        if known:
            measured[record.rank] = known
    return measured


def _traced(job: JobFiles) -> tuple[dict[int, dict[int, RankStep]], list[int | None]]:
    """Every traced step of every rank, and its operations; None where shapes do not give them."""
    _, ranks = analyze_ranks(job)
    measured: dict[int, dict[int, RankStep]] = {}
    flops: list[int | None] = []
    for one in ranks:
        for step in one.rank.steps:
            flops.append(step.work)
            parts = step.breakdown_ns
            waited = (
                parts.exposed_all_gather
                + parts.exposed_reduce_scatter
                + parts.exposed_all_reduce
                + parts.exposed_other_comm
                + step.idle_ns.get("communication", 0)
            )
            measured.setdefault(one.rank.rank, {})[step.step] = RankStep(
                duration_ns=step.duration_ns, busy_ns=max(0, step.duration_ns - waited)
            )
    return measured, flops


def _data_ranks(job: JobFiles, ranks: list[int]) -> int:
    """Number of ranks with separate documents. Raises ``InputError`` if that is not every rank."""
    manifests = list(job.manifests.values())
    world = max((one.world_size for one in manifests), default=len(ranks))
    sharing = next((dims for one in manifests if (dims := _sharing(one))), None)
    if sharing is not None:
        raise InputError(
            f"{job.path}: ranks along {sharing} read the same documents: --lengths does not support this"
        )
    if ranks != list(range(world)):
        raise InputError(f"{job.path}: {len(ranks)} of {world} ranks were measured: --lengths needs all")
    return world


def _sharing(manifest: RankManifest) -> str | None:
    """The mesh dimension along which ranks read the same documents, or None."""
    for group in manifest.param_groups:
        names = [name for name in group.mesh.dim_names or [] if "cp" in name.split("_")]
        if names:
            return names[0]
        if group.shard_world_size * group.replicate_world_size not in (1, manifest.world_size):
            return "a dimension that is neither sharded nor replicated over"
    return None


def _micro_batches(job: JobFiles) -> int:
    known = {one.micro_batches for one in job.manifests.values() if one.micro_batches}
    return known.pop() if len(known) == 1 else 1
