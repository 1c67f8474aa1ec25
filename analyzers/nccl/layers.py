"""Layers of inspected collectives: by the communicator, the size, and the place of the number in a step.

NCCL counts the collectives of a kind on a communicator. If all of them are FSDP2's, a number modulo the
collectives of a step is a place in the step; where the counting began is found by trying every place: the
sizes of all collectives must fit it. Where several places fit that name different layers, or others than
FSDP2's run on the communicator, a size that one parameter group alone has decides, else the layer is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from fsdp2prof.analyzers.recorded_groups import Due, has_several_roots, step_cycles
from fsdp2prof.by_key import grouped
from fsdp2prof.manifest import ProcessGroupInfo, RankManifest
from fsdp2prof.tables.columns import IntArray
from fsdp2prof.tables.nccl import InspectedCalls, InspectedCommunicator, InspectedProcess

_Layer: TypeAlias = tuple[str | None, str | None]
"""Module and phase."""


def groups_of(
    process: InspectedProcess, communicator: InspectedCommunicator, rank: int, manifest: RankManifest
) -> list[ProcessGroupInfo]:
    """Return the process groups that a communicator of a rank may be.

    Of its name, else of its ranks; of several those on which FSDP2 moves messages of sizes that it moved.
    """
    there = [
        group
        for group in manifest.process_groups
        if len(group.ranks) == communicator.size
        and rank in group.ranks
        and sorted(group.ranks).index(rank) == communicator.rank
    ]
    there = [group for group in there if communicator.name in (group.name, group.desc)] or there
    if len(there) < 2:
        return there
    calls = process.calls
    moved = set(calls.message_bytes[calls.communicator.equals(communicator.id)].tolist())
    due = [one for cycle in step_cycles(manifest) for one in cycle]
    fitting = [
        group
        for group in there
        if any(one.key[0] == group.name and _message_bytes(one, communicator.size) in moved for one in due)
    ]
    return fitting or there


def _message_bytes(due: Due, size: int) -> int | None:
    """NCCL's message: a rank's input, of a reduce-scatter the rank's part of it."""
    _, op, whole = due.key
    return whole if whole is None or op != "reduce_scatter" else whole // size


class Layers:
    """The cycles of every communicator, by the manifest of one of its ranks."""

    def __init__(
        self, processes: Sequence[InspectedProcess], manifests: Mapping[int, tuple[int, RankManifest]]
    ) -> None:
        self._cycles: dict[tuple[str, str], list[Due]] = {}
        self._messages: dict[tuple[str, str], IntArray] = {}
        self._several_roots = any(has_several_roots(manifest) for _, manifest in manifests.values())
        self._places: dict[tuple[str, str], list[int]] = {}
        for position, (rank, manifest) in manifests.items():
            for communicator in processes[position].communicators.values():
                names = {one.name for one in groups_of(processes[position], communicator, rank, manifest)}
                self._add(communicator, names, manifest)

    def _add(self, communicator: InspectedCommunicator, names: set[str], manifest: RankManifest) -> None:
        for cycle in step_cycles(manifest):
            own = [due for due in cycle if due.key[0] in names]
            if own:
                key = (communicator.id, own[0].key[1])
                self._cycles.setdefault(key, own)
                sizes = [_message_bytes(due, communicator.size) for due in own]
                self._messages[key] = np.array([-1 if size is None else size for size in sizes])

    def split(
        self, calls: InspectedCalls, first: IntArray, members: IntArray
    ) -> Iterator[tuple[_Layer | None, IntArray]]:
        """Split the collectives of one communicator, kind and size by their layer; None if it is unknown."""
        at = first[members]
        key = (str(calls.communicator[int(at[0])]), str(calls.op[int(at[0])]))
        cycle = self._cycles.get(key)
        if cycle is None:
            yield None, members
            return
        fits = self._messages[key] == calls.message_bytes[int(at[0])]
        alike = [due for due, fit in zip(cycle, fits.tolist(), strict=True) if fit]
        if len({due.layer.fqn for due in alike}) == 1:
            phases = {due.layer.phase for due in alike}
            if len(phases) == 1:
                yield (alike[0].layer.fqn, alike[0].layer.phase), members
                return
        places = self._fitting(key, cycle, calls, first) if alike else []
        parts = grouped(
            (_decided([cycle[(number + place) % len(cycle)] for place in places], alike), member)
            for member, number in zip(members.tolist(), calls.seq[at].tolist(), strict=True)
        )
        for layer, rows in parts.items():
            yield layer, np.array(rows, dtype=np.int64)

    def _fitting(
        self, key: tuple[str, str], cycle: Sequence[Due], calls: InspectedCalls, first: IntArray
    ) -> list[int]:
        """Places of the step at which the counting may have begun."""
        if self._several_roots:
            return []
        if key not in self._places:
            own = first[(calls.communicator.equals(key[0]) & calls.op.equals(key[1]))[first]]
            sizes, numbers = calls.message_bytes[own], calls.seq[own]
            due = self._messages[key]
            self._places[key] = [
                place
                for place in range(len(cycle))
                if bool((due[(numbers + place) % len(cycle)] == sizes).all())
            ]
        return self._places[key]


def _decided(by_order: Sequence[Due], by_size: Sequence[Due]) -> _Layer | None:
    for dues in (by_order, by_size):
        if len({due.layer.fqn for due in dues}) == 1:
            phases = {due.layer.phase for due in dues}
            return dues[0].layer.fqn, phases.pop() if len(phases) == 1 else None
    return None
