"""Runs read from URLs and results written to them: the same as from a disk, and nothing secret is kept."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.cli import call
from synthetic import Schedule, record, transformer, write

from fsdp2prof.manifest import RankManifest, RunInfo
from fsdp2prof.run_directory import rank_folder
from fsdp2prof.workflows.job.urls import hide_secrets, is_url, local_path

fsspec = pytest.importorskip("fsspec", reason="the extra remote is not installed")

SECRET = "AKIDSECRETSECRET"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs") / "first"
    root.mkdir()
    (root / "run.json").write_bytes(msgspec.json.encode(RunInfo(state="complete", world_size=2)))
    schedule = Schedule(roots=(transformer(2),), shard=2)
    for recording in record(schedule, schedule):
        folder = root / rank_folder(recording.rank)
        folder.mkdir()
        write(recording, folder / "trace.json.gz")
        manifest = RankManifest(state="complete", rank=recording.rank, world_size=2)
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return root


@pytest.fixture
def memory(run: Path) -> Iterator[str]:
    """The run in fsspec's memory file system; gives its folder there."""
    files = fsspec.filesystem("memory")
    files.put(str(run), "/bucket/first", recursive=True)
    yield "memory://bucket/first"
    files.rm("/bucket", recursive=True)


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No copy outlives its command."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


def both(capfd: pytest.CaptureFixture[str], run: Path, url: str, *command: str) -> tuple[str, str]:
    """Run a command on the folder and on the URL; their outputs, the folder's called by the URL."""
    here = call(capfd, *(str(run) if word == "RUN" else word for word in command))
    there = call(capfd, *(url if word == "RUN" else word for word in command))
    assert (there.code, there.err.replace(url, str(run))) == (here.code, here.err)
    return here.out.replace(str(run), url), there.out


@pytest.mark.parametrize(
    "command",
    [
        "analyze run RUN --format json",
        "analyze trace RUN --format json",
        "analyze trace RUN --launch-statistics --format json",
        "check RUN --format json",
        "compare RUN RUN --format json",
        "whatif RUN --format json",
        "export metrics RUN",
        "analyze trace RUN --ranks 7",
        "analyze memory RUN",
    ],
)
def test_the_same_from_memory(
    capfd: pytest.CaptureFixture[str], run: Path, memory: str, command: str
) -> None:
    here, there = both(capfd, run, memory, *command.split())
    assert there == here
    assert tempfile.gettempdir() not in there


def test_only_the_chosen_ranks_are_copied(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    copied: list[str] = []
    kind = type(fsspec.filesystem("memory"))
    get = kind.get_file

    def counted(self: object, path: str, *arguments: object, **options: object) -> None:
        copied.append(path)
        get(self, path, *arguments, **options)

    monkeypatch.setattr(kind, "get_file", counted)
    assert call(capfd, "analyze", "trace", memory, "--ranks", "1").code == 0
    traces = [path for path in copied if path.endswith("trace.json.gz")]
    assert traces == [f"/bucket/first/{rank_folder(1)}/trace.json.gz"]


def test_results_are_written_to_a_url(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, run: Path, memory: str
) -> None:
    files = fsspec.filesystem("memory")
    page = call(capfd, "report", memory)
    assert (page.code, page.out) == (0, f"{memory}/report.html\n")
    assert call(capfd, "report", memory).code == 0  # an earlier page is replaced
    copy = tmp_path / "first"
    shutil.copytree(run, copy)
    assert call(capfd, "report", copy).code == 0
    here, there = (
        page.replace(b"<wbr>", b"")  # where a path may break
        for page in ((copy / "report.html").read_bytes(), files.cat_file("/bucket/first/report.html"))
    )
    assert there == here.replace(str(copy).encode(), memory.encode())

    target = "memory://bucket/out.json"
    assert call(capfd, "analyze", "run", memory, "-o", target).code == 0
    assert msgspec.json.decode(files.cat_file("/bucket/out.json"))["run"]["path"] == memory
    call(capfd, "analyze", "run", memory, "-o", target).refused(f"{target}: exists already")
    assert call(capfd, "analyze", "run", run, "-o", target, "-f").code == 0
    assert msgspec.json.decode(files.cat_file("/bucket/out.json"))["run"]["path"] == str(run)

    assert call(capfd, "compare", target, memory).code == 0
    assert call(capfd, "export", "csv", memory, "-o", "memory://bucket/tables").code == 0
    assert files.isfile("/bucket/tables/ranks.csv") or files.glob("/bucket/tables/*.csv")
    assert call(capfd, "export", "perfetto", memory, "-o", "memory://bucket/all.json.gz").code == 0
    assert files.isfile("/bucket/all.json.gz")
    call(capfd, "export", "csv", memory, "-o", "memory://bucket/tables").refused("exists already")


def test_what_is_refused(capfd: pytest.CaptureFixture[str], memory: str) -> None:
    call(capfd, "analyze", "run", f"{memory}/nothing").refused("memory://bucket/first/nothing: no such file")
    call(capfd, "analyze", "run", f"nosuch://user:{SECRET}@host/run").refused(
        "nosuch://host/run: cannot be read"
    )
    call(capfd, "analyze", "run", memory, "-o", "memory://").refused("names no file")
    call(capfd, "report", memory, "--open").refused("--open would have no effect", code=2)


def test_names_that_climb_out_are_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: str
) -> None:
    """An object store's keys are any text."""
    kind = type(fsspec.filesystem("memory"))
    found = {"/bucket/first/../../../evil.json": {"size": 1}}
    with monkeypatch.context() as patch:
        patch.setattr(kind, "find", lambda *_, **__: found)
        call(capfd, "analyze", "run", memory).refused("has a file with an invalid name")
    assert not list(tmp_path.rglob("evil*"))


def test_urls() -> None:
    assert [is_url(text) for text in ("s3://b/k", "C:/x", "runs/a", "/a://b", "gs://x")] == [
        True, False, False, False, True,
    ]  # fmt: skip
    assert local_path("file:///a/b%20c") == Path("/a/b c")
    assert local_path("s3://bucket/x") is None
    hidden = hide_secrets(f"https://user:{SECRET}@host/run?X-Amz-Signature={SECRET}, s3://bucket/a@b")
    assert hidden == "https://host/run, s3://bucket/a@b"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, run: Path) -> Iterator[str]:
    """The run on a real object store's protocol: moto's S3 server."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = pytest.importorskip("moto.server", reason="moto's server is not installed")
    started = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET[::-1],
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    files.mkdir("bucket")
    files.put(str(run), "bucket/first", recursive=True)
    yield "s3://bucket/first"
    s3fs.S3FileSystem.clear_instance_cache()
    started.stop()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_an_object_store(capfd: pytest.CaptureFixture[str], run: Path, bucket: str) -> None:
    for command in ("analyze run RUN --format json", "analyze trace RUN -j 2", "check RUN"):
        here, there = both(capfd, run, bucket, *command.split())
        assert there == here
    assert call(capfd, "report", bucket).out == f"{bucket}/report.html\n"
    files = fsspec.filesystem("s3")
    everything = [files.cat_file(path) for path in files.find("bucket")]
    assert len(everything) == 6
    assert not [one for one in everything if SECRET.encode() in one or SECRET[::-1].encode() in one]
    missing = call(capfd, "analyze", "run", "s3://nobucket/run")
    missing.refused("s3://nobucket/run: ")
    assert SECRET not in missing.err
    assert os.environ["AWS_ACCESS_KEY_ID"] == SECRET
