"""Documents of one rank's trace through HolisticTraceAnalysis: critical path, launches, idle causes, diff."""

from __future__ import annotations

from dataclasses import asdict

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Document, Facts, Section, Table
from fsdp2prof.reporters.documents import builds
from fsdp2prof.results.hta import CriticalPath, IdleCauses, LaunchStatistics, TraceDiff
from fsdp2prof.units import format_ns
from fsdp2prof.vocabulary import PATH_BOUNDS, STREAM_IDLE_CAUSES

_ROWS = 25


@builds(CriticalPath)
def critical_path_document(found: CriticalPath) -> Document:
    """Show the limits of the critical path, then its segments."""
    bounds = c.table(
        "bound_by",
        "Time by bound",
        [c.word("bound_by", "bound by", PATH_BOUNDS, of=0), c.time("duration_ns", "time", of=1)],
        asdict(found.bound_by_ns).items(),
        totals=[{"bound_by": "all", "duration_ns": found.duration_ns}],
    )
    segments = c.table(
        "segments",
        "Events on the path",
        [
            c.kernel(),
            c.word("bound_by", "bound by", PATH_BOUNDS),
            c.time("duration_ns", "time"),
            c.count("count", "pieces"),
            c.frac("duration_frac", "share"),
            c.bar("duration_frac"),
        ],
        found.rows,
        note="longest first",
        limit=_ROWS,
    )
    return Document(
        title=f"Critical path of {_rank(found.rank)}" + _of_step(found.step),
        subtitle=found.source,
        sections=[_section(bounds), _section(segments)],
        data=[segments],
    )


@builds(LaunchStatistics)
def launch_document(found: LaunchStatistics) -> Document:
    """Show the launches by what they started, then each launch."""
    works = c.table(
        "by_name",
        "By kernel and copy",
        [
            c.kernel(),
            c.count("count", "launches"),
            c.time("host_ns", "calls"),
            c.time("device_ns", "work"),
            c.time("delay_ns", "delays"),
            c.time("delay_max_ns", "longest\ndelay"),
        ],
        found.by_name,
        note="sums, longest delays first",
        limit=_ROWS,
        remarks=[
            "A delay is time in the device's queue: long if the host is ahead, near zero if the device waits "
            "for the host."
        ],
    )
    launches = c.table(
        "launches",
        "Each launch",
        [
            c.number("correlation"),
            c.kernel(),
            c.time("host_ns", "call"),
            c.time("device_ns", "work"),
            c.time("delay_ns", "delay"),
        ],
        found.rows,
        note="longest delay first",
        limit=_ROWS,
        noun="launch",
    )
    return Document(
        title=f"Launches of {_rank(found.rank)}",
        subtitle=found.source,
        sections=[_section(works), _section(launches)],
        data=[launches],
    )


@builds(IdleCauses)
def idle_document(found: IdleCauses) -> Document:
    """Lay out how busy each stream is, then why it is not."""
    streams = c.table(
        "streams",
        "Streams",
        [
            c.number("stream"),
            c.time("busy_ns", "busy"),
            c.time("idle_ns", "idle"),
            c.frac("idle_frac", "idle share"),
            c.bar("idle_frac"),
        ],
        found.streams,
        note="each from its first to its last activity, the busiest first",
        limit=_ROWS,
        noun="stream",
    )
    causes = c.table(
        "causes",
        "Idle time by cause",
        [
            c.number("stream"),
            c.word("cause", None, STREAM_IDLE_CAUSES),
            c.time("idle_ns", "idle"),
            c.frac("idle_frac", "share"),
            c.bar("idle_frac"),
        ],
        found.rows,
        note="longest first",
        limit=_ROWS,
    )
    return Document(
        title=f"Idle time of {_rank(found.rank)} by stream and cause",
        subtitle=found.source,
        sections=[_section(streams), _section(causes)],
        data=[causes],
    )


@builds(TraceDiff)
def diff_document(found: TraceDiff) -> Document:
    """Lay out the two sides, then operators and kernels by how much they changed."""
    sides = {
        "before": f"{found.control}{_of_step(found.control_step)}{_lasting(found.control_step_ns)}",
        "after": f"{found.source}{_of_step(found.step)}{_lasting(found.step_ns)}",
    }
    changes = c.table(
        "changes",
        "Operators and kernels that changed",
        [
            c.kernel(),
            c.text("where", "on the"),
            c.time("control_ns", "time\nbefore"),
            c.time("test_ns", "time\nafter"),
            c.signed(c.time("diff_ns", "change")),
            c.count("control_count", "calls\nbefore"),
            c.count("test_count", "calls\nafter"),
            c.signed(c.count("diff_count", "change")),
        ],
        found.rows,
        note="in one step, largest difference first; an operator's time includes its callees",
        limit=_ROWS,
        noun="name",
    )
    return Document(
        title=f"Changes on {_rank(found.rank)}",
        sections=[
            Section(anchor="sides", title="Compared", blocks=[Facts(title="Compared", pairs=sides)]),
            _section(changes),
        ],
    )


def _section(table: Table) -> Section:
    return Section(anchor=table.name, title=table.title, blocks=[table])


def _rank(rank: int | None) -> str:
    return "a rank" if rank is None else f"rank {rank}"


def _of_step(step: int | None) -> str:
    return "" if step is None else f", step {step}"


def _lasting(duration_ns: int | None) -> str:
    return "" if duration_ns is None else f" of {format_ns(duration_ns)}"
