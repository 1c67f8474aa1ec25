"""The command line as a whole: what it promises about imports, names, streams and exit codes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import call
from synthetic import Schedule, record, transformer, write

HEAVY = ("torch", "pandas", "plotly", "hta", "numpy", "rich", "jinja2")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["analyze", "--help"],
        ["report", "--help"],
        ["record", "--hang-after", "60", "--summary", "-q", "--", "true"],
    ],
)
def test_what_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    """Help, and the launcher: its torch would cost the machine of a training seconds and memory."""
    script = (
        "import sys\n"
        f"sys.argv = ['fsdp2prof', *{arguments!r}]\n"
        "from fsdp2prof.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)


def test_an_analysis_imports_only_what_it_needs(tmp_path: Path) -> None:
    """Of one rank's trace: nothing of memory, sharding, estimates, clusters, pages or run directories."""
    trace = tmp_path / "trace.json.gz"
    write(record(Schedule(roots=(transformer(2),), shard=2))[0], trace)
    code = (
        "import sys\nfrom fsdp2prof.cli import main\n"
        f"sys.argv = ['fsdp2prof', 'analyze', 'trace', {str(trace)!r}, '-q']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "print(*sorted(name for name in sys.modules if name.startswith('fsdp2prof')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    unwanted = (
        *("analyzers.memory", "analyzers.sharding", "estimators"),
        *("readers.memory", "readers.run", "workflows.ranks.cluster", "workflows.ranks.kept"),
    )
    assert [name for name in loaded if name.removeprefix("fsdp2prof.").startswith(unwanted)] == []


def test_every_verb_has_help(capfd: pytest.CaptureFixture[str]) -> None:
    for verb in ("record", "analyze", "estimate", "report"):
        ended = call(capfd, verb, "--help")
        assert ended.code == 0
        assert ended.out.startswith(f"Usage: fsdp2prof {verb}")


def test_the_other_spelling_is_accepted(capfd: pytest.CaptureFixture[str]) -> None:
    assert call(capfd, "analyse", "trace", "--help").out == call(
        capfd, "analyze", "trace", "--help"
    ).out.replace("fsdp2prof analyze", "fsdp2prof analyse", 1)


def completed(*words: str) -> list[str]:
    """What bash would offer for the last of some words: ``type,value`` a line."""
    environment = {
        **os.environ,
        "_FSDP2PROF_COMPLETE": "bash_complete",
        "COMP_WORDS": shlex.join(["fsdp2prof", *words]),
        "COMP_CWORD": str(len(words)),
    }
    script = "from fsdp2prof.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    return ended.stdout.split()


def test_a_shell_completes_verbs_models_and_hardware() -> None:
    assert completed("est") == ["plain,estimate"]
    assert completed("estimate", "memory", "--model", "llama3-") == [
        "plain,llama3-8b",
        "plain,llama3-70b",
        "plain,llama3-405b",
    ]
    assert completed("estimate", "memory", "--model", "./con") == ["file,./con"]
    assert completed("estimate", "memory", "--hardware", "mi300") == ["plain,mi300x"]
    assert "plain,h200" in completed("analyze", "trace", "x", "--hardware", "h")


def test_an_error_sends_no_escape_code(capfd: pytest.CaptureFixture[str]) -> None:
    """A name that would write to the clipboard (OSC 52), as the command's own error and as click's."""
    name = "no\x1b]52;c;aGk=\x07such\u202efile"
    for arguments in (["analyze", "trace", name], ["analyze", name], ["report", name, "-o", f"{name}.html"]):
        ended = call(capfd, *arguments)
        assert ended.code in (1, 2)
        assert "\\x1b]52" in ended.err
        assert not [char for char in ended.err if not char.isprintable() and char != "\n"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["unknown"],
        ["analyze", "unknown"],
        ["analyze", "trace"],
        ["analyze", "trace", "x", "--window", "y"],
        ["analyze", "trace", "x", "--ranks", "0-"],
        ["analyze", "trace", "x", "--ranks", "3-1"],
        ["analyze", "trace", "x", "--format", "pdf"],
    ],
)
def test_usage_errors_exit_2_and_stay_off_stdout(
    capfd: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    ended = call(capfd, *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "Error: " in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["analyze", "trace", "x", "-o", "result.pdf"], ["result.pdf", "--format"]),
        (["report", "x", "-o", "result.csv"], ["result.csv", "writes html"]),
        (["analyze", "trace", "x", "--format", "html"], ["-o report.html"]),
        (["analyze", "trace", "x", "--fail-on", "speed>1"], ["speed", "exposed_frac"]),
        (["analyze", "trace", "x", "--fail-on", "exposed_frac"], ["exposed_frac>0.2"]),
    ],
)
def test_contradicting_options_are_usage_errors(
    capfd: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    call(capfd, *arguments).refused(*words, code=2)
