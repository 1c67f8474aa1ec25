"""Reasons a communicator is slow, or the place where it stopped: only from lines of NCCL's log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from fsdp2prof.analyzers.findings import finding, worded
from fsdp2prof.results.finding import EvidenceValue, Finding, Severity
from fsdp2prof.results.nccl import NcclCommunicator
from fsdp2prof.tables.nccl import LoggedCommunicator, LoggedProcess
from fsdp2prof.units import plural
from fsdp2prof.vocabulary import printable

_FAR = {"PIX": "a PCI switch", "PXB": "PCI switches", "PHB": "the CPU's PCI bridge", "SYS": "CPU sockets"}
"""Links between GPUs without NVLink (``topoPathTypeStr``)."""
_FORCED = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_NTHREADS", "NCCL_BUFFSIZE")
_SHOWN = 3
OF_SOME_RANKS = ("send_recv", "broadcast")
"""Calls that not every rank of a communicator makes, or not with the same size."""
_BEHIND = "nccl-behind"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one communicator is slow, or which of its ranks did less."""

    id: str
    severity: Severity
    what: str
    """The end of a sentence that begins with the communicator."""
    change: str
    evidence: dict[str, EvidenceValue]


def _reason(
    key: str, evidence: Mapping[str, EvidenceValue], *, severity: Severity = "medium", **said: object
) -> Reason:
    text = worded("nccl", key, {**evidence, **said})
    severity = cast("Severity", text("severity") or severity)
    return Reason(text("id"), severity, text("problem"), text("change"), dict(evidence))


def reasons(communicator: NcclCommunicator, processes: Sequence[LoggedProcess]) -> list[Reason]:
    """Return why a communicator is slow, the worst first. ``processes`` are its own."""
    return [
        *_socket(communicator, processes),
        *_no_p2p(communicator, processes),
        *_no_gdr(communicator, processes),
        *_one_nic(communicator, processes),
        *_far_paths(communicator),
    ]


def behind(logged: Sequence[LoggedCommunicator]) -> list[Reason]:
    """Return the ranks that logged fewer collectives than the others, where every rank logged some.

    They are ranks in the communicator. One collective less is usual in the log of a job that runs.
    """
    counts = {
        one.rank: sum(count for call, count in one.calls.items() if call.op not in OF_SOME_RANKS)
        for one in logged
        if one.rank is not None
    }
    most, fewest = max(counts.values(), default=0), min(counts.values(), default=0)
    if len(counts) < max(((one.size or 0) for one in logged), default=0) or not 0 < fewest < most:
        return []
    ranks = sorted(rank for rank, count in counts.items() if count == fewest)
    severity: Severity = "medium" if most - fewest > 1 else "low"
    return [_reason(_BEHIND, {"ranks": ranks, "fewest": fewest, "most": most}, severity=severity)]


def folded(causes: Sequence[tuple[NcclCommunicator, Sequence[Reason]]]) -> list[Finding]:
    """Return a finding for each reason and change, which names all communicators that it applies to.

    Ranks and counts of those that are behind are listed for each communicator.
    """
    alike: dict[tuple[str, Severity, str, str], list[tuple[NcclCommunicator, Reason]]] = {}
    for communicator, why in causes:
        for one in why:
            own = one.what if one.id == _BEHIND else ""
            alike.setdefault((one.id, one.severity, one.change, own), []).append((communicator, one))
    findings = []
    for (name, severity, change, _), members in alike.items():
        first, reason = members[0]
        more = len(members) - 1
        also = f" The same applies to {plural(more, 'more communicator')}." if more else ""
        findings.append(
            Finding(
                id=name,
                severity=severity,
                fqn=None,
                message=f"{_named(first)} {reason.what}.{also} {change}",
                change=change,
                evidence={
                    "communicator": first.name,
                    "communicators": [one.name for one, _ in members],
                    **reason.evidence,
                },
            )
        )
    return findings


def forced_settings(processes: Sequence[LoggedProcess]) -> list[Finding]:
    """Return the settings that the environment forces on NCCL."""
    forced = {
        name: value
        for process in processes
        for name, value in process.environment.items()
        if name in _FORCED and name not in process.set_by_plugin
    }
    if not forced:
        return []
    said = ", ".join(f"{name}={printable(value)}" for name, value in sorted(forced.items()))
    return [finding("nccl", "nccl-forced", {"variables": forced}, said=said)]


