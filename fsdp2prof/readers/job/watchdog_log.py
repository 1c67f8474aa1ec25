"""What torch writes into a training's log when a collective times out or ranks differ, rank by rank.

Lines of NCCL's watchdog are those of ``ProcessGroupNCCL.cpp`` in torch 2.1 to 2.13. ``[rank3]:`` before them
is the rank of the job; the rank inside brackets is the one in the process group. A rank that does not time
out itself often says how far it has come when another rank's timeout makes it dump.

With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` every rank says what two ranks call where they differ, and which ranks
do not come (``monitoredBarrier``), by their ranks in a process group that is not named. Gloo says only that a
rank's peer did not send, or has gone: no number, no group.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdp2prof.errors import FlightRecorderError
from fsdp2prof.readers.job.nccl_inspector import UNREADABLE, opened
from fsdp2prof.readers.limits import MOST_RANKS
from fsdp2prof.tables.flight_recorder import SOME_OP, FlightDump, Issued

_LONGEST_LINE = 1 << 14
_MOST_BYTES = 1 << 34
_MARKS = (
    b"Watchdog caught collective operation timeout",
    b"dump signal due to a collective timeout",
    b"Timeout at NCCL work",
    b"CollectiveFingerPrint(SequenceNumber=",
    b"failed to pass monitoredBarrier",
    b"for recv operation to complete",
    b"for send operation to complete",
)
"""The second is all that a rank writes which waits in no collective itself."""
_STUCK = (b"Heartbeat monitor timed out", b"watchdog got stuck")
_READ = (
    b"[rank",
    b"[Rank",
    b"[PG ",
    b"CollectiveFingerPrint(",
    b"monitoredBarrier",
    b"to complete",
    b"by peer",
)
"""Without one of these a line says nothing."""

_RANK = re.compile(r"\[rank(\d{1,7})\]:")
_TIMEOUT = re.compile(
    r"\[Rank (\d{1,7})\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d{1,18}), "
    r"OpType=(\w{1,60})(?:, NumelIn=(\d{1,18}), NumelOut=(\d{1,18}))?"
)
_GROUP = re.compile(r"\[PG (?:ID (\d+) PG GUID )?(\w{1,100})(?: ?\(([^)]{1,200})\))? Rank (\d{1,7})\]")
_PROGRESS = re.compile(
    r"last enqueued (?:NCCL )?work: (-?\d{1,18}), last completed (?:NCCL )?work: (-?\d{1,18})", re.I
)
_AT_WORK = re.compile(r"at (?:NCCL )?work(?: sequence id)?: (\d{1,18})")
_FINGERPRINT = re.compile(
    r"Rank (\d{1,7}) is running collective: CollectiveFingerPrint\(SequenceNumber=(\d{1,18}),? ?"
    r"OpType=(\w{1,60})(?:, TensorShape=\[([\d, ]{1,200})\], TensorDtypes=(\w{1,40}))?"
)
_BARRIER = re.compile(r"\[Rank (\d{1,7})\]: Ranks? ([\d, ]{1,10000}) failed to pass monitoredBarrier")
_REACHED = re.compile(r"Rank (\d{1,7}) successfully reached monitoredBarrier")
_GLOO = re.compile(r"Timed out waiting \d+ms for (?:recv|send) operation to complete")
_LEFT = re.compile(r"gloo/.{0,200}Connection (?:closed|reset) by peer")
_SPEAKER = re.compile(rb"(?=\[rank\d{1,7}\]:)|(?<!\]:)(?=\[E )")
"""Where a message begins: ranks that share a pipe write several into one line."""

_OPS = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather",
    "ALLGATHER_COALESCED": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter",
    "BROADCAST": "broadcast",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}
"""``OpType`` of torch to ours; others keep torch's name in small letters."""
_NO_GROUP = "unknown"
_MONITORED, _OF_GLOO = "monitoredBarrier", "gloo"
"""Stand for the process groups that such lines do not name."""


@dataclass(slots=True)
class _Progress:
    """How far one rank has come in one process group."""

    description: str = ""
    group_rank: int = -1
    enqueued: int | None = None
    completed: int | None = None
    timed_out: Issued | None = None


