"""Which rows of several ranks are one collective: by identifier, by sequence number, or by verified order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.ranks.summary import RankSummary
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings, concat_strings

_KEYS = ("comms_id", "seq", "order")


@dataclass(frozen=True, kw_only=True, slots=True)
class Matched:
    """Matched collectives: rows ``first[i]:first[i + 1]`` are collective ``i``, one row per rank."""

    first: IntArray
    rank: IntArray
    """Position of the rank among the summaries; ascending within a collective."""
    row: IntArray
    """Row in that rank's collectives."""
    keys: dict[str, int]
    """``comms_id``, ``seq``, ``order`` -> collectives matched by it."""
    unmatched: dict[str, int]
    """Reason -> collectives."""
    warnings: list[str]

    @property
    def count(self) -> int:
        """Number of matched collectives."""
        return len(self.first) - 1

    @property
    def collective(self) -> IntArray:
        """Index of the collective of every row."""
        return np.repeat(np.arange(self.count), np.diff(self.first))

    def column(self, columns: Sequence[IntArray]) -> IntArray:
        """Gather one value per row from a column of each rank."""
        starts = np.cumsum([0, *(len(column) for column in columns)])[:-1]
        return np.concatenate(columns)[starts[self.rank] + self.row]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Every rank's collectives in one table."""

    rank: IntArray
    row: IntArray
    group: IntArray
    """Identity of the process group: its name and its ranks."""
    kind: IntArray
    """Identity of the data sent: op, dtype, bytes."""
    comms_id: IntArray
    seq: IntArray
    issue_ns: IntArray
    step: IntArray

    def take(self, rows: IntArray | BoolArray) -> _Rows:
        return _Rows(**{name: getattr(self, name)[rows] for name in self.__slots__})


def match_collectives(summaries: Sequence[RankSummary]) -> Matched:
    """Match the collectives of ranks; groups with one rank among ``summaries`` are left out silently."""
    rows, group_names = _rows(summaries)
    accepted: list[_Rows] = []
    labels: list[IntArray] = []
    keys: Counter[str] = Counter()
    unmatched: Counter[str] = Counter()
    warnings: list[str] = []
    for group in intervals.distinct(rows.group):
        mine = rows.take(rows.group == group)
        name, ranks_text = group_names[int(group)]
        expected = _expected(summaries, mine, ranks_text)
        if len(expected) < 2:
            continue
        key, identity, refused = _identify(mine, expected)
        if len(refused):
            title = "collectives without a process group" if name is None else f"process group {name}"
            unmatched["no identifiers, and ranks differ in number, kinds or sizes"] += sum(
                _most_on_a_rank(mine.rank[mine.step == step]) for step in refused
            )
            warnings.append(
                f"{title}: collectives have no identifiers, and in step {', '.join(map(str, refused))} "
                "their number, kinds or sizes differ between ranks; those were not matched"
            )
            kept = ~np.isin(mine.step, refused)
            mine, identity = mine.take(kept), identity[kept]
            if not len(mine.rank):
                continue
        good, reasons = _verify(mine, identity, len(expected))
        unmatched.update(reasons)
        accepted.append(mine.take(good))
        labels.append(identity[good])
        keys[key] += len(intervals.distinct(identity[good]))
    first, rank, row = _compress(accepted, labels)
    keys = Counter({key: count for key, count in keys.items() if count})
    return Matched(
        first=first,
        rank=rank,
        row=row,
        keys={key: keys[key] for key in _KEYS if keys[key]},
        unmatched={reason: count for reason, count in unmatched.items() if count},
        warnings=warnings,
    )


def _rows(summaries: Sequence[RankSummary]) -> tuple[_Rows, list[tuple[str | None, str]]]:
    tables = [summary.collectives for summary in summaries]

    def gathered(name: str) -> IntArray:
        return np.concatenate([np.empty(0, dtype=np.int64), *(getattr(table, name) for table in tables)])

    def codes(name: str) -> IntArray:
        return concat_strings([getattr(table, name) for table in tables]).codes.astype(np.int64)

    names: dict[tuple[str | None, str], int] = {}
    group = [np.empty(0, dtype=np.int64)]
    for summary in summaries:
        column: Strings = summary.collectives.process_group
        lookup = [
            names.setdefault((value, summary.group_ranks.get(value, "")), len(names))
            for value in column.values
        ]
        lookup.append(names.setdefault((None, ""), len(names)))
        group.append(np.asarray(lookup, dtype=np.int64)[column.codes])
    sizes, size = np.unique(gathered("payload_bytes"), return_inverse=True)
    op, dtype = codes("op"), codes("dtype")
    issue, start = gathered("issue_ns"), gathered("start_ns")
    rows = _Rows(
        rank=np.repeat(np.arange(len(tables)), [len(table) for table in tables]),
        row=np.concatenate([np.empty(0, dtype=np.int64), *(np.arange(len(table)) for table in tables)]),
        group=np.concatenate(group),
        kind=((op + 1) * (int(dtype.max(initial=0)) + 2) + dtype + 1) * (len(sizes) + 1) + size.reshape(-1),
        comms_id=gathered("comms_id"),
        seq=gathered("seq"),
        issue_ns=np.where(issue >= 0, issue, start),
        step=gathered("step"),
    )
    return rows, list(names)


