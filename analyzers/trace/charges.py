"""One rank's steps, charged: compute by phase, copies by layer, idle time by cause and place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp2prof import backends
from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.intervals import Intervals
from fsdp2prof.analyzers.layers import site_name
from fsdp2prof.analyzers.ledger.charges import Charge, ChargePlace, CollectivePieces, RankCharges
from fsdp2prof.analyzers.phases import find_rows, is_outside
from fsdp2prof.analyzers.recorded_groups import repeated_units, untrained_units
from fsdp2prof.analyzers.steps import STEP_LABEL
from fsdp2prof.analyzers.trace.accounting import is_product
from fsdp2prof.analyzers.trace.activities import (
    beginning_in,
    compiling,
    on_the_device,
    recomputed,
    recording_graphs,
)
from fsdp2prof.analyzers.trace.copies import between_host_and_device, in_front, layers_of_copies
from fsdp2prof.analyzers.trace.evaluation import evaluation, keeps_graph, repeated_rows
from fsdp2prof.analyzers.trace.idle import host_calls, idle_parts
from fsdp2prof.analyzers.trace.kernel_kinds import kinds_of_compute
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.analyzers.trace.routing import ALL_EXPERTS, CHOSEN, experts_and_chosen
from fsdp2prof.analyzers.trace.script import (
    ANOMALY,
    BEFORE_UPDATE,
    FIRST_KIND,
    FORWARDS,
    IN_FRONT,
    LOOK_NS,
    OF_FSDP,
    ONE_BY_ONE,
    REBUILT,
    REPEATED,
    UNTRAINED,
    WHY,
    Script,
)
from fsdp2prof.analyzers.trace.spans import loading_rows
from fsdp2prof.analyzers.trace.waits import charging_order
from fsdp2prof.backends import KERNEL_KINDS, kernel_name
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings

_IDLE = {
    "host_bound": "host",
    "data_loader": "data_loader",
    "compilation": "compilation",
    "recording_graphs": "compilation",
    "garbage_collection": "garbage_collection",
    "allocation": "allocation",
    "device_sync": "sync",
    "memcpy": "sync",
    "queued": "queued",
    "profiler": "tracing",
    "unknown": "unknown",
}
"""Cause of idle time -> cause in the ledger; a caller that a collective blocks is the collective's."""

_PAUSE_FRAC, _PAUSES = 0.01, 8
"""Gaps of the host of at least this part of their step are pauses, if a step has at most so many: a host that
cannot keep up leaves one after every kernel."""
_MARGIN = 0.1
"""Part of a pause that may lie outside the range that is named for it."""
_NAMED_PAUSES = 200
_COMPILED_CODE = ("CompiledFunction", "Torch-Compiled Region", "## Call CompiledFxGraph")
"""Begin the names of what torch.compile made."""
_IN_TORCH = "aten::"
"""Of an operator in which no line of the script runs, so that it says more than the line that calls it."""
COMPILED = "compiled"
"""Why a charge of nothing counts: torch.compile's functions run."""
_COUNTED = (ALL_EXPERTS, ANOMALY, CHOSEN, COMPILED, FORWARDS, ONE_BY_ONE, REBUILT)
"""Why a charge has a count without time."""
_WITH_A_LINE = ("float64", "one_hot")
"""Kinds of compute that a line of the script causes, also in forward and backward."""
WORKERS = "workers"
"""Why a batch was not there, where worker processes make it."""
GRAPH = "graph"
"""Why a forward without a backward keeps its activations: gradients are enabled."""
ROWS, AGAIN = "rows", "again"
"""Tokens of forwards without a backward, and those of them that an earlier one computed."""
GRAPHS = "graphs"
"""Reason for torch.compile's work in a step that records CUDA graphs."""


def rank_charges(tables: RankTables, rank: int) -> RankCharges:
    """Charge every nanosecond of a rank's windows."""
    charging = _Charging(tables, rank)
    charging.work("compute", tables.parts.compute, ~tables.work.is_fsdp & ~tables.work.is_memcpy)
    charging.work("fsdp_copy", tables.parts.fsdp_copy, tables.work.is_fsdp)
    charging.work("memcpy", tables.parts.memcpy, tables.work.is_memcpy)
    idle = idle_parts(tables)
    dry = np.sort(np.concatenate([idle["host_bound"].start, idle["data_loader"].start]))
    pieces = charging.collectives(charging.idle(idle), dry)
    analysed, own = np.isin(tables.collectives.table.step, tables.windows.step), _is_fsdps(tables)
    return RankCharges(
        own=charging.charges(),
        pieces=pieces,
        operator=tables.collectives.operator.take(analysed).compact(),
        site=_callers(tables, own).take(analysed).compact(),
        by_fsdp=own[analysed],
        at_once=_at_once(tables, own)[analysed],
    )


