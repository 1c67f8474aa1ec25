"""The words of findings: every section is complete, and its templates fill."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache, cached_property
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


def test_words_never_end_an_analysis() -> None:
    """A value that no rule gave, or that is None where a sentence needs it."""
    text = "{held:bytes} on {ranks:n rank} of {host}[[ at {site}]]."
    assert fill(text, {"held": None}) == "unknown on unknown of unknown."
    assert worded("ledger", "straggler/not_declared", {"rank": 3})("title") == "waiting for rank 3"


def test_the_sections_declare_which_findings_stay_without_a_remedy() -> None:
    assert "late_rank_unclear" in declared("ledger", "noted")
    assert "compute" not in declared("ledger", "noted")


REPOSITORY = Path(__file__).parents[2]
IMPLIED = {"ledger": {"fqn", "rank", "cost"}}
"""Values that the engine gives to every section of a room, beside the layer."""
LOOKED_UP = re.compile(r"ledger:outside_fsdp/|hang:(?:doing|hang)/")
"""Sections that rules look up without a call of :func:`finding`; what they know is tested by their rooms."""


class Rules:
    """A module of rules: what it calls, and what its expressions may be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.room = path.stem if path.stem == "balance" else path.parent.name
        self.functions = [one for one in ast.walk(self.tree) if isinstance(one, ast.FunctionDef)]

    @cached_property
    def calls(self) -> list[tuple[ast.Call, ast.FunctionDef]]:
        """Calls with the function that they are in."""
        return [
            (call, function)
            for function in self.functions
            for call in ast.walk(function)
            if isinstance(call, ast.Call)
        ]

    @cached_property
    def constants(self) -> set[str]:
        """Strings that the module writes."""
        return {
            one.value
            for one in ast.walk(self.tree)
            if isinstance(one, ast.Constant) and isinstance(one.value, str)
        }

    def assigned(self, name: str, function: ast.AST) -> list[ast.expr]:
        """Return all values of a name: in a function, else at the top of the module."""
        for scope in (function, self.tree):
            nodes = ast.walk(scope) if scope is function else ast.iter_child_nodes(scope)
            found = []
            for one in nodes:
                targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
                value = one.iter if isinstance(one, ast.For) else getattr(one, "value", None)
                for target in targets:
                    pairs = [(target, value)]
                    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                        pairs = list(zip(target.elts, value.elts, strict=True))
                    found += [it for to, it in pairs if isinstance(to, ast.Name) and to.id == name and it]
            if found:
                return found
        return []

    def passed(self, name: str, function: ast.FunctionDef) -> list[tuple[ast.expr, ast.FunctionDef]]:
        """Return what callers of a function pass for one of its parameters."""
        places = [one.arg for one in function.args.args]
        if name not in places:
            return []
        at = places.index(name)
        return [
            (call.args[at], caller)
            for call, caller in self.calls
            if called(call) == function.name and len(call.args) > at
        ]

    def strings(
        self, node: ast.AST | None, function: ast.FunctionDef, seen: Collection[tuple[str, str]] = ()
    ) -> set[str]:
        """Return what the name of a section may be; ``*`` for a part that is known at run time only."""
        if isinstance(node, ast.Constant):
            return {node.value} if isinstance(node.value, str) else set()
        if isinstance(node, ast.JoinedStr):
            return {"".join(str(one.value) if isinstance(one, ast.Constant) else "*" for one in node.values)}
        if isinstance(node, ast.IfExp):
            return self.strings(node.body, function, seen) | self.strings(node.orelse, function, seen)
        if isinstance(node, ast.Name):
            values = [(one, function) for one in self.assigned(node.id, function)]
            open_ = {*seen, (node.id, function.name)}
            return (
                {
                    text
                    for value, where in values or self.passed(node.id, function)
                    for text in self.strings(value, where, open_)
                }
                if (node.id, function.name) not in seen
                else set()
            )
        inside = ast.iter_child_nodes(node) if node else ()
        return {
            text
            for one in inside
            for text in self.strings(one, function, seen)
            if text in wordings(self.room)
        }

    def keys(self, node: ast.AST | None, function: ast.FunctionDef) -> set[str]:
        """Return the keys that a mapping has at least once in its function."""
        if isinstance(node, ast.Dict):
            spread = [
                self.keys(value, function)
                for key, value in zip(node.keys, node.values, strict=True)
                if key is None
            ]
            own = {str(one.value) for one in node.keys if isinstance(one, ast.Constant)}
            return own.union(*spread)
        if isinstance(node, ast.IfExp):
            return self.keys(node.body, function) | self.keys(node.orelse, function)
        if isinstance(node, ast.BoolOp):
            return set().union(*(self.keys(one, function) for one in node.values))
        if isinstance(node, ast.Call):
            made = [one for one in self.functions if one.name == called(node)]
            returned = [one.value for each in made for one in ast.walk(each) if isinstance(one, ast.Return)]
            return set().union(*(self.keys(one, made[0]) for one in returned))
        if isinstance(node, ast.Name):
            values = self.assigned(node.id, function)
            stored = {
                str(one.slice.value)
                for one in ast.walk(function)
                if isinstance(one, ast.Subscript)
                and isinstance(one.ctx, ast.Store)
                and isinstance(one.value, ast.Name)
                and one.value.id == node.id
                and isinstance(one.slice, ast.Constant)
            }
            return stored.union(*(self.keys(one, function) for one in values))
        return set()


