"""What a bench makes of measured times: fits with known constants, the sentence, a file for estimates."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from support.rendered import table_of

from fsdp2prof.analyzers.bench import bench_result, fit_line
from fsdp2prof.errors import InputError, ModelError
from fsdp2prof.estimators.config.cluster import Cluster, Placement
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.timeline.costs import transfer
from fsdp2prof.measured import CollectiveTimes, Measured, RateTimes
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions

LATENCY_NS, BYTES_PER_S = 20_000, 10e9


def collective(op: str, payload: int, ranks: int = 4) -> CollectiveTimes:
    """Exactly latency + wire bytes / bandwidth; one time of three is far off."""
    wire = payload * (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks
    time = round(LATENCY_NS + wire * 1e9 / BYTES_PER_S)
    return CollectiveTimes(
        op=op, mesh_dim="dp_shard", ranks=ranks, payload_bytes=payload, times_ns=[time, 9 * time, time]
    )


def rate(kind: str, amount: int, time: int, dtype: str = "float32") -> RateTimes:
    return RateTimes(kind=kind, dtype=dtype, size="some", amount=amount, times_ns=[time] * 3)


def measured() -> Measured:
    sizes = [4 << 10, 1 << 20, 64 << 20]
    return Measured(
        device_type="cuda",
        device="Some GPU",
        backend="nccl",
        world_size=4,
        ranks_per_node=4,
        memory_bytes=80 << 30,
        units=100,
        torch="2.13.0",
        seconds=1.0,
        collectives=[
            collective(op, size) for op in ("all_gather", "reduce_scatter", "all_reduce") for size in sizes
        ],
        rates=[
            rate("matmul", 2 * 4096**3, 274_878, "bfloat16"),
            rate("matmul", 2 * 4096**3, 2_748_780),
            rate("attention", 10**12, 4_000_000, "bfloat16"),
            rate("copy", 2 << 30, 1_000_000),
            rate("operator", 200, 1_000_000),
            rate("launch", 200, 400_000),
            rate("matmul_alone", 1, 1_000),
            rate("matmul_beside_collective", 1, 1_250),
        ],
    )


def test_constants_come_back_from_times_made_of_them() -> None:
    result = bench_result(measured())
    for fit in result.fits:
        assert fit.latency_ns == pytest.approx(LATENCY_NS, rel=1e-3)
        assert fit.busbw_bytes_per_s == pytest.approx(BYTES_PER_S, rel=1e-3)
        assert fit.worst_residual_frac < 1e-3
    gather = result.fits[0]
    half = LATENCY_NS * 1e-9 * BYTES_PER_S * 4 / 3  # payload whose wire bytes take the latency
    assert gather.half_payload_bytes == pytest.approx(half, rel=1e-3)
    assert "is latency-bound: wrap at least 140,000 parameters" in result.verdict[0]
    assert result.overlap_slowdown_frac == pytest.approx(0.25)


def test_nothing_is_said_of_sizes_beyond_the_largest_that_was_measured() -> None:
    """By the fit latency is half of the time at 260 KiB; nothing that large ran."""
    small = [collective("all_gather", size) for size in (4 << 10, 8 << 10)]
    verdict = bench_result(msgspec.structs.replace(measured(), collectives=small)).verdict[0]
    assert "latency-bound up to the largest measured size (8.00 KiB)" in verdict


def test_rates_have_the_unit_of_what_was_counted() -> None:
    """2 x 4096^3 operations in 274,878 ns; 2 GiB in a millisecond; 200 operators in another."""
    table = table_of(build(bench_result(measured())), "rates")
    written = [
        [column.text(value) for column, value in zip(table.columns, row, strict=True)] for row in table.rows
    ]
    first = {row[0]: row for row in reversed(written)}
    assert [
        first[kind][6:] for kind in ("matrix product", "copy on the device", "small eager operators")
    ] == [
        ["500.00 TFLOP/s", "-", "-"],
        ["-", "2,147.48", "-"],
        ["-", "-", "200,000"],
    ]


@pytest.mark.parametrize(
    ("x", "y", "line"),
    [
        ([1, 2, 4], [3, 5, 9], (1, 2)),
        ([1, 2, 4], [2, 4, 8], (0, 2)),
        ([1, 2, 4], [1, 3, 7], (0, None)),  # would begin below 0
        ([1, 2, 4], [5, 5, 5], (5, 0)),
        ([1, 2, 4], [6, 5, 4], (None, 0)),  # would fall
    ],
)
def test_a_line_has_neither_negative_latency_nor_negative_cost(
    x: list[float], y: list[float], line: tuple[float | None, float | None]
) -> None:
    for found, expected in zip(fit_line(x, y), line, strict=True):
        assert found >= 0
        if expected is not None:
            assert found == pytest.approx(expected, abs=1e-9)


def test_the_json_of_a_bench_is_a_hardware_file_with_what_was_measured(tmp_path: Path) -> None:
    result = bench_result(measured())
    path = tmp_path / "cluster.json"
    path.write_text(str(RENDERERS["json"].render(build(result), RenderOptions())))
    spec = HardwareSpec.parse(str(path))
    assert spec.name == "measured-some-gpu"
    assert spec.achieved_flops("bfloat16") == pytest.approx(500e12, rel=1e-3)
    assert (spec.units, spec.kernel_floor_ns, spec.host_operator_ns) == (100, 2_000, 5_000)
    assert spec.overlap_slowdown_frac == pytest.approx(0.25)
    four = Placement(ranks=4, nodes=1, per_node=4, groups_per_node=1)
    for op in ("all_gather", "all_reduce"):
        for size in (4 << 10, 1 << 20, 64 << 20):
            expected = collective(op, size).times_ns[0]
            assert transfer(op, size, four, Cluster(hardware=spec)).ns == expected
    between = transfer("all_gather", 32 << 20, four, Cluster(hardware=spec)).ns
    assert between == pytest.approx(LATENCY_NS + (24 << 20) * 1e9 / BYTES_PER_S, rel=1e-3)
    beyond = transfer("all_gather", 256 << 20, four, Cluster(hardware=spec)).ns
    assert beyond == pytest.approx(LATENCY_NS + (192 << 20) * 1e9 / BYTES_PER_S, rel=1e-3)


def test_without_rates_there_is_nothing_to_describe_a_device_by() -> None:
    nothing = measured()
    nothing.rates = []
    with pytest.raises(InputError, match="measured no copy"):
        bench_result(nothing)


@pytest.mark.parametrize(
    ("figures", "wrong"),
    [
        ("memory_gb_per_s: 0", "1e-06"),
        ("peak_tflops: {bf16: -1}", "1e-06"),
        ("watts: .nan", "1e-06"),
        ("attention_tflops: {}", "length"),
        ("multiprocessors: 0", ">= 1"),
        ("collectives: {all_gather: {2: [[4096, 10], [4096, 20]]}}", "all_gather over 2 ranks do not ascend"),
    ],
)
def test_figures_that_no_accelerator_has_are_refused(tmp_path: Path, figures: str, wrong: str) -> None:
    path = tmp_path / "it.yaml"
    path.write_text(f"accelerators:\n  it:\n    memory_mib: 1000\n    {figures}\n")
    with pytest.raises(ModelError, match=re.escape(wrong)):
        HardwareSpec.parse(str(path))


NCCL_TESTS = """
# nccl-tests version 2.18.0 nccl-headers=22907 nccl-library=22907
# Collective test starting: {program}
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
#
# Using devices
#  Rank  0 Group  0 Pid 2999700 on  node7 device  0 [0000:02:00] {device}
#  Rank  1 Group  0 Pid 2999701 on  {host} device  1 [0000:03:00] {device}
#
#                                                         out-of-place                       in-place
#       size     count    type  redop   root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)   (elements)                         (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
     1048576    131072   float   none     -1    40.25   26.05   13.03       0    39.10   26.82   13.41       0
