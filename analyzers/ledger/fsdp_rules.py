"""Collectives in the ledger that the set-up does not explain: late ones, those on slow or unused links."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from fsdp2prof.analyzers.layers import named_layer, numbered
from fsdp2prof.analyzers.ledger.book import ALL, Book, by_layer, worst_layer
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.analyzers.ledger.rank_rules import main_cause, own_excess
from fsdp2prof.analyzers.ledger.unit_rules import enter_setup, is_kind
from fsdp2prof.analyzers.ranks.stragglers import SLOW_LINKS
from fsdp2prof.by_key import summed
from fsdp2prof.results.communication import GroupRow
from fsdp2prof.vocabulary import op_label


def enter_fsdp(book: Book) -> None:
    """Enter all exposed communication of layers."""
    _behind_syncs(book)
    enter_setup(book)
    if book.on_device:
        mine = book.take("communication", is_kind("all_reduce"))
        book.enter(mine, "all_reduce_exposed", fqn=worst_layer(mine))
        _late(book)
    mine = book.take("communication")  # what no rule explains
    if book.on_device:
        book.enter(mine, "exposed_communication", fqn=worst_layer(mine))
    else:
        book.enter(mine, "cpu_collectives_in_line")


def _behind_syncs(book: Book) -> None:
    """Charge collectives that were launched late to the calls that had stopped the host in their phase."""
    blocked = summed(
        (row.phase, row.blocked_ns)
        for row in book.analysis.host_syncs
        if row.phase in ("forward", "backward")
    )
    for phase, ns in blocked.items():
        mine = book.take("communication", partial(_launched_late, phase))
        behind = sum(one.ns for one in mine) <= ns
        book.put_back(replace(one, cause="sync") if behind else one for one in mine)


def _launched_late(phase: str, charge: Charge) -> bool:
    return charge.why == "launch" and charge.phase == phase


# Why the others came late.


_LATENESS = {
    ("all_gather", "any", "launch"): "all_gather_launched_late",
    ("all_gather", "forward", "communicator"): "all_gathers_back_to_back",
    ("all_gather", "backward", "communicator"): "all_gather_queued",
    ("all_gather", "any", "stream"): "all_gather_behind_stream",
    ("all_gather", "any", "transfer"): "slow_transfer",
    ("all_gather", "any", "transfer_or_peer"): "slow_transfer_or_late_peer",
    ("reduce_scatter", "any", "transfer_or_peer"): "slow_transfer_or_late_peer",
    ("reduce_scatter", "any", "communicator"): "reduce_scatter_queued",
    ("reduce_scatter", "any", "transfer"): "slow_transfer",
    ("reduce_scatter", "any", "launch"): "reduce_scatter_too_long",
}
"""The entry of a stall, by operation, phase and cause."""
_PREFETCHED = ("all_gather_launched_late", "all_gather_behind_stream")
"""Stalls that prefetch hides as far as there is compute."""
_OF_ONE_COMMUNICATOR = ("all_gather_queued", "reduce_scatter_queued")
"""Stalls where both kinds of collectives share a communicator."""


def _late(book: Book) -> None:
    """Enter stalls by operation, phase and cause."""
    compute = book.left_ns("compute") + sum(one.total_ns for one in book.entries if one.cause == "compute")
    waiting = sum(book.analysis.cross_rank.wait_ns.values())
    total = sum(rank.communication.total_ns for rank in book.analysis.ranks) - waiting
    if total > compute:
        _bound(book, total, compute)
    ends = _first_and_last(book)
    _ends(book, ends)
    shared = {row.process_group for row in book.rows("all_gather")} & {
        row.process_group for row in book.rows("reduce_scatter")
    }
    for named in dict.fromkeys(_LATENESS.values()):
        mine = book.take("communication", lambda one, named=named: _name_of(one, shared) == named)  # type: ignore[misc]
        if mine:
            _enter_late(book, named, mine)


def _name_of(charge: Charge, shared: set[str | None]) -> str | None:
    """Name the entry that an exposed collective belongs to."""
    op, cause = charge.op or "", charge.why or ""
    name = _LATENESS.get((op, charge.phase, cause), _LATENESS.get((op, "any", cause)))
    return None if name in _OF_ONE_COMMUNICATOR and charge.group not in shared else name


def _enter_late(book: Book, name: str, mine: list[Charge]) -> None:
    most_of = max(mine, key=lambda one: one.ns)
    op, cause = most_of.op or "", most_of.why or ""
    phases = sorted({one.phase for one in mine}, reverse=True)
    phase = " and ".join(phases)
    layers = by_layer(mine)
    worst, most = layers[0]
    many = len(layers) > 1
    known = cause in ("launch", "stream", "peer") or book.waits_known
    ops = f"{op_label(op)}s"
    book.enter(
        mine,
        name,
        {
            "op": op,
            "phase": phase,
            "layers": {layer or "": late // book.rank_steps for layer, late in layers[:5]},
        },
        fqn=worst,
        gain_ns=book.hideable_ns(mine) if name in _PREFETCHED else ALL,
        known=known,
        ops=ops,
        Ops=ops.capitalize(),
        whose=f"{len(layers)} layers" if many else named_layer(worst),
        detail=f", most for {named_layer(worst)} ({book.per_step(most)})" if many else "",
        missing="" if known else f" {book.missing_traces}",
        prefetch=f"{phases[0]}_prefetch" if len(phases) == 1 else "prefetch",
    )


def _bound(book: Book, total: int, compute: int) -> None:
    """Enter the communication that exceeds compute: no schedule can hide it."""
    unknown = book.analysis.cross_rank.waits_unknown_ns
    whole = book.left_ns("communication")
    too_much = whole if total - unknown <= compute else min(whole, total - compute)
    mine = book.take("communication", part=(too_much, whole)) if whole else []
    amounts = {"communication_ns": total, "compute_ns": compute}
    said: dict[str, Any] = {"communication": book.per_step(total), "compute": book.per_step(compute)}
    if total - unknown <= compute:
        amounts["waits_unknown_ns"] = unknown
        book.enter(mine, "waiting_or_transfer", amounts, missing=book.missing_traces, **said)
        return
    told = any(one.told and one.cause == "communication" for one in book.entries)
    book.enter(mine, "communication_bound", amounts, fqn=worst_layer(mine), calm=told, **said)


def _ends(book: Book, ends: set[tuple[int, int, str, str, str | None]]) -> None:
    """Enter the first all-gather and the last reduce-scatter of a step, which cannot overlap with
    anything."""
    mine = book.take(
        "communication", lambda one: (one.rank, one.step, one.op or "", one.phase, one.fqn) in ends
    )
    book.enter(mine, "first_and_last_collective", fqn=worst_layer(mine))


def _first_and_last(book: Book) -> set[tuple[int, int, str, str, str | None]]:
    first: dict[tuple[int, int], GroupRow] = {}
    last: dict[tuple[int, int], GroupRow] = {}
    for row in book.rows("all_gather"):
        first.setdefault((row.rank, row.step), row)
    for row in book.rows("reduce_scatter"):
        last[row.rank, row.step] = row
    return {(row.rank, row.step, row.op, row.phase, row.fqn) for row in [*first.values(), *last.values()]}


_HOSTS = 4
"""Hosts that are named one by one."""
_NVLINK = re.compile(r"SXM|H100 80GB HBM3|H200(?! NVL)|GH200|[GH]?B[23]00")
"""Names of devices that are only sold on boards with NVLink."""
_PCIE_BYTES_PER_S = 40e9
"""Bus bandwidth that rings over PCIe 5 with 16 lanes do not exceed in practice."""
_NVLINK_BYTES_PER_S = 150e9
"""Of the slowest of these boards, one direction (V100 data sheet)."""
_LARGE_BYTES = 32 << 20
"""Payload from which on bandwidth, not latency, sets the time."""
_OFF = {"NCCL_P2P_DISABLE": ("1",), "NCCL_P2P_LEVEL": ("LOC", "0")}
"""Values of environment variables that keep NCCL from NVLink."""


def enter_links(book: Book) -> None:
    """Enter the cost of slow links, before any other waits and transfers."""
    if book.on_device:
        _shared_devices(book)
        _slow_groups(book)
        _without_nvlink(book)


def _shared_devices(book: Book) -> None:
    """Enter the waits of ranks that share a device: no single rank causes them.

    Their kernels alternate on the device, and NCCL reaches a rank of the same device through the host or a
    network.
    """
    places = {one.rank: one.device_key for one in book.manifests if one.device_key is not None}
    many = Counter(places.values())
    sharing = {rank for rank, place in places.items() if many[place] > 1}
    if not sharing:
        return
    groups = {
        group.name
        for one in book.manifests
        for group in one.process_groups
        if sharing.intersection(group.ranks)
    }
    mine = [
        *book.take("uneven_ranks"),
        *book.take("queued", lambda one: one.rank in sharing),
        *book.take("communication", lambda one: one.group in groups),
    ]
    ranks = sorted(sharing)
    whose = numbered("rank", ranks).capitalize()
    evidence = {"ranks": ranks}
    book.enter(mine, "sharing_a_device", evidence, gain_ns=None, basis="unknown", ranks=whose)


def _slow_groups(book: Book) -> None:
    """Enter waiting for ranks whose own collectives take longer than the same ones of other groups."""
    mine = book.take("uneven_ranks", lambda one: one.why == SLOW_LINKS)
    late = sorted({one.late_rank for one in mine if one.late_rank is not None})
    gain = book.least_ns(mine, late)
    if book.frac(gain) < book.thresholds.straggler_frac:
        book.put_back(mine)
        return
    _, slower, _ = main_cause(mine)
    hosts = sorted({one.host for one in book.manifests if one.rank in late})
    for rank in late:
        mine += own_excess(book, mine, rank, gain / len(book.analysis.ranks), ("communication",))
    book.enter(
        mine,
        "slow_links",
        {"ranks": late, "kind": SLOW_LINKS},
        rank=late[0] if len(late) == 1 else None,
        gain_ns=min(gain, sum(one.ns for one in mine)),
        late=late,
        whose=numbered("rank", late) + (f" ({', '.join(hosts)})" if 0 < len(hosts) <= _HOSTS else ""),
        slower=slower,
    )


def _without_nvlink(book: Book) -> None:
    """Enter large collectives inside a host no faster than PCIe, on devices that come with NVLink."""
    hosts = {one.rank: one.host for one in book.manifests}
    names = {one.device.name or "" for one in book.manifests if one.device is not None}
    inside: set[str] = set()
    across: set[str] = set()
    for manifest in book.manifests:
        for group in manifest.process_groups:
            one_host = len({hosts.get(rank, "") for rank in group.ranks}) == 1
            (inside if one_host else across).add(group.name)
    rows = [
        row
        for row in book.analysis.bandwidth
        if row.waits_known
        and row.payload_bytes >= _LARGE_BYTES
        and row.busbw_bytes_per_s  # none between ranks where a group has one
        and row.process_group in inside - across
    ]
    if not rows or not names or not all(_NVLINK.search(name) for name in names):
        return
    best = max(row.busbw_bytes_per_s or 0.0 for row in rows)
    if best >= _PCIE_BYTES_PER_S:
        return
    groups = {row.process_group for row in rows}
    mine = book.take("communication", lambda one: one.group in groups)
    switches = {
        f"{name}={one.environment[name]}"
        for one in book.manifests
        for name, off in _OFF.items()
        if one.environment.get(name) in off
    }
    book.enter(
        mine,
        "slow_links/switched_off" if switches else "slow_links/pcie",
        {"busbw_bytes_per_s": best, "payload_bytes": max(row.payload_bytes for row in rows)},
        gain_ns=sum(one.ns for one in mine) * (1 - best / _NVLINK_BYTES_PER_S),
        rate=f"{best / 1e9:.1f} GB/s",
        device=min(names),
        switches=" and ".join(sorted(switches)),
    )
