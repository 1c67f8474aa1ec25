"""Summarize search results: the winner, the best of each family, why the others lost, single changes.

Why a configuration is not the winner, in one sentence with numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp2prof.estimators.description import mesh_as_given, model_as_built, policy_as_given
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.planner.confirm import REFINED, OtherPrecision
from fsdp2prof.estimators.planner.recipes import recipes
from fsdp2prof.estimators.planner.request import Candidate, PlanRequest
from fsdp2prof.estimators.planner.search import Scored, pareto_front
from fsdp2prof.estimators.step import is_extended
from fsdp2prof.estimators.verdict.memory_fit import Room, deciding, fit_sentence
from fsdp2prof.results.plan import (
    FastPathError,
    Plan,
    PlanAnswer,
    PlanFamily,
    PlanGiven,
    PlanPoint,
    PlanPrecision,
    PlanSearch,
)
from fsdp2prof.units import format_amount, format_bytes, format_count, format_frac, format_ns

_ALIKE = 0.005
"""Steps that differ by less are called equally fast."""
_LEAST_TENTHS = 2
"""Tenths of a percent of a step that are worth a name."""
_MOST_NAMED = 4


def equal_within(error: FastPathError) -> float:
    """Return the smallest difference of two steps that the search can resolve: its own largest error."""
    known = (abs(one) for one in (error.step_low_frac, error.step_high_frac) if one is not None)
    return max(_ALIKE, *known, _ALIKE)


def why_it_lost(one: Scored, winner: Scored | None, request: PlanRequest, equal_frac: float = _ALIKE) -> str:
    """Report by how much memory a configuration misses, or where it spends more time than the winner.

    A difference below ``equal_frac`` from a configuration that only the search scored is called equal.
    """
    if winner is not None and one.candidate == winner.candidate:
        return "the winner"
    over = one.total_bytes - request.limit_bytes
    if over > 0:
        most = "up to " if one.total_low_bytes <= request.limit_bytes else ""
        return f"{most}{format_bytes(over)} over"
    if winner is None:
        return "the winner"
    if request.objective == "memory":
        return f"{format_bytes(one.total_bytes - winner.total_bytes)} more memory"
    slower = one.step_ns / winner.step_ns - 1
    if slower < -_ALIKE and (one.confirmed or _numbers_of(one) != _numbers_of(winner)):
        return f"{format_frac(-slower)} less time, with changed numerics or code: select it with --fix"
    if slower < -_ALIKE and -slower > equal_frac:
        return f"{format_frac(-slower)} less time by the search, which the engine did not confirm"
    if -_ALIKE <= slower <= _ALIKE:
        return _as_fast(one, winner)
    if abs(slower) <= equal_frac and not (one.confirmed and winner.confirmed):
        more = "slower" if slower > 0 else "faster"
        within = f"equal within the search's error of {format_frac(equal_frac)}"
        return f"{within}, {format_frac(abs(slower))} {more} by its own score: {_spent(one, winner, request)}"
    return f"{format_frac(slower)} slower: {_spent(one, winner, request)}"


def _numbers_of(one: Scored) -> tuple[object, ...]:
    """Settings that a plan may change and that a training's numbers depend on."""
    policy = one.candidate.policy
    return policy.reduce_dtype, policy.orig_dtype, policy.float8


def what_it_wins(one: Scored, winner: Scored | None, request: PlanRequest) -> str:
    """Report the memory or time that the best configuration in another precision saves against the winner."""
    over = one.total_bytes - request.limit_bytes
    if over > 0:
        return f"{format_bytes(over)} over"
    if winner is None:
        return "fits"
    if request.objective == "memory":
        return f"{format_bytes(winner.total_bytes - one.total_bytes)} less memory"
    less = 1 - one.step_ns / winner.step_ns
    if abs(less) <= _ALIKE:
        return _as_fast(one, winner)
    return f"{format_frac(abs(less))} {'less' if less > 0 else 'more'} time: {_spent(one, winner, request)}"


def _as_fast(one: Scored, winner: Scored) -> str:
    more = one.total_bytes - winner.total_bytes
    return f"as fast within {_ALIKE:.1%}, with {format_bytes(abs(more))} {'more' if more > 0 else 'less'}"


