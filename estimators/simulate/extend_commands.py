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
from itertools import repeat

from fsdp2prof.estimators.simulate.extend import (
    CannotRepeatError,
    Event,
    Renaming,
    Run,
    Tape,
    Unrolling,
    prefix_of,
)
from fsdp2prof.estimators.simulate.program import (
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
    in_backward,
    labelled,
)


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of commands: one block's forward or backward, or the commands in between."""

    commands: list[Command]
    ladder: int | None = None
    """Consecutive blocks, up or down, form a ladder; null outside of every one."""
    block: int = -1


def deepened(
    shallow: Program, deeper: Program, blocks: Sequence[str], shallow_blocks: int, period: int
) -> Program | None:
    """Extend a capture of ``shallow_blocks`` blocks to all of ``blocks``; ``None`` if they do not repeat.

    ``deeper`` is the capture with ``period`` blocks more.
    """
    prefix = prefix_of(blocks)
    if prefix is None:
        return None
    try:
        first = parts_of(shallow, prefix, shallow_blocks)
        second = parts_of(deeper, prefix, shallow_blocks + period)
        once = _extended(first, second, blocks[: shallow_blocks + period], shallow_blocks, period)
        if once != renumbered(deeper.commands):
            return None
        commands = _extended(first, second, blocks, shallow_blocks, period)
    except CannotRepeatError:
        return None
    periods = (len(blocks) - shallow_blocks) // period
    return replace(
        shallow,
        commands=commands,
        parameters=_line(shallow.parameters, deeper.parameters, periods),
        model_flops=_line(shallow.model_flops, deeper.model_flops, periods),
    )


def parts_of(program: Program, prefix: str, blocks: int) -> list[Part]:
    """Cut a program where a block's forward or backward begins or its last label ends.

    The blocks are ``prefix`` with a number. Raises ``CannotRepeatError`` if they do not follow each other.
    """
    named = re.compile(rf"FSDP::(\w+) \({re.escape(prefix)}(\d+)\)(?: \[pg=\d+\])?")
    found: list[tuple[int, int, str, int]] = []  # start, end, kind, block
    for position, (command, names) in enumerate(labelled(program.commands)):
        match = named.fullmatch(names[-1]) if isinstance(command, (Enter, Leave)) and names else None
        if match is None:
            continue
        block, kind = int(match[2]), "pre_backward" if in_backward(names) else "pre_forward"
        if isinstance(command, Leave):
            if found and block == found[-1][3]:
                found[-1] = (found[-1][0], position + 1, *found[-1][2:])
        elif match[1] == kind and not (found and found[-1][2:] == (kind, block)):
            found.append((position, position, kind, block))  # the first of a block's parameter groups
    return _ladders(program.commands, found, blocks)


def _ladders(commands: list[Command], found: list[tuple[int, int, str, int]], blocks: int) -> list[Part]:
    parts: list[Part] = []
    end = ladder = 0
    for index in range(0, len(found), blocks):
        cells = found[index : index + blocks]
        order = [block for *_, block in cells]
        upwards = list(range(blocks))
        if order not in (upwards, upwards[::-1]) or len({kind for _, _, kind, _ in cells}) > 1:
            raise CannotRepeatError
        parts.append(Part(commands[end : cells[0][0]]))
        starts = [start for start, *_ in cells]
        for start, stop, block in zip(starts, [*starts[1:], cells[-1][1]], order, strict=True):
            parts.append(Part(commands[start:stop], ladder, block))
        end, ladder = cells[-1][1], ladder + 1
    return [*parts, Part(commands[end:])]


def _extended(
    first: list[Part], second: list[Part], blocks: Sequence[str], shallow: int, period: int
) -> list[Command]:
    """Return the commands of a model of ``blocks`` from the parts of a capture with ``shallow`` of them.

    ``second`` are the parts with one period more: the commands outside the blocks grow from one to the
    other.
    """
    outside = [part.commands for part in second if part.ladder is None]
    if len(outside) != sum(part.ladder is None for part in first):
        raise CannotRepeatError
    grown, periods = iter(outside), (len(blocks) - shallow) // period
    runs: list[Run] = []
    commands: list[Command] = []
    recorded: dict[int, int] = {}
    for index, part in enumerate(first):
        own = _grown(part.commands, next(grown), periods) if part.ladder is None else part.commands
        events: list[Event] = []
        for thing, command in enumerate(own, len(commands)):
            if isinstance(command, (Record, Collective)) and command.event >= 0:
                recorded[command.event] = thing
            elif isinstance(command, (Wait, HostWait)) and command.event >= 0:
                if command.event not in recorded:
                    raise CannotRepeatError
                events.append(Event(recorded[command.event], birth=False))
            events.append(Event(thing, birth=True))
        commands += own
        runs.append(Run(index, None if part.ladder is None else part.block, events, part.ladder))
    unrolling = Unrolling(Tape(runs), shallow, len(blocks), period, often=True)
    copies = unrolling.run()
    awaited = dict(unrolling.references)
    rename = Renaming(blocks, shallow, period)
    numbers: dict[int, int] = {}
    made: list[Command] = []
    for at, copy in enumerate(copies):
        command = commands[copy.origin]
        if isinstance(command, Enter):
            command = Enter(rename(command.name, copy))
        elif isinstance(command, (Record, Collective)) and command.event >= 0:
            command = replace(command, event=numbers.setdefault(copy.birth, len(numbers)))
        elif isinstance(command, (Wait, HostWait)) and command.event >= 0:
            command = replace(command, event=numbers[awaited[at].birth])
        made.append(command)
    return made


def _grown(mine: list[Command], theirs: list[Command], periods: int) -> list[Command]:
    """Extend the commands outside the blocks."""
    ours, other = [_key(command) for command in mine], [_key(command) for command in theirs]
    made: list[Command] = []
    for tag, start, end, begin, stop in SequenceMatcher(None, ours, other, autojunk=False).get_opcodes():
        if tag == "equal":
            made += map(_larger, mine[start:end], theirs[begin:stop], repeat(periods))
        elif tag == "insert":
            added = theirs[begin:stop]
            beside = (theirs[max(0, begin - len(added)) : begin], theirs[stop : stop + len(added)])
            if added not in beside or _has_events(added):
                raise CannotRepeatError
            made += added * periods
        else:
            raise CannotRepeatError
    return made


def _key(command: Command) -> object:
    """Identify a command without its size."""
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


def renumbered(commands: Sequence[Command], first: int = 0) -> list[Command]:
    """Number events from ``first`` on, in the order in which they are recorded.

    Raises ``CannotRepeatError`` if one is awaited that is not recorded before.
    """
    numbers: dict[int, int] = {}
    made: list[Command] = []
    for command in commands:
        if isinstance(command, (Record, Collective)) and command.event >= 0:
            numbers[command.event] = first + len(numbers)
            command = replace(command, event=numbers[command.event])
        elif isinstance(command, (Wait, HostWait)) and command.event >= 0:
            if command.event not in numbers:
                raise CannotRepeatError
            command = replace(command, event=numbers[command.event])
        made.append(command)
    return made
