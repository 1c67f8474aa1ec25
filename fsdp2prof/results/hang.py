"""Result of ``analyze hang``: the blocked collective, missing or differing ranks, and their stacks."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results import Shown
from fsdp2prof.results.finding import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class HangCall:
    """A collective or point-to-point call as one rank issued it."""

    op: str
    """Operation as in ``analyze trace``, or torch's own name: ``barrier``, ``send 0->1``."""
    group: str
    """Name of the process group."""
    group_desc: str
    mesh_dim: str | None
    """Mesh dimension of the group; null without a manifest."""
    seq: int
    input_sizes: list[list[int]]
    output_sizes: list[list[int]]
    dtype: str | None
    fqn: str | None
    """Layer whose parameters it moves; null if unknown or not FSDP's."""
    phase: str | None
    """``forward`` or ``backward``; null if unknown."""
    layer_known: bool
    """Whether the layer is known; this needs a manifest."""
    finished: bool
    created_ns: int
    place: str | None
    """Innermost line outside torch that issued the call; null without stacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangStanding:
    """A collective in which ranks of one process group are blocked."""

    call: HangCall
    """The call as issued by the lowest of the waiting ranks."""
    ranks: list[int]
    """Ranks of the group."""
    came: list[int]
    not_come: list[int]
    no_dump: list[int]
    """Ranks of the group without a dump: it is unknown whether they issued the call."""
    ranks_known: bool = True
    """Whether a dump or a manifest lists the group; otherwise ``ranks`` are those that used it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangMismatch:
    """First collective of a process group that its ranks issued differently."""

    kind: str
    """Kind of difference: ``size``, ``dtype``, ``op``; ``skipped``, ``extra`` or ``swapped`` if later
    collectives show it; ``early`` if the unexpected call followed the expected one in an earlier step;
    ``diverged`` if a log shows ranks waiting under different numbers."""
    ranks: list[int]
    """Ranks at fault: fewer than the others, or without the lowest rank."""
    found: HangCall
    others: list[int]
    expected: HangCall
    count: int
    """Number of skipped or added collectives; 0 for other kinds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangFrame:
    """One frame of a stack."""

    file: str
    line: int | None
    """Line number; null if the tool does not give it, mostly for C or C++."""
    function: str

    @property
    def short(self) -> str:
        """File name, or path within its package, and line: ``train.py:12``."""
        _, installed, inside = self.file.rpartition("-packages/")
        name = inside if installed else self.file.rpartition("/")[2]
        return name if self.line is None else f"{name}:{self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class HangStack:
    """Stack of a rank's main thread."""

    source: str
    """File with the stack."""
    tool: str
    """Tool: ``faulthandler`` (also the recorder's format) or ``py-spy``."""
    doing: str | None
    """Activity, one of ``fsdp2prof.vocabulary.DOING``, from the innermost call that identifies it; null if
    none does."""
    own: HangFrame
    """Innermost frame in the user's own code; otherwise in an installed package or in torch."""
    at: HangFrame
    """Innermost Python frame."""
    native: str | None
    """Innermost C or C++ function below it; null if the tool shows none."""
    frames: list[HangFrame]
    """All frames of the main thread, innermost first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangPlace:
    """Ranks whose main threads are at the same line of the user's code with the same activity."""

    ranks: list[int]
    doing: str | None
    own: HangFrame
    at: HangFrame
    """Innermost native function of the first of these ranks, as in ``native``."""
    native: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class HangRank:
    """Last calls of one rank."""

    rank: int
    dump: str | None
    """File of its dump, or the log; null if it left none."""
    last: HangCall | None
    """Last call it issued."""
    standing_in: HangCall | None
    """First call it issued that has not finished; null if it waits in none."""
    behind: int | None
    """Number of collectives behind the furthest rank, in the group with the largest difference."""
    stack: HangStack | None = None
    """Stack of its main thread; null if there is none."""
    error: str | None = None
    """How it ended, from its manifest: an exception's last line, or ``SIGTERM``; null if it has not ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangAnalysis(Shown):
    """State of a job according to its Flight Recorder dumps and stacks."""

    schema: str = "fsdp2prof.hang/1"
    cause: str
    """``mismatch``, ``not_come``, ``no_dump``, ``order`` (ranks wait for each other in different groups),
    ``inside`` (issued by all ranks, not finished), ``none``, ``crashed`` (with an exception outside every
    collective), or ``stacks`` if there are stacks but no dumps."""
    culprits: list[int]
    """Ranks that the cause names; empty if it names none."""
    standings: list[HangStanding]
    """Blocked collectives, at most one per process group, that of the cause first."""
    mismatches: list[HangMismatch]
    ranks: list[HangRank]
    places: list[HangPlace]
    """Stacks of main threads, those of the ranks at fault first."""
    findings: list[Finding]
    verdict: list[str]
    warnings: list[str]
