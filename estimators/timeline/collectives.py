"""Collectives of a captured step that no formula counts, attributed as a trace's are."""

from __future__ import annotations

import re

import numpy as np

from fsdp2prof.analyzers.phases import build_phases, find_rows
from fsdp2prof.estimators.timeline.commands import Collective, Enter, Leave, Program
from fsdp2prof.estimators.traffic.ledger import Ledger
from fsdp2prof.labels import AUTOGRAD_NODE
from fsdp2prof.schedule import Axis
from fsdp2prof.tables import LabelTable, StepTable, Strings

Place = tuple[str, str]
"""(layer with its numbers left out, phase)."""


def family_of(fqn: str | None, phase: str | None) -> Place:
    """Return the place of a layer: alike layers share one."""
    return re.sub(r"\d+", "*", "-" if fqn is None else fqn), phase or "other"


def places_of(program: Program) -> list[Place]:
    """Return the place of every command."""
    return [family_of(fqn, phase) for fqn, phase in layers_of(program)]


def layers_of(program: Program) -> list[tuple[str | None, str | None]]:
    """Return the layer and phase of every command; its position serves as host time."""
    size = len(program.commands)
    ranges: list[tuple[int, int, str]] = []
    opened: list[tuple[int, str]] = []
    for position, command in enumerate(program.commands):
        if isinstance(command, Enter):
            name = AUTOGRAD_NODE if command.name.startswith(AUTOGRAD_NODE) else command.name
            opened.append((position, name))
        elif isinstance(command, Leave) and opened:
            begin, name = opened.pop()
            ranges.append((begin, position, name))
    ranges.sort(key=lambda one: (one[0], -one[1]))
    labels = LabelTable(
        thread=np.zeros(len(ranges), dtype=np.int64),
        start_ns=np.array([2 * begin for begin, _, _ in ranges], dtype=np.int64),
        end_ns=np.array([2 * end + 1 for _, end, _ in ranges], dtype=np.int64),
        name=Strings.intern(name for _, _, name in ranges),
    )
    step = StepTable(
        step=np.ones(1, dtype=np.int64),
        start_ns=np.zeros(1, dtype=np.int64),
        end_ns=np.full(1, 2 * size + 2, dtype=np.int64),
    )
    phases = build_phases(labels, step)
    rows = find_rows(phases, np.zeros(size, dtype=np.int64), 2 * np.arange(size, dtype=np.int64))
    return list(zip(phases.fqn.lookup(rows).to_list(), phases.phase.lookup(rows).to_list(), strict=True))


_FSDP = "FSDP::"


def add_executed(ledger: Ledger, program: Program) -> None:
    """Add the collectives that FSDP does not make: tensor parallelism's, and those of clipping.

    Each belongs to the layer and phase that the labels around it say.
    """
    inside, last = _by_fsdp(program)
    layers = layers_of(program)
    for at, command in enumerate(program.commands):
        if isinstance(command, Collective) and at not in inside:
            fqn, phase = (None, "optimizer") if at > last else layers[at]
            ledger.add(
                root=0,
                fqn=fqn,
                phase=phase or "other",
                op=command.op,
                axis=Axis(size=command.group_size, mesh_dim=command.mesh_dim),
                dtype=command.dtype,
                payload_bytes=command.payload_bytes,
            )


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
