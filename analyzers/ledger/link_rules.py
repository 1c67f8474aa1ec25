"""Links in the ledger: groups of ranks on slower ones than others, and links that a host does not use."""

from __future__ import annotations

import re
from collections import Counter

from fsdp2prof.analyzers.layers import numbered
from fsdp2prof.analyzers.ledger.book import Book
from fsdp2prof.analyzers.ledger.rank_rules import main_cause, own_excess
from fsdp2prof.analyzers.ranks.stragglers import SLOW_LINKS

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
