"""A deep model's step from two shallow captures: the commands of the middle blocks, repeated.

As for memory (:mod:`fsdp2prof.estimators.execution.stitching`), two captures are made, one a period of blocks
deeper than the other. The shallow one is extended to the depth of the other and compared with it, command by
command; only if they agree is it extended further. What lies outside of the blocks (the optimizer, clipping)
may grow with the depth: operators over all parameters move linearly more, and calls that come once a
parameter come more often.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from fsdp2prof.estimators.timeline.commands import (
    Collective,
    Command,
    Enter,
    HostWait,
    Kernel,
    Leave,
    Program,
    Record,
    Wait,
    Work,
)
from fsdp2prof.labels import AUTOGRAD_NODE

__all__ = ["CannotCutError", "Part", "deepened", "parts_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of commands: one block's forward or backward, or what is between."""

    commands: list[Command]
    ladder: int | None = None
    """Consecutive blocks, up or down, form a ladder; null outside of every one."""
    block: int = -1


class CannotCutError(Exception):
    """Blocks do not follow each other, or do not repeat."""


def deepened(
    shallow: Program, deeper: Program, blocks: Sequence[str], shallow_blocks: int, period: int
) -> Program | None:
    """Extend a capture of ``shallow_blocks`` blocks to all of ``blocks``; ``None`` if they do not repeat.

    ``deeper`` is the capture with ``period`` blocks more.
    """
    prefix = blocks[0].removesuffix("0")
    if list(blocks) != [f"{prefix}{index}" for index in range(len(blocks))]:
        return None
    try:
        first = parts_of(shallow, prefix, shallow_blocks)
        second = parts_of(deeper, prefix, shallow_blocks + period)
        once = _Extension(first, second, prefix, shallow_blocks, period, 1).commands()
        if once != _renumbered(deeper.commands):
            return None
        periods = (len(blocks) - shallow_blocks) // period
        commands = _Extension(first, second, prefix, shallow_blocks, period, periods).commands()
    except CannotCutError:
        return None
    return replace(
        shallow,
        commands=commands,
        parameters=_line(shallow.parameters, deeper.parameters, periods),
        model_flops=_line(shallow.model_flops, deeper.model_flops, periods),
    )


def parts_of(program: Program, prefix: str, blocks: int) -> list[Part]:
    """Cut a program where a block's forward or backward begins or its last label ends.

    The blocks are ``prefix`` with a number. Raises ``CannotCutError`` if they do not follow each other.
    """
    named = re.compile(rf"FSDP::(\w+) \({re.escape(prefix)}(\d+)\)(?: \[pg=\d+\])?")
    found: list[tuple[int, int, str, int]] = []  # start, end, kind, block
    depth, backward_depth = 0, 0
    labels: list[int | None] = []
    for position, command in enumerate(program.commands):
        if isinstance(command, Enter):
            depth += 1
            if command.name.startswith(AUTOGRAD_NODE) and not backward_depth:
                backward_depth = depth
            match = named.fullmatch(command.name)
            labels.append(int(match[2]) if match else None)
            kind = "pre_backward" if backward_depth else "pre_forward"
            if match and match[1] == kind:
                same = bool(found) and found[-1][2:] == (kind, int(match[2]))
                if not same:  # the first of a block's parameter groups
                    found.append((position, position, kind, int(match[2])))
        elif isinstance(command, Leave):
            block = labels.pop()
            if backward_depth == depth:
                backward_depth = 0
            depth -= 1
            if found and block == found[-1][3]:
                found[-1] = (found[-1][0], position + 1, *found[-1][2:])
    return _ladders(program.commands, found, blocks)


def _ladders(commands: list[Command], found: list[tuple[int, int, str, int]], blocks: int) -> list[Part]:
    parts: list[Part] = []
    end = ladder = 0
    for index in range(0, len(found), blocks):
        cells = found[index : index + blocks]
        order = [block for *_, block in cells]
        upwards = list(range(blocks))
        if order not in (upwards, upwards[::-1]) or len({kind for _, _, kind, _ in cells}) > 1:
            raise CannotCutError
        parts.append(Part(commands[end : cells[0][0]]))
        starts = [start for start, *_ in cells]
        for start, stop, block in zip(starts, [*starts[1:], cells[-1][1]], order, strict=True):
            parts.append(Part(commands[start:stop], ladder, block))
        end, ladder = cells[-1][1], ladder + 1
    return [*parts, Part(commands[end:])]


