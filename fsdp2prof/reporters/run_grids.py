"""The tables of a run: facts about it, what each rank left, how the model was sharded."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from statistics import median

from fsdp2prof.analyzers.layers import fold_names
from fsdp2prof.labels import qualified_fqn
from fsdp2prof.reporters.grid import Cell, Col, Grid, plural
from fsdp2prof.results import RunRank, RunSummary, ShardGroup
from fsdp2prof.units import format_bytes, format_count, format_ns
from fsdp2prof.vocabulary import dtype_label

__all__ = ["rank_grid", "run_facts", "sharding_grid"]

_RANK_ROWS = 8


def run_facts(run: RunSummary) -> dict[str, str]:
    """Return what a person asks first about a run, label -> text."""
    ended = "" if run.exit_code is None else f", exit code {run.exit_code}"
    world = "unknown" if run.world_size is None else plural(run.world_size, "rank")
    hosts = ", ".join(run.hosts[:4]) + (", ..." if len(run.hosts) > 4 else "")
    facts = {
        "command": shlex.join(run.command),
        "state": run.state + ended,
        "started": run.started_at,
        "world": world + (f" on {hosts}" if hosts else ""),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(run.versions.items())),
        "optimizer": "; ".join(run.optimizers),
    }
    return {name: text for name, text in facts.items() if text}


def rank_grid(run: RunSummary, *, every: bool = False) -> Grid | None:
    """Return what each rank left, those in trouble first when not all are shown; None without ranks."""
    ranks = run.ranks
    if not ranks:
        return None
    trouble_first = sorted(ranks, key=lambda rank: (rank.state == "complete", rank.rank))
    shown = ranks if every or len(ranks) <= _RANK_ROWS else trouble_first[:_RANK_ROWS]
    rest = len(ranks) - len(shown)
    errors = any(rank.error for rank in shown)
    return Grid(
        title="Ranks",
        note="median over the steps that were not recorded",
        columns=[
            Col("rank", "number"),
            Col("state", "state"),
            Col("host"),
            Col("device"),
            Col("steps", "number"),
            Col("median step", "number"),
            Col("traced"),
            Col("memory"),
            *([Col("error", "name")] if errors else []),
        ],
        rows=[[*_rank_cells(rank), *([rank.error or ""] if errors else [])] for rank in shown],
        more=f"and {plural(rest, 'more rank')}" if rest else "",
    )


def _rank_cells(rank: RunRank) -> list[Cell]:
    plain = [step.duration_ns for step in rank.steps if step.kind == "plain"]
    return [
        str(rank.rank),
        rank.state,
        rank.host or "-",
        rank.device or "-",
        str(len(rank.steps)),
        format_ns(median(plain)) if plain else "-",
        _captured(rank.traced_steps, rank.has_trace),
        _captured(rank.memory_steps, rank.has_memory),
    ]


def _captured(steps: Sequence[int], there: bool) -> str:
    if not there:
        return "-"
    if not steps:
        return "yes"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"


def sharding_grid(run: RunSummary, *, every: bool = False) -> Grid | None:
    """Return the parameter groups, equal siblings folded unless ``every``; None where none is known."""
    groups = run.shard_groups
    if not groups:
        return None
    roots = 1 + max(group.root for group in groups)
    names = [qualified_fqn(group.fqn, group.root, roots) for group in groups]
    folded = fold_names(list(zip(names, map(_all_but_name, groups), strict=True)), every=every)
    return Grid(
        title="How the model is sharded",
        note="one row per parameter group, on one rank",
        columns=[
            Col("layer", "name"),
            Col("params", "number"),
            Col("elements", "number"),
            Col("shard", "number"),
            Col("padding", "number"),
            Col("dtype"),
            Col("gathered"),
            Col("reduced"),
            Col("mesh"),
            Col("reshard"),
        ],
        rows=[_group_cells(name, groups[members[0]], len(members)) for name, members in folded],
    )


def _all_but_name(group: ShardGroup) -> tuple[object, ...]:
    return tuple(getattr(group, name) for name in group.__slots__ if name != "fqn")


def _group_cells(name: str, group: ShardGroup, count: int) -> list[Cell]:
    return [
        name + ("" if group.requires_grad else " (frozen)"),
        format_count(group.parameters * count),
        format_count(group.numel * count),
        "-" if group.sharded_bytes is None else format_bytes(group.sharded_bytes * count),
        "-" if group.padding_bytes is None else format_bytes(group.padding_bytes * count),
        ", ".join(dtype_label(dtype) for dtype in group.dtype.split(", ")),
        dtype_label(group.param_dtype or group.dtype),
        dtype_label(group.reduce_dtype or group.param_dtype or group.dtype),
        group.mesh,
        _reshard(group),
    ]


def _reshard(group: ShardGroup) -> str:
    after = group.reshard_after_forward
    policies: dict[bool | int, str] = {True: "after forward", False: "never"}
    policy = policies[after] if isinstance(after, bool) else f"to {after} ranks"
    return policy + (", offload" if group.offload else "")
