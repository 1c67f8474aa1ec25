"""Long work tells how far it has come, to whoever watches, and nobody else notices."""

from __future__ import annotations

import re
import subprocess
import sys

from support.terminal import on_terminal

from fsdp2prof.files import counted, watched

SLOW = """
import sys, time
from fsdp2prof.commands import output
from fsdp2prof.commands.output import Output
from fsdp2prof.files import counted

def work():
    for item in range(3):
        time.sleep(0.3)
        yield item

output._EVERY_S = 0.25
quiet = "-q" in sys.argv
with Output(path=None, format="text", force=False, quiet=quiet).progress("analysing [b]runs/x[/b]"):
    assert list(counted(work(), range(3))) == [0, 1, 2]
print("done")
"""


def test_results_are_passed_on_as_they_come_and_counted() -> None:
    seen: list[tuple[int, int]] = []
    with watched(lambda done, of: seen.append((done, of))):
        results = counted(iter("abc"), "abc")
        assert next(results) == "a"
        assert seen == [(1, 3)]
        assert list(results) == ["b", "c"]
        assert list(counted(["alone"], ["alone"])) == ["alone"]
    assert seen == [(1, 3), (2, 3), (3, 3)], "one alone is not worth telling"
    assert list(counted("ab", "ab")) == ["a", "b"]
    assert len(seen) == 3, "nobody watches any more"


def test_a_terminal_shows_a_bar_with_the_number_of_ranks_and_the_text_as_it_is() -> None:
    shown = on_terminal([sys.executable, "-c", SLOW], columns=100, environment={"TERM": "xterm"})
    assert "analysing [b]runs/x[/b]" in shown
    assert "2/3" in shown
    assert "done" in shown


def test_without_colour_it_is_a_plain_line() -> None:
    environment = {"TERM": "xterm", "NO_COLOR": "1"}
    shown = on_terminal([sys.executable, "-c", SLOW], columns=100, environment=environment)
    assert "\x1b" not in shown
    assert "analysing [b]runs/x[/b]" in shown


def without_terminal(*options: str) -> str:
    ended = subprocess.run([sys.executable, "-c", SLOW, *options], capture_output=True, text=True, check=True)
    assert ended.stdout == "done\n"
    return ended.stderr


def test_without_a_terminal_a_line_comes_every_interval_and_says_how_far_it_is() -> None:
    lines = without_terminal().splitlines()
    assert len(lines) >= 2
    told = [re.fullmatch(r"analysing \[b\]runs/x\[/b\](?:, (\d) of 3)? \(\d+ s\)", line) for line in lines]
    done = [int(line[1] or 0) for line in told if line is not None]
    assert len(done) == len(lines)
    assert done == sorted(done)
    assert done[-1] > 0


def test_quiet_says_nothing() -> None:
    assert without_terminal("-q") == ""
