"""From the dumps of a job's ranks to where it stands and why.

Which layer's parameters a collective moves, and in which phase, by the parameter groups of a manifest.

A size that only one group has decides the layer. Where several have it, the order of a step does
(:mod:`fsdp2prof.analyzers.recorded_groups`): the recorded calls must fit it at one place only, else the layer
stays unknown.

The first collective of a group that not all its ranks issued alike, and what makes them differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fsdp2prof.analyzers.hang.groups import (
    GroupCalls,
    Signature,
    by_place,
    group_calls,
    outside,
    outside_collectives,
    signature,
    stack_of,
)
from fsdp2prof.analyzers.hang.wording import hang_findings, verdict
from fsdp2prof.analyzers.recorded_groups import Due, Key, Layer, has_several_roots, step_cycles
from fsdp2prof.by_key import grouped
from fsdp2prof.manifest import RankManifest
from fsdp2prof.results.hang import HangAnalysis, HangCall, HangMismatch, HangRank, HangStack, HangStanding
from fsdp2prof.tables.flight_recorder import SOME_OP, FlightDump, Issued, RankStacks


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """Ranks that issued a different collective from the others under one sequence number."""

    kind: str
    """As in :class:`fsdp2prof.results.hang.HangMismatch`."""
    count: int
    seq: int
    ranks: list[int]
    furthest: int
    """The one of the others that got furthest."""
    others: list[int]
    found: Issued
    expected: Issued


def first_mismatch(group: GroupCalls) -> Mismatch | None:
    """Compare the ranks at each sequence number that two of them still hold; None where all agree."""
    if (diverged := _diverged(group)) is not None:
        return diverged
    for seq in sorted({seq for calls in group.calls.values() for seq in calls}):
        alike = grouped(
            (signature(calls[seq]), rank)
            for rank, calls in group.calls.items()
            if seq in calls and calls[seq][0].op != SOME_OP
        )
        if len(alike) > 1:
            usual = max(alike.values(), key=lambda ranks: (len(ranks), -min(ranks)))
            odd = min((ranks for ranks in alike.values() if ranks is not usual), key=min)
            return _mismatch(group, seq, odd, usual)
    return None


def _diverged(group: GroupCalls) -> Mismatch | None:
    """Ranks that wait under different numbers in a log: no rank ends a collective that another has not."""
    if not group.from_log:
        return None
    waiting: dict[int, list[int]] = defaultdict(list)
    for rank, calls in group.calls.items():
        for seq, ones in calls.items():
            if not ones[0].finished and ones[0].op != SOME_OP:
                waiting[seq].append(rank)
    if len(waiting) < 2:
        return None
    usual = max(waiting, key=lambda seq: (len(waiting[seq]), -min(waiting[seq])))
    odd = min((seq for seq in waiting if seq != usual), key=lambda seq: min(waiting[seq]))
    return Mismatch(
        kind="diverged",
        count=0,
        seq=min(usual, odd),
        ranks=waiting[odd],
        furthest=waiting[usual][0],
        others=waiting[usual],
        found=group.calls[waiting[odd][0]][odd][0],
        expected=group.calls[waiting[usual][0]][usual][0],
    )


def _mismatch(group: GroupCalls, seq: int, odd: list[int], usual: list[int]) -> Mismatch:
    furthest = max(usual, key=group.last)
    found, expected = group.calls[odd[0]][seq], group.calls[furthest][seq]
    before = [signature(calls) for number, calls in sorted(group.calls[furthest].items()) if number < seq]
    one, other = _differing(expected, found)
    kind, count = _kind(_from(group, furthest, seq), _from(group, odd[0], seq), before)
    if kind is None:
        kind = "op" if one.op != other.op else "dtype" if one.dtype != other.dtype else "size"
    return Mismatch(
        kind=kind,
        count=count,
        seq=seq,
        ranks=odd,
        furthest=furthest,
        others=usual,
        found=other,
        expected=one,
    )


def _kind(
    expected: Sequence[Signature], found: Sequence[Signature], before: Sequence[Signature]
) -> tuple[str | None, int]:
    """Classify a mismatch by the calls that follow, otherwise by earlier ones; None if neither decides."""
    if len(expected) > 1 and len(found) > 1 and (expected[1], expected[0]) == (found[0], found[1]):
        return "swapped", 0
    if count := _ahead(expected, found):
        return "skipped", count
    if count := _ahead(found, expected):
        return "extra", count
    if (expected[0], found[0]) in pairwise(before):
        return "early", 0
    return None, 0


def _ahead(behind: Sequence[Signature], ahead: Sequence[Signature]) -> int:
    """Return by how many known calls one sequence runs ahead of the other; 0 if it does not."""
    for count in range(1, len(behind)):
        if all(one == other for one, other in zip(behind[count:], ahead, strict=False)):
            return count
    return 0


def _from(group: GroupCalls, rank: int, seq: int) -> list[Signature]:
    return [signature(calls) for number, calls in sorted(group.calls[rank].items()) if number >= seq]


def _differing(expected: Sequence[Issued], found: Sequence[Issued]) -> tuple[Issued, Issued]:
    """The first pair of a coalesced call that differs."""
    pairs = list(zip(expected, found, strict=False))
    return next((pair for pair in pairs if signature(pair[:1]) != signature(pair[1:])), pairs[-1])


def layer_of(one: Issued, dump: FlightDump, manifest: RankManifest | None) -> Layer | None:
    """Return the layer of a call in a rank's dump; None if it is not FSDP's or is unknown."""
    if manifest is None or one.p2p:
        return None
    for cycle in step_cycles(manifest):
        keys = {due.key for due in cycle}
        if (key := _key(one, keys)) is not None:
            by_order = [] if has_several_roots(manifest) else _at(one, dump, cycle, keys)
            return _decided([due.layer for due in cycle if due.key == key], by_order)
    return None


def _decided(by_size: Sequence[Layer], by_order: Sequence[Layer]) -> Layer | None:
    for layers in (by_order, by_size):
        if len({layer.fqn for layer in layers}) == 1:
            phases = {layer.phase for layer in layers}
            return Layer(layers[0].fqn, phases.pop() if len(phases) == 1 else None)
    return None


def _at(one: Issued, dump: FlightDump, cycle: Sequence[Due], keys: set[Key]) -> list[Layer]:
    """Places in the cycle at which the calls up to this one fit it."""
    told = [key for issued in _until(one, dump.issued) if (key := _key(issued, keys)) is not None]
    places = range(len(cycle)) if not dump.whole else [(len(told) - 1) % len(cycle)]
    told = told[-2 * len(cycle) :]
    return [
        cycle[place].layer
        for place in places
        if all(cycle[(place - back) % len(cycle)].key == key for back, key in enumerate(reversed(told)))
    ]


def _until(one: Issued, issued: Iterable[Issued]) -> Iterable[Issued]:
    for other in issued:
        yield other
        if other is one:
            return


def _key(one: Issued, keys: set[Key]) -> Key | None:
    """The key of a call among some; gloo runs a reduce-scatter as an all-reduce of the whole input."""
    size = one.input_bytes
    if size is None:
        return None
    ops = (one.op, "reduce_scatter") if one.backend == "gloo" and one.op == "all_reduce" else (one.op,)
    return next((key for op in ops if (key := (one.group, op, size)) in keys), None)


def analyze_hang(
    dumps: Sequence[FlightDump],
    manifests: Mapping[int, RankManifest] | None = None,
    warnings: Sequence[str] = (),
    *,
    stacks: Sequence[RankStacks] = (),
) -> HangAnalysis:
    """Say which collective a job is blocked in, which ranks have not issued it, which issue another.

    ``manifests`` by rank name layers and mesh dimensions, ``stacks`` say at which lines the ranks stand. At
    least one dump, or one stack.
    """
    stood = {one.rank: stack for one in stacks if (stack := stack_of(one)) is not None}
    hang = _Hang(dumps, manifests or {}, stood)
    mismatches = hang.mismatches()
    standings = hang.standings()
    cause, culprits, first = _cause(mismatches, standings, hang)
    if not dumps:
        cause, culprits = "stacks", outside_collectives(stood)
    if cause != "mismatch" and (crashed := hang.crashed()):
        cause, culprits = "crashed", crashed
    standings.sort(key=lambda one: one is not first)
    result = HangAnalysis(
        cause=cause,
        culprits=culprits,
        standings=standings,
        mismatches=mismatches,
        ranks=hang.ranks(),
        places=by_place(stood, culprits),
        findings=[],
        verdict=[],
        warnings=list(warnings),
    )
    result = replace(result, verdict=verdict(result))
    return replace(result, findings=hang_findings(result))


def _cause(
    mismatches: Sequence[HangMismatch], standings: Sequence[HangStanding], hang: _Hang
) -> tuple[str, list[int], HangStanding | None]:
    """Return the cause, the ranks it names, and the blocked collective it explains."""
    if mismatches:
        named = mismatches[0].expected
        group = next((one for one in standings if one.call.group == named.group), None)
        return "mismatch", mismatches[0].ranks, group
    for one in standings:
        if free := [rank for rank in one.not_come if hang.unfinished(rank) is None]:
            return "not_come", free, one
    for one in standings:
        if one.no_dump:
            return "no_dump", one.no_dump, one
    stuck = _followed(standings, hang)
    if stuck is not None:
        alone = not stuck.ranks_known and len(stuck.ranks) == 1  # a rank does not wait for itself
        return "not_come" if alone else "inside", [], stuck
    for one in standings:
        if one.not_come:
            return "order", sorted({rank for other in standings for rank in other.not_come}), one
    return ("no_dump", gone, None) if (gone := hang.without_dump()) else ("none", [], None)


def _followed(standings: Sequence[HangStanding], hang: _Hang) -> HangStanding | None:
    """Return the collective that the others wait for in the end; None where they wait in a circle."""
    waiting = [one for one in standings if one.not_come] or standings
    one = waiting[0] if waiting else None
    seen: list[HangStanding] = []
    while one is not None and one not in seen:
        if not one.not_come:
            return one
        seen.append(one)
        rank = one.not_come[0]
        call = hang.unfinished(rank)
        one = next(
            (s for s in standings if call is not None and s.call.group == call.group and rank in s.came), None
        )
    return None


class _Hang:
    """The dumps of a job, with cached lookups."""

    def __init__(
        self,
        dumps: Sequence[FlightDump],
        manifests: Mapping[int, RankManifest],
        stacks: Mapping[int, HangStack],
    ) -> None:
        self._stacks = stacks
        self._dumps = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.rank)}
        self._manifests = manifests
        self._groups = group_calls(list(self._dumps.values()), manifests)

    def unfinished(self, rank: int) -> Issued | None:
        """The first call of a rank that has not finished."""
        return next((one for one in self._dumps[rank].issued if not one.finished), None)

    def crashed(self) -> list[int]:
        """Ranks that ended with an exception outside collectives; inside one, another may be why."""
        told = {rank for rank, one in self._manifests.items() if one.state == "crashed" and one.error}
        return sorted(told - (set(self._stacks) - set(outside(self._stacks))) if self._stacks else ())

    def without_dump(self) -> list[int]:
        """Ranks that a group names and that left no dump."""
        return sorted({rank for group in self._groups for rank in group.no_dump})

    def mismatches(self) -> list[HangMismatch]:
        """The first mismatch of each group, the earliest issued first."""
        found = [one for group in self._groups if (one := first_mismatch(group)) is not None]
        return [self._mismatch(one) for one in sorted(found, key=lambda one: one.expected.created_ns)]

    def standings(self) -> list[HangStanding]:
        """The first unfinished collective of each group, the earliest issued first."""
        found = [one for group in self._groups if (one := self._standing(group)) is not None]
        return sorted(found, key=lambda one: one.call.created_ns)

    def ranks(self) -> list[HangRank]:
        """Every rank that a group names or that left something, in order."""
        of_groups = {rank for group in self._groups for rank in group.ranks}
        named = sorted(of_groups | set(self._dumps) | set(self._stacks))
        return [self._rank(rank) for rank in named]

    def _standing(self, group: GroupCalls) -> HangStanding | None:
        waiting = {
            rank: min(unfinished)
            for rank, calls in group.calls.items()
            if (unfinished := [seq for seq, ones in calls.items() if not all(one.finished for one in ones)])
        }
        if not waiting:
            return None
        seq = min(waiting.values())
        came = sorted(rank for rank in group.calls if group.last(rank) >= seq)
        first = min(rank for rank, at in waiting.items() if at == seq)
        return HangStanding(
            call=self._call(first, group.calls[first][seq][0]),
            ranks=list(group.ranks),
            came=came,
            not_come=sorted(set(group.calls) - set(came)),
            no_dump=group.no_dump,
            ranks_known=group.ranks_known,
        )

    def _mismatch(self, one: Mismatch) -> HangMismatch:
        return HangMismatch(
            kind=one.kind,
            ranks=one.ranks,
            found=self._call(one.ranks[0], one.found),
            others=one.others,
            expected=self._call(one.furthest, one.expected),
            count=one.count,
        )

    def _rank(self, rank: int) -> HangRank:
        dump, stack = self._dumps.get(rank), self._stacks.get(rank)
        error = self._manifests[rank].error if rank in self._manifests else None
        if dump is None:
            return HangRank(
                rank=rank, dump=None, last=None, standing_in=None, behind=None, stack=stack, error=error
            )
        last, waits = dump.issued[-1] if dump.issued else None, self.unfinished(rank)
        groups = [group for group in self._groups if rank in group.calls]
        return HangRank(
            rank=rank,
            dump=dump.source,
            last=None if last is None else self._call(rank, last),
            standing_in=None if waits is None else self._call(rank, waits),
            behind=max((group.front - group.last(rank) for group in groups), default=0),
            stack=stack,
            error=error,
        )

    def _call(self, rank: int, one: Issued) -> HangCall:
        manifest = self._manifests.get(rank)
        layer = layer_of(one, self._dumps[rank], manifest)
        groups = manifest.process_groups if manifest is not None else []
        return HangCall(
            op=one.op,
            group=one.group,
            group_desc=one.group_desc,
            mesh_dim=next((group.mesh_dim for group in groups if group.name == one.group), None),
            seq=one.seq,
            input_sizes=[list(shape) for shape in one.input_sizes],
            output_sizes=[list(shape) for shape in one.output_sizes],
            dtype=one.dtype,
            fqn=None if layer is None else layer.fqn,
            phase=None if layer is None else layer.phase,
            layer_known=layer is not None,
            finished=one.finished,
            created_ns=one.created_ns,
            place=one.place,
        )
