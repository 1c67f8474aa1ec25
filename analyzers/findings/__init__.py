"""Texts of findings: an ``.ini`` file declares each finding, and a rule provides the values.

A section is a finding, ``[finding/variant]`` a variant of its text that inherits what it does not set;
``like`` inherits from another section. A text names its values in braces, with a format of
:data:`_FORMATS` or Python's: ``{held:bytes}``, ``{parameters:n parameter}``. A part in ``[[double
brackets]]`` is left out if one of its values is None; elsewhere a None or missing value is printed as
``unknown``, so a text never stops an analysis. The files are read at every start: INI takes a quarter of
the time of YAML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from configparser import RawConfigParser
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any, cast

from fsdp2prof.analyzers.layers import named_layer, numbered
from fsdp2prof.results.finding import EvidenceValue, Finding, Severity
from fsdp2prof.units import format_bytes, format_frac, format_ns, plural

_OPTIONAL = re.compile(r"\[\[(.*?)\]\]")
_SHOWN = 8
"""Names or ranks in a sentence."""


def listed(names: Sequence[object], shown: int = _SHOWN) -> str:
    """Write the first of some names or ranks."""
    text = ", ".join(map(str, names[:shown]))
    return f"{text} and {len(names) - shown:,} more" if len(names) > shown else text


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "bytes": format_bytes,
    "frac": format_frac,
    "ns": format_ns,
    "layer": named_layer,
    "list": listed,
    "ranks": lambda ranks: numbered("rank", ranks),
    "Layer": lambda fqn: f"{(name := named_layer(fqn))[0].upper()}{name[1:]}",
}


class _Words(Formatter):
    """Formats values as sentences write them; ``{count:n rank}`` is ``3 ranks``."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "unknown"
        if format_spec.startswith("n "):
            return plural(value, format_spec[2:])
        write = _FORMATS.get(format_spec)
        return str(super().format_field(value, format_spec)) if write is None else write(value)


_WORDS = _Words()


def fill(template: str, values: Mapping[str, object]) -> str:
    """Return a text with its values."""

    def optional(match: re.Match[str]) -> str:
        names = [name for _, name, _, _ in _WORDS.parse(match[1]) if name]
        return "" if any(values.get(name) is None for name in names) else match[1]

    return _WORDS.vformat(_OPTIONAL.sub(optional, template), (), values)


@cache
def wordings(room: str) -> Mapping[str, Mapping[str, str]]:
    """Return the texts of each section of a room's file, with its ``id``."""
    parser = RawConfigParser(delimiters=("=",))
    parser.read(Path(__file__).with_name(f"{room}.ini"), encoding="utf-8")
    sections = {key: dict(parser.items(key)) for key in parser.sections()}

    def texts(key: str) -> dict[str, str]:
        name, variant, _ = key.partition("/")
        own = sections.get(key, {})
        like = own.get("like", name if variant else "")
        return {**(texts(like) if like else {}), "id": name, **own}

    return {key: {option: " ".join(text.split()) for option, text in texts(key).items()} for key in sections}


@cache
def declared(room: str, option: str) -> frozenset[str]:
    """Return the ids of the findings that set an option."""
    return frozenset(one["id"] for one in wordings(room).values() if one.get(option))


def worded(room: str, key: str, values: Mapping[str, object]) -> Callable[[str], str]:
    """Return a function that fills a section's texts by name; texts may refer to each other.

    An undeclared variant has the texts of its finding.
    """
    known = wordings(room)
    texts = known.get(key) or known[key.partition("/")[0]]
    return lambda option: fill(texts.get(option, ""), {**texts, **values})


def finding(
    room: str,
    key: str,
    evidence: Mapping[str, EvidenceValue] | None = None,
    *,
    severity: Severity | None = None,
    fqn: str | None = None,
    **said: object,
) -> Finding:
    """Return a finding whose message states the problem, then the change.

    Its texts can use its evidence, its layer as ``fqn``, and the values in ``said``. ``severity`` is for
    sections that declare none.
    """
    text = worded(room, key, {"fqn": fqn, **(evidence or {}), **said})
    return Finding(
        id=text("id"),
        severity=cast("Severity", text("severity") or severity),
        fqn=fqn,
        message=f"{text('problem')} {text('change')}".strip(),
        change=text("change"),
        evidence=dict(evidence or {}),
    )
