"""Sentences about a hang: the blocked collective, the lines where ranks wait, the ranks at fault, and
advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp2prof.analyzers.findings import finding, wordings
from fsdp2prof.analyzers.layers import in_phase, named_layer
from fsdp2prof.results.finding import EvidenceValue, Finding, Scalar
from fsdp2prof.results.hang import (
    HangAnalysis,
    HangCall,
    HangFrame,
    HangMismatch,
    HangPlace,
    HangRank,
    HangStanding,
)
from fsdp2prof.units import plural
from fsdp2prof.vocabulary import doing_label, dtype_label, op_label, printable, quoted_error

_LISTED = 8
_ENDED_BY_OTHERS = (None, "SIGTERM", "KeyboardInterrupt")
"""Errors that only say that another process ended the rank."""
_SHOWN = 3
"""Places that a sentence names."""
_BY_PLACE = ("not_come", "no_dump", "stacks", "none")
"""Causes that the culprits' own lines explain."""


def verdict(hang: HangAnalysis) -> list[str]:
    """Return at most five sentences: the cause, the collective that blocks the job, the lines, the advice."""
    ended = _endings(hang.ranks, hang.culprits)
    sentences = [*([] if ended is None else [ended]), *_cause(hang)]
    sentences += [_places(hang.places)] if hang.places else []
    if hang.cause == "none" and not hang.places:
        return sentences
    if hang.cause == "inside" and not hang.standings[0].ranks_known:
        return [*sentences, wordings("hang")["hang/unknown_group"]["advice"]]
    if hang.cause == "not_come" and not hang.culprits:
        return [*sentences, wordings("hang")["hang/unknown_ranks"]["advice"]]
    by_place = _advice(hang.places, hang.culprits) if hang.cause in _BY_PLACE else None
    return [*sentences, by_place or wordings("hang")[f"hang/{hang.cause}"]["advice"]]


def why(hang: HangAnalysis) -> list[str]:
    """Return the cause, and the lines at which the ranks are: what a crash's own message does not say."""
    if hang.cause == "none":
        return []
    causes = [] if hang.cause in ("crashed", "stacks") else _cause(hang)[:1]
    return [*causes, *([_places(hang.places)] if hang.places else [])]


def _cause(hang: HangAnalysis) -> list[str]:
    stand = hang.standings[0] if hang.standings else None
    if hang.cause == "crashed":
        return [_stands(stand)] if stand is not None else []
    if hang.cause == "stacks":
        return ["No rank left a dump of its collectives; only stacks are available."]
    if hang.cause == "none":
        return ["No rank waits in a collective: every issued one has finished, and all ranks agree."]
    if hang.cause == "mismatch":
        sentences = [_mismatch(hang.mismatches[0])]
        sentences += [] if stand is None else [_stands(stand)]
    elif stand is None:
        left = f"{_ranks(hang.culprits).capitalize()} left no dump: it ended, or no dump was requested"
        sentences = [f"{left}. No other rank waits in a collective: all of theirs have finished or failed."]
    else:
        sentences = [_first(hang, stand), *_for_these(hang, stand)]
    return sentences


def hang_findings(hang: HangAnalysis) -> list[Finding]:
    """Return the cause as a finding; none if no rank waits."""
    if hang.cause in ("none", "stacks"):
        return []
    calls = [one.expected for one in hang.mismatches[:1]] or [one.call for one in hang.standings[:1]]
    evidence: list[Scalar | Mapping[str, Scalar]] = [
        {"group": one.group, "seq": one.seq, "op": one.op} for one in calls
    ]
    fqn = calls[0].fqn if calls else None
    facts: dict[str, EvidenceValue] = {"ranks": hang.culprits, "calls": evidence}
    cause, said = hang.cause.replace("_", "-"), hang.verdict
    return [finding("hang", "hang", facts, fqn=fqn, cause=cause, first=said[0], last=said[-1])]


def _first(hang: HangAnalysis, stand: HangStanding) -> str:
    if hang.cause == "inside" and not stand.ranks_known:
        return (
            f"{_ranks(stand.ranks).capitalize()} issued {_call(stand.call)}, and it has not finished; "
            "the dumps do not list the ranks of its group."
        )
    if hang.cause == "inside":
        return f"All of {_ranks(stand.ranks)} issued {_call(stand.call)}, and it has not finished."
    waits = f"{_ranks(stand.came).capitalize()} {_verb(stand.came, 'waits', 'wait')} in {_call(stand.call)}"
    if hang.cause == "not_come" and not hang.culprits:
        if len(hang.ranks) == 1:
            return f"{waits}; no other rank left a dump."
        return f"{waits}, which no other rank with a dump has issued; no dump lists the ranks of that group."
    if hang.cause == "not_come":
        who = hang.culprits
        last = next((one.last for one in hang.ranks if one.rank == who[0]), None)
        did = (
            ""
            if last is None
            else f"; the last call of rank {who[0]} was {_short(last)}, and it has finished"
        )
        return f"{waits}, which {_ranks(who)} {_verb(who, 'has', 'have')} not issued{did}."
    if hang.cause == "no_dump":
        who = hang.culprits
        return f"{waits}; {_ranks(who)} of its group left no dump: ended, stuck elsewhere, or not requested."
    others = [one for one in hang.standings if one is not stand]
    also = "".join(f", and {_ranks(one.came)} in {_call(one.call)}" for one in others[:1])
    return f"{waits}{also}: they wait for each other in different process groups."


