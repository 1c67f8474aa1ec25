"""What NCCL's own files say: bandwidth by hand, layers by number and size, causes where a line says so."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from support.cli import call
from support.nccl_files import COMM, inspected, inspector_lines, log_lines, logged, manifest, write_inspector

from fsdp2prof.analyzers.nccl.analysis import analyze_nccl
from fsdp2prof.errors import InputError
from fsdp2prof.readers.job.nccl_inspector import read_inspector
from fsdp2prof.readers.job.nccl_log import read_nccl_logs
from fsdp2prof.results.nccl import NcclAnalysis
from fsdp2prof.tables.nccl import Connection, LoggedCall, NcclLog
from fsdp2prof.workflows.nccl import analyze_nccl as analyze_path

NO_LOG = NcclLog(communicators=[], processes=[], lines=0)
BF16, FP32 = 2, 4


def a_step(number: int, us: int, late: int = 0) -> list[tuple[str, int, int, int]]:
    """Root, layers.0 and layers.1 in forward, the layers again in backward; then all reduced in reverse."""
    gathers = [3000, 1000, 1000, 1000, 1000]
    reductions = [1000, 1000, 3000]
    return [
        *(("all_gather", 5 * number + i, BF16 * n, us + late) for i, n in enumerate(gathers)),
        *(("reduce_scatter", 3 * number + i, FP32 * n, 2 * us + late) for i, n in enumerate(reductions)),
    ]


@pytest.mark.parametrize("version", ["v4.0", "v4.2", "v4.3"])
def test_time_and_bandwidth_are_those_after_the_last_rank_came(tmp_path, version):
    ranks = [[("all_gather", n, 1_000_000, 500 + 100 * n) for n in range(3)],
             [("all_gather", n, 1_000_000, 100) for n in range(3)]]  # fmt: skip
    found = analyze_nccl(inspected(tmp_path, ranks, version=version), NO_LOG, {})
    (row,) = found.collectives
    assert (row.op, row.message_bytes, row.payload_bytes, row.count) == (
        "all_gather",
        1_000_000,
        2_000_000,
        3,
    )
    assert row.mean_ns == 100_000  # rank 1 came last, and was in it for the transfer alone
    assert row.waiting_ns == 500_000  # (400 + 500 + 600) / 3 us
    assert row.bus_bytes_per_s == 1_000_000 * 10**9 // 100_000  # half of the payload a rank sends
    assert [(one.rank, one.came_last, one.host, one.pid) for one in found.ranks] == [
        (0, 0, "node0", 1000),
        (1, 3, "node0", 1001),
    ]
    assert (found.communicators[0].name, found.communicators[0].size) == (COMM, 2)


def test_of_ranks_that_were_in_it_for_equally_long_none_came_last(tmp_path):
    early, late = [("all_gather", 0, 1000, 500)], [("all_gather", 0, 1000, 100)]
    together = analyze_nccl(inspected(tmp_path, [early] * 3), NO_LOG, {})
    assert [one.came_last for one in together.ranks] == [0, 0, 0]
    two = analyze_nccl(inspected(tmp_path, [early, late, late]), NO_LOG, {})
    assert [one.came_last for one in two.ranks] == [0, 0, 0]
    one = analyze_nccl(inspected(tmp_path, [early, early, late]), NO_LOG, {})
    assert [each.came_last for each in one.ranks] == [0, 0, 1]


def test_bus_bandwidth_is_the_inspectors_own(tmp_path):
    """The plugin: message x ranks / time x (n-1)/n for gathers and scatters, message / time x 2(n-1)/n."""
    records = [
        ("all_gather", 0, 3 << 20, 700),
        ("reduce_scatter", 0, 3 << 20, 700),
        ("all_reduce", 0, 3 << 20, 700),
    ]
    found = analyze_nccl(inspected(tmp_path, [records] * 4), NO_LOG, {})
    message_per_s = (3 << 20) / 700e-6
    expected = {
        "all_gather": 3 * message_per_s,
        "reduce_scatter": 3 * message_per_s,
        "all_reduce": 1.5 * message_per_s,
    }
    assert {row.op: row.bus_bytes_per_s for row in found.collectives} == {
        op: pytest.approx(value, rel=1e-6) for op, value in expected.items()
    }


def rows(found: NcclAnalysis) -> dict[tuple[Any, ...], int]:
    return {(row.op, row.fqn, row.phase): row.count for row in found.collectives}


@pytest.mark.parametrize("begins", [0, 7])
def test_layers_follow_from_communicator_and_number(tmp_path, begins):
    steps = [record for number in range(begins, begins + 3) for record in a_step(number, 50)][4:]
    found = analyze_nccl(
        inspected(tmp_path, [steps] * 2), NO_LOG, {rank: manifest(rank) for rank in range(2)}
    )
    assert rows(found) == {
        ("all_gather", "", "forward"): 2,
        ("all_gather", "layers.0", "forward"): 2,
        ("all_gather", "layers.1", "forward"): 2,
        ("all_gather", "layers.1", "backward"): 2,
        ("all_gather", "layers.0", "backward"): 3,
        ("reduce_scatter", "layers.1", "backward"): 3,
        ("reduce_scatter", "layers.0", "backward"): 3,
        ("reduce_scatter", "", "backward"): 3,
    }
    assert found.communicators[0].mesh_dim == "dp"


def test_others_on_the_communicator_leave_what_size_alone_decides(tmp_path):
    steps = [*a_step(0, 50), ("all_gather", 5, 64, 10), ("all_gather", 6, BF16 * 1000, 50)]
    found = analyze_nccl(inspected(tmp_path, [steps] * 2), NO_LOG, {0: manifest(0), 1: manifest(1)})
    assert {
        (row.message_bytes, row.fqn, row.layer_known) for row in found.collectives if row.op == "all_gather"
    } == {
        (6000, "", True),
        (2000, None, False),
        (64, None, False),
    }


def test_what_the_ring_lost_and_what_is_cut_are_said(tmp_path):
    path = write_inspector(tmp_path, 0, a_step(0, 50), dropped=12)
    path.write_text(path.read_text()[:-40])
    found = analyze_nccl([read_inspector(path)], NO_LOG, {})
    assert sum(row.count for row in found.collectives) == 7
    assert any("12 collectives left NCCL Inspector's ring" in said for said in found.warnings)
    assert any("1 line of" in said for said in found.warnings)
    assert any("by only one rank" in said for said in found.warnings)


def test_a_log_gives_rings_transports_sizes_and_algorithms(tmp_path):
    log = logged(tmp_path / "logs", calls=3)
    assert len(log.communicators) == 4
    first = log.communicators[0]
    assert (first.rank, first.size, first.nodes, first.channels, first.ring, first.trees) == (
        0,
        4,
        2,
        2,
        (0, 1, 2, 3),
        2,
    )
    assert first.connections == {Connection(0, 1, "P2P/CUMEM"): 2}
    assert first.calls == {LoggedCall("all_gather", 2048, dtype="bfloat16"): 3}
    found = analyze_nccl([], log, {})
    (one,) = found.communicators
    assert (one.size, one.nodes, one.ranks_seen, one.ring, one.nics) == (
        4,
        2,
        4,
        [0, 1, 2, 3],
        ["NET/IB 1", "NET/IB 3"],
    )
    assert [(t.transport, t.connections, t.across_nodes) for t in one.transports] == [
        ("P2P/CUMEM", 4, 0),
        ("NET/IB/GDRDMA", 4, 4),
    ]
    (row,) = found.collectives
    assert (row.message_bytes, row.payload_bytes, row.count, row.algorithm, row.protocol) == (
        2048,
        8192,
        3,
        "RING",
        "LL",
    )
    assert (row.mean_ns, row.bus_bytes_per_s) == (None, None)
    assert found.findings == []
    assert "shows no cause" in found.verdict[0]


CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "nccl-socket": (
        {"far": "NET/Socket/0", "said": ["NET/IB : No device found.", "Using network Socket"]},
        "through TCP sockets on 4 connections since NCCL found no InfiniBand",
    ),
    "nccl-no-gdr": (
        {"far": "NET/IB/{rank}", "said": ["NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"]},
        "without GPU Direct RDMA, on 4 connections; NCCL says that GPU Direct RDMA is disabled for 4 devices",
    ),
    "nccl-one-nic": (
        {
            "far": "NET/IB/0/GDRDMA",
            "said": ["NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB ; OOB eth0:10.0.0.1<0>"],
        },
        "shares one network device, NET/IB 0, among 2 GPUs of a node, of 2 that NCCL lists",
    ),
    "nccl-no-p2p": (
        {"near": "SHM/direct/direct", "said": ["NCCL_P2P_DISABLE set by environment to 1"]},
        "through host memory on 4 connections, with NCCL_P2P_DISABLE=1",
    ),
    "nccl-pci-path": ({"path_type": "SYS"}, "through CPU sockets (SYS), not NVLink"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_named_where_a_line_says_it(tmp_path, cause):
    options, said = CAUSES[cause]
    found = analyze_nccl([], logged(tmp_path / "logs", **options), {})
    assert [finding.id for finding in found.findings] == [cause]
    assert said in found.findings[0].message
    assert found.communicators[0].causes == [cause]
    assert found.verdict[0] == found.findings[0].message


def test_lines_of_many_ranks_and_other_output_may_be_mixed(tmp_path):
    lines = [line for group in zip(*(log_lines(rank) for rank in (1, 2, 3)), strict=True) for line in group]
    mixed = tmp_path / "slurm-1.out"
    mixed.write_text("\n".join(f"[rank?]: {line}\nstep 3 loss 2.5" for line in lines))
    log = read_nccl_logs([mixed])
    assert {one.rank: one.connections for one in log.communicators} == {
        1: {Connection(1, 2, "NET/IB/1/GDRDMA"): 2},
        2: {Connection(2, 3, "P2P/CUMEM"): 2},
        3: {Connection(3, 0, "NET/IB/3/GDRDMA"): 2},
    }


def test_forced_settings_and_warnings_are_findings(tmp_path):
    said = ["NCCL_ALGO set by environment to Ring"]
    path = tmp_path / "log"
    warned = "node0:2000:2007 [0] misc/ibvwrap.cc:42 NCCL WARN Call to ibv_reg_mr failed"
    newer = warned.replace(":42 ", ":42 (wrap_ibv_reg_mr) ")
    path.write_text("\n".join([*log_lines(0, said=said), warned, newer]))
    found = analyze_nccl([], read_nccl_logs([path]), {})
    assert [(finding.id, finding.severity) for finding in found.findings] == [
        ("nccl-warnings", "medium"),
        ("nccl-forced", "low"),
    ]
    assert "(2 times)" in found.findings[0].message
    assert "NCCL_ALGO=Ring" in found.findings[1].message


def test_the_command_line_and_what_it_refuses(tmp_path, capfd):
    ended = call(capfd, "analyze", "nccl", tmp_path)
    assert ended.code == 1
    assert "no NCCL logs found" in ended.err
    write_inspector(tmp_path, 0, a_step(0, 50))
    write_inspector(tmp_path, 1, a_step(0, 90))
    (tmp_path / "nccl.node0.2000").write_text("\n".join(log_lines(0, far="NET/Socket/0", size=2, per_node=1)))
    ended = call(capfd, "analyze", "nccl", tmp_path)
    assert ended.code == 0
    assert "TCP sockets" in ended.out
    assert "reduce-scatter" in ended.out


@pytest.mark.parametrize(
    "line",
    [
        '{"coll_perf":{"coll":"AllGather"}}',
        '{"header":{"id":3},"coll_perf":null}',
        inspector_lines(0, [("all_gather", 0, 1, 1)])[1].replace('"coll_sn":0', '"coll_sn":-1'),
        inspector_lines(0, [("all_gather", 0, 1, 1)])[1].replace('"coll_sn":0', f'"coll_sn":{1 << 80}'),
    ],
)
def test_a_file_without_one_good_record_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "inspector.log"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match="no record of NCCL Inspector"):
        analyze_path(path)


HEAD = "gpu-1:101:111 [0] NCCL INFO"
ABOUT = "comm 0xa rank 0 nranks 2 cudaDev 0 busId 1000 commId 0x5 - Init COMPLETE"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("[1,0]<stdout>:", ""),  # mpirun --tag-output
        ("[default0]:", ""),  # torchrun --tee
        ("[rank0]: ", ""),
        ("0: ", ""),  # srun --label
        ("[pod/train-0/worker] ", ""),  # kubectl logs --prefix
        ("(Worker pid=7, ip=10.0.0.1) ", ""),
        ("\x1b[36m(Worker pid=7)\x1b[0m ", ""),
        ("\x1b[36m", "\x1b[0m"),
        ("[2026-04-28 14:14:42] ", ""),
        ("2026-04-28T14:14:42.1Z stdout F ", ""),
        ('{"log":"', '\\n","stream":"stdout"}'),
    ],
)
def test_launchers_tags_change_nothing(tmp_path: Path, before: str, after: str) -> None:
    said = [ABOUT, "Channel 00/0 : 0[0] -> 1[1] [send] via NET/AWS Libfabric/3/GDRDMA"]
    file = tmp_path / "log"
    file.write_text("".join(f"{before}{HEAD} {line}{after}\n" for line in said))
    (one,) = read_nccl_logs([file]).communicators
    assert (one.host, one.pid, one.id, one.rank, one.size) == ("gpu-1", 101, "0x5", 0, 2)
    assert list(one.connections) == [Connection(0, 1, "NET/AWS Libfabric/3/GDRDMA")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Ring 01 : 1[160] -> 0[160] [receive] via NET/Socket/0", Connection(1, 0, "NET/Socket/0")),  # 2.5
        ("Channel 00 : 0[1a000] -> 1[3d000] via direct shared memory", Connection(0, 1, "SHM")),  # 2.8
        ("Channel 02/0 : 0[c1] -> 1[c6] via P2P/IPC comm 0xa nRanks 02", Connection(0, 1, "P2P/IPC")),  # RCCL
        ("Channel 01/0 : 1[1] -> 0[0] via P2P/direct pointer/read",
         Connection(1, 0, "P2P/direct pointer/read")),
        ("Channel 00/0 : 0[0] -> 1[0] [send] via NET/IBext_v8/2(1)/GDRDMA/Shared",
         Connection(0, 1, "NET/IBext_v8/2(1)/GDRDMA/Shared")),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/MNNVL", Connection(0, 1, "P2P/MNNVL")),
    ],
)  # fmt: skip
def test_connections_as_versions_write_them(tmp_path: Path, line: str, expected: Connection) -> None:
    file = tmp_path / "log"
    file.write_text(f"{HEAD} {ABOUT}\n{HEAD} {line}\n")
    (one,) = read_nccl_logs([file]).communicators
    assert list(one.connections) == [expected]


def test_a_line_that_begins_inside_another_is_read(tmp_path: Path) -> None:
    file = tmp_path / "log"
    glued = f"{HEAD} Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"
    file.write_text(f"{HEAD} {ABOUT}\n{glued}{HEAD} Channel 01/0 : 0[0] -> 1[1] via SHM/direct/direct\n")
    (one,) = read_nccl_logs([file]).communicators
    assert sorted(connection.via for connection in one.connections) == ["P2P/IPC", "SHM/direct/direct"]


def test_connections_made_late_belong_to_their_device(tmp_path: Path) -> None:
    """One process drives two devices, and threads without a name connect them with the first call."""
    file = tmp_path / "log"
    about = "h:9:{1} [{0}] NCCL INFO comm 0xb{0} rank {0} nranks 2 cudaDev {0} commId 0x7 - Init COMPLETE\n"
    via = "h:9:{1} [{0}] NCCL INFO Channel 00/0 : {0}[{0}] -> {2}[{2}] via SHM/direct\n"
    text = "".join(about.format(rank, 20 + rank) + via.format(rank, 30 + rank, 1 - rank) for rank in range(2))
    file.write_text(text)
    found = read_nccl_logs([file]).communicators
    assert [(one.rank, [via.source for via in one.connections]) for one in found] == [(0, [0]), (1, [1])]


def test_communicators_without_a_number_are_those_of_all_their_ranks(tmp_path: Path) -> None:
    """Versions before 2.17: three ranks make one of three; and two pairs that cannot be told apart."""
    about = "n{0}:{0}:1 [0] NCCL INFO comm 0x{1} rank {2} nranks {3} cudaDev 0 busId 160 - Init COMPLETE\n"
    for process in range(3):
        text = about.format(process, "a", process, 3) + about.format(process, "b", process % 2, 2)
        (tmp_path / f"nccl.{process}.log").write_text(text)
    found = analyze_path(tmp_path)
    assert sorted((one.size, one.ranks_seen) for one in found.communicators) == [
        (2, 1),
        (2, 1),
        (2, 1),
        (3, 3),
    ]


def test_what_a_plugin_sets_is_not_the_users(tmp_path: Path) -> None:
    file = tmp_path / "log"
    said = [
        "NET/OFI Adding NCCL_PROTO=simple to environment",
        "NCCL_PROTO set by environment to simple",
        ABOUT,
    ]
    file.write_text("".join(f"{HEAD} {line}\n" for line in said))
    assert "nccl-forced" not in {finding.id for finding in analyze_path(file).findings}
    file.write_text("".join(f"{HEAD} {line}\n" for line in said[1:]))
    assert "nccl-forced" in {finding.id for finding in analyze_path(file).findings}


def test_packed_inspector_logs_are_read(tmp_path: Path) -> None:
    file = write_inspector(tmp_path, 0, [("all_gather", 0, 1_000_000, 500)], size=1)
    packed = tmp_path / f"{file.name}.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert analyze_path(packed).collectives == analyze_path(file).collectives
    packed.write_bytes(packed.read_bytes()[:60])
    with pytest.raises(InputError):
        analyze_path(packed)


def test_packed_logs_are_read_as_plain_ones(tmp_path: Path) -> None:
    """One rank of two is packed, as archives of clusters are."""
    plain, packed = ("\n".join(log_lines(rank, size=2, calls=3)) + "\n" for rank in range(2))
    (tmp_path / "nccl.0.log").write_text(plain)
    (tmp_path / "nccl.1.log.gz").write_bytes(gzip.compress(packed.encode()))
    found = analyze_path(tmp_path)
    assert found.logged == 2
    assert [one.ranks_seen for one in found.communicators] == [2]
    cut = gzip.compress(packed.encode() * 1000)[:-20]
    (tmp_path / "nccl.1.log.gz").write_bytes(cut)
    with pytest.raises(InputError, match=r"nccl\.1\.log\.gz: cannot be read"):
        analyze_path(tmp_path)


def test_data_types_are_those_of_the_log(tmp_path: Path) -> None:
    """Number 9 is bfloat16, 7 is float32; the same bytes in both are two rows."""
    lines = log_lines(0, size=2, calls=2)
    lines += [lines[-2].replace("count 1024 datatype 9", "count 512 datatype 7")]
    (tmp_path / "nccl.0.log").write_text("\n".join(lines) + "\n")
    rows = [(one.dtype, one.message_bytes, one.count) for one in analyze_path(tmp_path).collectives]
    assert sorted(rows, key=str) == [("bfloat16", 2048, 2), ("float32", 2048, 1)]


@pytest.mark.parametrize(
    ("calls", "ranks"), [((5, 5, 5, 5), []), ((5, 5, 3, 5), [2]), ((4, 5, 4, 5), [0, 2])]
)
def test_a_rank_whose_log_has_fewer_collectives_is_named(
    tmp_path: Path, calls: tuple[int, ...], ranks: list[int]
) -> None:
    for rank, count in enumerate(calls):
        (tmp_path / f"nccl.{rank}.log").write_text("\n".join(log_lines(rank, size=4, calls=count)) + "\n")
    found = [one for one in analyze_path(tmp_path).findings if one.id == "nccl-behind"]
    assert [one.evidence["ranks"] for one in found] == ([ranks] if ranks else [])


def logs_of_two_communicators(folder: Path, first: tuple[int, ...], second: tuple[int, ...]) -> None:
    """The second's ranks are in processes of their own; each number is the collectives in one rank's log."""
    for which, counts in enumerate((first, second)):
        for rank, count in enumerate(counts):
            text = "\n".join(log_lines(rank, size=len(counts), per_node=1, calls=count)) + "\n"
            text = text.replace("0x5eed", f"0x5eed{which}").replace("node", f"{'ab'[which]}node")
            (folder / f"nccl.{which}{rank}.log").write_text(text)


def test_ranks_and_counts_of_one_communicator_are_not_said_of_another(tmp_path: Path) -> None:
    logs_of_two_communicators(tmp_path, (9, 5), (3, 7))
    found = [one for one in analyze_path(tmp_path).findings if one.id == "nccl-behind"]
    said = [(one.evidence["ranks"], one.evidence["fewest"], one.evidence["most"]) for one in found]
    assert sorted(said, key=str) == [([0], 3, 7), ([1], 5, 9)]
    assert all(one.evidence["communicators"] == [one.evidence["communicator"]] for one in found)
    assert all("its rank" in one.message for one in found)


@pytest.mark.parametrize(("count", "severity"), [(4, "low"), (3, "medium")])
def test_one_collective_less_does_not_head_the_verdict(tmp_path: Path, count: int, severity: str) -> None:
    for rank in range(2):
        text = "\n".join(log_lines(rank, size=2, calls=count if rank else 5)) + "\n"
        (tmp_path / f"nccl.{rank}.log").write_text(text)
    found = analyze_path(tmp_path)
    (behind,) = (one for one in found.findings if one.id == "nccl-behind")
    assert behind.severity == severity
    assert (found.verdict[0] == behind.message) == (severity == "medium")


def calls_alone(rank: int, comm: str, *, size: int, count: int) -> list[str]:
    """A log with COLL and without INIT: neither number nor rank of the communicator."""
    return [
        f"node0:{2000 + rank}:{2007 + rank} [{rank}] NCCL INFO AllGather: opCount {number:x} sendbuff 0x7f00 "
        f"recvbuff 0x7f01 count {count} datatype 9 op 0 root 0 comm {comm} [nranks={size}] stream 0x55"
        for number in range(3)
    ]


def test_calls_without_a_number_belong_to_the_communicators_of_their_size(tmp_path: Path) -> None:
    """Four ranks, each with a communicator of all and one of a pair: pairs cannot be told apart."""
    for rank in range(4):
        lines = calls_alone(rank, f"0x{rank}a", size=4, count=1024)
        lines += calls_alone(rank, f"0x{rank}b", size=2, count=16)
        (tmp_path / f"nccl.{rank}").write_text("\n".join(lines) + "\n")
    found = analyze_path(tmp_path)
    assert sorted((one.size, one.ranks_seen) for one in found.communicators) == [(2, 1)] * 4 + [(4, 4)]
    (whole,) = (one for one in found.collectives if one.message_bytes == 2048)
    assert (whole.count, whole.payload_bytes) == (3, 8192)


def test_equal_causes_of_several_communicators_are_one_finding(tmp_path: Path) -> None:
    """Eleven communicators through TCP sockets."""
    lines = [
        line.replace("0x7f0000", f"0x7f{number:02x}aa").replace("0x5eed", f"0x5eed{number:02x}")
        for number in range(11)
        for line in log_lines(0, size=2, per_node=1, far="NET/Socket/0")
    ]
    (tmp_path / "nccl.0.log").write_text("\n".join(lines) + "\n")
    found = analyze_path(tmp_path)
    (finding,) = (one for one in found.findings if one.id == "nccl-socket")
    assert len(found.communicators) == 11
    assert all(one.causes == ["nccl-socket"] for one in found.communicators)
    assert "The same applies to 10 more communicators." in finding.message
    assert finding.evidence["communicators"] == [one.name for one in found.communicators]
