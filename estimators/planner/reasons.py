"""Why a configuration is not the winner, in one sentence with numbers."""

from __future__ import annotations

from fsdp2prof.estimators.planner.request import PlanRequest
from fsdp2prof.estimators.planner.search import Scored
from fsdp2prof.results.plan import FastPathError
from fsdp2prof.units import format_bytes, format_frac

__all__ = ["equal_within", "time_parts", "what_it_wins", "why_it_lost"]

_ALIKE = 0.005
"""Steps that differ by less are called equally fast."""
_LEAST_TENTHS = 2
"""Tenths of a percent of a step that are worth a name."""
_MOST_NAMED = 4


def equal_within(error: FastPathError) -> float:
    """Return the difference of two steps that the search cannot tell from none: its own largest error."""
    known = (abs(one) for one in (error.step_low_frac, error.step_high_frac) if one is not None)
    return max(_ALIKE, *known, _ALIKE)


def why_it_lost(one: Scored, winner: Scored | None, request: PlanRequest, equal_frac: float = _ALIKE) -> str:
    """Say by how much memory it misses, or what it spends more time on than the winner.

    A difference below ``equal_frac`` from what only the search scored is called equal.
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
        return f"{format_frac(-slower)} less time, with other numbers or code: --fix it to take it"
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
    """Say what the best configuration in another precision takes less than the winner."""
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
    """Name what takes more time than in the winner and what takes less, in parts of the winner's step.

    What is named adds up to the difference, to a tenth of a percent.
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
        parts.append((rest, "the rest" if named else "a little of everything"))
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
    """Return what a step's nanoseconds go to; they sum to the step.

    What the engine does not tell apart is divided as the search has it: exposed communication, and how much
    of the kernels' time is recomputation.
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
