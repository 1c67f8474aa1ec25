"""Who came last, and why: a wait has a rank, a layer and a piece of work behind it.

Every nanosecond that ranks wait in a collective is charged to the rank that entered it last. It was late
because something took longer on it than on its peers: kernels of a layer, a host that launched nothing, a
wait for another process group. Of what had ended when it arrived, the latest is to blame first, up to how
late it was: what lies further back its peers have mostly waited for already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers.ranks.matching import Matched
from fsdp2prof.analyzers.ranks.summary import GARBAGE, RankSummary
from fsdp2prof.backends import kernel_name
from fsdp2prof.results.communication import Straggler
from fsdp2prof.tables.columns import IntArray
from fsdp2prof.tables.trace import CollectiveTable

_RANKS = 10
"""Late ranks that are explained, the costliest first."""
_PEERS = 9
"""Peers that a late rank is compared with: enough for a median."""
_SLIGHT = 20
"""An excess below this part of the lateness is noise, unless nothing larger is there."""
_AT_ONCE = 4
"""A collective that queued for less than this part of its lateness started when it was launched."""
_REPORTED = 20
"""Stragglers reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caused:
    """Waiting charged to the ranks that came last."""

    latest: IntArray
    """Per collective: position of the last rank among the summaries."""
    caused_ns: IntArray
    """Per collective: waiting of the others, summed over them."""
    by_rank: IntArray
    """Per rank; sums to all waiting."""
    by_step: IntArray
    """Per rank and step, in the order of the steps."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """The cause of a rank's lateness in a collective."""

    rank: int | None
    """Null if it is not known which rank was last."""
    fqn: str | None
    """Layer whose work took longer."""
    kind: str
    """As in :class:`~fsdp2prof.results.communication.Straggler`."""
    text: str | None
    site: str | None = None
    """Python line that its host was on, or ``GARBAGE``."""


@dataclass(frozen=True, slots=True)
class _Cause:
    """Something that took longer on one rank than on its peers."""

    fqn: str | None
    kind: str
    text: str
    site: str | None = None


@dataclass(slots=True)
class _Excess:
    """How much longer, until when, and on whose account."""

    cause: _Cause
    amount_ns: int
    end_ns: int
    group: int = -2
    """Code of the process group it waited in; where the whole group waits for something, no rank is late."""


LATE_FROM_THE_START = "it was late when the recording began"
"""Cause of lateness that nothing in the recording explains; not known to be the rank's own."""
_HOST = "its host launched nothing for longer than the other hosts"
_COLLECTED = "its host collected garbage"
_LOADER = "it waited longer for its data loader"
_UNSEEN = "it did something that the trace does not show: nothing took longer than on other ranks"


SLOW_LINKS = "links"
"""Kind for a rank whose collectives take longer than the same ones of other groups."""


def charge(matched: Matched, start: IntArray, wait: IntArray, step: IntArray, ranks: int) -> Caused:
    """Charge each collective's waiting to its last rank.

    ``start`` (on aligned clocks), ``wait`` (-1 unknown) and ``step`` are of every row.
    """
    waited = np.maximum(wait, 0)
    collective = matched.collective
    order = np.lexsort((start, collective))
    last = order[matched.first[1:] - 1]
    caused = np.zeros(matched.count, dtype=np.int64)
    np.add.at(caused, collective, waited)
    steps, number = np.unique(step[last], return_inverse=True)
    by_step = np.zeros((ranks, len(steps)), dtype=np.int64)
    np.add.at(by_step, (matched.rank[last], number.reshape(-1)), caused)
    return Caused(latest=matched.rank[last], caused_ns=caused, by_rank=by_step.sum(axis=1), by_step=by_step)


