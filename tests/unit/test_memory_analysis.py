"""Memory analyses of histories made by hand, and of a real run that ran out of memory."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.present import present
from support.sharded_groups import sharded_group
from support.snapshots import Training

from fsdp2prof.analyzers.compare.memory_peaks import compare_memory
from fsdp2prof.analyzers.memory import findings as memory_findings
from fsdp2prof.analyzers.memory.analysis import analyze_memory
from fsdp2prof.analyzers.memory.findings import find_leaks
from fsdp2prof.analyzers.memory.prepared import PreparedRecording, live_at, prepare, running_total
from fsdp2prof.manifest import DeviceInfo, RankManifest, RootInfo, TensorInfo
from fsdp2prof.readers.memory.recording import read_memory
from fsdp2prof.results.memory import MemoryAnalysis, RankMemory
from fsdp2prof.results.peak import Fragmentation
from fsdp2prof.tables.allocations import AllocationTable, MemoryRecording, Stacks
from fsdp2prof.tables.columns import NEVER, Strings
from fsdp2prof.tables.trace import StepTable

MIB = 1 << 20


def one_step(tail: bool = True) -> Training:
    """A step of a root without parameters and two layers, everything that FSDP2 allocates in it.

    bf16 parameters of 800 bytes a layer on 2 ranks, fp32 reduction; sizes tell what is what.
    """
    t = Training()
    t.event("free_requested", 77, 16).event("free_completed", 77, 16)
    t.get("batch", 64)
    t.within("FSDP::root_pre_forward")
    for layer in ("layers.0", "layers.1"):
        t.label("START", f"FSDP::pre_forward ({layer})")
        t.within(
            f"FSDP::all_gather ({layer})",
            ("get", f"cast {layer}", 400),
            ("get", f"gathered {layer}", 800),
            f"cast {layer}",
        )
        t.within(
            f"FSDP::all_gather_copy_out ({layer})",
            ("get", f"parameter {layer}", 801),
            ("get", "split", 9),
            "split",
        )
        t.drop(f"gathered {layer}")
        t.label("END", f"FSDP::pre_forward ({layer})")
        t.get(f"saved {layer}", 1000).get("passing", 33).drop("passing")
        t.within(f"FSDP::post_forward ({layer})", f"parameter {layer}")
    t.get("loss", 4)
    for layer in ("layers.1", "layers.0"):
        t.label("START", f"FSDP::pre_backward ({layer})")
        t.within(f"FSDP::all_gather ({layer})", ("get", f"gathered {layer}", 800))
        t.within(f"FSDP::all_gather_copy_out ({layer})", ("get", f"parameter {layer}", 801))
        t.drop(f"gathered {layer}")
        t.label("END", f"FSDP::pre_backward ({layer})")
        t.get(f"gradient {layer}", 802).get("upstream", 55).drop("upstream", f"saved {layer}")
        t.within(f"FSDP::post_backward_reshard ({layer})", f"parameter {layer}")
        t.label("START", f"FSDP::post_backward_reduce ({layer})")
        t.get(f"input {layer}", 1600).drop(f"gradient {layer}").get(f"output {layer}", 806)
        t.label("END", f"FSDP::post_backward_reduce ({layer})")
        if not tail:
            return t
    t.within("FSDP::root_post_backward_callback")
    t.drop("input layers.1", "input layers.0")
    t.label("START", "Optimizer.step#AdamW.step")
    t.get("exp_avg", 810).get("denominator", 405).drop("denominator")
    t.label("END", "Optimizer.step#AdamW.step")
    t.label("START", "Optimizer.zero_grad#AdamW.zero_grad").drop("output layers.0", "output layers.1")
    t.label("END", "Optimizer.zero_grad#AdamW.zero_grad")
    return t


def analyze(recording: MemoryRecording, manifest: RankManifest | None = None) -> RankMemory:
    return analyze_memory([(0, recording, manifest)]).ranks[0]


def categories(view: PreparedRecording) -> dict[int, str]:
    """Category by size, where all allocations of a size agree."""
    found: dict[int, set[str]] = {}
    rows = view.allocations
    for size, category in zip(rows.size.tolist(), rows.category.to_list(), strict=True):
        found.setdefault(size, set()).add(str(category))
    return {size: " ".join(sorted(names)) for size, names in found.items()}


def test_every_category_of_a_step(tmp_path: Path):
    view = prepare(one_step().read(tmp_path), None)
    assert categories(view) == {
        16: "unattributed",  # from before, freed inside
        64: "input",
        400: "all_gather_buffer",
        800: "all_gather_buffer",
        801: "unsharded_parameter",
        9: "temporary",  # freed where it was made
        1000: "activation",
        33: "temporary",
        4: "activation",  # the loss is alive when its backward begins
        802: "unsharded_gradient",
        55: "temporary",
        1600: "reduce_scatter_buffer",
        806: "sharded_gradient",
        810: "optimizer_state",
        405: "temporary",
    }
    fqns = dict(zip(view.allocations.size.tolist(), view.allocations.fqn.to_list(), strict=True))
    assert fqns[1000] == "layers.1"
    assert fqns[64] is None
    phases = dict(zip(view.allocations.size.tolist(), view.allocations.phase.to_list(), strict=True))
    assert (phases[1000], phases[802], phases[810], phases[64]) == (
        "forward",
        "backward",
        "optimizer",
        "other",
    )


def test_history_that_ends_inside_the_backward(tmp_path: Path):
    """Nothing outlives a backward that never ended: the last allocation of the reduce is the gradient."""
    found = categories(prepare(one_step(tail=False).read(tmp_path), None))
    assert found[1600] == "reduce_scatter_buffer"
    assert found[806] == "sharded_gradient"
    assert found[802] == "unsharded_gradient"
    assert found[1000] == "activation"


def test_peak_layers_and_timeline(tmp_path: Path):
    rank = analyze(one_step().read(tmp_path))
    peak = rank.peak
    # in layers.0's backward, before its activations go
    held = {
        "input": 64,
        "activation": 4 + 1000,
        "reduce_scatter_buffer": 1600,
        "sharded_gradient": 806,
        "unsharded_parameter": 801,
        "unsharded_gradient": 802,
        "temporary": 55,
    }
    assert peak.allocated_bytes == sum(held.values()) == 5132
    assert {name: size for name, size in peak.categories.items() if size} == held
    assert sum(peak.categories.values()) == sum(row.bytes for row in peak.by_layer) == 5132
    assert (peak.phase, peak.fqn) == ("backward", "layers.0")
    assert [block.bytes for block in peak.largest_blocks] == [1600, 1000, 806, 802, 801, 64, 55, 4]
    assert present(peak.largest_blocks[-1].age_ns) > 0
    layers = {(row.fqn, row.phase): row for row in rank.layers}
    assert layers["layers.1", "forward"].delta_bytes == 1000
    assert layers["layers.0", "backward"].peak_bytes == 5132
    assert layers["layers.0", "backward"].delta_bytes == 1600 + 806 - 1000
    names = [name for name in rank.timeline if name not in ("time_ns", "reserved")]
    course = [sum(values) for values in zip(*(rank.timeline[name] for name in names), strict=True)]
    assert max(course) == 5132
    assert rank.timeline["time_ns"][course.index(5132)] == peak.time_ns
    others = [(other.allocated_bytes, other.fqn, other.phase) for other in peak.others]
    assert (64 + 4 + 1000 + 1000 + 801 + 802 + 55, "layers.1", "backward") in others
    assert others == sorted(others, key=lambda other: -other[0])


def test_known_addresses_name_parameters_and_states(tmp_path: Path):
    t = Training()
    t.segment(5000, [(512, 500, "active_allocated"), (512, 400, "active_allocated")])
    t.within("Optimizer.step#AdamW.step", ("get", "state", 300))
    state = t._at["state"][0]
    tensors = [
        TensorInfo(category="sharded_parameter", fqn="layers.0", address=5000, nbytes=500),
        TensorInfo(category="sharded_parameter", fqn="layers.0", address=5512, nbytes=400, root=1),
        TensorInfo(category="optimizer_state", fqn="layers.7", address=state, nbytes=300),
        TensorInfo(category="sharded_gradient", fqn="layers.9", address=state, nbytes=299),
    ]
    manifest = RankManifest(device=DeviceInfo(type="cuda"), tensors=tensors[:3])
    rank = analyze(t.read(tmp_path), manifest)
    assert {(row.fqn, row.category): row.bytes for row in rank.peak.by_layer} == {
        ("layers.0", "sharded_parameter"): 900,
        ("layers.7", "optimizer_state"): 300,
    }
    other_size = RankManifest(device=DeviceInfo(type="cuda"), tensors=[*tensors[:2], tensors[3]])
    found = {row.category for row in analyze(t.read(tmp_path), other_size).peak.by_layer}
    assert found == {"sharded_parameter", "optimizer_state"}  # an address reused by another size says nothing


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("copied", "said"), [(4, "parameter_copy"), (2, "input")])
def test_copies_of_all_parameters_are_no_inputs(tmp_path: Path, copied: int, said: str, parts: int):
    """An average of weights, of the shards of two or whole: new tensors of the four sizes in each step."""
    shards = [400, 408, 416, 424]
    parameters = [
        sharded_group("a", [parts * size // 4], ranks=2, rows=parts * size // 8).parameters[0]
        for size in shards
    ]
    group = msgspec.structs.replace(sharded_group("a", [200], ranks=2, rows=100), parameters=parameters)
    t = Training()
    for step in range(2):
        t.label("START", f"ProfilerStep#{step}").get(f"batch {step}", 64)
        for size in shards[:copied]:
            t.get(f"copy {size} {step}", size)
            if step:
                t.drop(f"copy {size} {step - 1}")
        t.within("FSDP::pre_forward (a)").get("activation", 1000).within("FSDP::post_forward (a)")
        t.within("FSDP::pre_backward (a)").drop("activation").label("END", f"ProfilerStep#{step}")
    found = categories(prepare(t.read(tmp_path), RankManifest(param_groups=[group])))
    assert {found[size] for size in shards[:copied]} == {said}
    assert found[64] == "input"


def test_an_address_that_is_used_again_has_a_role_each_time(tmp_path: Path):
    """A gathered parameter of the beginning gives way to a gradient, which lives to the end."""
    t = Training()
    t.event("free_requested", 1 << 30, 700).event("free_completed", 1 << 30, 700)
    t.get("gradient", 300)
    tensors = [
        TensorInfo(category="unsharded_parameter", fqn="", address=1 << 30, nbytes=700),
        TensorInfo(category="sharded_gradient", fqn="layers.0", address=1 << 30, nbytes=300),
    ]
    rows = prepare(t.read(tmp_path), RankManifest(tensors=tensors)).allocations
    found = zip(rows.size.tolist(), rows.category.to_list(), rows.fqn.to_list(), strict=True)
    assert sorted(found) == [(300, "sharded_gradient", "layers.0"), (700, "unsharded_parameter", "")]


def test_a_tag_counts_where_no_label_says_otherwise(tmp_path: Path):
    t = (
        Training()
        .get("plain", 10)
        .get("tagged", 20, user_metadata="step=4;phase=forward;activity=all_gather;fqn=a=b;c")
    )
    t.get("foreign", 30, user_metadata="phase=forward")
    rows = prepare(t.read(tmp_path), None).allocations
    found = list(
        zip(rows.size.tolist(), rows.step.tolist(), rows.phase.to_list(), rows.fqn.to_list(), strict=True)
    )
    assert found == [(10, -1, "other", None), (20, 4, "forward", "a=b;c"), (30, -1, "other", None)]
    assert rows.category[1] == "all_gather_buffer"


def test_labels_overrule_a_tag_that_a_thread_kept_from_before(tmp_path: Path):
    """Allocated in layers.1's forward of step 2 under what the thread was told in step 1's backward."""
    t = Training().label("START", "ProfilerStep#2")
    stale = "step=1;phase=backward;activity=compute;fqn=layers.0"
    t.label("START", "FSDP::pre_forward (layers.1)").label("END", "FSDP::pre_forward (layers.1)")
    t.get("stale", 10, user_metadata=stale)
    t.get("right", 20, user_metadata="step=2;phase=forward;activity=compute;fqn=root1:layers.1")
    t.within("FSDP::post_forward (layers.1)")
    t.get("late", 30, user_metadata=stale).label("END", "ProfilerStep#2")
    rows = prepare(t.read(tmp_path), None).allocations
    found = zip(rows.size.tolist(), rows.step.tolist(), rows.phase.to_list(), rows.fqn.to_list(), strict=True)
    assert list(found) == [
        (10, 2, "forward", "layers.1"), (20, 2, "forward", "root1:layers.1"), (30, 2, "forward", None)
    ]  # fmt: skip


def test_a_category_of_a_newer_version_is_unattributed(tmp_path: Path):
    t = Training()
    t.segment(9 << 40, [(1024, 700, "active_allocated")])
    tensor = TensorInfo(category="a_newer_kind", fqn="layers.0", address=9 << 40, nbytes=700)
    rows = prepare(t.read(tmp_path), RankManifest(tensors=[tensor])).allocations
    assert rows.category.to_list() == ["unattributed"]


def test_shards_are_found_by_their_sizes(tmp_path: Path):
    """12 parameters of 3 sizes, a quarter of each three times over (shard, Adam), one stranger."""
    sizes = [4000 + 40 * (index % 3) for index in range(12)]
    t = Training()
    t.segment(
        9 << 40,
        [(1024, size // 4, "active_allocated") for size in sizes * 3] + [(1024, 7, "active_allocated")],
    )
    t.within("FSDP::root_pre_forward").label("START", "FSDP::pre_forward (a)")
    t.within("FSDP::all_gather_copy_out (a)", *(("get", f"p{i}", size) for i, size in enumerate(sizes)))
    t.label("END", "FSDP::pre_forward (a)").within("FSDP::post_forward (a)", *(f"p{i}" for i in range(12)))
    peak = analyze(t.read(tmp_path)).peak
    assert peak.categories["sharded_parameter"] == sum(sizes) // 4
    assert peak.categories["optimizer_state"] == sum(sizes) // 2
    assert peak.categories["unattributed"] == 7
    t.segments[0]["blocks"].pop(0)  # one shard is missing: two whole sets are left, and nobody knows of what
    t.segments[0]["total_size"] -= 1024
    t.segments[0]["address"] += 1024
    peak = analyze(t.read(tmp_path)).peak
    assert peak.categories["sharded_parameter"] == sum(sizes) // 4
    assert peak.categories["optimizer_state"] == 0


def _stack(*frames: tuple[str, str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "filename": file, "line": line} for name, file, line in frames]


_FORWARD = _stack(("forward", "/code/model.py", 7), ("_call_impl", "/lib/torch/nn/modules/module.py", 9))
_BACKWARD = _stack(("torch::autograd::Engine::thread_main()", "??", 0))
_OPTIMIZER = _stack(("wrapper", "/lib/torch/optim/optimizer.py", 3), ("main", "/code/train.py", 20))
_WORKSPACE = _stack(("at::cuda::getNewWorkspace()", "??", 0))


def test_a_training_without_fsdp_is_known_by_stacks_and_sizes(tmp_path: Path):
    """12 parameters of 3 sizes from before; their gradients live to see the optimizer make Adam's states."""
    sizes = [4000 + 40 * (index % 3) for index in range(12)]
    t = Training()
    t.segment(9 << 40, [(4096, size, "active_allocated") for size in sizes])
    t.get("saved", 9000, frames=_FORWARD).get("other", 1000, frames=_FORWARD)
    t.get("passing", 600, frames=_BACKWARD).drop("passing")
    t.get("workspace", 8000, frames=_WORKSPACE + _BACKWARD)
    for index, size in enumerate(sizes):
        t.get(f"gradient {index}", size, frames=_BACKWARD)
    t.drop("saved", "other")
    for index, size in enumerate(sizes):
        t.get(f"exp_avg {index}", size, frames=_OPTIMIZER).get(f"exp_avg_sq {index}", size, frames=_OPTIMIZER)
    t.get("scratch", 700, frames=_OPTIMIZER).drop("scratch")
    t.get("next", 9000, frames=_FORWARD)
    rank = analyze(t.read(tmp_path))
    held = {name: size for name, size in rank.peak.categories.items() if size}
    assert held == {
        "unsharded_parameter": sum(sizes),
        "unsharded_gradient": sum(sizes),
        "optimizer_state": 2 * sum(sizes),
        "activation": 9000,
        "temporary": 8000,
    }
    # gradients that wait for the optimizer wait for no other micro-batch
    assert {one.action for one in rank.remedies} == {
        "smaller_batch",
        "activation_checkpointing",
    }
    assert next(one for one in rank.remedies if one.action == "smaller_batch").saves_bytes == 9000 // 2
    lines = [(one.place, one.category, one.bytes, one.blocks) for one in rank.peak.by_line]
    assert sorted(lines, key=lambda line: (-line[2], line[1])) == [
        ("code/train.py:20:main", "optimizer_state", 2 * sum(sizes), 24),
        (None, "unsharded_gradient", sum(sizes), 12),
        (None, "unsharded_parameter", sum(sizes), 12),
        ("code/model.py:7:forward", "activation", 9000, 1),
        (None, "temporary", 8000, 1),
    ]


