"""The table of memory categories is the one place: whoever names a category names one of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from support.rendered import csv_of, json_of, text_of
from support.results import MIB, memory_analysis

from fsdp2prof.analyzers.memory import categories
from fsdp2prof.analyzers.memory.peak import category_shares, fold_layers, layer_rows
from fsdp2prof.reporters.documents import build
from fsdp2prof.results.memory import MemoryAnalysis
from fsdp2prof.results.peak import LayerBytes
from fsdp2prof.vocabulary import CATEGORIES

ROOT = Path(__file__).parents[2]
_EVENTS = ("cpu_op", "user_annotation")
"""Kineto's categories of events."""
PACKAGES = ("analyzers/memory", "analyzers/compare", "estimators", "fsdp2prof")


def of_everything() -> MemoryAnalysis:
    """A MiB of the first category at the peak, two of the second, and so on."""
    by_layer = [LayerBytes(fqn="a", category=name, bytes=(i + 1) * MIB) for i, name in enumerate(CATEGORIES)]
    sizes = {row.category: row.bytes for row in by_layer}
    analysis, layers = memory_analysis(), layer_rows(by_layer)
    peak = replace(
        analysis.ranks[0].peak,
        allocated_bytes=sum(sizes.values()),
        categories=sizes,
        by_layer=by_layer,
        by_category=category_shares(sizes.items()),
        layers=layers,
        layers_folded=fold_layers(layers),
    )
    course = {"time_ns": [0, 1], **{name: [0, size] for name, size in sizes.items()}}
    return replace(analysis, ranks=[replace(analysis.ranks[0], peak=peak, timeline=course)])


def test_every_category_is_shown_with_its_own_words_and_colour() -> None:
    analysis = of_everything()
    document, text = build(analysis), text_of(analysis)
    headers = [column.label for column in document.tables()["by_layer"].columns]
    for i, (name, word) in enumerate(CATEGORIES.items()):
        assert f"\n{word.label} " in text
        assert word.header in headers
        assert json_of(analysis)["ranks"][0]["peak"]["categories"][name] == (i + 1) * MIB
        assert {row["category"]: row["bytes"] for row in csv_of(analysis)}[name] == str((i + 1) * MIB)
    for chart in document.charts().values():
        drawn = {trace["name"]: trace["marker"]["color"] for trace in chart.drawn()["data"]}
        assert drawn == {word.label: word.colour for word in CATEGORIES.values()}


def test_no_two_categories_look_alike() -> None:
    for part in ("label", "header", "colour"):
        assert len({getattr(word, part) for word in CATEGORIES.values()}) == len(CATEGORIES)


def test_every_category_is_documented() -> None:
    told = (ROOT / "docs" / "definitions.md").read_text()
    rules = str(categories.__doc__)
    for name in CATEGORIES:
        assert f"`{name}`" in told
        if name not in ("sharded_parameter",):  # known by its address, not by a rule
            assert name in rules


def test_nobody_names_a_category_that_is_not_in_the_table() -> None:
    """Rules, remedies, findings, the recorder's manifest and the estimators' advice."""
    named = {
        name: str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in _named(ast.parse(path.read_text()))
        if name not in _EVENTS
    }
    assert {name: where for name, where in named.items() if name not in CATEGORIES} == {}
    assert set(named) >= {"activation", "sharded_parameter", "temporary", "unattributed"}


def _named(tree: ast.AST) -> Iterator[str]:
    """Literals where a category stands: ``put(...)``, ``category=...``, ``.categories[...]``, ..."""
    for node in ast.walk(tree):
        found: list[ast.expr] = []
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function.endswith((".put", ".category.equals")) or function in ("_tensor", "_info"):
                found += node.args[:1]
            if function == "_held":
                found += node.args[1:]
            found += [keyword.value for keyword in node.keywords if keyword.arg == "category"]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("categories"):
            found.append(node.slice)
        for value in found:
            if (
                isinstance(value, ast.Constant)
                and isinstance(value.value, str)
                and value.value not in _EVENTS
            ):
                yield value.value
