"""The book that rules enter losses into: each takes charges out of one pool, so that none counts twice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from statistics import median
from typing import Literal, cast

from fsdp2prof.analyzers.findings import worded, wordings
from fsdp2prof.analyzers.layers import fold_names, named_layer
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.analyzers.ledger.thresholds import FindingThresholds, severity_of, worth_telling
from fsdp2prof.analyzers.steps import differs_traced, mean, typical_ns, window_count
from fsdp2prof.by_key import summed
from fsdp2prof.manifest import ParamGroupInfo, RankManifest
from fsdp2prof.results.communication import GroupRow
from fsdp2prof.results.finding import SEVERITIES, EvidenceValue, Place, Severity
from fsdp2prof.results.ledger import GainBasis, LedgerEntry, LedgerPlace, LedgerRemedy
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.units import format_frac, format_ns
from fsdp2prof.vocabulary import OPS

_PLACES = 12
"""Places of an entry that are listed one by one."""
_ALIKE = 1.05
"""Counts of steps that differ by less are alike."""
_NEARLY_NONE = 0.05
"""Fraction of all communication whose waits may be unknown without a word."""

_REASONS = {
    "launch": "launched too late",
    "communicator": "queued behind another collective of its process group",
    "stream": "waited for earlier work of its stream",
    "transfer": "its transfer took longer than usual",
    "transfer_or_peer": "a slow transfer, or a rank that came late",
    "kernel": "kernels of the late rank took longer",
    "host": "the host of the late rank launched later",
    "data_loader": "the late rank waited for its data loader",
    "communication": "the late rank waited for others",
    "links": "the late rank has slower links than other groups",
    "unknown": "not known",
    "loop": "a loop of small operators",
    "outside": "work outside of training",
    "outside_loop": "a loop of small operators outside of training",
    "anomaly": "autograd's anomaly detection",
    "loading": "creating a batch",
    "workers": "worker processes create the batches",
    "rebuilt": "a new data loader iterator",
    "updating": "the optimizer updates parameters on the CPU",
    "one_by_one": "an optimizer that updates parameters one by one",
    "float64": "operators on float64 tensors",
    "float32": "matrix products in float32 without tensor cores",
    "attention_in_float32": "attention in float32",
    "layout": "conversions between channels first and last",
    "indexed": "gradients of a tensor indexed by a tensor",
    "untrained": "backward of parameters that no optimizer updates",
    "repeated": "a frozen model's forward of the same inputs in every step",
    "in_front": "copies on other streams wait for them",
    "one_hot": "one-hot matrices and products with them",
    "bluestein": "Fourier transforms of a length with a large prime factor",
    "ignored": "logits of all positions, with those whose labels are ignored",
    "unused_logits": "logits of positions that no loss takes",
    "frozen_gradient": "gradients of frozen weights",
    "all_experts": "experts that each compute all tokens",
    "masked": "attention with one boolean mask for all samples and heads",
    "contraction": "products that are stored and then summed",
    "distances": "differences that are stored and then summed",
    "unaligned": "matrix products with rows not aligned to 16 bytes",
    "scores": "attention that stores its scores",
    "returned_weights": "attention that returns its weights",
    "memory": "memory-bound kernels",
    "sliced": "gradients of slices of one tensor",
    "update": "matrix products of the optimizer",
    "fsdp": "FSDP's own work on the host",
    "forwards": "forwards of checkpointed modules",
    "compiled": "code that torch.compile made",
}
"""``why`` of a charge -> the same in words."""

_NEARLY_IN_ONE = 0.9
"""Fraction of a time in one of several steps, from which it counts as that step's alone."""
_NEARLY_ALL = 0.98
"""Part of a gain from which on it is called all of the time."""
_AT_THIS_LINE = "at this line"
_BESIDE = f" (other losses {_AT_THIS_LINE} included)"
_SLOWEST = "no rank can gain more than the one that gains least"
SLOWED = 1.5
"""A traced step this many times as long as an unrecorded one is called slowed: its times are not its own."""
UNTRACED = "a step without tracing takes no more than that beyond its compute"
"""Why a gain is less than its cause takes of a traced step."""

