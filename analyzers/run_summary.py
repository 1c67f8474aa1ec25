"""What was run, in one record: the run, its ranks and the way the model was sharded.

``analyze run``: a run's set-up, its trace and its memory together, what matters most first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod

import msgspec

from fsdp2prof.analyzers.layers import fold_names, numbered
from fsdp2prof.analyzers.ledger.machine_rules import processor_use
from fsdp2prof.analyzers.ledger.replayed import that_fit, with_room
from fsdp2prof.analyzers.ledger.thresholds import FindingThresholds, cost_frac
from fsdp2prof.analyzers.ledger.words import unrecorded_sentence
from fsdp2prof.analyzers.memory.remedies import free_bytes, has_room, is_tight
from fsdp2prof.analyzers.steps import known_sum, unrecorded_step, waited_for
from fsdp2prof.labels import qualified_fqn
from fsdp2prof.manifest import MeshInfo, ParamGroupInfo, RankManifest
from fsdp2prof.results.finding import SEVERITIES, Finding
from fsdp2prof.results.ledger import NOTHING, Ledger
from fsdp2prof.results.memory import MemoryAnalysis
from fsdp2prof.results.run import RunAnalysis, RunRank, RunSummary, ShardFamily, ShardGroup, StepTime
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.results.trial import TrialResult
from fsdp2prof.run_directory import RankRecord, RunDirectory
from fsdp2prof.units import dtype_bytes, format_bytes, format_frac, format_ns, plural
from fsdp2prof.vocabulary import quoted_error


def summarize_run(run: RunDirectory) -> RunSummary:
    """Summarize a run directory; a planned rank that left nothing is listed as ``missing``."""
    info = run.info
    manifests = [record.manifest for record in run.ranks if record.manifest is not None]
    world_size = info.world_size or max((manifest.world_size for manifest in manifests), default=None)
    sharded = next((manifest for manifest in manifests if manifest.param_groups), None)
    groups = [_group(group) for group in sharded.param_groups] if sharded else []
    return RunSummary(
        path=str(run.path),
        command=info.command,
        state=info.state,
        exit_code=info.exit_code,
        started_at=info.started_at,
        finished_at=info.finished_at,
        hosts=info.hosts or sorted({manifest.host for manifest in manifests if manifest.host}),
        world_size=world_size,
        versions=info.versions or (manifests[0].versions if manifests else {}),
        environment=(manifests[0].environment if manifests else {}) or info.environment,
        options=msgspec.to_builtins(info.options),
        messages=list(run.messages),
        ranks=sorted([*map(_rank, run.ranks), *_missing(run, world_size)], key=lambda rank: rank.rank),
        shard_groups=groups,
        optimizers=next((_optimizers(manifest) for manifest in manifests if manifest.optimizers), []),
        unrecorded_step=unrecorded_step(manifest.steps for manifest in manifests),
        rehearsed_rank=None if info.rehearsal is None else info.rehearsal.rank,
        shard_families=shard_families(groups),
        training=next((found for one in manifests if (found := _training(one))), {}),
        processors=processor_use(manifests),
    )


def summarize_files(
    path: str, traced: Collection[int], recorded: Collection[int], world_size: int | None
) -> RunSummary:
    """Summarize files that no recorder described: which ranks left a trace, and which a memory recording."""
    ranks = [
        replace(_nothing(rank, "unknown", []), has_trace=rank in traced, has_memory=rank in recorded)
        for rank in sorted({*traced, *recorded})
    ]
    return RunSummary(
        path=path,
        command=[],
        state="unknown",
        exit_code=None,
        started_at="",
        finished_at=None,
        hosts=[],
        world_size=world_size,
        versions={},
        environment={},
        options={},
        messages=[],
        ranks=ranks,
        shard_groups=[],
        optimizers=[],
    )


def _rank(record: RankRecord) -> RunRank:
    manifest = record.manifest
    if manifest is None:
        return _nothing(record.rank, "missing", list(record.messages))
    device = manifest.device
    return RunRank(
        rank=record.rank,
        state=manifest.state,
        host=manifest.host,
        device=device.name or device.type,
        steps=[StepTime(step=s.step, duration_ns=s.duration_ns, kind=s.kind) for s in manifest.steps],
        traced_steps=manifest.traced_steps,
        memory_steps=manifest.memory_steps,
        has_trace=record.trace is not None,
        has_memory=record.memory is not None,
        error=manifest.error,
        messages=list(record.messages),
        unrecorded_step=unrecorded_step([manifest.steps]),
    )


def _missing(run: RunDirectory, world_size: int | None) -> list[RunRank]:
    if run.info.rehearsal is not None:
        return []
    present = {record.rank for record in run.ranks}
    return [_nothing(rank, "missing", []) for rank in range(world_size or 0) if rank not in present]


def _nothing(rank: int, state: str, messages: list[str]) -> RunRank:
    return RunRank(
        rank=rank,
        state=state,
        host="",
        device="",
        steps=[],
        traced_steps=[],
        memory_steps=[],
        has_trace=False,
        has_memory=False,
        error=None,
        messages=messages,
    )


def _group(group: ParamGroupInfo) -> ShardGroup:
    parameters = group.parameters
    sizes = [dtype_bytes(p.dtype) for p in parameters]
    padded = _bytes([prod(p.padded_local_shape) for p in parameters], sizes)
    local = _bytes([prod(p.local_shape) for p in parameters], sizes)
    return ShardGroup(
        root=group.root,
        fqn=group.fqn,
        parameters=len(parameters),
        numel=sum(prod(p.global_shape) for p in parameters),
        sharded_bytes=padded,
        padding_bytes=None if padded is None or local is None else padded - local,
        dtype=", ".join(dict.fromkeys(p.dtype for p in parameters)),
        param_dtype=group.param_dtype,
        reduce_dtype=group.reduce_dtype,
        mesh=_mesh(group.mesh),
        reshard_after_forward=group.reshard_after_forward,
        offload=group.offload,
        requires_grad=group.requires_grad,
    )


def shard_families(groups: Sequence[ShardGroup]) -> list[ShardFamily]:
    """Fold the groups of repeated layers that are sharded alike, in order of appearance."""
    roots = 1 + max((group.root for group in groups), default=0)
    names = [qualified_fqn(group.fqn, group.root, roots) for group in groups]
    alike = [(name, replace(group, fqn="")) for name, group in zip(names, groups, strict=True)]
    return [
        _family(name if len(members) > 1 else names[members[0]], [groups[i] for i in members])
        for name, members in fold_names(alike)
    ]


def _family(layer: str, groups: Sequence[ShardGroup]) -> ShardFamily:
    first = groups[0]
    return ShardFamily(
        layer=layer,
        groups=len(groups),
        parameters=sum(group.parameters for group in groups),
        numel=sum(group.numel for group in groups),
        sharded_bytes=known_sum([group.sharded_bytes for group in groups]),
        padding_bytes=known_sum([group.padding_bytes for group in groups]),
        dtype=first.dtype,
        param_dtype=first.param_dtype,
        reduce_dtype=first.reduce_dtype,
        mesh=first.mesh,
        reshard_after_forward=first.reshard_after_forward,
        offload=first.offload,
        requires_grad=first.requires_grad,
    )


def _bytes(numels: list[int], sizes: list[int | None]) -> int | None:
    return known_sum(
        [None if size is None else numel * size for numel, size in zip(numels, sizes, strict=True)]
    )


def _mesh(mesh: MeshInfo) -> str:
    names = mesh.dim_names or [f"dim{i}" for i in range(len(mesh.shape))]
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))


def _optimizers(manifest: RankManifest) -> list[str]:
    return [f"{o.class_name}, {format_bytes(o.state_bytes)} of state" for o in manifest.optimizers]


def _training(manifest: RankManifest) -> dict[str, str]:
    """Return the settings of the training loop; of several roots each under its number."""
    found: dict[str, object] = {}
    for root in manifest.roots:
        prefix = f"root{root.root}." if len(manifest.roots) > 1 else ""
        for name in ("micro_batches", "gradient_syncs", "all_reduces", "evaluations"):
            found[prefix + name] = getattr(root, name)
    for way in ("forward_prefetch", "backward_prefetch"):
        groups = sum(bool(getattr(group, way)) for group in manifest.param_groups)
        found[way] = f"set for {plural(groups, 'group')}" if groups else None
    if any(group.unshard_async_op for group in manifest.param_groups):
        found["unshard_async_op"] = True
    for index, optimizer in enumerate(manifest.optimizers):
        prefix = f"optimizer{index}" if len(manifest.optimizers) > 1 else "optimizer"
        found |= {f"{prefix}.{name}": value for name, value in optimizer.defaults.items()}
    found["torch_threads"] = manifest.machine.torch_threads or None if manifest.machine else None
    return {name: str(value) for name, value in found.items() if value is not None}


_SENTENCES = 4
"""Of a verdict."""
_ALWAYS = frozenset({"kept_after_backward", "leak", "out_of_memory"})
"""Findings about memory that hold however much of it is free."""
_WITHOUT_ROOM = frozenset({*_ALWAYS, "prefetched_ahead"})
"""Those that hold if not most of it is known to be free."""
_SAID_BY_LEDGER = {"root_only": "wrapping_too_coarse", "not_optimized": "backward_untrained"}
"""Setup findings that the ledger reports with their cost."""
_MEASURED = frozenset({"wrapping_too_fine", "root_holds_most"})
"""Setup findings whose cost the ledger measures; it reports them itself unless the cost is too small."""
_OF_A_DEVICE = frozenset({"streams_not_shared"})
"""Setup findings about streams, which a CPU does not have."""
_NOT_HERE = frozenset({"nothing_sharded", "ranks_missing"})
"""Findings of ``check`` about a recording that is not complete, which the ranks' table shows."""


