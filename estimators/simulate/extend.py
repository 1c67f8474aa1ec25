"""Extend what was executed with a few blocks to more of them, by repeating the stretches of the middle ones.

A *tape* is a sequence of births of things (allocations, labels, commands) and of references to them (a
death, a wait). A *run* is a stretch of the tape that belongs to one block or to none. Consecutive runs of
blocks 0, 1, 2, ... (or backwards) form a *ladder*: the blocks' forward, their backward, the optimizer's work
on them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """A thing is born, or referred to."""

    thing: int
    birth: bool


@dataclass(slots=True)
class Run:
    """A stretch of the tape; ``ladder`` is null outside any ladder."""

    key: object
    block: int | None
    events: list[Event]
    ladder: int | None = None


class Tape:
    """Runs in order, and where each thing is born: run, and how many are born in it before.

    References do not count, since what blocks of a kind share dies in one of them.
    """

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.births = {
            event.thing: (index, position)
            for index, run in enumerate(runs)
            for position, event in enumerate(event for event in run.events if event.birth)
        }


@dataclass(slots=True)
class Copy:
    """A thing of the extended tape: which one it copies, its block's distance, and when it lives."""

    origin: int
    shift: int
    """Blocks between the original's and its own, for names; things outside of ladders have none."""
    repeated: bool
    birth: int
    death: int = -1
    """Time of the last reference; -1 without any."""


class CannotRepeatError(Exception):
    """Blocks do not repeat: a reference goes to a birth that has no copy."""


class Unrolling:
    """Replays a tape with more blocks: ladders climb further, every other run comes once.

    ``often``: a thing may be referred to several times, as an event by the streams that wait for it.
    Otherwise a thing dies once, except that what all blocks of a kind share (a mask) dies with the last of
    them.
    """

    def __init__(self, tape: Tape, blocks: int, deeper: int, period: int, *, often: bool = False) -> None:
        self._tape = tape
        self._more = deeper - blocks
        self._middle = (blocks - period) // 2
        self._period = period
        self._deeper = deeper
        self._often = often
        self._copies: list[Copy] = []
        self._copy_at: dict[tuple[object, int], Copy] = {}
        self._time = 0
        self.references: list[tuple[int, Copy]] = []
        """Things born before a reference, and the target of the reference, in order."""

    def run(self) -> list[Copy]:
        """Return the things of the deeper tape in order of birth. Raises :class:`CannotRepeatError`."""
        runs = self._tape.runs
        done: set[int] = set()
        for run in runs:
            if run.ladder is None:
                self._replay(run, None, 0)
            elif run.ladder not in done:
                done.add(run.ladder)
                self._climb([other for other in runs if other.ladder == run.ladder])
        return self._copies

    def _climb(self, rungs: list[Run]) -> None:
        by_block = {rung.block: rung for rung in rungs}
        upwards = (rungs[0].block or 0) <= (rungs[-1].block or 0)
        for block in range(self._deeper) if upwards else range(self._deeper - 1, -1, -1):
            template = self._template(block)
            if template in by_block:  # else of another kind than this ladder's
                self._replay(by_block[template], block, block - template)

    def _template(self, block: int) -> int:
        """Block of the shallow execution that a block of the deeper one copies."""
        # The first blocks and the last are as they were; those between go through the period again.
        if block < self._middle:
            return block
        if block >= self._middle + self._period + self._more:
            return block - self._more
        return self._middle + (block - self._middle) % self._period

    def _replay(self, run: Run, block: int | None, shift: int) -> None:
        position = 0
        for event in run.events:
            if event.birth:
                copy = Copy(event.thing, shift, block is not None, self._time)
                self._copies.append(copy)
                self._copy_at[self._place(run, block), position] = copy
                position += 1
            else:
                born_in, position_then = self._tape.births[event.thing]
                born = self._tape.runs[born_in]
                owner = self._block_of_birth(born, run, block)
                copied = self._copy_at.get((self._place(born, owner), position_then))
                # What all blocks share has no owner: it dies anew in each, and the last death counts.
                again = copied is not None and copied.death >= 0 and not self._often
                if copied is None or (again and owner is not None):
                    raise CannotRepeatError
                copied.death = self._time
                self.references.append((len(self._copies), copied))
            self._time += 1

    def _place(self, run: Run, block: int | None) -> object:
        return id(run) if run.ladder is None else (run.ladder, block)

    def _block_of_birth(self, born: Run, run: Run, block: int | None) -> int | None:
        if born.ladder is None or born.block is None:
            return None
        if block is not None and run.block is not None:  # as many blocks before or behind as it was
            return born.block + block - run.block
        return born.block if born.block < self._middle + self._period else born.block + self._more


class Renaming:
    """Renames blocks in labels and names."""

    def __init__(self, blocks: Sequence[str], shallow: int, period: int) -> None:
        prefix = prefix_of(blocks)
        assert prefix is not None
        self._pattern = re.compile(rf"(?<![\w.]){re.escape(prefix)}(\d+)(?!\d)")
        self._prefix = prefix
        self._more = len(blocks) - shallow
        self._middle = (shallow - period) // 2

    def __call__(self, text: str, copy: Copy) -> str:
        """Return a text about the original as one about its copy."""

        def renamed(match: re.Match[str]) -> str:
            block = int(match[1])
            if copy.repeated:
                return f"{self._prefix}{block + copy.shift}"
            return f"{self._prefix}{block if block <= self._middle else block + self._more}"

        return self._pattern.sub(renamed, text)


def prefix_of(blocks: Sequence[str]) -> str | None:
    """Return the common prefix of the names of all blocks if they are numbered from 0."""
    prefix = blocks[0].rstrip("0123456789") if blocks else ""
    return prefix if blocks and list(blocks) == [f"{prefix}{i}" for i in range(len(blocks))] else None
