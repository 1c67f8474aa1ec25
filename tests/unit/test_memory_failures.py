"""A failed request: what was held counts as it stood then, and what is not known is not said."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from support.snapshots import Training, fail_at, let_go

from fsdp2prof.analyzers.memory.analysis import analyze_memory
from fsdp2prof.analyzers.memory.prepared import ending_failures
from fsdp2prof.readers.memory.recording import read_memory
from fsdp2prof.readers.safe_pickle import load_containers
from fsdp2prof.results.memory import MemoryAnalysis, RankMemory
from fsdp2prof.results.peak import OutOfMemory

MIB = 1 << 20


def forward(t: Training, layers: int = 4, kept: int = 8 * MIB, more: str = "") -> Training:
    """Each layer keeps some bytes and gets rid of a quarter as many."""
    for layer in range(layers):
        t.within(f"FSDP::pre_forward (layers.{layer})")
        t.get(f"saved {layer}{more}", kept).get("passing", kept // 4).drop("passing")
        t.within(f"FSDP::post_forward (layers.{layer})")
    return t


def fail(t: Training, device_free: int | None = 3 * MIB) -> Training:
    """A request of 20 MiB fails in forward, with 10 MiB of its layer's own temporaries alive."""
    t.within("FSDP::pre_forward (head)").get("temporary", 10 * MIB)
    known = {} if device_free is None else {"device_free": device_free}
    frames = [{"filename": "train.py", "line": 7, "name": "forward"}]
    t.event("oom", 0, 20 * MIB, frames=frames, **known)
    return t


def unwind(t: Training, layers: int = 4, more: str = "") -> Training:
    return t.drop("temporary", *(f"saved {layer}{more}" for layer in range(layers)))


def analyze(t: Training, folder: Path) -> MemoryAnalysis:
    return analyze_memory([(0, t.read(folder), None)])


def savings(oom: OutOfMemory) -> list[tuple[str, int, bool | None]]:
    return [(remedy.action, remedy.saves_bytes, remedy.enough) for remedy in oom.remedies]


def failure(rank: RankMemory) -> OutOfMemory:
    assert rank.oom is not None
    return rank.oom


def test_memory_freed_after_the_failure_is_what_the_forward_held(tmp_path: Path) -> None:
    """Four layers keep 8 MiB each; checkpointing keeps none of it, but one block's while it is recomputed."""
    for build in (lambda t: t, unwind, lambda t: unwind(t).get("message", 512)):
        rank = analyze(build(fail(forward(Training()))), tmp_path).ranks[0]
        oom = failure(rank)
        assert {name: size for name, size in rank.peak.categories.items() if size} == {"activation": 42 * MIB}
        assert oom.categories == {"activation": 42 * MIB}
        assert (rank.peak.phase, oom.phase, rank.peak.fqn, oom.fqn) == ("forward", "forward", "head", "head")
        assert oom.missing_bytes == 17 * MIB
        assert ("smaller_batch", 31 * MIB, True) in savings(oom)


@pytest.mark.parametrize(("device_free", "enough"), [(11, False), (12, None), (35, None), (36, True)])
def test_checkpointing_is_offered_where_activations_dominate(
    tmp_path: Path, device_free: int, enough: bool | None
) -> None:
    """Four layers keep 8 + 4 + 4 MiB; one is recomputed at a time, and its input takes 8 MiB at most.

    So checkpointing drops 3 x 8 to 3 x 16 MiB, of 60 MiB that the request takes.
    """
    t = Training()
    for layer in range(4):
        t.within(f"FSDP::pre_forward (layers.{layer})").get(f"saved {layer}", 8 * MIB)
        t.get(f"norm {layer}", 4 * MIB).get(f"gate {layer}", 4 * MIB)
        t.within(f"FSDP::post_forward (layers.{layer})")
    t.event("oom", 0, 60 * MIB, device_free=device_free * MIB)
    oom = failure(analyze(t, tmp_path).ranks[0])
    assert ("activation_checkpointing", 48 * MIB, enough) in savings(oom)