def _timed(run: RunSummary, trace: TraceAnalysis) -> RunSummary:
    """Leave out the unrecorded steps whose time, according to the traces, is only the host's."""
    traced = {rank.rank: rank for rank in trace.ranks}
    ranks = [
        replace(one, unrecorded_step=waited_for(one.unrecorded_step, [traced[one.rank]]))
        if one.rank in traced
        else one
        for one in run.ranks
    ]
    return replace(run, ranks=ranks, unrecorded_step=waited_for(run.unrecorded_step, trace.ranks))


def combine(
    run: RunSummary,
    trace: TraceAnalysis | None,
    memory: MemoryAnalysis | None,
    warnings: Sequence[str] = (),
    setup: Sequence[Finding] = (),
    ending: Sequence[str] = (),
) -> RunAnalysis:
    """Combine a run and its analyses, each null if nothing was captured.

    ``setup`` is the result of ``check``, and ``ending`` says why ranks crashed as far as their dumps show.
    Advice on memory is given if it is tight, or leaks.
    """
    tight = memory is not None and is_tight(memory)
    if trace is not None:
        run = _timed(run, trace)
    if trace is not None and has_room(memory):
        trace = with_room(trace)
    if trace is not None and (free := free_bytes(memory)) is not None:
        trace = that_fit(trace, free)
    always = _ALWAYS if has_room(memory) else _WITHOUT_ROOM
    told = {one.id for one in trace.findings} if trace else set()
    if trace is not None and trace.ledger is not None:
        ledger = trace.ledger
        setup = [one for one in setup if one.id not in _MEASURED and not _is_fast(one, ledger)]
    if trace is not None and all(rank.device_type == "cpu" for rank in trace.ranks):
        setup = [one for one in setup if one.id not in _OF_A_DEVICE]
    findings = [
        *(one for one in setup if _belongs(one, told)),
        *(trace.findings if trace else ()),
        *(one for one in (memory.findings if memory else ()) if tight or trace is None or one.id in always),
    ]
    findings.sort(key=lambda one: (SEVERITIES.index(one.severity), -cost_frac(one)))
    unseen = unrecorded_sentence(run.unrecorded_step) if trace is None else []
    verdict = _verdict(trace, memory, findings, tight=tight) or unseen
    if (memory is None or all(rank.oom is None for rank in memory.ranks)) and (crash := _crash(run)):
        rest = (line for line in verdict if not line.startswith(NOTHING))
        verdict = [crash, *ending, *rest][:_SENTENCES]
    return RunAnalysis(
        verdict=verdict,
        run=run,
        trace=trace,
        memory=memory,
        findings=findings,
        advice=[
            *unseen,
            *(trace.advice if trace else ()),
            *(memory.advice if memory and (tight or trace is None) else ()),
        ],
        warnings=list(warnings),
    )


