"""Result of ``analyze hang``: where a job stands, who has not come or differs, and at which line."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results.finding import Finding
from fsdp2prof.results.shown import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class HangCall:
    """A collective or point-to-point call as one rank issued it."""

    op: str
    """As in ``analyze trace``, or torch's own name where none fits: ``barrier``, ``send 0->1``."""
    group: str
    """Name of the process group."""
    group_desc: str
    mesh_dim: str | None
    """Mesh dimension that the group spans; null without a manifest."""
    seq: int
    input_sizes: list[list[int]]
    output_sizes: list[list[int]]
    dtype: str | None
    fqn: str | None
    """Layer whose parameters it moves; null where unknown or where it is not FSDP's."""
    phase: str | None
    """``forward`` or ``backward``; null where unknown."""
    layer_known: bool
    """Whether the layer is known; needs a manifest."""
    finished: bool
    created_ns: int
    place: str | None
    """The innermost line outside torch that issued it; null without stacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangStanding:
    """A collective that ranks of one process group are blocked in."""

    call: HangCall
    """As the lowest rank that came issued it."""
    ranks: list[int]
    """Of the group."""
    came: list[int]
    not_come: list[int]
    no_dump: list[int]
    """Ranks of the group that left no dump: whether they came is unknown."""
    ranks_known: bool = True
    """Whether a dump or a manifest says who belongs to the group; else ``ranks`` are those that used it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangMismatch:
    """The first collective of a process group that not all its ranks issued alike."""

    kind: str
    """``size``, ``dtype``, ``op``; ``skipped``, ``extra`` or ``swapped`` where what follows shows it;
    ``early`` where the odd call followed the expected one before, so it was skipped or came too early;
    ``diverged`` where a log says that ranks wait under different numbers."""
    ranks: list[int]
    """The odd ones, fewer than the others or without the lowest rank."""
    found: HangCall
    others: list[int]
    expected: HangCall
    count: int
    """Collectives skipped or added; 0 for other kinds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangFrame:
    """One call on a stack."""

    file: str
    line: int | None
    """Null where the tool does not say it, mostly of C or C++."""
    function: str

    @property
    def short(self) -> str:
        """The file's name, or its path in its package, and the line: ``train.py:12``."""
        _, installed, inside = self.file.rpartition("-packages/")
        name = inside if installed else self.file.rpartition("/")[2]
        return name if self.line is None else f"{name}:{self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class HangStack:
    """Where a rank's main thread stood."""

    source: str
    """The file that says so."""
    tool: str
    """``faulthandler``, in whose form the recorder writes, or ``py-spy``."""
    doing: str | None
    """One of ``fsdp2prof.vocabulary.DOING`` by the innermost call that says it; null where none does."""
    own: HangFrame
    """The innermost call in the user's own code; where there is none, of an installed package or of torch."""
    at: HangFrame
    """The innermost Python call."""
    native: str | None
    """The innermost function of C or C++ below it; null where the tool shows none."""
    frames: list[HangFrame]
    """All of the main thread, innermost first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangPlace:
    """Ranks whose main threads stand at the same line of the user's code, doing the same."""

    ranks: list[int]
    doing: str | None
    own: HangFrame
    at: HangFrame
    """Of the first of these ranks, as ``native``."""
    native: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class HangRank:
    """What one rank did last."""

    rank: int
    dump: str | None
    """Its file, or the log that says it; null where it left none."""
    last: HangCall | None
    """The last call it issued."""
    standing_in: HangCall | None
    """The first call it issued that has not finished; null where it waits in none."""
    behind: int | None
    """Collectives that it is behind the furthest rank of the group it is furthest behind in."""
    stack: HangStack | None = None
    """Where its main thread stood; null where no file says so."""
    error: str | None = None
    """What it ended with, by its manifest: an exception's last line, ``SIGTERM``; null where it has not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangAnalysis(Shown):
    """What the Flight Recorder dumps and the stacks of a job say about where it stands."""

    schema: str = "fsdp2prof.hang/1"
    cause: str
    """``mismatch``, ``not_come``, ``no_dump``, ``order`` (ranks wait for each other in different groups),
    ``inside`` (all came, none got out), ``none``, ``crashed`` (with an exception
    outside every collective), or ``stacks`` where there are stacks and no dumps."""
    culprits: list[int]
    """Ranks that the cause names; empty where none does."""
    standings: list[HangStanding]
    """One a process group at most, that of the cause first."""
    mismatches: list[HangMismatch]
    ranks: list[HangRank]
    places: list[HangPlace]
    """Where the main threads stand whose stacks were kept, those of the culprits first."""
    findings: list[Finding]
    verdict: list[str]
    warnings: list[str]
