"""Whatever stands in a document, reading and analysing it ends in a result or in an error of ours."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.mutations import mutated
from support.snapshots import SnapshotBuilder
from synthetic import Schedule, record, transformer, write

from fsdp2prof.errors import Fsdp2ProfError
from fsdp2prof.estimators.config.inputs import load_config, make_spec
from fsdp2prof.manifest import (
    DeviceInfo,
    MeshInfo,
    OptimizerInfo,
    ParameterInfo,
    ParamGroupInfo,
    ProcessGroupInfo,
    RankManifest,
    RunInfo,
    StepInfo,
    TensorInfo,
)
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.run_directory import rank_folder
from fsdp2prof.workflows.analyze import analyze_memory, analyze_run, analyze_trace
from fsdp2prof.workflows.job.job_files import open_job

TIMES = 60


def outcomes(documents: Any, store: Callable[[Any], None], use: Callable[[], Any]) -> Counter[str]:
    """Store and use each document; any exception but ours fails the test."""
    found: Counter[str] = Counter()
    for document in documents:
        store(document)
        result = refusal = None
        try:
            result = use()
        except Fsdp2ProfError as error:
            refusal = str(error)
        if refusal is not None:
            assert "\n" not in refusal
            found["refused"] += 1
            continue
        found["used"] += 1
        if result is not None and found["used"] % 10 == 0:
            for renderer in RENDERERS.values():
                renderer.render(build(result), RenderOptions(source="it", verbose=True))
    return found


def write_json(path: Path, document: Any) -> None:
    path.write_bytes(json.dumps(document).encode("utf-8", "surrogatepass"))


def write_pickle(path: Path, document: Any) -> None:
    path.write_bytes(pickle.dumps(document))


def cpu_trace() -> dict[str, Any]:
    """Two steps with a gather, a product, a reduction and memory events."""
    events: list[dict[str, Any]] = []

    def add(category: str, name: str, start: float, duration: float, thread: int = 1, **args: Any) -> None:
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": thread, "ts": start, "dur": duration}
            | {"args": args}
        )

    floats: dict[str, Any] = {"Input type": ["float", "float"]}
    for step in (3, 4):
        at = step * 1000.5
        add("user_annotation", f"ProfilerStep#{step}", at, 900)
        add("user_annotation", "FSDP::all_gather (layers.0)", at + 20, 30)
        gathered: dict[str, Any] = {"Input Dims": [[64], [32]], **floats}
        add("cpu_op", "c10d::_allgather_base_", at + 25, 10, **{"External id": step}, **gathered)
        add("user_annotation", "gloo:all_gather", at + 27, 20, 9, **{"Input Dims": [[32]]})
        add("cpu_op", "aten::mm", at + 100, 300, **{"Input Dims": [[8, 16], [16, 4]], **floats})
        add("user_annotation", "FSDP::post_backward_reduce (layers.0)", at + 560, 50)
        add("cpu_op", "c10d::_reduce_scatter_base_", at + 565, 10, **{"Input Dims": [[32], [64]], **floats})
        add("user_annotation", "gloo:all_reduce", at + 567, 20, 9, **{"Input Dims": [[64]]})
        add("user_annotation", "Optimizer.step#AdamW.step", at + 700, 100)
        for number, size in enumerate((400, 200, -400, -200)):
            args = {"Device Type": 0, "Device Id": -1, "Addr": 100 + number % 2, "Bytes": size}
            args |= {"Total Allocated": 600, "Total Reserved": 0}
            event = {"ph": "i", "name": "[memory]", "pid": 7, "tid": 1, "ts": at + 110 + number}
            events.append({**event, "args": args})
    group = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cpu:gloo", "ranks": [0, 1]}
    return {
        "distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 2, "pg_config": [group]},
        "deviceProperties": [{"id": 0, "name": "x", "totalGlobalMem": 5, "computeMajor": 9}],
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "traceEvents": events,
    }


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_traces(tmp_path: Path, kind: str) -> None:
    document = cpu_trace()
    if kind == "cuda":
        (recording, *_) = record(Schedule(roots=(transformer(1),), shard=2))
        document = json.loads(write(recording, tmp_path / "good.json").read_text())
        (tmp_path / "good.json").unlink()
    file = tmp_path / "rank0.json"
    for analyse, seed in ((analyze_trace, 1), (analyze_memory, 2)):
        found = outcomes(
            mutated(document, TIMES, seed),
            lambda spoiled: write_json(file, spoiled),
            partial(lambda analyse: analyse(open_job(file)), analyse),
        )
        assert found["refused"] > 0
        assert found["used"] > 0 or kind == "cuda"


def test_snapshots(tmp_path: Path) -> None:
    frames = [{"filename": "train.py", "line": 3, "name": "step"}]
    builder = SnapshotBuilder().label("START", "ProfilerStep#3").alloc(100, 512, frames=frames)
    builder.event("segment_map", 9000, 4096).free(100, 512).alloc(200, 7, pool_id=(1, 0))
    builder.label("END", "ProfilerStep#3").event("segment_unmap", 9000, 2048)
    builder.event("oom", 0, 10**9, device_free=5, frames=frames)
    builder.segment(100, [(512, 512, "active_allocated"), (512, 0, "inactive")], is_expandable=True)
    file = tmp_path / "rank0.pickle"
    found = outcomes(
        mutated(builder.snapshot(), 4 * TIMES, 3),
        lambda spoiled: write_pickle(file, spoiled),
        lambda: analyze_memory(open_job(file)),
    )
    assert min(found["refused"], found["used"]) > 0


def manifest() -> RankManifest:
    parameter = ParameterInfo(
        fqn="w", global_shape=[4, 3], local_shape=[2, 3], padded_local_shape=[2, 3], dtype="float32",
        placement="Shard(0)", requires_grad=True, all_gather_dtypes=["float32"], all_gather_numels=[6],
        address=7, position=0,
    )  # fmt: skip
    group = ParamGroupInfo(
        root=0, fqn="layers.0", index=0, group_count=1,
        mesh=MeshInfo(device_type="cpu", shape=[2], dim_names=["dp_shard"], dim_groups=["0"]),
        shard_group="0", reduce_scatter_group="0", all_reduce_group=None, post_forward_group=None,
        shard_world_size=2, replicate_world_size=1, param_dtype=None, reduce_dtype=None, output_dtype=None,
        reshard_after_forward=True, offload=False, offload_pin_memory=False, unshard_async_op=False,
        requires_grad=True, parameters=[parameter],
    )  # fmt: skip
    return RankManifest(
        state="complete", world_size=2, host="a", versions={"torch": "2.13"},
        device=DeviceInfo(type="cpu"), param_groups=[group], micro_batches=1, gradient_syncs=1,
        process_groups=[ProcessGroupInfo(name="0", desc="mesh_dp_shard", backend="gloo", ranks=[0, 1])],
        optimizers=[OptimizerInfo(class_name="AdamW", state_bytes=9, param_groups=1, parameters=1)],
        steps=[StepInfo(step=n, start_ns=n, duration_ns=5) for n in range(3)], traced_steps=[3, 4],
        tensors=[TensorInfo(category="sharded_parameter", fqn="layers.0", address=7, nbytes=24)],
    )  # fmt: skip


def test_runs(tmp_path: Path) -> None:
    (tmp_path / rank_folder(0)).mkdir()
    write_json(tmp_path / rank_folder(0) / "trace.json.gz", cpu_trace())
    info = RunInfo(
        command=["python"],
        state="complete",
        exit_code=0,
        started_at="2026-01-01T10:00:00+00:00",
        world_size=2,
    )
    documents = {"run.json": info, f"{rank_folder(0)}/manifest.json": manifest()}
    good = {name: json.loads(msgspec.json.encode(document)) for name, document in documents.items()}

    def store(spoiled: dict[str, Any]) -> None:
        for name in good:
            write_json(tmp_path / name, spoiled.get(name))

    found = outcomes(mutated(good, 2 * TIMES, 4), store, lambda: analyze_run(open_job(tmp_path)))
    assert min(found["refused"], found["used"]) > 0


def test_configurations(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    good = {
        "model": "llama3-8b", "layers": 1, "hardware": "h100-sxm", "mesh": {"dp_shard": 4, "tp": 1},
        "policy": {
            "ac": "full", "batch_size": 1, "float8": None, "forward_prefetch": 0, "grad_accum": 1,
            "loss": "chunked:2", "offload": False, "optimizer": "adamw", "param_dtype": "bf16",
            "reshard": "default", "reshard_root": True, "seq_len": 16, "trainable": ".*", "wrap": ["block"],
            "extra_model": "gpt2", "sync": "each",
        },
    }  # fmt: skip

    def use() -> None:
        make_spec(load_config(file)).model.kind  # noqa: B018

    found = outcomes(mutated(good, 4 * TIMES, 5), lambda spoiled: write_json(file, spoiled), use)
    assert min(found["refused"], found["used"]) > 0
