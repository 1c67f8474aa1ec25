"""What kernels, links, allocators and other ranks cost, on synthetic traces of devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab.devices import DEVICES
from synthetic import Outside, Schedule, record, transformer, write_run
from synthetic.strategies import schedules

from fsdp2prof.backends import allocates, kernel_name
from fsdp2prof.errors import InputError
from fsdp2prof.results.ledger import LedgerEntry
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.job.job_files import open_job
from fsdp2prof.workflows.whatif import what_if

MS = 1_000_000


def analysed(folder: Path, *ranks: Schedule) -> TraceAnalysis:
    run = write_run(record(*ranks), folder / "run")
    return analyze_trace(open_job(run), workers=1)


def entries(analysis: TraceAnalysis) -> dict[str, LedgerEntry]:
    assert analysis.ledger is not None
    return {entry.id: entry for entry in analysis.ledger.entries}


def told(analysis: TraceAnalysis) -> list[str]:
    return [name for name, entry in entries(analysis).items() if entry.told]


def training(**fields: Any) -> Schedule:
    common: dict[str, Any] = {"forward_ns": 2 * MS + 17, "backward_ns": 4 * MS + 31, "numel": 80_000_000}
    root, *children = transformer(6, **(common | fields))
    children[-1] = replace(children[-1], reshard=False)
    return Schedule(roots=((root, *children),), shard=2, steps=3)


@pytest.mark.parametrize(
    ("kernel", "named"),
    [
        ("ampere_sgemm_128x64_tn", "bfloat16"),
        ("volta_sgemm_128x64_nn", "float16"),
        ("cutlass_80_simt_sgemm_128x128_8x5_nn_align1", "bfloat16"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8", "bfloat16"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", ""),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16", ""),
    ],
)
def test_products_without_tensor_cores_come_first_with_their_remedy(
    kernel: str, named: str, tmp_path: Path
) -> None:
    one = training(kernel_names=(kernel,))
    found = analysed(tmp_path, one, one)
    entry = entries(found).get("float32_without_tensor_cores")
    assert (entry is not None) == bool(named)
    if entry is not None:
        assert told(found)[0] == entry.id
        assert found.verdict[1].startswith(f"Try this first: compute in {named} ")
        assert entry.remedy is not None
        part = 7 / 8 if named == "float16" else 15 / 16
        assert entry.remedy.gain_ns == pytest.approx(entry.ns * part, rel=1e-6)


def test_faster_kernels_gain_nothing_where_the_host_is_the_limit(tmp_path: Path) -> None:
    """The host takes twice as long to launch as the device to compute: products in float32 are only noted."""
    one = training(kernel_names=("ampere_sgemm_128x64_tn",), kernels=20, host_ns=MS // 2)
    found = analysed(tmp_path, one, one)
    assert told(found) == ["host_bound"]
    note = next(one for one in found.findings if one.id == "float32_without_tensor_cores")
    assert note.severity == "low"


@pytest.mark.parametrize(
    ("name", "unfused"),
    [
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)", True),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)", True),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false>(float*)", True),
        ("void at::native::(anonymous namespace)::layer_norm_grad_input_kernel<float, float>(int)", True),
        ("triton_red_fused__softmax_native_layer_norm_0", False),
        ("_rms_norm_forward_kernel", False),
        ("_layer_norm_fwd_1pass_kernel", False),
        ("void cuApplyLayerNorm<float, float, float>(float*)", False),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>(Flash_fwd_params)", False),
    ],
)
def test_kernels_that_move_memory_are_named_where_they_take_most_of_compute(
    name: str, unfused: bool, tmp_path: Path
) -> None:
    one = training(kernel_names=(name,))
    found = analysed(tmp_path, one, one)
    assert (told(found) == ["memory_bound_kernels"]) == unfused, kernel_name(name)


@pytest.mark.parametrize(
    ("call", "allocation"),
    [
        ("cudaMalloc", True),
        ("cudaFree", True),
        ("cudaHostAlloc", True),
        ("cuMemMap", True),
        ("cuMemSetAccess", True),
        ("hipMalloc", True),
        ("hipFree", True),
        ("cudaMallocAsync", False),
        ("cudaFreeAsync", False),
        ("cudaMemsetAsync", False),
        ("cudaMemcpyAsync", False),
        ("cudaLaunchKernel", False),
    ],
)
def test_calls_that_get_memory_from_the_device(call: str, allocation: bool) -> None:
    assert allocates(call) == allocation


def test_an_allocator_that_frees_in_every_step_is_named_and_one_that_grows_once_is_not(
    tmp_path: Path,
) -> None:
    stalls = replace(training(), allocations=10, allocation_ns=2 * MS)
    found = analysed(tmp_path / "stalls", stalls, stalls)
    assert told(found) == ["allocator_stalls"]
    entry = entries(found)["allocator_stalls"]
    assert entry.ns == pytest.approx(20 * MS, rel=0.1)
    assert told(analysed(tmp_path / "none", training(), training())) == []
    first = replace(stalls, steps=1)
    assert "allocator_stalls" not in told(analysed(tmp_path / "first", first, first))


def slow_inside_a_host(folder: Path, change: Callable[[dict[str, Any]], None]) -> TraceAnalysis:
    """Analyze a run whose collectives are no faster than PCIe, after a change to its manifests."""
    case = next(one for one in DEVICES if one.name == "device/pcie/much")
    assert case.write is not None
    run = case.write(folder / "run")
    for path in run.glob("rank-*/manifest.json"):
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))
    return analyze_trace(open_job(run), workers=1)


def test_a_variable_that_keeps_nccl_from_nvlink_is_named(tmp_path: Path) -> None:
    found = slow_inside_a_host(tmp_path, lambda one: one["environment"].update(NCCL_P2P_DISABLE="1"))
    entry = entries(found)["slow_links"]
    assert entry.told
    assert entry.remedy is not None
    assert entry.remedy.change == "Unset NCCL_P2P_DISABLE=1: it keeps NCCL from using NVLink."
    assert entry.said.startswith("Inside a host, ")


def test_a_level_that_allows_nvlink_is_not_blamed(tmp_path: Path) -> None:
    found = slow_inside_a_host(tmp_path, lambda one: one["environment"].update(NCCL_P2P_LEVEL="NVL"))
    remedy = entries(found)["slow_links"].remedy
    assert remedy is not None
    assert not remedy.change.startswith("Unset")


def test_links_are_not_judged_between_ranks_that_share_a_device(tmp_path: Path) -> None:
    found = slow_inside_a_host(tmp_path, lambda one: one["device"].update(index=0))
    assert told(found) == []
    assert {"sharing_a_device"} <= set(entries(found))
    assert not {"slow_links", "straggler"} & set(entries(found))


def test_nothing_is_replayed_of_ranks_that_share_a_device(tmp_path: Path) -> None:
    slow_inside_a_host(tmp_path, lambda one: one["device"].update(index=0))
    job = open_job(tmp_path / "run")
    tried = analyze_trace(job, workers=1, what_if=True).what_if
    assert tried
    assert {row.gained_ns for row in tried} == {None}
    assert all("share a device" in (row.reason or "") for row in tried)
    assert what_if(job).shown is None
    with pytest.raises(InputError, match="ranks 0 and 1 share a device"):
        what_if(job, settings=["bandwidth=2x"])


def test_waiting_for_a_rank_that_compiles_is_charged_to_its_compiling(tmp_path: Path) -> None:
    compiling = replace(training(), pause_ns=90 * MS, pause_range="_compile.compile_inner (dynamo_timed)")
    found = analysed(tmp_path, training(), compiling)
    assert told(found)[0] == "recompilation"
    assert entries(found)["recompilation"].frac > 0.3
    first, *rest = told(found)
    assert all(entries(found)[one].frac < entries(found)[first].frac / 4 for one in rest)


def test_a_group_on_slow_links_is_told_by_the_other_group(tmp_path: Path) -> None:
    """Two groups of two shards, replicas across: transfers of ranks 2 and 3 take five times as long."""
    fast = replace(training(all_gather_ns=MS, reduce_scatter_ns=2 * MS), replicas=2)
    slow = replace(training(all_gather_ns=5 * MS, reduce_scatter_ns=10 * MS), replicas=2)
    found = analysed(tmp_path, fast, fast, slow, slow)
    assert told(found)[0] == "slow_links"
    entry = entries(found)["slow_links"]
    assert entry.evidence["ranks"] == [2, 3]
    assert "5 times as long" in entry.said
    assert "straggler" not in told(found)


def test_waiting_of_one_step_alone_is_no_advice(tmp_path: Path) -> None:
    """The host of rank 1 is far ahead: its pause costs the first traced step, and hides in the others."""
    late = training().changed("layers.2", late_ns=24 * MS)
    five = [replace(one, steps=5) for one in (training(), late)]
    found = analysed(tmp_path, *five)
    assert told(found) == []
    turns = entries(found)["ranks_take_turns"]
    assert turns.remedy is None
    assert "nearly all of it in step 3" in turns.said


def test_no_gain_is_larger_than_that_of_the_rank_that_gains_least(tmp_path: Path) -> None:
    """Behind a slow rank the others' gathers queue: faster ones would only wait longer for it."""
    one = replace(training(all_gather_ns=MS, reduce_scatter_ns=MS), shard=4)
    found = analysed(tmp_path, one, one, one, one.scaled(1.5))
    assert told(found) == ["straggler"]


