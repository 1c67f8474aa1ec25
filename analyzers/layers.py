"""Names of layers, folded where they differ in one number and say the same, and of lines of the script.

A model of 80 blocks gives 160 rows that say the same thing: ``layers.0`` ... ``layers.79`` become
``layers.0-79``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cache
from statistics import median

from fsdp2prof.labels import is_root
from fsdp2prof.units import format_numbers
from fsdp2prof.vocabulary import last_number, layer_name

FOLD_FROM = 3
"""Siblings that look alike before they are folded."""

_OUTLIER_RATIO = 2.0
_OUTLIER_SHARE = 0.05
"""A sibling keeps its own row if it costs twice the siblings' median and 5% of all rows' cost."""

_NUMBER = re.compile(r"\d{1,18}")
"""A number in a name; longer strings of digits count as several numbers."""


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Sort key that puts ``layers.10`` after ``layers.9``."""
    parts = re.split(f"({_NUMBER.pattern})", name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts]


def fold_names(items: Sequence[tuple[str | None, Hashable]]) -> list[tuple[str, list[int]]]:
    """Fold names that differ in one number and have the same key: (label, rows), in order."""
    folded: list[tuple[str, list[int]]] = []
    for siblings in families(items):
        if len(siblings) < FOLD_FROM:
            folded += [(layer_name(items[i][0]), [i]) for i in siblings]
        else:
            folded.append((family_name([items[i][0] for i in siblings]), siblings))
    return sorted(folded, key=lambda entry: entry[1][0])


def families(items: Sequence[tuple[str | None, Hashable]]) -> list[list[int]]:
    """Group rows whose names differ only in their last number and whose keys are equal."""
    families: dict[Hashable, list[int]] = defaultdict(list)
    for i, (name, key) in enumerate(items):
        number = last_number(name or "")
        if name is None or number is None:
            families[i].append(i)
        else:
            families[name[: number.start()], name[number.end() :], key].append(i)
    return list(families.values())


def fold_alike(items: Sequence[tuple[str | None, Hashable]], costs: Sequence[float]) -> list[list[int]]:
    """Group rows as :func:`families` does; a row that costs much more than its siblings stays separate.

    Groups of fewer than :data:`FOLD_FROM` rows become single rows.
    """
    worth_a_row = _OUTLIER_SHARE * sum(costs)
    groups: list[list[int]] = []
    for siblings in families(items):
        limit = max(_OUTLIER_RATIO * median(costs[i] for i in siblings), worth_a_row)
        alike = [i for i in siblings if costs[i] <= limit]
        if len(alike) < FOLD_FROM:
            groups += [[i] for i in siblings]
        else:
            groups += [[i] for i in siblings if costs[i] > limit]
            groups.append(alike)
    return groups


def family_name(names: Sequence[str | None]) -> str:
    """``layers.0``, ``layers.1``, ``layers.2`` -> ``layers.0-2``."""
    matches = [(name, match) for name in names if name and (match := last_number(name))]
    name, first = matches[0]
    numbers = sorted({int(match.group()) for _, match in matches})
    return f"{name[: first.start()]}{format_numbers(numbers)}{name[first.end() :]}"


_NUMBERED = 3
"""Numbers that are named one by one."""

_IN_PHASE = {
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer",
    "other": "between forward, backward and optimizer",
}


def named_layer(fqn: str | None) -> str:
    """Name a layer in a sentence."""
    if fqn is None:
        return "code outside every layer"
    if is_root(fqn):
        return f"the root module{f' `{layer_name(fqn)}`' if fqn else ''}"
    return f"`{layer_name(fqn)}`"


def in_phase(phase: str) -> str:
    """Say when something ran."""
    return _IN_PHASE.get(phase, f"in {phase}")


def times(factor: float) -> str:
    """Write a factor: ``2.1 times``."""
    return f"{factor:.2f} times" if factor < 10 else f"{factor:.0f} times"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 3 and 5``, ``steps 3, 5, 6 and 4 more``; a single one more is named, too."""
    shown = [str(number) for number in numbers]
    if len(shown) > _NUMBERED + 1:
        shown[_NUMBERED:] = [f"{len(shown) - _NUMBERED} more"]
    return f"{noun} {shown[0]}" if len(shown) == 1 else f"{noun}s {', '.join(shown[:-1])} and {shown[-1]}"


def block_of(fqn: str) -> str:
    """Return the beginning of a name up to its first number: the block that a module is in."""
    parts = fqn.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[: number + 1])


_RECORDED = re.compile(
    r"(?:(?P<call>\S+\(\)) in )?(?P<file>.+):(?P<line>\d+) \((?P<function>.+?)(?P<hook>, a hook)?\)"
)
"""A line as the recorder writes it: ``f() in a.py:7 (g)``."""
_PROFILED = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)")
"""A line as the profiler writes it: ``a.py(7): g``."""
_OUTERMOST = "<module>"
_LONGEST = 1024
"""Characters of a line; longer texts are not of a recorder or profiler, and take time to search."""

SITE = re.compile(
    r"(?:(?P<call>\S+)\(\) \()?(?P<file>[^()]+):(?P<line>\d+)(?: in (?P<function>[^()]+)\(\))?"
    r"(?P<hook>, a hook)?\)?"
)
"""A line as :func:`site_name` writes it; without a function it is one of the script's outermost."""


@cache
def site_name(line: str) -> str:
    """Return a recorded line as users read it: ``a.py:7 in g()``; if it calls ``f``, ``f() (a.py:7 in g())``.

    Other texts stay as they are.
    """
    found = None
    if 0 < len(line) <= _LONGEST:
        found = _RECORDED.fullmatch(line) or _PROFILED.fullmatch(line)
    if found is None:
        return line
    parts = found.groupdict()
    within = "" if parts["function"] == _OUTERMOST else f" in {parts['function']}()"
    place = f"{parts['file']}:{parts['line']}{within}{parts.get('hook') or ''}"
    return f"{parts['call']} ({place})" if parts.get("call") else place


def without_call(site: str) -> str:
    """Return only the place of a site: ``a.py:7 in g()``, whatever is called there."""
    return site.partition("() (")[2].removesuffix(")") or site
