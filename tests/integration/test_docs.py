"""What README and docs/ say: every command parses, those about a run do run, and the site builds clean."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cli import call
from support.documented import PAGES, REPOSITORY, documented_commands, parse
from synthetic import Schedule, record, transformer, write_run

COMMANDS = documented_commands()
RUNS = {"runs/first", "runs/second", "runs/hsdp", "RUN", "traces/"}
"""What the docs call a recorded run."""
ELSEWHERE = {"record", "rehearse", "watch", "trigger", "bench", "plan"}
"""Verbs that start trainings or search for minutes: other tests run them."""
FILES = re.compile(r"\.(json|sqlite|toml|ya?ml|csv|py)\b|^--$")
"""What an estimate reads beside a model that is built in."""


def can_run(words: list[str]) -> bool:
    """Whether it needs nothing but a recorded run."""
    if (
        words[0] in ELSEWHERE or words[:2] == ["analyze", "hang"] or {"--log", "--cluster"} & set(words)
    ):  # trackers and Dask have their own tests
        return False
    if words[0] == "inspect" and words[1] != "checkpoint":
        return True
    if words[0] == "estimate":
        return not any(FILES.search(word) or word.startswith("--from") or word in RUNS for word in words)
    if any(word.isupper() and word not in RUNS for word in words):  # a placeholder, as FOLDER
        return False
    named = {word for word in words if "/" in word and not word.startswith("-")}
    return bool(RUNS & set(words)) and named <= RUNS


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 50
    assert sum(can_run(words) for _, words in COMMANDS) >= 20
    assert {page for page, _ in COMMANDS} >= {"README.md", "index.md", "reading.md", "export.md"}


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[" ".join(words)[:60] for _, words in COMMANDS])
def test_every_documented_command_parses(
    page: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    parse(words)


@pytest.mark.slow
def test_every_documented_command_that_needs_only_a_run_runs(
    capfd: pytest.CaptureFixture[str],
    recorded: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for place in RUNS - {"traces/"}:
        Path(place).symlink_to(recorded("train_tiny_fsdp2").run)
    write_run(record(Schedule(roots=(transformer(3),))), Path("traces"))  # of a GPU: HTA wants one
    baseline = Path("baseline.json")  # which one line writes and the next one reads
    assert call(capfd, "compare", baseline, "runs/first", "--write-baseline").code == 0
    lengths = Path("lengths.txt")
    lengths.write_text("".join(f"{length}\n" for length in range(10, 74)))
    for page, documented in COMMANDS:
        words = [word for word in documented if word != "--open"]
        if not can_run(words):
            continue
        for file in set(Path().glob("*.*")) - {baseline, lengths}:
            file.unlink()
        ended = call(capfd, *words)
        if "pip install 'fsdp2prof[" in ended.err:  # an extra that is not installed
            continue
        assert ended.code in (0, 3), f"{page}: fsdp2prof {' '.join(words)}: {ended.err}"


_POLICY = re.compile(
    r"\| .*?`(?P<options>--ac [a-z -]+)`\)? \| (?P<gib>[\d.]+) GiB.*? \| (?P<ms>[\d,]+) ms "
    r"\| (?P<speed>[\d,]+) \| (?P<exposed>[\d.]+) % \|"
)
"""A row of the tuning guide's table of predictions."""


@pytest.mark.slow
def test_the_tuning_guide_has_the_figures_of_today(capfd: pytest.CaptureFixture[str]) -> None:
    rows = [*_POLICY.finditer((REPOSITORY / "docs" / "tuning.md").read_text())]
    assert len(rows) == 4
    model = ["--model", "llama3-8b", "--mesh", "dp_shard=8", "--seq-len", "8192", "--hardware", "h100-sxm"]
    model += ["--format", "json"]
    for row in rows:
        memory, step = (
            json.loads(call(capfd, "estimate", what, *model, *row["options"].split()).out)
            for what in ("memory", "step")
        )
        assert row["gib"] == f"{memory['peak']['reserved_bytes'] / (1 << 30):.1f}"
        assert row["ms"] == f"{step['step_ns'] / 1e6:,.0f}"
        assert row["speed"] == f"{step['tokens_per_s_per_gpu']:,.0f}"
        assert row["exposed"] == f"{100 * step['trace']['totals']['exposed_frac']:.1f}"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs the extra docs: pip install '.[docs]'")
    pytest.importorskip("mkdocstrings", reason="the site needs the extra docs: pip install '.[docs]'")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", "docs/site/mkdocs.yml"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        [*command, "-d", str(site)], cwd=REPOSITORY, capture_output=True, text=True, env=environment
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    for page in PAGES[1:]:
        assert (site / page.with_suffix(".html").name).is_file()
    helped = (site / "commands.html").read_text(encoding="utf-8")
    assert "fsdp2prof inspect sharding" in helped
    assert "--max-size" in helped
    assert "analyze_trace" in (site / "api.html").read_text(encoding="utf-8")


def test_every_page_is_in_the_contents_of_the_site() -> None:
    contents = (REPOSITORY / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [page.name for page in PAGES[1:] if f" {page.name}\n" not in contents]
    assert missing == []
