"""What ``import fsdp2prof`` offers: named once, documented, cheap to import, enough for the example."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp2prof
from fsdp2prof.reporters import documents
from fsdp2prof.results import Shown

HEAVY = ("torch", "pandas", "plotly", "hta", "numpy", "rich", "jinja2", "click", "msgspec")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def imported_for_types() -> dict[str, str]:
    """Name -> module, of what type checkers are told that the package exports."""
    source = ast.parse(inspect.getsource(fsdp2prof))
    guarded = next(node for node in source.body if isinstance(node, ast.If))
    return {
        alias.asname: node.module or ""
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None
    }


def test_the_namespace_and_what_type_checkers_see_are_the_same() -> None:
    assert dir(fsdp2prof) == fsdp2prof.__all__
    assert set(fsdp2prof.__all__) == {*imported_for_types(), "__version__"}


@pytest.mark.parametrize("name", [name for name in fsdp2prof.__all__ if name != "__version__"])
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(fsdp2prof, name)
    assert value.__module__.startswith(imported_for_types()[name])
    assert inspect.getdoc(value)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'fsdp2prof' has no attribute 'analyse'"):
        _ = fsdp2prof.analyse


def test_import_is_cheap() -> None:
    script = f"import sys, fsdp2prof; assert not set({HEAVY!r}) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_result_with_a_document_shows_itself() -> None:
    assert [kind for kind in documents.every_builder() if not issubclass(kind, Shown)] == []


def test_the_example_uses_nothing_else() -> None:
    tree = ast.parse((EXAMPLES / "folklore.py").read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {module for module in modules if module and module.startswith("fsdp2prof")} == {"fsdp2prof"}
