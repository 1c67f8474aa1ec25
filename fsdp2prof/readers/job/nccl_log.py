"""NCCL's log (``NCCL_DEBUG=INFO``): communicators, transports between their ranks, and their calls.

Lines are those of ``init.cc``, ``enqueue.cc``, ``transport`` and ``graph`` in github.com/NVIDIA/nccl
(commit 5067397, June 2026) and some of older releases, of one process or of many, possibly mixed with a
training's own output. Calls need ``NCCL_DEBUG_SUBSYS=INIT,COLL``, algorithms ``TUNING``, paths between
GPUs ``GRAPH``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from fsdp2prof.errors import InputError
from fsdp2prof.readers.job.nccl_inspector import UNREADABLE, opened
from fsdp2prof.readers.limits import MOST_RANKS
from fsdp2prof.tables.nccl import Connection, LoggedCall, LoggedCommunicator, LoggedProcess, NcclLog

_LONGEST_LINE = 1 << 14
_LONGEST_SAYING = 1 << 12
_BEGINNING = 1 << 20
_PIECE = 1 << 13
_MOST_KINDS = 1 << 16
"""Different calls, connections or warnings of one communicator or process that are counted."""
_MOST_COMMUNICATORS = 1 << 17
_MOST_BYTES = 1 << 50

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_HEAD = re.compile(
    r"([^\s:\"']{1,255}):(\d{1,10}):(\d{1,10}) \[(-?\d{1,9})\] "
    r"(?:[^:\s]{1,200}:\d{1,6} (?:\([^)\s]{1,200}\) )?)?NCCL (INFO|WARN) "
)
"""Host, process, thread, device; tags of launchers before it end in a colon or a space."""
_LOGGED_AS_JSON = '\\n"'
"""How the line ends where a container's log holds it."""
_COMMUNICATOR = re.compile(
    r"comm (0x[0-9a-f]+) rank (\d{1,8}) n[rR]anks (\d{1,8})(?: nNodes (\d{1,8}))?"
    r"(?:.*? commId (0x[0-9a-f]+))?"
    r"(?:.*? parent (0x[0-9a-f]+)(?: childCount (\d+))?(?: splitCount (\d+))? color (-?\d+))?"
    r"(?:.*?(Init START|Init COMPLETE))?"
)
_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : (\d{1,8})(?:\[[^\]]*\])? -> (\d{1,8})(?:\[[^\]]*\])?"
    r"(?: \[(?:send|receive)\])? via (.{1,200}?)(?: comm (0x[0-9a-f]+) .*)?$"
)
_RING = re.compile(r"Channel 0+/\d+ :((?:\s+\d{1,8})+)\s*(?:comm 0x.*)?$")
_TREES = re.compile(r"Trees((?: \[\d+\] \S+)+)")
_CHANNELS = re.compile(r"(\d{1,6}) coll channels")
_GRAPH = re.compile(r"Pattern \d+, .*? type (\w{1,8})/(\w{1,8})")
_CALL = re.compile(
    r"(\w+): opCount [0-9a-f]+ .*? count (\d{1,18}) datatype (\d{1,2}) .*? comm (0x[0-9a-f]+)"
    r"(?: \[nranks=(\d{1,8})\])?"
)
_CHOSEN = re.compile(r"(\w+): (\d{1,18}) Bytes -> Algo (\w+) proto (\w+)", re.IGNORECASE)
_VERSION = re.compile(r"[NR]CCL version (?!:)(\S{1,40})")
_NETWORK = re.compile(r"Using network (.{1,60}?)\s*$")
_NICS = re.compile(r"NET/(\w+) : Using((?: \[\d+\]\S+)+)")
_NO_DEVICE = re.compile(r"NET/(\w+) : No device found")
_GDR = re.compile(r"NET/[^:]{1,60} : GPU Direct RDMA Disabled for HCA")
_BY_PLUGIN = re.compile(
    r"NET/OFI (?:Adding (NCCL_\w+)=|Setting (NCCL_\w+) |.*[Ss]etting (NCCL_\w+) environment)"
)
_SET = re.compile(r"(NCCL_\w{1,60}) set by environment to (\S{1,200})")
_NO_P2P = re.compile(r"P2P is disabled between|Could not enable P2P between")

