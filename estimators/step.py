"""``estimate step``: the time of a training step that has not happened.

The step's commands are captured from FSDP2 itself (:mod:`fsdp2prof.estimators.timeline.capture`), costed
for the cluster, and run through a simulation of the streams. The simulated step is a trace, and the
analyses of recorded traces explain its time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import TypeAlias

from fsdp2prof.analyzers.layers import times
from fsdp2prof.analyzers.trace.analysis import References, analyze_trace
from fsdp2prof.estimators.compiler.graphs import CannotCompile
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.measured import Measured, Slower, anchored, fitted
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.config.shares import CONTENTION_FRACS, HOST_OPERATOR_NS
from fsdp2prof.estimators.description import mesh_as_given, policy_as_given
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.images import with_images
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.simulate.micro_batches import (
    captured_policy,
    for_all_micro_batches,
    repeated,
)
from fsdp2prof.estimators.simulate.program import Collective, Kernel, Program
from fsdp2prof.estimators.simulate.streams import Timeline, host_tail_ns, simulate
from fsdp2prof.estimators.techniques.registry import changed_program, check_parallelism
from fsdp2prof.estimators.timeline.as_trace import trace_of
from fsdp2prof.estimators.timeline.bubble import bubble_ns_of, with_waiting
from fsdp2prof.estimators.timeline.calibrated import Calibration, PlacedCosts, placed
from fsdp2prof.estimators.timeline.capture import capture_stitched
from fsdp2prof.estimators.timeline.costs import ClusterCosts, HostPace
from fsdp2prof.estimators.timeline.on_host import blocking, host_trace_of
from fsdp2prof.estimators.verdict.step_range import assumptions_of, range_of
from fsdp2prof.results.estimate import EstimatedModel, HardwareUse, StepEstimate, StepRange
from fsdp2prof.results.step import BreakdownNs
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.tables.trace import Trace
from fsdp2prof.units import format_frac, format_ns, plural
from fsdp2prof.vocabulary import layer_name, op_label


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPrediction:
    """An estimate with the trace behind it, which every trace analysis reads like a recorded rank's."""

    estimate: StepEstimate
    trace: Trace


def estimate_step(
    model: ModelSpec,
    mesh: MeshSpec,
    policy: PolicySpec,
    cluster: Cluster,
    calibration: Calibration | None = None,
) -> StepEstimate:
    """Predict the training step of rank 0 on a cluster, by the models or by a recorded run.

    Raises ``ModelError`` for a step that cannot be built or is not modelled, and for hardware that lacks
    rates that the step needs.
    """
    return predict_step(model, mesh, policy, cluster, calibration).estimate


def predict_step(
    model: ModelSpec,
    mesh: MeshSpec,
    policy: PolicySpec,
    cluster: Cluster,
    calibration: Calibration | None = None,
    measured: Measured | None = None,
    anchors: Sequence[Anchor] = (),
) -> StepPrediction:
    """Like :func:`estimate_step`, but keep the predicted trace.

    ``measured`` is of this run, ``anchors`` are other runs and their measured values.
    """
    cluster.check_network(mesh)
    program = program_of(model, mesh, policy)
    if measured is None and not anchors:
        return simulate_program(program, model, mesh, policy, cluster, calibration)
    own = (
        Measured(name="step_ms", value=1.0) if measured is None else measured,
        program,
        model,
        mesh,
        policy,
    )
    if measured is not None:
        known = anchored_on([own], cluster, exact=True)
        half, why = _REPEATED, f"the step was measured; it is assumed to repeat within {_REPEATED:.0%}"
    else:
        known = anchored_on(anchors, cluster, exact=False)
        half = known.half_width(sensitivities(own, known.cluster)[1])
        why = (
            f"within {half:.0%}: what {plural(len(anchors), 'measured run')} leave open of the parts' speeds"
        )
    made = simulate_program(program, model, mesh, policy, known.cluster, calibration)
    spread = StepRange(
        low_ns=round(made.estimate.step_ns * max(0.0, 1 - half)),
        high_ns=round(made.estimate.step_ns * (1 + half)),
        unknown=[why],
    )
    estimate = replace(made.estimate, assumptions=[known.note, *made.estimate.assumptions], range=spread)
    return replace(made, estimate=replace(estimate, verdict=_verdict(estimate)))


