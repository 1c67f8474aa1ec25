"""Collectives of a captured step, placed as a trace's are: what no formula counts."""

from __future__ import annotations

import numpy as np

from fsdp2prof.analyzers.phases import build_phases, find_rows
from fsdp2prof.estimators.timeline.commands import Collective, Enter, Leave, Program
from fsdp2prof.estimators.traffic.fsdp import Ledger
from fsdp2prof.labels import AUTOGRAD_NODE
from fsdp2prof.schedule import Axis
from fsdp2prof.tables import LabelTable, StepTable, Strings

__all__ = ["add_executed"]

_FSDP = "FSDP::"


def add_executed(ledger: Ledger, program: Program) -> None:
    """Add the collectives that FSDP does not make: tensor parallelism's, and those of clipping.

    Each belongs to the layer and phase that the labels around it say.
    """
    places = [at for at, command in enumerate(program.commands) if isinstance(command, Collective)]
    phases = build_phases(*_labels(program))
    rows = find_rows(phases, np.zeros(len(places), dtype=np.int64), np.array(places, dtype=np.int64))
    inside, last = _by_fsdp(program)
    for at, row in zip(places, rows.tolist(), strict=True):
        command = program.commands[at]
        assert isinstance(command, Collective)
        if at in inside:
            continue
        updates = at > last
        ledger.add(
            root=0,
            fqn=None if updates or row < 0 else phases.fqn[row],
            phase="optimizer" if updates else (phases.phase[row] or "other") if row >= 0 else "other",
            op=command.op,
            axis=Axis(size=command.group_size, mesh_dim=command.mesh_dim),
            dtype=command.dtype,
            payload_bytes=command.payload_bytes,
        )


def _labels(program: Program) -> tuple[LabelTable, StepTable]:
    """The labels of a program on a clock that ticks a nanosecond a command, and its one step."""
    spans: list[tuple[int, int, str]] = []
    open_: list[tuple[int, str]] = []
    for at, command in enumerate(program.commands):
        if isinstance(command, Enter):
            open_.append((at, command.name))
        elif isinstance(command, Leave):
            start, name = open_.pop()
            spans.append((start, at + 1, name))
    spans.sort(key=lambda span: (span[0], -span[1]))
    end = len(program.commands)
    labels = LabelTable(
        thread=np.zeros(len(spans), dtype=np.int64),
        start_ns=np.array([start for start, _, _ in spans], dtype=np.int64),
        end_ns=np.array([stop for _, stop, _ in spans], dtype=np.int64),
        name=Strings.intern(name for _, _, name in spans),
    )
    one = np.array([1], dtype=np.int64)
    return labels, StepTable(step=one, start_ns=one - 1, end_ns=one * end)


def _by_fsdp(program: Program) -> tuple[frozenset[int], int]:
    """Positions of FSDP's own collectives, and where the last of its labels ends."""
    labels: list[str] = []
    inside: set[int] = set()
    last = 0
    for at, command in enumerate(program.commands):
        if isinstance(command, Enter):
            labels.append(command.name)
        elif isinstance(command, Leave):
            name = labels.pop()
            if name.startswith((_FSDP, AUTOGRAD_NODE)):
                last = at
        elif isinstance(command, Collective) and command.mesh_dim != "tp":
            inside.update([at] if any(name.startswith(_FSDP) for name in labels) else [])
    return frozenset(inside), last