def test_a_rank_that_is_as_late_as_the_last_one_is_named_with_it(tmp_path: Path) -> None:
    """Faster kernels of one of two equally slow ranks would gain nothing: the other one sets the pace."""
    one = replace(training(), shard=4)
    found = analysed(tmp_path, one, one.scaled(1.5), one.scaled(1.5), one)
    assert told(found) == ["straggler"]
    remedy = entries(found)["straggler"].remedy
    assert remedy is not None
    assert "ranks 1 and 2" in remedy.change


def test_a_teacher_of_which_only_labels_are_known_is_not_evaluated(tmp_path: Path) -> None:
    """The root's labels carry no name: a pass belongs to the model whose blocks it runs."""
    student, teacher = training().roots[0], transformer(6, prefix="teacher", forward_ns=2 * MS)
    one = Schedule(roots=(student, teacher), shard=2, steps=4, mark_roots=True, frozen_roots=frozenset({1}))
    found = analysed(tmp_path, one, one)
    assert told(found) == []
    assert [each.id for each in found.findings] == []


def test_waits_after_which_the_device_runs_dry_anyway_gain_nothing(tmp_path: Path) -> None:
    """Rank 0 waits some 10 ms for rank 1 in forward; then both devices wait 40 ms for their hosts."""
    one = training().changed("layers.4", late_ns=60 * MS)
    found = analysed(tmp_path, one, one.changed("layers.0", forward_ns=16 * MS))
    late = [one for one in entries(found).values() if one.cause in ("late_rank", "uneven_ranks")]
    assert sum(one.ns for one in late) > 3 * MS, "the waiting stays in the ledger"
    assert not [one for one in late if one.told]


