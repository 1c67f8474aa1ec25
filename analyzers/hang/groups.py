"""Calls of each process group side by side, by rank and sequence number, and the code that issued them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp2prof.by_key import grouped
from fsdp2prof.manifest import RankManifest
from fsdp2prof.results.hang import HangFrame, HangPlace, HangStack
from fsdp2prof.tables.flight_recorder import FlightDump, Issued, RankStacks, StackFrame

_ANY_INPUT = {"all_to_all", "scatter", "all_gather_v", "reduce_scatter_v"}
_ANY_OUTPUT = {"all_to_all", "gather", "all_gather_v", "reduce_scatter_v"}
"""Operations to which ranks rightly bring, or of which they get, tensors of different sizes."""

Signature = tuple[tuple[object, ...], ...]
"""Properties that all ranks must agree on for one sequence number: operation, sizes and dtypes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCalls:
    """The collectives of one process group."""

    name: str
    ranks: Sequence[int]
    ranks_known: bool
    """Whether a dump or a manifest names them, or it is the default group, of which a log shows a part."""
    calls: Mapping[int, Mapping[int, Sequence[Issued]]]
    """By rank and sequence number; several calls of one number are a coalesced one."""
    from_log: bool = False
    """Whether lines of a log describe at most the first unfinished call of each rank."""

    @property
    def no_dump(self) -> list[int]:
        """Ranks of the group that left no dump."""
        return [rank for rank in self.ranks if rank not in self.calls]

    def last(self, rank: int) -> int:
        """Sequence number of a rank's last collective; 0 without any."""
        return max(self.calls[rank], default=0)

    @property
    def front(self) -> int:
        """Sequence number of the furthest rank."""
        return max(map(self.last, self.calls), default=0)


def group_calls(dumps: Sequence[FlightDump], manifests: Mapping[int, RankManifest]) -> list[GroupCalls]:
    """Sort the collectives of all ranks by process group, in the order of first use.

    A group's ranks are those its dumps or manifests list; otherwise all ranks for the default group, or
    those that used a group of this name.
    """
    world = _world(dumps, manifests)
    used: dict[str, list[int]] = defaultdict(list)
    for dump in dumps:
        for name in {one.group for one in dump.issued}:
            used[name].append(dump.rank)
    found: dict[tuple[str, tuple[int, ...]], bool] = {}
    for dump in dumps:
        for one in dump.issued:
            named = _members(dump, one, manifests, world)
            members = tuple(used[one.group]) if named is None else named
            known = named is not None and (one.group in dump.groups or not dump.from_log)
            found[one.group, members] = found.get((one.group, members), False) or known
    by_rank = {dump.rank: dump for dump in dumps}
    return [
        GroupCalls(
            name=name,
            ranks=members,
            ranks_known=known,
            calls={rank: _by_seq(by_rank[rank], name) for rank in members if rank in by_rank},
            from_log=any(dump.from_log for dump in dumps),
        )
        for (name, members), known in found.items()
    ]


def signature(calls: Sequence[Issued]) -> Signature:
    """Return the properties that the ranks must agree on."""
    return tuple(
        (
            one.op,
            None if one.op in _ANY_INPUT else one.input_sizes,
            None if one.op in _ANY_OUTPUT else one.output_sizes,
            None if one.op in _ANY_INPUT | _ANY_OUTPUT else one.dtype,
        )
        for one in calls
    )


def _world(dumps: Sequence[FlightDump], manifests: Mapping[int, RankManifest]) -> tuple[int, ...]:
    named = [rank for dump in dumps for ranks in dump.groups.values() for rank in ranks]
    size = max((manifest.world_size for manifest in manifests.values()), default=0)
    return tuple(range(max([size, *(rank + 1 for rank in (*named, *(dump.rank for dump in dumps)))])))


def _members(
    dump: FlightDump,
    one: Issued,
    manifests: Mapping[int, RankManifest],
    world: tuple[int, ...],
) -> tuple[int, ...] | None:
    if one.group in dump.groups:
        return tuple(dump.groups[one.group])
    manifest = manifests.get(dump.rank)
    for group in manifest.process_groups if manifest is not None else ():
        if group.name == one.group:
            return tuple(sorted(group.ranks))
    return world if one.group_desc == "default_pg" else None


def _by_seq(dump: FlightDump, group: str) -> dict[int, list[Issued]]:
    return dict(grouped((one.seq, one) for one in dump.issued if one.group == group and not one.p2p))


_STANDARD = re.compile(r"/lib(?:64)?/python3[.\d]*t?/|/python\d{2,3}\.zip/|^<frozen ")
_INSTALLED = re.compile(r"(?:^|/)(?:site|dist)-packages/")
_TORCH = re.compile(r"(?:^|/)torch/(?:distributed|nn|autograd|utils|optim|cuda|_\w+|[a-z_]+\.py$)")
_COMPILED_TEXT = re.compile(r"^<.*>$")
_RECORDER = re.compile(r"(?:^|/)fsdp2prof/recorder/")