def _for_these(hang: HangAnalysis, stand: HangStanding) -> list[str]:
    """Name the ranks that wait elsewhere for a collective that all known ranks have issued."""
    if stand.not_come or stand.no_dump:
        return []
    others = [one for one in hang.standings if set(one.not_come) & set(stand.came)]
    return [
        f"{_ranks(one.came).capitalize()} {_verb(one.came, 'waits', 'wait')} for {_ranks(one.not_come)} in "
        f"{_call(one.call)}."
        for one in others[:1]
    ]


def _stands(stand: HangStanding) -> str:
    missing = f", {_ranks(stand.not_come)} missing" if stand.not_come else ""
    gone = f", {_ranks(stand.no_dump)} without a dump" if stand.no_dump else ""
    return f"The job is blocked in {_call(stand.call)}{missing}{gone}."


def _mismatch(one: HangMismatch) -> str:
    who, others = _ranks(one.ranks), _ranks(one.others)
    if one.kind == "diverged":
        return (
            f"{who.capitalize()} {_verb(one.ranks, 'waits', 'wait')} in {_call(one.found)} while {others} "
            f"{_verb(one.others, 'waits', 'wait')} in {_call(one.expected)}: they issued different "
            "collectives earlier, because no rank completes a collective that another has not issued."
        )
    issued = f"{_verb(one.ranks, 'issues', 'issue')} {_full(one.found)}"
    expected = f"{others} {_verb(one.others, 'issues', 'issue')} {_full(one.expected)}"
    where = f"as collective {one.expected.seq} of {_group(one.expected)}"
    told = {
        "skipped": f"{who} skipped {plural(one.count, 'collective')}",
        "extra": f"{who} issued {plural(one.count, 'additional collective')}",
        "swapped": f"{who} issued two collectives in reverse order",
        "early": f"{who} skipped a collective or issued one too early: in an earlier step this came later",
        "size": "the sizes differ",
        "dtype": "the dtypes differ",
        "op": "the operations differ",
    }[one.kind]
    return f"{who.capitalize()} {issued} while {expected}, {where}: {told}."


def _call(call: HangCall) -> str:
    """``all-gather 12 of `layers.1` in forward (group dp_shard, [2080] fp32)``."""
    return f"{op_label(call.op)} {call.seq}{_layer(call)} ({_group(call)}{_tensor(call)})"


def _short(call: HangCall) -> str:
    return f"{op_label(call.op)} {call.seq}{_layer(call)}"


def _full(call: HangCall) -> str:
    return f"{op_label(call.op)} of {_sizes(call)}{_layer(call)}" if call.input_sizes else op_label(call.op)


def _layer(call: HangCall) -> str:
    if not call.layer_known:
        return ""
    return f" of {named_layer(call.fqn)}" + (f" {in_phase(call.phase)}" if call.phase is not None else "")


def _group(call: HangCall) -> str:
    name = printable(call.mesh_dim or call.group_desc or call.group)
    known = name.removeprefix("unknown")
    return f"group {name}" if known == name else f"an unnamed group{known.partition(', work')[0]}"


def _tensor(call: HangCall) -> str:
    return f", {_sizes(call)}" if call.input_sizes else ""


def _sizes(call: HangCall) -> str:
    shown = ", ".join(map(str, call.input_sizes[:2])) + (", ..." if len(call.input_sizes) > 2 else "")
    return shown if call.dtype is None else f"{shown} {dtype_label(call.dtype)}"


# Lines of code.


def _places(places: Sequence[HangPlace]) -> str:
    """``Rank 1 is in `pause` (train.py:16), loading data; ranks 0, 2 in `main` (train.py:34).``"""
    told = [_place(one, first=one is places[0]) for one in places[:_SHOWN]]
    rest = sum(len(one.ranks) for one in places[_SHOWN:])
    more = f"; {rest} more elsewhere" if rest else ""
    return "; ".join(told) + more + "."


def _advice(places: Sequence[HangPlace], culprits: Sequence[int]) -> str | None:
    """Return advice by the activity of the ranks at fault; None without their stacks."""
    theirs = [one for one in places if set(one.ranks) & set(culprits)]
    if not theirs:
        return None
    doing = {one.doing for one in theirs}
    known = wordings("hang").get(f"doing/{doing.pop()}") if len(doing) == 1 else None
    if known:
        return known["advice"]
    return f"Check what {_frame(theirs[0].own)} does there, and that all ranks reach it."


def _endings(ranks: Sequence[HangRank], culprits: Sequence[int]) -> str | None:
    """Say how the culprits ended, where their manifests do."""
    ended = [one for one in ranks if one.rank in culprits and one.error not in _ENDED_BY_OTHERS]
    if not ended:
        return None
    one, alike = ended[0], [rank.rank for rank in ended if rank.error == ended[0].error]
    error = quoted_error(printable(one.error or ""))
    return f"{_ranks(alike).capitalize()} ended with {error}{'' if error.endswith('.') else '.'}"


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1, 2 and 5 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"ranks {', '.join(map(str, ranks[:_LISTED]))}{more}"


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    """The form of a verb for so many ranks."""
    return one if len(ranks) == 1 else several


def _place(place: HangPlace, *, first: bool) -> str:
    stands = f" {_verb(place.ranks, 'is', 'are')}" if first else ""
    who = _ranks(place.ranks)
    inner = "" if place.native is None else f", inside `{printable(place.native)}`"
    doing = "" if place.doing is None else f", {doing_label(place.doing)}"
    return f"{who.capitalize() if first else who}{stands} in {_frame(place.own)}{doing}{inner}"


def _frame(frame: HangFrame) -> str:
    return f"`{printable(frame.function)}` ({printable(frame.short)})"