def test_checkpointed_blocks_have_nothing_to_drop(tmp_path: Path) -> None:
    """One allocation a block is its input: 1 MiB of layers.9, so 3 times 8 MiB more, but one is in use."""
    t = Training().within("FSDP::pre_forward (layers.9)").get("saved", MIB)
    t.within("FSDP::post_forward (layers.9)")
    t = unwind(fail(forward(t, layers=3, kept=9 * MIB)), layers=3).drop("saved")
    assert ("activation_checkpointing", 16 * MIB, False) in savings(failure(analyze(t, tmp_path).ranks[0]))
    equal = fail(forward(Training()))
    actions = {action for action, _, _ in savings(failure(analyze(equal, tmp_path).ranks[0]))}
    assert "activation_checkpointing" not in actions


def test_a_step_that_failed_and_was_tried_again(tmp_path: Path) -> None:
    """The first forward's memory is what it held; the second, smaller one goes on to its backward."""
    t = unwind(fail(forward(Training())))
    forward(t, kept=4 * MIB, more=" again")
    t.within("FSDP::pre_backward (layers.3)").get("upstream", MIB).drop("upstream")
    t.drop(*(f"saved {layer} again" for layer in range(4))).within("FSDP::root_post_backward_callback")
    recording = t.read(tmp_path)
    assert [one.last for one in ending_failures(recording)] == [False]
    rank = analyze_memory([(0, recording, None)]).ranks[0]
    assert rank.peak.categories["activation"] == rank.peak.allocated_bytes == 42 * MIB
    assert len(rank.timeline["time_ns"]) == recording.events  # the second try is in it


def test_each_of_several_tries_that_failed(tmp_path: Path) -> None:
    """Three requests in a row fail the first try; the second fails too, and everything goes."""
    unwind(fail(forward(t := Training())).event("oom", 0, 20 * MIB).event("oom", 0, 20 * MIB))
    unwind(fail(forward(t, kept=4 * MIB, more=" again")), more=" again")
    recording = t.read(tmp_path)
    assert len(recording.ooms) == 4
    assert [one.last for one in ending_failures(recording)] == [False, True]
    rank = analyze_memory([(0, recording, None)]).ranks[0]
    assert rank.peak.categories["activation"] == rank.peak.allocated_bytes
    assert failure(rank).categories == {"activation": (16 + 10) * MIB}


def test_work_that_goes_on_after_a_failed_request(tmp_path: Path) -> None:
    """A library that gets no workspace tries without: what is freed in forward stays a temporary."""
    t = fail(forward(Training())).get("other way", 20 * MIB).drop("temporary", "other way")
    t.within("FSDP::post_forward (head)").within("FSDP::pre_backward (layers.3)")
    t.get("upstream", 40 * MIB).drop("upstream").drop(*(f"saved {layer}" for layer in range(4)))
    recording = t.read(tmp_path)
    assert ending_failures(recording) == []
    oom = failure(analyze_memory([(0, recording, None)]).ranks[0])
    assert oom.categories == {"activation": 32 * MIB, "temporary": 10 * MIB}


def test_a_leak_is_seen_though_everything_goes_at_the_end(tmp_path: Path) -> None:
    t = Training()
    for step in range(4):
        t.label("START", f"ProfilerStep#{step}").within("FSDP::pre_forward (a)")
        t.get("activation", 1000).get(f"kept {step}", 9 * MIB)
        t.within("FSDP::post_forward (a)").drop("activation").label("END", f"ProfilerStep#{step}")
    t.event("oom", 0, 20 * MIB).drop(*(f"kept {step}" for step in range(4)))
    (leak,) = [finding for finding in analyze(t, tmp_path).findings if finding.id == "leak"]
    assert leak.evidence["bytes_per_step"] == 9 * MIB


