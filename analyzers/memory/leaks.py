"""Memory that grows with every step: what each step leaves behind and no later one frees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsdp2prof.tables import NEVER, AllocationTable, BoolArray, Stacks, StepTable

__all__ = ["Leak", "find_leaks"]

_FIRST_STEPS = 2
"""Steps at the beginning of a training that may leave less than later ones."""
_STATES = ("sharded_parameter", "optimizer_state")
"""Live for ever by design."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """What one place in the program leaves behind in every step."""

    bytes_per_step: int
    steps: int
    """Steps that were watched to the end of the next one."""
    category: str
    fqn: str | None
    op: str | None
    stack: list[str]


def find_leaks(allocations: AllocationTable, steps: StepTable, stacks: Stacks) -> list[Leak]:
    """Return places that leave memory behind in every step but the last, largest first.

    The next step may free what the last one leaves. So three steps are needed, or two that leave the same
    where the memory from before them, of unknown role, is as large as their predecessors would have left.
    With less the list is empty. ``bytes_per_step`` is rounded down.
    """
    watched = steps.step[:-1]
    if not len(watched):
        return []
    states = allocations.category.matches(lambda name: name in _STATES)
    left = (allocations.free_order == NEVER) & np.isin(allocations.step, watched) & ~states
    rows = allocations.take(left)
    keys = np.stack([rows.category.codes, rows.fqn.codes, rows.op.codes, rows.stack])
    distinct, inverse = np.unique(keys, axis=1, return_inverse=True)
    leaks = []
    for index in range(distinct.shape[1]):
        mine = rows.take(inverse.reshape(-1) == index)
        if len(np.unique(mine.step)) < len(watched):
            continue
        stack = int(mine.stack[0])
        if len(watched) < 2 and not _grew_before(allocations, states, mine, int(steps.step[-1])):
            continue
        leaks.append(
            Leak(
                bytes_per_step=int(mine.size.sum()) // len(watched),
                steps=len(watched),
                category=str(mine.category[0]),
                fqn=mine.fqn[0],
                op=mine.op[0],
                stack=list(stacks[stack]) if stack >= 0 else [],
            )
        )
    return sorted(leaks, key=lambda leak: -leak.bytes_per_step)


def _grew_before(allocations: AllocationTable, states: BoolArray, left: AllocationTable, last: int) -> bool:
    """Whether the ``last`` step leaves the same as the one before, and those before may have left it, too."""
    same = (allocations.free_order == NEVER) & (allocations.step == last) & ~states
    for column in ("category", "fqn", "op"):
        same &= getattr(allocations, column).equals(getattr(left, column)[0])
    same &= allocations.stack == left.stack[0]
    size, again = int(left.size.sum()), int(allocations.size[same].sum())
    early = (allocations.free_order == NEVER) & (allocations.alloc_order < 0)
    early &= allocations.category.equals("unattributed")
    before = last - 1 - _FIRST_STEPS
    return before > 0 and again == size and int(allocations.size[early].sum()) >= before * size