_CONNECTION_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|communicator was aborted|remote process exited|watchdog",
    re.I,
)
"""What a rank's exception says when another rank ended before it."""


_AFTER_TRAINING = "The command failed after every rank's training had ended,"


def _crash(run: RunSummary) -> str:
    """Name the exception that ended the run: of a rank that did not only lose its connection to another.

    Without an exception a process may still have failed after all of them had ended their training.
    """
    crashed = [rank for rank in run.ranks if rank.state == "crashed" and rank.error]
    first = next((rank for rank in crashed if not _CONNECTION_LOST.search(rank.error or "")), None)
    if first is None or first.error is None:
        ended = (
            run.state == "crashed" and bool(run.ranks) and all(one.state == "complete" for one in run.ranks)
        )
        return f"{_AFTER_TRAINING} with exit code {run.exit_code}." if ended else ""
    same = [rank.rank for rank in crashed if rank.error == first.error]
    lost = sum(_CONNECTION_LOST.search(rank.error or "") is not None for rank in crashed)
    then = f" {plural(lost, 'other rank')} then lost the connection." if lost else ""
    error = quoted_error(first.error)
    said = f"{numbered('rank', same)} crashed: {error}{'' if error.endswith(('.', '!', '?')) else '.'}{then}"
    return said[0].upper() + said[1:]


