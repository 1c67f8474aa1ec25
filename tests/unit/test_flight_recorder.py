"""Flight Recorder dumps: read safely, compared with torch's own analysis, and told in the right words."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.cli import call as call_command
from support.flight_dumps import call, read, write

from fsdp2prof.analyzers.hang.analysis import analyze_hang
from fsdp2prof.cli import cli
from fsdp2prof.errors import FlightRecorderError
from fsdp2prof.readers import safe_pickle
from fsdp2prof.readers.job.flight_recorder import read_dump
from fsdp2prof.workflows.hang import analyze_hang as analyze_folder

WORLD = {"0": [0, 1, 2]}
GATHER, REDUCE = "_all_gather_base", "_reduce_scatter_base"


def steady(count: int, state: str = "completed") -> list[Any]:
    """Collectives 1..count of sizes that repeat every three; the last one in ``state``."""
    last = [call(GATHER, 8 * (1 + (count - 1) % 3), count, state=state)]
    return [call(GATHER, 8 * (1 + n % 3), n + 1) for n in range(count - 1)] + last


def test_ranks_behind_are_counted_and_named(tmp_path: Path) -> None:
    folder = write(tmp_path, {0: steady(9, "started"), 1: steady(6), 2: steady(9, "scheduled")}, WORLD)
    found = analyze_hang(read(folder, 0, 1, 2))
    assert (found.cause, found.culprits) == ("not_come", [1])
    assert [one.behind for one in found.ranks] == [0, 3, 0]
    assert found.standings[0].call.seq == 9
    assert found.standings[0].not_come == [1]


def test_a_run_ahead_is_a_skip_and_its_opposite_an_extra(tmp_path: Path) -> None:
    usual = [call(GATHER, size, seq + 1) for seq, size in enumerate((8, 16, 24, 40))]
    short = [call(GATHER, size, seq + 1) for seq, size in enumerate((8, 24, 40))]
    skipped = analyze_hang(read(write(tmp_path, {0: usual, 1: short, 2: usual}, WORLD), 0, 1, 2)).mismatches[
        0
    ]
    assert (skipped.kind, skipped.count, skipped.ranks, skipped.expected.seq) == ("skipped", 1, [1], 2)
    extra = analyze_hang(read(write(tmp_path, {0: short, 1: usual, 2: short}, WORLD), 0, 1, 2)).mismatches[0]
    assert (extra.kind, extra.count, extra.ranks) == ("extra", 1, [1])


def test_dumps_of_torch_2_2_count_and_number_their_groups(tmp_path: Path) -> None:
    """Version 1.1 has neither names of groups, nor types, nor numbers of records."""
    for rank, count in enumerate((3, 2)):
        entries = [
            {
                "pg_id": 0,
                "seq_id": n + 1,
                "profiling_name": "nccl:all_reduce",
                "time_created_ns": n,
                "input_sizes": [[8]],
                "output_sizes": [[8]],
                "state": "completed" if n < 2 else "scheduled",
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": n < 2,
                "frames": [{"name": "main", "filename": "train.py", "line": 7}],
            }
            for n in range(count)
        ]
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(
            pickle.dumps({"entries": entries, "version": "1.1"}, protocol=2)
        )
    found = analyze_folder(tmp_path)
    assert (found.cause, found.culprits, found.standings[0].call.seq) == ("not_come", [1], 3)
    assert found.standings[0].call.place == "train.py:7"


def test_a_dtype_that_differs_is_told_from_a_size(tmp_path: Path) -> None:
    other = call("all_reduce", 8, 1, input_dtypes=["Float"], output_dtypes=["Float"])
    calls = {0: [call("all_reduce", 8, 1)], 1: [other], 2: [call("all_reduce", 8, 1)]}
    one = analyze_hang(read(write(tmp_path, calls, WORLD), 0, 1, 2)).mismatches[0]
    assert (one.kind, one.found.dtype, one.expected.dtype) == ("dtype", "float32", "bfloat16")


def test_ranks_that_wait_in_different_groups_for_each_other(tmp_path: Path) -> None:
    calls = {
        0: [call("all_reduce", 8, 1, group="a", state="started")],
        1: [call("all_reduce", 8, 1, group="b", state="started")],
    }
    found = analyze_hang(read(write(tmp_path, calls, {"a": [0, 1], "b": [0, 1]}), 0, 1))
    assert (found.cause, found.culprits) == ("order", [0, 1])
    assert "wait for each other" in found.verdict[0]


def test_who_waits_for_ranks_that_are_stuck_elsewhere_is_not_to_blame(tmp_path: Path) -> None:
    """Ranks 0 and 2 both reduce and do not get out; 1 and 3 gather with them, and wait."""
    groups = {"tp01": [0, 1], "tp23": [2, 3], "dp": [0, 2]}
    stuck, waits = call("all_reduce", 8, 1, group="dp", state="started"), "started"
    calls = {
        0: [stuck],
        1: [call(GATHER, 8, 1, group="tp01", state=waits)],
        2: [stuck],
        3: [call(GATHER, 8, 1, group="tp23", state=waits)],
    }
    found = analyze_hang(read(write(tmp_path, calls, groups), 0, 1, 2, 3))
    assert (found.cause, found.culprits) == ("inside", [])
    assert found.standings[0].call.group == "dp"
    assert found.verdict[0].startswith("All of ranks 0, 2 issued all-reduce 1")
    assert found.verdict[1].startswith("Rank 1 waits for rank 0 in all-gather 1")


def test_a_group_that_no_dump_describes_is_not_taken_for_complete(tmp_path: Path) -> None:
    """Rank 0 alone reduces in a group that only its call names; the others gather without it."""
    sub = call("all_reduce", 3, 1, group="sub", state="started")
    calls: dict[int, list[Any]] = {0: [*steady(3), sub]}
    calls |= {rank: steady(4, "started") for rank in (1, 2)}
    found = analyze_hang(read(write(tmp_path, calls, WORLD), 0, 1, 2))
    assert (found.cause, found.culprits) == ("not_come", [])
    assert (found.standings[0].call.group, found.standings[0].ranks_known) == ("sub", False)
    assert "which no other rank with a dump has issued" in found.verdict[0]
    assert found.verdict[1].startswith("Ranks 1, 2 wait for rank 0 in all-gather 4")
    assert found.standings[1].ranks_known


def test_all_came_and_none_got_out(tmp_path: Path) -> None:
    found = analyze_hang(
        read(write(tmp_path, {rank: steady(4, "started") for rank in range(3)}, WORLD), 0, 1, 2)
    )
    assert (found.cause, found.culprits) == ("inside", [])


def test_sizes_that_may_differ_are_no_mismatch(tmp_path: Path) -> None:
    calls = {rank: [call("all_to_all", 8 + rank, 1)] for rank in range(3)}
    assert analyze_hang(read(write(tmp_path, calls, WORLD), 0, 1, 2)).cause == "none"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a Flight Recorder dump"),
        (b'{"version": "2.10", "entries": [', "not a Flight Recorder dump"),
        (b'{"version": "2.10", "entries": [{"process_group": 3}]}', "not a Flight Recorder dump"),
        (b'{"version": "9.0", "entries": []}', "its version is 9.0"),
        (pickle.dumps({"entries": [], "version": "2.10"})[:-9], "not a pickle, or a truncated one"),
        (pickle.dumps(Path), "only plain containers"),
        (pickle.dumps([1]), "it holds no dictionary"),
        (
            b'{"version": "2.10", "entries": [], "pg_config": {"0": {"ranks": "[0, 99999999999]"}}}',
            "no group",
        ),
        (
            b'{"version": "2.10", "entries": [], "pg_config": {"0": {"ranks": [-1]}}}',
            "no group has the ranks -1",
        ),
    ],
)
def test_a_corrupt_dump_is_one_clear_line(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "nccl_trace_rank_0"
    file.write_bytes(content)
    with pytest.raises(FlightRecorderError, match=said) as raised:
        read_dump(file, 0)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_list_met_a_million_times_is_refused(tmp_path: Path) -> None:
    shared = [[1] * 1000] * 1000
    entry = {"input_sizes": shared, "output_sizes": shared}
    file = tmp_path / "nccl_trace_rank_0"
    file.write_bytes(pickle.dumps({"version": "2.10", "entries": [entry] * 1000}))
    with pytest.raises(FlightRecorderError, match="too many values for a dump"):
        read_dump(file, 0)


def test_tuples_that_hold_tuples_are_refused(tmp_path: Path) -> None:
    """Each pair holds the one before twice: hashing the last as a key would take for ever."""
    body = b"}(X\x01\x00\x00\x00aq\x00X\x01\x00\x00\x00bq\x01\x86q\x02"
    body += b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(2, 60))
    file = tmp_path / "nccl_trace_rank_0"
    file.write_bytes(b"\x80\x02" + body + b"K\x01u.")
    with pytest.raises(FlightRecorderError, match="TUPLE2"):
        read_dump(file, 0)


def test_pairs_of_names_are_read_wherever_a_chunk_of_the_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_pickle, "_CHUNK", 2048)
    start = b"\x80\x02](X\x01\x00\x00\x00aq\x00X\x01\x00\x00\x00bq\x01"
    pairs = b"}(h\x00h\x00h\x01\x86h\x01K\x05u" * 600
    file = tmp_path / "pairs"
    for padding in range(16):
        file.write_bytes(start + b"N" * padding + pairs + b"e.")
        assert safe_pickle.load_containers(file, pairs_of_names=True)[-1] == {"a": ("a", "b"), "b": 5}


def test_an_unreadable_rank_is_left_out_and_two_of_one_rank_refused(tmp_path: Path) -> None:
    write(tmp_path, {0: steady(2, "started"), 2: steady(2, "started")}, WORLD)
    (tmp_path / "fr_1.json").write_text('{"version": "2.10", "entries": [')
    found = analyze_folder(tmp_path)
    assert (found.cause, found.culprits) == ("no_dump", [1])
    assert found.warnings[0].startswith("left out: ")
    (tmp_path / "nccl_trace_rank_0").write_bytes((tmp_path / "fr_0.json").read_bytes())
    with pytest.raises(FlightRecorderError, match="two dumps for rank 0"):
        analyze_folder(tmp_path)


@pytest.mark.parametrize("form", ["text", "json", "csv", "html"])
def test_the_command_prints_every_format(tmp_path: Path, form: str) -> None:
    write(tmp_path, {0: steady(9, "started"), 1: steady(6), 2: steady(9, "started")}, WORLD)
    target = tmp_path / f"result.{form}"
    done = CliRunner().invoke(cli, ["analyze", "hang", str(tmp_path), "--format", form, "-o", str(target)])
    assert done.exit_code == 0, done.output
    written = target.read_text()
    if form in ("text", "html"):
        assert "which rank 1 has not issued" in " ".join(written.split())
    if form == "json":
        assert json.loads(written)["culprits"] == [1]
    if form == "csv":
        assert "all_gather" in written


@pytest.mark.parametrize("verb", ["hang", "nccl"])
def test_a_device_is_neither_a_file_nor_a_folder(capfd: pytest.CaptureFixture[str], verb: str) -> None:
    call_command(capfd, "analyze", verb, "/dev/zero").refused("neither a file nor a folder")
