"""Runs injections in one process tree, and says which of them changed the training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp2prof.manifest import MANIFEST_SCHEMA, RankManifest, RecordOptions
from fsdp2prof.readers.run.documents import UnreadableError, read_document

from .training import BOUNDARY, ENDINGS, STEPS, TRIAL_STEPS

__all__ = ["CALLS", "VARIANTS", "Injections", "functions"]

_TRAINING = Path(__file__).with_name("training.py")
_FEW: dict[str, Any] = {"wait": 0, "warmup": 1, "active": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "everything": {**_FEW, "watch": True, "hang_after": 600, "verify": True},
    "summary": {**_FEW, "summary": True, "max_trace_size": "1GB"},
    "again": {**_FEW, "every": 4, "on_demand": True, "signal": "USR1", "memory": False},
    "asked": {**_FEW, "on_demand": True, "memory": False},
    "full": {**_FEW, "every": 4, "max_size": "1KB", "memory": False},
    "api": {**_FEW, "summary": True, "watch": True},
    "try": {**_FEW, "trial": {"candidates": ["reshard=never", "forward_prefetch=1"], "steps": 12}},
}
CALLS = (1, 3)
"""Of each function that are broken; -1 is the last."""


@dataclass
class Injections:
    """Trainings with one injection each, in a folder of their own; :attr:`broken` are those that changed."""

    folder: Path
    broken: list[str] = field(default_factory=list)

    def run(self, injections: Sequence[dict[str, Any]]) -> list[Path]:
        """Run them, and return their folders."""
        folders = [self.folder / f"{number:04d}" for number in range(len(injections))]
        given = [
            {"steps": _steps(one), **one, "folder": str(folder)}
            for one, folder in zip(injections, folders, strict=True)
        ]
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", str(_TRAINING)],
            input=json.dumps(given),
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        self._codes = [json.loads(line)["codes"] for line in done.stdout.splitlines()]
        return folders

    def compare(self, injections: Sequence[dict[str, Any]]) -> None:
        """Run them and the trainings alone.

        What ends or prints something else is broken, and what leaves a manifest that cannot be read.
        """
        kinds = sorted({_kind(one) for one in injections})
        plain = [{"recorded": False, "steps": n, "ranks": m, "ending": how} for n, m, how in kinds]
        folders = self.run([*plain, *injections])
        seen = [
            (codes, [(folder / f"stdout{rank or ''}").read_text() for rank in range(len(codes))])
            for folder, codes in zip(folders, self._codes, strict=True)
        ]
        alone = dict(zip(kinds, zip(seen, folders, strict=True), strict=False))
        assert all(codes[0] in _EXPECTED[kind[2]] for kind, ((codes, _), _) in alone.items())
        first = len(kinds)
        for injection, folder, (codes, out) in zip(injections, folders[first:], seen[first:], strict=True):
            same, plain_folder = alone[_kind(injection)]
            if (codes, out) != same:
                last = (folder / "stderr").read_text().splitlines()[-1:]
                self.broken.append(f"{described(injection)}: exit {codes}: {last}")
            elif _tracebacks(folder) != _tracebacks(plain_folder):
                self.broken.append(f"{described(injection)}: a traceback on stderr")
            else:
                self.broken += [f"{described(injection)}: {said}" for said in _unreadable(folder)]
        shutil.rmtree(self.folder, ignore_errors=True)


_EXPECTED = {"returns": {0}, "raises": {1}, "no memory": {1}, "SIGTERM": {-15}}


def _tracebacks(folder: Path) -> int:
    return sum(file.read_text().count("Traceback") for file in folder.glob("stderr*"))


def _unreadable(folder: Path) -> Iterator[str]:
    for file in folder.glob("run/**/manifest.json"):
        try:
            read_document(file, RankManifest, MANIFEST_SCHEMA)
        except UnreadableError as error:
            yield str(error)


def _kind(injection: dict[str, Any]) -> tuple[int, int, str]:
    """What the training alone depends on: steps, ranks, ending."""
    return _steps(injection), injection.get("ranks", 1), injection.get("ending", "returns")


def _steps(injection: dict[str, Any]) -> int:
    return TRIAL_STEPS if injection.get("options", {}).get("trial") else STEPS


def described(injection: dict[str, Any]) -> str:
    """What is broken, in a line."""
    shown = ("function", "call", "module", "torch", "how", "ending", "ranks", "only_rank")
    return " ".join(f"{key}={injection[key]}" for key in shown if key in injection)


def functions(
    folder: Path,
    variants: Iterable[str],
    calls: Sequence[int] = CALLS,
    endings: Sequence[str] = ENDINGS[:1],
    **how: Any,
) -> list[dict[str, Any]]:
    """Break these calls of every function, in the first variant that enters it."""
    given = [
        {"options": dict(VARIANTS[name]), "ending": end, "api": name == "api", **how}
        for end in endings
        for name in variants
    ]
    for one in given:
        RecordOptions(**one["options"])
    folders = Injections(folder).run([{**one, "count": True} for one in given])
    seen: set[str] = set()
    found = []
    for one, counted in zip(given, folders, strict=True):
        counts = Counter[str]()
        for file in sorted(counted.glob("calls-*.json")):
            counts |= Counter(json.loads(file.read_text()))
        for name, count in sorted(counts.items()):
            if name in seen or name.startswith(BOUNDARY) or name.endswith(":<module>"):
                continue
            seen.add(name)
            chosen = {count if n < 0 else n for n in calls} & set(range(1, count + 1))
            found += [{"function": name, "call": n, **one} for n in sorted(chosen)]
    shutil.rmtree(folder, ignore_errors=True)
    return found