[1,0]<stdout>: 16777216  2097152  float  none -1   374425   0.04   0.02       0   373792   0.04   0.02       0
# Out of bounds values : 0 OK
"""
OLD_TABLE = """
#       size         count      type     time   algbw   busbw  error     time   algbw   busbw  error
       65536          2048     float    52.01    1.26    1.10  0e+00    50.09    1.31    1.14  0e+00
      131072          4096     float    12061    0.01    0.01  0e+00    69.55    1.88    1.65  0e+00
"""


def nccl_tests(program: str, *, device: str = "NVIDIA H100 80GB HBM3", host: str = "node7") -> str:
    """What one of its programs prints."""
    return NCCL_TESTS.format(program=program, device=device, host=host)


def test_tables_of_nccl_tests_are_the_collectives_of_the_accelerator(tmp_path: Path) -> None:
    two = Placement(ranks=2, nodes=1, per_node=2, groups_per_node=1)
    (tmp_path / "one.txt").write_text(nccl_tests("all_gather_perf_mpi"))
    one = HardwareSpec.parse(str(tmp_path / "one.txt"))
    assert one.name == "h100-sxm"
    assert one.peak_tflops == HardwareSpec.parse("h100-sxm").peak_tflops
    assert transfer("all_gather", 1 << 20, two, Cluster(hardware=one)).ns == 40_250
    assert transfer("all_gather", 16 << 20, two, Cluster(hardware=one)).ns == 374_425_000
    ours = Cluster(hardware=HardwareSpec.parse("h100-sxm"))
    same = transfer("reduce_scatter", 1 << 20, two, ours).ns
    assert transfer("reduce_scatter", 1 << 20, two, Cluster(hardware=one)).ns == same
    (tmp_path / "two.log").write_text(nccl_tests("all_reduce_perf") + nccl_tests("alltoall_perf"))
    header = nccl_tests("", device="NVIDIA H100 80GB HBM3").partition("#       size")[0]
    (tmp_path / "reduce_scatter.out").write_text(header + OLD_TABLE)
    folder = HardwareSpec.parse(str(tmp_path))
    assert set(folder.collectives) == {"all_gather", "all_reduce", "all_to_all", "reduce_scatter"}
    assert folder.collectives["reduce_scatter"][2] == [(65536, 52_010), (131072, 12_061_000)]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA RTX A6000", "a6000"),
    ],
)
def test_drivers_names_are_those_of_accelerators(device: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(nccl_tests("all_gather_perf", device=device))
    assert HardwareSpec.parse(str(tmp_path / "t.txt")).name == HardwareSpec.parse(name).name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (nccl_tests("all_gather_perf", host="node8"), "all_gather ran over 2 hosts; give tables of one host"),
        (nccl_tests("all_gather_perf", device="Some GPU"), "'Some GPU' is not known"),
        (nccl_tests("something"), "it does not name its collective"),
        (nccl_tests("all_gather_perf").partition("#       size")[0], "the table of all_gather has no rows"),
        ("GPU 0: fine", "no output of nccl-tests"),
    ],
)
def test_a_table_that_says_too_little_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(text)
    with pytest.raises(ModelError, match=said):
        HardwareSpec.parse(str(tmp_path / "t.txt"))
