"""The trace reader against a plain reading of the same JSON with exact decimals, and against broken files."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2prof.analyzers.steps import host_steps
from fsdp2prof.errors import TraceError
from fsdp2prof.readers.trace.chrome_trace import peek_rank, read_trace
from fsdp2prof.tables.trace import Trace

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_sync"}


def nanoseconds(value: Any) -> int:
    exact = Decimal(value) * 1000
    assert exact == int(exact), "Kineto writes no more than three decimals"
    return int(exact)


def plain_reading(path: Path) -> list[tuple[Any, ...]]:
    """Rows as the event table should hold them, from dictionaries and decimals."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as stream:
        document = json.load(stream, parse_float=Decimal)
    rows = []
    for event in document["traceEvents"]:
        if event["ph"] != "X" or event["cat"] == "Trace":
            continue
        args, start = event.get("args", {}), nanoseconds(event["ts"])
        on_device = event["cat"] in DEVICE
        rows.append(
            (
                start,
                start + nanoseconds(event.get("dur", 0)),
                event["name"],
                event["cat"],
                "" if on_device else f"{event['pid']}/{event['tid']}",
                args.get("device", event["pid"]) if on_device else -1,
                args.get("stream", event["tid"]) if on_device else -1,
                args.get("correlation", -1),
                args.get("External id", -1),
                int(args.get("bytes", -1)) if on_device else -1,
            )
        )
    return sorted(rows, key=lambda row: (row[0], -row[1]))


def event_rows(trace: Trace) -> list[tuple[Any, ...]]:
    events = trace.events
    threads = [*trace.threads, ""]
    return list(
        zip(
            events.start_ns.tolist(),
            events.end_ns.tolist(),
            events.name.to_list(),
            events.category.to_list(),
            [threads[i] for i in events.thread],
            events.device.tolist(),
            events.stream.tolist(),
            events.correlation.tolist(),
            events.external_id.tolist(),
            events.bytes.tolist(),
            strict=True,
        )
    )


def write(path: Path, events: list[dict[str, Any]], **header: Any) -> Path:
    path.write_text(json.dumps({**header, "traceEvents": events}))
    return path


def op(name: str, ts: Any = 1, dur: Any = 1, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 8, "ts": ts, "dur": dur, "args": args}


@pytest.mark.real_data
@pytest.mark.parametrize(
    "name",
    [
        "ddp2-a100-rank0/nccl_data.json.gz",
        "ddp4-mi300/rank3.json.gz",
        "dlrm8-v100/worker5_step_12.1694128201549.pt.trace.json.gz",
    ],
)
def test_every_column_of_real_traces_is_exact(real_data: Path, name: str) -> None:
    path = real_data / "traces" / name
    assert event_rows(read_trace(path, workers=1)) == plain_reading(path)


@pytest.mark.real_data
def test_a_real_trace_without_steps_has_those_between_its_updates_besides(real_data: Path) -> None:
    path = real_data / "traces/resnet-mi300-memory/train_resnet18.json.gz"
    rows = event_rows(read_trace(path, workers=1))
    steps = [row for row in rows if row[2].startswith("ProfilerStep#")]
    assert [row[2] for row in steps] == [f"ProfilerStep#{number}" for number in (1, 2, 3, 4)]
    assert [row for row in rows if row not in steps] == plain_reading(path)
    ends = [row[1] for row in rows if row[2].startswith("Optimizer.step#") and row[3] == "user_annotation"]
    assert [row[:2] for row in steps] == list(pairwise(ends))


def update(ts: int, name: str = "AdamW") -> dict[str, Any]:
    return op(f"Optimizer.step#{name}.step", ts=ts, dur=10, cat="user_annotation")


