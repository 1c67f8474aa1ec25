"""Our tables as HolisticTraceAnalysis's in-memory trace, so that its analyses run without its loader.

Its loader is slow, drops device work queued before the first step, keeps times as float64 microseconds since
whenever the clock began, and knows no HIP calls. Here its data frame is built from an :class:`EventTable`:
exact integer nanoseconds since the first event, no negative duration, HIP and driver calls under the names it
looks for. HTA does arithmetic on whatever unit it is given, so what its analyses return is nanoseconds.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdp2prof import backends
from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.launches import host_launches
from fsdp2prof.analyzers.steps import host_steps
from fsdp2prof.errors import TraceError
from fsdp2prof.tables.columns import BoolArray, CompactArray, IntArray
from fsdp2prof.tables.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

RANK = 0
"""The rank every frame is filed under: one trace at a time."""
_WHOLE_TRACE = "ProfilerStep#0"
"""The step everything belongs to in a trace without ``ProfilerStep#N`` ranges."""
_FIRST_INDEX = 1
"""HTA's index of the first event: its ``index_correlation`` cannot tell index 0 from "not in the file"."""
_HOST_PID = 1 << 20
"""Process of all host events: no device has this index, so host threads and streams stay apart."""


def hta_trace(trace: Trace, *, cuda_names: bool = True) -> Any:
    """Build an ``hta.common.trace.Trace`` holding one rank (:data:`RANK`).

    ``cuda_names`` gives HIP and driver calls their CUDA names. Annotations on the device are left out: HTA
    takes them for host work.
    """
    from hta.common.trace import Trace as HtaTrace

    built = HtaTrace(trace_files={}, trace_dir="")
    built.traces[RANK] = _frame(trace, built.symbol_table, backends.cuda_names() if cuda_names else {})
    built.meta_data[RANK] = {}
    built.is_parsed = True
    return built


@contextlib.contextmanager
def calling_hta(what: str, trace: Trace) -> Iterator[None]:
    """Call HTA silently: it logs, prints, warns, and raises arbitrary errors.

    Such an error becomes a ``TraceError`` that names the analysis and the trace.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except (ValueError, TypeError, LookupError, NameError, AttributeError, AssertionError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise TraceError(f"{trace.source}: HTA cannot compute the {what} of this trace: {reason}") from error
    finally:
        logging.disable(disabled)


def event_rows(index: pd.Series) -> IntArray:
    """Event rows of HTA's indices; -1 where there is none."""
    return np.where(index.isna(), -1, index.fillna(0) - _FIRST_INDEX).astype(np.int64)


def _frame(trace: Trace, symbols: Any, renamed: dict[str, str]) -> pd.DataFrame:
    import pandas as pd

    events = trace.events
    on_device = events.thread < 0
    device_rows = np.flatnonzero(on_device)
    launch = np.full(len(events), -1, dtype=np.int64)
    launch[device_rows] = host_launches(events, device_rows)
    start = events.start_ns - events.start_ns.min()
    index = np.arange(_FIRST_INDEX, _FIRST_INDEX + len(events))
    symbols.add_symbols([_WHOLE_TRACE] if not len(host_steps(trace.labels)) else [])
    columns = {
        "index": index,
        "cat": _symbols(symbols, events.category.values)[events.category.codes],
        "name": _symbols(symbols, [renamed.get(n, n) for n in events.name.values])[events.name.codes],
        "pid": np.where(on_device, events.device, _HOST_PID),
        "tid": np.where(on_device, events.stream, events.thread),
        "ts": start,
        "dur": events.end_ns - events.start_ns,
        "end": start + events.end_ns - events.start_ns,
        "stream": np.where(on_device, events.stream, -1),
        "correlation": events.correlation,
        "external_id": events.external_id,
        "bytes": events.bytes,
        "index_correlation": _partners(launch, events.correlation),
        "iteration": _iterations(trace, on_device, launch),
        "wait_on_stream": _sync_column(trace, trace.syncs.wait_on_stream),
        "wait_on_cuda_event_record_corr_id": _sync_column(trace, trace.syncs.record_correlation),
    }
    frame = pd.DataFrame(columns, index=index)
    return frame[~events.category.equals("gpu_user_annotation")]


def _symbols(symbols: Any, values: list[str] | tuple[str, ...]) -> IntArray:
    """HTA's numbers of strings, added to its table."""
    symbols.add_symbols(values)
    table = symbols.get_sym_id_map()
    return np.asarray([table[value] for value in values], dtype=np.int64)


def _partners(launch: IntArray, correlation: CompactArray) -> IntArray:
    """HTA's ``index_correlation``: the launch of a device event, the device event of a launch.

    -1 where an event has no correlation id, 0 where its partner is not in the file.
    """
    partner = np.where(correlation >= 0, 0, -1)
    launched = np.flatnonzero(launch >= 0)
    partner[launched] = launch[launched] + _FIRST_INDEX
    partner[launch[launched]] = launched + _FIRST_INDEX
    return partner


def _iterations(trace: Trace, on_device: BoolArray, launch: IntArray) -> IntArray:
    """Step of every event: by host time, on the device by that of its launch; -1 outside every step."""
    steps = host_steps(trace.labels)
    if not len(steps):
        return np.zeros(len(launch), dtype=np.int64)
    row = intervals.containing(steps.start_ns, steps.end_ns, trace.events.start_ns)
    number = np.where(row >= 0, steps.step[row], -1)
    return np.where(on_device, np.where(launch >= 0, number[launch], -1), number)


def _sync_column(trace: Trace, values: IntArray) -> IntArray:
    """A column of the events that wait for a recorded CUDA event; -1 elsewhere.

    HTA joins on the record: waits that do not name one are left out, or the join is not one to one.
    """
    column = np.full(len(trace.events), -1, dtype=np.int64)
    known = trace.syncs.record_correlation >= 0
    column[trace.syncs.event[known]] = values[known]
    return column


def need_device(trace: Trace, what: str) -> None:
    """Raise ``TraceError`` for a trace without device activity."""
    if trace.device.type == "cpu":
        raise TraceError(f"{trace.source}: a CPU trace has no {what}: record on a GPU")


def choose_step(trace: Trace, step: int | None) -> tuple[int | None, int | None]:
    """Return the requested step, otherwise the middle one, with its duration on the host in nanoseconds.

    Both are None for a trace without steps: the first and the last step often lack events. Raises
    ``TraceError`` for an unknown step.
    """
    steps = host_steps(trace.labels)
    durations = dict(zip(steps.step.tolist(), (steps.end_ns - steps.start_ns).tolist(), strict=True))
    if step is not None and step not in durations:
        known = ", ".join(map(str, durations)) or "none"
        raise TraceError(f"{trace.source}: no step {step} in it; it has {known}")
    if step is None and durations:
        step = list(durations)[len(durations) // 2]
    return step, None if step is None else durations[step]