def with_trial(analysis: RunAnalysis, trial: TrialResult | None) -> RunAnalysis:
    """Add the changes that were tried in the running job; a measured gain is reported before any
    prediction."""
    best = trial.tried[0] if trial is not None and trial.tried else None
    verdict = analysis.verdict
    if best is not None and best.outcome == "faster" and best.gained_ns and best.low_ns and best.high_ns:
        interval = f"95 % interval {format_ns(best.low_ns)} to {format_ns(best.high_ns)}"
        gain = f"{format_ns(best.gained_ns)} per step ({format_frac(best.gained_frac or 0.0)}; {interval})"
        said = f"Measured in this job: {best.change} saves {gain}."
        verdict = [said, *(line for line in verdict if not line.startswith(NOTHING))][:_SENTENCES]
    return replace(analysis, verdict=verdict, trial=trial)


_SLOW_BYTES_PER_S = 10e9
"""Of a rank's collectives between hosts with one 100 Gbit/s adapter each."""
_TIMES_GATHERED = 3
"""Bytes of an all-gather in half precision, and of a reduction in float32, of the gathered bytes."""


def _is_fast(one: Finding, ledger: Ledger) -> bool:
    """Whether a finding is about a single all-gather that is fast for its step on any link."""
    gathered = one.evidence.get("gathered_bytes")
    if one.id != "root_only" or not isinstance(gathered, int):
        return False
    took = _TIMES_GATHERED * gathered / _SLOW_BYTES_PER_S * 1e9
    return took < FindingThresholds().medium_cost_frac * (ledger.unrecorded_step_ns or ledger.step_ns)


def _belongs(one: Finding, told: set[str]) -> bool:
    return one.severity != "info" and one.id not in _NOT_HERE and _SAID_BY_LEDGER.get(one.id) not in told


def _verdict(
    trace: TraceAnalysis | None, memory: MemoryAnalysis | None, findings: Sequence[Finding], *, tight: bool
) -> list[str]:
    """Report errors first, then the losses of the step, then the height of the peak."""
    if trace is None or not trace.verdict:
        grave = [] if memory is None else memory.verdict
        return [*_grave(findings), *grave][:_SENTENCES]
    peak = [] if memory is None else memory.verdict[:1]
    if memory is not None and any(rank.oom is not None for rank in memory.ranks):
        step = [line for line in trace.verdict if not line.startswith(NOTHING)]
        return [*peak, *step[:1], *memory.verdict[-1:]]
    about_memory = {one.id for one in memory.findings} - _WITHOUT_ROOM if memory is not None else set()
    first = _grave(findings)
    quiet = trace.ledger is None or not any(one.told for one in trace.ledger.entries)
    if not first and quiet:
        first = _setup([one for one in findings if one.id not in about_memory])
    rest = trace.verdict
    if memory is not None and tight:
        peak += memory.verdict[2:]
        if quiet and not first:
            first, peak = peak, []
    if first or tight:
        rest = [line for line in rest if not line.startswith(NOTHING)]
    return [*first, *rest[: _SENTENCES - len(first) - len(peak)], *peak]


def _grave(findings: Sequence[Finding]) -> list[str]:
    """Return the gravest finding that costs no time, but correctness or memory."""
    grave = (one for one in findings if one.severity == "high" and not cost_frac(one))
    return [one.message for one in grave][:1]


def _setup(findings: Sequence[Finding]) -> list[str]:
    """Return the first finding about the set-up of medium severity, if no loss comes before it."""
    medium = (one for one in findings if one.severity == "medium" and one.change and not cost_frac(one))
    return [one.message for one in medium][:1]