_TYPES = (
    ("int8", 1),
    ("uint8", 1),
    ("int32", 4),
    ("uint32", 4),
    ("int64", 8),
    ("uint64", 8),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
    ("bfloat16", 2),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
)
"""``ncclDataType_t``: torch's name, bytes of an element."""
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
"""By their numbers, which older versions write."""
_OPS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "send": "send_recv",
    "recv": "send_recv",
    "sendrecv": "send_recv",
}

_OLD_SHM = "direct shared memory"
"""How versions before 2.12 write SHM."""

_Thread = tuple[str, int, int]
_Key = TypeVar("_Key")


def looks_like_nccl_log(path: Path) -> bool:
    """Whether NCCL wrote into a text file, plain or gzip, by its beginning."""
    beginning = b""
    try:
        with opened(path) as file:
            while len(beginning) < _BEGINNING and (more := file.read(_PIECE)):
                beginning += more
    except UNREADABLE:
        pass  # the error is raised where the file is read, if what came before it is NCCL's
    return b"\0" not in beginning[:4096] and (b" NCCL INFO " in beginning or b" NCCL WARN " in beginning)


def read_nccl_logs(files: Sequence[Path]) -> NcclLog:
    """Read the logs of one job together. Raises ``InputError`` for a file that cannot be read."""
    reader = _Reader()
    for path in files:
        for line in _lines(path):
            reader.add(line)
        reader.end_of_file()
    return reader.log()


def read_transports(files: Sequence[Path]) -> Counter[tuple[int, int, str]]:
    """Count the channels of every (rank, rank, transport) in some logs; both ends log a network's."""
    found: Counter[tuple[int, int, str]] = Counter()
    for communicator in read_nccl_logs(files).communicators:
        for one, count in communicator.connections.items():
            found[one.source, one.target, one.via] += count
    return found


def _lines(path: Path) -> Iterator[str]:
    try:
        with opened(path) as file:
            while line := file.readline(_LONGEST_LINE):
                if b"NCCL" in line:
                    yield line.decode(errors="replace").rstrip()
    except UNREADABLE as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


