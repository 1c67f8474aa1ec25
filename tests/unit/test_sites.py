"""How sentences name the lines of a script."""

from __future__ import annotations

import pytest

from fsdp2prof.analyzers.layers import SITE, site_name, without_call


@pytest.mark.parametrize(
    ("line", "name", "parts"),
    [
        ("a.py:7 (g)", "a.py:7 in g()", (None, "a.py", "7", "g", None)),
        ("a.py:7 (<module>)", "a.py:7", (None, "a.py", "7", None, None)),
        ("x/a.py:7 (g, a hook)", "x/a.py:7 in g(), a hook", (None, "x/a.py", "7", "g", ", a hook")),
        ("f() in a.py:7 (g)", "f() (a.py:7 in g())", ("f", "a.py", "7", "g", None)),
        (
            "time.sleep() in a.py:7 (<module>)",
            "time.sleep() (a.py:7)",
            ("time.sleep", "a.py", "7", None, None),
        ),
        ("/home/me/a.py(7): g", "/home/me/a.py:7 in g()", (None, "/home/me/a.py", "7", "g", None)),
    ],
)
def test_recorded_lines_have_one_form(line: str, name: str, parts: tuple[str | None, ...]) -> None:
    """Of the recorder's lines and of the profiler's; the parts are still known, and a name keeps its form."""
    assert site_name(line) == site_name(name) == name
    found = SITE.fullmatch(name)
    assert found is not None
    assert found.groups() == parts
    assert SITE.fullmatch(without_call(name)) is not None


@pytest.mark.parametrize("text", ["", "aten::add_", "Optimizer.step#AdamW.step", "nn.Module: Linear_0"])
def test_other_names_are_no_lines(text: str) -> None:
    """Operators and ranges that name a pause."""
    assert site_name(text) == text
    assert SITE.fullmatch(text) is None


def test_a_text_as_long_as_a_book_stays_as_it_is() -> None:
    text = "a:1 (" * 200_000  # searched, it would take hours
    assert site_name(text) is text
