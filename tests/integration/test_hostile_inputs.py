"""Files made to break a reader: each is read, or refused in one line; none hangs or fills the memory.

The command runs in a child with limits on time and memory, on spoiled files from elsewhere and on such of the
same kinds that are made here.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli import call
from synthetic import Schedule, record, transformer, write

from fsdp2prof.run_directory import STORAGE_COUNT_FILE, rank_folder

SECONDS = 120
MEMORY_BYTES = 4 << 30
"""Of address space; torch, which estimates import, takes half of it."""
HOSTILE = Path(os.environ.get("FSDP2PROF_REAL_DATA", "../shared/data")) / "hostile"


def shared(kind: str) -> list[Path]:
    folder = Path(__file__).resolve().parents[2] / HOSTILE / kind
    return sorted(folder.iterdir()) if folder.is_dir() else []


def ends_well(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command: a result, or one printable line and exit code 1 or 2."""
    ended = subprocess.run(
        [sys.executable, "-m", "fsdp2prof", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
    )
    assert ended.returncode in (0, 1, 2), ended.stderr
    assert "Traceback" not in ended.stderr
    if ended.returncode:
        assert ended.stdout == ""
        *progress, line = ended.stderr.splitlines()  # a line every ten seconds
        assert not any("error" in one for one in progress)
        assert line.startswith("error: ")
        assert line.isprintable()
        assert len(line) < 5000
    return ended


@contextmanager
def limited_memory() -> Iterator[None]:
    """Limit what this process may take on top of what it has, for what needs no child."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def run_of(memory: Path, root: Path) -> Path:
    """A CPU run of one rank with this recording."""
    folder = root / rank_folder(0)
    folder.mkdir(parents=True)
    for path, document in (
        (root / "run.json", {"schema": "fsdp2prof.run/1", "state": "complete", "world_size": 1}),
        (folder / "manifest.json", {"schema": "fsdp2prof.manifest/1", "state": "complete", "world_size": 1}),
    ):
        path.write_text(json.dumps(document))
    (folder / STORAGE_COUNT_FILE).write_bytes(memory.read_bytes())
    return root


@pytest.mark.real_data
class TestFromElsewhere:
    @pytest.mark.parametrize("file", shared("trace"), ids=lambda file: file.name)
    @pytest.mark.sampled(3)
    def test_traces(self, file: Path) -> None:
        ends_well("analyze", "trace", file)

    @pytest.mark.parametrize("file", shared("npz"), ids=lambda file: file.name)
    @pytest.mark.sampled(3)
    def test_recordings(self, file: Path, tmp_path: Path) -> None:
        assert ends_well("analyze", "memory", run_of(file, tmp_path / "run")).returncode == 1

    @pytest.mark.parametrize("file", shared("config"), ids=lambda file: file.name)
    @pytest.mark.sampled(3)
    def test_configurations(self, file: Path) -> None:
        assert ends_well("estimate", "comm", "--config", file).returncode == 1
        assert ends_well("estimate", "memory", "--config", file).returncode == 1


def spaces(path: Path) -> None:
    with gzip.open(path, "wb", 6) as file:
        file.write(b'{"traceEvents":[')
        for _ in range(400):
            file.write(b" " * (1 << 20))


def one_long_name(path: Path) -> None:
    with gzip.open(path, "wb", 6) as file:
        file.write(b'{"traceEvents":[{"ph":"X","name":"')
        for _ in range(400):
            file.write(b"a" * (1 << 20))


def tiny_events(path: Path) -> None:
    with gzip.open(path, "wb", 6) as file:
        file.write(b'{"traceEvents":[')
        for _ in range(400):
            file.write(b'{"ph":"X"},' * 100_000)


def nested(path: Path) -> None:
    deep = b"[" * 500_000 + b"]" * 500_000
    path.write_bytes(gzip.compress(b'{"traceEvents":[{"ph":"X","args":{"Input Dims":' + deep + b"}}]}", 1))


def threads(path: Path) -> None:
    label = {"ph": "X", "cat": "user_annotation", "name": "FSDP::pre_forward (a)", "pid": 1, "dur": 9}
    events = [{**label, "tid": number, "ts": number} for number in range(20_000)]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode(), 1))


def world(path: Path) -> None:
    head = {"rank": 0, "world_size": 10**12, "pg_config": [7, {"ranks": [10**30, -1, "a"]}]}
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    path.write_bytes(gzip.compress(json.dumps({"distributedInfo": head, "traceEvents": [event]}).encode()))


class TestTraces:
    @pytest.mark.parametrize("make", [spaces, one_long_name, tiny_events, nested, threads])
    def test_made_to_grow(self, make: Callable[[Path], None], tmp_path: Path) -> None:
        make(tmp_path / "rank0.json.gz")
        assert ends_well("analyze", "trace", tmp_path / "rank0.json.gz").returncode == 1

    def test_of_a_world_that_cannot_be(self, tmp_path: Path) -> None:
        world(tmp_path / "rank0.json.gz")
        assert ends_well("analyze", "trace", tmp_path).returncode == 0

    def test_with_a_time_that_cannot_be(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        event = '{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"dur":1,"ts":'
        for time in ("1e308", "9" * 400, "1e999999999", "-9223372036854775808"):
            (tmp_path / "rank0.json").write_text('{"traceEvents":[' + event + time + "}]}")
            with limited_memory():
                call(capfd, "analyze", "trace", tmp_path / "rank0.json").refused()


Refused = Callable[[Path, Path], None]


def spoiled(arrays: dict[str, Any], folder: Path) -> Path:
    np.savez_compressed(folder / "spoiled.npz", **arrays)
    return folder / "spoiled.npz"


class TestRecordings:
    @pytest.fixture
    def recording(self, tmp_path: Path) -> dict[str, Any]:
        from support.snapshots import SnapshotBuilder

        from fsdp2prof.readers.memory.recording import read_memory
        from fsdp2prof.recorder.memory.recording_file import write_recording

        builder = SnapshotBuilder().label("START", "a").alloc(100, 10).free(100, 10).alloc(200, 7)
        builder.segment(100, [(512, 10, "active_allocated")])
        (one,) = read_memory(builder.write(tmp_path / "snapshot.pickle"))
        write_recording(tmp_path / "memory.npz", one)
        return dict(np.load(tmp_path / "memory.npz"))

    @pytest.fixture
    def refused(self, capfd: pytest.CaptureFixture[str]) -> Refused:
        """Asserts that a run with this recording, made in a folder, is refused."""

        def refuse(memory: Path, folder: Path) -> None:
            with limited_memory():
                call(capfd, "analyze", "memory", run_of(memory, folder / "run")).refused()

        return refuse

    @pytest.mark.parametrize(
        ("column", "value"),
        [
            ("allocations.alloc_order", 10**9),
            ("allocations.alloc_order", -(2**63)),
            ("allocations.free_order", -2),
            ("allocations.stack", 5),
            ("allocations.size", 2**62),
            ("allocations.size", -1),
            ("labels.start_ns", -(2**63)),
            ("stacks.offsets", 2**62),
            ("blocks.address", 2**63 - 1),
        ],
    )
    def test_with_a_value_that_cannot_be(
        self, recording: dict[str, Any], tmp_path: Path, column: str, value: int, refused: Refused
    ) -> None:
        recording[column] = recording[column].copy()
        recording[column][-1] = value
        refused(spoiled(recording, tmp_path), tmp_path)

    def test_with_a_history_that_cannot_be(
        self, recording: dict[str, Any], tmp_path: Path, refused: Refused
    ) -> None:
        header = json.loads(recording["header"].tobytes()) | {"events": 10**15}
        recording["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
        refused(spoiled(recording, tmp_path), tmp_path)

    def test_of_other_kinds_of_arrays(
        self, recording: dict[str, Any], tmp_path: Path, refused: Refused
    ) -> None:
        plain = recording["labels.end_ns"]
        for number, array in enumerate((plain.reshape(-1, 1), plain.astype(">i8"), plain.astype(float))):
            folder = tmp_path / str(number)
            folder.mkdir()
            refused(spoiled({**recording, "labels.end_ns": array}, folder), folder)

    def test_of_archives_that_lie(self, recording: dict[str, Any], tmp_path: Path, refused: Refused) -> None:
        np.savez_compressed(tmp_path / "good.npz", **recording)
        with zipfile.ZipFile(tmp_path / "good.npz") as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        column = "allocations.size.npy"
        for number, (method, content) in enumerate(
            (
                (zipfile.ZIP_DEFLATED, members[column].replace(b"(2,)", b"(2000000000,)      ")[:-11]),
                (zipfile.ZIP_DEFLATED, members[column].replace(b"False", b"Falsm")),
                (zipfile.ZIP_DEFLATED, pickle.dumps([1])),
                (zipfile.ZIP_DEFLATED, members[column] + bytes(1 << 28)),
                (zipfile.ZIP_LZMA, members[column]),
            )
        ):
            lying = tmp_path / f"{number}.npz"
            with zipfile.ZipFile(lying, "w") as archive:
                for name, good in members.items():
                    archive.writestr(name, content if name == column else good, compress_type=method)
            refused(lying, tmp_path / str(number))


LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    + ["policy: {wrap: *a8}"]
)


class TestConfigurations:
    @pytest.mark.parametrize(
        "lines",
        [
            "layers: 80GiB",
            "layers: 1.0e+308",
            "layers: 1000000000",
            "layers: []",
            "mesh: {dp_shard: 1000000000000}",
            "mesh: {1: 2}",
            "mesh: [1]",
            "hardware: 1e999GiB",
            "hardware: [1]",
            "policy: {seq_len: 1000000000000}",
            "policy: {seq_len: 1000000, batch_size: 1000000}",
            "policy: {grad_accum: 1000000000}",
            f"policy: {{ac: 'every:{'9' * 5000}'}}",
            "policy: {loss: [1]}",
            "policy: {wrap: 1000000000000}",
            'policy: {reshard_root: "\\0"}',
            "policy: {trainable: '('}",
            f"policy: {{extra_model: {'a' * 10_000}}}",
            "policy: {extra_model: 'sys:exit'}",
            "policy: {1: 2, a: 3}",
            "policy: [1]",
            "policy: {ac: 2001-99-99}",
            LAUGHS,
            "policy: &p {wrap: *p}",
            "policy: " + "[" * 50_000,
        ],
    )
    def test_of_wrong_types_and_sizes(
        self, lines: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "config.yaml"
        file.write_text(f"model: qwen3-0.6b\n{lines}\n")
        with limited_memory():
            call(capfd, "estimate", "comm", "--config", file).refused()

    def test_in_toml(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "config.toml"
        for text in ("layers = 1e400", "policy = 7", "a = " + "[" * 50_000, "layers = " + "9" * 5000, "\xff"):
            file.write_text(f'model = "qwen3-0.6b"\n{text}\n', encoding="latin-1")
            with limited_memory():
                call(capfd, "estimate", "comm", "--config", file).refused()

    def test_a_model_of_a_thousand_million_layers(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "config.json"
        for values in ({"num_hidden_layers": 10**9}, {"text_config": {"n_layers": 10**9}}):
            file.write_text(json.dumps({"model_type": "llama", **values}))
            with limited_memory():
                call(capfd, "estimate", "comm", "--model", file).refused("is more than")
        file.write_text("[" * 100_000)
        with limited_memory():
            call(capfd, "estimate", "comm", "--model", file).refused()
            call(capfd, "estimate", "comm", "--model", "/dev/zero").refused()
        with file.open("wb") as sparse:
            sparse.truncate(30 << 30)
        with limited_memory():
            call(capfd, "estimate", "comm", "--model", file).refused("more than 16 MiB")


@pytest.mark.slow
def test_the_largest_that_is_allowed_ends(tmp_path: Path) -> None:
    """What the bounds let through takes seconds."""
    options = (
        "--layers",
        "4096",
        "--mesh",
        "dp_shard=1048576",
        "--batch-size",
        "16384",
        "--seq-len",
        "16384",
    )
    assert ends_well("estimate", "comm", "--model", "qwen3-0.6b", *options).returncode == 0
    assert ends_well("estimate", "checkpoint", "--model", "qwen3-0.6b", *options).returncode == 0


def test_the_trace_that_is_spoiled_is_good(tmp_path: Path) -> None:
    """The same command on the same files before somebody spoiled them."""
    (recording, *_) = record(Schedule(roots=(transformer(1),)))
    assert ends_well("analyze", "trace", write(recording, tmp_path / "rank0.json.gz")).returncode == 0
