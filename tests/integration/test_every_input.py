"""Every verb on every input of README's table: an answer, or one clear line; no traceback, no wait."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support import flight_dumps, nccl_files
from support.cli import call
from support.snapshots import Training
from synthetic import Schedule, record, transformer, write, write_run
from synthetic.nsys import write_nsys

from fsdp2prof.manifest import RankManifest, RunInfo
from fsdp2prof.run_directory import MANIFEST_FILE, RUN_FILE, SNAPSHOT_FILE, TRACE_FILE, rank_folder

VERBS: dict[str, Callable[[Path, Path], tuple[str | Path, ...]]] = {
    "analyze trace": lambda path, out: (path,),
    "analyze memory": lambda path, out: (path,),
    "analyze run": lambda path, out: (path,),
    "analyze hang": lambda path, out: (path,),
    "analyze nccl": lambda path, out: (path,),
    "report": lambda path, out: (path, "-o", out / "page.html", "-f"),
    "whatif": lambda path, out: (path,),
    "compare": lambda path, out: (path, path),
    "export perfetto": lambda path, out: (path, "-o", out / "all.json", "-f"),
    "export csv": lambda path, out: (path, "-o", out / "tables", "-f"),
    "export metrics": lambda path, out: (path,),
    "inspect sharding": lambda path, out: (path,),
    "check": lambda path, out: (path,),
    "watch": lambda path, out: (path, "--once"),
}


def schedule(**options: object) -> Schedule:
    return Schedule(roots=(transformer(2),), shard=2, **options)  # type: ignore[arg-type]


def one_trace(folder: Path) -> Path:
    return write(record(schedule())[0], folder / "trace.json")


def without_labels(folder: Path) -> Path:
    plain = schedule(labels="none", metadata=False)
    return write_run(record(plain, plain), folder / "traces")


def without_steps(folder: Path, *, device: bool = True) -> Path:
    """Of ``torch.profiler`` without ``prof.step()``."""
    path = one_trace(folder)
    document = json.loads(path.read_text())
    kinds = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_runtime", "cuda_driver")
    document["traceEvents"] = [
        event
        for event in document["traceEvents"]
        if not event["name"].startswith("ProfilerStep") and (device or event.get("cat") not in kinds)
    ]
    path.write_text(json.dumps(document))
    return path


def on_a_cpu(folder: Path) -> Path:
    return without_steps(folder, device=False)


def two_ranks(folder: Path) -> Path:
    return write_run(record(schedule(), schedule()), folder / "traces")


def report(folder: Path) -> Path:
    return write_nsys(record(schedule()), folder / "report.sqlite")


def run(folder: Path) -> Path:
    root = folder / "run"
    traces = two_ranks(folder)
    for rank in range(2):
        (root / rank_folder(rank)).mkdir(parents=True)
        shutil.copy(traces / f"rank{rank}_trace.json.gz", root / rank_folder(rank) / TRACE_FILE)
        Training().get("a", 10).drop("a").write(root / rank_folder(rank) / SNAPSHOT_FILE)
        manifest = RankManifest(rank=rank, world_size=2, state="complete")
        (root / rank_folder(rank) / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
    (root / RUN_FILE).write_bytes(msgspec.json.encode(RunInfo(state="complete", exit_code=0, world_size=2)))
    return root


def snapshots(folder: Path) -> Path:
    for rank in range(2):
        Training().get("a", 10 + rank).write(folder / f"rank{rank}_snapshot.pickle")
    return folder


def output_folder(folder: Path) -> Path:
    """As torchtitan leaves it."""
    write_run(record(schedule(), schedule()), folder / "profile_trace" / "iteration_10")
    target = folder / "memory_snapshot" / "iteration_10"
    target.mkdir(parents=True)
    snapshots(target)
    return folder


def dumps(folder: Path) -> Path:
    calls = {rank: [flight_dumps.call("all_gather", 8, seq) for seq in range(2 + rank)] for rank in range(2)}
    return flight_dumps.write(folder, calls, {"0": [0, 1]})


def inspector(folder: Path) -> Path:
    nccl_files.write_inspector(folder, 0, [("all_gather", 1, 2000, 400)])
    return folder


def nccl_logs(folder: Path) -> Path:
    nccl_files.logged(folder)
    return folder


def execution_trace(folder: Path) -> Path:
    path = folder / "execution_trace.json"
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": []}))
    return path


def empty_folder(folder: Path) -> Path:
    return folder


def empty_file(folder: Path) -> Path:
    (folder / "trace.json").touch()
    return folder / "trace.json"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "rank0_trace.json")
    return folder / "rank0_trace.json"


def a_socket(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(folder)  # a socket's address is short
        made.bind("rank0.pickle")
    return folder / "rank0.pickle"


def a_device(_: Path) -> Path:
    return Path("/dev/zero")


def link_to_everything(folder: Path) -> Path:
    (folder / "rank0.pickle").symlink_to("/")
    return folder / "rank0.pickle"


def run_of_pipes(folder: Path) -> Path:
    """Pipes, sockets and links where a run has its files."""
    root = run(folder)
    first, second = root / rank_folder(0), root / rank_folder(1)
    for file in (first / TRACE_FILE, first / MANIFEST_FILE, second / SNAPSHOT_FILE):
        file.unlink()
        os.mkfifo(file)
    for name in ("steps.jsonl", "nccl.log", "trace.json", "memory.pickle"):
        os.mkfifo(root / name)
    (second / "oom.pickle").symlink_to("/")
    return root


def run_with_a_pipe_for_its_node(folder: Path) -> Path:
    root = run(folder)
    (root / RUN_FILE).unlink()
    os.mkfifo(root / "run-node-00000.json")
    return root


def gzip_of_nothing(folder: Path) -> Path:
    (folder / "rank0_trace.json.gz").write_bytes(gzip.compress(b""))
    return folder


INPUTS = (
    one_trace, two_ranks, without_labels, without_steps, on_a_cpu, report, run, snapshots, output_folder,
    dumps, inspector, nccl_logs, execution_trace, empty_folder, empty_file, gzip_of_nothing, pipe, a_socket,
    a_device, link_to_everything, run_of_pipes, run_with_a_pipe_for_its_node,
)  # fmt: skip
ANSWERED = {
    "one_trace": ("analyze trace", "report", "whatif", "compare", "export perfetto", "export metrics"),
    "two_ranks": ("analyze trace", "report", "whatif", "compare", "export perfetto", "export csv"),
    "without_steps": ("analyze trace", "report", "whatif", "compare", "export perfetto"),
    "on_a_cpu": ("analyze trace", "report", "whatif", "compare", "export perfetto"),
    "report": ("analyze trace", "report", "whatif", "compare", "export perfetto"),
    "run": (
        "analyze trace",
        "analyze memory",
        "analyze run",
        "report",
        "whatif",
        "compare",
        "export perfetto",
    ),
    "snapshots": ("analyze memory", "report", "compare", "export metrics"),
    "output_folder": ("analyze trace", "analyze memory", "analyze run", "report", "whatif", "compare"),
    "dumps": ("analyze hang",),
    "inspector": ("analyze nccl",),
    "nccl_logs": ("analyze nccl",),
    "run_of_pipes": ("analyze trace", "analyze memory", "analyze run", "report"),
}
"""What must answer, not only refuse."""


@pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
def test_every_verb_answers_or_says_why_not(
    make: Callable[[Path], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    path = make(tmp_path / "in")
    for verb, arguments in VERBS.items():
        ended = call(capfd, *verb.split(), *arguments(path, tmp_path / "out"))
        said = f"{verb} {make.__name__}: {ended}"
        if verb in ANSWERED.get(make.__name__, ()):
            assert ended.code == 0, said
        if ended.code:
            assert ended.code in (1, 2, 3), said
            assert ended.err.startswith("error: "), said
            assert len(ended.err.strip().splitlines()) <= 2, said
        assert "Traceback" not in ended.err, said


def test_files_of_the_wrong_rank_are_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 1's folder holds rank 0's trace: the same bytes, and of another rank than the folder says."""
    root = run(tmp_path)
    shutil.copy(root / rank_folder(0) / TRACE_FILE, root / rank_folder(1) / TRACE_FILE)
    warnings = json.loads(call(capfd, "analyze", "trace", root, "--format", "json").out)["warnings"]
    assert any("the file of rank 0 is identical to that of 1 rank: 1" in line for line in warnings)
    assert any("its rank is 0, but the manifest beside it says 1" in line for line in warnings)
    (root / rank_folder(1) / MANIFEST_FILE).unlink()
    warnings = json.loads(call(capfd, "analyze", "trace", root, "--format", "json").out)["warnings"]
    assert any("a trace of rank 0, read as that of rank 1" in line for line in warnings)