def test_unknown_free_memory_makes_enough_unknown(tmp_path: Path) -> None:
    analysis = analyze(fail(forward(Training()), device_free=None), tmp_path)
    oom = failure(analysis.ranks[0])
    assert (oom.device_free_bytes, oom.missing_bytes) == (None, None)
    assert {remedy.enough for remedy in oom.remedies} == {None}
    told = " ".join([analysis.findings[0].message, *analysis.verdict])
    assert "the device's free memory is unknown" in told
    assert "The amount needed is unknown" in told
    assert "No single change" not in told


def test_a_driver_that_had_enough_lacked_nothing(tmp_path: Path) -> None:
    """20 MiB were asked for and 64 MiB free: a limit of the process, and nobody knows which change helps."""
    analysis = analyze(fail(forward(Training()), device_free=64 * MIB), tmp_path)
    oom = failure(analysis.ranks[0])
    assert (oom.device_free_bytes, oom.missing_bytes) == (64 * MIB, None)
    assert {remedy.enough for remedy in oom.remedies} == {None}
    assert "although the device had 64.0 MiB left" in analysis.verdict[0]


def test_what_a_constructor_made_is_no_input(tmp_path: Path) -> None:
    """Parameters made in ``__init__`` live when the first forward begins, like a batch does."""
    built = [{"filename": "model.py", "line": 3, "name": "__init__"}]
    loaded = [{"filename": "train.py", "line": 9, "name": "main"}]
    t = Training().get("weight", 700, frames=built).get("batch", 300, frames=loaded)
    rank = analyze(forward(t, layers=1, kept=4).drop("batch"), tmp_path).ranks[0]
    assert (rank.peak.categories["unattributed"], rank.peak.categories["input"]) == (700, 300)


def real(folder: Path, name: str) -> dict[str, object]:
    snapshot: dict[str, object] = load_containers(folder / "snapshots" / name)
    return snapshot


def analyzed(snapshot: dict[str, object], folder: Path) -> RankMemory:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    return analyze_memory([(0, recording, None) for recording in read_memory(path)]).ranks[0]


@pytest.mark.real_data
@pytest.mark.parametrize("rank", [0, 1])
def test_a_real_failure_is_the_same_story_when_its_memory_is_freed_after(
    real_data: Path, tmp_path: Path, rank: int
) -> None:
    name = f"fsdp2-llama8b-a100-oom/rank{rank}_memory_snapshot.pickle"
    before, after = (
        analyzed(change(real(real_data, name)), tmp_path) for change in (lambda snapshot: snapshot, let_go)
    )
    assert after.peak == before.peak
    assert after.oom == replace(failure(before), largest_free_block_bytes=None)
    assert failure(after).remedies[0].action == "activation_checkpointing"
    assert failure(after).categories["activation"] > 0.85 * failure(after).allocated_bytes
    assert "temporary" not in failure(after).categories


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("name", "event", "phase"),
    [
        ("transformer_medium_train", 1500, "forward"),
        ("transformer_medium_train", 2500, "forward"),
        ("transformer_medium_train", 3500, "backward"),
        ("transformer_200_events", 600, "forward"),
        ("transformer_200_events", 1500, "backward"),
    ],
)
def test_a_training_without_labels_that_fails(
    real_data: Path, tmp_path: Path, name: str, event: int, phase: str
) -> None:
    """Stacks tell the phase, the same for the peak and the request; freed or not, the story is one."""

    def failed() -> dict[str, object]:
        return fail_at(real(real_data, f"single-gpu/{name}.pickle"), event, 4 << 30)

    ends, unwound = analyzed(failed(), tmp_path), analyzed(let_go(failed()), tmp_path)
    assert unwound.peak == ends.peak
    assert failure(unwound) == replace(failure(ends), largest_free_block_bytes=None)
    assert (failure(ends).phase, ends.peak.phase) == (phase, phase)
    held = failure(ends).categories
    assert held["activation"] > 5 * held.get("temporary", 0)
    (offered,) = [one for one in failure(ends).remedies if one.action == "activation_checkpointing"]
    assert offered.saves_bytes <= held["activation"]
    assert offered.enough is None