def called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


MAKING = {"enter": (1, 2), "finding": (0, 1), "_reason": (0, 1), "_of_peak": (0, 3), "worded": (1, 2)}
"""Calls that fill a section: the places of its name and of its evidence."""
ALSO = {"_of_peak": {"bytes", "part"}}


@cache
def modules() -> list[Rules]:
    paths = sorted((REPOSITORY / "analyzers").rglob("*.py"))
    return [Rules(path) for path in paths if path.parent.name != "findings"]


def given() -> Iterator[tuple[str, str, set[str]]]:
    """Yield place, section and the names that are given to it, of every call that fills one."""
    for rules in (one for one in modules() if one.room in ROOMS):
        for call, function in rules.calls:
            name = called(call)
            if name not in MAKING or (function.name, name) in {
                ("_of_peak", "finding"),
                ("enter", "worded"),
                ("_reason", "worded"),
            }:
                continue
            key, evidence = MAKING[name]
            inner = bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value in ROOMS
            shift = int(inner and name == "finding")
            arguments = dict(enumerate(call.args[shift:]))
            said = {one.arg for one in call.keywords if one.arg}
            for one in call.keywords:
                said |= rules.keys(one.value, function) if one.arg in (None, "evidence") else set()
            said |= rules.keys(arguments.get(evidence), function) | ALSO.get(name, set())
            for section in rules.strings(arguments.get(key), function):
                yield f"{rules.path.name}:{call.lineno} {section}", f"{rules.room}:{section}", said


def sections() -> dict[str, dict[str, str]]:
    return {f"{room}:{key}": dict(texts) for room in ROOMS for key, texts in wordings(room).items()}


def test_rules_give_the_values_that_their_sections_name() -> None:
    """A missing one would be ``unknown`` in a sentence."""
    known = sections()
    whole = {section for _, section, _ in given() if section in known}
    filled = set()
    for place, pattern, names in given():
        written = re.compile(re.escape(pattern).replace(r"\*", ".*"))
        found = {pattern} & known.keys() or {one for one in known if written.fullmatch(one)} - whole
        assert found or "*" in pattern or pattern.partition(":")[2] not in known, place
        for section in found:
            texts = {
                name: text for name, text in known[section].items() if name != "unsure" or "known" in names
            }
            needed = {name for text in texts.values() for _, name, _, _ in Formatter().parse(text) if name}
            implied = IMPLIED.get(section.partition(":")[0], {"fqn"})
            own = {name for name, text in texts.items() if f"{{{name}}}" not in text}
            assert needed <= names | implied | own, (place, section, needed - names - implied)
            filled.add(section)
    bases = {f"{one.partition(':')[0]}:{texts['like']}" for one, texts in known.items() if "like" in texts}
    assert {one for one in known.keys() - filled - bases if not LOOKED_UP.match(one)} == set()


def test_each_kind_of_lateness_has_words() -> None:
    (rules,) = [one for one in modules() if one.path.name == "stragglers.py"]
    kinds = {
        kind
        for call, function in rules.calls
        if called(call) == "_Cause"
        for kind in rules.strings(call.args[1], function)
    }
    assert {"host", "kernel", "links"} <= kinds
    assert {f"straggler/{kind}" for kind in kinds - {"data_loader"}} <= wordings("ledger").keys()
