"""pytest: limits on what a test's training takes, as a mark.

::

    @pytest.mark.fsdp2prof(max_exposed_frac=0.2, max_peak_bytes="60GiB")
    def test_the_step_is_lean(fsdp2prof_record):
        fsdp2prof_record("torchrun", "--nproc-per-node", "2", "train.py")

The test fails, once its body has passed, if a run that it recorded breaks a limit. ``run="runs/first"`` tests
a run that is there already. Nothing but pytest is imported until a mark or the fixture is used.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fsdp2prof.analyzers.fail_on import Condition

_MARK = "fsdp2prof"
_RUNS = pytest.StashKey[list[Path]]()
_LAST_LINES = 40
"""Of a recorded command that failed."""


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line(
        "markers",
        f"{_MARK}(run=None, max_METRIC=..., min_METRIC=...): limits on the runs that the test records with "
        "fsdp2prof_record; metrics as for --fail-on, and peak_bytes, reserved_bytes",
    )


@pytest.fixture
def fsdp2prof_record(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Path]:
    """Record a command: ``fsdp2prof_record("torchrun", ..., options=["--active", "2"])`` gives the run.

    ``options`` are those of ``fsdp2prof record``, ``environment`` is the command's. The test fails if the
    command does.
    """
    runs = request.node.stash.setdefault(_RUNS, [])

    def record(
        *command: str | Path, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> Path:
        run = tmp_path / f"fsdp2prof-run-{len(runs)}"
        arguments = ["record", "-q", "-o", run, *options, "--", *command]
        done = subprocess.run(
            [sys.executable, "-m", "fsdp2prof", *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            said = "\n".join(done.stdout.splitlines()[-_LAST_LINES:])
            pytest.fail(
                f"the recorded command ended with exit code {done.returncode}:\n{said}", pytrace=False
            )
        runs.append(run)
        return run

    return record


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Judge the runs of a marked test after its body."""
    marks = list(item.iter_markers(_MARK))
    if not marks:
        return (yield)
    limits = [limit for mark in marks for limit in _limits(mark)]
    result = yield
    runs = [Path(mark.kwargs["run"]) for mark in marks if mark.kwargs.get("run") is not None]
    recorded: list[Path] = item.stash.setdefault(_RUNS, [])
    runs += recorded
    if not runs:
        pytest.fail(
            f"@pytest.mark.{_MARK}: the test recorded nothing; call fsdp2prof_record(...) or give run=PATH",
            pytrace=False,
        )
    for run in runs:
        _judge(run, limits)
    return result


def _limits(mark: pytest.Mark) -> list[Condition]:
    from fsdp2prof.analyzers.fail_on import Condition, parse
    from fsdp2prof.errors import UsageError
    from fsdp2prof.units import parse_bytes

    sizes = {"peak_bytes": "peak_allocated_gib", "reserved_bytes": "peak_reserved_gib"}
    limits = []
    try:
        if mark.args:
            raise UsageError("limits are written by name: max_exposed_frac=0.2")
        for name, value in mark.kwargs.items():
            if name == "run":
                continue
            side, _, metric = name.partition("_")
            symbol = {"max": ">", "min": "<"}.get(side)
            if symbol is None:
                raise UsageError(f"no limit {name!r}: names begin with max_ or min_, or are run")
            if metric in sizes:
                size = parse_bytes(value) if isinstance(value, str) else value
                limits.append(Condition(sizes[metric], symbol, size / (1 << 30), f"{name}={value!r}"))
            else:
                parsed = parse(f"{metric}{symbol}{value}", "run")
                limits.append(Condition(parsed.metric, symbol, parsed.limit, f"{name}={value!r}"))
        if not limits:
            raise UsageError("no limit given: write for example max_exposed_frac=0.2")
    except (UsageError, TypeError) as error:
        pytest.fail(f"@pytest.mark.{_MARK}: {error}", pytrace=False)
    return limits


def _judge(run: Path, limits: Sequence[Condition]) -> None:
    from fsdp2prof.analyzers.fail_on import check
    from fsdp2prof.errors import Fsdp2ProfError
    from fsdp2prof.workflows.analyze import analyze_any
    from fsdp2prof.workflows.job.job_files import open_job

    try:
        analysis = analyze_any(open_job(run))
        broken = check(limits, analysis)
    except Fsdp2ProfError as error:
        refused = str(error)
    else:
        if not broken:
            return
        lines = [f"{run} is beyond {len(broken)} of {len(limits)} limits:"]
        lines += [f"  {line}" for line in (*broken, *analysis.verdict)]
        refused = "\n".join(lines)
    pytest.fail(f"@pytest.mark.{_MARK}: {refused}", pytrace=False)
