"""Why a configuration is not the winner, in one sentence with numbers."""

from __future__ import annotations

from fsdp2prof.estimators.planner.request import PlanRequest
from fsdp2prof.estimators.planner.search import Scored
from fsdp2prof.units import format_bytes, format_frac

__all__ = ["why_it_lost"]

_ALIKE = 0.005
"""Steps that differ by less are called equally fast."""


def why_it_lost(one: Scored, winner: Scored | None, request: PlanRequest) -> str:
    """Say by how much memory it misses, or what it spends more time on than the winner."""
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
    if slower < -_ALIKE and one.confirmed:
        return f"{format_frac(-slower)} less time, with other numbers or code: --fix it to take it"
    if slower < -_ALIKE:
        return f"{format_frac(-slower)} less time by the search, which the engine did not confirm"
    if slower <= _ALIKE:
        if one.total_bytes > winner.total_bytes:
            return f"as fast, with {format_bytes(one.total_bytes - winner.total_bytes)} more"
        return "as fast"
    return f"{format_frac(slower)} slower: {_spent(one, winner, request)}"


def _spent(one: Scored, winner: Scored, request: PlanRequest) -> str:
    """Name what adds most time over the winner."""
    parts = _parts(one)
    theirs = _parts(winner)
    worst = max(parts, key=lambda name: parts[name] - theirs[name])
    mine, other = parts[worst] / one.fast.step_ns, theirs[worst] / winner.fast.step_ns
    node = request.cluster.gpus_per_node
    mesh = one.candidate.mesh
    where = "on the network" if mesh.fsdp_size * mesh.tp * mesh.dp_replicate > node else "in the node"
    inside = "in the node" if max(mesh.tp, mesh.ep) <= node else "on the network"
    kinds = [word for word, size in (("tensor", mesh.tp), ("expert", mesh.ep)) if size > 1]
    text = {
        "exposed_fsdp": f"{format_frac(mine)} exposed {where}",
        "exposed_parallel": f"{format_frac(mine)} exposed {' and '.join(kinds)} parallelism {inside}",
        "bubble": f"{format_frac(mine)} pipeline bubble",
        "recompute": f"{format_frac(mine)} recomputes activations",
        "host": f"{format_frac(mine)} waits for the host",
        "compute": f"its kernels take {format_frac(parts['compute'] / max(1, theirs['compute']) - 1)} longer",
    }[worst]
    return text if worst == "compute" else f"{text} (winner {format_frac(other)})"


def _parts(one: Scored) -> dict[str, int]:
    fast = one.fast
    return {
        "exposed_fsdp": fast.exposed_fsdp_ns,
        "exposed_parallel": fast.exposed_parallel_ns,
        "bubble": fast.bubble_ns,
        "recompute": fast.recompute_ns,
        "host": fast.host_ns,
        "compute": fast.compute_ns - fast.recompute_ns,
    }
