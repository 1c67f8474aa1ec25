"""Every kind of input with a good sample of it, and what the product does with it."""

from __future__ import annotations

import gzip
import json
import pickle
import sqlite3
import tempfile
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from synthetic import Schedule, record, transformer
from synthetic import write as write_trace
from synthetic.nsys import write_nsys
from unit import test_watchdog_logs as watchdog_lines
from unit.test_bench import nccl_tests
from unit.test_trainer_configs import EXPECTED as TRAINERS

from fsdp2prof.analyzers.bench import bench_result
from fsdp2prof.estimators.config.catalog import builtin_config
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.documents import parse_toml, parse_yaml
from fsdp2prof.estimators.config.hardware import HardwareSpec, known_hardware
from fsdp2prof.estimators.config.inputs import EstimateSpec, load_config, make_spec
from fsdp2prof.estimators.config.measured import read_measured
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.trainers import read_trainer_files
from fsdp2prof.estimators.simulate.program import Program
from fsdp2prof.estimators.step import program_of, simulate_program
from fsdp2prof.estimators.timeline.execution_trace import program_of_trace
from fsdp2prof.measured import CollectiveTimes, Measured, RateTimes
from fsdp2prof.readers.execution_trace import read_execution_trace
from fsdp2prof.readers.memory.recording import read_memory
from fsdp2prof.recorder.memory.recording_file import write_recording
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.run_directory import STEPS_FILE, SUMMARY_FILE, TRACE_FILE, rank_folder
from fsdp2prof.workflows.analyze import analyze_memory, analyze_run, analyze_trace
from fsdp2prof.workflows.balance import check_balance
from fsdp2prof.workflows.check import check_run
from fsdp2prof.workflows.compare import compare, write_baseline
from fsdp2prof.workflows.hang import analyze_hang
from fsdp2prof.workflows.inspect import inspect_checkpoint, inspect_run_sharding
from fsdp2prof.workflows.job.job_files import open_job
from fsdp2prof.workflows.nccl import analyze_nccl
from fsdp2prof.workflows.summarise_rank import summarise_rank
from fsdp2prof.workflows.watch import watch_run
from support import flight_dumps
from support.checkpoints import written_checkpoint
from support.fuzzing import Kind
from support.nccl_files import inspector_lines, log_lines
from support.run_checks import two_ranks
from support.snapshots import SnapshotBuilder
from support.watched import watched_steps

__all__ = ["KINDS"]