def test_what_an_earlier_step_left_without_fsdp(tmp_path: Path):
    """Old gradients are freed before the backward, replaced states inside the optimizer's step."""
    sizes = [4000 + 40 * (index % 3) for index in range(12)]
    whole = sum(sizes)
    t = Training()
    t.segment(9 << 40, [(4096, size, "active_allocated") for size in sizes])  # the parameters
    t.segment(8 << 40, [(4096, 5000, "active_allocated")], stream=0)
    t.segments[-1]["blocks"][0]["frames"] = _OPTIMIZER
    for index, size in enumerate(sizes):
        t.hold(f"old gradient {index}", size)
        t.hold(f"old state {index}", size)
    t.get("saved", 9000, frames=_FORWARD)
    t.drop(*(f"old gradient {index}" for index in range(12)))  # zero_grad() after the forward
    for index, size in enumerate(sizes):
        t.get(f"gradient {index}", size, frames=_BACKWARD)
    t.drop("saved")
    for index, size in enumerate(sizes):
        t.get(f"state {index}", size, frames=_OPTIMIZER).drop(f"old state {index}")
    t.get("scratch", 700, frames=_OPTIMIZER).drop("scratch")
    analysis = analyze_memory([(0, t.read(tmp_path), None)])
    held = {name: size for name, size in analysis.ranks[0].peak.categories.items() if size}
    assert held == {
        "unsharded_parameter": whole,
        "unsharded_gradient": whole,
        "optimizer_state": whole + 5000,
        "activation": 9000,
    }
    found = {finding.id: finding for finding in analysis.findings}
    assert found["gradients_not_none"].evidence["bytes"] == whole
    assert not {"unsharded_gradients", "optimizer_first_step"} & set(found)


