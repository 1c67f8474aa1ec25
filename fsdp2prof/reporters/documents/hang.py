"""Document of a hang: the collective and the line that each rank is in, and the ranks that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Block, Column, Document, KeyFigure, Section, Source, Table, Value
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.formats import show_text
from fsdp2prof.results.hang import HangAnalysis, HangCall, HangRank, HangStack
from fsdp2prof.vocabulary import doing_label, layer_name

_RANKS = 16
_FRAMES = 12
_STACKS = 2
"""Places whose whole stack is shown."""
_UNKNOWN = "unknown"

_CAUSES = {
    "mismatch": "ranks differ",
    "not_come": "ranks are missing",
    "no_dump": "ranks without a dump",
    "order": "ranks wait for each other",
    "inside": "issued by all ranks, not finished",
    "crashed": "ranks crashed",
    "none": "no collective waits",
    "stacks": "unknown: no dumps",
}


@builds(HangAnalysis)
def hang_document(hang: HangAnalysis) -> Document:
    """Lay out the collective and the lines that block a job."""
    ranks = len(hang.ranks)
    dumps = sum(one.dump is not None for one in hang.ranks)
    stacks = sum(one.stack is not None for one in hang.ranks)
    with_stacks = [KeyFigure(value=f"{stacks} of {ranks}", label="ranks with stacks")] if stacks else []
    return Document(
        title="Where the job is blocked",
        numbers=[
            KeyFigure(value=_CAUSES[hang.cause], label="cause"),
            KeyFigure(value=f"{dumps} of {ranks}", label="ranks with a dump"),
            *with_stacks,
        ],
        sections=[
            *c.section("standings", "The blocked collective", _standings(hang), _mismatches(hang)),
            *c.section("places", "Lines", *_lines(hang)),
            Section(anchor="ranks", title="Last collective of each rank", blocks=[_ranks(hang)]),
        ],
    )


def _standings(hang: HangAnalysis) -> Table:
    columns = [
        *_call_columns("call"),
        c.name("came"),
        c.name("not_come", "not come"),
        c.name("no_dump", "no dump"),
    ]
    note = "the first unfinished one of each process group"
    title = "Collectives in progress"
    return c.table("standings", title, columns, hang.standings, note=note, noun="collective")


def _mismatches(hang: HangAnalysis) -> Table:
    rows: list[tuple[HangCall, Sequence[int], str]] = []
    for one in hang.mismatches:
        rows += [(one.found, one.ranks, one.kind), (one.expected, one.others, "expected")]
    columns = [*_call_columns(0), c.name("ranks", of=1), c.text("kind", of=2)]
    note = "the first of each process group"
    title = "Mismatched collectives"
    return c.table("mismatches", title, columns, rows, note=note, noun="collective")


def _lines(hang: HangAnalysis) -> list[Block]:
    """Return every place, and the whole main thread of a rank at each of the first."""
    by_rank = {one.rank: one.stack for one in hang.ranks}
    stacks = [(one.ranks[0], by_rank.get(one.ranks[0])) for one in hang.places[:_STACKS]]
    return [_places(hang), *(_stack(rank, stack) for rank, stack in stacks if stack is not None)]


def _places(hang: HangAnalysis) -> Table:
    columns = [
        c.name("ranks"),
        c.name("own", "own code", of="own.short"),
        c.name("function", of="own.function"),
        c.text("doing", show=lambda doing: show_text(None) if doing is None else doing_label(doing)),
        c.name("at", "innermost", of="at.short"),
        c.name("native", "C or C++"),
    ]
    note = "the innermost call in the user's own code, and the innermost of all"
    title = "Stacks of the main threads"
    return c.table("places", title, columns, hang.places, note=note, limit=_RANKS, noun="place")


def _stack(rank: int, stack: HangStack) -> Table:
    columns = [c.name("function"), c.name("place", of="short")]
    note = f"innermost call first; written by {stack.tool}"
    title = f"Main thread of rank {rank}"
    return c.table(f"stack_{rank}", title, columns, stack.frames, note=note, limit=_FRAMES, noun="call")


def _ranks(hang: HangAnalysis) -> Table:
    columns = [
        c.number("rank"),
        c.text("state", of=_state),
        c.count("behind"),
        *_call_columns(_call),
        c.name("place", "issued at", of=lambda one: None if (call := _call(one)) is None else call.place),
    ]
    note = "the call in progress, otherwise the last one; behind: collectives behind the furthest rank"
    title = "Last collective of each rank"
    return c.table("ranks", title, columns, hang.ranks, note=note, limit=_RANKS, noun="rank")


def _call(one: HangRank) -> HangCall | None:
    return one.standing_in or one.last


def _state(one: HangRank) -> str:
    if _call(one) is None:
        return "no dump" if one.dump is None else "issued nothing"
    return "waits in" if one.standing_in is not None else "finished"


def _call_columns(of: Source) -> list[Column]:
    """Return the columns of a call, which ``of`` takes from an item."""
    item = Column(name="call", label="", of=of)

    def part(value: Callable[[HangCall], Value]) -> Callable[[Any], Value]:
        def taken(one: Any) -> Value:
            call: Any = item.taken(one)
            return None if call is None else value(call)

        return taken

    return [
        c.op("op", "operation", of=part(lambda call: call.op)),
        c.number("seq", "number", of=part(lambda call: call.seq)),
        c.name("fqn", "layer", of=part(lambda call: layer_name(call.fqn) if call.layer_known else _UNKNOWN)),
        c.text("phase", of=part(lambda call: call.phase)),
        c.name("group", of=part(lambda call: call.mesh_dim or call.group_desc or call.group)),
        c.name("input_sizes", "input", of=part(lambda call: ", ".join(map(str, call.input_sizes)) or None)),
        c.dtype(of=part(lambda call: call.dtype)),
    ]
