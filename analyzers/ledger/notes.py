"""Observations outside the ledger: padding, a root that stays gathered, steps of several kinds."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import combinations, pairwise
from statistics import mean, median

from fsdp2prof.analyzers import findings
from fsdp2prof.analyzers.layers import named_layer, numbered
from fsdp2prof.analyzers.ledger.book import Book
from fsdp2prof.analyzers.steps import kinds_of_steps
from fsdp2prof.by_key import summed
from fsdp2prof.labels import is_root
from fsdp2prof.manifest import ParameterInfo, ParamGroupInfo
from fsdp2prof.results.finding import EvidenceValue, Finding
from fsdp2prof.units import format_ns, plural

_UNLIKE = 1.2
"""Ratio of all-gathers that makes a step a different kind: a root that stays gathered has fewer."""
_FIRST = 2
"""Steps of a recording of which the first one counts like the others."""
_PARTS = 8
"""Parts of a run whose steps are compared."""
_ASCENDING, _GROWN = 0.9, 1.2
"""Part of all pairs of which the later one is longer, and the last part over the first, from which on steps
get longer: of 40,320 orders of eight parts, 35 have so many such pairs."""
_KINDS = 3
"""Maximum number of kinds of steps that are named."""

finding = partial(findings.finding, "ledger")


def notes(book: Book) -> list[Finding]:
    """Return the observations without a cost."""
    rules = (_anomaly, _hooks, _graphs, _growing, _padding, _root_kept, _unlike_steps)
    return [found for rule in rules for found in rule(book)]


def _anomaly(book: Book) -> list[Finding]:
    checks = sum(one.count for _, one in book.booked if one.why == "anomaly") / book.rank_steps
    return [finding("anomaly_detection", {"checks_per_step": checks})] if checks else []


def _hooks(book: Book) -> list[Finding]:
    """Find profilers and debuggers of Python, which slow every call of the script."""
    tools = sorted({tool for one in book.manifests if one.machine for tool in one.machine.python_hooks})
    return [finding("python_hooks", {"tools": tools})] if tools else []


def _graphs(book: Book) -> list[Finding]:
    """Find forwards that keep a graph for a backward which never comes."""
    kept = [one for _, one in book.booked if one.why == "graph"]
    ranks = summed((one.rank, one.count) for one in kept)
    count = max(ranks.values(), default=0)
    if not count:
        return []
    lines = Counter(one.site for one in kept if one.site)
    site = lines.most_common(1)[0][0] if lines else None
    return [finding("graph_without_backward", {"site": site}, forwards=count)]


def _growing(book: Book) -> list[Finding]:
    """Find steps of which nearly each is longer than the one before, on every rank, without recording."""
    ranks = [[one for one in manifest.steps if one.kind == "plain"][2:] for manifest in book.manifests]
    if min(map(len, ranks), default=0) < _PARTS:
        return []
    grown = []
    for steps in ranks:
        edges = [len(steps) * part // _PARTS for part in range(_PARTS + 1)]
        levels = [median(one.duration_ns for one in steps[low:high]) for low, high in pairwise(edges)]
        ascending = mean(later > sooner for sooner, later in combinations(levels, 2))
        if ascending < _ASCENDING or levels[-1] < _GROWN * levels[0]:
            return []
        grown.append((levels[-1] / levels[0], levels, steps))
    _, levels, steps = max(grown, key=lambda one: one[0])
    evidence: dict[str, EvidenceValue] = {"first_step": steps[0].step, "last_step": steps[-1].step}
    return [finding("steps_get_longer", evidence, before=int(levels[0]), after=int(levels[-1]))]


def _padding(book: Book) -> list[Finding]:
    """Find padding, from the first manifest with parameter groups: it is equal on all ranks."""
    held = sum(_padded(group, p) for group in book.groups for p in group.parameters)
    padding = {
        f"{group.fqn or 'root'}: {p.fqn}": _padded(group, p) - math.prod(p.global_shape)
        for group in book.groups
        for p in group.parameters
    }
    share = sum(padding.values()) / held if held else 0.0
    if share < book.thresholds.padding_frac:
        return []
    worst = max(padding, key=padding.__getitem__)
    uneven = sum(elements > 0 for elements in padding.values())
    return [
        finding(
            "uneven_shards",
            {"padding_frac": share, "parameter": worst, "padding_elements": padding[worst]},
            severity="medium" if share >= book.thresholds.high_cost_frac else "low",
            fqn="" if worst.startswith("root: ") else worst.split(":")[0],
            uneven=uneven,
        )
    ]


def _padded(group: ParamGroupInfo, parameter: ParameterInfo) -> int:
    return math.prod(parameter.padded_local_shape) * group.shard_world_size


def _root_kept(book: Book) -> list[Finding]:
    """Find a root that keeps many parameters unsharded from forward to the end of backward."""
    gathered_again = {row.fqn for row in book.rows("all_gather") if row.phase == "backward"}
    payloads: dict[str, int] = {}
    for row in book.rows("all_gather"):
        if row.phase == "forward" and row.count and row.payload_bytes is not None and row.fqn is not None:
            payloads.setdefault(row.fqn, row.payload_bytes // row.count)
    limits, total = book.thresholds, sum(payloads.values())
    found = []
    for fqn, payload in payloads.items():
        if not is_root(fqn) or fqn in gathered_again or len(payloads) == 1:
            continue
        share = payload / total
        if share >= limits.root_frac and payload >= limits.root_payload_bytes:
            sizes = {"payload_bytes": payload, "share_frac": share}
            found.append(finding("root_not_resharded", sizes, fqn=fqn))
    return found


def _unlike_steps(book: Book) -> list[Finding]:
    """Return the finding about steps that are not alike, seen on the first rank that has layers."""
    seen = kinds_of_steps(book.analysis.groups, book.analysis.ranks)
    if seen is None:
        return []
    rank, kinds, counts = seen.rank, seen.reduced, seen.gathered
    if len(kinds) > 1:
        everywhere = frozenset.intersection(*kinds)
        told = [
            f"{_reduced(sorted(layers - everywhere), which)} ({_each(book, rank, which)})"
            for layers, which in sorted(kinds.items(), key=lambda kind: -len(kind[0]))
        ]
        return [_unlike("unlike_steps", told, list(kinds.values()), rank)]
    known = sorted({step.step for one in book.analysis.ranks if one.rank == rank for step in one.steps})
    if len(known) > _FIRST:  # what stays gathered is so from the first step on
        counts = {count: which for count, which in counts.items() if which != known[:1]}
    if len(counts) > 1 and max(counts) >= _UNLIKE * max(1, min(counts)):
        told = [
            f"{count} in {numbered('step', which)} ({_each(book, rank, which)})"
            for count, which in counts.items()
        ]
        return [_unlike("unlike_steps/counts", told, list(counts.values()), rank)]
    return []


def _unlike(key: str, told: list[str], kinds: list[list[int]], rank: int) -> Finding:
    first = ",".join(map(str, kinds[0]))
    return finding(key, {"kinds": len(kinds), "rank": rank}, described=_listed(told), first=first)


def _each(book: Book, rank: int, steps: list[int]) -> str:
    """Say how long a step of one kind takes."""
    took = [
        step.duration_ns
        for one in book.analysis.ranks
        if one.rank == rank
        for step in one.steps
        if step.step in steps
    ]
    return f"{format_ns(sum(took) / max(1, len(took)))} each"


def _reduced(layers: list[str], steps: list[int]) -> str:
    if not layers:
        return f"{numbered('step', steps)} only of layers that all steps reduce"
    more = f" and {plural(len(layers) - 1, 'more layer')}" if len(layers) > 1 else ""
    return f"{numbered('step', steps)} reduce gradients of {named_layer(layers[0])}{more}"


def _listed(kinds: list[str]) -> str:
    more = [f"and {plural(len(kinds) - _KINDS, 'more kind')}"] if len(kinds) > _KINDS else []
    return ", ".join([*kinds[:_KINDS], *more])