@pytest.mark.parametrize(
    ("events", "steps"),
    [
        ([update(100), update(200), update(300)], [(110, 210), (210, 310)]),
        (
            [
                update(at + more, name)
                for at in (100, 200, 300)
                for more, name in ((0, "AdamW"), (11, "Muon"))
            ],
            [(121, 221), (221, 321)],
        ),
        ([update(at + more) for at in (100, 200, 300) for more in (0, 12)], [(122, 222), (222, 322)]),
        ([update(100), update(200)], []),
    ],
)
def test_steps_last_from_one_update_to_the_next(
    tmp_path: Path, events: list[dict[str, Any]], steps: list[tuple[int, int]]
) -> None:
    trace = read_trace(write(tmp_path / "trace.json", [op("aten::mm"), *events]), workers=1)
    found = host_steps(trace.labels)
    ends = zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True)
    assert [(start // 1000, end // 1000) for start, end in ends] == steps
    assert any("optimizer update" in line for line in trace.warnings) == bool(steps)


def test_marked_steps_stay_as_they_are(tmp_path: Path) -> None:
    marked = op("ProfilerStep#7", ts=50, dur=300, cat="user_annotation")
    trace = read_trace(
        write(tmp_path / "trace.json", [marked, update(100), update(200), update(300)]), workers=1
    )
    assert host_steps(trace.labels).step.tolist() == [7]
    assert not trace.warnings


@pytest.mark.real_data
def test_metadata_of_a_real_trace(real_data: Path) -> None:
    trace = read_trace(real_data / "traces/ddp2-a100-rank0/nccl_data.json.gz")
    assert (trace.rank, trace.world_size, trace.device.type, trace.device.index) == (0, 2, "cuda", 0)
    assert trace.device.name == "NVIDIA A100-PG509-200"
    assert trace.device.total_bytes == 42297524224
    assert trace.device.capability == "8.0"
    assert [(g.name, g.desc, g.ranks) for g in trace.process_groups] == [("0", "default_pg", [0, 1])]
    kernels = trace.events.category.equals("kernel")[trace.collective_args.event]
    assert np.count_nonzero(kernels) == 21
    first = trace.collective_args.take(kernels).to_pandas().iloc[0]
    assert (first["collective"], first["dtype"], first["in_nelems"], first["group_size"]) == (
        "broadcast",
        "Float",
        53120,
        2,
    )


@pytest.mark.real_data
def test_memory_instants_of_a_real_trace(real_data: Path) -> None:
    trace = read_trace(real_data / "traces/ddp2-v100-rank1-memory/df_index_resolver.json.gz")
    memory = trace.memory
    assert len(memory) == 28010
    assert np.all(np.diff(memory.time_ns) >= 0)
    (row,) = np.flatnonzero((memory.address == 139926520725504) & (memory.time_ns == 1669783687464300_000))
    assert (memory.device[row], memory.bytes[row]) == (1, 5242880)
    assert (memory.allocated_bytes[row], memory.reserved_bytes[row]) == (5435638784, 12782141440)
    assert trace.threads[memory.thread[row]] == "783658/785244"


NAMES = st.sampled_from(
    ["aten::mm", 'a "quoted" }, { name', "trailing \\", "käse", '"traceEvents": [', "[]{}"]
)
TIMES = st.one_of(
    st.integers(0, 2**40).map(str),
    st.tuples(st.integers(0, 2**43 - 1), st.integers(0, 999)).map(lambda t: f"{t[0]}.{t[1]:03d}"),
    st.tuples(st.integers(1694128201435418, 1694128999999999), st.integers(0, 999)).map(
        lambda t: f"{t[0]}.{t[1]:03d}"
    ),
)


@st.composite
def documents(draw: st.DrawFn) -> str:
    """A trace as text: odd names, nested args, flows, any white space."""
    space = draw(st.sampled_from(["", " ", "\n  "]))
    events = []
    for _ in range(draw(st.integers(1, 12))):
        fields = [f'"ph":{space}"X"', f'"name":{space}{json.dumps(draw(NAMES))}']
        fields += [f'"cat":"{draw(st.sampled_from(["cpu_op", "kernel"]))}"', '"pid":1', f'"tid":{space}7']
        fields += [
            f'"ts":{draw(TIMES)}',
            f'"dur":{space}{draw(st.integers(0, 9))}.{draw(st.integers(0, 999)):03d}',
        ]
        if draw(st.booleans()):
            fields.append(
                f'"args":{{"x":[{{"y":1}},{space}{{"z":"}}, {{"}}],"correlation":{draw(st.integers(0, 9))}}}'
            )
        events.append("{" + f",{space}".join(fields) + "}")
        if draw(st.booleans()):
            events.append('{"ph":"s","id":1,"ts":5,"name":"ac2g"}')
    footer = draw(st.sampled_from(["", ',"footer":[{"a":1}, {"b":2}]', ',"distributedInfo":{"rank":3}']))
    header = draw(st.sampled_from(["", '"deviceProperties":[{"id":0}, {"id":1}],']))
    return f'{{{header}"traceEvents":{space}[{f"{space},{space}".join(events)}]{footer}}}'


@settings(max_examples=150, deadline=None)
@given(text=documents(), piece_bytes=st.integers(20, 600), compressed=st.booleans())
def test_any_piece_size_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, text: str, piece_bytes: int, compressed: bool
) -> None:
    path = tmp_path_factory.mktemp("trace") / ("t.json.gz" if compressed else "t.json")
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    trace = read_trace(path, workers=1, piece_bytes=piece_bytes)
    assert event_rows(trace) == plain_reading(path)
    assert trace.rank == (3 if '"rank":3' in text else None)


@pytest.mark.parametrize("name", ["aten::mm", '"}, {'])
def test_several_processes_read_the_same_as_one(tmp_path: Path, name: str) -> None:
    """The second name makes guessed cuts wrong: then one process reads it all."""
    groups = [{"pg_name": "1", "pg_desc": "mesh_dp", "backend_config": "cuda:nccl", "ranks": [0, 1]}]
    info = {"rank": 1, "world_size": 2, "pg_config": groups}
    operators: list[dict[str, Any]] = [{"correlation": i, "External id": 900 - i} for i in range(400)]
    collectives: list[dict[str, Any]] = [{"Collective name": "allreduce", "Seq": i} for i in range(30)]
    events = [op(name, ts=i + 0.125, **args) for i, args in enumerate(operators)]
    events += [op(f"k{i % 7}", ts=i, cat="kernel", stream=i % 3, device=1) for i in range(400)]
    events += [op("record_param_comms", ts=i, **args) for i, args in enumerate(collectives)]
    path = write(tmp_path / "t.json", events, distributedInfo=info)
    alone = read_trace(path, workers=1, piece_bytes=4000)
    together = read_trace(path, workers=3, piece_bytes=4000)
    assert event_rows(together) == event_rows(alone) == plain_reading(path)
    assert together.collective_args.to_pandas().equals(alone.collective_args.to_pandas())
    assert together.collective_args.seq.tolist() == list(range(30))
    assert (together.rank, together.process_groups) == (1, alone.process_groups)


def test_float64_would_lose_nanoseconds_of_unix_time(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        '{"traceEvents":[{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1694128201435418.001,"dur":0.999},'
        '{"ph":"X","cat":"cpu_op","name":"b","pid":1,"tid":1,"ts":1694128201435418.1,"dur":2}]}'
    )
    events = read_trace(path).events
    assert events.start_ns.tolist() == [1694128201435418_001, 1694128201435418_100]
    assert (events.end_ns - events.start_ns).tolist() == [999, 2000]
    assert round(1694128201435418.001 * 1000) != 1694128201435418_001


def test_outer_events_come_before_inner_ones(tmp_path: Path) -> None:
    events = [op("inner", 10, 2), op("outer", 10, 5), op("twin", 10, 5), op("first", 9, 0.5)]
    names = read_trace(write(tmp_path / "t.json", events)).events.name.to_list()
    assert names == ["first", "outer", "twin", "inner"]


def test_labels_are_host_annotations_only(tmp_path: Path) -> None:
    gloo = {**op("gloo:all_gather", 2, 1, "user_annotation"), "tid": 9}
    events = [
        op("FSDP::all_gather (blocks.0)", 1, 5, "user_annotation"),
        gloo,
        op("FSDP::all_gather (blocks.0)", 3, 1, "gpu_user_annotation"),
        op("aten::mm", 3, 1),
    ]
    trace = read_trace(write(tmp_path / "t.json", events))
    assert trace.labels.name.to_list() == ["FSDP::all_gather (blocks.0)", "gloo:all_gather"]
    assert [trace.threads[t] for t in trace.labels.thread] == ["7/8", "7/9"]
    assert trace.labels.end_ns.tolist() == [6000, 3000]


def test_element_counts_of_gloo_collectives_come_from_their_inputs(tmp_path: Path) -> None:
    def shaped(name: str, ts: int, dims: list[Any], types: list[str], cat: str = "cpu_op") -> dict[str, Any]:
        return op(name, ts, 1, cat, **{"Input Dims": dims, "Input type": types})

    half = "c10::BFloat16"
    events = [
        shaped("c10d::_allgather_base_", 1, [[1056], [528], [], []], [half, half, "", "Scalar"]),
        shaped("c10d::_reduce_scatter_base_", 2, [[33, 4], [264], []], ["float", "float", ""]),
        shaped("c10d::allreduce_", 3, [[[3], [2, 5]], [], []], ["TensorList", "", ""]),
        shaped("gloo:all_gather", 4, [[528]], [half], "user_annotation"),
        shaped("gloo:all_reduce", 5, [[264]], ["float"], "user_annotation"),
        shaped("aten::mm", 6, [[4, 8], [8, 2]], ["float", "float"]),
        shaped("aten::add", 7, [[4], [4]], ["float", "float"]),
        shaped("_c10d_functional::all_reduce", 8, [[4, 32], [], []], [half, "", ""]),
        shaped("fake:all_gather", 9, [[[3], [3]], [3]], ["TensorList", "double"]),
    ]
    trace = read_trace(write(tmp_path / "t.json", events))
    args = trace.collective_args
    assert args.event.tolist() == [0, 1, 2, 3, 4, 7, 8]
    assert args.in_nelems.tolist() == [528, 264, 13, 528, 264, 128, 3]
    assert args.out_nelems.tolist() == [1056, 132, 13, -1, 264, 128, 6]
    assert args.dtype.to_list() == [half, "float", None, half, "float", half, "double"]
    assert args.collective.to_list() == [None] * 7
    assert trace.shapes.event.tolist() == [0, 1, 2, 3, 4, 5, 7, 8]
    assert trace.shapes.dims[5] == "[[4,8],[8,2]]"
    assert trace.shapes.types[5] == '["float","float"]'


def test_streams_and_ids_written_as_text(tmp_path: Path) -> None:
    events = [
        op("k", 1, 1, "kernel", stream="7", device="1", correlation="12"),
        op("launch", 0, 1, "cuda_runtime", stream="0x1f", correlation=12, **{"External id": None}),
        op("mark", 2, 1, "gpu_user_annotation"),
        op("k2", 3, 1, "kernel", stream="none", device=1, correlation=2**70),
    ]
    table = read_trace(write(tmp_path / "t.json", events)).events
    assert table.stream.tolist() == [-1, 7, 8, -1]
    assert table.device.tolist() == [-1, 1, 7, 1]
    assert table.correlation.tolist() == [12, 12, -1, -1]
    assert table.external_id.tolist() == [-1, -1, -1, -1]
    assert table.thread.tolist() == [0, -1, -1, -1]


def test_what_cuda_synchronisations_wait_for(tmp_path: Path) -> None:
    wait = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 31}
    events = [
        op("Stream Sync", 9, 1, "cuda_sync", stream=20, device=0),
        op("Stream Wait Event", 3, 1, "cuda_sync", stream=20, device=0, correlation=32, **wait),
        op("Event Sync", 5, 1, "cuda_sync", stream=-1, device=0, wait_on_stream=8),
    ]
    trace = read_trace(write(tmp_path / "t.json", events))
    assert trace.events.stream.tolist() == [20, -1, 20]
    assert trace.events.thread.tolist() == [-1, -1, -1]
    assert trace.syncs.event.tolist() == [0, 1]
    assert trace.syncs.wait_on_stream.tolist() == [7, 8]
    assert trace.syncs.record_correlation.tolist() == [31, -1]


