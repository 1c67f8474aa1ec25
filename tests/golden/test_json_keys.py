"""The JSON contract: keys may be added, never renamed or removed.

``*.keys`` list every key of a schema as a path (``ranks[].steps[].step``). A new field gets its line there.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.results import trace_analysis
from support.samples import SAMPLES, sample

from fsdp2prof.estimators.config.option import options_of
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.reporters.documents import build, every_builder
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.results.estimate import EstimatedPolicy

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "json.md"


def as_json(result: Any) -> str:
    return str(RENDERERS["json"].render(build(result), RenderOptions()))


def declared_keys(kind: Any, path: str = "") -> Iterator[str]:
    """Key paths of a result type, through lists, optionals and nested dataclasses."""
    if kind is EstimatedPolicy:
        yield from (f"{path}.{name}" for name in options_of(PolicySpec))
    elif dataclasses.is_dataclass(kind):
        for name, hint in typing.get_type_hints(kind).items():
            if name != "__slots__":
                here = f"{path}.{name}" if path else name
                yield here
                yield from declared_keys(hint, here)
    elif typing.get_origin(kind) is list:
        yield from declared_keys(typing.get_args(kind)[0], f"{path}[]")
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for option in typing.get_args(kind):
            yield from declared_keys(option, path)


def written_keys(value: Any, declared: set[str], path: str = "") -> Iterator[str]:
    """Key paths of a JSON document, down to where the keys are data (ranks, categories, evidence)."""
    if isinstance(value, list):
        for item in value:
            yield from written_keys(item, declared, f"{path}[]")
    elif isinstance(value, dict) and (not path or any(key.startswith(f"{path}.") for key in declared)):
        for name, item in value.items():
            here = f"{path}.{name}" if path else name
            yield here
            yield from written_keys(item, declared, here)


@pytest.mark.parametrize("name", SAMPLES)
def test_no_key_was_renamed_or_removed_and_new_ones_are_noted(name: str) -> None:
    kind, _, _ = SAMPLES[name]
    frozen, declared = set((HERE / f"{name}.keys").read_text().split()), set(declared_keys(kind))
    assert frozen - declared == set()
    assert declared - frozen == set(), f"add these lines to {name}.keys"


@pytest.mark.parametrize("name", SAMPLES)
def test_the_document_has_no_key_that_is_not_declared_and_misses_none_at_the_top(name: str) -> None:
    kind, schema, _ = SAMPLES[name]
    document = json.loads(as_json(sample(name)))
    declared = set(declared_keys(kind))
    written = set(written_keys(document, declared))
    assert document["schema"] == schema
    assert written <= declared
    top = {field.name for field in dataclasses.fields(kind)}
    assert top <= written


def test_every_schema_that_can_be_printed_is_frozen_and_documented() -> None:
    """A result that has a document has its keys here and its line in the docs."""
    frozen = {kind: schema for kind, schema, _ in SAMPLES.values()}
    row = r"^\|.*\| `(fsdp2prof\.[^`]+)` \| `(\w+)` \|$"
    documented = dict(re.findall(row, DOCS.read_text(), re.MULTILINE))
    assert set(every_builder()) <= set(frozen)
    assert documented == {schema: kind.__name__ for kind, schema in frozen.items()}
    assert {path.stem for path in HERE.glob("*.keys")} == set(SAMPLES)


def test_integers_are_written_exactly() -> None:
    """2**53 + 1 survives: a float would lose its last bit."""
    analysis = trace_analysis()
    rank = analysis.ranks[0]
    communication = dataclasses.replace(rank.communication, total_ns=2**53 + 1)
    exact = dataclasses.replace(analysis, ranks=[dataclasses.replace(rank, communication=communication)])
    assert '"total_ns": 9007199254740993' in as_json(exact)