def _json(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


def _pickle(document: Any) -> bytes:
    return pickle.dumps(document, protocol=4)


def _bytes(document: Any) -> bytes:
    return document if isinstance(document, bytes) else _json(document)


def _trace(folder: Path) -> Any:
    (recording, *_) = record(Schedule(roots=(transformer(1),), shard=2))
    document = json.loads(write_trace(recording, folder / "good.json").read_text())
    (folder / "good.json").unlink()
    return document


def _snapshot(_: Path) -> Any:
    frames = [{"filename": "train.py", "line": 3, "name": "step"}]
    builder = SnapshotBuilder().label("START", "ProfilerStep#3").alloc(100, 512, frames=frames)
    builder.free(100, 512).alloc(200, 7).label("END", "ProfilerStep#3")
    builder.event("oom", 0, 10**9, device_free=5, frames=frames)
    builder.segment(100, [(512, 512, "active_allocated"), (512, 0, "inactive")])
    return builder.snapshot()


def _npz(folder: Path) -> bytes:
    builder = SnapshotBuilder().label("START", "a").alloc(100, 10).free(100, 10).alloc(200, 7)
    (one,) = read_memory(builder.write(folder / "snapshot.pickle"))
    write_recording(folder / "memory.npz", one)
    arrays = dict(np.load(folder / "memory.npz"))
    (folder / "snapshot.pickle").unlink()
    np.savez(folder / "plain.npz", **arrays)  # without compression spoiled bytes reach the arrays
    content = (folder / "plain.npz").read_bytes()
    (folder / "plain.npz").unlink()
    return content


def _run(folder: Path) -> Any:
    run = two_ranks()
    documents: dict[str, Any] = {"run.json": _builtin(run.info)}
    for one in run.ranks:
        (folder / rank_folder(one.rank)).mkdir(exist_ok=True)
        documents[f"{rank_folder(one.rank)}/manifest.json"] = _builtin(one.manifest)
    for name in documents:
        (folder / name).touch()
    return documents


def _builtin(document: Any) -> Any:
    return json.loads(msgspec.json.encode(document))


def _use_run(folder: Path) -> list[Any]:
    """The documents lie in one file, spoiled together; each goes where it belongs."""
    try:
        documents = json.loads((folder / "all.json").read_bytes())
    except (ValueError, RecursionError):
        documents = {}
    for name in ("run.json", *(f"{rank_folder(rank)}/manifest.json" for rank in range(2))):
        content = documents.get(name) if isinstance(documents, dict) else (folder / "all.json").read_bytes()
        (folder / name).write_bytes(content if isinstance(content, bytes) else _json(content))
    return [check_run(folder), inspect_run_sharding(folder), analyze_run(open_job(folder))]


def _checkpoint(folder: Path) -> bytes:
    state = {"model": {"weight": torch.zeros(3, 5)}, "step": 1}
    content = (written_checkpoint(folder / "dcp", state) / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(content)
    return content


def _dump(_: Path) -> Any:
    calls = [flight_dumps.call("all_reduce", 8, seq, state="started") for seq in (1, 2)]
    return flight_dumps.document(calls, {"0": [0, 1]})


def _stacks(_: Path) -> bytes:
    lines = [
        "Main thread 0x1 [MainThread] (most recent call first):",
        '  File "/env/site-packages/torch/utils/data/dataloader.py", line 9 in _get_data',
        '  File "/home/me/train.py", line 7 in main',
        'Thread 4711 (idle): "MainThread"',
        "    clock_nanosleep (libc.so.6)",
        "    main (/home/me/train.py:7)",
    ]
    return "\n".join(lines * 3).encode()


def _config(_: Path) -> Any:
    return {
        "model": "llama3-8b",
        "layers": 1,
        "hardware": "h100-sxm",
        "mesh": {"dp_shard": 4, "tp": 1},
        "policy": {"ac": "full", "batch_size": 1, "seq_len": 16, "wrap": ["block"], "loss": "chunked:2"},
    }


def _nsys(folder: Path) -> Any:
    """The rows of a report by table, behind the statement that makes it."""
    with closing(
        sqlite3.connect(write_nsys(record(Schedule(roots=(transformer(1),))), folder / "a"))
    ) as report:
        tables = report.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        rows = {sql: [list(row) for row in report.execute(f"SELECT * FROM {name}")] for name, sql in tables}
    (folder / "a").unlink()
    return rows


def _database(document: Any) -> bytes:
    """Write what is left of a report; a value that no column can hold is its text."""
    if isinstance(document, bytes):
        return document
    with tempfile.TemporaryDirectory() as folder, closing(sqlite3.connect(Path(folder, "a"))) as report:
        report.execute("PRAGMA synchronous = OFF")
        for sql, rows in document.items() if isinstance(document, dict) else []:
            name = str(sql).partition("(")[0].rpartition(" TABLE ")[2].strip()
            try:
                report.execute(str(sql).replace(" NOT NULL", "").replace(" PRIMARY KEY", ""))
                for row in rows:
                    marks = ", ".join("?" * len(row))
                    report.execute(f"INSERT INTO {name} VALUES ({marks})", [*map(_storable, row)])
            except (sqlite3.Error, TypeError, OverflowError, UnicodeEncodeError):
                continue
        report.commit()
        return Path(folder, "a").read_bytes()


def _inspector(folder: Path) -> Any:
    records = [("all_gather", number, 2000, 100) for number in range(4)]
    return [json.loads(line) for line in inspector_lines(0, records, version="v4.3", name="dp")]


def _observed(folder: Path) -> Any:
    """An execution trace of one all-gather and one product."""

    def node(number: int, parent: int, name: str, schema: str, *shapes: list[int]) -> dict[str, Any]:
        told = {
            "values": [None] * len(shapes),
            "shapes": list(shapes),
            "types": ["Tensor(float)"] * len(shapes),
        }
        strides = [[1] * len(shape) for shape in shapes]
        return {
            "id": number,
            "ctrl_deps": parent,
            "name": name,
            "inputs": {**told, "strides": strides},
            "outputs": {"values": [], "shapes": [], "types": [], "strides": []},
            "attrs": [{"name": "op_schema", "type": "string", "value": schema}],
        }

    gather = (
        "c10d::_allgather_base_(Tensor a, Tensor b, __torch__.torch.classes.c10d.ProcessGroup p) -> Tensor"
    )
    return {
        "schema": "1.1.1-chakra.0.0.4",
        "nodes": [
            node(1, 0, "[pytorch|profiler|execution_trace|thread]", ""),
            node(2, 1, "FSDP::all_gather (layers.0)", ""),
            node(3, 2, "c10d::_allgather_base_", gather, [16], [8]),
            node(4, 1, "aten::mm", "aten::mm(Tensor self, Tensor mat2) -> Tensor", [2, 8], [8, 4]),
        ],
    }


def _use_observed(at: Path) -> None:
    program_of_trace(read_execution_trace(at / "et.json"), MeshSpec(dp_shard=2), 16)


def _summary(folder: Path) -> Any:
    """What a rank keeps of its steps with ``record --summary``."""
    trace = _trace(folder)
    _write_run(folder)
    rank = folder / rank_folder(0)
    (rank / TRACE_FILE).write_bytes(_json(trace))
    summarise_rank(rank)
    return json.loads((rank / SUMMARY_FILE).read_bytes())


def _write_run(folder: Path) -> None:
    for name, content in _run(folder).items():
        (folder / name).write_bytes(_json(content))


def _watched(folder: Path) -> Any:
    """The steps of one of two ranks."""
    _write_run(folder)
    other = [_builtin(step) for step in watched_steps(1, busy_ms=95)]
    (folder / rank_folder(1) / STEPS_FILE).write_bytes(_json_lines(other))
    return [_builtin(step) for step in watched_steps(0)]


def _use_watched(at: Path) -> list[Any]:
    return [watch_run(at, window=10, tokens_per_step=1000), check_balance(open_job(at))]


def _hardware(_: Path) -> Any:
    return {"accelerators": {"some-gpu": {**_builtin(known_hardware()["h100-sxm"]), "aliases": []}}}


def _bench(_: Path) -> Any:
    measured = Measured(
        device_type="cuda", device="Some GPU", backend="nccl", world_size=4, ranks_per_node=4,
        memory_bytes=80 << 30, units=100, torch="2.13.0", seconds=1.0,
        collectives=[
            CollectiveTimes(op=op, mesh_dim="dp", ranks=4, payload_bytes=size, times_ns=[size, 2 * size])
            for op in ("all_gather", "reduce_scatter") for size in (4096, 1 << 20, 64 << 20)
        ],
        rates=[
            RateTimes(kind=kind, dtype="bfloat16", size="some", amount=10**12, times_ns=[10**7])
            for kind in ("matmul", "attention", "copy", "operator", "launch")
        ],
    )  # fmt: skip
    return json.loads(str(RENDERERS["json"].render(build(bench_result(measured)), RenderOptions())))


@cache
def _small_step() -> tuple[Program, EstimateSpec]:
    """Commands of a step, which do not depend on the hardware."""
    spec = make_spec({**_config(Path()), "hardware": None})
    return program_of(spec.model, spec.mesh, spec.policy), spec


def _use_hardware(file: Path) -> Any:
    program, spec = _small_step()
    cluster = Cluster(hardware=HardwareSpec.parse(str(file)))
    return simulate_program(program, spec.model, spec.mesh, spec.policy, cluster).estimate


def _toml(document: Any) -> bytes:
    """Tables are inline; what TOML cannot hold is its text."""

    def value(item: Any) -> str:
        if isinstance(item, dict):
            return (
                "{" + ", ".join(f"{json.dumps(str(key))} = {value(one)}" for key, one in item.items()) + "}"
            )
        if isinstance(item, list):
            return "[" + ", ".join(map(value, item)) + "]"
        return json.dumps(str(item) if item is None else item)

    items = document.items() if isinstance(document, dict) else {"value": document}.items()
    lines = [f"{json.dumps(str(key))} = {value(item)}" for key, item in items]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _of_trainer(name: str, text: str) -> Kind:
    is_yaml = name.endswith(".yaml")
    document = parse_yaml(text) if is_yaml else parse_toml(text)

    def use(at: Path) -> None:
        values = read_trainer_files([at / name], world_size=8).values
        builtin_config(make_spec(values).model.source)

    return Kind(name, lambda _: document, _json if is_yaml else _toml, use)


def _measured_runs(_: Path) -> Any:
    return [
        {"model": "llama3-8b", "mesh": "dp_shard=8", "batch_size": 1, "seq_len": 8192, "step_ms": 1500},
        {"model": "llama3-8b", "mesh": "dp_shard=8", "policy": {"ac": "full"}, "mfu": "45%"},
    ]


def _csv(_: Path) -> bytes:
    head = b"model,mesh,batch_size,ac,tokens_per_s_per_gpu\n"
    return head + b"llama3-8b,dp_shard=8,2,full,5600\nllama3-70b,dp_shard=64,1,,800\n"


def _use_measured_runs(file: Path) -> None:
    for one in read_measured(file):
        make_spec(one.values)


def _watchdog(folder: Path) -> bytes:
    lines = [f"step 34 loss 1.2\n{watchdog_lines.timed_out(0, 7)}", watchdog_lines.at_work(0, 7, 8, 6)]
    lines += [watchdog_lines.asked(1, 6, 6), watchdog_lines.at_work_before(1, 7, 7, 6, group="PG 3 Rank")]
    return "\n".join(lines * 2).encode()


def _json_lines(document: Any) -> bytes:
    lines = document if isinstance(document, list) else [document]
    return b"\n".join(map(_json, lines)) + b"\n"


def _storable(value: Any) -> Any:
    fits = isinstance(value, float | str | None) or (isinstance(value, int) and abs(value) < 1 << 63)
    return value if fits else repr(value)


def _baseline(folder: Path) -> Any:
    trace = _trace(folder)
    (folder / "trace.json").write_text(json.dumps(trace))
    return json.loads(msgspec.json.encode(analyze_trace(open_job(folder / "trace.json"))))


def _sums(folder: Path) -> Any:
    trace = _trace(folder)
    (folder / "trace.json").write_text(json.dumps(trace))
    kept = write_baseline(folder / "sums.json", folder / "trace.json")
    return json.loads(msgspec.json.encode(kept))


KINDS = {
    "trace": Kind("rank0.json", _trace, _json, lambda at: analyze_trace(open_job(at / "rank0.json"))),
    "gzip": Kind(
        "rank0.json.gz",
        lambda at: gzip.compress(_json(_trace(at)), mtime=0),
        _bytes,
        lambda at: analyze_trace(open_job(at / "rank0.json.gz")),
    ),
    "nsys": Kind("rank0.sqlite", _nsys, _database, lambda at: analyze_trace(open_job(at / "rank0.sqlite"))),
    "snapshot": Kind(
        "rank0.pickle", _snapshot, _pickle, lambda at: analyze_memory(open_job(at / "rank0.pickle"))
    ),
    "npz": Kind("memory.npz", _npz, _bytes, lambda at: read_memory(at / "memory.npz") and None),
    "run": Kind("all.json", _run, _json, _use_run),
    "checkpoint": Kind(".metadata", _checkpoint, _bytes, lambda at: inspect_checkpoint(at, None)),
    "flight recorder": Kind("fr_0.json", _dump, _json, lambda at: analyze_hang(at)),
    "execution trace": Kind("et.json", _observed, _json, _use_observed),
    "nccl inspector": Kind("node.log", _inspector, _json_lines, lambda at: analyze_nccl(at)),
    "nccl log": Kind(
        "nccl.out", lambda at: "\n".join(log_lines(0, calls=3)).encode(), _bytes, lambda at: analyze_nccl(at)
    ),
    "stacks": Kind("stacks_0.txt", _stacks, _bytes, lambda at: analyze_hang(at)),
    "flight pickle": Kind("fr_0", _dump, _pickle, lambda at: analyze_hang(at)),
    "config": Kind(
        "config.yaml",
        _config,
        _json,
        lambda at: make_spec(load_config(at / "config.yaml")).model.kind and None,
    ),
    "baseline": Kind("base.json", _baseline, _json, lambda at: compare(at / "base.json", at / "trace.json")),
    "sums": Kind("sums.json", _sums, _json, lambda at: compare(at / "sums.json", at / "trace.json")),
    "summary": Kind(
        f"{rank_folder(0)}/{SUMMARY_FILE}", _summary, _json, lambda at: analyze_run(open_job(at))
    ),
    "watched": Kind(f"{rank_folder(0)}/{STEPS_FILE}", _watched, _json_lines, _use_watched),
    "hardware": Kind("it.yaml", _hardware, _json, lambda at: _use_hardware(at / "it.yaml")),
    "nccl-tests": Kind(
        "it.txt",
        lambda _: nccl_tests("all_gather_perf").encode(),
        _bytes,
        lambda at: _use_hardware(at / "it.txt"),
    ),
    "measured": Kind("it.yaml", _measured_runs, _json, lambda at: _use_measured_runs(at / "it.yaml")),
    "measured csv": Kind("it.csv", _csv, _bytes, lambda at: _use_measured_runs(at / "it.csv")),
    "watchdog log": Kind("train.log", _watchdog, _bytes, lambda at: analyze_hang(at)),
    "toml": Kind(
        "config.toml",
        _config,
        _toml,
        lambda at: make_spec(load_config(at / "config.toml")).model.kind and None,
    ),
    **{name: _of_trainer(name, text) for name, (text, _) in TRAINERS.items()},
    "bench": Kind("it.json", _bench, _json, lambda at: _use_hardware(at / "it.json")),
}
"""Name -> kind."""