class _Extension:
    """Writes the commands of a model that is some periods deeper than the shallow capture."""

    def __init__(
        self, first: list[Part], second: list[Part], prefix: str, blocks: int, period: int, periods: int
    ) -> None:
        outside = [part for part in first if part.ladder is None]
        outside_deeper = [part for part in second if part.ladder is None]
        if len(outside) != len(outside_deeper):
            raise CannotCutError
        self._first = first
        self._grown = [
            _grown(mine.commands, theirs.commands, periods)
            for mine, theirs in zip(outside, outside_deeper, strict=True)
        ]
        self._name = re.compile(rf"(?<![\w.]){re.escape(prefix)}(\d+)(?!\d)")
        self._prefix = prefix
        self._blocks, self._period, self._more = blocks, period, period * periods
        self._middle = (blocks - period) // 2
        self._home: dict[int, tuple[object, int, int]] = {}
        """Event of the shallow capture -> ladder or index of its part, block, position."""
        self._events: dict[tuple[object, int, int], int] = {}
        self._made: list[Command] = []

    def commands(self) -> list[Command]:
        """Return them, events numbered in order. Raises ``CannotCutError`` for a wait that has no copy."""
        for index, part in enumerate(self._first):
            for position, command in enumerate(part.commands):
                if isinstance(command, (Record, Collective)) and command.event >= 0:
                    self._home[command.event] = (*_place(part, index, part.block), position)
        outside = 0
        index = 0
        while index < len(self._first):
            part = self._first[index]
            if part.ladder is None:
                for origin, command in self._grown[outside]:
                    self._add(command, (*_place(part, index, -1), origin), part, 0)
                outside += 1
                index += 1
            else:
                self._climb(self._first[index : index + self._blocks])
                index += self._blocks
        return self._made

    def _climb(self, rungs: list[Part]) -> None:
        by_block = {rung.block: rung for rung in rungs}
        deeper = range(self._blocks + self._more)
        for block in deeper if rungs[0].block == 0 else reversed(deeper):
            rung = by_block[self._template(block)]
            for position, command in enumerate(rung.commands):
                place = (*_place(rung, 0, block), position)
                self._add(command, place, rung, block - rung.block)

    def _template(self, block: int) -> int:
        if block < self._middle:
            return block
        if block >= self._middle + self._period + self._more:
            return block - self._more
        return self._middle + (block - self._middle) % self._period

    def _add(self, command: Command, place: tuple[object, int, int], part: Part, shift: int) -> None:
        if isinstance(command, (Record, Collective)) and command.event >= 0:
            number = self._events[place] = len(self._events)
            command = replace(command, event=number)
        elif isinstance(command, (Wait, HostWait)) and command.event >= 0:
            command = replace(command, event=self._event_of(command.event, part, shift))
        elif isinstance(command, Enter):
            command = Enter(self._renamed(command.name, part, shift))
        self._made.append(command)

    def _event_of(self, event: int, part: Part, shift: int) -> int:
        if event not in self._home:
            raise CannotCutError
        where, block, position = self._home[event]
        if block >= 0 and part.ladder is not None:
            block += shift
        elif block >= self._middle + self._period:
            block += self._more
        copied = self._events.get((where, block, position))
        if copied is None:
            raise CannotCutError
        return copied

    def _renamed(self, name: str, part: Part, shift: int) -> str:
        def renamed(match: re.Match[str]) -> str:
            block = int(match[1])
            if part.ladder is not None:
                return f"{self._prefix}{block + shift}"
            return f"{self._prefix}{block if block <= self._middle else block + self._more}"

        return self._name.sub(renamed, name)


def _place(part: Part, index: int, block: int) -> tuple[object, int]:
    return (("outside", index), -1) if part.ladder is None else (("ladder", part.ladder), block)


def _grown(mine: list[Command], theirs: list[Command], periods: int) -> list[tuple[int, Command]]:
    """Extend what lies outside of the blocks: (position in ``mine`` or -1, command)."""
    ours, other = [_key(command) for command in mine], [_key(command) for command in theirs]
    made: list[tuple[int, Command]] = []
    for tag, start, end, begin, stop in SequenceMatcher(None, ours, other, autojunk=False).get_opcodes():
        if tag == "equal":
            pairs = zip(range(start, end), range(begin, stop), strict=True)
            made += [(at, _larger(mine[at], theirs[to], periods)) for at, to in pairs]
        elif tag == "insert":
            added = theirs[begin:stop]
            beside = (theirs[max(0, begin - len(added)) : begin], theirs[stop : stop + len(added)])
            if added not in beside or _has_events(added):
                raise CannotCutError
            made += [(-1, command) for command in added * periods]
        else:
            raise CannotCutError
    return made


def _key(command: Command) -> object:
    """What a command is, whatever its size."""
    if isinstance(command, Kernel):
        kind = None if command.work is None else (command.work.kind, command.work.dtype, command.work.shape)
        return (Kernel, command.stream, command.op, kind)
    if isinstance(command, Collective):
        return (Collective, command.stream, command.op, command.group, command.dtype)
    return (type(command), getattr(command, "stream", None), getattr(command, "call", None))


def _has_events(commands: list[Command]) -> bool:
    return any(getattr(command, "event", -1) >= 0 for command in commands)


def _larger(mine: Command, theirs: Command, periods: int) -> Command:
    """Grow a command linearly from one depth to the next."""
    if isinstance(mine, Kernel) and isinstance(theirs, Kernel) and mine.work and theirs.work:
        return replace(mine, work=_larger_work(mine.work, theirs.work, periods))
    if isinstance(mine, Collective) and isinstance(theirs, Collective):
        sizes = ("nelems_in", "nelems_out", "payload_bytes")
        nelems_in, nelems_out, payload = (
            _line(getattr(mine, name), getattr(theirs, name), periods) for name in sizes
        )
        return replace(mine, nelems_in=nelems_in, nelems_out=nelems_out, payload_bytes=payload)
    return mine


def _larger_work(mine: Work, theirs: Work, periods: int) -> Work:
    return replace(
        mine,
        bytes=_line(mine.bytes, theirs.bytes, periods),
        flops=_line(mine.flops, theirs.flops, periods),
    )


def _line(first: int, second: int, periods: int) -> int:
    return first + periods * (second - first)


def _renumbered(commands: list[Command]) -> list[Command]:
    """Number events in the order in which they are recorded."""
    numbers: dict[int, int] = {}
    made: list[Command] = []
    for command in commands:
        if isinstance(command, (Record, Collective)) and command.event >= 0:
            numbers[command.event] = len(numbers)
            command = replace(command, event=numbers[command.event])
        elif isinstance(command, (Wait, HostWait)) and command.event >= 0:
            if command.event not in numbers:
                raise CannotCutError
            command = replace(command, event=numbers[command.event])
        made.append(command)
    return made
