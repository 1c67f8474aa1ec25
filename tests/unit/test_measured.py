"""``--measured``: one number of the run corrects its prediction."""

from __future__ import annotations

import sys
from math import log
from pathlib import Path

import pytest

from fsdp2prof.commands.options import measured_of
from fsdp2prof.errors import InputError, UsageError
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec, NetworkSpec
from fsdp2prof.estimators.config.measured import Measured, Slower, anchored, fitted, read_measured
from fsdp2prof.estimators.verdict.memory_range import MeasuredPeaks, as_measured
from fsdp2prof.workflows.description import Described
from fsdp2prof.workflows.estimate import estimate_memory

CLUSTER = Cluster(hardware=HardwareSpec.parse("h100-sxm"), network=NetworkSpec.parse("400gb-ib"))
GIB = 1 << 30


def test_a_measured_speed_is_a_step() -> None:
    predicted = {"step_ns": 1_000_000_000, "tokens_per_s_per_gpu": 8000.0, "mfu": 0.5}
    for text, seconds in (("tokens_per_s_per_gpu=4000", 2.0), ("step_ms=1500", 1.5), ("mfu=40%", 1.25)):
        assert Measured.parse(text).step_ns(**predicted) == round(seconds * 1e9)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="states no peak"):
        Measured.parse("mfu=0.4").step_ns(step_ns=1, tokens_per_s_per_gpu=1.0, mfu=None)
    with pytest.raises(UsageError, match="an MFU of 125%, more than the hardware's peak"):
        Measured.parse("step_ms=400").step_ns(**predicted)  # type: ignore[arg-type]


def test_two_measured_numbers_are_refused_together() -> None:
    assert measured_of([], of_memory=True) is None
    with pytest.raises(UsageError, match="is given 2 times"):
        measured_of(["peak_reserved_gib=60", "peak_reserved_gib=30"], of_memory=True)


@pytest.mark.parametrize(
    "text", ["5600", "speed=3", "step_ms=0", "step_ms=-1", "mfu=3", "step_ms=inf", "mfu=x"]
)
def test_what_is_no_measurement_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="--measured"):
        Measured.parse(text)


@pytest.mark.parametrize("name", ["h100-sxm", "v100-16gb"])
def test_an_anchored_cluster_takes_as_many_times_as_long(name: str) -> None:
    """Every rate that a step's time rests on is divided by the factor."""
    cluster = Cluster(hardware=HardwareSpec.parse(name), network=NetworkSpec.parse("400gb-ib"))
    slow, fast = anchored(cluster, Slower.all(2.0)), cluster
    dtype = "bfloat16" if name == "h100-sxm" else "float16"
    pairs = [
        (slow.hardware.achieved_flops(dtype), fast.hardware.achieved_flops(dtype)),
        (slow.hardware.achieved_memory_bytes_per_s, fast.hardware.achieved_memory_bytes_per_s),
        (slow.hardware.host_link_bytes_per_s, fast.hardware.host_link_bytes_per_s),
        *(
            (one.hardware.attention_flops(dtype, 128, 4096), two.hardware.attention_flops(dtype, 128, 4096))
            for one, two in ((slow, fast),)
        ),
        *(
            (slow.bus_bytes_per_s(place), fast.bus_bytes_per_s(place))
            for place in (slow.place(8, 1), slow.place(16, 1))
        ),
    ]
    assert all(2 * one == pytest.approx(two) for one, two in pairs)
    assert slow.hardware.kernel_floor_ns == 2 * fast.hardware.kernel_floor_ns


def test_each_part_is_corrected_by_the_runs_that_it_decides() -> None:
    """Three runs, bound by compute, links and host: each part's factor is found; one run shows one part."""
    prior, noise = [0.1, 0.2, 0.4], 0.001
    truth = [log(1.1), log(1.5), log(2.0)]
    rows = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.0, 0.8]]
    off = [sum(e * x for e, x in zip(row, truth, strict=True)) for row in rows]
    logs, left = fitted(rows, off, prior, noise)
    assert logs == pytest.approx(truth, abs=0.01)
    assert all(left[part][part] < 0.01 * prior[part] ** 2 for part in range(3))
    logs, left = fitted(rows[:1], off[:1], prior, noise)
    assert logs == pytest.approx([truth[0], 0.0, 0.0], abs=0.01)
    assert [left[part][part] for part in range(3)] == pytest.approx([0.0, 0.04, 0.16], abs=1e-5)


def test_a_file_of_measured_configurations(tmp_path: Path) -> None:
    table = tmp_path / "measured.csv"
    table.write_text("mesh,batch_size,compile,step_ms\ndp_shard=8,2,yes,900\ndp_shard=8,1,,500\n")
    document = tmp_path / "measured.yaml"
    document.write_text(
        "- {mesh: dp_shard=8, batch_size: 2, compile: yes, step_ms: 900}\n"
        "- {mesh: dp_shard=8, batch-size: 1, step_ms: 500}\n"
    )
    assert read_measured(table) == read_measured(document)
    first = read_measured(table)[0]
    assert first.values == {"mesh": "dp_shard=8", "policy": {"batch_size": 2, "compile": True}}
    assert first.measured == Measured(name="step_ms", value=900)


@pytest.mark.parametrize(
    "text", ["", "[]", "- 3", "- {batch_size: 2}", "- {step_ms: 3, mfu: 0.3}", "- {step_ms: 3, sped: 2}"]
)
def test_a_file_that_is_no_list_of_measurements_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "measured.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"measured\.yaml") as error:
        read_measured(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("own_gib", "other_options"), [(0.5, True), (1.2, False), (2.0, False)])
def test_a_peak_below_the_bytes_in_use_is_of_another_run(own_gib: float, other_options: bool) -> None:
    peaks = MeasuredPeaks(own_bytes=round(own_gib * GIB))
    found = as_measured(round(1.5 * GIB), round(1.2 * GIB), peaks)
    assert ("less than the 1.20 GiB predicted in use" in found.why) == other_options
    assert found.low_bytes == found.high_bytes == round((own_gib - 1.5) * GIB)


def test_a_peak_beyond_the_device_is_refused_before_anything_runs() -> None:
    values = {"model": "gpt2", "mesh": {"dp_shard": 2}, "policy": {"seq_len": 512}}
    measured = Measured.parse("peak_reserved_gib=500")
    loaded = "torch" in sys.modules
    with pytest.raises(UsageError, match="more than h100-sxm has"):
        estimate_memory(Described(values=values, manifest=None), hardware="h100-sxm", measured=measured)
    assert ("torch" in sys.modules) == loaded