def explain(
    summaries: Sequence[RankSummary],
    matched: Matched,
    start: IntArray,
    wait: IntArray,
    caused: Caused,
    slower: Mapping[int, tuple[int, str]],
) -> tuple[list[Straggler], dict[int, list[tuple[Lateness, int]]]]:
    """Name the costliest stragglers with their layer and work, the worst first.

    ``slower`` says of a collective how much longer its transfer takes than the same ones of other groups.
    Also return the weighted causes of each collective's last rank being late, where explained.
    """
    late_ns = start - _lower_medians(start, matched)[matched.collective]
    blamed: dict[tuple[int, _Cause], list[int]] = defaultdict(lambda: [0, 0])
    lateness: dict[int, list[tuple[Lateness, int]]] = {}
    worst = np.argsort(-caused.by_rank, kind="stable")[:_RANKS]
    for rank in worst[caused.by_rank[worst] > 0].tolist():
        for collective, causes in _follow(summaries, matched, late_ns, wait, rank, slower):
            if caused.latest[collective] != rank or not caused.caused_ns[collective]:
                continue
            name = summaries[rank].rank
            lateness[collective] = [
                (Lateness(name, cause.fqn, cause.kind, cause.text, cause.site), weight)
                for cause, weight in causes
            ]
            for cause, amount in _shares(causes, int(caused.caused_ns[collective])):
                blamed[rank, cause][0] += amount
                blamed[rank, cause][1] += 1
    merged: dict[tuple[int, str | None, str], Straggler] = {}
    for (rank, cause), (total, count) in sorted(blamed.items(), key=lambda item: -item[1][0]):
        key = (rank, cause.fqn, cause.kind)
        known = merged.get(key)
        merged[key] = Straggler(
            rank=summaries[rank].rank,
            fqn=cause.fqn,
            wait_caused_ns=total + (known.wait_caused_ns if known else 0),
            cause=known.cause if known else cause.text,
            kind=cause.kind,
            collectives=count + (known.collectives if known else 0),
        )
    return sorted(merged.values(), key=lambda one: -one.wait_caused_ns)[:_REPORTED], lateness