class _Reader:
    """Content of the lines by communicator.

    A line about connections names no communicator: it is attributed to the one that its thread is
    creating, otherwise to that of the process's last call, otherwise to the only one of the process.
    """

    def __init__(self) -> None:
        self._lines = 0
        self._version: str | None = None
        self._hosts: set[str] = set()
        self._communicators: dict[tuple[str, int, str], LoggedCommunicator] = {}
        self._processes: dict[tuple[str, int], LoggedProcess] = {}
        self._making: dict[_Thread, LoggedCommunicator] = {}
        self._unplaced: dict[_Thread, LoggedCommunicator] = {}
        self._called: dict[tuple[str, int], LoggedCommunicator] = {}
        self._done: list[LoggedCommunicator] = []
        self._devices: dict[_Thread, int] = {}
        self._of_device: dict[tuple[str, int, int], int] = {}

    def add(self, line: str) -> None:
        """Take one line of a log; others say nothing.

        Where ranks share a file, one's line may begin in the middle of another's.
        """
        line = _COLOURS.sub("", line)
        heads = list(_HEAD.finditer(line))
        if not heads and (version := _VERSION.search(line)) is not None:
            self._version = self._version or version[1]
        hosts = [head[1] if head is heads[0] else self._host(head[1]) for head in heads]
        for head, host, following in zip_longest(heads, hosts, heads[1:]):
            end = len(line) if following is None else following.end(1) - len(self._host(following[1]))
            self._add(host, head, line[head.end() : end].partition(_LOGGED_AS_JSON)[0])

    def _host(self, written: str) -> str:
        """Return the known host at the end of a name that another line runs into; otherwise the name."""
        if written in self._hosts:
            return written
        return max((host for host in self._hosts if written.endswith(host)), key=len, default=written)

    def _add(self, host: str, head: re.Match[str], text: str) -> None:
        self._lines += 1
        self._hosts.add(host)
        thread = (host, int(head[2]), int(head[3]))
        process = self._process(thread)
        said = text[:_LONGEST_SAYING].strip()
        self._devices[thread] = int(head[4])
        if head[5] == "WARN":
            _count(process.warnings, said[:200])
        if (about := _COMMUNICATOR.search(said)) is not None:
            self._communicator(thread, about)
        elif (call := _CALL.search(said)) is not None:
            self._call(thread, call)
        elif not _of_process(process, said):
            named = _CHANNEL.search(said)
            key = (thread[0], thread[1], (named[4] or "") if named is not None else "")
            _of_communicator(lambda: self._communicators.get(key) or self._current(thread), said)

    def end_of_file(self) -> None:
        """Attribute the remaining lines of its threads."""
        for thread, unplaced in self._unplaced.items():
            own = [
                one
                for key, one in self._communicators.items()
                if key[:2] == thread[:2] and self._could_be(thread, one, unplaced)
            ]
            if len(own) == 1:
                _merge(own[0], unplaced)
            else:
                self._done.append(unplaced)
        self._unplaced.clear()

    def _could_be(self, thread: _Thread, one: LoggedCommunicator, unplaced: LoggedCommunicator) -> bool:
        """Whether a thread may have connected the ranks of a communicator: it has the same device and
        rank."""
        device = self._of_device.get((one.host, one.pid, id(one)))
        ends = [(it.source, it.target) for it in unplaced.connections]
        fits = one.rank is None or all(one.rank in pair for pair in ends)
        inside = one.size is None or all(max(pair) < one.size for pair in ends)
        return fits and inside and device in (None, self._devices.get(thread))

    def log(self) -> NcclLog:
        """Everything that was said."""
        for process in self._processes.values():
            process.version = process.version or self._version
        return NcclLog(
            communicators=[*self._communicators.values(), *self._done],
            processes=list(self._processes.values()),
            lines=self._lines,
        )

    def _process(self, thread: _Thread) -> LoggedProcess:
        return self._processes.setdefault(thread[:2], LoggedProcess(host=thread[0], pid=thread[1]))

    def _communicator(self, thread: _Thread, about: re.Match[str]) -> None:
        key = (thread[0], thread[1], about[1])
        rank, size = int(about[2]), int(about[3])
        if max(rank, size) > MOST_RANKS or len(self._communicators) > _MOST_COMMUNICATORS:
            return
        made = self._communicators.get(key)
        if made is None or (about[10] == "Init START" and (made.rank, made.size) != (rank, size)):
            if made is not None:  # its address is used again
                self._done.append(made)
            made = LoggedCommunicator(host=thread[0], pid=thread[1], id=None, rank=rank, size=size)
            self._communicators[key] = made
        self._of_device[made.host, made.pid, id(made)] = self._devices[thread]
        if about[4]:
            made.nodes = int(about[4])
        made.id = made.id or about[5] or self._split_id(thread, about)
        self._making[thread] = made
        if (unplaced := self._unplaced.pop(thread, None)) is not None:
            _merge(made, unplaced)
        if about[10] == "Init COMPLETE":
            del self._making[thread]

    def _split_id(self, thread: _Thread, about: re.Match[str]) -> str | None:
        """A name that is equal on all ranks of a communicator that was split off another."""
        if about[6] is None:
            return None
        parent = self._communicators.get((*thread[:2], about[6]))
        if parent is None or parent.id is None:
            return None
        number = about[7] or about[8]
        return f"{parent.id} {f'child {number} ' if number else ''}color {about[9]}"

    def _call(self, thread: _Thread, call: re.Match[str]) -> None:
        key = (thread[0], thread[1], call[4])
        made = self._communicators.get(key)
        if made is None:
            size = int(call[5]) if call[5] else None
            made = LoggedCommunicator(host=thread[0], pid=thread[1], id=None, rank=None, size=size)
            self._communicators[key] = made
        self._called[thread[:2]] = made
        kind = int(call[3])
        dtype, width = _TYPES[kind] if kind < len(_TYPES) else (None, 0)
        size_bytes = int(call[2]) * width
        if 0 < size_bytes <= _MOST_BYTES:
            _count(made.calls, LoggedCall(_op(call[1]), size_bytes, dtype=dtype))

    def _current(self, thread: _Thread) -> LoggedCommunicator:
        current = self._making.get(thread) or self._called.get(thread[:2])
        if current is not None:
            return current
        unknown = LoggedCommunicator(host=thread[0], pid=thread[1], id=None, rank=None, size=None)
        return self._unplaced.setdefault(thread, unknown)


