"""Fixtures every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real traces and snapshots that this repository does not hold; skips where it is absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    root = Path(os.environ.get("FSDP2PROF_REAL_DATA", beside))
    if not root.is_dir():
        pytest.skip("no real data: set FSDP2PROF_REAL_DATA to the folder that holds it")
    return root
