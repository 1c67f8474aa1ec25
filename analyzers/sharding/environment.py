"""Whether these ranks can train together: a comparison of each rank's environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from fsdp2prof.analyzers.findings import listed
from fsdp2prof.analyzers.sharding.run_evidence import Outcome, failed, finding, ok, unknown
from fsdp2prof.by_key import grouped, summed
from fsdp2prof.results.check import EnvironmentCheck, ProbedGather, ProbedRank, ProbedTransport
from fsdp2prof.results.finding import SEVERITIES, Finding, Severity
from fsdp2prof.tables.probes import RankProbe
from fsdp2prof.units import format_bytes, format_ns, plural

_SLOW_FRAC = 0.5
"""Of the bus bandwidth that large all-gathers reach on the named hardware."""
_CLOCK_NS = 1_000_000
"""Offset from which on traces of two hosts cannot be laid beside each other as they are."""
_RECORDING_BYTES = 2 << 30
"""Free space of a host below which recordings may not fit."""
_SLOW_DISK = 50 << 20


def judge_environment(
    probes: Sequence[RankProbe],
    *,
    command: Sequence[str],
    world_size: int,
    expected_bytes_per_s: int | None = None,
    transports: Mapping[tuple[int, int, str], int] | None = None,
    said: Sequence[str] = (),
) -> EnvironmentCheck:
    """Judge the ranks' environments; ``world_size`` is the expected number, ``said`` the launcher's
    output."""
    probes = sorted(probes, key=lambda one: one.rank)
    gathers = _gathers(probes, expected_bytes_per_s)
    checks: list[Callable[[], Outcome]] = [
        lambda: _ranks(probes, world_size),
        lambda: _devices(probes),
        lambda: _versions(probes),
        lambda: _variables(probes),
        lambda: _sums(probes),
        lambda: _bandwidth(gathers, expected_bytes_per_s),
        lambda: _clocks(probes),
        lambda: _disks(probes),
    ]
    outcomes = [check() for check in checks]
    findings = sorted(
        (found for _, found in outcomes if found is not None), key=lambda one: SEVERITIES.index(one.severity)
    )
    hosts = list(dict.fromkeys(one.host for one in probes))
    passed = not any(one.severity == "high" for one in findings)
    return EnvironmentCheck(
        passed=passed,
        verdict=_verdict(probes, hosts, findings, passed),
        command=list(command),
        world_size=world_size,
        hosts=hosts,
        versions=probes[0].versions if probes else {},
        checks=[row for row, _ in outcomes],
        findings=findings,
        ranks=[_rank(one) for one in probes],
        gathers=gathers,
        transports=_transports(probes, transports or {}),
        warnings=list(said),
    )


def _ranks(probes: Sequence[RankProbe], world_size: int) -> Outcome:
    present = {one.rank for one in probes}
    missing = [rank for rank in range(world_size) if rank not in present]
    if not probes or missing:
        found = finding("ranks_missing/probed", missing=len(missing), world=world_size, names=missing)
        return failed("rendezvous", world_size, found)
    locals_of_host = grouped((one.host, one.local_rank) for one in probes)
    wrong = [host for host, found in locals_of_host.items() if sorted(found) != list(range(len(found)))]
    if wrong:
        return failed("rendezvous", world_size, finding("local_ranks", hosts=wrong))
    slowest = max(one.init_ns for one in probes)
    return ok("rendezvous", world_size, f"all ranks found each other, within {format_ns(slowest)}")


def _devices(probes: Sequence[RankProbe]) -> Outcome:
    known = [one for one in probes if one.device_index is not None]
    many = Counter((one.host, one.device_uuid or one.device_index) for one in known)
    shared = sorted(
        {
            f"device {one.device_index} of {one.host}"
            for one in known
            if many[one.host, one.device_uuid or one.device_index] > 1
        }
    )
    if shared:
        return failed("devices", len(probes), finding("shared_device/probed", devices=shared))
    names = sorted({one.device for one in probes})
    if len(names) > 1:
        return failed("devices", len(probes), finding("devices_differ", devices=names))
    return ok("devices", len(probes), f"{listed(names)} on every rank")


def _versions(probes: Sequence[RankProbe]) -> Outcome:
    names = sorted({name for one in probes for name in one.versions})
    differing = [name for name in names if len({one.versions.get(name) for one in probes}) > 1]
    if differing:
        return failed("versions", len(probes), finding("versions_differ/probed", names=differing))
    return ok("versions", len(probes), f"the same {listed(names)} on every rank")


def _variables(probes: Sequence[RankProbe]) -> Outcome:
    own = {"RANK", "LOCAL_RANK", "NCCL_DEBUG_FILE", "CUDA_VISIBLE_DEVICES"}
    names = sorted({name for one in probes for name in one.variables} - own)
    differing = [name for name in names if len({one.variables.get(name) for one in probes}) > 1]
    if differing:
        grave = any(name.startswith(("NCCL_", "MASTER_")) for name in differing)
        severity: Severity = "high" if grave else "medium"
        found = finding("variables_differ/probed", severity=severity, names=differing)
        return failed("variables", len(names), found)
    return ok("variables", len(names), "the same on every rank")


def _sums(probes: Sequence[RankProbe]) -> Outcome:
    wrong = []
    checked = 0
    for one in probes:
        for each in one.sums:
            checked += 1
            if each.total != sum(rank + 1 for rank in each.ranks) or one.rank not in each.ranks:
                wrong.append(f"{each.dimension} on rank {one.rank}")
    if wrong:
        return failed("sums", checked, finding("wrong_sums", wrong=wrong))
    dimensions = list(dict.fromkeys(each.dimension for one in probes for each in one.sums))
    return ok("sums", checked, f"right over {listed(dimensions)}")


def _gathers(probes: Sequence[RankProbe], expected: int | None) -> list[ProbedGather]:
    """Of the slowest rank; the expectation is for large sizes, so it is given only for the largest."""
    slowest: dict[int, int] = {}
    for one in probes:
        for each in one.gathers:
            slowest[each.payload_bytes] = max(slowest.get(each.payload_bytes, 0), each.median_ns)
    ranks, largest = len(probes), max(slowest, default=0)
    return [
        ProbedGather(
            payload_bytes=payload,
            median_ns=time_ns,
            bus_bytes_per_s=payload * (ranks - 1) * 10**9 // (ranks * time_ns),
            expected_bytes_per_s=expected if payload == largest else None,
        )
        for payload, time_ns in sorted(slowest.items())
        if time_ns
    ]


def _bandwidth(gathers: Sequence[ProbedGather], expected: int | None) -> Outcome:
    if not gathers:
        return unknown("bandwidth", "no all-gather was timed")
    best = gathers[-1]
    rate = f"{best.bus_bytes_per_s / 1e9:.2f} GB/s busbw at {format_bytes(best.payload_bytes)}"
    if expected is None:
        return unknown("bandwidth", f"{rate}; add --hardware to compare it with the usual rate")
    if best.bus_bytes_per_s < _SLOW_FRAC * expected:
        return failed(
            "bandwidth", len(gathers), finding("slow_collectives", rate=rate, expected=expected / 1e9)
        )
    return ok("bandwidth", len(gathers), f"{rate}; {expected / 1e9:.0f} GB/s is usual")


def _clocks(probes: Sequence[RankProbe]) -> Outcome:
    offsets = {one.rank: one.clock_offset_ns for one in probes if one.clock_offset_ns is not None}
    if not offsets:
        return unknown("clocks", "one rank alone")
    worst = max(offsets, key=lambda rank: abs(offsets[rank]))
    said = f"rank {worst} differs most, by {format_ns(offsets[worst])}"
    certain = max(one.clock_round_trip_ns or 0 for one in probes if one.rank == worst)
    if abs(offsets[worst]) - certain // 2 > _CLOCK_NS:
        return failed("clocks", len(offsets), finding("clocks_differ", said=said))
    return ok("clocks", len(offsets), said)


def _disks(probes: Sequence[RankProbe]) -> Outcome:
    free = [one.disk_free_bytes for one in probes if one.disk_free_bytes is not None]
    rates = [one.disk_write_bytes_per_s for one in probes if one.disk_write_bytes_per_s is not None]
    if not free or not rates:
        return unknown("disk", "not writable")
    said = f"{format_bytes(min(free))} free, written at {format_bytes(min(rates))}/s"
    if min(free) < _RECORDING_BYTES or min(rates) < _SLOW_DISK:
        return failed("disk", len(rates), finding("small_disk", said=said))
    return ok("disk", len(rates), said)


def _rank(one: RankProbe) -> ProbedRank:
    trip = one.clock_round_trip_ns
    return ProbedRank(
        rank=one.rank,
        local_rank=one.local_rank,
        host=one.host,
        device=one.device,
        backend=one.backend,
        init_ns=one.init_ns,
        clock_offset_ns=one.clock_offset_ns,
        clock_uncertainty_ns=None if trip is None else trip // 2,
        disk_free_bytes=one.disk_free_bytes,
        disk_write_bytes_per_s=one.disk_write_bytes_per_s,
    )


def _transports(
    probes: Sequence[RankProbe], transports: Mapping[tuple[int, int, str], int]
) -> list[ProbedTransport]:
    hosts = {one.rank: one.host for one in probes}
    sums = summed(
        ((hosts.get(source, "?"), hosts.get(target, "?"), name), count)
        for (source, target, name), count in transports.items()
    )
    return [
        ProbedTransport(source=source, target=target, transport=name, pairs=count)
        for (source, target, name), count in sorted(sums.items())
    ]


def _verdict(
    probes: Sequence[RankProbe], hosts: Sequence[str], findings: Sequence[Finding], passed: bool
) -> list[str]:
    where = f"{plural(len(probes), 'rank')} on {plural(len(hosts), 'host')}"
    if passed:
        more = f"; {plural(len(findings), 'finding')} to check" if findings else ""
        return [f"{where} can train together{more}."]
    return [f"{where} cannot train together: {findings[0].message}"]