def _is_fsdps(tables: RankTables) -> BoolArray:
    """Whether FSDP issued each collective for a module: inside one of its labels, if the trace has any.

    If no group has replicas, all-reduces inside them come from a hook on gradients.
    """
    collectives, manifest = tables.collectives, tables.manifest
    of_module = collectives.table.fqn.codes >= 0
    if manifest is not None and manifest.param_groups:
        replicated = any(group.replicate_world_size > 1 for group in manifest.param_groups)
        of_module &= replicated | ~collectives.table.op.equals("all_reduce")
    row = find_rows(tables.phases, collectives.thread, collectives.table.issue_ns)
    labelled = of_module & ~tables.phases.activity.lookup(row).equals("compute")
    return labelled if labelled.any() else of_module


def _callers(tables: RankTables, own: BoolArray) -> Strings:
    """Return the Python line that issued each collective outside FSDP, if it was sampled there."""
    table, returned = tables.collectives.table, tables.collectives.issue_end_ns
    sites: list[str | None] = [None] * len(table)
    rows = np.flatnonzero(~own & (table.issue_ns >= 0) & (returned >= 0))
    end = returned[rows] if len(tables.device) else np.maximum(returned[rows], table.end_ns[rows])
    for row, line in zip(rows.tolist(), tables.sighted.lines.seen(table.issue_ns[rows], end), strict=True):
        sites[row] = line
    return Strings.intern(sites)


def _at_once(tables: RankTables, own: BoolArray) -> BoolArray:
    """Whether each collective follows another one that FSDP did not issue either, with no product between."""
    table, events = tables.collectives.table, tables.trace.events
    rows = np.flatnonzero(~own & (table.issue_ns >= 0))
    rows = rows[np.argsort(table.issue_ns[rows], kind="stable")]
    products = np.sort(events.start_ns[events.name.matches(is_product)])
    before = np.searchsorted(products, table.issue_ns[rows])
    found = np.zeros(len(table), dtype=np.bool_)
    found[rows[1:]] = before[1:] == before[:-1]
    return found