def test_words_of_a_newer_version_are_read_as_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = run(tmp_path)
    manifest = json.loads((root / rank_folder(1) / MANIFEST_FILE).read_text())
    manifest |= {
        "state": "paused",
        "steps": [{"step": 3, "start_ns": 1, "duration_ns": 2, "kind": "replayed"}],
    }
    manifest["tensors"] = [{"category": "cached", "fqn": "", "address": 1, "nbytes": 2}]
    (root / rank_folder(1) / MANIFEST_FILE).write_text(json.dumps(manifest))
    about = json.loads((root / RUN_FILE).read_text()) | {"state": "resumed"}
    (root / RUN_FILE).write_text(json.dumps(about))
    found = json.loads(call(capfd, "analyze", "run", root, "--format", "json").out)
    assert (found["run"]["state"], found["trace"]["ranks"][1]["state"]) == ("other", "other")
    said = " ".join(found["run"]["messages"])
    for words in ("state 'resumed'", "kind 'replayed', state 'paused'", "tensors of cached"):
        assert words in said


def test_words_of_a_newer_version_in_results_are_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each word of a saved analysis in turn: it is read, and a warning names it where its set is fixed."""
    saved, newer = tmp_path / "saved.json", tmp_path / "newer.json"
    assert call(capfd, "analyze", "run", run(tmp_path), "-o", saved).code == 0
    text = saved.read_text()
    said = set()
    for word in sorted(set(re.findall(r':\s*"([a-z]+(?:_[a-z]+)*)"', text))):
        newer.write_text(re.sub(rf'(:\s*"){word}"', r'\1renamed"', text))
        ended = call(capfd, "compare", saved, newer, "--format", "json")
        assert ended.code == 0, f"{word}: {ended.err}"
        said |= set(re.findall(r"newer fsdp2prof wrote ('?\w+'?) (?:'renamed'|in a timeline)", ended.out))
    assert said >= {"kind", "severity", "basis", "confidence", "cause", "'renamed'", "measured_on"}
