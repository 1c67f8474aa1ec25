"""Results that take long to make, made once for all worker processes of a test session."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "shared"]

FOLDER = "FSDP2PROF_TESTS_SHARED"
"""Environment variable: the folder of this session, which ``tests/conftest.py`` makes."""

_known: dict[str, Any] = {}


def shared(key: str, make: Callable[[], Any]) -> Any:
    """Return what ``make`` made for ``key``, here or in another worker process."""
    if key not in _known:
        path = Path(os.environ[FOLDER], hashlib.sha256(key.encode()).hexdigest())
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_bytes(pickle.dumps(make()))
        _known[key] = pickle.loads(path.read_bytes())
    return _known[key]
