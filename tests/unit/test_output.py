"""Where and how wide a result is printed: on a real terminal, through a pipe, with and without colour."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents import Said, document
from support.terminal import on_terminal

from fsdp2prof.commands.output import Output
from fsdp2prof.reporters import documents

TESTS = Path(__file__).resolve().parents[1]

PRINT = """
from support.documents import Said, document
from fsdp2prof.commands.output import Output
from fsdp2prof.reporters import documents

documents.BUILDERS[Said] = lambda _: document()
output = Output(path=None, format="text", force=False, quiet=False)
with output.progress("reading a\\x1b]52;c;aGk=\\x07"):
    pass
output.render(Said(), source="runs/x")
"""

COMMAND = [sys.executable, "-c", PRINT]


def environment(**changes: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "TERM")}
    return {**clean, "PYTHONPATH": str(TESTS), "TERM": "xterm-256color", **changes}


def piped(**changes: str) -> str:
    ended = subprocess.run(COMMAND, env=environment(**changes), capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    return ended.stdout


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("7", 40), ("900", 200), ("wide", 118)])
def test_columns_counts_in_a_pipe(columns: str, width: int) -> None:
    text = piped(COLUMNS=columns)
    assert widest(text) == width
    assert "\x1b" not in text


@pytest.mark.parametrize(("columns", "width"), [(80, 80), (300, 200)])
def test_a_terminal_is_used(columns: int, width: int) -> None:
    text = on_terminal(COMMAND, columns=columns, environment=environment(NO_COLOR="1", COLUMNS=""))
    assert widest(text) == width


def test_colour_only_where_it_is_welcome() -> None:
    def shown(**changes: str) -> str:
        return on_terminal(COMMAND, columns=100, environment=environment(COLUMNS="", **changes))

    assert "\x1b[1;31mhigh" in shown(NO_COLOR="")
    for off in ({"NO_COLOR": "1"}, {"TERM": "dumb", "NO_COLOR": ""}):
        text = shown(**off)
        assert "\x1b" not in text
        assert text.startswith("reading a\\x1b]52;c;aGk=\\x07\n")


def test_every_format_goes_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(documents.BUILDERS, Said, lambda _: document())
    begins = {"text": "Test of 2 ranks", "json": "{", "csv": "fqn,bytes", "html": "<!doctype html>"}
    for name, start in begins.items():
        path = tmp_path / name
        Output(path=path, format=name, force=False, quiet=True).render(Said(), source="runs/x")
        assert path.read_text(encoding="utf-8").startswith(start)