def _expected(summaries: Sequence[RankSummary], rows: _Rows, ranks_text: str) -> IntArray:
    """Positions of the loaded ranks that belong to a group: from its metadata, otherwise from its rows."""
    if ranks_text and re.fullmatch(r"[\[\(]?\s*\d+(\s*,\s*\d+)*\s*[\]\)]?", ranks_text):
        members = {int(number) for number in re.findall(r"\d+", ranks_text)}
        return np.asarray([i for i, s in enumerate(summaries) if s.rank in members], dtype=np.int64)
    return intervals.distinct(rows.rank)


def _identify(rows: _Rows, expected: IntArray) -> tuple[str, IntArray, list[int]]:
    """Return the best key at least two ranks know, each row's identity by it, and the steps it fails in.

    An identity of -1 is none. By order, a collective is the n-th of its step, and a step in which the ranks
    do not have the same sequence fails as a whole.
    """
    for key, column in (("comms_id", rows.comms_id), ("seq", rows.seq)):
        known = column >= 0
        if len(intervals.distinct(rows.rank[known])) >= 2:
            return key, np.where(known, column, -1), []
    order = np.lexsort((rows.issue_ns, rows.step, rows.rank))
    step, rank = rows.step[order], rows.rank[order]
    opens = np.ones(len(order), dtype=np.bool_)
    opens[1:] = (step[1:] != step[:-1]) | (rank[1:] != rank[:-1])
    first = np.flatnonzero(opens)
    nth = np.arange(len(order)) - np.repeat(first, np.diff([*first, len(order)]))
    steps, number = np.unique(step, return_inverse=True)
    identity = np.empty(len(order), dtype=np.int64)
    identity[order] = number.reshape(-1) * len(order) + nth
    failed = []
    for value in steps.tolist():
        here = step == value
        sequences = [rows.kind[order[here & (rank == one)]] for one in expected]
        if not all(np.array_equal(sequence, sequences[0]) for sequence in sequences[1:]):
            failed.append(value)
    return "order", identity, failed


def _verify(rows: _Rows, identity: IntArray, expected: int) -> tuple[BoolArray, Counter[str]]:
    """Accept identities that every expected rank has once and agrees about; count the others by reason."""
    values, inverse = np.unique(identity, return_inverse=True)
    inverse = inverse.reshape(-1)
    count = np.bincount(inverse, minlength=len(values))
    span = int(rows.rank.max()) + 1
    ranks = np.bincount(intervals.distinct(inverse * span + rows.rank) // span, minlength=len(values))
    lowest = np.full(len(values), np.iinfo(np.int64).max)
    highest = np.full(len(values), -1)
    np.minimum.at(lowest, inverse, rows.kind)
    np.maximum.at(highest, inverse, rows.kind)
    unknown = values < 0
    repeated = ~unknown & (count > ranks)
    missing = ~unknown & ~repeated & (ranks < expected)
    differing = ~unknown & ~repeated & ~missing & (lowest != highest)
    reasons = Counter(
        {
            "no identifier on some rank": int(count[unknown].sum()),
            "identifier used twice by a rank": int(repeated.sum()),
            "missing on some rank": int(missing.sum()),
            "ranks disagree about kind, type or size": int(differing.sum()),
        }
    )
    return ~(unknown | repeated | missing | differing)[inverse], reasons


def _most_on_a_rank(rank: IntArray) -> int:
    return int(np.bincount(rank).max())


def _compress(accepted: list[_Rows], labels: list[IntArray]) -> tuple[IntArray, IntArray, IntArray]:
    """Sort accepted rows by (group, identity, rank) and find where each collective begins."""
    empty = np.empty(0, dtype=np.int64)
    rank = np.concatenate([empty, *(rows.rank for rows in accepted)])
    row = np.concatenate([empty, *(rows.row for rows in accepted)])
    group = np.concatenate([empty, *(rows.group for rows in accepted)])
    label = np.concatenate([empty, *labels])
    order = np.lexsort((rank, label, group))
    rank, row, group, label = rank[order], row[order], group[order], label[order]
    opens = np.ones(len(rank), dtype=np.bool_)
    opens[1:] = (group[1:] != group[:-1]) | (label[1:] != label[:-1])
    return np.append(np.flatnonzero(opens), len(rank)), rank, row
