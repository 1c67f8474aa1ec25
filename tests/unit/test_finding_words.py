"""The words of findings: every section is complete, and its templates fill."""

from __future__ import annotations

import re
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
