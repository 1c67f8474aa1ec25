"""Making, joining and refusing run directories, by the launchers of one or several nodes."""

from __future__ import annotations

import shutil
from importlib.metadata import Distribution, PackageNotFoundError

import msgspec
import pytest

import fsdp2prof
from fsdp2prof.errors import RunDirectoryError
from fsdp2prof.manifest import RankManifest, RecordOptions
from fsdp2prof.recorder.run_folder import is_alone, prepare_run, records_of_node
from fsdp2prof.run_directory import MANIFEST_FILE, node_file, rank_folder


def prepare(run, node=0, *, force=False):
    return prepare_run(run, RecordOptions(), ["train"], node_rank=node, force=force)


def make_rank(run, rank, node, **manifest):
    folder = run / rank_folder(rank)
    folder.mkdir()
    document = RankManifest(rank=rank, node_rank=node, world_size=4, **manifest)
    (folder / MANIFEST_FILE).write_bytes(msgspec.json.encode(document))


def names(run):
    return sorted(entry.name for entry in run.iterdir())


def test_a_checkout_that_is_not_installed_records_too(tmp_path, monkeypatch):
    def not_found(name):
        if name == "fsdp2prof":
            raise PackageNotFoundError(name)
        return found(name)

    found = Distribution.from_name
    monkeypatch.setattr(Distribution, "from_name", not_found)
    assert prepare(tmp_path / "run").versions["fsdp2prof"] == fsdp2prof.__version__


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_nodes_join_a_run_in_any_order(tmp_path, order):
    run = tmp_path / "shared" / "run"
    for node in order:
        prepare(run, node)
    assert names(run) == ["run-node-00001.json", "run-node-00002.json", "run.json"]


def test_what_another_node_is_about_to_write_is_no_obstacle(tmp_path):
    (tmp_path / ".run-node-00001.json.4711").touch()
    prepare(tmp_path, 0)
    assert (tmp_path / "run.json").is_file()


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_refuses_its_own_file_only(tmp_path, node):
    prepare(tmp_path, node)
    prepare(tmp_path, 1 - node)
    with pytest.raises(RunDirectoryError, match="already; choose another, or overwrite it with -f"):
        prepare(tmp_path, node)
    prepare(tmp_path, node, force=True)


def test_the_refusal_of_node_0_says_how_other_nodes_join(tmp_path):
    prepare(tmp_path)
    with pytest.raises(RunDirectoryError, match="other nodes of the same run take --node-rank N"):
        prepare(tmp_path)


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("force", [False, True])
def test_no_node_joins_a_folder_that_no_recorder_wrote(tmp_path, node, force):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(RunDirectoryError, match="not a run directory" if force else "exists already"):
        prepare(tmp_path, node, force=force)
    assert names(tmp_path) == ["thesis.txt"]


@pytest.mark.parametrize(("node", "removed"), [(0, "rank-00000"), (1, "rank-00001")])
def test_forcing_removes_the_ranks_of_this_node(tmp_path, node, removed):
    for own in (0, 1):
        prepare(tmp_path, own)
        make_rank(tmp_path, own, own)
    (tmp_path / "rank-00002").mkdir()
    before = names(tmp_path)
    prepare(tmp_path, node, force=True)
    assert names(tmp_path) == [name for name in before if name != removed]


def test_nodes_that_force_at_the_same_moment_leave_each_other_alone(tmp_path, monkeypatch):
    """While node 1 removes a rank, its manifest already gone, node 0 starts to force."""
    for own in (0, 1):
        prepare(tmp_path, own)
        make_rank(tmp_path, own, own)
    removed = []

    def rmtree(folder):
        removed.append(folder.name)
        (folder / MANIFEST_FILE).unlink()
        if folder.name == rank_folder(1):
            prepare(tmp_path, 0, force=True)
        folder.rmdir()

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    prepare(tmp_path, 1, force=True)
    assert removed == [rank_folder(1), rank_folder(0)]
    assert names(tmp_path) == ["run-node-00001.json", "run.json"]


def test_forcing_a_run_of_one_node_removes_all_ranks(tmp_path):
    prepare(tmp_path)
    make_rank(tmp_path, 0, 0)
    (tmp_path / "rank-00001").mkdir()
    prepare(tmp_path, force=True)
    assert names(tmp_path) == ["run.json"]


def test_a_node_speaks_of_its_own_ranks(tmp_path):
    prepare(tmp_path)
    make_rank(tmp_path, 0, 0)
    (tmp_path / "rank-00003").mkdir()
    assert is_alone(tmp_path, 0)
    assert [record.rank for record in records_of_node(tmp_path, 0)] == [0, 3]
    prepare(tmp_path, 1)
    make_rank(tmp_path, 2, 1)
    assert not is_alone(tmp_path, 0)
    assert not is_alone(tmp_path, 1)
    assert [record.rank for record in records_of_node(tmp_path, 0)] == [0]
    assert [record.rank for record in records_of_node(tmp_path, 1)] == [2]
    assert (tmp_path / node_file(1)).is_file()
