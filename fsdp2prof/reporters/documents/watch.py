"""Document and chart of a watched job."""

from __future__ import annotations

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.charts.figure import INK, Figure, figure
from fsdp2prof.reporters.document import Chart, Document, KeyFigure, Section, Spark, Table
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.formats import show_frac, show_ns
from fsdp2prof.results.watch import WatchedRun
from fsdp2prof.units import plural

_MS = 1e6


def steps_chart(run: WatchedRun) -> Figure:
    """Show how long each step took."""
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": "step",
        "x": [one.step for one in run.steps],
        "y": [one.duration_ns / _MS for one in run.steps],
        "line": {"width": 1.5, "color": INK},
        "hovertemplate": "step %{x}: %{y:.3f} ms",
    }
    return figure([line], height=240, x="step", y="ms")


_RANKS = 16
_COLUMNS = 100


@builds(WatchedRun)
def watch_document(run: WatchedRun) -> Document:
    """Lay out the last steps of a job and its ranks."""
    numbers = [KeyFigure(value=show_ns(run.step_ns), label="per step")]
    if run.exposed_frac is not None:
        numbers.append(KeyFigure(value=show_frac(run.exposed_frac), label="of it waiting for communication"))
    if run.tokens_per_s is not None:
        numbers.append(KeyFigure(value=f"{run.tokens_per_s:,.0f}", label="tokens/s"))
    return Document(
        title=f"Run {run.path}",
        subtitle=f"{run.state}, {plural(len(run.ranks), 'rank')}, step {run.last_step}",
        numbers=numbers,
        sections=[Section(anchor="steps", title="The last steps", blocks=[_chart(run), _ranks(run)])],
    )


def _chart(run: WatchedRun) -> Chart:
    durations = [float(one.duration_ns) for one in run.steps[-_COLUMNS:]]
    return Chart(
        name="steps",
        title=f"The newest step took {show_ns(durations[-1])}",
        note="median over ranks, the newest on the right",
        figure=steps_chart(run),
        spark=Spark(values=durations, full=show_ns(max(durations))),
    )


def _ranks(run: WatchedRun) -> Table:
    columns = [
        c.number("rank"),
        c.number("last_step", "step"),
        c.ms("step_ns", "takes\nms"),
        c.ms("exposed_ns", "waits\nms"),
        c.ms("busy_ns", "busy\nms"),
        c.ms("behind_ns", "behind\nms"),
        c.sized("peak_bytes", "peak"),
        c.sized("growth_bytes", "growth"),
        c.number("retries"),
    ]
    note = f"medians of the last {run.window} steps, those behind most first; peak: {_memory(run)}"
    return c.table("ranks", "Ranks", columns, run.ranks, note=note, limit=_RANKS, noun="rank")


def _memory(run: WatchedRun) -> str:
    """Report which memory the peak counts: more than the tensors that ``analyze memory`` counts."""
    if any(one.reserved_peak_bytes is not None for one in run.ranks):
        return "memory that the allocator reserved"
    return "resident memory of the process, more than its tensors"