def with_older(estimate: StepEstimate, older: Mapping[str, StepEstimate]) -> StepEstimate:
    """Widen the range of a step by those of older stacks, and name each that widens it."""
    spread = estimate.range
    for stack, other in older.items():
        low, high = min(spread.low_ns, other.range.low_ns), max(spread.high_ns, other.range.high_ns)
        if (low, high) != (spread.low_ns, spread.high_ns):
            said = (
                f"the date of the software is in no file: under {stack} a step takes "
                f"{format_ns(other.step_ns)}; --stack says which it is"
            )
            spread = replace(spread, low_ns=low, high_ns=high, unknown=[*spread.unknown, said])
    widened = replace(estimate, range=spread)
    return replace(widened, verdict=_verdict(widened))


_REPEATED = 0.02
"""How far the steps of a steady run differ: calibrated predictions of recorded runs are off by as much."""
_ANCHORINGS = 3
"""Simulations, after which the step is the measured one to a fraction of a percent."""
_NUDGE = 0.05
"""By how much a part is slowed to see how far the step follows."""
_PARTS = ("compute", "links", "host")

Anchor: TypeAlias = tuple[Measured, Program, ModelSpec, MeshSpec, PolicySpec]
"""A number of time, and the run that it was measured of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchored:
    """The correction of a cluster by measured runs."""

    cluster: Cluster
    note: str
    """How far off the predictions were, and how the correction is split."""
    covariance: list[list[float]]
    """Of the logarithms of compute's, links' and host's times, as far as the runs leave them open."""

    def half_width(self, elasticities: Sequence[float]) -> float:
        """Share of a run's step within which 85 % of its measurements would lie."""
        pairs = zip(elasticities, self.covariance, strict=True)
        variance = sum(
            own * sum(one * covariance for one, covariance in zip(elasticities, row, strict=True))
            for own, row in pairs
        )
        return _OF_85_PERCENT * sqrt(max(0.0, variance) + _REPEATED**2)


def anchored_on(anchors: Sequence[Anchor], cluster: Cluster, *, exact: bool) -> Anchored:
    """Correct a cluster so that runs take the measured time.

    The correction is split over compute, links and host according to the runs. ``exact``: the step of the
    single run then equals the measured one.
    """
    slower, ratios = Slower(), []
    prior, covariance = prior_of(cluster, anchors), [[0.0] * len(_PARTS)] * len(_PARTS)
    wanted = []
    for measured, program, model, mesh, policy in anchors:
        made = simulate_program(program, model, mesh, policy, cluster).estimate
        wanted.append(
            measured.step_ns(
                step_ns=made.step_ns, tokens_per_s_per_gpu=made.tokens_per_s_per_gpu, mfu=made.mfu
            )
        )
        ratios.append(made.step_ns / wanted[-1])
    for _ in range(2):  # elasticities change with the correction
        rows = [sensitivities(anchor, anchored(cluster, slower)) for anchor in anchors]
        current = [getattr(slower, part) for part in _PARTS]
        off = [
            log(goal / step) + sum(e * log(factor) for e, factor in zip(own, current, strict=True))
            for goal, (step, own) in zip(wanted, rows, strict=True)
        ]
        logs, covariance = fitted([own for _, own in rows], off, prior, _REPEATED)
        slower = Slower(**dict(zip(_PARTS, map(exp, logs), strict=True)))
    for _ in range(_ANCHORINGS if exact else 0):
        _, program, model, mesh, policy = anchors[0]
        made = simulate_program(program, model, mesh, policy, anchored(cluster, slower)).estimate
        slower = slower.times(Slower.all(wanted[0] / made.step_ns))
    open_frac = [covariance[part][part] / prior[part] ** 2 for part in range(len(_PARTS))]
    parts = ", ".join(
        f"{part} {getattr(slower, part):.2f} x{'' if share < _OPEN else ' (hardly constrained)'}"
        for part, share in zip(_PARTS, open_frac, strict=True)
    )
    found = ", ".join(f"{ratio - 1:+.1%}" for ratio in ratios)
    note = (
        f"anchored on what was measured ({', '.join(str(one[0]) for one in anchors)}): predictions were off "
        f"by {found}; time is corrected by {parts}"
    )
    return Anchored(cluster=anchored(cluster, slower), note=note, covariance=covariance)