@dataclass(slots=True)
class _Log:
    """Content of some logs, by rank."""

    ranks: set[int] = field(default_factory=set)
    timeouts: dict[int, dict[Issued, int]] = field(default_factory=lambda: defaultdict(dict))
    """Of each rank, with its rank in the process group."""
    works: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    """(rank, sequence number) of a work that timed out -> name and description of its group."""
    progress: dict[int, dict[str, _Progress]] = field(default_factory=lambda: defaultdict(dict))
    told: list[tuple[int, str, dict[int, _Progress]]] = field(default_factory=list)
    """Writer and subject of a line, and activity of ranks of a process group, the writer first."""
    left: set[int] = field(default_factory=set)
    """Ranks whose peer in gloo has gone."""


def looks_like_watchdog(path: Path) -> bool:
    """Whether the watchdog reports a timeout in a text file, plain or gzip."""
    try:
        return any(mark in line for line in _lines(path) for mark in _MARKS)
    except FlightRecorderError:
        return False


def stuck_watchdogs(files: Iterable[Path]) -> list[int]:
    """Return the ranks whose watchdog itself stopped: torch then names no collective."""
    said = (line for path in files for line in _lines(path) if any(mark in line for mark in _STUCK))
    found = [_GROUP.search(line.decode(errors="replace")) for line in said]
    return sorted({int(group[4]) for group in found if group is not None})


def read_watchdog_logs(files: Mapping[Path, int | None]) -> list[FlightDump]:
    """Read the logs of one job (each with its rank if its name has one); return each rank's last calls.

    Raises ``FlightRecorderError`` for a file that cannot be read.
    """
    log = _Log()
    for path, rank in files.items():
        log.ranks |= {rank} if rank is not None and rank <= MOST_RANKS else set()
        for raw in _unwrapped(_lines(path)):
            if any(mark in raw for mark in _READ):
                for message in _SPEAKER.split(raw):
                    _add(log, message.decode(errors="replace"), rank)
    _place(log)
    _place_told(log)
    _place_left(log)
    members = _members(log)
    source = ", ".join(str(path) for path in files)
    return [
        FlightDump(
            rank=rank,
            source=source,
            groups={name: members[name] for name in groups if name in members},
            issued=[issued for name, one in groups.items() for issued in _issued(name, one)],
            whole=False,
            from_log=True,
        )
        for rank, groups in sorted(log.progress.items())
        if any(one.timed_out is not None or one.enqueued is not None for one in groups.values())
    ]


def _lines(path: Path) -> Iterator[bytes]:
    read = 0
    try:
        with opened(path) as file:
            while (line := file.readline(_LONGEST_LINE)) and read < _MOST_BYTES:
                if not read and b"\0" in line:
                    return
                read += len(line)
                yield line
    except UNREADABLE as error:
        said = getattr(error, "strerror", None) or error
        raise FlightRecorderError(f"{path}: cannot be read ({said})") from None


