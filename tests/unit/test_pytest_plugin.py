"""The mark: limits that hold and that do not, what it refuses, and that it costs nothing unused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import Schedule, record, transformer, write_run

pytest_plugins = ["pytester"]

PLUGIN = "fsdp2prof.pytest_plugin"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    schedule = Schedule(roots=(transformer(1),), steps=1)
    return write_run(record(schedule, schedule), tmp_path_factory.mktemp("plugin") / "run")


@pytest.fixture
def outcomes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run marked tests, each given as the mark's arguments and a body."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run_marked(*tests: tuple[str, str]) -> pytest.RunResult:
        lines = ["import pytest"]
        for index, (arguments, body) in enumerate(tests):
            lines += [f"@pytest.mark.fsdp2prof({arguments})", f"def test_{index}():", f"    {body}"]
        pytester.makepyfile("\n".join(lines))
        return pytester.runpytest_inprocess("-p", PLUGIN, "--strict-markers")

    return run_marked


def test_limits_hold_or_fail_with_the_value_and_the_verdict(outcomes, run: Path) -> None:
    where = f"run={str(run)!r}"
    ended = outcomes(
        (f"{where}, max_exposed_frac=1, min_exposed_frac=0", "pass"),
        (f"{where}, max_exposed_frac=0.0001, max_step_time_ms=1e9", "pass"),
        (f"{where}, max_exposed_frac=0.0001", "assert False, 'of its own'"),
    )
    ended.assert_outcomes(passed=1, failed=2)
    text = ended.stdout.str()
    assert "is beyond 1 of 2 limits" in text
    assert "max_exposed_frac=0.0001: exposed_frac is 0." in text
    assert "of its own" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("max_exposed_fraction=1", "no metric 'exposed_fraction' here"),
        ("exposed_frac=1", "names begin with max_ or min_"),
        ("0.2", "written by name"),
        ("", "no limit given"),
        ("max_peak_bytes='much'", "not a size"),
        ("max_exposed_frac='some'", "not a condition"),
    ],
)
def test_what_is_no_limit_is_said(outcomes, arguments: str, words: str) -> None:
    ended = outcomes((arguments, "pass"))
    ended.assert_outcomes(failed=1)
    assert words in ended.stdout.str()


def test_nothing_recorded_and_nothing_there_fail(outcomes, run: Path, tmp_path: Path) -> None:
    ended = outcomes(
        ("max_exposed_frac=1", "pass"),
        (f"max_exposed_frac=1, run={str(tmp_path / 'none')!r}", "pass"),
        (f"max_peak_bytes='60GiB', run={str(run)!r}", "pass"),
    )
    ended.assert_outcomes(failed=3)
    assert "recorded nothing" in ended.stdout.str()
    assert "no such file" in ended.stdout.str()
    assert "needs a memory analysis" in ended.stdout.str(), "this run has no memory recording"


def test_the_plugin_imports_nothing_until_it_is_used() -> None:
    heavy = ("torch", "pandas", "plotly", "numpy", "msgspec", "fsdp2prof.api", "fsdp2prof.analyzers")
    script = f"import sys, {PLUGIN}; assert not set({heavy!r}) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
