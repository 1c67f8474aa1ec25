"""What the ranks of a probe found, judged; and a real probe of two ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli import call
from support.probes import two_probes

from fsdp2prof.analyzers.sharding.environment import judge_environment
from fsdp2prof.readers.job.nccl_log import read_transports
from fsdp2prof.tables.probes import RankProbe

Change = Callable[[list[RankProbe]], object]


def test_what_is_well_passes() -> None:
    found = judge_environment(two_probes(), command=["torchrun"], world_size=2)
    assert found.passed
    assert not found.findings
    assert {row.name: row.state for row in found.checks if row.state != "ok"} == {"bandwidth": "unknown"}
    assert found.gathers[0].bus_bytes_per_s == (2 << 20) // 2 * 1000
    assert found.ranks[1].clock_uncertainty_ns == 1000


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ranks_missing", lambda probes: probes.pop()),
        ("local_ranks", lambda probes: setattr(probes[1], "local_rank", 1)),
        ("shared_device", lambda probes: setattr(probes[1], "host", "node0")),
        ("devices_differ", lambda probes: setattr(probes[1], "device", "NVIDIA A100")),
        ("versions_differ", lambda probes: probes[1].versions.update(torch="2.12.0")),
        ("variables_differ", lambda probes: probes[1].variables.update(NCCL_ALGO="Ring")),
        ("wrong_sums", lambda probes: setattr(probes[0].sums[0], "total", 4)),
        ("slow_collectives", lambda probes: setattr(probes[1].gathers[0], "median_ns", 10**9)),
        ("clocks_differ", lambda probes: setattr(probes[1], "clock_offset_ns", -(10**7))),
        ("small_disk", lambda probes: setattr(probes[0], "disk_free_bytes", 1 << 20)),
    ],
)
def test_what_is_wrong_is_named(name: str, change: Change) -> None:
    probes = two_probes()
    change(probes)
    found = judge_environment(probes, command=[], world_size=2, expected_bytes_per_s=10**9)
    assert name in [one.id for one in found.findings]
    assert found.passed is (name in ("devices_differ", "clocks_differ", "small_disk"))


def test_ranks_that_each_see_one_device_share_none() -> None:
    """As under Slurm with a device a task: all have index 0, and the driver's ids differ."""
    probes = two_probes()
    for one in probes:
        one.host, one.local_rank, one.device_uuid = "node0", one.rank, f"GPU-{one.rank}"
    assert "shared_device" not in [
        one.id for one in judge_environment(probes, command=[], world_size=2).findings
    ]
    probes[1].device_uuid = "GPU-0"
    assert "shared_device" in [one.id for one in judge_environment(probes, command=[], world_size=2).findings]


def test_transports_are_read_from_ncclslog(tmp_path: Path) -> None:
    """Lines as NCCL 2.18 to 2.27 write them."""
    (tmp_path / "log").write_text(
        "node0:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
        "node0:7:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
        "node0:7:9 [0] NCCL INFO Channel 00/0 : 1[7] -> 2[0] [send] via NET/IB/0/GDRDMA\n"
        "node0:7:9 [0] NCCL INFO Connected all rings\n"
    )
    assert read_transports([tmp_path / "log"]) == {(0, 1, "P2P/CUMEM/read"): 2, (1, 2, "NET/IB/0/GDRDMA"): 1}


def test_a_real_probe_of_two_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options: list[str | Path] = ["--folder", tmp_path, "--mesh", "dp_replicate=2", "--format", "json"]
    done = call(capfd, "check", "env", *options, "--", *launcher)
    found = json.loads(done.out)
    assert {row["name"]: row["state"] for row in found["checks"] if row["name"] != "disk"} == {
        "rendezvous": "ok",
        "devices": "ok",
        "versions": "ok",
        "variables": "ok",
        "sums": "ok",
        "bandwidth": "unknown",
        "clocks": found["checks"][6]["state"],
    }
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert abs(found["ranks"][1]["clock_offset_ns"]) <= found["ranks"][1]["clock_uncertainty_ns"] + 10**6
    assert all(one["bus_bytes_per_s"] > 0 for one in found["gathers"])
    assert list(tmp_path.iterdir()) == []
    assert done.code == 0


def test_a_launcher_that_fails_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    call(capfd, "check", "env", "--folder", tmp_path, "--", "no-such-launcher").refused("command not found")
    call(capfd, "check", "env", "--folder", tmp_path, "--", "false").refused(
        "no rank reported", "exit code 1"
    )
