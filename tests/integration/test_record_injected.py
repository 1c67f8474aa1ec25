"""Breaking the recorder inside a training: it must end, print and compute the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, TypeVar

import pytest

from .injection.launching import COMMANDS, entered, launched
from .injection.names import hidden_names, modules, removed_names
from .injection.running import VARIANTS, Injections, described, functions
from .injection.training import ENDINGS

Value = TypeVar("Value")
EVERYTHING = VARIANTS["everything"]
BETWEEN = "fsdp2prof.recorder.guard:Guard.around.<locals>.guarded"
"""What stands between a training and the recorder."""


def sampled(injections: list[Value], count: int) -> list[Value]:
    return random.Random(20).sample(injections, count)


def unbroken(folder: Path, injections: list[dict[str, Any]]) -> None:
    trainings = Injections(folder)
    trainings.compare(injections)
    assert trainings.broken == []


def test_a_sample_of_everything(tmp_path: Path) -> None:
    entered = functions(tmp_path / "count", ["everything"], endings=("returns", "SIGTERM"))
    assert len({one["function"] for one in entered}) > 400
    sample = [*sampled(entered, 7), *sampled(modules(), 1), *sampled(hidden_names(), 2)]
    for one, how in zip(sample, ("raise", "raise", "raise", "raise", "base", "none", "none"), strict=False):
        one["how"] = how
    # The comparison notices what breaks: the guard itself is the one thing that must not fail.
    between = {"function": BETWEEN, "call": 1, "options": EVERYTHING}
    trainings = Injections(tmp_path / "broken")
    trainings.compare([*sample, between])
    (noticed,) = trainings.broken
    assert noticed.startswith(described(between))


@pytest.mark.slow
def test_a_sample_of_one_rank_of_two(tmp_path: Path) -> None:
    """The other rank neither waits for it nor goes another way."""
    entered = functions(tmp_path / "count", ["try"], calls=(1,), ranks=2, only_rank=1)
    unbroken(tmp_path / "broken", sampled([one for one in entered if "trials" in one["function"]], 3))


@pytest.mark.slow
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("calls", [(1, 3), (2, -1)], ids=["first-and-third", "second-and-last"])
def test_every_function_at_some_of_its_calls(tmp_path: Path, calls: tuple[int, int]) -> None:
    unbroken(tmp_path / "broken", functions(tmp_path / "count", VARIANTS, calls, ENDINGS))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("how", ["base", "none", "sleep"])
def test_every_function_in_another_way(tmp_path: Path, how: str) -> None:
    """An exception of a class that few handlers catch; None for the value; two seconds more."""
    unbroken(tmp_path / "broken", functions(tmp_path / "count", VARIANTS, (1,), ENDINGS, how=how))


@pytest.mark.slow
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("rank", [0, 1])
def test_every_function_on_one_rank_of_two(tmp_path: Path, rank: int) -> None:
    entered = functions(tmp_path / "count", VARIANTS, (1,), ENDINGS[:2], ranks=2, only_rank=rank)
    unbroken(tmp_path / "broken", entered)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_module_at_its_import(tmp_path: Path) -> None:
    unbroken(tmp_path / "broken", modules())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_torch_that_has_other_private_names(tmp_path: Path) -> None:
    unbroken(tmp_path / "broken", [*hidden_names(), *removed_names()])


def test_a_sample_of_the_launcher(tmp_path: Path) -> None:
    """The command starts, ends and prints the same when the launcher's own functions fail."""
    everything = [("everything", *one) for one in entered(tmp_path, "everything")]
    assert len(everything) > 50
    assert broken_launchers(tmp_path, sampled(everything, 4)) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_function_of_the_launcher(tmp_path: Path) -> None:
    found = {name: (what, name, calls) for what in COMMANDS for name, calls in entered(tmp_path, what)}
    assert broken_launchers(tmp_path, list(found.values())) == []


def broken_launchers(folder: Path, injections: list[tuple[str, str, int]]) -> list[str]:
    """Break the first and the last call of each; return what changed the command."""
    broken = []
    for what, name, calls in injections:
        for call in sorted({1, calls}):
            code, out, told = launched(folder, what, name, call)
            if (code, out) != (5, "rank 0\nends\n") or "Traceback" in told:
                broken.append(f"{what}: {name} call={call}: exit {code}, {out!r}, {told[-500:]}")
    return broken