def _of_process(process: LoggedProcess, said: str) -> bool:
    """Read a line about the process itself; return whether it was one."""
    if plugin := _BY_PLUGIN.search(said):
        process.set_by_plugin.add(plugin[1] or plugin[2] or plugin[3])
    elif network := _NETWORK.search(said):
        process.networks.add(network[1])
    elif nics := _NICS.search(said):
        process.nics[nics[1]] = tuple(part.partition("]")[2] for part in nics[2].split())
    elif missing := _NO_DEVICE.search(said):
        process.no_device.add(missing[1])
    elif variable := _SET.search(said):
        if len(process.environment) < _MOST_KINDS:
            process.environment[variable[1]] = variable[2].rstrip(".")
    elif version := _VERSION.search(said):
        process.version = version[1]
    elif _GDR.search(said):
        process.gdr_disabled += 1
    elif _NO_P2P.search(said):
        process.p2p_disabled += 1
    else:
        return False
    return True


def _of_communicator(current: Callable[[], LoggedCommunicator], said: str) -> None:
    if channel := _CHANNEL.search(said):
        via = channel[3].rstrip()
        via = f"SHM{via.removeprefix(_OLD_SHM)}" if via.startswith(_OLD_SHM) else via
        _count(current().connections, Connection(int(channel[1]), int(channel[2]), via))
    elif ring := _RING.search(said):
        current().ring = tuple(map(int, ring[1].split()))
    elif trees := _TREES.search(said):
        current().trees = trees[1].count("[")
    elif channels := _CHANNELS.search(said):
        current().channels = int(channels[1])
    elif graph := _GRAPH.search(said):
        current().path_types.add(graph[1])
    elif "Connected NVLS tree" in said:
        current().nvls = True
    elif chosen := _CHOSEN.search(said):
        size = min(int(chosen[2]), _MOST_BYTES)
        names = (_named(_ALGORITHMS, chosen[3]), _named(_PROTOCOLS, chosen[4]))
        _count(current().chosen, LoggedCall(_op(chosen[1]), size, *names))


def _named(names: Sequence[str], written: str) -> str:
    return names[int(written)] if written.isdigit() and int(written) < len(names) else written.upper()[:40]


def _op(written: str) -> str:
    return _OPS.get(written.lower().removeprefix("nccl"), "other")


def _count(counter: Counter[_Key], key: _Key) -> None:
    if key in counter or len(counter) < _MOST_KINDS:
        counter[key] += 1


def _merge(made: LoggedCommunicator, more: LoggedCommunicator) -> None:
    made.connections.update(more.connections)
    made.chosen.update(more.chosen)
    made.path_types |= more.path_types
    made.ring = made.ring or more.ring
    made.trees = max(made.trees, more.trees)
    made.nvls |= more.nvls
    made.channels = made.channels or more.channels
