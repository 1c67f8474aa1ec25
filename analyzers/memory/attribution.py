"""Allocation -> (step, phase, module, activity), and the same for the moment it was freed.

In order of trust: the join of its host time to the phases built from FSDP's labels, else the tag that the
recorder set on the allocation itself, else its stack. A tag that agrees with a label that begins or ends in
the allocation's own microsecond overrules the join: a thread keeps its last tag until it enters or leaves a
label (backward's thread from one backward to the next), so a tag alone proves nothing.

What call stacks tell of allocations: the phase, the loss, and the line of the user's own program.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.phases import build_phases
from fsdp2prof.labels import RECOMPUTED, is_root, parse_label, unqualified_fqn
from fsdp2prof.tables.allocations import AllocationTable, MemoryRecording, Stacks
from fsdp2prof.tables.columns import NEVER, BoolArray, IntArray, Strings, concat_strings, concat_tables
from fsdp2prof.tables.trace import LabelTable, PhaseTable, StepTable
from fsdp2prof.vocabulary import ACTIVITIES, PHASES

_TAG = re.compile(
    rf"step=(?P<step>-?\d{{1,18}});phase=(?P<phase>{'|'.join(PHASES)});"
    rf"activity=(?P<activity>{'|'.join(ACTIVITIES)});fqn=(?P<fqn>.*)",
    re.DOTALL,
)
"""Format of the recorder's tags in ``user_metadata``."""


