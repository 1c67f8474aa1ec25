"""Which layer's parameters a collective moves, and in which phase, by the parameter groups of a manifest.

A size that only one group has decides the layer. Where several have it, the order of a step does
(:mod:`fsdp2prof.analyzers.recorded_groups`): the recorded calls must fit it at one place only, else the layer
stays unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdp2prof.analyzers.recorded_groups import Due, Key, Layer, has_several_roots, step_cycles
from fsdp2prof.manifest import RankManifest
from fsdp2prof.tables.flight_recorder import FlightDump, Issued

__all__ = ["Layer", "layer_of"]


def layer_of(one: Issued, dump: FlightDump, manifest: RankManifest | None) -> Layer | None:
    """Return the layer of a call of a rank's dump; None where it is not FSDP's or cannot be told."""
    if manifest is None or one.p2p:
        return None
    for cycle in step_cycles(manifest):
        keys = {due.key for due in cycle}
        if (key := _key(one, keys)) is not None:
            by_order = [] if has_several_roots(manifest) else _at(one, dump, cycle, keys)
            return _decided([due.layer for due in cycle if due.key == key], by_order)
    return None


def _decided(by_size: Sequence[Layer], by_order: Sequence[Layer]) -> Layer | None:
    for layers in (by_order, by_size):
        if len({layer.fqn for layer in layers}) == 1:
            phases = {layer.phase for layer in layers}
            return Layer(layers[0].fqn, phases.pop() if len(phases) == 1 else None)
    return None


def _at(one: Issued, dump: FlightDump, cycle: Sequence[Due], keys: set[Key]) -> list[Layer]:
    """Places in the cycle at which the calls up to this one fit it."""
    told = [key for issued in _until(one, dump.issued) if (key := _key(issued, keys)) is not None]
    places = range(len(cycle)) if not dump.whole else [(len(told) - 1) % len(cycle)]
    told = told[-2 * len(cycle) :]
    return [
        cycle[place].layer
        for place in places
        if all(cycle[(place - back) % len(cycle)].key == key for back, key in enumerate(reversed(told)))
    ]


def _until(one: Issued, issued: Iterable[Issued]) -> Iterable[Issued]:
    for other in issued:
        yield other
        if other is one:
            return


def _key(one: Issued, keys: set[Key]) -> Key | None:
    """The key of a call among some; gloo runs a reduce-scatter as an all-reduce of the whole input."""
    size = one.input_bytes
    if size is None:
        return None
    ops = (one.op, "reduce_scatter") if one.backend == "gloo" and one.op == "all_reduce" else (one.op,)
    return next((key for op in ops if (key := (one.group, op, size)) in keys), None)