@st.composite
def jobs(draw: st.DrawFn) -> list[Schedule]:
    """One to four ranks of one program, with whatever a script does besides training."""
    one = replace(
        draw(schedules()),
        loading_ns=draw(st.sampled_from([0, 0, 3 * MS])),
        evaluations=draw(st.sampled_from([0, 0, 1])),
        host_copies=draw(st.sampled_from([0, 0, 2])),
        allocations=draw(st.sampled_from([0, 0, 2])),
        allocation_ns=draw(st.integers(0, MS)),
        pageable_input=draw(st.booleans()),
        pause_ns=draw(st.sampled_from([0, 0, 4 * MS])),
        optimizer_kernels=draw(st.sampled_from([1, 30])),
        outside=draw(
            st.sampled_from([(), (Outside(op="all_reduce", count=3, transfer_ns=50_000, numel=2),)])
        ),
    )
    ranks = draw(st.integers(1, one.shard * one.replicas))
    return [one.scaled(draw(st.sampled_from([1.0, 1.0, 1.4]))) for _ in range(ranks)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranks=jobs())
def test_the_ledger_of_any_job_sums_to_its_steps(
    ranks: list[Schedule], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Causes sum to each step, entries to all steps; no gain exceeds its cause; one order everywhere."""
    found = analysed(tmp_path_factory.mktemp("job"), *ranks)
    ledger = found.ledger
    assert ledger is not None
    assert sum(entry.total_ns for entry in ledger.entries) == ledger.total_ns
    assert sum(step.duration_ns for step in ledger.steps) == ledger.total_ns
    for step in ledger.steps:
        assert sum(step.causes_ns.values()) == step.duration_ns
    for entry in ledger.entries:
        if entry.remedy is not None and entry.remedy.gain_ns is not None:
            assert 0 <= entry.remedy.gain_ns <= entry.ns * (1 + 1e-9), entry.id
        reasons = [place.why for place in entry.places if place.why is not None]
        assert all(" " in why for why in reasons), reasons
    proposed = [entry for entry in ledger.entries if entry.told]
    assert ledger.entries[: len(proposed)] == proposed
    if proposed:
        assert proposed[0].said in found.verdict[0]
    same = [one.id for one in found.findings if one.severity in ("high", "medium") and one.change]
    assert set(same) <= {one.id for one in proposed} | {"anomaly_detection", "uneven_shards"}