def test_the_bytes_of_a_copy_are_those_of_its_record_on_the_device(tmp_path: Path) -> None:
    """ROCm's runtime calls carry them, too: they would count twice."""
    path = tmp_path / "t.json"
    events = [
        op("hipMemcpyAsync", 1.5, 1, "cuda_runtime", bytes=64),
        op("Copy", 3.5, 1, "gpu_memcpy", bytes=64),
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    assert read_trace(path).events.bytes.tolist() == [-1, 64]


def test_the_range_around_everything_is_no_event(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    events = [op("a", 1.5), op("PyTorch Profiler (0)", 0, 99, "Trace"), op("b", 3.5, 1, "kernel", stream=7)]
    path.write_text(json.dumps({"traceEvents": events}))
    read = read_trace(path).events
    assert (read.name.to_list(), read.stream.tolist()) == (["a", "b"], [-1, 7])


@pytest.mark.parametrize("value", ["nan", "NaN", "-nan", "inf", "Infinity", "-inf"])
@pytest.mark.parametrize("piece_bytes", [120, 1 << 20])
def test_numbers_that_are_not_json(tmp_path: Path, value: str, piece_bytes: int) -> None:
    text = json.dumps({"traceEvents": [op(f"keep nan, {i}", 1.5, 1, "kernel", bw=-12345) for i in range(4)]})
    path = tmp_path / "t.json"
    path.write_text(text.replace("-12345", value))
    events = read_trace(path, piece_bytes=piece_bytes).events
    assert events.start_ns.tolist() == [1500] * 4
    assert events.name.to_list() == [f"keep nan, {i}" for i in range(4)]


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    text = json.dumps({"traceEvents": [op("NAME", 1694128201435418, 1)]})
    path.write_bytes(
        text.encode().replace(b"NAME", b"a\xffb").replace(b"1694128201435418", b"1694128201435418.007")
    )
    events = read_trace(path).events
    assert events.name.to_list() == ["a\ufffdb"]
    assert events.start_ns.tolist() == [1694128201435418_007]


def test_a_bare_list_of_events(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([op("a", 1), op("b", 2), op("c", 3)]))
    assert read_trace(path, piece_bytes=100).events.name.to_list() == ["a", "b", "c"]


def test_a_negative_duration_is_said(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.json", [op("a", 5, -3)]))
    assert (trace.events.end_ns - trace.events.start_ns).tolist() == [0]
    assert "1 events end before they start" in trace.warnings[0]


def test_the_callers_rank_counts_only_where_the_file_has_none(tmp_path: Path) -> None:
    silent = write(tmp_path / "a.json", [op("a")])
    known = write(tmp_path / "b.json", [op("a")], distributedInfo={"rank": 5, "world_size": 8})
    assert (read_trace(silent, rank=3).rank, read_trace(known, rank=3).rank) == (3, 5)
    assert (peek_rank(silent), peek_rank(known)) == ((None, None), (5, 8))


def test_process_groups_written_as_text(tmp_path: Path) -> None:
    groups = json.dumps([{"pg_name": "3", "pg_desc": "mesh_tp", "backend": "nccl", "ranks": [0, 4]}])
    info = {"rank": 0, "world_size": 8, "pg_config": groups}
    (group,) = read_trace(write(tmp_path / "t.json", [op("a")], distributedInfo=info)).process_groups
    assert (group.name, group.desc, group.backend, group.ranks) == ("3", "mesh_tp", "nccl", [0, 4])


def many_events() -> bytes:
    return json.dumps({"traceEvents": [op(f"op{i}", i) for i in range(3000)]}).encode()


def test_a_gzip_cut_inside_the_events_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    compressed = gzip.compress(many_events())
    path.write_bytes(compressed[: len(compressed) // 2])
    with pytest.raises(TraceError, match=r"t\.json\.gz: truncated"):
        read_trace(path)


def test_a_gzip_cut_after_the_events_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(many_events())[:-6])
    trace = read_trace(path)
    assert len(trace.events) == 3000
    assert "ends early" in trace.warnings[0]


def test_damaged_gzip_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    compressed = bytearray(gzip.compress(many_events()))
    compressed[len(compressed) // 2 : len(compressed) // 2 + 40] = b"\xff" * 40
    path.write_bytes(bytes(compressed))
    with pytest.raises(TraceError, match="compressed data is damaged"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"hello", "not JSON"),
        (b"\x1f\x8b", "truncated"),
        (b'{"a": 1}', "traceEvents"),
        (b'{"traceEvents": 5}', "traceEvents"),
        (b'{"traceEvents": []}', "no events"),
        (b'{"traceEvents": [1, 2]}', "not a readable Kineto trace"),
        (b'{"traceEvents": [{"ph": "X", "ts": "soon"}]}', "not a readable Kineto trace"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1, "name": "a"}', "not a readable Kineto trace"),
    ],
)
def test_what_is_no_trace_gets_one_clear_line(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=reason) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [1, 2])
def test_malformed_json_far_into_the_file(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(many_events().replace(b'"op1500"', b'"op1500" oops'))
    with pytest.raises(TraceError, match="not a readable Kineto trace"):
        read_trace(path, workers=workers, piece_bytes=20000)


def test_a_file_that_holds_several_ranks_is_refused(tmp_path: Path) -> None:
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#4", "ts": 1.0, "dur": 9.0, "tid": 7}
    path = tmp_path / "merged.json"
    path.write_text(json.dumps({"traceEvents": [{**step, "pid": pid} for pid in (100, 200, 300)]}))
    with pytest.raises(
        TraceError, match=r"a step on 3 threads; write the trace of each rank to its own file"
    ):
        read_trace(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "nothing.json")
    with pytest.raises(TraceError, match="is a folder"):
        read_trace(tmp_path)