class _Charging:
    """Sums up charges of one rank by step, cause and place."""

    def __init__(self, tables: RankTables, rank: int) -> None:
        self._tables, self._rank = tables, rank
        self._sums: dict[ChargePlace, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        evaluated = evaluation(tables)
        self._evaluating = on_the_device(tables, evaluated.host)
        self._rerunning = recomputed(tables)
        self._recomputing = on_the_device(tables, self._rerunning)
        self._script = Script(tables)
        manifest = tables.manifest
        self._needless: list[tuple[Container[str], str, int]] = []
        if manifest is not None:
            self._needless = [
                (units, phase, why)
                for units, phase, why in (
                    (untrained_units(manifest), "backward", UNTRAINED),
                    (repeated_units(manifest), "forward", REPEATED),
                )
                if units
            ]
        for step, checks in self._script.gradient_checks():
            self._add(step, "compute", 0, phase="backward", why=ANOMALY, count=checks)
        for step, operators in self._script.operators_of_optimizers():
            self._add(step, "compute", 0, phase="optimizer", why=ONE_BY_ONE, count=operators)
        for step, iterators, line in self._script.new_iterators():
            self._add(step, "data_loader", 0, site=line, why=REBUILT, count=iterators)
        for step, ran, again in self._script.forward_operators():
            self._add(step, "recompute", 0, phase="forward", why=FORWARDS, count=ran)
            self._add(step, "recompute", 0, phase="backward", why=FORWARDS, count=again)
        analysed = set(tables.windows.step.tolist())
        for why, count in experts_and_chosen(tables) if analysed else ():
            self._add(min(analysed), "compute", 0, phase="forward", why=why, count=count)
        if analysed and any(name.startswith(_COMPILED_CODE) for name in tables.trace.events.name.values):
            self._add(min(analysed), "compute", 0, why=COMPILED, count=1)
        passes = [one for one in evaluated.passes if one[0] in analysed]
        times = np.array(passes, dtype=np.int64).reshape(-1, 3)
        lines = tables.sighted.callers.seen(times[:, 1], times[:, 2])
        graphs = keeps_graph(tables, times[:, 1], times[:, 2]).tolist()
        for (step, _, _), line, graph in zip(passes, lines, graphs, strict=True):
            self._add(
                step, "evaluation", 0, phase="forward", site=line, why=GRAPH if graph else None, count=1
            )
        for step, (rows, again) in repeated_rows(tables, passes).items():
            self._add(step, "evaluation", 0, op=ROWS, why=ROWS, count=rows)
            self._add(step, "evaluation", 0, op=ROWS, why=AGAIN, count=again)

    def charges(self) -> list[Charge]:
        """Return them, without a charge of nothing."""
        return [
            Charge(rank=self._rank, ns=ns, count=count, bytes=size, whole_ns=whole, **place._asdict())
            for place, (ns, count, size, whole) in self._sums.items()
            if ns or (count and (place.cause == "evaluation" or place.why in _COUNTED))
        ]

    def _add(
        self,
        step: int,
        cause: str,
        ns: int,
        *,
        fqn: str | None = None,
        phase: str | None = None,
        op: str | None = None,
        site: str | None = None,
        why: str | None = None,
        asleep: bool = False,
        count: int = 0,
        size: int = 0,
        whole: int = 0,
    ) -> None:
        if not (ns or count or size):
            return
        entry = self._sums[ChargePlace(step, cause, fqn, phase or "other", op, site, why, asleep=asleep)]
        entry[0] += ns
        entry[1] += count
        entry[2] += size
        entry[3] += whole

    def _in_windows(self, start: IntArray, end: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Cut intervals at the windows' edges: (row, window, start, end) of those inside one."""
        windows = self._tables.windows
        edges = np.concatenate([windows.start_ns, windows.end_ns])
        row, start, end = intervals.cut(start, end, edges)
        window = intervals.containing(windows.start_ns, windows.end_ns, start)
        inside = (window >= 0) & (end > start)
        return row[inside], window[inside], start[inside], end[inside]

    def work(self, kind: str, part: Intervals, mask: BoolArray) -> None:
        """Charge device time: each instant to the activity that began first."""
        tables = self._tables
        work = tables.work.take(mask)
        if not len(work):
            return
        row, start, end = intervals.charged_pieces(part, work.start_ns, work.end_ns, np.arange(len(work)))
        piece, window, start, end = self._in_windows(start, end)
        row = row[piece]
        phases, names = tables.phases, tables.trace.events.name.take(work.event)
        fqn, phase = phases.fqn.lookup(work.phase_row), phases.phase.lookup(work.phase_row)
        if kind == "memcpy":
            fqn, phase = layers_of_copies(tables, mask, fqn, phase)
        evaluating = intervals.covered(self._evaluating, start, end)
        recomputing = (
            intervals.covered(self._recomputing, start, end) if kind == "compute" else evaluating * 0
        )
        sizes = np.maximum(tables.trace.events.bytes[work.event].astype(np.int64), 0)
        host_copy = between_host_and_device(tables, mask)
        outside = is_outside(phase)
        # The line of a long operator on a CPU was seen during it, not as it began.
        issued = work.launch_ns[row] if len(tables.device) else (start + end) // 2
        kinds = kinds_of_compute(tables, work) if kind == "compute" else np.full(len(work), -1)
        moving = kinds == KERNEL_KINDS.index("memory")
        named = np.isin(kinds, [KERNEL_KINDS.index(kind) for kind in _WITH_A_LINE])
        why, site, sites = self._script.at(
            issued, outside[row], looped=not len(tables.device), named=named[row], placed=moving[row]
        )
        if kind == "compute":
            kinds = kinds[row]
            why = np.where((why == 0) & (kinds >= 0), FIRST_KIND + kinds, why)
        if kind == "memcpy":
            why = np.where(in_front(tables)[mask][row], IN_FRONT, why)
        else:
            why = self._needlessly(fqn.take(row), phase.take(row), why)
        columns = (
            window,
            phase.codes[row],
            np.where((kind != "compute") | (why >= FIRST_KIND), fqn.codes[row], -1),
            np.where(outside[row] | (kind == "memcpy"), names.codes[row], -1),
            host_copy[row],
            why,
            site,
        )
        opens, group = _groups(*columns)
        first = np.zeros(len(row), dtype=np.bool_)
        first[np.unique(row, return_index=True)[1]] = True

        def summed(values: IntArray) -> list[int]:
            total = np.zeros(len(opens), dtype=np.int64)
            np.add.at(total, group, values)
            found: list[int] = total.tolist()
            return found

        lengths = end - start
        again = np.minimum(recomputing, lengths - evaluating)
        spans = zip(
            zip(*(column[opens].tolist() for column in columns), strict=True),
            summed(lengths - evaluating - again),
            summed(evaluating),
            summed(again),
            summed(np.where(first, 1, 0)),
            summed(np.where(first, sizes[row], 0)),
            summed(np.where(first, (work.end_ns - work.start_ns)[row], 0)),
            strict=True,
        )
        for (at, when, layer, name, copies, reason, line), own, evaluated, rerun, count, size, whole in spans:
            step = int(tables.windows.step[at])
            where = phase.values[when] if when >= 0 else None
            module = fqn.values[layer] if layer >= 0 else None
            called = kernel_name(names.values[name]) if name >= 0 else None
            cause = kind if kind != "memcpy" else "offload" if copies else "compute"
            place: dict[str, Any] = {"fqn": module, "phase": where, "op": called}
            place |= {"site": sites[line] if line >= 0 else None, "why": WHY[reason]}
            self._add(step, cause, own, count=count, size=size, whole=whole, **place)
            self._add(step, "evaluation", evaluated, fqn=module, phase=where)
            self._add(step, "recompute", rerun, phase=where)

    def _needlessly(self, fqn: Strings, phase: Strings, why: IntArray) -> IntArray:
        """Replace the reason of time in a backward that trains nothing, or in a forward that every step
        repeats."""
        for units, when, reason in self._needless:
            why = np.where(fqn.matches(units.__contains__) & phase.equals(when), reason, why)
        return why

    def idle(self, parts: dict[str, Intervals]) -> Intervals:
        """Charge idle time but for callers that a collective blocks, which is returned."""
        graphs = recording_graphs(self._tables)
        stops, parts["device_sync"] = beginning_in(parts.get("device_sync", intervals.EMPTY), graphs)
        known = {
            "recording_graphs": graphs,
            "compilation": compiling(self._tables),
            "garbage_collection": self._tables.sighted.collections,
            "allocation": host_calls(self._tables, backends.allocates),
        }
        for cause, times in known.items():
            parts[cause] = intervals.intersect(parts["host_bound"], times)
            parts["host_bound"] = intervals.subtract(parts["host_bound"], times)
        graphs = parts["recording_graphs"]
        parts["recording_graphs"] = intervals.union(
            np.concatenate([graphs.start, stops.start]), np.concatenate([graphs.end, stops.end])
        )
        for cause, part in parts.items():
            if cause == "communication":
                continue
            _, window, start, end = self._in_windows(part.start, part.end)
            long = np.zeros(len(start), dtype=np.bool_)
            if cause == "host_bound" and len(start) and self._has_operators:
                windows = self._tables.windows
                duration = (windows.end_ns - windows.start_ns)[window]
                long = end - start >= _PAUSE_FRAC * duration
                long &= np.bincount(window[long], minlength=len(windows))[window] <= _PAUSES
            if cause == "garbage_collection":  # the sampler cannot run while Python collects
                sites = self._sites(start, end + LOOK_NS, ~long)
            else:
                sites = self._sites(start, end, long)
            names: tuple[str | None, ...] = tuple(dict.fromkeys(sites.values()))
            named = np.full(len(start), -1, dtype=np.int64)
            named[list(sites)] = [names.index(name) for name in sites.values()]
            piece, start, end = _cut_at_phases(self._tables, start, end)
            window, long, site = window[piece], long[piece], named[piece]
            row = _host_rows(self._tables, start)
            phases = self._tables.phases
            fqn, phase = phases.fqn.lookup(row), phases.phase.lookup(row)
            why = np.zeros(len(start), dtype=np.int64)
            if cause == "host_bound":
                why, line, lines = self._script.at((start + end) // 2, is_outside(phase), looped=True)
                site = np.where((site < 0) & (line >= 0), len(names) + line, site)
                names = (*names, *lines)
                of_fsdp = phases.activity.lookup(row).matches(lambda name: name != "compute")
                why = np.where((why == 0) & of_fsdp, OF_FSDP, why)
                why = self._needlessly(fqn, phase, why)
                into_update = long & np.isin(piece, piece[phase.equals("optimizer")])
                why = np.where((why == 0) & into_update & (phase.codes < 0), BEFORE_UPDATE, why)
            evaluating = intervals.covered(self._evaluating, start, end)
            again = evaluating * 0
            if cause == "host_bound":
                again = np.minimum(intervals.covered(self._rerunning, start, end), end - start - evaluating)
            own = end - start - evaluating - again
            slept = np.where(
                long, np.minimum(intervals.covered(self._tables.sighted.sleeps, start, end), own), 0
            )
            first, group = _groups(window, fqn.codes, phase.codes, site, long, why)
            sums = [np.zeros(len(first), dtype=np.int64) for _ in range(4)]
            for total, values in zip(sums, (own - slept, slept, evaluating, again), strict=True):
                np.add.at(total, group, values)
            awake, asleep, evaluated, rerun = (one.tolist() for one in sums)
            count = np.bincount(group).tolist()
            for one in np.argsort(first).tolist():
                at = int(first[one])
                step = int(self._tables.windows.step[window[at]])
                name = "host_pause" if long[at] else _IDLE[cause]
                where = names[site[at]] if site[at] >= 0 else None
                layer, when = fqn[at], phase[at]
                reason = WORKERS if cause == "data_loader" and self._has_workers else WHY[why[at]]
                reason = GRAPHS if cause == "recording_graphs" else reason
                place: dict[str, Any] = {"fqn": layer, "phase": when, "site": where, "why": reason}
                counts = (count[one], 0) if awake[one] else (0, count[one])
                self._add(step, name, awake[one], **place, count=counts[0])
                self._add(step, name, asleep[one], **place, asleep=True, count=counts[1])
                self._add(step, "evaluation", evaluated[one], fqn=layer, phase=when)
                self._add(step, "recompute", rerun[one], phase=when)
        return parts.get("communication", intervals.EMPTY)

    @cached_property
    def _has_operators(self) -> bool:
        """Whether the trace holds the host's operators: without them, every gap looks like a pause."""
        return bool(self._tables.trace.events.category.equals("cpu_op").any())

    @cached_property
    def _has_workers(self) -> bool:
        """Whether worker processes make the batches that the training gets."""
        rows = loading_rows(self._tables.trace, self._tables.phases)
        return any(
            "_MultiProcessing" in (name or "") for name in self._tables.trace.labels.name.take(rows).to_list()
        )

    @cached_property
    def _named_ranges(self) -> tuple[IntArray, IntArray, IntArray]:
        """Events whose name explains the host's pause that they contain, by start: row, times."""
        events = self._tables.trace.events
        named = events.category.matches(_NAMES_A_PAUSE.__contains__) & (events.thread >= 0)
        rows = np.flatnonzero(named & ~events.name.matches(_says_nothing))
        return rows, events.start_ns[rows], events.end_ns[rows]

    def _sites(self, start: IntArray, end: IntArray, long: BoolArray) -> dict[int, str]:
        """Name the longest pauses: by torch's operator that the host was in, by the script's line, or by the
        innermost range or Python function."""
        rows = np.flatnonzero(long)
        if not len(rows):
            return {}
        lines = self._tables.sighted.lines.seen(start[rows], end[rows])
        found = {row: line for row, line in zip(rows.tolist(), lines, strict=True) if line is not None}
        events = self._tables.trace.events
        ranges, begins, ends = self._named_ranges
        for row in rows[np.argsort(start[rows] - end[rows], kind="stable")][:_NAMED_PAUSES].tolist():
            low, high = int(start[row]), int(end[row])
            slack = int(_MARGIN * (high - low))
            begun = int(np.searchsorted(begins, low + slack, side="right"))
            around = np.flatnonzero(ends[:begun] >= high - slack)
            if len(around):
                length = ends[around] - begins[around]
                name = events.name[int(ranges[around[int(length.argmin())]])]
                if name is not None and (row not in found or name.startswith(_IN_TORCH)):
                    found[row] = site_name(name)
        return found

    def collectives(self, blocked: Intervals, dry: IntArray) -> CollectivePieces:
        """Return the parts of every analysed collective; charge those of collectives of no analysed step."""
        tables, table, waits = self._tables, self._tables.collectives.table, self._tables.waits
        order = charging_order(tables.collectives, waits)
        held = np.flatnonzero(waits.stall_ns > 0) if len(blocked.start) else np.empty(0, dtype=np.int64)
        until = np.where(waits.resumed_ns >= 0, waits.resumed_ns, table.end_ns)
        exposed = intervals.charged_pieces(tables.parts.exposed, table.start_ns, table.end_ns, order)
        queued = intervals.charged_pieces(blocked, table.issue_ns[held], until[held], order[held])
        row = np.concatenate([exposed[0], held[queued[0]]])
        start = np.concatenate([exposed[1], queued[1]])
        end = np.concatenate([exposed[2], queued[2]])
        piece, window, start, end = self._in_windows(start, end)
        row = row[piece]
        analysed = np.isin(table.step, tables.windows.step)
        for at in np.flatnonzero(~analysed[row]).tolist():
            one = int(row[at])
            self._add(
                int(tables.windows.step[window[at]]),
                "other_communication" if table.fqn[one] is None else "communication",
                int(end[at] - start[at]),
                fqn=table.fqn[one],
                phase=table.phase[one],
                op=table.op[one],
            )
        mine = analysed[row]
        position = np.cumsum(analysed) - 1
        return CollectivePieces(
            collective=position[row[mine]],
            step=tables.windows.step[window[mine]],
            start_ns=start[mine],
            end_ns=end[mine],
            evaluation=intervals.containing(self._evaluating.start, self._evaluating.end, start[mine]) >= 0,
            caught_up=_catches_up(tables, dry, end[mine]),
        )


def _catches_up(tables: RankTables, dry: IntArray, times: IntArray) -> BoolArray:
    """Return whether the device runs dry for want of launches after some times, before the host stops for it.

    The host of a CPU is the device: it never does.
    """
    if not len(tables.device):
        return np.zeros(len(times), dtype=np.bool_)
    events = tables.trace.events
    stops = np.flatnonzero(events.name.matches(backends.always_blocks) & (events.thread >= 0))
    never = np.iinfo(np.int64).max
    next_dry = np.append(dry, never)[np.searchsorted(dry, times)]
    stop = np.sort(events.end_ns[stops])
    caught: BoolArray = next_dry < np.append(stop, never)[np.searchsorted(stop, times)]
    return caught


_NAMES_A_PAUSE = frozenset({"user_annotation", "cpu_op", "python_function"})
"""Kinds of host events that show the host's work."""


def _says_nothing(name: str) -> bool:
    """Whether a range only says that a step, a hook of FSDP's, autograd or generated code ran."""
    return name.startswith(
        (
            STEP_LABEL,
            "FSDP::",
            "fsdp2prof::root",
            "Optimizer.",
            "autograd::",
            "gloo:",
            "nccl:",
            "<eval_with_key>",
        )
    )


def _cut_at_phases(tables: RankTables, start: IntArray, end: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Cut idle stretches where the host goes from one phase, layer or label to another."""
    phases = tables.phases
    return intervals.cut(start, end, np.concatenate([phases.start_ns, phases.end_ns]))


def _groups(*columns: npt.NDArray[Any]) -> tuple[IntArray, IntArray]:
    """Return the first row of each distinct combination, in the order of its values, and each row's group.

    Small ranges of numbers make one key: sorting it takes a tenth of sorting rows.
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
        key = key * (high - low + 1) + (column.astype(np.int64) - low)
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    return first, group.reshape(-1)


def _host_rows(tables: RankTables, time: IntArray) -> IntArray:
    """Return the host's phase, -1 for none: on the training thread, otherwise on any other."""
    phases = tables.phases
    row = np.full(len(time), -1, dtype=np.int64)
    for thread in _training_first(tables):
        missing = np.flatnonzero(row < 0)
        row[missing] = find_rows(phases, np.full(len(missing), thread, dtype=np.int64), time[missing])
    return row


def _training_first(tables: RankTables) -> Iterator[int]:
    phases = tables.phases
    forward = phases.thread[phases.phase.equals("forward")]
    threads = intervals.distinct(phases.thread).tolist()
    count = {thread: int((forward == thread).sum()) for thread in threads}
    yield from sorted(threads, key=lambda thread: -count[thread])
