"""``fsdp2prof analyze`` and ``report`` from files to output: good input, bad input, nothing overwritten."""

from __future__ import annotations

import csv
import gzip
import html
import io
import json
import os
import pickle
import pty
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cli import call
from synthetic import Schedule, record, transformer, write_run

from fsdp2prof.manifest import RankManifest, RunInfo
from fsdp2prof.results.ledger import PART
from fsdp2prof.run_directory import MANIFEST_FILE, RUN_FILE, TRACE_FILE, rank_folder

BREAKDOWN = [
    "compute",
    "fsdp_copy",
    "exposed_all_gather",
    "exposed_reduce_scatter",
    "exposed_all_reduce",
    "exposed_other_comm",
    "exposed_memcpy",
    "idle",
]


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks of a GPU run: a root and four blocks, steps 3 and 4."""
    schedule = Schedule(roots=(transformer(4),), shard=2)
    return write_run(record(schedule, schedule), tmp_path_factory.mktemp("traces"))


@pytest.fixture
def run(traces: Path, tmp_path: Path) -> Path:
    """The same as a run directory of three ranks, of which rank 2 left nothing."""
    root = tmp_path / "run"
    root.mkdir()
    info = RunInfo(command=["torchrun", "train.py"], state="partial", exit_code=1, world_size=3)
    (root / RUN_FILE).write_bytes(msgspec.json.encode(info))
    for rank in (0, 1):
        folder = root / rank_folder(rank)
        folder.mkdir()
        shutil.copy(traces / f"rank{rank}_trace.json.gz", folder / TRACE_FILE)
        manifest = RankManifest(rank=rank, world_size=3, state="partial" if rank else "complete")
        (folder / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
    return root


def on_a_terminal(command: list[str]) -> tuple[str, str]:
    """Run a command whose stderr is a terminal: what it said there, and its stdout."""
    terminal, end = pty.openpty()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=end, check=True, text=True)
    os.close(end)
    said = b""
    with suppress(OSError):
        while chunk := os.read(terminal, 4096):
            said += chunk
    os.close(terminal)
    return said.decode(), done.stdout


def trace_json(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    ended = call(capfd, "analyze", "trace", *arguments, "--format", "json")
    assert (ended.code, ended.err) == (0, "")
    document: dict[str, Any] = json.loads(ended.out)
    return document


class TestGoodInput:
    def test_json_parts_sum_to_the_window(self, capfd: pytest.CaptureFixture[str], traces: Path) -> None:
        document = trace_json(capfd, traces)
        assert document["schema"] == "fsdp2prof.trace/1"
        steps = [step for rank in document["ranks"] for step in rank["steps"]]
        assert [step["step"] for step in steps] == [3, 4, 3, 4]
        for step in steps:
            assert list(step["breakdown_ns"]) == BREAKDOWN
            assert sum(step["breakdown_ns"].values()) == step["duration_ns"]

    def test_processes_change_nothing(self, capfd: pytest.CaptureFixture[str], traces: Path) -> None:
        assert trace_json(capfd, traces, "-j", "2") == trace_json(capfd, traces, "-j", "1")

    def test_text_is_for_people(self, capfd: pytest.CaptureFixture[str], traces: Path) -> None:
        ended = call(capfd, "analyze", "trace", traces, "--full")
        assert (ended.code, ended.err) == (0, "")
        for words in ("Where the step goes", "Communication by layer", "Ranks against each other", "layers."):
            assert words in ended.out
        assert "\x1b" not in ended.out

    def test_csv_has_a_row_per_group(self, capfd: pytest.CaptureFixture[str], traces: Path) -> None:
        groups = trace_json(capfd, traces)["groups"]
        ended = call(capfd, "analyze", "trace", traces, "--format", "csv")
        rows = list(csv.DictReader(io.StringIO(ended.out)))
        assert len(rows) == len(groups)
        assert int(rows[0]["payload_bytes"]) > 0

    def test_ranks_are_chosen(self, capfd: pytest.CaptureFixture[str], traces: Path) -> None:
        document = trace_json(capfd, traces, "--ranks", "1")
        assert [rank["rank"] for rank in document["ranks"]] == [1]
        call(capfd, "analyze", "trace", traces, "--ranks", "5").refused("it has ranks 0, 1")

    def test_steps_are_chosen(self, capfd: pytest.CaptureFixture[str], traces: Path) -> None:
        """A chosen step has the numbers it has among all."""
        every, one = trace_json(capfd, traces), trace_json(capfd, traces, "--steps", "4")
        of_step_4 = [step for rank in every["ranks"] for step in rank["steps"] if step["step"] == 4]
        assert [step for rank in one["ranks"] for step in rank["steps"]] == of_step_4
        assert one["groups"] == [row for row in every["groups"] if row["step"] == 4]
        assert one["attribution"]["collectives"] == every["attribution"]["collectives"] // 2
        call(capfd, "analyze", "trace", traces, "--steps", "9").refused("it has steps 3, 4")
        call(capfd, "analyze", "trace", traces, "--steps", "3,8,9").refused("steps 8, 9 are not here")

    def test_hardware_and_tokens_add_speed(self, capfd: pytest.CaptureFixture[str], traces: Path) -> None:
        """The payload of a step's bandwidth row over 450 GB/s, the H100's links in one direction."""
        options = ("--hardware", "h100-sxm", "--tokens-per-step", "1000")
        document = trace_json(capfd, traces, *options)
        assert document["bandwidth"]
        for row in document["bandwidth"]:
            assert row["of_peak_frac"] == pytest.approx(row["busbw_bytes_per_s"] / 450e9)
        for rank in document["ranks"]:
            speed = rank["throughput"]
            assert speed["tokens_per_s"] == pytest.approx(1000 / (speed["step_ns"] / 1e9))
        call(capfd, "analyze", "trace", traces, "--hardware", "abacus").refused("abacus")

    def test_a_whole_trace_is_one_window(self, capfd: pytest.CaptureFixture[str], traces: Path) -> None:
        document = trace_json(capfd, traces, "--window", "trace", "--ranks", "0")
        assert len(document["ranks"][0]["steps"]) == 1

    def test_run_says_what_is_missing(self, capfd: pytest.CaptureFixture[str], run: Path) -> None:
        document = trace_json(capfd, run)
        assert [rank["state"] for rank in document["ranks"]] == ["complete", "partial"]
        assert any("1 of 3 ranks left no recording: rank 2" in line for line in document["warnings"])
        ended = call(capfd, "analyze", "run", run, "--full")
        assert ended.code == 0
        for words in ("torchrun train.py", "partial, exit code 1", "missing", "Where the step goes"):
            assert words in ended.out
        everything = json.loads(call(capfd, "analyze", "run", run, "--format", "json").out)
        assert everything["schema"] == "fsdp2prof.run_analysis/1"
        assert everything["trace"]["groups"] == document["groups"]
        assert everything["memory"] is None

    def test_a_step_cut_short_is_left_out_unless_asked_for(
        self, capfd: pytest.CaptureFixture[str], run: Path
    ) -> None:
        """The recorder of rank 1 saw step 3 end, but not step 4."""
        manifest = RankManifest(rank=1, world_size=3, state="crashed", traced_steps=[3])
        (run / rank_folder(1) / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
        ranks = trace_json(capfd, run)["ranks"]
        assert [[step["step"] for step in rank["steps"]] for rank in ranks] == [[3, 4], [3]]
        warnings = trace_json(capfd, run)["warnings"]
        assert "rank 1: step 4 was cut short and is left out; --steps 4 shows it" in warnings
        ranks = trace_json(capfd, run, "--steps", "4")["ranks"]
        assert [[step["step"] for step in rank["steps"]] for rank in ranks] == [[4], [4]]
        call(capfd, "analyze", "run", run, "--window", "trace", "--steps", "4").refused("whole trace", code=2)

    def test_one_broken_rank_does_not_stop_the_others(
        self, capfd: pytest.CaptureFixture[str], run: Path
    ) -> None:
        broken = run / rank_folder(1) / TRACE_FILE
        broken.write_bytes(broken.read_bytes()[:2000])
        document = trace_json(capfd, run)
        assert [rank["rank"] for rank in document["ranks"]][:1] == [0]
        assert any(TRACE_FILE in line for line in document["warnings"])

    def test_a_threshold_that_holds_exits_3_after_the_output(
        self, capfd: pytest.CaptureFixture[str], traces: Path
    ) -> None:
        ended = call(capfd, "analyze", "trace", traces, "--format", "json", "--fail-on", "step_time_ms>0")
        assert ended.code == 3
        assert "step_time_ms" in ended.err
        assert json.loads(ended.out)["ranks"]
        assert call(capfd, "analyze", "trace", traces, "--fail-on", "step_time_ms<0").code == 0

    def test_a_reader_that_goes_away_ends_it_quietly(self, traces: Path) -> None:
        """As ``| head`` does: exit code of SIGPIPE, no traceback."""
        program = Path(sys.executable).parent / "fsdp2prof"
        pipe = f"{program} analyze trace {traces} --format json | true; exit ${{PIPESTATUS[0]}}"
        ended = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (141, "")

    def test_messages_go_to_a_terminal_on_stderr_only(self, traces: Path, tmp_path: Path) -> None:
        """With a person on stderr the JSON on stdout stays JSON, and -q is silent."""
        program = Path(sys.executable).parent / "fsdp2prof"
        command = [str(program), "analyze", "trace", str(traces), "-o", str(tmp_path / "a.json"), "-f"]
        said, printed = on_a_terminal([*command[:4], "--format", "json"])
        assert json.loads(printed)["schema"] == "fsdp2prof.trace/1"
        assert "analysing" in said
        assert "wrote" in on_a_terminal(command)[0]
        assert on_a_terminal([*command, "-q"]) == ("", "")

    def test_report_is_one_file(self, capfd: pytest.CaptureFixture[str], run: Path, tmp_path: Path) -> None:
        report = tmp_path / "report.html"
        ended = call(capfd, "report", run, "-o", report)
        assert (ended.code, ended.out, ended.err) == (0, "", "")
        assert report.read_text().count("</html>") == 1


class TestViews:
    """HolisticTraceAnalysis behind our command, on a real A100 trace."""

    @pytest.fixture
    def a100(self, real_data: Path) -> Path:
        return real_data / "traces" / "ddp2-a100-rank0"

    def test_critical_path_parts_sum_to_it(self, capfd: pytest.CaptureFixture[str], a100: Path) -> None:
        ended = call(capfd, "analyze", "trace", a100, "--critical-path", "--steps", "5", "--format", "json")
        document = json.loads(ended.out)
        assert document["step"] == 5
        assert sum(document["bound_by_ns"].values()) == document["duration_ns"]
        assert sum(row["duration_ns"] for row in document["rows"]) == document["duration_ns"]

    def test_a_trace_does_not_differ_from_itself(self, capfd: pytest.CaptureFixture[str], a100: Path) -> None:
        ended = call(capfd, "analyze", "trace", a100, "--diff", a100, "--format", "csv")
        assert {row["diff_ns"] for row in csv.DictReader(io.StringIO(ended.out))} == {"0"}

    def test_views_read_as_tables(self, capfd: pytest.CaptureFixture[str], a100: Path) -> None:
        assert "the host had launched nothing" in call(capfd, "analyze", "trace", a100, "--idle-causes").out
        assert "more launches" in call(capfd, "analyze", "trace", a100, "--launch-statistics").out
        names = call(capfd, "analyze", "trace", a100, "--critical-path", "--format", "csv").out
        assert names.startswith("name,bound_by,duration_ns,count,duration_frac\naten::")

    @pytest.mark.parametrize("view", ["--critical-path", "--launch-statistics", "--idle-causes"])
    def test_views_are_pages_too(
        self, capfd: pytest.CaptureFixture[str], a100: Path, tmp_path: Path, view: str
    ) -> None:
        """The page says what the JSON's verdict says."""
        page = tmp_path / "view.html"
        assert call(capfd, "analyze", "trace", a100, view, "-o", page).code == 0
        verdict = json.loads(call(capfd, "analyze", "trace", a100, view, "--format", "json").out)["verdict"]
        shown = html.unescape(re.sub(r"</?code>", "`", page.read_text()))
        assert verdict
        assert all(sentence in shown for sentence in verdict)

    def test_a_diff_names_both_files_in_full(self, capfd: pytest.CaptureFixture[str], a100: Path) -> None:
        (file,) = a100.glob("*.json.gz")
        assert call(capfd, "analyze", "trace", a100, "--diff", a100).out.count(str(file)) == 2

    def test_options_that_exclude_each_other(self, capfd: pytest.CaptureFixture[str], traces: Path) -> None:
        path = ("analyze", "trace", traces, "--critical-path")
        call(capfd, *path, "--diff", traces).refused("cannot be combined", code=2)
        call(capfd, *path, "--steps", "3,4").refused("one step", code=2)
        call(capfd, *path, "--ranks", "0,1").refused("one rank", code=2)
        call(capfd, *path, "--ranks", "7").refused("rank 7 is not here; it has ranks 0, 1")

    @pytest.mark.parametrize(
        "option",
        [
            ("--window", "steps"),
            ("--tokens-per-step", "8"),
            ("--hardware", "h200"),
            ("--threshold", "min_cost_frac=0.1"),
            ("--jobs", "2"),
            ("--fail-on", "idle_frac>1"),
        ],
    )
    @pytest.mark.parametrize("view", [("--critical-path",), ("--diff", "other.json")])
    def test_options_of_the_whole_analysis_are_refused(
        self, capfd: pytest.CaptureFixture[str], traces: Path, view: tuple[str, ...], option: tuple[str, ...]
    ) -> None:
        call(capfd, "analyze", "trace", traces, *view, *option).refused(
            f"{option[0]}", "would have no effect", code=2
        )

    def test_a_step_is_refused_where_the_whole_trace_is_looked_at(
        self, capfd: pytest.CaptureFixture[str], traces: Path
    ) -> None:
        call(capfd, "analyze", "trace", traces, "--idle-causes", "--steps", "3").refused(
            "--steps would have no effect", code=2
        )


