"""The main numbers of a result for other programs: OpenMetrics, scalars for a tracker, a gate's Markdown and
JUnit.

Format: OpenMetrics 1.0 (openmetrics.io). Names end in their unit; seconds, bytes and ratios, as the format
asks for; unknown figures are omitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from fsdp2prof.analyzers.fail_on import METRICS, Outcome
from fsdp2prof.reporters.renderers.markdown import escaped
from fsdp2prof.results.memory import MemoryAnalysis
from fsdp2prof.results.run import RunAnalysis
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.results.watch import WatchedRank, WatchedRun
from fsdp2prof.units import plural
from fsdp2prof.vocabulary import layer_name, printable

_NS = 1e9
_UNITS = ("seconds", "bytes", "ratio")
_OF_A_RANK = ("rank", "device", "source")
"""Labels that distinguish one rank's value from another's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One gauge and its samples."""

    name: str
    """Ends in the unit, if it has one."""
    unit: str
    help: str
    samples: Sequence[tuple[Mapping[str, str], float]]
    """Labels and value."""


def open_metrics(result: Any) -> str:
    """Return the metrics of a run, a trace or a memory analysis as text, ending with ``# EOF``."""
    lines = []
    for metric in metrics_of(result):
        lines.append(f"# TYPE {metric.name} gauge")
        if metric.unit:
            lines.append(f"# UNIT {metric.name} {metric.unit}")
        lines.append(f"# HELP {metric.name} {_escaped(metric.help)}")
        lines += [f"{metric.name}{_labels(labels)} {value!r}" for labels, value in metric.samples]
    return "\n".join([*lines, "# EOF"]) + "\n"


def tracker_scalars(result: Any) -> dict[str, float]:
    """Return the figures of a run as a whole, for an experiment tracker: ``fsdp2prof/NAME/LABEL...``.

    Of values a rank each the largest counts; layers are left out, whose names would fill a tracker.
    """
    scalars: dict[str, float] = {}
    for metric in metrics_of(result):
        for labels, value in metric.samples:
            if "layer" in labels:
                continue
            rest = [text for label, text in labels.items() if label not in _OF_A_RANK]
            name = "/".join(["fsdp2prof", metric.name.removeprefix("fsdp2prof_"), *rest])
            scalars[name] = max(value, scalars.get(name, value))
    return scalars


def metrics_of(result: Any) -> list[Metric]:
    """Return the metrics of a run, a trace or a memory analysis; a metric without samples is left out."""
    if isinstance(result, WatchedRun):
        return [metric for metric in _watched(result) if metric.samples]
    if isinstance(result, RunAnalysis):
        trace, memory, findings = result.trace, result.memory, result.findings
    else:
        trace = result if isinstance(result, TraceAnalysis) else None
        memory = result if isinstance(result, MemoryAnalysis) else None
        findings = result.findings
    found = [*(_trace(trace) if trace else ()), *(_memory(memory) if memory else ())]
    severities = Counter(finding.severity for finding in findings)
    found.append(
        _gauge("findings", "Findings by severity", [({"severity": k}, n) for k, n in severities.items()])
    )
    return [metric for metric in found if metric.samples]


def _watched(run: WatchedRun) -> Iterator[Metric]:
    def of_ranks(value: Callable[[WatchedRank], float | None]) -> list[tuple[Mapping[str, str], float]]:
        known = ((rank.rank, value(rank)) for rank in run.ranks)
        return [({"rank": str(rank)}, number) for rank, number in known if number is not None]

    window = f"median of the last {run.window} steps"
    yield _gauge("watched_step", "The last step", of_ranks(lambda rank: rank.last_step))
    yield _gauge(
        "watched_step_seconds",
        f"A training step, {window}",
        of_ranks(lambda rank: _seconds(rank.step_ns)),
    )
    yield _gauge(
        "watched_exposed_seconds",
        f"Waiting for communication in a step, {window}",
        of_ranks(lambda rank: _seconds(rank.exposed_ns)),
    )
    yield _gauge(
        "watched_peak_bytes",
        "Peak memory so far: reserved on a GPU, resident on a CPU",
        of_ranks(lambda rank: rank.peak_bytes),
    )
    yield _gauge(
        "watched_allocator_retries",
        "Times the allocator freed its cache and retried",
        of_ranks(lambda rank: rank.retries),
    )
    if run.tokens_per_s is not None:
        yield _gauge("watched_tokens_rate", "Tokens a second, all ranks", [({}, run.tokens_per_s)])