def _spent(one: Scored, winner: Scored, request: PlanRequest) -> str:
    """Name the parts that take more time than in the winner and those that take less, as shares of the
    winner's step.

    The named parts add up to the difference, within a tenth of a percent.
    """
    mine, theirs = time_parts(one), time_parts(winner)
    tenths = {name: round(1000 * (mine[name] - theirs[name]) / winner.step_ns) for name in mine}
    least = max(_LEAST_TENTHS, max(map(abs, tenths.values())) // 10)
    named = sorted(
        (name for name in tenths if abs(tenths[name]) >= least), key=lambda name: -abs(tenths[name])
    )
    named = named[:_MOST_NAMED]
    rest = round(1000 * (one.step_ns / winner.step_ns - 1)) - sum(tenths[name] for name in named)
    parts = [(tenths[name], _called(name, one if tenths[name] > 0 else winner, request)) for name in named]
    if rest:
        parts.append((rest, "the rest" if named else "small differences"))
    parts.sort(key=lambda part: part[0] < 0)  # what it loses, then what it gains
    return ", ".join(f"{size / 10:+.1f}% {name}" for size, name in parts)


def _called(part: str, one: Scored, request: PlanRequest) -> str:
    """Name a part of a step of a configuration that has it."""
    node, mesh = request.cluster.gpus_per_node, one.candidate.mesh
    outside = mesh.fsdp_size * mesh.tp * mesh.dp_replicate > node
    kinds = [word for word, size in (("tensor", mesh.tp), ("expert", mesh.ep)) if size > 1]
    parallel = " and ".join(kinds) + " parallelism"
    return {
        "exposed": f"exposed communication {'on the network' if outside else 'in the node'}",
        "exposed_parallel": f"exposed {parallel} "
        + ("in the node" if max(mesh.tp, mesh.ep) <= node else "on the network"),
        "bubble": "pipeline bubble",
        "recompute": "recomputed activations",
        "host": "waiting for the host",
        "kernels": "kernels",
    }[part]


def time_parts(one: Scored) -> dict[str, float]:
    """Return the parts of a step in nanoseconds; they sum to the step.

    Parts that the engine does not separate are divided as in the search: exposed communication, and the
    recomputation share of the kernels' time.
    """
    fast = one.fast
    parallel = fast.exposed_parallel_ns / max(1, fast.exposed_ns)
    busy = one.step_ns - one.exposed_ns - one.bubble_ns - one.host_ns
    recompute = busy * fast.recompute_ns / max(1, fast.compute_ns)
    return {
        "exposed": one.exposed_ns * (1 - parallel),
        "exposed_parallel": one.exposed_ns * parallel,
        "bubble": one.bubble_ns,
        "recompute": recompute,
        "host": one.host_ns,
        "kernels": busy - recompute,
    }


_CHANGES = ("ac", "batch_size", "sync", "reshard", "pp_schedule", "expert_shards", "orig_dtype", *REFINED)
_DIMS = ("tp", "cp", "pp", "ep", "dp_replicate")


def outcome(
    request: PlanRequest,
    model: Model,
    found: Sequence[Scored],
    shown: Sequence[Scored],
    precisions: Sequence[OtherPrecision],
    notes: Sequence[str],
    winner: Scored | None,
    simplest: Scored | None,
    search: PlanSearch,
) -> Plan:
    """Return the result of a search.

    ``found`` is ranked; ``shown`` and ``precisions`` are changes that cannot win; ``notes`` say which
    other options were tried. ``simplest`` is about as fast as the winner.
    """
    fitting = [one for one in found if one.total_bytes <= request.limit_bytes]
    parameters = sum(parameter.numel() for parameter in model.module.parameters())
    point = None if winner is None else _point(winner, request)
    equal = equal_within(search.error)
    plan = Plan(
        model=model_as_built(model, parameters),
        given=_given(request),
        verdict=[],
        winner=point,
        simplest=None if simplest is None else _point(simplest, request),
        simplest_why="" if simplest is None else why_it_lost(simplest, winner, request, equal),
        equal_frac=equal,
        families=_families(found, winner, request, equal),
        changes=[] if winner is None else _changes([*found, *shown], winner, request, equal),
        precisions=[_precision(one, winner, request) for one in precisions],
        pareto=[_point(one, request) for one in pareto_front(fitting)],
        answer=budget(point, request),
        recipes=[] if winner is None else recipes(request, winner.candidate),
        search=search,
        assumptions=[*_assumptions(request, winner), *notes],
    )
    return replace(plan, verdict=_verdict(plan, winner, found[0], request))


def fast_path_error(known: Sequence[Scored]) -> FastPathError:
    """Return how far the search was from the engine on the configurations that both know."""
    steps = [one.fast.step_ns / one.step_ns - 1 for one in known]
    sizes = [one.fast.reserved_bytes / one.reserved_bytes - 1 for one in known]
    return FastPathError(
        configurations=len(known),
        step_low_frac=min(steps, default=None),
        step_high_frac=max(steps, default=None),
        memory_low_frac=min(sizes, default=None),
        memory_high_frac=max(sizes, default=None),
    )


def name_of(candidate: Candidate) -> str:
    """Say mesh and policy in short: ``dp_shard=256, batch 1 x 4, ac=op``."""
    policy = candidate.policy
    parts = [str(candidate.mesh).replace(",", " "), f"batch {policy.batch_size}x{policy.grad_accum}"]
    parts.append(f"ac={policy.ac}")
    if policy.grad_accum > 1 and policy.sync == "each":
        parts.append("sync=each")
    if policy.reshard != "default":
        parts.append(f"reshard={policy.reshard}")
    if policy.expert_shards == "hidden":
        parts.append("expert_shards=hidden")
    parts += [
        f"{name}={getattr(policy, name)}"
        for name in ("reduce_dtype", "orig_dtype")
        if getattr(policy, name) != "float32"
    ]
    prefetched = [name for name in ("forward_prefetch", "backward_prefetch") if getattr(policy, name)]
    parts += [f"{name}={getattr(policy, name)}" for name in prefetched]
    if policy.pp_schedule != "1f1b":
        parts.append(str(policy.pp_schedule))
    if policy.offload:
        parts.append("offload")
    return ", ".join(parts)


def _point(one: Scored, request: PlanRequest) -> PlanPoint:
    mesh, policy = one.candidate.mesh, one.candidate.policy
    seconds = one.step_ns / 1e9
    tokens = request.global_batch * policy.seq_len
    speed = tokens / seconds
    peak = request.cluster.hardware.flops.get(policy.product_dtype)
    hours = request.gpus * 1e9 / speed / 3600
    price = request.price_per_gpu_hour
    return PlanPoint(
        family=one.family,
        mesh=mesh_as_given(mesh),
        policy=policy_as_given(policy),
        name=name_of(one.candidate),
        reserved_bytes=one.reserved_bytes,
        total_low_bytes=one.total_low_bytes,
        total_bytes=one.total_bytes,
        headroom_bytes=request.limit_bytes - one.total_bytes,
        fit=room(one, request).fit,
        depends_on=list(one.depends_on) if room(one, request).fit == "depends" else [],
        step_ns=one.step_ns,
        exposed_ns=one.exposed_ns,
        exposed_frac=one.exposed_ns / one.step_ns,
        bubble_ns=one.bubble_ns,
        tokens_per_s=speed,
        tokens_per_s_per_gpu=speed / request.gpus,
        mfu=None if peak is None else one.fast.model_flops / seconds / peak,
        gpu_hours_per_billion_tokens=hours,
        cost_per_billion_tokens=None if price is None else price * hours,
        confirmed=one.confirmed,
    )


def _families(
    found: Sequence[Scored], winner: Scored | None, request: PlanRequest, equal: float
) -> list[PlanFamily]:
    groups: dict[str, list[Scored]] = {}
    for one in found:  # the best first
        groups.setdefault(one.family, []).append(one)
    return [_family(name, members, winner, request, equal) for name, members in groups.items()]


def _family(
    name: str, members: Sequence[Scored], winner: Scored | None, request: PlanRequest, equal: float
) -> PlanFamily:
    best = members[0]
    return PlanFamily(
        name=name,
        best=_point(best, request),
        configurations=len(members),
        fitting=sum(one.total_bytes <= request.limit_bytes for one in members),
        why=why_it_lost(best, winner, request, equal),
    )


def _precision(one: OtherPrecision, winner: Scored | None, request: PlanRequest) -> PlanPrecision:
    return PlanPrecision(
        option=one.option,
        value=one.value,
        best=_point(one.best, request),
        configurations=one.configurations,
        why=what_it_wins(one.best, winner, request),
        take=f"--fix {one.option}={one.value}",
    )


def _changes(found: Sequence[Scored], winner: Scored, request: PlanRequest, equal: float) -> list[PlanFamily]:
    """The winner with one option or one mesh dimension of another size, each at its best."""
    groups: dict[tuple[str, object], list[Scored]] = {}
    own = winner.candidate
    for one in found:
        if one.candidate.mesh == own.mesh:
            differs = _differences(one.candidate, own)
            if len(differs) == 1:
                groups.setdefault((differs[0], getattr(one.candidate.policy, differs[0])), []).append(one)
        else:
            for name in _DIMS:
                size = getattr(one.candidate.mesh, name)
                if size != getattr(own.mesh, name) and _alike_otherwise(one.candidate, own, name):
                    groups.setdefault((name, size), []).append(one)
    return [
        _family(f"{name}={value}", members, winner, request, equal)
        for (name, value), members in groups.items()
    ]


def _differences(one: Candidate, other: Candidate) -> list[str]:
    """Options that differ; the accumulation follows from the batch."""
    names = [name for name in _CHANGES if getattr(one.policy, name) != getattr(other.policy, name)]
    if "batch_size" in names and 1 in (one.policy.grad_accum, other.policy.grad_accum):
        names = [name for name in names if name != "sync"]
    return names


def _alike_otherwise(one: Candidate, other: Candidate, name: str) -> bool:
    names = [dim for dim in _DIMS if dim != name]
    return all(getattr(one.mesh, dim) == getattr(other.mesh, dim) for dim in names)


def _given(request: PlanRequest) -> PlanGiven:
    cluster = request.cluster
    fixed = {**request.fixed_mesh, **request.fixed_policy}
    several = request.gpus > cluster.gpus_per_node
    return PlanGiven(
        gpus=request.gpus,
        hardware=cluster.hardware.name,
        gpus_per_node=cluster.gpus_per_node,
        network=cluster.network.name if cluster.network is not None and several else None,
        global_batch=request.global_batch,
        seq_len=request.policy.seq_len,
        fixed={name: str(value) for name, value in fixed.items()},
        reserve_frac=request.reserve_frac,
        device_total_bytes=cluster.hardware.memory_bytes,
        limit_bytes=request.limit_bytes,
        objective=request.objective,
        price_per_gpu_hour=request.price_per_gpu_hour,
        currency=request.currency,
        tokens=request.tokens,
        budget_gpu_hours=request.budget_gpu_hours,
    )


def _verdict(plan: Plan, winner: Scored | None, best: Scored, request: PlanRequest) -> list[str]:
    point = plan.winner
    if point is None or winner is None:
        over = format_bytes(best.total_bytes - request.limit_bytes)
        return [
            f"Nothing fits: of {plan.search.configurations:,} configurations the smallest, "
            f"{name_of(best.candidate)}, is {over} over.",
            *(
                f"It would with {one.option}={one.value}, which changes the training's numbers ({one.take}): "
                f"{one.best.name}."
                for one in plan.precisions
                if one.best.fit == "fits"
            ),
        ]
    mfu = "" if point.mfu is None else f", MFU {format_frac(point.mfu)}"
    lines = [
        f"{point.name}: {point.tokens_per_s:,.0f} tokens/s, a step takes {format_ns(point.step_ns)}{mfu}.",
        f"It takes {format_bytes(point.total_low_bytes)} to {format_bytes(point.total_bytes)} of "
        f"{format_bytes(plan.given.device_total_bytes)} on each GPU, and {format_frac(point.exposed_frac)} "
        f"of its step is exposed communication. {fit_sentence(room(winner, request), winner.error_bytes)}",
    ]
    others = [family for family in plan.families if family.best.name != point.name]
    if plan.simplest is not None:
        fixed = ",".join(f"{name}=1" for name in _DIMS if getattr(winner.candidate.mesh, name) > 1)
        lines.append(
            f"Simplest about as fast, {plan.simplest.family} ({plan.simplest.name}): {plan.simplest_why} "
            f"(--fix {fixed})."
        )
    elif others:
        second = others[0]
        place = "Next best" if second.best.step_ns >= point.step_ns else "Perhaps faster"
        if request.objective == "memory":
            place = "Next smallest"
        elif second.best.headroom_bytes < 0:
            place = "No other family surely fits; the nearest"
        lines.append(f"{place}, {second.best.family} ({second.best.name}): {second.why}.")
    return lines


def _assumptions(request: PlanRequest, winner: Scored | None) -> list[str]:
    extended = winner is not None and is_extended(winner.candidate.mesh, winner.candidate.policy)
    return [
        "the search scores every configuration from shallow executions of the engine; the winner is "
        f"{'' if winner is None or winner.confirmed else 'not yet '}"
        "confirmed by the engine, whose result corrects the configurations most like it",
        f"a configuration fits if its reserved peak, with every unknown at the high end of its range "
        f"(memory outside the allocator; the allocator, unless given), leaves {request.reserve_frac:.0%} of "
        "the device free; an uncertain one is chosen only where no configuration surely fits",
        "meshes keep tensor parallelism inside a node unless it is fixed; replicas are whole nodes or a "
        "part of one",
        *(
            ["three of the winner's micro-batches were simulated; each further one takes as long as the last"]
            if extended
            else []
        ),
        *(
            ["accelerate runs neither pipelines nor expert parallelism: there are no settings for it"]
            if winner is not None and (winner.candidate.mesh.pp > 1 or winner.candidate.mesh.ep > 1)
            else []
        ),
        *request.cluster.hardware.assumed(),
        *_network(request),
    ]


def _network(request: PlanRequest) -> list[str]:
    network = request.cluster.network
    if network is None or request.gpus <= request.cluster.gpus_per_node:
        return []
    return [f"network {network.name}: {network.source}"]


def room(one: Scored, request: PlanRequest) -> Room:
    """The memory that a configuration leaves free of its limit."""
    hardware, free = request.cluster.hardware.name, request.reserve_frac
    return Room(
        device=f"{hardware} with {free:.0%} left free" if free else hardware,
        total_bytes=request.limit_bytes,
        least_bytes=request.limit_bytes - one.total_bytes,
        most_bytes=request.limit_bytes - one.total_low_bytes,
        depends_on=one.depends_on or deciding(),
    )


def budget(point: PlanPoint | None, request: PlanRequest) -> PlanAnswer | None:
    """Report the cost of a training with that number of tokens, and whether a budget covers it."""
    if point is None or (request.tokens is None and request.budget_gpu_hours is None):
        return None
    each = point.gpu_hours_per_billion_tokens
    parts = []
    trained = None if request.budget_gpu_hours is None else round(request.budget_gpu_hours / each * 1e9)
    if request.tokens is not None:
        hours = request.tokens / 1e9 * each
        price = request.price_per_gpu_hour
        unit = request.currency or "in the currency of --price"
        cost = "" if price is None else f" and cost {format_amount(hours * price)} {unit}"
        days = format_amount(hours / request.gpus / 24)
        parts.append(
            f"{format_count(request.tokens)} tokens take {format_amount(hours)} GPU-hours, {days} days on "
            f"{request.gpus:,} GPUs{cost}"
        )
        if request.budget_gpu_hours is not None:
            budgeted = request.budget_gpu_hours
            left = budgeted - hours
            word = "within" if left >= 0 else "over"
            parts.append(
                f"{format_amount(abs(left))} GPU-hours {word} the budget of {format_amount(budgeted)}"
            )
    if trained is not None and request.budget_gpu_hours is not None:
        parts.append(
            f"{format_amount(request.budget_gpu_hours)} GPU-hours train {format_count(trained)} tokens"
        )
    return PlanAnswer(question="budget", value=trained, sentence="; ".join(parts) + ".")