def _lower_medians(start: IntArray, matched: Matched) -> IntArray:
    order = np.lexsort((start, matched.collective))
    middle: IntArray = start[order[(matched.first[:-1] + matched.first[1:] - 1) // 2]]
    return middle


def _follow(
    summaries: Sequence[RankSummary],
    matched: Matched,
    late_ns: IntArray,
    wait: IntArray,
    rank: int,
    slower: Mapping[int, tuple[int, str]],
) -> Iterator[tuple[int, list[tuple[_Cause, int]]]]:
    """Go through a rank's collectives in program order; yield the causes of its lateness at each, with
    amounts."""
    summary = summaries[rank]
    table = summary.collectives
    mine = np.flatnonzero(matched.rank == rank)
    mine = mine[np.argsort(table.issue_ns[matched.row[mine]], kind="stable")]
    collective = matched.collective
    history: list[_Excess] = []
    for position in mine.tolist():
        number, row = int(collective[position]), int(matched.row[position])
        history += _excesses(summaries, matched, number, rank, row)
        late, waited = int(late_ns[position]), int(wait[position])
        group = int(table.process_group.codes[row])
        if late > 0:
            blamed = _blame(history, late, int(table.start_ns[row]), group)
            rest = late - sum(amount for _, amount in blamed)
            yield number, [*blamed, (_remainder(table, row, late, first=position == mine[0]), rest)]
        if waited > 0:
            _forgive(history, waited)
            cause = _Cause(table.fqn[row], "communication", _waiting(table.process_group[row]))
            history.append(_Excess(cause, waited, int(table.end_ns[row]), group))
        if number in slower:
            excess, text = slower[number]
            cause = _Cause(table.fqn[row], SLOW_LINKS, text)
            history.append(_Excess(cause, excess, int(table.end_ns[row]), group))


def _remainder(table: CollectiveTable, row: int, late: int, first: bool) -> _Cause:
    """Return the cause of a lateness that no excess explains.

    A collective that starts as soon as it is launched was late because its launch was.
    """
    if first:
        return _Cause(table.fqn[row], "unknown", LATE_FROM_THE_START)
    queued = int(table.start_ns[row] - table.issue_ns[row])
    if table.issue_ns[row] >= 0 and queued * _AT_ONCE <= late:
        return _Cause(table.fqn[row], "host", _HOST)
    return _Cause(table.fqn[row], "unknown", _UNSEEN)


def _blame(history: Sequence[_Excess], late: int, arrived: int, group: int) -> list[tuple[_Cause, int]]:
    """Divide a lateness over work that had ended before: large before slight, late before early."""
    over = [e for e in reversed(history) if e.amount_ns > 0 and e.end_ns <= arrived and e.group != group]
    slight = late // _SLIGHT
    blamed = []
    for excess in [*(e for e in over if e.amount_ns > slight), *(e for e in over if e.amount_ns <= slight)]:
        part = min(excess.amount_ns, late)
        if part:
            blamed.append((excess.cause, part))
        late -= part
    return blamed


def _forgive(history: list[_Excess], waited: int) -> None:
    """Drop the oldest excesses of a rank that waited for others itself: they no longer put it behind."""
    while history and waited > 0:
        part = min(history[0].amount_ns, waited)
        history[0].amount_ns -= part
        waited -= part
        if not history[0].amount_ns:
            history.pop(0)


def _waiting(group: str | None) -> str:
    return "it waited for another rank" + ("" if group is None else f" in process group {group}")


def _excesses(
    summaries: Sequence[RankSummary], matched: Matched, number: int, rank: int, row: int
) -> list[_Excess]:
    """What a rank's segment before a collective has more of than the median of its peers, by its end."""
    members = slice(matched.first[number], matched.first[number + 1])
    ranks, rows = matched.rank[members], matched.row[members]
    others = np.flatnonzero(ranks != rank)
    others = others[np.unique(np.linspace(0, len(others) - 1, min(len(others), _PEERS)).astype(np.int64))]
    peers = [(summaries[int(ranks[i])], int(rows[i])) for i in others]
    own = summaries[rank]
    durations: dict[str | None, list[int]] = defaultdict(list)
    for summary, peer_row in peers:
        for fqn, duration, _, _ in _layers(summary, peer_row):
            durations[fqn].append(duration)
    gap = int(own.gap_ns[row]) - _median([int(s.gap_ns[r]) for s, r in peers])
    loaded = int(own.gap_loading_ns[row]) - _median([int(s.gap_loading_ns[r]) for s, r in peers])
    loaded = max(0, min(gap, loaded))
    host, loader = _host(own.gap_fqn[row], own.gap_line[row]), _Cause(None, "data_loader", _LOADER)
    end_ns = int(own.gap_end_ns[row])
    found = [_Excess(host, gap - loaded, end_ns), _Excess(loader, loaded, end_ns)]
    for fqn, duration, end, kernel in _layers(own, row):
        usual = _median([*durations[fqn], *[0] * (len(peers) - len(durations[fqn]))])
        cause = _Cause(
            fqn, "kernel", f"its work takes longer, most of it {kernel_name(kernel or 'of unknown name')}"
        )
        found.append(_Excess(cause, duration - usual, end))
    return sorted((one for one in found if one.amount_ns > 0), key=lambda one: one.end_ns)


def _host(fqn: str | None, line: str | None) -> _Cause:
    if line == GARBAGE:
        return _Cause(fqn, "host", _COLLECTED, line)
    return _Cause(fqn, "host", _HOST if line is None else f"its host was in {line}", line)


def _layers(summary: RankSummary, row: int) -> list[tuple[str | None, int, int, str | None]]:
    work = summary.work
    low, high = np.searchsorted(work.collective, [row, row + 1])
    return [
        (work.fqn[i], int(work.duration_ns[i]), int(work.end_ns[i]), work.longest[i])
        for i in range(low, high)
    ]


def _median(values: list[int]) -> int:
    return sorted(values)[(len(values) - 1) // 2] if values else 0


def _shares(causes: list[tuple[_Cause, int]], total: int) -> list[tuple[_Cause, int]]:
    """Share a total out in proportion; the shares sum to it."""
    whole = sum(amount for _, amount in causes)
    edges = np.cumsum([0, *(amount for _, amount in causes)])
    cuts = [total * int(edge) // whole for edge in edges] if whole else []
    return [(cause, b - a) for (cause, _), a, b in zip(causes, cuts[:-1], cuts[1:], strict=True) if b > a]
