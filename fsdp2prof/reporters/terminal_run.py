"""A run as text: what was run, how it ended, what each rank left, how the model was sharded."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from fsdp2prof.reporters.layers import fold_names
from fsdp2prof.reporters.terminal import bullets, cell, heading, new_table, plural, right, stack
from fsdp2prof.reporters.terminal_memory import memory_view
from fsdp2prof.reporters.terminal_trace import trace_view
from fsdp2prof.reporters.wording import dtype_label
from fsdp2prof.results import RankSummary, RunAnalysis, RunSummary, ShardGroup
from fsdp2prof.units import format_bytes, format_count, format_ns

__all__ = ["run_view"]

_RANK_ROWS = 8

_STATE_STYLE = {"complete": "green", "partial": "yellow", "crashed": "bold red", "running": "yellow"}


def run_view(analysis: RunAnalysis, *, verbose: bool = False) -> RenderableType:
    """Lay out the run, then its trace and its memory."""
    run = analysis.run
    sections: list[RenderableType | None] = [
        _facts(run),
        _ranks(run.ranks, verbose),
        _sharding(run.shard_groups, verbose),
        bullets("What the recording says", run.messages, style="yellow"),
    ]
    if analysis.trace is not None:
        sections.append(trace_view(analysis.trace, source=run.path, verbose=verbose))
    if analysis.memory is not None:
        sections.append(memory_view(analysis.memory, source=run.path, verbose=verbose))
    sections.append(bullets("Warnings", analysis.warnings, style="yellow"))
    return stack(*sections)


def _facts(run: RunSummary) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    ended = "" if run.exit_code is None else f", exit code {run.exit_code}"
    table.add_row("  command", cell(shlex.join(run.command) or "-"))
    table.add_row("  state", cell(run.state + ended, _STATE_STYLE.get(run.state, "")))
    table.add_row("  started", cell(run.started_at or "-"))
    world = "-" if run.world_size is None else plural(run.world_size, "rank")
    hosts = f" on {', '.join(run.hosts[:4])}" + (", ..." if len(run.hosts) > 4 else "") if run.hosts else ""
    table.add_row("  world", cell(world + hosts))
    if run.versions:
        table.add_row("  versions", cell(", ".join(f"{k} {v}" for k, v in sorted(run.versions.items()))))
    if run.optimizers:
        table.add_row("  optimizer", cell("; ".join(run.optimizers)))
    title = heading("Run")
    title.append_text(cell(f"  {run.path}", "not bold"))
    return Group(title, table)


def _ranks(ranks: Sequence[RankSummary], verbose: bool) -> RenderableType | None:
    if not ranks:
        return None
    table = new_table(
        right("rank"),
        "state",
        "host",
        "device",
        right("steps"),
        right("median step"),
        "traced",
        "memory",
        Column("error", overflow="fold"),
    )
    trouble_first = sorted(ranks, key=lambda rank: (rank.state == "complete", rank.rank))
    shown = ranks if verbose or len(ranks) <= _RANK_ROWS else trouble_first[:_RANK_ROWS]
    for rank in shown:
        plain = [step.duration_ns for step in rank.steps if step.kind == "plain"]
        table.add_row(
            str(rank.rank),
            cell(rank.state, _STATE_STYLE.get(rank.state, "bold red")),
            cell(rank.host or "-"),
            cell(rank.device or "-"),
            str(len(rank.steps)),
            format_ns(median(plain)) if plain else "-",
            _captured(rank.traced_steps, rank.has_trace),
            _captured(rank.memory_steps, rank.has_memory),
            cell(rank.error or ""),
        )
    rest = len(ranks) - len(shown)
    more = [Text(f"  and {plural(rest, 'more rank')}; all with -v")] if rest else []
    return Group(heading("Ranks", "median over steps that were not recorded"), table, *more)


def _captured(steps: Sequence[int], there: bool) -> str:
    if not there:
        return "-"
    if not steps:
        return "yes"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"


def _sharding(groups: Sequence[ShardGroup], verbose: bool) -> RenderableType | None:
    if not groups:
        return None
    table = new_table(
        Column("layer", min_width=14, overflow="fold"),
        right("params"),
        right("elements"),
        right("shard"),
        right("padding"),
        "dtype",
        "gathered",
        "reduced",
        "mesh",
        "reshard",
    )
    for name, members in fold_names([(group.fqn, _same(group)) for group in groups], every=verbose):
        group = groups[members[0]]
        count = len(members)
        table.add_row(
            cell(name + (" (frozen)" if not group.requires_grad else "")),
            format_count(group.parameters * count),
            format_count(group.numel * count),
            "-" if group.sharded_bytes is None else format_bytes(group.sharded_bytes * count),
            "-" if group.padding_bytes is None else format_bytes(group.padding_bytes * count),
            cell(", ".join(dtype_label(dtype) for dtype in group.dtype.split(", "))),
            dtype_label(group.param_dtype or group.dtype),
            dtype_label(group.reduce_dtype or group.param_dtype or group.dtype),
            cell(group.mesh),
            _reshard(group),
        )
    return Group(heading("How the model is sharded", "one row per parameter group, on one rank"), table)


def _same(group: ShardGroup) -> tuple[object, ...]:
    """Everything but the name: groups equal in it fold into one row."""
    return tuple(getattr(group, name) for name in group.__slots__ if name != "fqn")


def _reshard(group: ShardGroup) -> str:
    after = group.reshard_after_forward
    policy = (
        {True: "after forward", False: "never"}[after] if isinstance(after, bool) else f"to {after} ranks"
    )
    return policy + (", offload" if group.offload else "")
