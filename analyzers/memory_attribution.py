"""Allocation -> (step, phase, module, activity), and the same for the moment it was freed.

In order of trust: the tag that the recorder set on the allocation itself, else the join of its host time
to the phases built from FSDP's labels, else its stack.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.phases import build_phases, parse_label
from fsdp2prof.tables import (
    PHASES,
    AllocationTable,
    BoolArray,
    IntArray,
    LabelTable,
    MemoryRecording,
    PhaseTable,
    Stacks,
    StepTable,
    Strings,
    concat_strings,
    concat_tables,
)

__all__ = ["Attributed", "attribute", "select"]

_OPTIMIZER = re.compile(r"torch/optim/\w+\.py")
_MODULE = re.compile(r"torch/nn/modules/module\.py:\d+:_call_impl")
_BACKWARD = re.compile(r"torch::autograd::Engine::|torch/autograd/graph\.py:\d+:_engine_run_backward")
_RECOMPUTE = re.compile(r"torch/utils/checkpoint\.py:\d+:(?:recompute_fn|unpack_hook|backward)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Attributed:
    """Allocations with step, phase, fqn and activity filled in, and what they were joined to."""

    allocations: AllocationTable
    phases: PhaseTable
    """Phases of the one thread that allocates; empty without labels."""
    alloc_row: IntArray
    """Row of ``phases`` each allocation was made in; -1 outside every one."""
    free_row: IntArray
    """Row of ``phases`` each allocation was freed in; -1 outside every one or alive."""
    recomputed: BoolArray
    """Allocations made by a forward that activation checkpointing runs again."""
    optimizer_stack: BoolArray
    """Allocations whose stack runs through an optimizer."""

    def freed_in(self, activities: tuple[str, ...]) -> BoolArray:
        """Mask of the allocations freed in a backward row with one of these activities."""
        wanted = self.phases.activity.matches(lambda name: name in activities)
        wanted &= self.phases.phase.equals("backward")
        return np.append(wanted, False)[self.free_row]


def attribute(recording: MemoryRecording, steps: StepTable) -> Attributed:
    """Attribute every allocation of a recording; ``steps`` are on its clock."""
    allocations = recording.allocations
    phases = _memory_phases(recording, steps)
    alloc_row = intervals.containing(phases.start_ns, phases.end_ns, allocations.alloc_ns)
    free_row = intervals.containing(phases.start_ns, phases.end_ns, allocations.free_ns)
    step = np.append(phases.step, -1)[alloc_row]
    in_step = intervals.containing(steps.start_ns, steps.end_ns, allocations.alloc_ns)
    stacks = _StackKinds(recording.stacks)
    return Attributed(
        allocations=allocations.with_columns(
            step=np.where(step < 0, np.append(steps.step, -1)[in_step], step),
            phase=_first_known(phases.phase, alloc_row, stacks.phase(allocations)),
            fqn=select(phases.fqn, alloc_row, None),
            activity=select(phases.activity, alloc_row, None),
        ),
        phases=phases,
        alloc_row=alloc_row,
        free_row=free_row,
        recomputed=stacks.matching(allocations, _RECOMPUTE),
        optimizer_stack=stacks.matching(allocations, _OPTIMIZER),
    )


def select(column: Strings, rows: IntArray, missing: str | None) -> Strings:
    """Take rows of a column; ``missing`` where the row is -1."""
    values = column.values
    if missing is not None and missing not in values:
        values = (*values, missing)
    code = -1 if missing is None else values.index(missing)
    return Strings(np.append(column.codes, np.int32(code))[rows], values)


def _first_known(column: Strings, rows: IntArray, otherwise: Strings) -> Strings:
    """Take rows of a column, and where the row is -1 the same row of ``otherwise``."""
    joined = concat_strings([select(column, rows, None), otherwise])
    taken, rest = np.split(joined.codes, 2)
    return Strings(np.where(rows < 0, rest, taken), joined.values)


def _memory_phases(recording: MemoryRecording, steps: StepTable) -> PhaseTable:
    """Build the phases and carry the last one on to the end of the history.

    A run that dies between two labels has no label after the work it died in. A backward label one
    nanosecond after the end closes whatever was open there, and is dropped again.
    """
    labels, end = recording.labels, recording.end_ns
    if not any(parse_label(name) is not None for name in labels.name.values):
        return build_phases(labels, steps)
    closing = LabelTable(
        thread=labels.thread[-1:],
        start_ns=np.array([end + 1], dtype=np.int64),
        end_ns=np.array([end + 2], dtype=np.int64),
        name=Strings.full(1, "FSDP::root_post_backward_callback"),
    )
    ended = labels.with_columns(end_ns=np.minimum(labels.end_ns, end + 1))
    phases = build_phases(concat_tables([ended, closing]), steps)
    return phases.take(phases.start_ns <= end)


class _StackKinds:
    """What a stack alone says about an allocation, decided once per distinct frame."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self._stack_of_frame = np.repeat(np.arange(len(stacks)), np.diff(stacks.offsets))

    def matching(self, allocations: AllocationTable, pattern: re.Pattern[str]) -> BoolArray:
        """Mask of the allocations that have a frame like ``pattern`` in their stack."""
        hit = self._stacks.frames.matches(lambda frame: pattern.search(frame) is not None)
        found = np.zeros(len(self._stacks) + 1, dtype=np.bool_)
        found[self._stack_of_frame[hit]] = True
        return found[allocations.stack]

    def phase(self, allocations: AllocationTable) -> Strings:
        """Phase of each allocation from its stack; ``other`` without one."""
        code = np.full(len(allocations), PHASES.index("other"), dtype=np.int32)
        code[self.matching(allocations, _MODULE)] = PHASES.index("forward")
        code[self.matching(allocations, _OPTIMIZER)] = PHASES.index("optimizer")
        code[self.matching(allocations, _BACKWARD)] = PHASES.index("backward")
        return Strings(code, PHASES)
