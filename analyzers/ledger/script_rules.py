"""Rules for the script's own Python work: loops of small operators, and work outside training."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import combinations

from fsdp2prof.analyzers.layers import SITE, in_phase
from fsdp2prof.analyzers.ledger.book import Book
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.by_key import grouped, summed
from fsdp2prof.results.ledger import LedgerEntry
from fsdp2prof.units import plural

_RUNNING = ("compute", "host", "host_pause")
_NEAR = 3
"""Lines of a function that lie as close are one place."""
_OF_TRAINING = frozenset(
    {"backward", "clip_grad_norm_", "clip_grad_value_", "step", "unscale_", "update", "zero_grad"}
)
"""Calls between backward and the optimizer that a training needs."""
_COPIES = frozenset({"clone", "deepcopy", "state_dict", "copy_", "get_model_state_dict", "get_state_dict"})
_CLIPS = re.compile(r"clip|grad_?norm", re.IGNORECASE)
"""In the names of functions that clip gradients."""
_NORMS = ("norm() (", "vector_norm() (")
"""Begin the places that compute one norm after another."""
_OFTEN = 0.75
"""Part of the steps in which a place takes time, from which on it is the step's."""
_AGAIN = 2
"""Steps with computation at a line outside the training, from which on it comes back often enough."""
_HALF = 0.5


def enter_script(book: Book) -> None:
    """Enter the time of the script's own lines: first work outside training by line, then loops by line."""
    _by_place(book, lambda one: one.why in ("outside", "outside_loop"), _enter_outside, least=_AGAIN)
    often = math.ceil(_OFTEN * len(book.traced))
    _by_place(book, lambda one: one.why in ("loop", "outside_loop"), _enter_loop, least=often)


_REPEATED = 4
"""Collectives a step from which on a loop near them is theirs."""


def join_places(book: Book) -> None:
    """Make one entry of those whose remedies change the same place: the costliest one, with all their time.

    Two calls on neighbouring lines are two places; a collective and the loop that issues it are one.
    """
    while pair := _of_one_place(book.entries):
        book.join(*pair)


def _of_one_place(entries: Sequence[LedgerEntry]) -> tuple[int, int] | None:
    placed = sorted((at for at, one in enumerate(entries) if _place_of(one)), key=lambda at: -entries[at].ns)
    for first, other in combinations(placed, 2):
        if entries[first].told and _same_place(entries[first], entries[other]):
            return first, other
    return None


def _place_of(entry: LedgerEntry) -> re.Match[str] | None:
    site = entry.evidence.get("site")
    named = isinstance(site, str) and entry.remedy is not None and entry.id != "garbage_collection"
    return SITE.fullmatch(str(site)) if named else None


def _same_place(one: LedgerEntry, other: LedgerEntry) -> bool:
    first, second = _place_of(one), _place_of(other)
    assert first is not None
    assert second is not None
    if (first["file"], first["function"]) != (second["file"], second["function"]):
        return False
    apart = abs(int(first["line"]) - int(second["line"]))
    looped = any(entry.evidence.get("loop") for entry in (one, other))
    repeated = any(float(str(entry.evidence.get("per_step", 0))) >= _REPEATED for entry in (one, other))
    return apart == 0 or (apart <= _NEAR and looped and repeated)


def _by_place(
    book: Book,
    wanted: Callable[[Charge], bool],
    enter: Callable[[Book, list[Charge], str | None], bool],
    *,
    least: int,
) -> None:
    """Enter charges by line; return those that are small, or of few ranks or fewer than ``least`` steps."""
    mine = [one for cause in _RUNNING for one in book.take(cause, wanted)]
    places = _places(mine)
    by_place = grouped((places.get(one.site), one) for one in mine)
    for place, charges in by_place.items():
        there = {(one.rank, one.step) for one in charges if one.ns}
        steps = {step for _, step in there}
        cost = book.frac(sum(one.ns for one in charges))
        often = len(steps) >= min(least, len(book.traced))
        often &= len(there) >= _OFTEN * len(steps) * len(book.analysis.ranks)
        if cost < book.thresholds.min_cost_frac or not often or not enter(book, charges, place):
            book.put_back(charges)


def _places(charges: Sequence[Charge]) -> dict[str | None, str]:
    """Return site -> the costliest of the neighbouring lines of its function."""
    spent = summed((one.site or "", one.ns) for one in charges)
    known = {site: found for site in spent if (found := SITE.fullmatch(site)) is not None}
    ordered = sorted(
        known, key=lambda one: (known[one]["file"], known[one]["function"] or "", int(known[one]["line"]))
    )
    place: dict[str | None, str] = {}
    cluster: list[str] = []
    for at, site in enumerate(ordered):
        cluster.append(site)
        if at + 1 == len(ordered) or not _close(known[site], known[ordered[at + 1]]):
            most = max(cluster, key=lambda one: spent[one])
            place |= dict.fromkeys(cluster, most)
            cluster = []
    return place


def _close(one: re.Match[str], other: re.Match[str]) -> bool:
    same = one["file"] == other["file"] and one["function"] == other["function"]
    return same and int(other["line"]) - int(one["line"]) <= _NEAR


def _enter_outside(book: Book, mine: list[Charge], place: str | None) -> bool:
    """Enter the computation of one line outside forward, loss, backward and optimizer; False if it pauses."""
    site = None if place is None else SITE.fullmatch(place)
    called = None if site is None else site["call"]
    working = sum(one.ns for one in mine if one.cause == "compute")
    whole = sum(one.ns for one in mine)
    host = sum(one.ns for one in mine if one.cause == "host")
    if place is None or called in _OF_TRAINING or working + host < _HALF * whole or not working:
        return False
    looped = sum(one.ns for one in mine if one.why == "outside_loop") >= _HALF * whole
    key = "work_outside_training"
    if site is not None and site["hook"]:
        key = "work_outside_training/hook"
    elif called in _COPIES:
        key = "work_outside_training/copies"
    elif looped:
        clips = site is not None and _CLIPS.search(site["function"] or "")
        key = "work_outside_training/clipping" if clips else "work_outside_training/loop"
    small = ", most of it in a loop of small operators" if looped else ""
    steps = len({one.step for one in mine if one.ns})
    some = f", in {steps} of {plural(len(book.traced), 'traced step')}" if steps < len(book.traced) else ""
    book.enter(mine, key, {"site": place, "loop": looped}, small=small, some=some)
    return True


def _enter_loop(book: Book, mine: list[Charge], place: str | None) -> bool:
    phases = summed((one.phase, one.ns) for one in mine)
    outside = "outside of forward and backward"
    where = [in_phase(phase) if phase != "other" else outside for phase, _ in phases.most_common()]
    at = f"at {place}" if place else f"{' and '.join(where)}"
    fqn = next((one.fqn for one in sorted(mine, key=lambda one: -one.ns) if one.fqn), None)
    with_backward = phases["backward"] and len(phases) > 1
    book.enter(
        mine,
        "python_loop/norms" if place and place.startswith(_NORMS) else "python_loop",
        {"site": place},
        fqn=fqn,
        known=place,
        at=at,
        with_backward=", with its backward." if with_backward else ".",
    )
    return True