_OPEN = 0.75
"""Share of the prior variance that runs leave, from which on a part counts as hardly constrained."""
_OF_85_PERCENT = 1.44
"""Standard deviations of a normal distribution within which 85 % of it lie."""


def prior_of(cluster: Cluster, anchors: Sequence[Anchor]) -> list[float]:
    """Standard deviations of the logarithms of compute's, links' and host's times, by the printed ranges."""
    hardware = cluster.hardware
    several = cluster.network is not None and any(
        mesh.world_size > cluster.gpus_per_node for _, _, _, mesh, _ in anchors
    )
    network = cluster.network.range if several and cluster.network is not None else (1.0, 1.0)
    links = (hardware.link_range[0] * network[0], hardware.link_range[1] * network[1])
    host = (HOST_OPERATOR_NS[0], HOST_OPERATOR_NS[2])
    return [
        max(_REPEATED, log(high / low) / 2 / _OF_85_PERCENT)
        for low, high in (hardware.compute_range, links, host)
    ]


def sensitivities(anchor: Anchor, cluster: Cluster) -> tuple[int, list[float]]:
    """Return a run's step in nanoseconds, and by how much of a per cent it follows each part's per cent."""
    _, program, _, mesh, policy = anchor
    step = _step_ns(program, mesh, policy, cluster)
    nudged = [
        _step_ns(program, mesh, policy, anchored(cluster, Slower(**{part: 1 + _NUDGE}))) for part in _PARTS
    ]
    return step, [log(max(1, one) / max(1, step)) / log(1 + _NUDGE) for one in nudged]


def _step_ns(program: Program, mesh: MeshSpec, policy: PolicySpec, cluster: Cluster) -> int:
    program, costs = _costed(program, mesh, cluster.with_attention_of(policy), None)
    whole, timeline = repeated(program, simulate(program, costs))
    busy, begun = timeline.end_ns >= 0, timeline.start_ns >= 0
    if not busy.any():
        return 0
    span = int(timeline.end_ns[busy].max() - timeline.start_ns[begun].min())
    return span + host_tail_ns(whole, timeline) + bubble_ns_of(whole, timeline, mesh, policy)


