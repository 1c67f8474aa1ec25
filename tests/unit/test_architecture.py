"""Rules of CONTRIBUTING.md that import-linter cannot see: who opens files, who finds them, who prints."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OPENING = {"open", "read_text", "read_bytes", "write_text", "write_bytes"}
FINDING = {"glob", "rglob", "iterdir", "walk", "scandir", "listdir"}


@cache
def modules(folder: str) -> list[tuple[str, list[ast.AST]]]:
    """Modules of a folder with all nodes of their syntax trees."""
    root = REPOSITORY / folder
    return [
        (path.relative_to(root).as_posix(), list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
        for path in sorted(root.rglob("*.py"))
    ]


def callers(folder: str, names: set[str]) -> set[str]:
    """Modules of a folder that call a function or method of one of these names."""
    return {
        module
        for module, nodes in modules(folder)
        for node in nodes
        if isinstance(node, ast.Call)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""))
        in names
    }


def test_analyzers_open_no_file() -> None:
    assert callers("analyzers", OPENING | FINDING) == set()


def test_estimators_open_files_only_where_a_specification_is_read() -> None:
    opened = callers("estimators", OPENING | FINDING)
    assert {module for module in opened if not module.startswith("config/")} == {"models/huggingface.py"}


def test_findings_are_made_of_their_declared_words() -> None:
    """Elsewhere a finding could say what no section of ``analyzers/findings`` declares.

    ``nccl/causes.py`` puts the reasons of several communicators into one finding.
    """
    making = {"findings/__init__.py", "nccl/causes.py"}
    making |= {f"ledger/{name}.py" for name in ("account", "book", "replayed")}
    assert callers("analyzers", {"Finding", "LedgerEntry", "LedgerRemedy"}) == making


def test_readers_look_for_files_only_inside_a_run_directory_or_a_checkpoint() -> None:
    looking = callers("fsdp2prof/readers", FINDING)
    assert {module for module in looking if not module.startswith("run/")} == {"checkpoint.py"}


@pytest.mark.parametrize("folder", ["analyzers", "estimators", "fsdp2prof/readers", "fsdp2prof/workflows"])
def test_nothing_below_the_commands_prints(folder: str) -> None:
    assert callers(folder, {"print", "echo"}) == set()


def test_renderers_know_of_results_only_findings() -> None:
    known = {
        node.module
        for _, nodes in modules("fsdp2prof/reporters/renderers")
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fsdp2prof.results")
    }
    assert known <= {"fsdp2prof.results.finding"}


def test_no_test_asserts_how_long_something_took() -> None:
    """Deadlines of loops that wait are set before: ``deadline = time.monotonic() + 60``."""
    for folder in ("unit", "executed", "integration", "browser", "golden", "packaging"):
        for module, nodes in modules(f"tests/{folder}"):
            for node in nodes:
                if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
                    timed = ast.unparse(node.test.left)
                    clock = any(name in timed for name in ("monotonic()", "perf_counter()", "time.time()"))
                    assert not (clock and isinstance(node.test.left, ast.BinOp)), (
                        f"{folder}/{module}: {timed}"
                    )