@given(
    st.lists(
        st.tuples(st.integers(-1, 30), st.integers(1, 30), st.integers(1, 100), st.booleans()), max_size=25
    )
)
def test_running_total_is_the_sum_of_what_is_live(rows: list[tuple[int, int, int, bool]]):
    """Every order is one event: spread them, then compare with the definition."""
    events = 4 * len(rows) + 4
    born = [-1 if start < 0 else 2 * index for index, (start, *_) in enumerate(rows)]
    freed = [NEVER if stays else 2 * len(rows) + 2 * index for index, (_, _, _, stays) in enumerate(rows)]
    size = [size for _, _, size, _ in rows]
    totals = running_total(
        np.array(born, dtype=np.int64),
        np.array(freed, dtype=np.int64),
        np.array(size, dtype=np.int64),
        events,
    )
    for order in range(events):
        live = [s for b, f, s in zip(born, freed, size, strict=True) if b <= order < f]
        assert totals[order] == sum(live)


def test_out_of_memory_by_hand(tmp_path: Path):
    """A bf16 head of 2 MiB, its fp32 copy of 4 MiB; the loss wants 4 MiB more and the driver has 3 MiB."""
    loss = [
        {"filename": "??", "line": 0, "name": "at::_ops::log_softmax_int::call(...)"},
        {"filename": "train.py", "line": 9, "name": "cross_entropy"},
    ]
    cast = [{"filename": "??", "line": 0, "name": "at::_ops::to_dtype::call(...)"}, loss[1]]
    t = Training().segment(1 << 41, [(2 * MIB, 0, "inactive"), (MIB, MIB, "active_allocated")])
    t.segment(1 << 42, [(20 * MIB, 0, "inactive")], stream=5)
    for name, kept in (("layers.0", 6 * MIB), ("layers.1", 5 * MIB), ("layers.2", MIB)):
        t.within(f"FSDP::pre_forward ({name})").get(f"saved {name}", kept).within(
            f"FSDP::post_forward ({name})"
        )
    t.label("START", "FSDP::pre_forward (head)")
    t.within("FSDP::all_gather_copy_out (head)", ("get", "parameter", 7 * MIB)).label(
        "END", "FSDP::pre_forward (head)"
    )
    t.get("bf16", 2 * MIB).within("FSDP::post_forward (head)").get("fp32", 4 * MIB, frames=cast)
    t.event("oom", 0, 4 * MIB, device_free=3 * MIB, frames=loss)
    analysis = analyze_memory([(0, t.read(tmp_path), None)])
    rank = analysis.ranks[0]
    oom = rank.oom
    assert oom is not None
    assert (oom.requested_bytes, oom.op, oom.phase) == (4 * MIB, "aten::log_softmax_int", "forward")
    assert oom.place == "train.py:9:cross_entropy"
    assert oom.allocated_bytes == rank.peak.allocated_bytes == 26 * MIB
    assert oom.device_free_bytes == 3 * MIB
    assert oom.missing_bytes == 17 * MIB  # a segment of 20 MiB is taken for it
    assert oom.largest_free_block_bytes == 2 * MIB  # the 20 MiB are another stream's
    saves = {remedy.action: (remedy.saves_bytes, remedy.enough) for remedy in oom.remedies}
    assert saves == {
        "expandable_segments": (22 * MIB, True),
        "smaller_batch": ((6 + 5 + 1 + 2 + 4 + 4) * MIB // 2, False),
        "chunked_loss": (8 * MIB * 7 // 8, False),
        "reshard_after_forward": (7 * MIB, False),
        "low_precision_logits": (4 * MIB, False),
        "activation_checkpointing": (
            4 * MIB,
            False,
        ),  # of 5 + 4 MiB above the smallest, one block's at a time
    }
    ranked = [remedy.saves_bytes for remedy in oom.remedies]
    assert ranked == sorted(ranked, reverse=True)
    (finding,) = [one for one in analysis.findings if one.id == "out_of_memory"]
    assert finding.severity == "high"
    assert finding.message == (
        "Rank 0 ran out of memory in forward: `aten::log_softmax_int` asked for 4.00 MiB with 26.0 MiB "
        "allocated and 3.00 MiB left on the device, 17.0 MiB too little. "
        "This change alone would have let this request fit: expandable segments (up to 22.0 MiB)."
    )


def test_fragmentation_by_hand(tmp_path: Path):
    t = Training()
    t.segment(
        1 << 41, [(512, 500, "active_allocated"), (1536, 0, "inactive"), (2048, 9, "active_pending_free")]
    )
    t.segment(1 << 42, [(8192, 0, "inactive")])
    t.segment(
        1 << 43, [(1024, 0, "inactive"), (512, 512, "active_allocated")], stream=3, segment_type="small"
    )
    (recording,) = read_memory(t.write(tmp_path / "snapshot.pickle"))
    found = analyze(recording).fragmentation
    assert found is not None
    large, small = found.by_pool
    assert [(one.address, one.inactive_split_bytes) for one in found.by_segment] == [
        (1 << 41, 1536),
        (1 << 43, 1024),
    ]
    assert replace(found, by_pool=[], by_segment=[]) == Fragmentation(
        gap_at_peak_bytes=4096 + 8192 + 1536 - 500 - 512,
        reserved_bytes=4096 + 8192 + 1536,
        allocated_bytes=1024,
        rounding_bytes=12,
        pending_free_bytes=2048,
        inactive_split_bytes=1536 + 1024,
        inactive_split_blocks=2,
        releasable_bytes=8192,
        largest_free_block_bytes=8192,
        expandable_segments=False,
        segments=3,
    )
    assert (large.pool, large.stream, large.segments) == ("large", 0, 2)
    assert (small.pool, small.stream, small.largest_free_block_bytes) == ("small", 3, 1024)


def finding_ids(analysis: MemoryAnalysis) -> set[str]:
    return {finding.id for finding in analysis.findings}


def steps_of(builder: Training, count: int, leak: int) -> Training:
    """Steps that each make an activation and keep ``leak`` bytes of it."""
    for step in range(count):
        builder.label("START", f"ProfilerStep#{step}").within("FSDP::pre_forward (a)")
        builder.get("activation", 1000)
        if leak:
            builder.get(f"kept {step}", leak)
        builder.within("FSDP::post_forward (a)").drop("activation").label("END", f"ProfilerStep#{step}")
    return builder


def test_leak_is_what_every_step_leaves_behind(tmp_path: Path):
    analysis = analyze_memory([(0, steps_of(Training(), 4, 100_000).read(tmp_path), None)])
    (leak,) = [finding for finding in analysis.findings if finding.id == "leak"]
    assert leak.evidence["bytes_per_step"] == 100_000
    assert leak.evidence["steps"] == 3
    assert leak.fqn == "a"
    assert "leak" not in finding_ids(analyze_memory([(0, steps_of(Training(), 4, 0).read(tmp_path), None)]))
    assert "leak" not in finding_ids(analyze_memory([(0, steps_of(Training(), 4, 512).read(tmp_path), None)]))
    assert "leak" not in finding_ids(
        analyze_memory([(0, steps_of(Training(), 2, 100_000).read(tmp_path), None)])
    )


@pytest.mark.parametrize(
    ("first", "early", "expected"), [(8, 600_000, True), (8, 100_000, False), (2, 600_000, False)]
)
def test_two_steps_show_a_leak_if_those_before_left_as_much(first: int, early: int, expected: bool) -> None:
    """Steps 8 and 9 leave 100 kB each, and 600 kB of unknown role are older."""
    none, where = Strings.full(3, None), Strings.intern(["unattributed", "activation", "activation"])
    columns: dict[str, Any] = {
        one.name: none if one.type == "Strings" else np.zeros(3, dtype=np.int64)
        for one in fields(AllocationTable)
    }
    rows = AllocationTable(**columns | {"category": where})
    rows = replace(
        rows,
        size=np.array([early, 100_000, 100_000]),
        alloc_order=np.array([-1, 5, 15]),
        free_order=np.full(3, NEVER),
        step=np.array([-1, first, first + 1]),
        stack=np.full(3, -1),
    )
    steps = StepTable(
        step=np.array([first, first + 1]), start_ns=np.array([0, 10]), end_ns=np.array([10, 20])
    )
    assert bool(find_leaks(rows, steps, Stacks.empty())) == expected


@pytest.mark.parametrize(
    ("before", "inside", "tensors", "why"),
    [
        (700, 300, 0, "no manifest that lists it"),
        (700, 300, 1, "this manifest does not list"),
        (700, 300, 2, "The script holds this memory"),
        (300, 700, 1, "allocated without a label or a stack"),
    ],
)
def test_what_is_unattributed_says_why(tmp_path: Path, before: int, inside: int, tensors: int, why: str):
    shard = TensorInfo(category="sharded_parameter", fqn="", address=1, nbytes=8)
    t = Training().get("late", inside)
    t.event("free_requested", 77, before).event("free_completed", 77, before)
    manifest = RankManifest(tensors=[shard] * tensors, tensors_are_all=tensors > 1)
    (finding,) = [
        f for f in analyze_memory([(0, t.read(tmp_path), manifest)]).findings if f.id == "unattributed"
    ]
    assert finding.evidence["bytes"] == before + inside
    assert finding.evidence["before_history_bytes"] == before
    assert why in finding.message


@pytest.mark.parametrize(("sizes", "copied"), [([4096, 1024], 5120), ([2048, 512], 2560), ([4096, 3072], 0)])
def test_memory_with_the_sizes_of_all_whole_parameters_is_a_copy(
    tmp_path: Path, sizes: list[int], copied: int
):
    groups = [sharded_group(name, [8, n], ranks=2, rows=4) for name, n in (("a", 128), ("b", 32))]
    t = Training().get("late", 8)
    for address, size in enumerate(sizes, 77):
        t.event("free_requested", address, size).event("free_completed", address, size)
    manifest = RankManifest(param_groups=groups, tensors_are_all=True)
    found = {one.id: one for one in analyze_memory([(0, t.read(tmp_path), manifest)]).findings}
    assert ("model_copy" in found, "unattributed" in found) == (bool(copied), not copied)
    assert not copied or found["model_copy"].evidence["bytes"] == copied


def test_a_root_that_stays_unsharded_is_found_among_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RankManifest, "root_count", 2)
    t = Training()
    t.label("START", "fsdp2prof::root (1)")
    for name in ("", " (a)"):
        t.label("START", f"FSDP::pre_forward{name}")
        t.within(f"FSDP::all_gather_copy_out{name}", ("get", f"parameter{name}", 1000))
        t.label("END", f"FSDP::pre_forward{name}")
    t.get("activation", 300)
    t.within("FSDP::post_forward (a)").within("FSDP::post_forward").label("END", "fsdp2prof::root (1)")
    analysis = analyze_memory([(0, t.read(tmp_path), RankManifest())])
    (found,) = [finding for finding in analysis.findings if finding.id == "root_kept_unsharded"]
    assert (found.fqn, found.evidence["bytes"]) == ("root1:", 1000)


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_model_in_one_group_is_gathered_whole(tmp_path: Path, blocks: int):
    """1,000 of 1,500 B at the peak are the one group's parameters; with a second group that is no finding."""
    t = Training()
    for name in ["", " (a)"][: 1 + blocks]:
        t.label("START", f"FSDP::pre_forward{name}")
        t.within(f"FSDP::all_gather_copy_out{name}", ("get", f"parameter{name}", 1000))
        t.label("END", f"FSDP::pre_forward{name}")
    t.get("activation", 300)
    t.event("free_requested", 77, 200).event("free_completed", 77, 200)  # held since before the recording
    t.within("FSDP::post_forward")
    shard = TensorInfo(category="sharded_parameter", fqn="", address=77, nbytes=200)
    analysis = analyze_memory([(0, t.read(tmp_path), RankManifest(tensors=[shard]))])
    found = [one for one in analysis.findings if one.id == "all_in_one_group"]
    assert [(one.fqn, one.evidence["bytes"]) for one in found] == ([] if blocks else [("", 1000)])


def test_findings_of_a_recording(tmp_path: Path):
    t = Training()
    t.get("waits", 900).event("free_requested", t._at["waits"][0], 900)
    for name in ("", " (a)", " (b)", " (c)"):
        t.label("START", f"FSDP::pre_forward{name}")
        t.within(f"FSDP::all_gather_copy_out{name}", ("get", f"parameter{name}", 1000))
        t.label("END", f"FSDP::pre_forward{name}")
    t.get("activation", 300)
    for name in (" (c)", " (b)", " (a)", ""):
        t.within(f"FSDP::post_forward{name}")
    analysis = analyze_memory([(0, t.read(tmp_path), None)])
    found = {finding.id: finding for finding in analysis.findings}
    assert found["root_kept_unsharded"].evidence["bytes"] == 1000
    assert found["groups_unsharded_together"].evidence["bytes"] == {"a": 1000, "b": 1000, "c": 1000}
    assert found["root_kept_unsharded"].fqn == ""
    assert found["held_across_streams"].evidence["bytes"] == 900
    assert found["held_across_streams"].evidence["ranks"] == [0]


def test_gradients_without_sync_and_gradients_kept(tmp_path: Path):
    t = Training().get("old gradient", 700)
    for micro_batch in range(2):
        t.within("FSDP::pre_forward (a)").get("activation", 10).within("FSDP::post_forward (a)")
        t.within("FSDP::pre_backward (a)").get(f"gradient {micro_batch}", 500).drop("activation")
        if micro_batch:
            t.label("START", "FSDP::post_backward_reduce (a)").get("input", 501).drop(
                "gradient 0", "gradient 1"
            )
            t.get("output", 250).label("END", "FSDP::post_backward_reduce (a)")
        t.within("FSDP::root_post_backward_callback")
    recording = t.read(tmp_path)
    found = {finding.id: finding for finding in analyze_memory([(0, recording, None)]).findings}
    assert found["unsharded_gradients"].evidence["bytes"] == 500
    only = RankManifest(micro_batches=1)  # what follows is an evaluation, or a closure called again
    assert not [
        one for one in analyze_memory([(0, recording, only)]).findings if one.id == "unsharded_gradients"
    ]
    state = t._at["old gradient"][0]
    gradient = TensorInfo(category="sharded_gradient", fqn="a", address=state, nbytes=700)
    manifest = RankManifest(device=DeviceInfo(type="cuda"), tensors=[gradient])
    found = {finding.id: finding for finding in analyze_memory([(0, recording, manifest)]).findings}
    assert found["gradients_not_none"].evidence["bytes"] == 700


@pytest.mark.parametrize("freed", ["by the script", "by a later backward"])
def test_what_a_script_keeps_of_a_forward_outlives_its_backward(freed: str, tmp_path: Path):
    """Logits of two micro-batches beside a third; in a pipeline, their own backward comes later."""
    t = Training()
    for micro_batch in range(3):
        t.within("FSDP::pre_forward (a)").get(f"logits {micro_batch}", 400).get("activation", 10)
        t.within("FSDP::post_forward (a)")
        t.within("FSDP::pre_backward (a)").get("temporary", 20).drop("temporary", "activation")
        if micro_batch == 2 and freed == "by a later backward":
            t.drop("logits 0", "logits 1", "logits 2")
        t.within("FSDP::root_post_backward_callback")
    if freed == "by the script":
        t.drop("logits 0", "logits 1", "logits 2")
    found = {one.id: one for one in analyze_memory([(0, t.read(tmp_path), None)]).findings}
    if freed == "by the script":
        assert found["kept_after_backward"].evidence["bytes"] == 800
        assert found["kept_after_backward"].severity == "medium"
    else:
        assert "kept_after_backward" not in found


@pytest.mark.parametrize(("forwards", "backwards", "saves"), [(6, 1, 5000), (1, 1, None), (1, 4, None)])
def test_one_backward_for_several_forwards_keeps_all_of_their_activations(
    tmp_path: Path, forwards: int, backwards: int, saves: int | None
) -> None:
    """Where several backwards follow one forward (``retain_graph``) there is nothing to say."""
    t = Training()
    for number in range(6):
        t.within("FSDP::pre_forward (a)").get(f"activation {number}", 1000).within("FSDP::post_forward (a)")
    t.within("FSDP::pre_backward (a)").get("gradient", 10).drop(
        *(f"activation {number}" for number in range(6))
    )
    root = msgspec.structs.replace(sharded_group("", [8, 8], ranks=2, rows=4), forwards=forwards)
    manifest = RankManifest(param_groups=[root], roots=[RootInfo(root=0, micro_batches=backwards)])
    found = {one.action: one.saves_bytes for one in analyze(t.read(tmp_path), manifest).remedies}
    assert found.get("backward_after_each_forward") == saves


def test_optimizer_makes_its_states_after_the_peak(tmp_path: Path):
    t = Training().within("FSDP::pre_forward (a)").get("activation", 1000).within("FSDP::post_forward (a)")
    t.within("FSDP::pre_backward (a)").get("upstream", 5).drop("upstream", "activation")
    t.within("FSDP::root_post_backward_callback").within("Optimizer.step#AdamW.step", ("get", "exp_avg", 300))
    recording = t.read(tmp_path)
    (finding,) = analyze_memory([(0, recording, None)]).findings
    assert (finding.id, finding.severity) == ("optimizer_first_step", "low")
    assert finding.evidence["bytes"] == finding.evidence["after_peak_bytes"] == 300
    for total, severity in ((1100, "medium"), (4000, "low")):  # it matters where the device is nearly full
        manifest = RankManifest(device=DeviceInfo(type="cuda", total_bytes=total))
        severities = [one.severity for one in analyze_memory([(0, recording, manifest)]).findings]
        assert severities[0] == severity


def test_ranks_that_differ(tmp_path: Path):
    small, large = Training().get("x", 900).read(tmp_path), Training().get("x", 1000).read(tmp_path)
    nearly = Training().get("x", 960).read(tmp_path)
    assert "rank_imbalance" in finding_ids(analyze_memory([(0, small, None), (3, large, None)]))
    assert "rank_imbalance" not in finding_ids(analyze_memory([(0, nearly, None), (3, large, None)]))


def part(rows: int, reshard: bool = True) -> RankManifest:
    """A rank that holds two layers of so many rows."""
    groups = [sharded_group(name, [rows, 4], ranks=2, rows=rows // 2) for name in "ab"]
    for group in groups:
        group.reshard_after_forward = reshard
    return RankManifest(param_groups=groups)


def test_stages_of_a_pipeline_differ_by_nature(tmp_path: Path):
    small, large = Training().get("x", 900).read(tmp_path), Training().get("x", 1000).read(tmp_path)
    first, second = part(8), part(16)
    stages = analyze_memory([(0, large, first), (1, large, first), (2, small, second), (3, small, second)])
    (found,) = [one for one in stages.findings if one.id.endswith("_imbalance")]
    assert (found.id, found.severity) == ("stage_imbalance", "info")
    assert "Rank 0 peaks at 1000 B, rank 2 at 900 B: they hold different parts" in found.message
    uneven = analyze_memory([(0, large, first), (1, small, second), (2, large, second)])
    (found,) = [one for one in uneven.findings if one.id.endswith("_imbalance")]
    assert found.message.startswith("Rank 2 peaks at 1000 B, rank 1 at 900 B.")
    assert found.id == "rank_imbalance"
    nearly = Training().get("x", 960).read(tmp_path)
    assert not finding_ids(analyze_memory([(0, large, first), (1, nearly, second)])) & {
        "rank_imbalance",
        "stage_imbalance",
    }


def kept_last() -> RankManifest:
    """Two layers, of which the second alone is not resharded."""
    manifest = part(8)
    manifest.param_groups[1].reshard_after_forward = False
    return manifest


@pytest.mark.parametrize(
    ("manifest", "groups", "why"),
    [
        (part(8, reshard=False), "ab", "keeps them"),
        (part(8), "ab", ""),
        (part(8), "abc", "prefetch"),
        (kept_last(), "ab", ""),
        (kept_last(), "abc", "keeps b until the backward; the others are in use or prefetched"),
    ],
)
def test_groups_that_a_policy_keeps_are_not_put_down_to_prefetch(
    tmp_path: Path, manifest: RankManifest, groups: str, why: str
):
    """Two are unsharded at once where one is in use and the next is gathered."""
    t = Training()
    for name in (f" ({one})" for one in groups):
        t.label("START", f"FSDP::pre_forward{name}")
        t.within(f"FSDP::all_gather_copy_out{name}", ("get", f"parameter{name}", 1000))
        t.label("END", f"FSDP::pre_forward{name}")
    t.get("activation", 300).within("FSDP::post_forward (b)").within("FSDP::post_forward (a)")
    found = {one.id: one for one in analyze_memory([(0, t.read(tmp_path), manifest)]).findings}
    assert ("groups_unsharded_together" in found) is bool(why)
    assert not why or why in found["groups_unsharded_together"].message


def test_comparison_by_category_layer_and_stack(tmp_path: Path):
    here = [{"filename": "model.py", "line": 3, "name": "forward"}]
    there = [{"filename": "model.py", "line": 5, "name": "forward"}]
    before = Training().get("a", 100, frames=here).get("b", 50, frames=there)
    after = Training().get("a", 100, frames=here).get("b", 50, frames=there).get("c", 70, frames=there)
    result = compare_memory(prepare(before.read(tmp_path), None), prepare(after.read(tmp_path), None))
    assert result.delta_bytes == 70
    assert [(row.stack, row.delta_bytes) for row in result.by_stack] == [
        (["model.py:5:forward"], 70),
        (["model.py:3:forward"], 0),
    ]
    assert (
        sum(row.delta_bytes for row in result.by_category)
        == sum(row.delta_bytes for row in result.by_layer)
        == 70
    )


@pytest.mark.real_data
def test_real_fsdp2_out_of_memory(real_data: Path):
    """Llama-3.1-8B on 4 A100-40GB: what is known of that run from its logs and its model."""
    folder = real_data / "snapshots" / "fsdp2-llama8b-a100-oom"
    for rank in (0, 1):
        (recording,) = read_memory(folder / f"rank{rank}_memory_snapshot.pickle")
        view = prepare(recording, None)
        rows = view.allocations
        gathered = rows.category.equals("all_gather_buffer")
        assert int(rows.size[gathered].sum()) // MIB == 15316
        assert int(rows.size[gathered].sum()) == pytest.approx(2 * 8.03e9, rel=1e-3)  # bf16 parameters
        result = analyze(recording)
        oom, peak = result.oom, result.peak
        assert oom is not None
        assert oom.requested_bytes == 4 * 2048 * 128256 * 4  # fp32 logits
        assert (oom.op, oom.place) == (
            "aten::cross_entropy_loss",
            "components/loss.py:21:cross_entropy_loss",
        )
        assert (oom.phase, peak.phase) == ("forward", "forward")
        assert oom.allocated_bytes // MIB == 34549
        assert oom.reserved_bytes == 35356 * MIB
        assert oom.device_free_bytes is not None
        assert oom.missing_bytes == 4 * 2048 * 128256 * 4 - oom.device_free_bytes
        assert peak.categories["sharded_parameter"] == 8030261248 * 2 // 4
        assert peak.categories["unattributed"] == MIB
        assert result.fragmentation is not None
        assert result.fragmentation.reserved_bytes == 35356 * MIB
        assert result.fragmentation.rounding_bytes == 16128
        unsharded = {row.fqn: row.bytes for row in peak.by_layer if row.category == "unsharded_parameter"}
        assert unsharded == {"norm, output": 2 * (4096 * 128256 + 4096)}
        block = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
        for layer in range(32):
            mine = gathered & rows.fqn.equals(f"layers.{layer}")
            assert int(rows.size[mine].sum()) == block
        enough = [remedy.action for remedy in oom.remedies if remedy.enough]
        assert enough[:4] == [
            "activation_checkpointing",
            "smaller_batch",
            "chunked_loss",
            "low_precision_logits",
        ]
        assert peak.largest_blocks[0].bytes == 4 * 2048 * 128256 * 4
        assert peak.largest_blocks[1].bytes == 4 * 2048 * 128256 * 2


@pytest.mark.real_data
def test_every_real_snapshot_is_analysed_and_sums_up(real_data: Path):
    files = sorted((real_data / "snapshots").rglob("*.pickle"))
    assert files
    for path in files:
        analysis = analyze_memory([(0, recording, None) for recording in read_memory(path)])
        # the generated file's segments are smaller than what it says is allocated in them
        contradicts = path.name == "generated_by_mosaic.pickle"
        assert ["history do not match" in text for text in analysis.warnings] == [True] * contradicts
        for rank in analysis.ranks:
            peak = rank.peak
            assert (
                sum(peak.categories.values())
                == sum(row.bytes for row in peak.by_layer)
                == peak.allocated_bytes
            )
            assert peak.reserved_bytes is not None
        assert msgspec.json.decode(msgspec.json.encode(analysis))["schema"] == "fsdp2prof.memory/1"


def test_live_at_is_half_open(tmp_path: Path):
    recording = Training().get("a", 10).drop("a").read(tmp_path)
    assert live_at(recording.allocations, 0).tolist() == [True]
    assert live_at(recording.allocations, 1).tolist() == [False]


def test_the_document_has_every_memory_finding():
    text = (Path(__file__).parents[2] / "docs" / "findings.md").read_text()
    named = set(re.findall(r'finding\(\s*"(\w+)"', Path(memory_findings.__file__).read_text()))
    assert named
    for name in named:
        assert f"| `{name}` |" in text


def test_layers_that_the_script_prefetches_are_named_with_their_buffers(tmp_path: Path):
    """Four layers are gathered while the first runs; the script asked for all of them."""
    manifest = part(8)
    manifest.param_groups[0].forward_prefetch = ["b", "c", "d"]
    t = Training()
    for name in "bcd":
        t.within(f"FSDP::all_gather ({name})", ("get", f"buffer {name}", 1000))
    t.label("START", "FSDP::pre_forward (a)")
    t.within("FSDP::all_gather_copy_out (a)", ("get", "parameter", 1000)).label(
        "END", "FSDP::pre_forward (a)"
    )
    t.get("activation", 300).within("FSDP::post_forward (a)")
    analysis = analyze_memory([(0, t.read(tmp_path), manifest)])
    (found,) = [one for one in analysis.findings if one.id == "prefetched_ahead"]
    assert (found.severity, "up to 3 ahead" in found.message) == ("medium", True)
    saves = {one.action: one.saves_bytes for one in analysis.ranks[0].remedies}
    assert saves["less_prefetch"] == 2000


def test_a_loss_without_a_cross_entropy_is_not_called_one(tmp_path: Path):
    t = Training()
    t.label("START", "backward").get("differences", 900).label("END", "backward")
    t.get("more", 100)
    assert "logits_in_loss" not in finding_ids(analyze_memory([(0, t.read(tmp_path), None)]))


def test_a_failed_request_says_what_others_hold_and_what_is_to_come(tmp_path: Path):
    """A device of 80 GiB with 1 GiB free and 4 GiB reserved: others hold 75 GiB."""
    gib = 1 << 30
    t = Training()
    t.segment(1 << 42, [(4 * gib, 4 * gib, "active_allocated")])
    t.event("oom", 0, 2 * gib, device_free=gib, frames=[])
    manifest = part(8)
    manifest.device = DeviceInfo(type="cuda", total_bytes=80 * gib)
    oom = analyze_memory([(0, t.read(tmp_path), manifest)]).ranks[0].oom
    assert oom is not None
    assert oom.outside_bytes == 75 * gib


@pytest.mark.parametrize(
    ("function", "layers", "found"),
    [("softmax", 4, True), ("softmax", 3, False), ("log_softmax", 4, False), ("gelu", 4, False)],
)
def test_scores_that_attention_stores_are_softmaxes_of_equal_size(
    tmp_path: Path, function: str, layers: int, found: bool
):
    frames = [{"filename": "model.py", "line": 6, "name": function}, *_FORWARD]
    t = Training()
    for layer in range(layers):
        t.within(f"FSDP::pre_forward (layers.{layer})").get(f"scores {layer}", 1000, frames=frames)
        t.get(f"output {layer}", 900, frames=_FORWARD).within(f"FSDP::post_forward (layers.{layer})")
    assert ("scores_at_peak" in finding_ids(analyze_memory([(0, t.read(tmp_path), None)]))) is found
