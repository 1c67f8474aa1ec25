"""The trace cache: the same tables again, and only for the same bytes."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fsdp2prof.errors import TraceError
from fsdp2prof.readers.trace.chrome_trace import read_trace
from fsdp2prof.tables import Strings, Trace
from fsdp2prof.workflows.ranks import trace_cache
from fsdp2prof.workflows.ranks.trace_cache import cache_files, read_trace_cached


@pytest.fixture
def trace_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "traces"
    folder.mkdir()
    return write(folder / "t.json", "aten::mm")


def write(path: Path, name: str) -> Path:
    def event(cat: str, ts: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 2, "ts": ts, "dur": 1.5, "args": args}

    metadata = {"Collective name": "allreduce", "dtype": "Float", "Seq": 2**40, "Process Group Name": "0"}
    memory = {
        "ph": "i",
        "name": "[memory]",
        "pid": 1,
        "tid": 2,
        "ts": 7,
        "args": {"Bytes": -(2**33), "Addr": 2**47},
    }
    events = [
        event("cpu_op", 1.25, **{"Input Dims": [[2, 3]], "Input type": ["float"], "External id": 300}),
        event("user_annotation", 1694128201435418),
        event("kernel", 3, stream=7, device=0, correlation=70000, bytes=2**40, **metadata),
        memory,
        event("cuda_sync", 9, stream=20, device=0, correlation=5, wait_on_stream=7),
    ]
    groups = [{"pg_name": "0", "pg_desc": "größe", "backend": "nccl", "ranks": [0, 1]}]
    document = {"distributedInfo": {"world_size": 2, "pg_config": groups}, "traceEvents": events}
    path.write_text(json.dumps(document))
    return path


def as_plain(trace: Trace) -> dict[str, Any]:
    """Everything a trace holds, comparable with ==; array dtypes included."""
    plain: dict[str, Any] = {}
    for part in fields(trace):
        value = getattr(trace, part.name)
        if part.name in ("events", "collective_args", "labels", "shapes", "memory", "syncs"):
            for field in fields(value):
                column = getattr(value, field.name)
                kept = column.to_list() if isinstance(column, Strings) else (column.dtype, column.tolist())
                plain[f"{part.name}.{field.name}"] = kept
        else:
            plain[part.name] = value
    return plain


def test_the_cached_trace_equals_the_read_one(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = read_trace(trace_file, rank=3)
    first = read_trace_cached(trace_file, rank=3, worth_bytes=0)
    monkeypatch.setattr(trace_cache, "read_trace", lambda *a, **k: pytest.fail("decoded again"))
    second = read_trace_cached(trace_file, rank=3, worth_bytes=0)
    other_rank = read_trace_cached(trace_file, rank=5, worth_bytes=0)
    assert as_plain(first) == as_plain(second) == as_plain(fresh)
    assert (second.rank, other_rank.rank) == (3, 5)
    assert second.collective_args.seq.tolist() == [2**40]
    assert second.memory.bytes.tolist() == [-(2**33)]


def test_changed_bytes_are_read_again_even_with_size_and_time_unchanged(trace_file: Path) -> None:
    before = trace_file.stat()
    read_trace_cached(trace_file, worth_bytes=0)
    write(trace_file, "aten::MM")
    os.utime(trace_file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert trace_file.stat().st_size == before.st_size
    assert set(read_trace_cached(trace_file, worth_bytes=0).events.name.values) == {"aten::MM"}
    assert set(read_trace_cached(trace_file, worth_bytes=0).events.name.values) == {"aten::MM"}


def test_another_reader_does_not_take_the_cache(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_trace_cached(trace_file, worth_bytes=0)
    decoding = Mock(wraps=read_trace)
    monkeypatch.setattr(trace_cache, "_reader_digest", lambda: "another")
    monkeypatch.setattr(trace_cache, "read_trace", decoding)
    read_trace_cached(trace_file, worth_bytes=0)
    decoding.assert_called_once()


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"no head"])
def test_a_damaged_cache_is_replaced(trace_file: Path, damage: bytes) -> None:
    fresh = as_plain(read_trace_cached(trace_file, worth_bytes=0))
    (cache,) = trace_file.parent.glob("*.fsdp2prof-cache")
    sound = cache.read_bytes()
    cache.write_bytes(damage or sound[: len(sound) // 2])
    assert as_plain(read_trace_cached(trace_file, worth_bytes=0)) == fresh
    assert cache.read_bytes() == sound


def test_a_cache_with_a_flipped_bit_is_replaced(trace_file: Path) -> None:
    fresh = as_plain(read_trace_cached(trace_file, worth_bytes=0))
    (cache,) = trace_file.parent.glob("*.fsdp2prof-cache")
    sound = cache.read_bytes()
    inside = sound.index(b"\n") + 9
    cache.write_bytes(sound[:inside] + bytes([sound[inside] ^ 1]) + sound[inside + 1 :])
    assert as_plain(read_trace_cached(trace_file, worth_bytes=0)) == fresh
    assert cache.read_bytes() == sound


def test_a_cache_with_columns_missing_is_replaced(trace_file: Path) -> None:
    fresh = as_plain(read_trace_cached(trace_file, worth_bytes=0))
    (cache,) = trace_file.parent.glob("*.fsdp2prof-cache")
    cache.write_bytes(cache.read_bytes().replace(b'"events.stream"', b'"events.others"', 1))
    assert as_plain(read_trace_cached(trace_file, worth_bytes=0)) == fresh


def test_the_users_cache_folder_serves_where_the_trace_cannot(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, home = cache_files(trace_file, f"{trace_file.stat().st_size:x}-key")
    assert home.parent == tmp_path / "home" / "fsdp2prof"
    blocked = trace_file.parent / "a file" / beside.name
    (trace_file.parent / "a file").write_text("")
    monkeypatch.setattr(trace_cache, "cache_files", lambda path, key: (blocked, home))
    fresh = as_plain(read_trace_cached(trace_file, worth_bytes=0))
    assert home.is_file()
    monkeypatch.setattr(trace_cache, "read_trace", lambda *a, **k: pytest.fail("decoded again"))
    assert as_plain(read_trace_cached(trace_file, worth_bytes=0)) == fresh


def test_nowhere_to_write_is_not_fatal(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = trace_file / "cache"
    monkeypatch.setattr(trace_cache, "cache_files", lambda path, key: (blocked, blocked))
    assert as_plain(read_trace_cached(trace_file, worth_bytes=0)) == as_plain(read_trace(trace_file))


def test_no_litter_beside_small_traces(trace_file: Path) -> None:
    read_trace_cached(trace_file)
    assert [file.name for file in trace_file.parent.iterdir()] == ["t.json"]
    read_trace_cached(trace_file, worth_bytes=0)
    assert sorted(f.name for f in trace_file.parent.iterdir()) == ["t.json", "t.json.fsdp2prof-cache"]


def test_errors_are_the_readers(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for path in (tmp_path / "nothing.json", tmp_path, tmp_path / "broken.json"):
        with pytest.raises(TraceError):
            read_trace_cached(path, worth_bytes=0)
    assert [file.name for file in tmp_path.iterdir()] == ["broken.json"]


def test_what_is_no_trace_is_refused_before_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(trace_cache, "_key", lambda path: pytest.fail("all bytes were read"))
    for start in (b"", b'{"schemaVersion": 1,', b'{"traceEvents": [{"ph": "X"},'):
        path = tmp_path / "sparse.json"
        path.write_bytes(start)
        os.truncate(path, 1 << 40)
        with pytest.raises(TraceError, match=r"not a trace|zeros"):
            read_trace_cached(path)


def test_a_trace_that_changed_while_it_was_read_is_not_kept(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path, **told: Any) -> Trace:
        trace = read_trace(path, **told)
        write(path, "aten::addmm")
        return trace

    monkeypatch.setattr(trace_cache, "read_trace", read)
    assert set(read_trace_cached(trace_file, worth_bytes=0).events.name.values) == {"aten::mm"}
    assert [file.name for file in trace_file.parent.iterdir()] == ["t.json"]
