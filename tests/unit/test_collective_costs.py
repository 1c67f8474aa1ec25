"""What collectives take on a topology: by hand from NCCL's figures, and what must hold of any."""

from dataclasses import replace

import pytest

from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec, NetworkSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.timeline.costs import transfer

GIB = 1 << 30
H200 = HardwareSpec.parse("h200")
EIGHT = Cluster(hardware=H200, network=NetworkSpec.parse("400gb-ib"))
FOUR = replace(EIGHT, gpus_per_node=4)


def _busbw(op: str, ranks: int, cluster: Cluster = EIGHT, payload: int = 8 * GIB, stride: int = 1) -> float:
    """Bus bandwidth in GB/s."""
    taken = transfer(op, payload, cluster.place(ranks, stride), cluster).ns
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks * payload / taken


def test_only_an_all_reduce_of_enough_ranks_is_reduced_in_the_switch() -> None:
    assert _busbw("all_reduce", 8) == pytest.approx(480, rel=0.01)
    assert _busbw("all_gather", 8) == _busbw("reduce_scatter", 8) == pytest.approx(361, rel=0.01)
    assert _busbw("all_reduce", 4) == pytest.approx(_busbw("all_gather", 4), rel=0.01)
    assert _busbw("all_reduce", 5) > 1.2 * _busbw("all_gather", 5)


def test_gpus_without_a_switch_have_the_links_between_them_alone() -> None:
    """On a board of four each pair has a third of 450 GB/s; behind a switch any pair has all of it."""
    assert _busbw("all_gather", 2, FOUR) == pytest.approx(450 / 3 * 0.77, rel=0.01)
    assert _busbw("all_gather", 4, FOUR) == pytest.approx(_busbw("all_gather", 4), rel=0.01)
    assert _busbw("all_gather", 2, replace(FOUR, behind_a_switch=True)) == _busbw("all_gather", 2)
    assert _busbw("all_reduce", 4, FOUR) == pytest.approx(_busbw("all_gather", 4, FOUR), rel=0.01)


def test_groups_of_a_node_share_its_network() -> None:
    """Eight groups of one rank a node each have one NIC of eight, a group of all ranks has them all."""
    alone = _busbw("all_gather", 16)
    assert alone == pytest.approx(min(361, 8 * 50 * 0.94), rel=0.02)
    assert _busbw("all_gather", 2, stride=8) == pytest.approx(50 * 0.94, rel=0.02)
    one_nic = replace(EIGHT, nics_per_node=1)
    assert _busbw("all_gather", 16, one_nic) == pytest.approx(50 * 0.94, rel=0.02)
    placed = EIGHT.placement(MeshSpec(dp_replicate=2, dp_shard=8), "dp_replicate")
    assert (placed.nodes, placed.groups_per_node) == (2, 8)


@pytest.mark.parametrize(
    ("ranks", "chosen", "share"),
    [
        (2, (1, 4), 1.0),
        # two of four experts, two of them here: both in one place with 2/6, so to 5/3 places instead of 2
        (2, (2, 4), 5 / 6),
        # over two nodes the network decides: one copy each for the two nodes instead of eight
        (16, (8, 256), 2 / 8),
    ],
)
def test_a_token_goes_once_to_each_place_that_has_any_of_its_experts(
    ranks: int, chosen: tuple[int, int], share: float
) -> None:
    place = EIGHT.place(ranks, 1)
    whole, once = (transfer("all_to_all", 8 * GIB, place, EIGHT, how).ns for how in (None, chosen))
    assert once / whole == pytest.approx(share, rel=0.01)


def test_small_collectives_vary_by_themselves() -> None:
    slowed = replace(EIGHT, node_frac=0.9, small_frac=0.6)
    for payload, share in ((128 << 20, 0.6), (GIB, 0.9)):
        bandwidth = [_busbw("all_gather", 8, one, payload) for one in (EIGHT, slowed)]
        assert share <= bandwidth[1] / bandwidth[0] < share + 0.05  # latency is the same


def test_the_protocol_is_the_fastest_for_the_size() -> None:
    """Ring of eight over NVLink: LL to 6.6 + 7 x 0.6 us, Simple at the links' rate."""
    small = transfer("all_gather", 4096, EIGHT.place(8, 1), EIGHT).ns
    assert small == pytest.approx(1000 * (6.6 + 7 * 0.6) + 4096 * 7 / 8 / 39, rel=0.01)
    large = transfer("all_gather", GIB, EIGHT.place(8, 1), EIGHT).ns
    assert large == pytest.approx(1000 * (8.4 + 7 * 3.4) + GIB * 7 / 8 / 361, rel=0.001)
    times = [transfer("all_gather", 1 << at, EIGHT.place(8, 1), EIGHT).ns for at in range(10, 34)]
    assert times == sorted(times)
