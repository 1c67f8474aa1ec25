"""Charges: time of one rank's steps with the cause, the layer and the place that it belongs to.

A rank alone charges everything but what it waits for others (:class:`RankCharges`). :func:`settle` adds that
from the comparison of the ranks: the part of an exposed collective in which its last rank had not come goes
to whatever made that rank late. Charges are integers and sum to the steps exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fsdp2prof.analyzers.ranks.stragglers import Lateness
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings, Table
from fsdp2prof.tables.trace import CollectiveTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """Time of one rank's step, of one cause at one place."""

    rank: int
    step: int
    cause: str
    """One of ``fsdp2prof.vocabulary.LEDGER_CAUSES``."""
    ns: int
    fqn: str | None = None
    phase: str = "other"
    op: str | None = None
    """Kind of collective, or operator."""
    site: str | None = None
    """Python function, file and line."""
    why: str | None = None
    """Why a collective is exposed (a ``LateCause``), or why a late rank was late (a ``Straggler.kind``)."""
    late_rank: int | None = None
    """Of a wait: the rank that came last."""
    caught_up: bool = False
    """Of a wait: afterwards the device idles for the host's launches, before the host next stops for it, and
    without the wait it would only idle longer."""
    asleep: bool = False
    """Of a pause: whether the thread slept, and so waited for no processor."""
    detail: str | None = None
    """More on the why, in words."""
    operator: str | None = None
    """``c10d`` operator that issued an unattributed collective."""
    dtype: str | None = None
    group: str | None = None
    """Process group of a collective."""
    count: int = 0
    bytes: int = 0
    whole_ns: int = 0
    """How long the device's activities run, hidden parts included."""
    each_bytes: int = 0
    """Payload of each collective that is not FSDP's."""
    at_once: bool = False
    """Whether a collective that is not FSDP's follows another, with no matrix product or convolution between:
    one collective could carry both."""


class ChargePlace(NamedTuple):
    """What distinguishes the charges of a rank, as in :class:`Charge`."""

    step: int
    cause: str
    fqn: str | None
    phase: str
    op: str | None
    site: str | None
    why: str | None
    late_rank: int | None = None
    caught_up: bool = False
    asleep: bool = False
    detail: str | None = None
    operator: str | None = None
    dtype: str | None = None
    group: str | None = None
    each_bytes: int = 0
    at_once: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivePieces(Table):
    """Disjoint stretches of a step in which nothing ran but a collective, or its caller was blocked."""

    collective: IntArray
    """Row among the rank's analysed collectives."""
    step: IntArray
    start_ns: IntArray
    end_ns: IntArray
    evaluation: BoolArray
    """Whether a forward without backward was under way."""
    caught_up: BoolArray
    """As in :class:`Charge`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCharges:
    """One rank's own account of its time."""

    own: list[Charge]
    """Everything but collectives."""
    pieces: CollectivePieces
    operator: Strings
    """Per analysed collective: the operator that issued it."""
    site: Strings
    """Per analysed collective: the Python line that issued it; null without a recorded stack."""
    by_fsdp: BoolArray
    """Per analysed collective: whether FSDP issued it for a module."""
    at_once: BoolArray
    """Per analysed collective: as in :class:`Charge`."""


def settle(
    rank: int,
    charges: RankCharges,
    collectives: CollectiveTable,
    wait_ns: IntArray,
    blame: Mapping[int, Sequence[tuple[Lateness, int]]],
    why: Sequence[str | None],
) -> list[Charge]:
    """Return all charges of a rank: its own, and its collectives' with waiting split off.

    ``wait_ns`` is how long each collective waited for its last rank (-1 unknown); ``blame`` what made that
    rank late, by row, with weights; ``why`` the verdict on each collective.
    """
    pieces = charges.pieces
    row = pieces.collective
    arrived = collectives.start_ns + np.maximum(wait_ns, 0)
    waited = np.clip(
        np.minimum(pieces.end_ns, arrived[row]) - np.maximum(pieces.start_ns, collectives.start_ns[row]),
        0,
        None,
    )
    rest = pieces.end_ns - pieces.start_ns - waited
    sums: dict[tuple[int, int, bool, bool], list[int]] = defaultdict(lambda: [0, 0])
    rows = zip(
        row.tolist(),
        pieces.step.tolist(),
        pieces.evaluation.tolist(),
        pieces.caught_up.tolist(),
        waited.tolist(),
        rest.tolist(),
        strict=True,
    )
    for collective, step, evaluation, caught_up, peer, other in rows:
        entry = sums[collective, step, evaluation, caught_up]
        entry[0] += peer
        entry[1] += other
    found: dict[ChargePlace, list[int]] = defaultdict(lambda: [0, 0, 0])
    counted = np.zeros(len(collectives), dtype=np.bool_)
    for (collective, step, evaluation, caught_up), (peer, other) in sums.items():
        phase, op = collectives.phase[collective] or "other", collectives.op[collective] or "other"
        for late, ns in _shared(peer, blame.get(collective, ())):
            place = ChargePlace(
                step,
                "uneven_ranks",
                late.fqn,
                phase,
                op,
                late.site,
                late.kind,
                late_rank=late.rank,
                caught_up=caught_up,
                detail=late.text,
            )
            found[place][0] += ns
        own, size = bool(charges.by_fsdp[collective]), max(0, int(collectives.payload_bytes[collective]))
        place = ChargePlace(
            step,
            "evaluation" if evaluation else "communication" if own else "other_communication",
            collectives.fqn[collective],
            phase,
            op,
            charges.site[collective],
            why[collective],
            operator=charges.operator[collective],
            dtype=collectives.dtype[collective],
            group=collectives.process_group[collective],
            each_bytes=0 if own else size,
            at_once=bool(charges.at_once[collective]),
        )
        entry = found[place]
        entry[0] += other
        if not counted[collective]:
            counted[collective] = True
            entry[1] += 1
            entry[2] += size
    settled = [
        Charge(rank=rank, ns=ns, count=count, bytes=size, **place._asdict())
        for place, (ns, count, size) in found.items()
        if ns or count
    ]
    return [*charges.own, *settled]


def _shared(total: int, weights: Sequence[tuple[Lateness, int]]) -> list[tuple[Lateness, int]]:
    """Share a total out in proportion; the shares sum to it."""
    if not total:
        return []
    whole = sum(weight for _, weight in weights)
    if not whole:
        return [(Lateness(rank=None, fqn=None, kind="unknown", text=None), total)]
    edges = np.cumsum([0, *(weight for _, weight in weights)]).tolist()
    cuts = [total * edge // whole for edge in edges]
    return [(late, b - a) for (late, _), a, b in zip(weights, cuts[:-1], cuts[1:], strict=True) if b > a]