_DOING: tuple[tuple[str, str, str], ...] = (
    (r"/(?:pdb|bdb)\.py$|(?:^|/)(?:ipdb|pudb|debugpy|pydevd)/", "", "debugging"),
    (r"torch/utils/data/", "", "loading_data"),
    (r"torch/distributed/checkpoint/|torch/serialization\.py$|safetensors/", "", "checkpointing"),
    (r"torch/distributed/rendezvous\.py$", "", "joining"),
    (r"torch/distributed/distributed_c10d\.py$", r"init_process_group|new_\w*group|split_group|store_based",
     "joining"),
    (r"torch/distributed/device_mesh\.py$", "", "joining"),
    (r"torch/distributed/(?:distributed_c10d|_functional_collectives)\.py$", "", "communicating"),
    (r"torch/distributed/fsdp/", "", "sharding"),
    (r"torch/(?:_inductor|_dynamo/(?!eval_frame))|triton/(?:compiler|runtime)/", "", "compiling"),
    (r"torch/cuda/(?:__init__|streams)\.py$", r"synchronize|wait|query", "waiting_for_device"),
    (r"torch/autograd/", r"backward|_engine_run_backward|grad", "backward"),
    (r"torch/optim/|torch/nn/utils/clip_grad", "", "stepping"),
    (r"torch/nn/modules/", "", "forward"),
    (r"(?:^|/)(?:requests|urllib3|botocore|aiohttp|fsspec|s3fs|gcsfs|huggingface_hub)/|/(?:ssl|http/client|"
     r"urllib/request)\.py$", "", "using_network"),
    (r"/multiprocessing/|/subprocess\.py$|/concurrent/futures/", "", "waiting_for_process"),
    (r"/(?:threading|queue)\.py$", r"wait|acquire|get|put|join", "waiting_for_thread"),
)  # fmt: skip
"""Activity of a call, by the file and the function of the innermost frame that identifies it."""
_GENERAL = ("using_network", "waiting_for_process", "waiting_for_thread")
"""Activities that are reported only if no other call identifies one."""
_PATTERNS = [(re.compile(file), re.compile(name or "."), doing) for file, name, doing in _DOING]
_IN_COLLECTIVES = ("communicating", "sharding")


def stack_of(stacks: RankStacks) -> HangStack | None:
    """Return the stack of a rank's main thread; None without its stack."""
    if stacks.main is None:
        return None
    frames = [one for one in stacks.main.frames if not _RECORDER.search(one.file)]
    python = [one for one in frames if not one.native]
    if not python:
        return None
    native = next((one for one in frames[: frames.index(python[0])] if _is_named(one)), None)
    return HangStack(
        source=stacks.source,
        tool=stacks.tool,
        doing=_doing(python),
        own=_frame(_own(python)),
        at=_frame(python[0]),
        native=None if native is None else native.function,
        frames=[_frame(one) for one in frames],
    )


def by_place(stacks: Mapping[int, HangStack], culprits: Sequence[int]) -> list[HangPlace]:
    """Put ranks together whose main threads stand alike, those of the culprits first."""
    found = grouped(((stack.own, stack.doing), rank) for rank, stack in sorted(stacks.items()))
    places = [
        HangPlace(
            ranks=ranks,
            doing=doing,
            own=own,
            at=stacks[ranks[0]].at,
            native=stacks[ranks[0]].native,
        )
        for (own, doing), ranks in found.items()
    ]
    return sorted(places, key=lambda one: (not set(one.ranks) & set(culprits), len(one.ranks), one.ranks[0]))


def outside_collectives(stacks: Mapping[int, HangStack]) -> list[int]:
    """Ranks outside collectives while others are in one; empty where all are, or none is."""
    free = outside(stacks)
    return free if len(free) < len(stacks) else []


def outside(stacks: Mapping[int, HangStack]) -> list[int]:
    """Ranks whose main thread is not in a collective."""
    return sorted(rank for rank, stack in stacks.items() if stack.doing not in _IN_COLLECTIVES)


def _is_named(frame: StackFrame) -> bool:
    return not frame.function.startswith("0x")


def _own(python: Sequence[StackFrame]) -> StackFrame:
    """The innermost frame of the user's own code, otherwise of a package other than torch, otherwise the
    innermost frame."""
    own = (one for one in python if not (_INSTALLED.search(one.file) or _is_foreign(one)))
    package = (one for one in python if not _is_foreign(one))
    return next(own, None) or next(package, None) or python[0]


def _is_foreign(frame: StackFrame) -> bool:
    """Whether a frame belongs to Python's standard library, to torch, or to dynamically compiled code."""
    of_python = _STANDARD.search(frame.file) is not None and _INSTALLED.search(frame.file) is None
    return of_python or any(pattern.search(frame.file) for pattern in (_TORCH, _COMPILED_TEXT))


def _doing(python: Sequence[StackFrame]) -> str | None:
    said = [
        doing
        for frame in python
        for file, function, doing in _PATTERNS
        if file.search(frame.file) and function.search(frame.function)
    ]
    return next((doing for doing in said if doing not in _GENERAL), said[0] if said else None)


def _frame(frame: StackFrame) -> HangFrame:
    return HangFrame(file=frame.file, line=frame.line, function=frame.function)
