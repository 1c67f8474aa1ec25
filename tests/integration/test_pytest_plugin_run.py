"""The pytest plugin on real runs of two ranks: recorded by it, or there already; kept to its limits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import script_path

pytest_plugins = ["pytester"]


def test_a_recorded_training_is_judged(
    recorded: Callable[..., Any], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    training = [*launch, str(script_path("uneven")), "--steps", "7"]
    run = str(recorded("train_tiny_fsdp2", 2).run)
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.fsdp2prof(max_exposed_frac=1, max_peak_bytes="1GiB")
        def test_a_training(fsdp2prof_record):
            run = fsdp2prof_record(*{training!r}, options=["--active", "2"])
            assert (run / "rank-00001" / "trace.json.gz").is_file()

        @pytest.mark.fsdp2prof(max_peak_bytes="1GiB")
        def test_a_command_that_fails(fsdp2prof_record):
            fsdp2prof_record({sys.executable!r}, "-c", "raise SystemExit('as it should')")

        @pytest.mark.fsdp2prof(run={run!r}, max_peak_bytes="1KiB", max_exposed_frac=1)
        def test_a_peak_that_is_too_high():
            pass
        """
    )
    ended = pytester.runpytest_inprocess("-p", "fsdp2prof.pytest_plugin", "--strict-markers")
    text = ended.stdout.str()
    ended.assert_outcomes(passed=1, failed=2)
    assert "ended with exit code 1" in text
    assert "as it should" in text
    assert "is beyond 1 of 2 limits" in text
    assert "max_peak_bytes='1KiB': peak_allocated_gib is" in text