_OF_MODULES = ("forward", "backward")
"""Phases in which a module works."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attributed:
    """Allocations with step, phase, fqn and activity, and the source of each attribution."""

    allocations: AllocationTable
    phases: PhaseTable
    """Phases of the one thread that allocates; empty without labels."""
    alloc_row: IntArray
    """Row of ``phases`` each allocation was made in; -1 outside every one."""
    free_row: IntArray
    """Row of ``phases`` each allocation was freed in; -1 outside every one or alive."""
    recomputed: BoolArray
    """Allocations made by a forward that activation checkpointing runs again."""
    constructed: BoolArray
    """Allocations made while an object was built: a model, an optimizer."""
    workspace: BoolArray
    """Workspaces that torch allocates for cuBLAS, by their C++ frames."""

    def freed_in(self, activities: tuple[str, ...]) -> BoolArray:
        """Mask of the allocations freed in a backward row with one of these activities."""
        wanted = self.phases.activity.matches(lambda name: name in activities)
        wanted &= self.phases.phase.equals("backward")
        return np.append(wanted, False)[self.free_row]


def attribute(recording: MemoryRecording, steps: StepTable, roots: int = 0) -> Attributed:
    """Attribute every allocation; ``steps`` are on its clock, ``roots`` as in ``build_phases``."""
    allocations = recording.allocations
    phases = _memory_phases(recording, steps, roots)
    alloc_row = intervals.containing(phases.start_ns, phases.end_ns, allocations.alloc_ns)
    free_row = intervals.containing(phases.start_ns, phases.end_ns, allocations.free_ns)
    step = np.append(phases.step, -1)[alloc_row]
    in_step = intervals.containing(steps.start_ns, steps.end_ns, allocations.alloc_ns)
    stacks = StackKinds(recording.stacks)
    return Attributed(
        allocations=_with_tags(
            phases,
            allocations.with_columns(
                step=np.where(step < 0, np.append(steps.step, -1)[in_step], step),
                phase=_either(
                    alloc_row >= 0, phases.phase.lookup(alloc_row), stacks.phase(allocations.stack)
                ),
                fqn=phases.fqn.lookup(alloc_row),
                activity=phases.activity.lookup(alloc_row),
            ),
        ),
        phases=phases,
        alloc_row=alloc_row,
        free_row=free_row,
        recomputed=stacks.matching(allocations.stack, RECOMPUTE) | _recomputed(recording),
        constructed=stacks.matching(allocations.stack, CONSTRUCTOR),
        workspace=stacks.matching(allocations.stack, _WORKSPACE),
    )


def _recomputed(recording: MemoryRecording) -> BoolArray:
    """Mask of the allocations made inside the ranges of recomputed forwards, if the recording has them."""
    labels = recording.labels
    rows = labels.name.equals(RECOMPUTED)
    times = recording.allocations.alloc_ns
    return intervals.containing(labels.start_ns[rows], labels.end_ns[rows], times) >= 0


def _with_tags(phases: PhaseTable, allocations: AllocationTable) -> AllocationTable:
    """Use the recorder's tags where no label contradicts them; other writers' tags are ignored."""
    parsed = [*(_TAG.fullmatch(tag) for tag in allocations.tag.values), None]
    rows = allocations.tag.codes
    known = np.array([match is not None for match in parsed])[rows]
    step = np.array([-1 if match is None else int(match["step"]) for match in parsed], dtype=np.int64)[rows]

    def tagged(part: str, only: Collection[str] = PHASES) -> Strings:
        texts = [match[part] if match is not None and match["phase"] in only else None for match in parsed]
        return Strings.intern(texts).take(rows)

    tags = allocations.with_columns(
        step=step, phase=tagged("phase"), fqn=tagged("fqn", _OF_MODULES), activity=tagged("activity")
    )
    if len(phases):
        known &= _confirmed(phases, tags)
    return allocations.with_columns(
        step=np.where(known, step, allocations.step),
        phase=_either(known, tags.phase, allocations.phase),
        fqn=_either(known, tags.fqn, allocations.fqn),
        activity=_either(known, tags.activity, allocations.activity),
    )


def _confirmed(phases: PhaseTable, tags: AllocationTable) -> BoolArray:
    """Mask of the tags that agree with the labels at their allocation's time.

    The clock ticks in microseconds: both rows that meet in one count. With several roots a tag may name
    the root of a module where the labels cannot.
    """
    row = intervals.containing(phases.start_ns, phases.end_ns, tags.alloc_ns)
    before = np.searchsorted(phases.end_ns, tags.alloc_ns)
    meets = np.append(phases.end_ns, NEVER)[before] == tags.alloc_ns
    confirmed = np.zeros(len(tags), dtype=np.bool_)
    for at in (row, np.where(meets, before, -1)):
        same = (at >= 0) & (np.append(phases.step, -1)[at] == tags.step)
        for name in ("phase", "activity"):
            same &= _equal(getattr(phases, name).lookup(at), getattr(tags, name))
        of_module = tags.phase.matches(_OF_MODULES.__contains__)
        told, there = tags.fqn, phases.fqn.lookup(at)
        named = (
            _equal(there, told)
            | _equal(there, _without_root(told))
            | (there.equals(None) & told.matches(is_root))
        )
        confirmed |= same & (named | ~of_module)
    return confirmed


def _equal(one: Strings, other: Strings) -> BoolArray:
    first, second = np.split(concat_strings([one, other]).codes, 2)
    return np.asarray(first == second)


def _without_root(fqn: Strings) -> Strings:
    return Strings.intern([*map(unqualified_fqn, fqn.values), None]).take(fqn.codes)


def _either(choose: BoolArray, chosen: Strings, otherwise: Strings) -> Strings:
    """Take each row of one column or of the other."""
    joined = concat_strings([chosen, otherwise])
    first, second = np.split(joined.codes, 2)
    return Strings(np.where(choose, first, second), joined.values)


def _memory_phases(recording: MemoryRecording, steps: StepTable, roots: int) -> PhaseTable:
    """Build the phases and carry the last one on to the end of the history.

    A run that dies between two labels has no label after the work it died in. A backward label one
    nanosecond after the end closes whatever was open there, and is dropped again.
    """
    labels, end = recording.labels, recording.end_ns
    if not any(parse_label(name) is not None for name in labels.name.values):
        return build_phases(labels, steps, roots)
    closing = LabelTable(
        thread=labels.thread[-1:],
        start_ns=np.array([end + 1], dtype=np.int64),
        end_ns=np.array([end + 2], dtype=np.int64),
        name=Strings.full(1, "FSDP::root_post_backward_callback"),
    )
    ended = labels.with_columns(end_ns=np.minimum(labels.end_ns, end + 1))
    phases = build_phases(concat_tables([ended, closing]), steps, roots)
    return phases.take(phases.start_ns <= end)


_PHASES = tuple(PHASES)
_OPTIMIZER = re.compile(r"torch[/\\]optim[/\\]\w+\.py")
_MODULE = re.compile(r"torch[/\\]nn[/\\]modules[/\\]module\.py:\d+:_call_impl")
_BACKWARD = re.compile(r"torch::autograd::Engine::|torch[/\\]autograd[/\\]graph\.py:\d+:_engine_run_backward")
CHECKPOINT = re.compile(r"torch[/\\]utils[/\\]checkpoint\.py:\d+:")
"""A frame of activation checkpointing."""
RECOMPUTE = re.compile(CHECKPOINT.pattern + r"(?:recompute_fn|unpack_hook|backward)")
"""A frame of a forward that activation checkpointing runs again."""
CONSTRUCTOR = re.compile(r":__init__$")
"""A frame that builds an object: a model, an optimizer."""
_WORKSPACE = re.compile(r"at::cuda::getNewWorkspace|at::cuda::getCUDABlasLtWorkspace")
"""A frame that allocates a cuBLAS workspace (``aten/src/ATen/cuda/CublasHandlePool.cpp``)."""
LOSS = re.compile(r"cross_entropy|nll_loss|log_softmax|logsumexp")
"""A frame or operator of a cross-entropy loss."""

_TORCH_FRAME = re.compile(r"[/\\]torch[/\\]")
_PATH_PARTS = 2


class StackKinds:
    """Attributions from stacks alone, decided once per distinct frame; a row's stack may be -1 for none."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self._stack_of_frame = np.repeat(np.arange(len(stacks)), np.diff(stacks.offsets))

    def matching(self, rows: IntArray, pattern: re.Pattern[str]) -> BoolArray:
        """Mask of the rows of stacks that have a frame like ``pattern``."""
        hit = self._stacks.frames.matches(lambda frame: pattern.search(frame) is not None)
        found = np.zeros(len(self._stacks) + 1, dtype=np.bool_)
        found[self._stack_of_frame[hit]] = True
        return found[rows]

    def phase(self, rows: IntArray) -> Strings:
        """Phase of each row from its stack; ``other`` if the stack does not determine it."""
        code = np.full(len(rows), _PHASES.index("other"), dtype=np.int32)
        code[self.matching(rows, _OPTIMIZER)] = _PHASES.index("optimizer")
        code[self.matching(rows, _MODULE)] = _PHASES.index("forward")  # in a closure, too
        code[self.matching(rows, _BACKWARD)] = _PHASES.index("backward")
        return Strings(code, _PHASES)


def own_frame(stack: Sequence[str]) -> str | None:
    """Return the innermost Python frame outside torch: the line of the model or script.

    Its path is shortened to folder and file. For a stack with torch's frames alone, return the innermost
    of them.
    """
    python = [frame for frame in stack if ".py" in frame]
    own = (frame for frame in python if not _TORCH_FRAME.search(frame))
    frame = next(own, python[0] if python else None)
    return None if frame is None else "/".join(re.split(r"[/\\]", frame)[-_PATH_PARTS:])
