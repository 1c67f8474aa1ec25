"""The words of findings: every section is complete, and its templates fill."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

from fsdp2prof.analyzers import findings
from fsdp2prof.analyzers.findings import declared, fill, finding, worded, wordings

ROOMS = sorted(path.stem for path in Path(findings.__file__).parent.glob("*.ini"))
SAYING = ("problem", "advice", "change")


@pytest.mark.parametrize("room", ROOMS)
def test_every_section_says_something_in_known_formats(room: str) -> None:
    for key, texts in wordings(room).items():
        assert any(texts.get(name) for name in SAYING), key
        for text in texts.values():
            for _, name, spec, _ in Formatter().parse(text):
                assert name is None or name.isidentifier(), (key, text)
                known = not spec or spec in findings._FORMATS or re.fullmatch(r"n [a-zA-Z -]+", spec)
                assert known or format(1.0, spec or ""), (key, spec)


def test_a_part_without_its_value_is_left_out() -> None:
    text = "Python collects garbage for {cost}[[, most of it at {site}]]."
    assert fill(text, {"cost": "1 ms", "site": None}) == "Python collects garbage for 1 ms."
    assert fill(text, {"cost": "1 ms", "site": "a.py:3"}).endswith("1 ms, most of it at a.py:3.")


def test_values_are_written_in_the_units_of_sentences() -> None:
    values = {"held": 3 << 20, "part": 0.25, "ranks": 1, "names": list("abcdefghij"), "fqn": ""}
    said = fill("{held:bytes} {part:frac} {ranks:n rank} {names:list} {fqn:layer}", values)
    assert said == "3.00 MiB 25.0% 1 rank a, b, c, d, e, f, g, h and 2 more the root module"


def test_a_value_is_never_read_as_a_template() -> None:
    assert fill("{name}", {"name": "{cost} [[x]]"}) == "{cost} [[x]]"


def test_a_variant_has_the_id_of_its_finding_and_what_it_does_not_set() -> None:
    one = finding("sharding", "variables_differ/probed", severity="medium", names=["NCCL_ALGO"])
    assert (one.id, one.severity) == ("variables_differ", "medium")
    text = worded("ledger", "straggler/pauses", {"rank": 3})
    assert (text("id"), text("cause")) == ("straggler", "host_pause")
    assert text("title") == "pauses of rank 3's host"


def test_the_sections_declare_which_findings_stay_without_a_remedy() -> None:
    assert "late_rank_unclear" in declared("ledger", "noted")
    assert "compute" not in declared("ledger", "noted")


REPOSITORY = Path(__file__).parents[2]
ROOM_OF_FOLDER = {"ledger": "ledger", "sharding": "sharding", "memory": "memory", "nccl": "nccl"}
IMPLIED = {"fqn", "rank", "cost"}
"""Values that the engine gives to every section."""


def strings(node: ast.AST | None, function: ast.AST) -> set[str]:
    """Return what an expression may be, of constants, choices between them and names of these."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    if isinstance(node, ast.IfExp):
        return strings(node.body, function) | strings(node.orelse, function)
    if isinstance(node, ast.Name):
        assigned = [
            one.value
            for one in ast.walk(function)
            if isinstance(one, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == node.id for target in one.targets)
        ]
        return {text for value in assigned for text in strings(value, function)}
    return set()


def keys_of(node: ast.AST | None, function: ast.AST) -> set[str] | None:
    """Return the keys of an evidence; None where they are not written here."""
    if node is None:
        return set()
    if isinstance(node, ast.Dict):
        inner = [one.value if isinstance(one, ast.Constant) else None for one in node.keys]
        return None if None in inner else {str(one) for one in inner}
    if isinstance(node, ast.Name):
        for one in ast.walk(function):
            target = one.targets[0] if isinstance(one, ast.Assign) else getattr(one, "target", None)
            if isinstance(target, ast.Name) and target.id == node.id:
                return keys_of(getattr(one, "value", None), function)
    return None


def given() -> Iterator[tuple[str, str, set[str]]]:
    """Yield place, section and the names that are given to it, of every call that shows all of them."""
    for folder, room in ROOM_OF_FOLDER.items():
        for path in sorted((REPOSITORY / "analyzers" / folder).glob("*.py")):
            for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(function, ast.FunctionDef):
                    continue
                for call in ast.walk(function):
                    if not isinstance(call, ast.Call):
                        continue
                    name = (
                        call.func.attr
                        if isinstance(call.func, ast.Attribute)
                        else getattr(call.func, "id", "")
                    )
                    if name not in ("enter", "finding", "_reason"):
                        continue
                    arguments = call.args[1:] if name == "enter" else call.args
                    said = {one.arg for one in call.keywords}
                    evidence = arguments[1] if len(arguments) > 1 else None
                    evidence = next((one.value for one in call.keywords if one.arg == "evidence"), evidence)
                    known = keys_of(evidence, function)
                    if not arguments or known is None or None in said:
                        continue
                    for key in strings(arguments[0], function):
                        yield (
                            f"{path.name}:{call.lineno} {key}",
                            f"{room}:{key}",
                            known | {str(one) for one in said},
                        )


def test_rules_give_the_values_that_their_sections_name() -> None:
    """A missing one would end an analysis."""
    seen = 0
    for place, section, names in given():
        room, _, key = section.partition(":")
        assert key in wordings(room), place
        texts = {
            name: text for name, text in wordings(room)[key].items() if name != "unsure" or "known" in names
        }
        needed = {name for text in texts.values() for _, name, _, _ in Formatter().parse(text) if name}
        assert needed <= names | IMPLIED | texts.keys(), (place, needed - names)
        seen += 1
    assert seen > 90
