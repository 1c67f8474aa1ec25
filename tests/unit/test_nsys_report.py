"""Reports of Nsight Systems: one run as Kineto's JSON and in the exporter's schema gives the same answers."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from support.cli import call
from synthetic import Layer, Recording, Schedule, record, transformer, write
from synthetic.nsys import write_nsys

from fsdp2prof.analyzers.trace.analysis import RankAnalysis, analyze_rank
from fsdp2prof.errors import InputError, TraceError
from fsdp2prof.readers.trace.chrome_trace import read_trace
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.job.job_files import open_job

SCHEDULE = Schedule(roots=(transformer(),))


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    slow = Schedule(roots=((SCHEDULE.roots[0][0], *map(slower, SCHEDULE.roots[0][1:])),))
    return record(SCHEDULE, slow)


def slower(layer: Layer) -> Layer:
    return replace(layer, forward_ns=2 * layer.forward_ns)


def facts(found: RankAnalysis) -> object:
    """What does not hang on the collectives' sizes, which a report does not hold."""
    rows = sorted(
        (r.step, r.fqn or "", r.phase, r.op, r.count, r.total_ns, r.exposed_ns) for r in found.groups
    )
    return (
        rows,
        [(one.step, one.breakdown_ns) for one in found.rank.steps],
        found.rank.communication.exposed_ns,
    )


@pytest.mark.parametrize("added", [False, True], ids=["names", "names with what emit_nvtx adds"])
def test_a_report_says_what_the_kineto_trace_says(tmp_path, recordings, added):
    kineto = analyze_rank(read_trace(write(recordings[0], tmp_path / "trace.json"), workers=1))
    trace = read_trace(write_nsys(recordings[:1], tmp_path / "report.sqlite", added=added))
    assert trace.warnings == ()
    assert (trace.device.type, trace.device.name, trace.device.capability) == (
        "cuda",
        "NVIDIA H100 80GB HBM3",
        "9.0",
    )
    nsys = analyze_rank(trace)
    assert facts(nsys) == facts(kineto)
    assert {row.fqn for row in nsys.groups} == {"", "layers.0", "layers.1", "layers.2"}
    flops = [step.flops for step in nsys.rank.steps]
    assert flops == ([step.flops for step in kineto.rank.steps] if added else [None] * len(flops))


def test_the_processes_of_a_report_are_ranks(tmp_path, recordings):
    path = write_nsys(recordings, tmp_path / "report.sqlite")
    result = analyze_trace(open_job(path))
    assert [rank.rank for rank in result.ranks] == [0, 1]
    assert "assumed to be ranks 0 to 1 by device" in result.warnings[0]
    one = analyze_trace(open_job(path, ranks=[1]))
    alone = analyze_rank(read_trace(write(recordings[1], tmp_path / "trace.json"), workers=1))
    assert [s.breakdown_ns for s in one.ranks[0].steps] == [s.breakdown_ns for s in alone.rank.steps]


def test_a_folder_with_a_report_of_several_processes_says_to_name_the_file(tmp_path, recordings):
    write_nsys(recordings, tmp_path / "job.sqlite")
    (tmp_path / "logs").mkdir()
    with pytest.raises(InputError, match=r"job\.sqlite: a report of 2 processes"):
        analyze_trace(open_job(tmp_path))


def test_the_command_line_reads_a_report(tmp_path, recordings, capfd):
    path = write_nsys(recordings[:1], tmp_path / "rank3.sqlite")
    ended = call(capfd, "analyze", "trace", path, "--full")
    assert ended.code == 0
    assert "layers.0-2" in ended.out
    (tmp_path / "folder").mkdir()
    path.rename(tmp_path / "folder" / path.name)
    assert analyze_trace(open_job(tmp_path / "folder")).ranks[0].rank == 3


def test_without_nvtx_the_report_says_how_to_get_layers(tmp_path, recordings):
    trace = read_trace(write_nsys(recordings[:1], tmp_path / "report.sqlite", nvtx=False))
    with closing(sqlite3.connect(tmp_path / "report.sqlite")) as report:
        report.execute("DROP TABLE NVTX_EVENTS")
    trace = read_trace(tmp_path / "report.sqlite")
    assert "--pytorch=autograd-nvtx" in trace.warnings[0]
    assert all(row.fqn is None for row in analyze_rank(trace).groups)


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL", "has no CUDA kernels: profile with --trace=cuda,nvtx"),
        ("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL", "has no CUDA kernels"),
        (
            "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL; CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS "
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS start FROM n",
            "has no CUDA kernels",
        ),
    ],
)
def test_a_report_without_kernels_is_refused(tmp_path, recordings, sql, said):
    path = write_nsys(recordings[:1], tmp_path / "report.sqlite")
    with closing(sqlite3.connect(path)) as report:
        report.executescript(sql)
    with pytest.raises(TraceError, match=said):
        read_trace(path)


def test_other_files_are_refused_in_a_line(tmp_path, recordings, capfd):
    other, cut, raw = (tmp_path / name for name in ("mlflow.sqlite", "cut.sqlite", "report.nsys-rep"))
    with closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE runs (id INTEGER)")
        database.commit()
    cut.write_bytes(write_nsys(recordings[:1], tmp_path / "whole.sqlite").read_bytes()[:20_000])
    raw.write_bytes(b"NSYS")
    for path, said in (
        (other, "not an export of Nsight Systems"),
        (cut, "not a readable export of Nsight Systems"),
        (raw, "nsys export --type sqlite report.nsys-rep"),
    ):
        ended = call(capfd, "analyze", "trace", path)
        assert ended.code == 1
        assert said in ended.err
        assert "Traceback" not in ended.err
    with pytest.raises(InputError):
        open_job(cut).traces  # noqa: B018


def test_rows_that_are_none_are_left_out_and_counted(tmp_path, recordings):
    path = write_nsys(recordings[:1], tmp_path / "report.sqlite")
    whole = read_trace(path)
    with closing(sqlite3.connect(path)) as report:
        report.execute(
            "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid) "
            "SELECT 5, NULL, 59, 'x', globalTid FROM NVTX_EVENTS LIMIT 1"
        )
        report.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT 'a', 'b', 0, 1, 7, 1, globalPid, 1, 1, NULL "
            "FROM CUPTI_ACTIVITY_KIND_KERNEL LIMIT 1"
        )
        report.commit()
    spoilt = read_trace(path)
    assert len(spoilt.events) == len(whole.events)
    assert sum("1 rows without a start and an end" in warning for warning in spoilt.warnings) == 2