RUNNING = ("host_pause", "host", "compute", "fsdp_copy", "garbage_collection")
"""Causes in which a rank's thread runs or is ready to, on a CPU."""

ALL = float("inf")
"""The gain of a remedy that gives back all time of its entry."""


class Book:
    """An analysis, its manifests, the charges that no rule took yet, and the entries made so far."""

    def __init__(
        self,
        analysis: TraceAnalysis,
        charges: Iterable[Charge],
        manifests: Sequence[RankManifest],
        thresholds: FindingThresholds,
        additional_ns: Mapping[int, int],
    ) -> None:
        self.analysis = analysis
        self.manifests = manifests
        self.thresholds = thresholds
        self.additional_ns = additional_ns
        self.rank_steps = window_count(analysis.ranks)
        self.total_ns = sum(step.duration_ns for rank in analysis.ranks for step in rank.steps)
        self.entries: list[LedgerEntry] = []
        self.booked: list[tuple[str, Charge]] = []
        self.waiting: list[Charge] = []
        """Waiting for a processor, as charges of the work that waited, until an entry has it."""
        self._charged: list[list[Charge]] = []
        self._pool: dict[str, list[Charge]] = defaultdict(list)
        for charge in charges:
            self._pool[charge.cause].append(charge)
        self._compute_ns = self.left_ns("compute")

    # What is known of the run.

    @property
    def on_device(self) -> bool:
        """Whether the ranks ran on devices with streams (not on a CPU)."""
        return any(rank.device_type != "cpu" for rank in self.analysis.ranks)

    @property
    def waits_known(self) -> bool:
        """Whether waiting and transfer are separated for nearly all communication."""
        total = self.analysis.attribution.comm_ns
        return self.analysis.cross_rank.waits_unknown_ns <= _NEARLY_NONE * total

    @property
    def missing_traces(self) -> str:
        """Say which traces would separate waiting from transfer."""
        ranks = len(self.analysis.ranks)
        worlds = [rank.world_size for rank in self.analysis.ranks if rank.world_size is not None]
        sizes = [row.group_size for row in self.analysis.groups if row.group_size is not None]
        if max([*worlds, *sizes], default=2) <= ranks:
            return "Waiting cannot be separated from transfer: collectives could not be matched across ranks."
        return "Traces of the group's other ranks would separate waiting from transfer."

    @cached_property
    def groups(self) -> list[ParamGroupInfo]:
        """Parameter groups of the first rank that describes any."""
        return next((one.param_groups for one in self.manifests if one.param_groups), [])

    @cached_property
    def training_alike(self) -> list[set[int]]:
        """Ranks grouped by the parameters they train, as FSDP's groups join them; pipeline stages are
        separate."""
        sets: list[set[int]] = []
        for manifest in self.manifests:
            members = {one.name: one.ranks for one in manifest.process_groups}
            groups = manifest.param_groups
            names = {name for one in groups for name in (one.shard_group, one.all_reduce_group) if name}
            joined = {manifest.rank, *(rank for name in names for rank in members.get(name, ()))}
            others = [one for one in sets if not one.isdisjoint(joined)]
            sets = [*(one for one in sets if one not in others), joined.union(*others)]
        return sets or [{one.rank for one in self.analysis.ranks}]

    @cached_property
    def offloads(self) -> bool:
        """Whether parameters stay on the host: the manifest says so, or without one layers copy theirs."""
        if self.groups:
            return any(group.offload for group in self.groups)
        return any(one.fqn is not None for one in self.left("offload"))

    def rows(self, op: str) -> list[GroupRow]:
        """Collectives of layers, of one kind."""
        return [row for row in self.analysis.groups if row.op == op and row.fqn is not None]

    # What is left to charge.

    def left(self, cause: str) -> list[Charge]:
        """Charges of a cause that no rule took yet."""
        return self._pool[cause]

    def left_ns(self, cause: str) -> int:
        """Their sum."""
        return sum(charge.ns for charge in self._pool[cause])

    def take(
        self,
        cause: str,
        wanted: Callable[[Charge], bool] = lambda _: True,
        part: tuple[int, int] | Callable[[Charge], tuple[int, int]] = (1, 1),
    ) -> list[Charge]:
        """Take charges out of the pool; of each the ``part`` (numerator, denominator), whole nanoseconds."""
        taken, kept = [], []
        for charge in self._pool[cause]:
            if not wanted(charge):
                kept.append(charge)
                continue
            of_it, whole = part(charge) if callable(part) else part
            ns = charge.ns * of_it // whole
            taken.append(charge if ns == charge.ns else replace(charge, ns=ns))
            if ns < charge.ns:
                kept.append(replace(charge, ns=charge.ns - ns, count=0, bytes=0))
        self._pool[cause] = kept
        return taken

    def put_back(self, charges: Iterable[Charge]) -> None:
        """Return charges that a rule took and does not enter."""
        for charge in charges:
            self._pool[charge.cause].append(charge)

    @cached_property
    def traced(self) -> set[int]:
        """Steps of the analysis."""
        return {step.step for rank in self.analysis.ranks for step in rank.steps}

    def is_seen_once(self, charges: Iterable[Charge]) -> bool:
        """Whether one step of several has nearly all of some charges: they may come once in hundreds."""
        steps = summed((one.step, one.ns) for one in charges)
        return len(self.traced) > 1 and max(steps.values(), default=0) > _NEARLY_IN_ONE * steps.total()

    def usual_frac(self, charges: Iterable[Charge]) -> float:
        """Return the fraction of all steps that some charges took if each took the median of a step's."""
        steps = Counter({(rank.rank, one.step): 0 for rank in self.analysis.ranks for one in rank.steps})
        for one in charges:
            steps[one.rank, one.step] += one.ns
        return self.frac(median(steps.values()) * self.rank_steps) if steps else 0.0

    @staticmethod
    def main_site(charges: Iterable[Charge]) -> str | None:
        """Return the Python line with most of some charges."""
        sites = summed((one.site, one.ns) for one in charges if one.site)
        return sites.most_common(1)[0][0] if sites else None

    def hideable_ns(self, charges: Iterable[Charge]) -> int:
        """Return how much of an exposed time overlap could hide at most: the compute of its phase.

        With offloaded parameters the copies come first: compute cannot also hide the time for which they
        are exposed.
        """
        exposed, compute = Counter[tuple[int, int, str]](), Counter[tuple[int, int, str]]()
        copies = self.left("offload") if self.offloads else []
        for sums, those, sign in (
            (exposed, charges, 1),
            (compute, self.left("compute"), 1),
            (compute, copies, -1),
        ):
            for one in those:
                sums[one.rank, one.step, one.phase] += sign * one.ns
        return sum(max(0, min(ns, compute[place])) for place, ns in exposed.items())

    def least_ns(self, charges: Iterable[Charge], late: Collection[int] = ()) -> int:
        """Return the gain from removing charges on the rank that gains least, times the ranks.

        The others wait for that rank, and gain no more. ``late`` ranks, for which others wait, do not
        count.
        """
        gained = {rank.rank: 0 for rank in self.analysis.ranks if rank.rank not in late}
        for one in charges:
            if one.rank in gained and not one.caught_up:
                gained[one.rank] += one.ns
        return min(gained.values(), default=0) * len(self.analysis.ranks)

    def waits_for(self, charges: Sequence[Charge]) -> list[Charge]:
        """Return waiting for ranks that have such charges, of each rank at most as long as those."""
        own = summed((one.rank, one.ns) for one in charges)
        room = Counter({(rank.rank, slow): ns for rank in self.analysis.ranks for slow, ns in own.items()})
        found = []
        for one in (*(charge for _, charge in self.booked), *self.left("uneven_ranks")):
            if one.late_rank is not None and (ns := min(one.ns, room[one.rank, one.late_rank])):
                room[one.rank, one.late_rank] -= ns
                found.append(replace(one, ns=ns))
        return found

    @property
    def starved_ns(self) -> int:
        """Waiting for a processor or the interpreter, of all ranks and steps."""
        booked = sum(one.ns for _, one in self.booked if one.cause == "starved")
        return booked + sum(one.ns for one in self.waiting)

    def waiting_at(self, charges: Iterable[Charge]) -> list[Charge]:
        """Return the waiting for a processor at the lines of some charges, in the optimizer, or for their
        kinds of compute.

        A line with less to do has less to wait for. Empty if it is little.
        """
        named = (
            one
            for one in charges
            if one.site or one.phase == "optimizer" or (one.why and one.cause == "compute")
        )
        places = {_work(one) for one in named if one.cause in RUNNING}
        found = [one for one in self.waiting if _work(one) in places]
        return found if self.frac(sum(one.ns for one in found)) >= self.thresholds.min_cost_frac else []

    def _take_waiting_at(self, charges: Iterable[Charge]) -> list[Charge]:
        found = self.waiting_at(charges)
        taken = set(map(id, found))
        self.waiting = [one for one in self.waiting if id(one) not in taken]
        return found

    def _room_ns(self, charges: Iterable[Charge]) -> float:
        """Return how much a step without tracing can lose with these charges, times the steps of all ranks:
        what it takes beyond the compute of the device that is not theirs.

        Unlimited where traced steps are about as long: then their times are nearly a step's own.
        """
        step = self.analysis.unrecorded_step
        if step is None or self.total_ns < SLOWED * typical_ns(step) * self.rank_steps:
            return inf
        own = sum(one.ns for one in charges if one.cause == "compute")
        stays = max(0, self._compute_ns - own) if self.on_device else 0
        return max(0.0, typical_ns(step) * self.rank_steps - stays)

    # Words and amounts.

    def frac(self, nanoseconds: float) -> float:
        """A sum over all ranks and steps, as a fraction of their time."""
        return nanoseconds / self.total_ns if self.total_ns else 0.0

    def per_step(self, nanoseconds: float) -> str:
        """A sum over all ranks and steps, as text: time per step and percent of it."""
        step = self.analysis.unrecorded_step
        apart = step is not None and differs_traced(self.total_ns / self.rank_steps, typical_ns(step))
        of = "of a traced step" if apart else "per step"
        return f"{format_ns(nanoseconds / self.rank_steps)} ({format_frac(self.frac(nanoseconds))}) {of}"

    # Entries.

    def enter(
        self,
        charges: Sequence[Charge],
        key: str,
        evidence: Mapping[str, EvidenceValue] | None = None,
        *,
        rank: int | None = None,
        fqn: str | None = None,
        gain_ns: float | None = ALL,
        basis: GainBasis | None = None,
        memory_bytes: int | None = None,
        remedy: bool = True,
        known: object = True,
        calm: bool = False,
        late: Collection[int] = (),
        frees_waits: bool = False,
        **said: object,
    ) -> None:
        """Enter charges under the section ``key`` of ``findings/ledger.ini``, if there are any.

        An entry is reported if its remedy gains enough; a ``calm`` one is never reported alone, because no
        change to the script affects it. Texts can use ``cost`` (the sum of the charges), rank, layer,
        evidence, and the values in ``said``. An entry is unsure if ``known`` is false. ``late`` are the
        ranks that the others wait for: a gain is at most that of the other rank that gains least, with its
        waiting for ranks that have such charges if the remedy ``frees_waits``.
        """
        if not charges:
            return
        own = sum(charge.ns for charge in charges)
        if remedy and not calm and wordings("ledger").get(key, {}).get("change"):
            charges = [*charges, *self._take_waiting_at(charges)]
        total = sum(charge.ns for charge in charges)
        cost = self.frac(total)
        values = {"cost": self.per_step(total), "rank": rank, "fqn": fqn, **(evidence or {}), **said}
        text = worded("ledger", key, values)
        confidence, _, why_sure = (text("sure" if known else "unsure") or "high, measured").partition(", ")
        cure: LedgerRemedy | None = None
        if remedy and text("change"):
            most = total
            if self.on_device:
                most = self.least_ns([*charges, *(self.waits_for(charges) if frees_waits else ())], late)
            whole = None if gain_ns is None else min(gain_ns * total / own if own else gain_ns, total)
            gain = None if whole is None else min(whole, most)
            is_less = whole is not None and most < _NEARLY_ALL * whole
            reason = _SLOWEST if is_less else text("gain")
            if gain is not None and gain > (room := self._room_ns(charges)):
                gain, reason = room, UNTRACED
            cure = LedgerRemedy(
                change=text("change"),
                gain_ns=None if gain is None else gain / max(1, self.rank_steps),
                gain_frac=None if gain is None else self.frac(gain),
                basis=basis or cast("GainBasis", text("basis") or "bound"),
                reason=reason,
                memory_bytes=memory_bytes,
                what_if=text("what_if") or None,
            )
        gained = None if cure is None else cure.gain_frac
        matters = severity_of(cost if gained is None else gained, self.thresholds, self.on_device)
        calm = calm or bool(text("calm"))
        severity: Severity = "info" if calm else matters
        entry = LedgerEntry(
            id=text("id"),
            cause=text("cause"),
            fqn=fqn,
            rank=rank,
            total_ns=total,
            ns=mean(total, max(1, self.rank_steps)),
            frac=cost,
            severity=severity,
            told=not calm and cure is not None and worth_telling(severity),
            title=text("title"),
            said=text("problem"),
            remedy=cure,
            confidence=cast("Literal['high', 'medium', 'low']", confidence),
            confidence_reason=why_sure,
            places=self._places(charges),
            evidence={
                "cost_frac": cost,
                "cost_ns_per_step": int(total // max(1, self.rank_steps)),
                **(evidence or {}),
            },
            place=_costliest([one for one in charges if one.fqn == fqn] or charges),
        )
        self.entries.append(entry)
        self.booked += [(entry.cause, charge) for charge in charges]
        self._charged.append(list(charges))

    def join(self, first: int, other: int) -> None:
        """Add one entry's time to another at the same place: one change recovers both."""
        one, joined = self.entries[first], self.entries[other]
        charges = self._charged[first] = [*self._charged[first], *self._charged[other]]
        total = sum(charge.ns for charge in charges)
        remedy = one.remedy
        if remedy is not None and remedy.gain_ns is not None:
            more = joined.remedy.gain_ns if joined.remedy is not None else None
            room = self._room_ns(charges) / max(1, self.rank_steps)
            gain = min(remedy.gain_ns + (joined.ns if more is None else more), room)
            part = self.frac(gain * self.rank_steps)
            same = joined.remedy is not None and joined.remedy.what_if == remedy.what_if
            remedy = replace(
                remedy,
                gain_ns=gain,
                gain_frac=part,
                reason=UNTRACED if gain == room else _with_others(remedy.reason),
                what_if=remedy.what_if if same else None,  # a replay of one part says less
            )
        self.entries[first] = replace(
            one,
            total_ns=total,
            ns=mean(total, max(1, self.rank_steps)),
            frac=self.frac(total),
            severity=min(one.severity, joined.severity, key=SEVERITIES.index),
            said=self._with_cost(one, total),
            remedy=remedy,
            places=self._places(charges),
            evidence={
                **one.evidence,
                "cost_frac": self.frac(total),
                "cost_ns_per_step": int(total // max(1, self.rank_steps)),
            },
        )
        del self.entries[other], self._charged[other]

    def _with_cost(self, entry: LedgerEntry, total: int) -> str:
        """Return what an entry says with another cost, which includes other losses at its line."""
        said, cost = entry.said.replace(_BESIDE, ""), self.per_step(entry.total_ns)
        if cost in said:
            return said.replace(cost, f"{self.per_step(total)}{_BESIDE}", 1)
        return f"{said} That is {self.per_step(total)}{_BESIDE}."

    @property
    def collective_ns(self) -> Counter[str]:
        """Time of collectives by the title of the entry that holds it."""
        sums = summed(
            (entry.title, sum(charge.ns for charge in charges if charge.op in OPS))
            for entry, charges in zip(self.entries, self._charged, strict=True)
        )
        return sums

    def how_many(self, charges: Sequence[Charge]) -> str:
        """Count collectives, as text with ``{}`` for their name: by step where only some steps have any."""
        ranks, counts = Counter[int](), Counter[int]()
        for rank in self.analysis.ranks:
            ranks.update(step.step for step in rank.steps)
        for one in charges:
            counts[one.step] += one.count
        kinds = {one.op for one in charges}
        issued = {row.step for row in self.analysis.groups if row.fqn is None and row.op in kinds}
        found = [count / ranks[step] for step, count in counts.items() if count]
        low, high = min(found, default=0.0), max(found, default=0.0)
        alike = f"{sum(found) / max(1, len(found)):.3g}"
        number = f"{low:.3g} to {high:.3g}" if high > _ALIKE * low else alike
        some = 0 < len(found) < len(ranks) and len(found) == len(issued & set(ranks))
        return f"{number} {{}} " + (f"in {len(found)} of {len(ranks)} steps" if some else "per step")

    def _places(self, charges: Sequence[Charge]) -> list[LedgerPlace]:
        sums: dict[tuple[str | None, ...], list[int]] = defaultdict(lambda: [0, 0, 0])
        for one in charges:
            entry = sums[one.fqn, one.phase, one.op, one.site, one.why]
            entry[0] += one.ns
            entry[1] += one.count
            entry[2] += one.bytes
        ordered = sorted(sums.items(), key=lambda item: -item[1][0])
        places = [self._place(key, total) for key, total in ordered[:_PLACES]]
        rest = ordered[_PLACES:]
        if rest:
            total = [sum(total[i] for _, total in rest) for i in range(3)]
            places.append(self._place((None, "other", None, None, f"{len(rest)} other places"), total))
        return places

    def _place(self, key: Sequence[str | None], total: Sequence[int]) -> LedgerPlace:
        fqn, phase, op, site, why = key
        ns, count, size = total
        return LedgerPlace(
            fqn=fqn,
            phase=phase or "other",
            op=op,
            site=site,
            why=_REASONS.get(why, why) if why else None,
            total_ns=ns,
            ns=mean(ns, max(1, self.rank_steps)),
            count=count / self.rank_steps if count else None,
            bytes=size / self.rank_steps if size else None,
        )


def _work(one: Charge) -> tuple[int, str | None, str, str | None]:
    return one.rank, one.site, one.phase, one.why


def _costliest(charges: Sequence[Charge]) -> Place | None:
    """Return the layer, phase and operation with most of the time, and the rank and step with most of it."""
    sums: Counter[tuple[str | None, str, str | None]] = Counter()
    windows: dict[tuple[str | None, str, str | None], Counter[tuple[int, int]]] = defaultdict(Counter)
    for one in charges:
        key = one.fqn, one.phase, one.op
        sums[key] += one.ns
        windows[key][one.rank, one.step] += one.ns
    if not sums:
        return None
    (fqn, phase, op), _ = sums.most_common(1)[0]
    (rank, step), _ = windows[fqn, phase, op].most_common(1)[0]
    return Place(fqn=fqn, phase=phase, op=op, rank=rank, step=step)


def by_layer(charges: Iterable[Charge]) -> list[tuple[str | None, int]]:
    """Sum charges by layer, the costliest first."""
    sums = summed((charge.fqn, charge.ns) for charge in charges)
    return sorted(sums.items(), key=lambda item: -item[1])


def main_layer(charges: Sequence[Charge]) -> str | None:
    """Return the layer with at least half of some charges, if one has as much."""
    fqn, most = by_layer(charges)[0] if charges else (None, 0)
    return fqn if 2 * most >= sum(one.ns for one in charges) else None


def main_layers(charges: Sequence[Charge]) -> str | None:
    """Name the layer, or the layers that differ in one number, with at least half of some charges."""
    costs = [(fqn, ns) for fqn, ns in by_layer(charges) if fqn is not None]
    for label, rows in fold_names([(fqn, 0) for fqn, _ in costs]):
        if 2 * sum(costs[row][1] for row in rows) >= sum(one.ns for one in charges) > 0:
            return named_layer(costs[rows[0]][0]) if len(rows) == 1 else f"`{label}`"
    return None


def worst_layer(charges: Sequence[Charge]) -> str | None:
    """Return the layer with most of some charges."""
    return by_layer(charges)[0][0] if charges else None


def _with_others(reason: str) -> str:
    """Return the reason of a gain that includes other losses at the same line."""
    return reason if _AT_THIS_LINE in reason else f"{reason}, and the other losses {_AT_THIS_LINE}"
