"""One row per accelerator is enough: the same run is analysed the same on each of them.

A synthetic CUDA trace is written down as another kind would write it: categories, runtime calls, names of
copies and of collective kernels. Collectives carry no metadata, so that their kind comes from names alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from synthetic import Layer, Schedule, record, transformer, write

from fsdp2prof import backends
from fsdp2prof.analyzers.trace import collective_names
from fsdp2prof.analyzers.trace.analysis import analyze_trace
from fsdp2prof.backends import BACKENDS, Backend
from fsdp2prof.readers.trace.chrome_trace import read_trace

ACME = Backend(
    name="Acme NPU",
    device_type="npu",
    calls=("npu_api",),
    kernel="npu_kernel",
    copy="npu_copy",
    fill="npu_fill",
    records=("npu_range",),
    waits=re.compile(r"npuFinish\w*"),
    copies=re.compile(r"npuMove\w*"),
    blocking_copies=re.compile(r"npuMove"),
    graph_launches=re.compile(r"npuReplay"),
    device_copies=re.compile(r"dev2dev"),
    collective_kernels=re.compile(r"acmecl"),
    collective_ranges="acmecl:",
)
"""Of no maker: nothing about it is known but this row."""

TO_ACME = {
    "cuda_runtime": "npu_api",
    "cuda_driver": "npu_api",
    "kernel": "npu_kernel",
    "gpu_memcpy": "npu_copy",
    "gpu_memset": "npu_fill",
    "gpu_user_annotation": "npu_range",
    "cudaStreamSynchronize": "npuFinishQueue",
    "cudaMemcpyAsync": "npuMoveLater",
    "cudaMemsetAsync": "npuFill",
    "cudaGraphLaunch": "npuReplay",
    "cudaLaunchKernel": "npuRun",
    "ncclDevKernel_": "acmecl_",
    "nccl:": "acmecl:",
    "PtoP (Device -> Device)": "dev2dev",
}
TO_XPU = {
    "cuda_runtime": "xpu_runtime",
    "cuda_driver": "xpu_driver",
    "cudaStreamSynchronize": "urQueueFinish",
    "cudaMemcpyAsync": "urEnqueueUSMMemcpy",
    "cudaMemsetAsync": "urEnqueueUSMFill",
    "cudaGraphLaunch": "urEnqueueCommandBufferExp",
    "cudaLaunchKernel": "urEnqueueKernelLaunch",
    "ncclDevKernel_": "oneccl_",
    "nccl:": "xccl:",
    "PtoP (Device -> Device)": "D2D (Device -> Device)",
}
TO_ROCM = {
    "cudaStreamSynchronize": "hipStreamSynchronize",
    "cudaMemcpyAsync": "hipMemcpyAsync",
    "cudaMemsetAsync": "hipMemsetAsync",
    "cudaGraphLaunch": "hipGraphLaunch",
    "cudaLaunchKernel": "hipExtModuleLaunchKernel",
    "ncclDevKernel_": "rcclDevKernel_",
    "PtoP (Device -> Device)": "DeviceToDevice",
}
LAYERS = (*transformer(2), Layer(fqn="layers.2", sync=True))


def schedules() -> dict[str, Schedule]:
    return {
        "names only": Schedule(roots=(LAYERS,), metadata=False),
        "copy engine": Schedule(roots=(LAYERS,), flavour="copy_engine"),
        "graph": Schedule(roots=(transformer(2),), graph=True, metadata=False),
    }


def analysed(file: Path) -> dict[str, Any]:
    result = asdict(analyze_trace([(read_trace(file), None)]))
    for rank in result["ranks"]:
        del rank["source"], rank["device_type"]
    for row in (*result["host_syncs"], *result["host_sync_places"]):
        row.pop("call", None)
    return result


def written_as(file: Path, words: dict[str, str]) -> Path:
    """The same trace in another kind's words."""
    text = file.read_text()
    for word, theirs in words.items():
        text = re.sub(rf'(?<=")((?:Memcpy )?){re.escape(word)}', rf"\g<1>{theirs}", text)
    other = file.with_name("rank0_other.json")
    other.write_text(text)
    return other


@pytest.fixture
def with_acme(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(backends, "BACKENDS", (*BACKENDS, ACME))
        forget_names()
        yield
    forget_names()


def forget_names() -> None:
    """What a name means is remembered, and depends on the kinds that are known."""
    for one in (*vars(backends).values(), collective_names.is_collective_kernel):
        if hasattr(one, "cache_clear"):
            one.cache_clear()


@pytest.mark.usefixtures("with_acme")
@pytest.mark.parametrize("schedule", schedules().values(), ids=schedules())
@pytest.mark.parametrize(
    ("words", "device_type"),
    [(TO_ACME, "npu"), (TO_XPU, "xpu"), (TO_ROCM, "cuda")],
    ids=["acme", "xpu", "rocm"],
)
def test_the_same_run_on_every_kind(
    tmp_path: Path, schedule: Schedule, words: dict[str, str], device_type: str
) -> None:
    (recording,) = record(schedule)
    cuda = write(recording, tmp_path / "rank0_trace.json", head=False)
    other = written_as(cuda, words)
    assert read_trace(other).device.type == device_type
    expected, found = analysed(cuda), analysed(other)
    assert expected["groups"]
    assert schedule.graph or expected["host_syncs"]
    for result in (expected, found):
        for entry in result["ledger"]["entries"]:
            entry["evidence"].pop("call", None)  # the runtime's own name of a synchronization
    for key in expected:
        assert found[key] == expected[key], key


def test_without_its_row_a_kind_is_unknown(tmp_path: Path) -> None:
    """Else the test above would prove nothing."""
    (recording,) = record(Schedule(roots=(LAYERS,), metadata=False))
    other = written_as(write(recording, tmp_path / "rank0_trace.json", head=False), TO_ACME)
    assert read_trace(other).device.type == "cpu"
    assert analysed(other) != analysed(tmp_path / "rank0_trace.json")


@pytest.mark.parametrize("category", ["xpu_sync", "cuda_sync"])
def test_records_on_a_device_are_no_work(tmp_path: Path, category: str) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 10, "dur": 5, "args": {}},
        {"ph": "X", "cat": category, "name": "wait", "pid": 0, "tid": 7, "ts": 20, "dur": 50, "args": {}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2},
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    (step,) = analyze_trace([(read_trace(file), None)]).ranks[0].steps
    assert (step.duration_ns, step.breakdown_ns.compute) == (5_000, 5_000)


@pytest.mark.parametrize(
    ("call", "blocks", "may_copy"),
    [
        ("cudaStreamSynchronize", True, False),
        ("cuCtxSynchronize", True, False),
        ("hipEventSynchronize", True, False),
        ("hipMemcpyWithStream", True, True),
        ("cudaMemcpy", True, True),
        ("cudaMemcpyAsync", False, True),
        ("urQueueFinish", True, False),
        ("zeCommandListHostSynchronize", True, False),
        ("urEnqueueUSMMemcpy", False, True),
        ("cudaLaunchKernel", False, False),
        ("urEnqueueEventsWaitWithBarrier", False, False),
        ("cudaStreamWaitEvent", False, False),
    ],
)
def test_what_calls_do(call: str, blocks: bool, may_copy: bool) -> None:
    assert backends.always_blocks(call) is blocks
    assert backends.waits_for_device(call) is (blocks and not may_copy)
    assert backends.may_block_for_copy(call) is may_copy
