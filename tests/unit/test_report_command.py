"""``report`` without ``-o``: beside its input, in place of an earlier report only, its path on stdout."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from unittest import mock

import pytest
from support.cli import call
from synthetic import Schedule, record, transformer, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recordings = record(Schedule(roots=(transformer(1),), steps=1))
    return write_run(recordings, tmp_path_factory.mktemp("report") / "run")


def test_it_is_written_beside_the_run_and_again_in_its_place(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        ended = call(capfd, "report", run)
        assert ended.code == 0
        assert ended.out == f"{run / 'report.html'}\n"
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_of_a_file_it_stands_beside_the_file(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = next(run.glob("*.json.gz"))
    assert call(capfd, "report", trace).out == f"{trace}.report.html\n"


def test_somebody_else_s_file_is_refused(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "rank0_trace.json.gz"
    trace.write_bytes(next(run.glob("*.json.gz")).read_bytes())
    own = tmp_path / "report.html"
    own.write_text("<p>mine")
    call(capfd, "report", tmp_path).refused("report.html", "add -f")
    assert own.read_text() == "<p>mine"
    assert call(capfd, "report", tmp_path, "-f").code == 0
    assert "fsdp2prof" in own.read_text()


@pytest.mark.parametrize("missing", [None, webbrowser.Error()])
def test_open_shows_the_page_where_there_is_a_browser(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], missing: Exception | None
) -> None:
    page = tmp_path / "page.html"
    with mock.patch("click.launch") as launch, mock.patch("webbrowser.get", side_effect=missing):
        ended = call(capfd, "report", run, "-o", page, "--open")
    assert ended.code == 0
    assert ended.out == ""
    assert (f"no browser here: copy {page}" in ended.err) is (missing is not None)
    assert launch.call_args_list == ([] if missing else [mock.call(page.as_uri())])