class TestOutputFiles:
    def test_the_extension_chooses_the_format(
        self, capfd: pytest.CaptureFixture[str], traces: Path, tmp_path: Path
    ) -> None:
        for name, start in (("a.json", "{"), ("a.csv", "rank,"), ("a.txt", "Trace"), ("a.html", "<!doctype")):
            assert call(capfd, "analyze", "trace", traces, "-o", tmp_path / name).out == ""
            assert (tmp_path / name).read_text().lstrip().startswith(start)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["a.csv", "a.html", "a.json", "a.txt"]

    def test_an_existing_file_is_kept(
        self, capfd: pytest.CaptureFixture[str], traces: Path, tmp_path: Path
    ) -> None:
        kept = tmp_path / "a.json"
        kept.write_text("mine")
        call(capfd, "analyze", "trace", traces, "-o", kept).refused("exists already", "-f")
        assert kept.read_text() == "mine"
        assert call(capfd, "analyze", "trace", traces, "-f", "-o", kept).code == 0
        assert json.loads(kept.read_text())["schema"] == "fsdp2prof.trace/1"

    def test_a_failing_command_leaves_the_old_file(
        self, capfd: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        kept = tmp_path / "a.json"
        kept.write_text("mine")
        call(capfd, "analyze", "trace", tmp_path / "none", "-f", "-o", kept).refused("none")
        assert kept.read_text() == "mine"
        assert [file.name for file in tmp_path.iterdir()] == ["a.json"]

    def test_folders_are_refused(
        self, capfd: pytest.CaptureFixture[str], traces: Path, tmp_path: Path
    ) -> None:
        call(capfd, "analyze", "trace", traces, "--format", "json", "-o", tmp_path).refused("a folder")
        call(capfd, "analyze", "trace", traces, "-o", tmp_path / "no" / "a.json").refused("does not exist")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_that_cannot_be_written(
        self, capfd: pytest.CaptureFixture[str], traces: Path, tmp_path: Path
    ) -> None:
        tmp_path.chmod(0o500)
        call(capfd, "analyze", "trace", traces, "-o", tmp_path / "a.json").refused("cannot be written")


class TestBadInput:
    """Each ends with one clear line on stderr and exit code 1."""

    @pytest.mark.parametrize("what", ["trace", "memory", "run"])
    def test_missing_path(self, capfd: pytest.CaptureFixture[str], tmp_path: Path, what: str) -> None:
        call(capfd, "analyze", what, tmp_path / "absent").refused("absent", "no such")

    @pytest.mark.parametrize("what", ["trace", "memory", "run"])
    def test_empty_folder(self, capfd: pytest.CaptureFixture[str], tmp_path: Path, what: str) -> None:
        call(capfd, "analyze", what, tmp_path).refused(str(tmp_path))

    @pytest.mark.parametrize("what", ["trace", "memory", "run"])
    def test_folder_without_traces(
        self, capfd: pytest.CaptureFixture[str], tmp_path: Path, what: str
    ) -> None:
        (tmp_path / "notes.txt").write_text("nothing here")
        call(capfd, "analyze", what, tmp_path).refused(str(tmp_path))

    def test_report_of_nothing(self, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        report = tmp_path / "report.html"
        call(capfd, "report", tmp_path / "absent", "-o", report).refused("absent")
        assert not report.exists()

    def test_truncated_gzip(self, capfd: pytest.CaptureFixture[str], traces: Path, tmp_path: Path) -> None:
        """Cut inside the header, so that not one event is readable."""
        file = tmp_path / "cut.json.gz"
        file.write_bytes((traces / "rank0_trace.json.gz").read_bytes()[:60])
        call(capfd, "analyze", "trace", file).refused("cut.json.gz")

    def test_a_trace_that_cannot_be_read_is_said_first_and_beside_a_gate_that_passes(
        self, capfd: pytest.CaptureFixture[str], traces: Path, tmp_path: Path
    ) -> None:
        for file in traces.iterdir():
            content = file.read_bytes()
            cut = len(content) // 2 if file.name.startswith("rank1") else None
            (tmp_path / file.name).write_bytes(content[:cut])
        told = call(capfd, "analyze", "trace", tmp_path, "--fail-on", "exposed_frac>1")
        assert told.out.splitlines()[1].startswith(PART)
        assert PART in told.err

    @pytest.mark.parametrize(
        "content",
        [b"", b"[1, 2, 3]", b'{"a": 1}', b'"text"', b"not json", b'{"traceEvents": 7}', b"\x00\xff"],
    )
    def test_not_a_trace(self, capfd: pytest.CaptureFixture[str], tmp_path: Path, content: bytes) -> None:
        file = tmp_path / "some.json"
        file.write_bytes(content)
        call(capfd, "analyze", "trace", file).refused("some.json")
        file.unlink()
        file = tmp_path / "some.json.gz"
        file.write_bytes(gzip.compress(content))
        call(capfd, "analyze", "trace", file).refused("some.json.gz")

    def test_trace_without_steps_is_one_step_with_a_warning(
        self, capfd: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        """One 5 us operator on the CPU: the whole trace, all of it compute."""
        event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 10, "dur": 5}
        file = tmp_path / "rank0_trace.json"
        file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [event]}))
        document = trace_json(capfd, file)
        (step,) = document["ranks"][0]["steps"]
        assert (step["step"], step["duration_ns"], step["breakdown_ns"]["compute"]) == (0, 5000, 5000)
        assert any("step" in line for line in document["warnings"])

    def test_a_rank_missing(self, capfd: pytest.CaptureFixture[str], traces: Path, tmp_path: Path) -> None:
        shutil.copy(traces / "rank1_trace.json.gz", tmp_path)
        document = trace_json(capfd, tmp_path)
        assert [rank["rank"] for rank in document["ranks"]] == [1]
        assert any("1 of 2 ranks" in line for line in document["warnings"])

    def test_pickle_that_wants_a_class(self, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        canary = tmp_path / "canary"
        file = tmp_path / "evil.pickle"
        file.write_bytes(pickle.dumps(_Evil(f"touch {canary}")))
        call(capfd, "analyze", "memory", file).refused("evil.pickle", "system")
        assert not canary.exists()

    def test_pickle_that_is_no_snapshot(self, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "other.pickle"
        for content in (pickle.dumps([1, 2]), pickle.dumps({}), b"text", pickle.dumps({"segments": 1})[:-4]):
            file.write_bytes(content)
            call(capfd, "analyze", "memory", file).refused("other.pickle")

    @pytest.mark.parametrize("what", ["trace", "memory", "run"])
    def test_run_of_a_newer_schema(self, capfd: pytest.CaptureFixture[str], run: Path, what: str) -> None:
        (run / RUN_FILE).write_bytes(msgspec.json.encode(RunInfo(schema="fsdp2prof.run/99")))
        call(capfd, "analyze", what, run).refused("fsdp2prof.run/99", "upgrade")

    def test_run_json_that_is_broken(self, capfd: pytest.CaptureFixture[str], run: Path) -> None:
        (run / RUN_FILE).write_text("{")
        call(capfd, "analyze", "run", run).refused(RUN_FILE)

    def test_run_without_memory(self, capfd: pytest.CaptureFixture[str], run: Path) -> None:
        call(capfd, "analyze", "memory", run).refused("no rank left a memory recording")

    def test_file_that_is_no_run(self, capfd: pytest.CaptureFixture[str], traces: Path) -> None:
        call(capfd, "analyze", "run", traces / "rank0_trace.json.gz").refused("not a run directory")
        call(capfd, "analyze", "run", traces).refused("not a run directory")


class _Evil:
    """Unpickling it would run a command."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self._command,)
