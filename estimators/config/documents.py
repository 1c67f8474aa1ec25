"""YAML and TOML from anywhere: plain values, read without anything that can grow or run."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import msgspec

_Kind = TypeVar("_Kind")

_MOST_VALUES = 100_000
_LONGEST_BYTES = 4 << 20
"""A configuration has a page; reading YAML takes a second a megabyte."""


def read_text(path: Path) -> str:
    """Return a file's text. Raises ``ValueError`` if it cannot be read, is not text or is far too long."""
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    if len(content) > _LONGEST_BYTES:
        raise ValueError(f"is longer than {_LONGEST_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot be read ({error})") from None


def parse_yaml(text: str) -> Any:
    """Return the values of a YAML document.

    Raises ``ValueError``, also for aliases that repeat a value without end: a few lines of them print for
    ever.
    """
    import yaml

    try:
        root = yaml.compose(text, yaml.SafeLoader)
        if root is not None and _written_out(root, {}) > _MOST_VALUES:
            raise ValueError(f"its aliases write out more than {_MOST_VALUES} values")
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"not YAML: {error}") from None


def packaged(package: str, name: str, kind: type[_Kind]) -> _Kind:
    """Return the values of a YAML file of a package, by libyaml where PyYAML has it."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return msgspec.convert(yaml.load(files(package).joinpath(name).read_bytes(), loader), kind)


def _written_out(node: Any, known: dict[int, int]) -> int:
    """The number of values in a node, with each alias counted as a copy; ``known`` holds nodes already
    counted."""
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES + 1  # where it contains itself
        inside = [] if isinstance(node.value, str) else node.value
        parts = [part for item in inside for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_written_out(part, known) for part in parts)
    return known[id(node)]


def parse_toml(text: str) -> Any:
    """Return the values of a TOML document. Raises ``ValueError``."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not TOML: {error}") from None