def logged_warnings(processes: Sequence[LoggedProcess]) -> list[Finding]:
    """Return NCCL's own warnings, the most frequent first."""
    counted: dict[str, int] = {}
    for process in processes:
        for text, count in process.warnings.items():
            counted[text] = counted.get(text, 0) + count
    if not counted:
        return []
    most = sorted(counted, key=lambda text: (-counted[text], text))[:_SHOWN]
    quoted = "; ".join(f"“{printable(text)}” ({plural(counted[text], 'time')})" for text in most)
    warnings = {"warnings": {text: counted[text] for text in most}}
    return [finding("nccl", "nccl-warnings", warnings, times=sum(counted.values()), quoted=quoted)]


def _named(communicator: NcclCommunicator) -> str:
    size = "" if communicator.size is None else f" ({plural(communicator.size, 'rank')})"
    return f"Communicator {printable(communicator.name)}{size}"


def _count(communicator: NcclCommunicator, begins: str, without: str | None = None) -> int:
    return sum(
        one.connections
        for one in communicator.transports
        if one.transport.startswith(begins) and (without is None or without not in one.transport)
    )


def _variables(processes: Sequence[LoggedProcess], *names: str) -> list[str]:
    return sorted({f"{n}={one.environment[n]}" for one in processes for n in names if n in one.environment})


def _socket(communicator: NcclCommunicator, processes: Sequence[LoggedProcess]) -> Iterator[Reason]:
    sockets = _count(communicator, "NET/Socket")
    if not sockets:
        return
    set_so = _variables(processes, "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_HCA")
    none_found = any("IB" in one.no_device for one in processes)
    key = "nccl-socket"
    if set_so:
        key = "nccl-socket/variables"
    elif none_found:
        key = "nccl-socket/no_device"
    yield _reason(
        key,
        {"connections": sockets, "variables": set_so, "no_device": none_found},
        set_so=", ".join(map(printable, set_so)) or None,
    )


def _no_p2p(communicator: NcclCommunicator, processes: Sequence[LoggedProcess]) -> Iterator[Reason]:
    shared = _count(communicator, "SHM")
    inside = sum(
        one.connections - (one.across_nodes or 0)
        for one in communicator.transports
        if one.transport.startswith("NET") and one.across_nodes is not None
    )
    if not shared and not inside:
        return
    set_so = _variables(processes, "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
    pairs = sum(one.p2p_disabled for one in processes)
    through = "host memory" if shared else "the network"
    because = f", with {', '.join(map(printable, set_so))}" if set_so else ""
    if not because and pairs:
        because = "; NCCL says that P2P is disabled between connected GPUs"
    yield _reason(
        "nccl-no-p2p/variables" if set_so else "nccl-no-p2p",
        {"connections": shared or inside, "variables": set_so, "pairs_disabled": pairs},
        severity="high" if set_so or pairs else "medium",
        through=through,
        because=because,
    )


def _no_gdr(communicator: NcclCommunicator, processes: Sequence[LoggedProcess]) -> Iterator[Reason]:
    through_host = _count(communicator, "NET/", without="GDRDMA") - _count(communicator, "NET/Socket")
    if through_host <= 0:
        return
    set_so = _variables(processes, "NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ", "NCCL_IB_GDR_LEVEL")
    disabled = sum(one.gdr_disabled for one in processes)
    because = f", with {', '.join(map(printable, set_so))}" if set_so else ""
    if not because and disabled:
        because = f"; NCCL says that GPU Direct RDMA is disabled for {plural(disabled, 'device')}"
    yield _reason(
        "nccl-no-gdr/variables" if set_so else "nccl-no-gdr",
        {"connections": through_host, "variables": set_so, "devices_disabled": disabled},
        because=because,
    )


def _one_nic(communicator: NcclCommunicator, processes: Sequence[LoggedProcess]) -> Iterator[Reason]:
    by_host: dict[str, int] = {}
    for process in processes:
        by_host[process.host] = by_host.get(process.host, 0) + 1
    most = max(by_host.values(), default=0)
    there = max((len(one.nics.get("IB", ())) for one in processes), default=0)
    if len(communicator.nics) != 1 or most < 2 or communicator.nics[0].startswith("NET/Socket"):
        return
    yield _reason(
        "nccl-one-nic/of_several" if there > 1 else "nccl-one-nic",
        {"device": communicator.nics[0], "gpus": most, "devices_listed": there},
        name=printable(communicator.nics[0]),
    )


def _far_paths(communicator: NcclCommunicator) -> Iterator[Reason]:
    far = [one for one in communicator.path_types if one in _FAR]
    if not far or any(one.startswith(("NVL", "NVB", "C2C")) for one in communicator.path_types):
        return
    worst = max(far, key=list(_FAR).index)
    paths = {"path_types": list(communicator.path_types)}
    yield _reason("nccl-pci-path", paths, through=_FAR[worst], worst=worst)