def _unwrapped(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Join a timeout that a logger broke before its work with the line after it."""
    for line in lines:
        broken = _MARKS[0] in line and line.rstrip().endswith(_MARKS[0] + b":")
        yield line.rstrip() + b" " + next(lines, b"").lstrip() if broken else line


def _add(log: _Log, line: str, of_file: int | None) -> None:
    written = _RANK.search(line)
    rank = int(written[1]) if written else of_file
    timeout, group = _TIMEOUT.search(line), _GROUP.search(line)
    if rank is None:
        said = [
            found[at] for found, at in ((timeout, 1), (group, 4), (_FINGERPRINT.search(line), 1)) if found
        ]
        rank = int(said[0]) if said else None
    if rank is None or rank > MOST_RANKS:
        return
    log.ranks.add(rank)
    _add_of_any_backend(log, line, rank)
    if timeout is not None:
        log.timeouts[rank].setdefault(_timed_out(timeout), int(timeout[1]))
    if group is None:
        return
    name, description = group[2], group[3] or ""
    work, progress = _AT_WORK.search(line), _PROGRESS.search(line)
    if progress is not None and _is_behind(log.progress[rank].get(name), int(progress[2])):
        _forget(log, rank)
    if work is not None:
        log.works[rank, int(work[1])] = (name, description)
    if progress is not None:
        one_group = log.progress[rank].setdefault(name, _Progress(description, int(group[4])))
        if one_group.enqueued is None:
            one_group.enqueued, one_group.completed = int(progress[1]), int(progress[2])


def _add_of_any_backend(log: _Log, line: str, rank: int) -> None:
    """Read lines of any backend: differing calls, ranks missing at a barrier, and lost gloo peers."""
    if (barrier := _BARRIER.search(line)) is not None:
        late = [int(one) for one in re.findall(r"\b\d{1,8}\b", barrier[2])]
        missing = {one: _Progress(enqueued=0, completed=0) for one in late if one <= MOST_RANKS}
        log.told.append((rank, _MONITORED, {int(barrier[1]): _waits("barrier"), **missing}))
    elif (reached := _REACHED.search(line)) is not None:
        log.told.append((rank, _MONITORED, {int(reached[1]): _waits("barrier")}))
    elif _GLOO.search(line):
        log.progress[rank].setdefault(_OF_GLOO, _waits("collective"))
    elif _LEFT.search(line):
        log.left.add(rank)
    if calls := {int(one[1]): _Progress(timed_out=_printed(one)) for one in _FINGERPRINT.finditer(line)}:
        log.told.append((rank, _NO_GROUP, calls))


def _printed(one: re.Match[str]) -> Issued:
    sizes = tuple(int(size) for size in (one[4] or "").split(",") if size.strip())
    dtypes = (one[5].lower(),) if one[5] else ()
    return replace(_call(int(one[2]), one[3]), input_sizes=(sizes,), input_dtypes=dtypes)


def _waits(op: str) -> _Progress:
    return _Progress(timed_out=_call(1, op))


def _place_told(log: _Log) -> None:
    """Take ranks of a process group for those of the job where all who speak have the same rank in both.

    Else only the speaker is known; the others are named as ranks of a group that nothing names.
    """
    of_job = all(speaker == next(iter(calls)) for speaker, _, calls in log.told)
    for speaker, group, calls in sorted(log.told, key=lambda one: len(one[2])):
        own, *others = calls
        if of_job:
            for rank, one in calls.items():
                log.progress[rank].setdefault(group, one)
        elif others:
            call, listed = calls[own].timed_out, ", ".join(map(str, sorted(calls)))
            name = f"{_NO_GROUP}, call {0 if call is None else call.seq} of its ranks {listed}"
            if group == _MONITORED:
                ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
                name = f"{_NO_GROUP}, without its {ranks}"
            log.progress[speaker].setdefault(name, calls[own])


def _place_left(log: _Log) -> None:
    """Treat ranks whose peer has ended as timed-out ranks, if another rank is silent.

    If none is silent, one of them may have been late, and found the others gone.
    """
    waited = {rank for rank, groups in log.progress.items() if _OF_GLOO in groups}
    if waited and log.ranks - waited - log.left:
        for rank in log.left:
            log.progress[rank].setdefault(_OF_GLOO, _waits("collective"))


def _is_behind(before: _Progress | None, completed: int) -> bool:
    """Whether a rank has completed less than it once had: the job was started again, into the same log."""
    return before is not None and before.completed is not None and completed < before.completed


def _forget(log: _Log, rank: int) -> None:
    """Drop records of earlier starts of the job, but for the rank's latest timeout."""
    latest = list(log.timeouts[rank].items())[-1:]
    log.timeouts.clear()
    log.works.clear()
    log.progress.clear()
    log.told.clear()
    log.left.clear()
    log.timeouts[rank].update(latest)


def _timed_out(said: re.Match[str]) -> Issued:
    sizes = [((int(one),),) if one is not None else () for one in (said[4], said[5])]
    call = _call(int(said[2]), said[3])
    return replace(call, input_sizes=sizes[0], output_sizes=sizes[1], p2p=said[3] in ("SEND", "RECV"))


def _call(seq: int, op: str, *, finished: bool = False) -> Issued:
    """Return a call from its number and torch's name for it."""
    return Issued(
        group=_NO_GROUP,
        group_desc="",
        seq=seq,
        backend="nccl",
        op=_OPS.get(op, op.strip("_").lower()),
        p2p=False,
        input_sizes=(),
        output_sizes=(),
        input_dtypes=(),
        output_dtypes=(),
        finished=finished,
        created_ns=0,
        place=None,
    )


def _place(log: _Log) -> None:
    """Give each rank's first timeout its process group; without one, the number that most ranks share.

    A rank whose log ends before it names the group waits in the group that all others name for the same
    call.
    """
    often = Counter(one.seq for ones in log.timeouts.values() for one in ones)
    named: dict[Issued, set[tuple[str, str]]] = defaultdict(set)
    for rank, ones in log.timeouts.items():
        for one in ones:
            named[one] |= {log.works[rank, one.seq]} if (rank, one.seq) in log.works else set()
    for rank, ones in log.timeouts.items():
        for one in sorted(ones, key=lambda one: -often[one.seq]):
            # numbers of unnamed groups are not comparable
            unnamed = (f"{_NO_GROUP}, work {one.seq}", "")
            others = next(iter(named[one])) if len(named[one]) == 1 else unnamed
            name, description = log.works.get((rank, one.seq), others)
            known = log.progress[rank].setdefault(name, _Progress(description, ones[one]))
            if known.timed_out is None or one.seq < known.timed_out.seq:
                known.timed_out = one


def _members(log: _Log) -> dict[str, list[int]]:
    """Ranks of each group whose ranks are evenly spaced, as in a mesh, including silent ones.

    The spacing follows from two ranks that give their position, the size from the sizes of an all-gather
    or reduce-scatter of the group. Without either, the last known position counts only if an earlier one
    is silent: later ranks may be silent too.
    """
    seen: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    sizes: Counter[str] = Counter()
    last_of: dict[str, int] = {}
    for rank, groups in log.progress.items():
        for name, one in groups.items():
            if one.group_rank >= 0:
                seen[name][one.group_rank].add(rank)
                if one.description == "default_pg":
                    last_of[name] = max(log.ranks)
                sizes[name] = max(sizes[name], _size(one.timed_out))
    found = {}
    for name, ranks in seen.items():
        if any(len(ones) > 1 for ones in ranks.values()):  # several groups of one name
            continue
        places = {place: min(ones) for place, ones in ranks.items()}
        (first, start), (last, end) = min(places.items()), max(places.items())
        step, rest = divmod(end - start, max(1, last - first))
        size = max(sizes[name], last_of.get(name, last) + 1)
        even = [start + step * (place - first) for place in range(min(size, MOST_RANKS))]
        told = sizes[name] or len(even) > len(places)
        fits = step > 0 and not rest and all(even[at] == rank for at, rank in places.items())
        if told and fits and even[0] >= 0:
            found[name] = even
    barred = sorted(rank for rank, groups in log.progress.items() if _MONITORED in groups)
    found |= {_MONITORED: barred} if barred else {}
    known = len(log.ranks) > 1 and all(_OF_GLOO in log.progress[rank] for rank in log.left)
    return found | ({_OF_GLOO: sorted(log.ranks)} if known else {})


def _size(one: Issued | None) -> int:
    """Ranks of the group of a call, by how much larger its output is than its input, or its input."""
    if one is None or one.op not in ("all_gather", "reduce_scatter") or not one.input_sizes:
        return 0
    sizes = sorted((one.input_sizes[0][0], one.output_sizes[0][0]))
    return sizes[1] // sizes[0] if sizes[0] and not sizes[1] % sizes[0] else 0


def _issued(group: str, one: _Progress) -> list[Issued]:
    """Return the last finished call, the first unfinished one and the newest, of which a log says no more."""
    first = one.timed_out
    calls: dict[int, Issued] = {}
    if first is None and one.completed is not None and one.completed > 0:
        calls[one.completed] = _call(one.completed, SOME_OP, finished=True)
    if first is not None:
        calls[first.seq] = first
    elif one.enqueued is not None and one.enqueued > max(0, one.completed or 0):
        calls[max(0, one.completed or 0) + 1] = _call(max(0, one.completed or 0) + 1, SOME_OP)
    newest = one.enqueued or 0
    if newest > max(calls, default=newest):
        calls[newest] = _call(newest, SOME_OP)
    return [replace(call, group=group, group_desc=one.description) for call in calls.values()]
