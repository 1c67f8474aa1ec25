"""Why a communicator is slow, or where it stopped: only what lines of NCCL's log say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp2prof.analyzers.layers import numbered
from fsdp2prof.results.finding import EvidenceValue, Finding, Severity
from fsdp2prof.results.nccl import NcclCommunicator
from fsdp2prof.tables.nccl import LoggedCommunicator, LoggedProcess
from fsdp2prof.units import plural
from fsdp2prof.vocabulary import printable

_FAR = {"PIX": "a PCI switch", "PXB": "PCI switches", "PHB": "the CPU's PCI bridge", "SYS": "CPU sockets"}
"""How GPUs reach each other where no NVLink does (``topoPathTypeStr``)."""
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
    return [
        Reason(
            _BEHIND,
            "medium" if most - fewest > 1 else "low",
            f"has {fewest:,} collectives in the log of its {numbered('rank', ranks)} and {most:,} in others'",
            "If the job hangs, look there first (`fsdp2prof analyze hang`); else the log ends early.",
            {"ranks": list(ranks), "fewest": fewest, "most": most},
        )
    ]


def folded(causes: Sequence[tuple[NcclCommunicator, Sequence[Reason]]]) -> list[Finding]:
    """Return a finding for each reason and change, which names all communicators that have it.

    Ranks and counts of those that are behind are each communicator's own.
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
        also = f" So {'does' if more == 1 else 'do'} {plural(more, 'more communicator')}." if more else ""
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
    change = "Unset them unless a measurement says otherwise."
    said = ", ".join(f"{name}={printable(value)}" for name, value in sorted(forced.items()))
    return [
        Finding(
            id="nccl-forced",
            severity="low",
            fqn=None,
            message=f"The environment overrides NCCL's tuning: {said}. {change}",
            change=change,
            evidence={"variables": forced},
        )
    ]


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
    return [
        Finding(
            id="nccl-warnings",
            severity="medium",
            fqn=None,
            message=f"NCCL warned {plural(sum(counted.values()), 'time')}: {quoted}.",
            evidence={"warnings": {text: counted[text] for text in most}},
        )
    ]


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
    if set_so:
        because, change = f", with {', '.join(map(printable, set_so))}", "Check these variables."
    elif none_found:
        because = " since NCCL found no InfiniBand or RoCE device"
        change = "Check that the container sees the devices (`ibv_devinfo`), and NCCL_IB_HCA."
    else:
        because, change = (
            "",
            "Read the lines `NET/IB` and `NET/Plugin` of the log: they say why no faster network was used.",
        )
    yield Reason(
        "nccl-socket",
        "high",
        f"sends through TCP sockets on {plural(sockets, 'connection')}{because}",
        change,
        {"connections": sockets, "variables": set_so, "no_device": none_found},
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
    yield Reason(
        "nccl-no-p2p",
        "high" if set_so or pairs else "medium",
        f"goes from GPU to GPU of one node through {through} on {plural(shared or inside, 'connection')}"
        f"{because}",
        "Check these variables."
        if set_so
        else "Check `nvidia-smi topo -p2p r`, ACS and IOMMU, and which GPUs the container sees.",
        {"connections": shared or inside, "variables": set_so, "pairs_disabled": pairs},
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
    yield Reason(
        "nccl-no-gdr",
        "medium",
        f"copies through host memory for the network, without GPU Direct RDMA, on "
        f"{plural(through_host, 'connection')}{because}",
        "Check these variables." if set_so else "Load nvidia_peermem, or a kernel with DMA-BUF.",
        {"connections": through_host, "variables": set_so, "devices_disabled": disabled},
    )


def _one_nic(communicator: NcclCommunicator, processes: Sequence[LoggedProcess]) -> Iterator[Reason]:
    by_host: dict[str, int] = {}
    for process in processes:
        by_host[process.host] = by_host.get(process.host, 0) + 1
    most = max(by_host.values(), default=0)
    there = max((len(one.nics.get("IB", ())) for one in processes), default=0)
    if len(communicator.nics) != 1 or most < 2 or communicator.nics[0].startswith("NET/Socket"):
        return
    said = f", of {there} that NCCL lists" if there > 1 else ""
    yield Reason(
        "nccl-one-nic",
        "medium",
        f"shares one network device, {printable(communicator.nics[0])}, among {most} GPUs of a node{said}",
        "Check NCCL_IB_HCA and NCCL_CROSS_NIC."
        if there > 1
        else "If the node has more, NCCL does not see them.",
        {"device": communicator.nics[0], "gpus": most, "devices_listed": there},
    )


def _far_paths(communicator: NcclCommunicator) -> Iterator[Reason]:
    far = [one for one in communicator.path_types if one in _FAR]
    if not far or any(one.startswith(("NVL", "NVB", "C2C")) for one in communicator.path_types):
        return
    worst = max(far, key=list(_FAR).index)
    yield Reason(
        "nccl-pci-path",
        "medium",
        f"reaches GPUs of a node through {_FAR[worst]} ({worst}), not NVLink",
        "`nvidia-smi topo -m` shows which GPUs have NVLink; put groups that talk most on those.",
        {"path_types": list(communicator.path_types)},
    )
