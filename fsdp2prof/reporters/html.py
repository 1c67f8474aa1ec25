"""The report: one offline HTML file with the run, its trace and its memory.

Everything a trace or a run says is untrusted. Text is escaped by the templates (autoescape), chart data by
:func:`_json_in_script`, and the page's content security policy allows the report's own scripts by their
hashes and nothing else: no request leaves the file.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from fsdp2prof import __version__
from fsdp2prof.reporters.advice import memory_advice, trace_advice
from fsdp2prof.reporters.allocator_grids import fragmentation_grid, oom_lines, remedy_grid
from fsdp2prof.reporters.cause_grids import bandwidth_grid, late_grid, sync_grid
from fsdp2prof.reporters.charts.figure import Figure
from fsdp2prof.reporters.charts.memory import course_chart, memory_layer_chart
from fsdp2prof.reporters.charts.trace import layer_chart, step_chart
from fsdp2prof.reporters.grid import Col, Grid, plural
from fsdp2prof.reporters.memory_grids import (
    block_grid,
    category_grid,
    fullest_first,
    layer_peak_grid,
    matrix_grid,
    peak_grid,
)
from fsdp2prof.reporters.run_grids import rank_grid, run_facts, sharding_grid
from fsdp2prof.reporters.step_rows import step_rows
from fsdp2prof.reporters.trace_grids import (
    NO_COLLECTIVE,
    breakdown_grid,
    layer_grid,
    rank_lines,
    step_numbers,
)
from fsdp2prof.results import (
    SEVERITIES,
    Finding,
    MemoryAnalysis,
    RankMemory,
    RunAnalysis,
    RunSummary,
    TraceAnalysis,
)
from fsdp2prof.units import format_bytes, format_frac, format_ns
from fsdp2prof.vocabulary import layer_name, printable

__all__ = ["render"]


_WORTH_A_NUMBER = 0.001
"""Unattributed share of the peak from which it is among the key figures."""


_ROW_LIMIT = 2000
"""Rows of an unabridged table: a page of thousands of ranks stays one that a browser opens at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """One titled part of a section: a chart, a table, or both."""

    grid: Grid | None = None
    every: Grid | None = None
    """The same table unabridged, behind a fold."""
    figure: Figure | None = None
    title: str = ""
    """Title of a chart without a table."""
    note: str = ""
    lines: Sequence[str] = ()
    """Sentences instead of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Section:
    """One heading of the report."""

    anchor: str
    title: str
    lead: str = ""
    """A sentence under the title."""
    blocks: Sequence[_Block] = ()
    lines: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Page:
    """What the template shows."""

    title: str
    facts: Mapping[str, str]
    numbers: Sequence[tuple[str, str]]
    """Key figures: value, label."""
    findings: Sequence[Finding]
    advice: Sequence[str]
    warnings: Sequence[str]
    sections: Sequence[_Section] = field(default=())


def render(source: str, analysis: RunAnalysis | TraceAnalysis | MemoryAnalysis) -> str:
    """Return the report of a run, or of only its trace or memory; ``source`` is its title."""
    run = analysis.run if isinstance(analysis, RunAnalysis) else None
    trace = analysis.trace if isinstance(analysis, RunAnalysis) else analysis
    memory = analysis.memory if isinstance(analysis, RunAnalysis) else analysis
    trace = trace if isinstance(trace, TraceAnalysis) else None
    memory = memory if isinstance(memory, MemoryAnalysis) else None
    sections = []
    if trace is not None:
        sections += [_step_section(trace), _communication_section(trace)]
    if memory is not None:
        sections.append(_memory_section(memory))
    if run is not None:
        sections.append(_run_section(run))
    parts = [part for part in (trace, memory) if part is not None]
    said = [*run.messages, *analysis.warnings] if run else []
    page = _Page(
        title=source,
        facts=run_facts(run) if run else {},
        numbers=[*(_trace_numbers(trace) if trace else ()), *(_memory_numbers(memory) if memory else ())],
        findings=sorted(
            (finding for part in parts for finding in part.findings),
            key=lambda finding: SEVERITIES.index(finding.severity),
        ),
        advice=[*(trace_advice(trace) if trace else ()), *(memory_advice(memory) if memory else ())],
        warnings=[*said, *(line for part in parts for line in part.warnings)],
        sections=sections,
    )
    return _fill(page)


def _trace_numbers(trace: TraceAnalysis) -> list[tuple[str, str]]:
    steps = [step for rank in trace.ranks for step in rank.steps]
    if not steps:
        return []
    window = sum(step.duration_ns for step in steps)
    exposed = sum(rank.communication.exposed_ns for rank in trace.ranks)
    total = sum(rank.communication.total_ns for rank in trace.ranks)
    compute = sum(step.breakdown_ns.compute for step in steps)
    found = trace.attribution
    return [
        (format_ns(window / len(steps)), "mean step"),
        (format_frac(compute / window), "of it compute"),
        (format_frac(exposed / window), "of it exposed communication"),
        (format_frac(1 - exposed / total if total else None), "of communication overlapped"),
        (
            format_frac(found.attributed_ns / found.comm_ns if found.comm_ns else None),
            "of communication on a layer",
        ),
    ]


def _memory_numbers(memory: MemoryAnalysis) -> list[tuple[str, str]]:
    if not memory.ranks:
        return []
    rank = fullest_first(memory)[0]
    unplaced = rank.peak.categories.get("unattributed", 0) / max(1, rank.peak.allocated_bytes)
    numbers = [(format_bytes(rank.peak.allocated_bytes), f"peak memory, rank {rank.rank}")]
    if rank.peak.reserved_bytes is not None:
        numbers.append((format_bytes(rank.peak.reserved_bytes), "reserved"))
    if unplaced >= _WORTH_A_NUMBER:
        numbers.append((format_frac(unplaced), "of it unattributed"))
    return numbers


def _step_section(trace: TraceAnalysis) -> _Section:
    part = _Block(
        grid=breakdown_grid(trace),
        every=breakdown_grid(trace, every=True),
        figure=step_chart(step_rows(trace)),
    )
    return _Section(
        anchor="step",
        title="Where the step goes",
        lead=f"{plural(len(trace.ranks), 'rank')}, {step_numbers(trace)}. The parts are disjoint and sum to "
        "the window exactly. Communication counts only where no compute or FSDP copy runs meanwhile.",
        blocks=_present([part]),
    )


def _communication_section(trace: TraceAnalysis) -> _Section:
    part = _Block(
        grid=layer_grid(trace),
        every=layer_grid(trace, every=True),
        figure=layer_chart(trace.layers, trace.by_layer),
    )
    lead = "Layers in model order: the bar is what is exposed, the tick all of the layer's communication."
    return _Section(
        anchor="communication",
        title="Communication by layer",
        lead=lead if part.figure else NO_COLLECTIVE,
        blocks=_present(
            [
                part,
                _Block(grid=late_grid(trace), every=late_grid(trace, every=True)),
                _Block(grid=bandwidth_grid(trace), every=bandwidth_grid(trace, every=True)),
                _Block(grid=sync_grid(trace), every=sync_grid(trace, every=True)),
            ]
        ),
        lines=rank_lines(trace),
    )


def _present(blocks: Sequence[_Block]) -> list[_Block]:
    return [block for block in blocks if block.grid or block.figure or block.lines]


def _memory_section(memory: MemoryAnalysis) -> _Section:
    ranks = fullest_first(memory)
    blocks = [_Block(grid=peak_grid(memory), every=peak_grid(memory, every=True))]
    for rank in ranks[:1]:
        blocks += _memory_blocks(rank)
    return _Section(
        anchor="memory",
        title="Memory",
        lead="The peak is the instant of the most allocated bytes; its categories and layers sum to it "
        "exactly. The rank with the highest peak is shown in detail.",
        blocks=blocks,
    )


def _memory_blocks(rank: RankMemory) -> list[_Block]:
    blocks = [
        _Block(lines=oom_lines(rank), title=f"Out of memory on rank {rank.rank}"),
        _Block(grid=remedy_grid(rank)),
        _Block(
            figure=course_chart(rank), title=f"Memory of rank {rank.rank} over time", note="allocated bytes"
        ),
        _Block(grid=category_grid(rank)),
        _Block(grid=matrix_grid(rank), every=matrix_grid(rank, every=True), figure=memory_layer_chart(rank)),
        _Block(grid=block_grid(rank), every=block_grid(rank, every=True)),
        _Block(grid=layer_peak_grid(rank), every=layer_peak_grid(rank, every=True)),
        _Block(grid=fragmentation_grid(rank)),
    ]
    return _present(blocks)


def _run_section(run: RunSummary) -> _Section:
    blocks = [
        _Block(grid=rank_grid(run), every=rank_grid(run, every=True)),
        _Block(grid=sharding_grid(run), every=sharding_grid(run, every=True)),
        _Block(grid=_pairs("Recording options", run.options)),
        _Block(grid=_pairs("Environment", run.environment)),
    ]
    return _Section(anchor="run", title="What was run", blocks=_present(blocks))


def _pairs(title: str, values: Mapping[str, Any]) -> Grid | None:
    rows = [[name, str(value)] for name, value in sorted(values.items()) if value is not None]
    return Grid(title=title, columns=[Col("name"), Col("value", "name")], rows=rows) if rows else None


# Filling the template.


def _fill(page: _Page) -> str:
    from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"printable": printable, "layer_name": layer_name}
    blocks = [block for section in page.sections for block in section.blocks]
    figures = [block.figure for block in blocks if block.figure]
    scripts = [get_plotlyjs(), _asset("report.js")] if figures else []
    return environment.get_template("report.html.j2").render(
        page=page,
        row_limit=_ROW_LIMIT,
        version=__version__,
        css=Markup(_asset("report.css")),
        scripts=[Markup(script) for script in scripts],
        script_hashes=[_hash(script) for script in scripts],
        figures=Markup(_json_in_script(figures)),
    )


@cache
def _asset(name: str) -> str:
    return files("fsdp2prof.reporters").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Hash of an inline script as content security policies write it."""
    return "sha256-" + b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _json_in_script(value: Any) -> str:
    """Encode JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
