"""Documents spoiled at random, the same every time: values of other kinds and sizes put anywhere."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

__all__ = ["HOSTILE", "mutated"]

Path: TypeAlias = tuple[str | int, ...]

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400,
    1.5, -0.5, 1e308, -1e308, 5e15, "", "0", "x", "nan", "\ud800", "\x1b[31m\x1b]52;c;AAAA\x07", "a" * 20_000,
    "9" * 5000, "\n\r\t", f"ProfilerStep#{'9' * 30}", f"ProfilerStep#{'9' * 5000}",
    f"fsdp2prof::root ({'9' * 5000})", "FSDP::all_gather (x) [pg=3]", "record_param_comms", "gloo:all_reduce",
    "cudaStreamSynchronize", "kernel", "cuda_runtime", "user_annotation", "cpu_op", "[memory]", "X", "i",
    [], {}, [[]], [1], [[1]], [[[1]]], [None], ["a"], [1e300], {"a": 1}, [[2**62, 2**62]] * 2,
    [[-1, -5], [3]], [[1] * 10_000], "[0, 1]", {"ph": "X"},
)  # fmt: skip


def mutated(document: Any, count: int, seed: int, values: Sequence[Any] = HOSTILE) -> Iterator[Any]:
    """Yield ``count`` copies of a JSON-like document, each with a few values replaced, dropped or doubled."""
    rng = random.Random(seed)
    places = list(_places(document))
    for _ in range(count):
        spoiled = copy.deepcopy(document)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            _spoil(spoiled, rng.choice(places), rng, values)
        yield spoiled


def _places(value: Any, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


def _spoil(document: Any, place: Path, rng: random.Random, values: Sequence[Any]) -> None:
    holder: Any = document
    for step in place[:-1]:
        try:
            holder = holder[step]
        except (KeyError, IndexError, TypeError):  # an earlier change took it away
            return
    key: Any = place[-1]
    how = rng.random()
    if not (isinstance(holder, dict) and key in holder) and not (
        isinstance(holder, list) and isinstance(key, int) and key < len(holder)
    ):
        return
    if how < 0.8:
        holder[key] = copy.deepcopy(rng.choice(values))
    elif how < 0.9:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
