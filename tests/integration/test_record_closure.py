"""A closure that the optimizer calls: its forward and backward are what they are in any other loop."""

from __future__ import annotations

import json

import pytest
from support.cli import call
from support.present import manifest_of, present

from fsdp2prof.analyzers.memory.prepared import prepare
from fsdp2prof.readers.memory.recording import read_memory
from fsdp2prof.readers.run.directory import open_run

pytestmark = pytest.mark.slow


@pytest.fixture
def run(recorded):
    return recorded("closure", 2).run


def test_collectives_belong_to_forward_and_backward(capfd, run):
    ended = call(capfd, "analyze", "run", run, "--format", "json")
    assert ended.code == 0, ended.err
    trace = json.loads(ended.out)["trace"]
    phases = {(row["op"], row["phase"]) for row in trace["groups"]}
    expected = {("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")}
    assert phases == expected
    for rank in trace["ranks"]:
        for step in rank["steps"]:
            assert sum(step["breakdown_ns"].values()) == step["duration_ns"]


def test_optimizer_state_is_what_the_optimizer_holds(run):
    ranks = open_run(run).ranks
    assert len(ranks) == 2
    for rank in ranks:
        (recording,) = read_memory(present(rank.memory))
        rows = prepare(recording, rank.manifest).allocations
        states = rows.category.equals("optimizer_state")
        (optimizer,) = manifest_of(rank).optimizers
        assert rows.size[states & (rows.alloc_order < 0)].sum() == optimizer.state_bytes
        assert not (states & (rows.alloc_order >= 0)).any(), "it was all there before"
        gelu = rows.op.matches(lambda name: "gelu" in name)
        assert gelu.any()
        forward = rows.phase.equals("forward") & rows.category.equals("activation")
        backward = rows.phase.equals("backward") & rows.category.equals("temporary")
        assert (forward | backward)[gelu].all()