def _trace(trace: TraceAnalysis) -> Iterator[Metric]:
    totals, unrecorded = trace.totals, trace.unrecorded_step
    steps = {
        "traced": totals.step_ns,
        "unrecorded": None if unrecorded is None else unrecorded.median_ns,
    }
    yield _gauge(
        "step_seconds",
        "A training step: mean of the traced, median of the unrecorded ones",
        _known("kind", {kind: _seconds(time) for kind, time in steps.items()}),
    )
    yield _gauge(
        "step_part_seconds",
        "Disjoint parts of the mean traced step",
        _known("part", {part: _seconds(time) for part, time in totals.breakdown_ns.items()}),
    )
    ratios = {
        "exposed_ratio": (totals.exposed_frac, "Exposed communication as a fraction of the step"),
        "overlap_ratio": (totals.overlap_frac, "Fraction of communication that is hidden"),
        "attributed_ratio": (totals.attributed_frac, "Fraction of communication time attributed to a layer"),
        "mfu_ratio": (totals.mfu, "Achieved operations over the device's peak"),
    }
    for name, (value, text) in ratios.items():
        yield _gauge(name, text, [] if value is None else [({}, value)])
    layers = [
        (
            {
                "layer": layer_name(row.fqn),
                "phase": row.phase,
                "op": row.op,
                "group": row.group or "",
                "dtype": row.dtype or "",
            },
            row,
        )
        for row in trace.by_layer
    ]
    yield _gauge(
        "layer_communication_seconds",
        "Collectives of a layer, per rank and step",
        [(labels, row.total_ns / _NS) for labels, row in layers],
    )
    yield _gauge(
        "layer_exposed_seconds",
        "Exposed communication of a layer, per rank and step",
        [(labels, row.exposed_ns / _NS) for labels, row in layers],
    )
    yield _gauge(
        "layer_wire_bytes",
        "Bytes sent for a layer, per rank and step",
        [(labels, row.wire_bytes) for labels, row in layers if row.wire_bytes is not None],
    )
    waits = trace.cross_rank.wait_caused_ns
    yield _gauge(
        "rank_wait_caused_seconds",
        "Waiting of the other ranks for this one, over the analysed steps",
        [({"rank": rank}, time / _NS) for rank, time in waits.items()],
    )


def _memory(memory: MemoryAnalysis) -> Iterator[Metric]:
    places = [
        ({"rank": str(one.rank), "device": one.device, "source": one.source}, one) for one in memory.ranks
    ]
    yield _gauge(
        "peak_allocated_bytes",
        "Peak of allocated memory",
        [(labels, one.peak.allocated_bytes) for labels, one in places],
    )
    yield _gauge(
        "peak_reserved_bytes",
        "Reserved memory at that peak",
        [(labels, one.peak.reserved_bytes) for labels, one in places if one.peak.reserved_bytes is not None],
    )
    yield _gauge(
        "peak_category_bytes",
        "Peak by kind",
        [
            ({**labels, "category": name}, size)
            for labels, one in places
            for name, size in one.peak.categories.items()
        ],
    )


def _gauge(name: str, text: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> Metric:
    """Return a metric, with its unit from its name.

    Of samples with equal labels (recordings of one rank) the largest counts.
    """
    largest: dict[tuple[tuple[str, str], ...], float] = {}
    for labels, value in samples:
        key = tuple(labels.items())
        largest[key] = max(value, largest.get(key, value))
    unit = name.rpartition("_")[2]
    return Metric(
        name=f"fsdp2prof_{name}",
        unit=unit if unit in _UNITS else "",
        help=text,
        samples=[(dict(key), value) for key, value in largest.items()],
    )


def _known(label: str, values: Mapping[str, float | None]) -> list[tuple[dict[str, str], float]]:
    return [({label: name}, value) for name, value in values.items() if value is not None]


def _seconds(time_ns: float | None) -> float | None:
    return None if time_ns is None else time_ns / _NS


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(printable(value))}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def markdown(outcomes: Sequence[Outcome], verdict: Sequence[str] = ()) -> str:
    """Return a heading, the verdict, and a row a condition: its worst value, and whether it held."""
    failed = sum(outcome.failed for outcome in outcomes)
    met = f"all {len(outcomes)} conditions are met"
    rows = [
        "| | fails if | value | where | what |",
        "|---|---|---:|---|---|",
        *(
            f"| {'❌' if one.failed else '✅'} | `{one.condition.text}` | {one.value:.4g} "
            f"| {_where(one)} | {METRICS[one.condition.metric].description} |"
            for one in outcomes
        ),
    ]
    outcome = f"{failed} of {plural(len(outcomes), 'condition')} failed" if failed else met
    title = f"### fsdp2prof: {outcome}"
    said = [escaped(line) for line in verdict]
    return "\n\n".join([title, *said, "\n".join(rows)]) + "\n"


def junit(outcomes: Sequence[Outcome]) -> bytes:
    """Return a test suite with one case per condition; a condition that held is a failure."""
    failed = sum(outcome.failed for outcome in outcomes)
    suite = ElementTree.Element(
        "testsuite", name="fsdp2prof", tests=str(len(outcomes)), failures=str(failed), errors="0"
    )
    for outcome in outcomes:
        case = ElementTree.SubElement(
            suite, "testcase", classname="fsdp2prof.gate", name=printable(outcome.condition.text)
        )
        if outcome.failed:
            ElementTree.SubElement(case, "failure", message=printable(str(outcome)))
        else:
            ElementTree.SubElement(case, "system-out").text = printable(str(outcome))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _where(outcome: Outcome) -> str:
    if outcome.rank is None:
        return "all ranks"
    others = f", {outcome.ranks} ranks in all" if outcome.ranks > 1 else ""
    return f"rank {outcome.rank}{others}"