def program_of(model: ModelSpec, mesh: MeshSpec, policy: PolicySpec) -> Program:
    """Capture the commands of a step; they do not depend on the cluster.

    Raises ``ModelError`` for a step that cannot be built or is not modelled.
    """
    built = build_model(model, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
    check_parallelism(built, mesh, policy)
    built = with_images(built, policy)
    captured = captured_policy(mesh, policy)
    local = replace(captured, seq_len=policy.seq_len // mesh.cp)
    program = _captured(model, mesh, local, built)
    program = replace(changed_program(program, built, mesh, policy), references=built.references)
    return for_all_micro_batches(program, policy, captured)


def _captured(model: ModelSpec, mesh: MeshSpec, policy: PolicySpec, built: Model) -> Program:
    """Capture a step, compiled blocks by their graphs; if one cannot be traced, the program contains the
    reason."""
    if not policy.compile:
        return capture_stitched(model, mesh, policy, built)
    try:
        return capture_stitched(model, mesh, policy, built, graphs={})
    except CannotCompile as reason:
        return replace(capture_stitched(model, mesh, policy, built), guessed_fusion=str(reason))


def simulate_program(
    program: Program,
    model: ModelSpec,
    mesh: MeshSpec,
    policy: PolicySpec,
    cluster: Cluster,
    calibration: Calibration | None = None,
) -> StepPrediction:
    """Run a captured step on a cluster, by the costs of a recorded run if there is one."""
    program, costs = _costed(program, mesh, cluster.with_attention_of(policy), calibration)
    whole, timeline, trace, analysis = _simulated(program, model, mesh, costs)
    bubble = bubble_ns_of(whole, timeline, mesh, policy)
    step = analysis.ranks[0].steps[0]
    spread = range_of(program, costs, policy, bubble, step.duration_ns, cluster.hardware)
    estimate = _estimate(whole, timeline, analysis, model, mesh, policy, costs, spread)
    if bubble:
        trace = _trace(whole, with_waiting(whole, timeline, bubble), model, mesh, costs)
    return StepPrediction(estimate=estimate, trace=trace)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """The numbers of a step that a search needs; each equals that of the :class:`StepEstimate`."""

    step_ns: int
    exposed_ns: int
    """Communication that nothing hides."""
    bubble_ns: int
    idle_ns: int
    """Nothing runs, mostly for a host that issues too slowly; the bubble is not in it."""
    model_flops: int


_SIMULATED = 3
"""Micro-batches from which on each takes as long as the one before."""
_MOST_WHOLE = {False: 24, True: 8}
"""Micro-batches, without and with a pipeline, up to which a step's figures are those of the whole step."""


def is_extended(mesh: MeshSpec, policy: PolicySpec) -> bool:
    """Whether :func:`step_figures` adds micro-batches to a few that it simulates."""
    return policy.grad_accum > _MOST_WHOLE[mesh.pp > 1]


def step_figures(model: ModelSpec, mesh: MeshSpec, policy: PolicySpec, cluster: Cluster) -> StepFigures:
    """Predict only a step's numbers; of very many micro-batches a few are simulated and the rest added.

    A stage does the same work for each, in any order. Raises the same errors as :func:`estimate_step`.
    """
    if not is_extended(mesh, policy):
        return _figures(model, mesh, policy, cluster, policy.grad_accum)
    fewer = _figures(model, mesh, policy, cluster, _SIMULATED - 1)
    more = _figures(model, mesh, policy, cluster, _SIMULATED)
    times = policy.grad_accum - _SIMULATED
    return StepFigures(
        step_ns=more.step_ns + times * (more.step_ns - more.bubble_ns - fewer.step_ns + fewer.bubble_ns),
        exposed_ns=more.exposed_ns + times * (more.exposed_ns - fewer.exposed_ns),
        bubble_ns=more.bubble_ns,
        idle_ns=more.idle_ns + times * (more.idle_ns - fewer.idle_ns),
        model_flops=more.model_flops + times * (more.model_flops - fewer.model_flops),
    )


def _figures(
    model: ModelSpec, mesh: MeshSpec, whole: PolicySpec, cluster: Cluster, micro_batches: int
) -> StepFigures:
    policy = (
        whole if micro_batches == whole.grad_accum else replace(whole, grad_accum=micro_batches, pp_runs=1)
    )
    program = program_of(model, mesh, policy)
    program, costs = _costed(program, mesh, cluster.with_attention_of(policy), None)
    program, timeline, _, analysis = _simulated(program, model, mesh, costs)
    step = analysis.ranks[0].steps[0]
    parts = step.breakdown_ns
    bubble = bubble_ns_of(program, timeline, mesh, policy, whole)
    return StepFigures(
        step_ns=step.duration_ns + bubble,
        exposed_ns=_exposed_ns(parts),
        bubble_ns=bubble,
        idle_ns=parts.idle,
        model_flops=program.model_flops,
    )


def _costed(
    program: Program, mesh: MeshSpec, cluster: Cluster, calibration: Calibration | None
) -> tuple[Program, ClusterCosts]:
    """Return a program as a cluster runs it, and the costs of its commands there."""
    cluster.check_copy_engines(mesh)
    hardware = cluster.hardware
    contention = (
        CONTENTION_FRACS[1] if hardware.overlap_slowdown_frac is None else hardware.overlap_slowdown_frac
    )
    pace = HostPace(operator_ns=hardware.host_operator_ns or HOST_OPERATOR_NS[1])
    costs = ClusterCosts(cluster=cluster, mesh=mesh, host=pace, contention_frac=contention)
    if not hardware.on_host and calibration is None:
        return program, costs
    program, by_place = placed(program, costs, calibration)
    return (blocking(program) if by_place.on_host else program), by_place


def _simulated(
    program: Program, model: ModelSpec, mesh: MeshSpec, costs: ClusterCosts
) -> tuple[Program, Timeline, Trace, TraceAnalysis]:
    """Return the whole step: all its micro-batches, the times of its commands, and the analysis."""
    program, timeline = repeated(program, simulate(program, costs))
    trace = _trace(program, timeline, model, mesh, costs)
    hardware = costs.cluster.hardware
    known = References(peak_flops_per_s=hardware.flops, peak_memory_bytes_per_s=hardware.memory_bytes_per_s)
    return program, timeline, trace, analyze_trace([(trace, None)], references=known)


def _trace(
    program: Program, timeline: Timeline, model: ModelSpec, mesh: MeshSpec, costs: ClusterCosts
) -> Trace:
    source, world_size = f"estimate of {model.source}", mesh.world_size
    if isinstance(costs, PlacedCosts) and costs.on_host:
        return host_trace_of(program, timeline, costs.computing_ns, source=source, world_size=world_size)
    name = costs.cluster.hardware.name
    return trace_of(program, timeline, source=source, world_size=world_size, device_name=name)


def _as_shown(analysis: TraceAnalysis, costs: ClusterCosts) -> TraceAnalysis:
    """Return the analysis without the lane of a host that only issues: labels cover FSDP's part of it."""
    if analysis.timeline is None or (isinstance(costs, PlacedCosts) and costs.on_host):
        return analysis
    ranks = [
        replace(rank, lanes=[lane for lane in rank.lanes if lane.lane != "host"])
        for rank in analysis.timeline.ranks
    ]
    return replace(analysis, timeline=replace(analysis.timeline, ranks=ranks))


def _estimate(
    program: Program,
    timeline: Timeline,
    analysis: TraceAnalysis,
    model: ModelSpec,
    mesh: MeshSpec,
    policy: PolicySpec,
    costs: ClusterCosts,
    spread: StepRange,
) -> StepEstimate:
    step = analysis.ranks[0].steps[0]
    kernels = _kernels(program, timeline, costs)
    hardware = costs.cluster.hardware
    peak = hardware.flops.get(policy.product_dtype)
    bubble = bubble_ns_of(program, timeline, mesh, policy)
    tokens = program.tokens * mesh.world_size // (mesh.tp * mesh.pp)
    executed = sum(c.work.flops for c in program.commands if isinstance(c, Kernel) and c.work is not None)
    seconds = (step.duration_ns + bubble) / 1e9
    made = StepEstimate(
        verdict=[],
        model=EstimatedModel(name=model.source, parameters=program.parameters),
        mesh=mesh_as_given(mesh),
        policy=policy_as_given(policy),
        hardware=_hardware_use(mesh, costs, peak),
        step_ns=step.duration_ns + bubble,
        tokens_per_step=tokens,
        tokens_per_s_per_gpu=tokens / mesh.world_size / seconds,
        mfu=None if peak is None else min(program.model_flops, executed) / seconds / peak,
        hfu=None if peak is None else executed / seconds / peak,
        breakdown_ns=step.breakdown_ns,
        bubble_ns=bubble,
        kernels_ns=kernels,
        bound_by=_bound_by(step.breakdown_ns, kernels, program, costs),
        by_layer=analysis.by_layer,
        trace=_as_shown(analysis, costs),
        range=spread,
        assumptions=assumptions_of(mesh, policy, costs, program, model.kind),
    )
    return replace(made, verdict=_verdict(made))


_BOUNDS = {
    "compute": "Matrix products and attention",
    "memory_bandwidth": "Memory bandwidth",
    "nvlink": "The links inside a node",
    "pcie": "PCIe",
    "gloo": "The ranks' transport",
    "network": "The network between nodes",
    "host": "The host, which launches too slowly,",
    "host_optimizer": "The optimizer on the host",
}
"""The limit of a step, as the beginning of a sentence."""


def _verdict(estimate: StepEstimate) -> list[str]:
    """Report how long the step takes, what published ones say of that, what limits it, and where
    communication is exposed most."""
    low, high = format_ns(estimate.range.low_ns), format_ns(estimate.range.high_ns)
    between = "" if low == high else f" ({low} to {high})"
    mfu = "" if estimate.mfu is None else f", MFU {format_frac(estimate.mfu)}"
    rate = estimate.tokens_per_s_per_gpu * estimate.step_ns
    rates = (
        f" ({rate / estimate.range.high_ns:,.0f} to {rate / estimate.range.low_ns:,.0f})" if between else ""
    )
    lines = [
        f"A step takes {format_ns(estimate.step_ns)}{between}: "
        f"{estimate.tokens_per_s_per_gpu:,.0f} tokens/s{rates} on each GPU{mfu}."
    ]
    published = estimate.range.published_ns
    if published is not None:
        lines.append(
            f"Published steps of {estimate.range.published_of} took {times(published / estimate.step_ns)} "
            f"as long as predicted, in the median of their sources: for this one {format_ns(published)}, "
            f"{rate / published:,.0f} tokens/s."
        )
    parts = estimate.breakdown_ns
    bounds = f"{_BOUNDS[estimate.bound_by]} bound{'' if estimate.bound_by == 'compute' else 's'} it"
    exposed = format_frac(_exposed_ns(parts) / estimate.step_ns)
    lines.append(
        f"{bounds}; {exposed} of it is exposed communication." if estimate.by_layer else f"{bounds}."
    )
    worst = estimate.by_layer[0] if estimate.by_layer else None
    if worst is not None and worst.exposed_ns:
        lines.append(
            f"The most exposed is the {op_label(worst.op)} of {layer_name(worst.fqn)} in {worst.phase}: "
            f"{format_ns(worst.exposed_ns)} of {format_ns(worst.total_ns)}."
        )
    return lines


def _exposed_ns(parts: BreakdownNs) -> int:
    """Return the communication of all kinds that nothing hides."""
    return (
        parts.exposed_all_gather
        + parts.exposed_reduce_scatter
        + parts.exposed_all_reduce
        + parts.exposed_other_comm
    )


def _hardware_use(mesh: MeshSpec, costs: ClusterCosts, peak: int | None) -> HardwareUse:
    cluster = costs.cluster
    nodes = -(-mesh.world_size // cluster.gpus_per_node)
    return HardwareUse(
        name=cluster.hardware.name,
        gpus_per_node=cluster.gpus_per_node,
        nodes=nodes,
        network=cluster.network.name if cluster.network is not None and nodes > 1 else None,
        peak_flops_per_s=peak,
    )


def _kernels(program: Program, timeline: Timeline, costs: ClusterCosts) -> dict[str, int]:
    """Device time of the compute stream's kernels by their limit."""
    floor = costs.cluster.hardware.kernel_floor_ns
    sums = dict.fromkeys(("matmul", "attention", "memory", "launch"), 0)
    spans = (timeline.end_ns - timeline.start_ns).tolist()
    if isinstance(costs, PlacedCosts) and costs.on_host:
        spans, floor = [costs.computing_ns(command) for command in program.commands], 0
    for command, span in zip(program.commands, spans, strict=True):
        if isinstance(command, Kernel) and command.work is not None and command.stream == 0:
            kind = command.work.kind
            bound = kind if kind in ("matmul", "attention") else "memory"
            sums[bound] += max(0, span - floor)
            sums["launch"] += min(span, floor)
    return sums


def _bound_by(breakdown: BreakdownNs, kernels: dict[str, int], program: Program, costs: ClusterCosts) -> str:
    """Name the largest part of the step by the resource that it waits for."""
    parts = {
        "compute": kernels["matmul"] + kernels["attention"],
        "memory_bandwidth": kernels["memory"],
        "host": breakdown.idle + kernels["launch"],
    }
    updating = sum(costs.host.work_ns(c) for c in program.commands if isinstance(c, Kernel))
    if updating:
        parts["host_optimizer"] = min(updating, breakdown.idle)
        parts["host"] -= parts["host_optimizer"]
    exposed = {
        "all_gather": breakdown.exposed_all_gather,
        "reduce_scatter": breakdown.exposed_reduce_scatter,
        "all_reduce": breakdown.exposed_all_reduce,
        "other": breakdown.exposed_other_comm,
    }
    links: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for command in program.commands:
        if isinstance(command, Collective):
            made = costs.transfer(command)
            links[command.op if command.op in exposed else "other"][made.link] += made.ns
    for op, time in exposed.items():
        if links[op]:
            link = max(links[op], key=lambda name: links[op][name])
            parts[link] = parts.get(link, 0) + time
    return max(parts, key=lambda name: parts[name])
