"""``analyze trace --critical-path`` and its like: one rank's trace through HolisticTraceAnalysis."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fsdp2prof.commands.options import Output
from fsdp2prof.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from fsdp2prof.reporters.grid import Cell, Grid
    from fsdp2prof.tables import Trace

__all__ = ["view_options", "write_view"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_TEXT_ROWS = 25

_FLAGS = {
    "critical-path": "Instead: the longest chain of dependent work in a step.",
    "launch-statistics": "Instead: each launch with its kernel and the delay between.",
    "idle-causes": "Instead: idle time of every stream by cause.",
}


@dataclass(frozen=True, kw_only=True)
class _View:
    """What one of the views found: a table, and what to say around it."""

    name: str
    title: str
    note: str
    table: pd.DataFrame
    facts: dict[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()


def view_options(command: _Command) -> _Command:
    """Add the flags; the command gets ``view: str | None`` and ``diff: Path | None``."""
    decorated = click.option(
        "--diff",
        type=click.Path(path_type=Path),
        metavar="OTHER",
        help="Instead: operators and kernels that changed from the trace OTHER to this one.",
    )(command)
    for name, text in reversed(_FLAGS.items()):
        decorated = click.option(f"--{name}", "view", flag_value=name, default=None, help=text)(decorated)
    return decorated


def write_view(
    path: Path,
    view: str | None,
    diff: Path | None,
    *,
    ranks: Collection[int] | None,
    steps: Collection[int] | None,
    every: bool,
    output: Output,
) -> None:
    """Write one view of one rank (by default the lowest) and step (by default the middle one)."""
    if view is not None and diff is not None:
        raise UsageError(f"--{view} and --diff exclude each other")
    if output.format == "html":
        raise UsageError(f"--{view or 'diff'} has no HTML form: use text, json or csv")
    if steps is not None and len(steps) != 1:
        raise UsageError(f"--{view or 'diff'} looks at one step: give --steps one number")
    step = None if steps is None else min(steps)
    with output.progress(f"analysing the trace of {path}"):
        trace = _read(path, ranks)
        if diff is not None:
            found = _compare(_read(diff, ranks), trace, step)
        else:
            found = _VIEWS[view or ""](trace, step)
    if output.format == "csv":
        output.write(found.table.to_csv(index=False, lineterminator="\n"))
    elif output.format == "json":
        document = {
            "schema": f"fsdp2prof.trace.{found.name}/1",
            "rank": trace.rank,
            "source": trace.source,
            **found.facts,
            "rows": found.table.to_dict("records"),
            "warnings": list(found.warnings),
        }
        output.write(json.dumps(document, indent=2) + "\n")
    else:
        from fsdp2prof.reporters.terminal import bullets, grid_view, render, stack

        text = stack(grid_view(_grid(found, every)), bullets("Warnings", found.warnings, "yellow"))
        output.write(render(text, to_terminal=output.to_terminal))


def _read(path: Path, ranks: Collection[int] | None) -> Trace:
    from fsdp2prof.errors import InputError
    from fsdp2prof.readers.chrome_trace import read_trace
    from fsdp2prof.workflows.trace_files import find_traces

    files = [file for file in find_traces(path).files if ranks is None or file.rank in ranks]
    if not files:
        raise InputError(f"{path}: none of the chosen ranks is here")
    return read_trace(files[0].path, rank=files[0].rank)


def _critical_path(trace: Trace, step: int | None) -> _View:
    from fsdp2prof.analyzers.hta.views import critical_path
    from fsdp2prof.units import format_ns

    found = critical_path(trace, step)
    bounds = [(name, time) for name, time in found.bound_by_ns.items() if time]
    bound = ", ".join(f"{name.replace('_', ' ')} {format_ns(time)}" for name, time in bounds)
    return _View(
        name="critical_path",
        title=f"Critical path of rank {trace.rank}" + ("" if found.step is None else f", step {found.step}"),
        note=f"{format_ns(found.duration_ns)}: {bound}",
        table=found.segments,
        facts={"step": found.step, "duration_ns": found.duration_ns, "bound_by_ns": found.bound_by_ns},
        warnings=found.warnings,
    )


def _launch_statistics(trace: Trace, _: int | None) -> _View:
    from fsdp2prof.analyzers.hta.views import launch_statistics

    table = launch_statistics(trace).sort_values("delay_ns", ascending=False, kind="stable")
    title = f"Launches of rank {trace.rank}"
    return _View(name="launch_statistics", title=title, note="longest delay first", table=table)


def _idle_causes(trace: Trace, _: int | None) -> _View:
    from fsdp2prof.analyzers.hta.views import idle_causes

    title = f"Idle time of rank {trace.rank} by stream and cause"
    return _View(name="idle_causes", title=title, note="", table=idle_causes(trace))


def _compare(control: Trace, test: Trace, step: int | None) -> _View:
    from fsdp2prof.analyzers.hta.views import trace_diff

    return _View(
        name="diff",
        title=f"From {Path(control.source).name} to {Path(test.source).name}",
        note="largest difference first",
        table=trace_diff(control, test, control_step=step, test_step=step),
        facts={"control": control.source},
    )


_VIEWS: dict[str, Callable[[Trace, int | None], _View]] = {
    "critical-path": _critical_path,
    "launch-statistics": _launch_statistics,
    "idle-causes": _idle_causes,
}


def _grid(found: _View, every: bool) -> Grid:
    from fsdp2prof.reporters.grid import Col, Grid, plural

    table = found.table if every else found.table.head(_TEXT_ROWS)
    rest = len(found.table) - len(table)
    numeric = [kind.kind in "iuf" for kind in table.dtypes]
    return Grid(
        title=found.title,
        note=found.note,
        columns=[
            Col(
                str(name).removesuffix("_ns").replace("_frac", " share").replace("_", " "),
                "number" if is_number else "name",
            )
            for name, is_number in zip(table.columns, numeric, strict=True)
        ],
        rows=[
            [_cell(str(name), value) for name, value in zip(table.columns, row, strict=True)]
            for row in table.itertuples(index=False, name=None)
        ],
        more=f"and {plural(rest, 'more row')}" if rest else "",
    )


def _cell(name: str, value: Any) -> Cell:
    from fsdp2prof.units import format_count, format_frac, format_ns

    if name.endswith("_ns"):
        return format_ns(value)
    if name.endswith("_frac"):
        return format_frac(value)
    return format_count(value) if name.endswith("count") else str(value)
