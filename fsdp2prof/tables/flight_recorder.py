"""Evidence of a hang, per rank: the last collectives of torch's Flight Recorder, and threads' stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from fsdp2prof.units import dtype_bytes

SOME_OP = "collective"
"""Operation of a call of which only the number is known."""

Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued:
    """One collective or point-to-point call that a rank issued."""

    group: str
    """Name of its process group."""
    group_desc: str
    seq: int
    """Counts the collectives of the group from 1, and apart from them its point-to-point calls."""
    backend: str
    op: str
    """One of ``fsdp2prof.vocabulary.OPS``, or torch's own name if none fits."""
    p2p: bool
    input_sizes: Sizes
    output_sizes: Sizes
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    finished: bool
    created_ns: int
    """Unix time at which it was issued."""
    place: str | None
    """The innermost line outside torch that issued it; None without stacks."""

    @property
    def dtype(self) -> str | None:
        """The dtype of its first tensor."""
        return next(iter(self.input_dtypes or self.output_dtypes), None)

    @property
    def input_bytes(self) -> int | None:
        """Bytes of all its inputs; None where a dtype is unknown."""
        sizes = [dtype_bytes(name) for name in self.input_dtypes]
        if len(sizes) == 1:
            sizes *= len(self.input_sizes)
        if len(sizes) != len(self.input_sizes):
            return None
        known = [size for size in sizes if size is not None]
        if len(known) != len(sizes):
            return None
        return sum(prod(shape) * size for shape, size in zip(self.input_sizes, known, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class FlightDump:
    """One rank's dump."""

    rank: int
    source: str
    groups: Mapping[str, Sequence[int]]
    """Ranks of the process groups that it names, by name; gloo names none."""
    issued: Sequence[Issued]
    """Oldest first; entries that no longer fitted the buffer are missing."""
    whole: bool
    """Whether nothing had left the buffer."""
    from_log: bool = False
    """Whether the lines of a log say it: at most the first unfinished call is described."""


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One call on a stack."""

    file: str
    line: int | None
    function: str
    native: bool = False
    """Whether it is C or C++."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadStack:
    """The state of one thread."""

    name: str | None
    frames: Sequence[StackFrame]
    """Innermost first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStacks:
    """The threads of one rank."""

    rank: int
    source: str
    tool: str
    """``faulthandler``, in whose format Python and the recorder write, or ``py-spy``."""
    main: ThreadStack | None
    """The main thread; None where the file holds none."""
    others: Sequence[ThreadStack]
