"""The run's software: what each version of torch, kernel and allocator changes, derived by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp2prof.analyzers.memory.attribution import attribute
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.allocator.cuda_kernels import as_in_torch, as_on_cuda, with_recorded_streams
from fsdp2prof.estimators.communication import estimate_comm
from fsdp2prof.estimators.config.choices import CheckpointingMode
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec, NetworkSpec
from fsdp2prof.estimators.config.inputs import make_spec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.config.shares import range_end
from fsdp2prof.estimators.config.stacks import known_stacks
from fsdp2prof.estimators.execution.engine import execute
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.torch_rules import torch_rules
from fsdp2prof.estimators.verdict.memory_fit import depends_on, room_on
from fsdp2prof.fake_tensors import _HOST_TAKES_GROUPS
from fsdp2prof.tables.allocations import MemoryRecording
from fsdp2prof.tables.columns import NEVER
from fsdp2prof.units import format_ns
from fsdp2prof.workflows import estimate as workflow
from fsdp2prof.workflows.description import Described, describe

GPT = ModelSpec(source="gpt2", layers=2)
LLAMA = ModelSpec(source="llama3-8b", layers=1)
MESH = MeshSpec(dp_shard=4)
POLICY = PolicySpec(seq_len=256)
MIB = 1 << 20
TOKENS, DIM, HEADS, FFN = 256, 4096, 32, 14_336


def on_device(policy: PolicySpec, model: ModelSpec = GPT, mesh: MeshSpec = MESH) -> MemoryRecording:
    execution = execute(model, mesh, policy)
    return as_on_cuda(execution.recording, execution.host)


def kept_by_forward(policy: PolicySpec, model: ModelSpec = LLAMA) -> int:
    """Bytes that the last forward made inside the block and left to its backward."""
    recording = execute(model, MESH, policy).recording
    attributed = attribute(recording, recording.steps)
    allocations = attributed.allocations
    rows = allocations.fqn.equals("layers.0") & allocations.activity.equals("compute")
    rows &= allocations.phase.equals("forward") & (attributed.alloc_row != attributed.free_row)
    rows &= (allocations.step == 2) & ~attributed.recomputed
    return int(allocations.size[rows].sum())


def test_versions_that_were_read_and_others() -> None:
    assert torch_rules("2.4.1").reduce_scatter_input_on_default_stream is False
    assert torch_rules("2.7").root_obeys_reshard is False
    assert (torch_rules("2.8").root_obeys_reshard, torch_rules("2.8").collectives_record_streams) == (
        True,
        False,
    )
    assert torch_rules().version in {f"2.{minor}" for minor in range(7, 14)}
    for version in ("2.3", "3", "two", "2.99", "2.1300"):
        with pytest.raises(ModelError, match=r"versions from 2\.4 to 2\.13 are"):
            PolicySpec(torch=version)


def test_before_2_5_reduce_scatters_keep_their_input_on_their_own_stream() -> None:
    recording = on_device(POLICY)
    older = as_in_torch(recording, torch_rules("2.4"))
    assert as_in_torch(recording, torch_rules("2.5")) is recording
    moved = np.flatnonzero(older.allocations.stream != recording.allocations.stream)
    # Two blocks and the root, in two steps, gathered gradients in fp32.
    block = 12 * 768 * 768 + 13 * 768
    root = (50_260 + 1024 + 2) * 768  # 50,257 rows of the vocabulary are padded to 50,260
    assert sorted(older.allocations.size[moved].tolist()) == sorted([4 * block, 4 * block, 4 * root] * 2)
    outputs = older.allocations.stream == older.allocations.stream[moved[0]]
    assert outputs.sum() == 2 * len(moved)
    assert np.array_equal(older.allocations.alloc_order, recording.allocations.alloc_order)
    # Dropped when the reduction is launched, before anything else is made: never two at a time.
    births = np.sort(older.allocations.alloc_order)
    for row in moved.tolist():
        own, freed = older.allocations.alloc_order[row], older.allocations.free_order[row]
        assert own < freed < recording.allocations.free_order[row]
        assert not older.allocations.alloc_order[moved][
            (older.allocations.alloc_order[moved] > own) & (older.allocations.alloc_order[moved] < freed)
        ].size
    assert len(births) == len(set(births.tolist()))


def test_before_2_6_what_replicas_reduce_is_dropped_where_gradients_are_cast_from_it() -> None:
    """Gradients reduced in fp32 for bf16 parameters: a shard in fp32 each, of two blocks and the root."""
    mesh = MeshSpec(dp_shard=2, dp_replicate=2)
    policy = replace(POLICY, orig_dtype="bf16")
    recording = on_device(policy, mesh=mesh)
    older = as_in_torch(recording, torch_rules("2.5"))
    assert as_in_torch(recording, torch_rules("2.6")) is recording
    held = np.flatnonzero(older.allocations.free_order != recording.allocations.free_order)
    block, root = 12 * 768 * 768 + 13 * 768, (50_258 + 1024 + 2) * 768
    assert sorted(recording.allocations.size[held].tolist()) == sorted(
        [4 * block // 2] * 4 + [4 * root // 2] * 2
    )
    # Newer torch has all of a step's at once; older drops each when it is cast, into one of half its size.
    allocations = older.allocations
    for row in held.tolist():
        own, freed = allocations.alloc_order[row], allocations.free_order[row]
        between = (allocations.alloc_order > own) & (allocations.alloc_order < freed)
        assert allocations.size[row] // 2 in allocations.size[between]
        assert not np.isin(np.flatnonzero(between), held).any()
    for one, other in ((POLICY, mesh), (policy, MESH)):  # no cast; no replicas
        unchanged = on_device(one, mesh=other)
        assert as_in_torch(unchanged, torch_rules("2.5")) is unchanged


def test_before_2_8_the_root_stays_gathered_in_bytes_too() -> None:
    def gathers(version: str) -> int:
        policy = PolicySpec(seq_len=256, torch=version, reshard="always", allocator="expandable")
        return estimate_comm(GPT, MESH, policy).per_step["all_gather"].count

    assert (gathers("2.7"), gathers("2.8")) == (5, 6)


def test_a_fused_norm_keeps_its_input_and_a_number_a_row() -> None:
    """Separate operators keep the fp32 input and what they normed in bf16, one kernel its bf16 input.

    The first norm's input is the block's, which is there anyway.
    """
    policy = PolicySpec(seq_len=TOKENS)
    saved = kept_by_forward(policy) - kept_by_forward(replace(policy, norm="fused"))
    assert saved == TOKENS * DIM * (2 * (4 + 2) - 2)
    with pytest.raises(ModelError, match="gpt2 has no RMSNorm"):
        execute(GPT, MESH, replace(POLICY, norm="fused"))


def test_math_attention_keeps_its_probabilities() -> None:
    policy = PolicySpec(seq_len=TOKENS)
    more = kept_by_forward(replace(policy, attention="math")) - kept_by_forward(policy)
    assert more >= HEADS * TOKENS * TOKENS * 2


def test_attention_that_is_recomputed_is_not_kept() -> None:
    policy = PolicySpec(seq_len=TOKENS, ac="op")
    saved = kept_by_forward(policy) - kept_by_forward(replace(policy, attention_is_saved=False))
    assert saved == TOKENS * DIM * 2 + TOKENS * HEADS * 4  # the result, and one fp32 number a row and head
    with pytest.raises(ModelError, match="without ac=op"):
        PolicySpec(attention_is_saved=False)


def test_operators_that_are_saved_besides_are_kept() -> None:
    """A block's SwiGLU makes one tensor of the hidden size by ``silu``, in bf16."""
    policy = PolicySpec(seq_len=TOKENS, ac="op")
    more = kept_by_forward(replace(policy, ac_saves=("aten.silu",))) - kept_by_forward(policy)
    assert more == TOKENS * FFN * 2
    with pytest.raises(ModelError, match=r"torch has no operator 'aten\.sill'"):
        kept_by_forward(replace(policy, ac_saves=("aten.sill",)))
    with pytest.raises(ModelError, match="ac_saves: without ac=op"):
        PolicySpec(ac_saves=("aten.silu",))


def test_a_fused_swiglu_keeps_its_two_factors_alone() -> None:
    """By hand: SiLU's result, as long as the hidden layer, is not kept; its gradients take no memory."""
    composed = PolicySpec(seq_len=TOKENS, mlp="composed")
    fused = replace(composed, mlp="fused")
    assert kept_by_forward(composed) == kept_by_forward(PolicySpec(seq_len=TOKENS))
    assert kept_by_forward(composed) - kept_by_forward(fused) == TOKENS * FFN * 2
    experts = ModelSpec(source="llama4-scout", layers=1)  # one of 8192 for each token, beside a shared one
    assert kept_by_forward(composed, experts) - kept_by_forward(fused, experts) == 2 * TOKENS * 8192 * 2
    with pytest.raises(ModelError, match="mlp: gpt2 has no SwiGLU of the built-in models"):
        estimate_memory(GPT, MESH, replace(POLICY, mlp="fused"))


def test_keys_that_are_repeated_are_kept_for_every_query_head() -> None:
    """Llama 3 8B has 8 key heads of 32: its own keys and values, 1024 wide, or copies of 4096, in bf16."""
    policy = PolicySpec(seq_len=TOKENS)
    more = kept_by_forward(replace(policy, repeat_kv=True)) - kept_by_forward(policy)
    assert more == 2 * TOKENS * (DIM - 1024) * 2


@pytest.mark.skipif(not _HOST_TAKES_GROUPS, reason="this torch has no such attention to compare with")
@pytest.mark.parametrize("ac", ["none", "full"])
def test_a_host_whose_attention_takes_no_groups_estimates_the_same(
    ac: CheckpointingMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = PolicySpec(seq_len=TOKENS, ac=ac)
    peaks = []
    for takes in (True, False):
        monkeypatch.setattr("fsdp2prof.fake_tensors._HOST_TAKES_GROUPS", takes)
        peaks.append(estimate_memory(LLAMA, MESH, policy).peak)
    assert peaks[0] == peaks[1]


def test_products_of_a_shape_that_is_recomputed_are_not_counted() -> None:
    """Of q, k, v, o, w1, w3, w2 the first, third, ... are kept: q, v, w1, w2. Without w1 and w3: q, v, w2."""
    policy = PolicySpec(seq_len=TOKENS, ac="op")
    less = kept_by_forward(policy) - kept_by_forward(replace(policy, ac_recomputes=("w1",)))
    assert less == TOKENS * FFN * 2
    same = kept_by_forward(replace(policy, ac_recomputes=("router.gate",)))
    assert same == kept_by_forward(policy)


def test_an_allocator_that_is_not_given_is_a_range() -> None:
    ends = [estimate_memory(GPT, MESH, replace(POLICY, allocator=name)) for name in ("expandable", "classic")]
    between = estimate_memory(GPT, MESH, POLICY)
    sizes = [one.peak.reserved_bytes for one in ends]
    assert between.reserved_low_bytes is not None
    assert between.reserved_high_bytes is not None
    assert between.reserved_low_bytes < min(sizes) <= max(sizes) < between.reserved_high_bytes
    assert between.peak.reserved_bytes == sizes[0]
    active, margin = between.peak.active_bytes, range_end("memory_with_software_open").value
    assert between.active_low_bytes == pytest.approx(active * (1 - margin), abs=2)  # segments play no part
    assert between.active_high_bytes == pytest.approx(active * (1 + margin), abs=2)
    assert {one.name for one in between.unknowns} == {"allocator", "prediction"}
    (allocator,) = [one for one in between.unknowns if one.name == "allocator"]
    assert sizes[1] - sizes[0] in (allocator.low_bytes, allocator.high_bytes)
    stated = replace(POLICY, allocator="classic", torch="2.13")
    kinds = ("memory_with_software_open", "memory_with_software_stated")
    for known, kind in zip((replace(stated, torch=None), stated), kinds, strict=True):
        (prediction,) = estimate_memory(GPT, MESH, known).unknowns
        assert prediction.high_bytes == -prediction.low_bytes == round(range_end(kind).value * sizes[1])
    assert range_end(kinds[0]).value > range_end(kinds[1]).value


def test_kernels_that_are_not_torchs_may_save_less() -> None:
    """The prediction stays that of torch's operators; the range begins lower, without checkpointing."""
    model, mesh = ModelSpec(source="llama2-7b", layers=8), MeshSpec(dp_shard=8)
    plain, fused = (
        estimate_memory(
            model, mesh, PolicySpec(batch_size=4, seq_len=4096, fused_kernels=kernels, allocator="expandable")
        )
        for kernels in (False, True)
    )
    assert fused.peak.reserved_bytes == plain.peak.reserved_bytes
    assert fused.reserved_high_bytes == plain.reserved_high_bytes
    assert fused.reserved_low_bytes is not None
    assert plain.reserved_low_bytes is not None
    assert fused.reserved_low_bytes < plain.reserved_low_bytes
    assert "kernels" in [one.name for one in fused.unknowns]


def test_an_upper_bound_never_says_that_it_does_not_fit() -> None:
    """Compiled blocks that cannot be traced: without checkpointing the peak is an upper bound.

    Its lower end decides against it.
    """
    wrap = ("block", "layers.*.feed_forward")
    policy = PolicySpec(seq_len=256, compile=True, allocator="expandable", wrap=wrap)
    model = ModelSpec(source="llama3-8b", layers=2)
    estimate = estimate_memory(model, MESH, policy)
    (unknown,) = [one for one in estimate.unknowns if one.name == "compile"]
    assert (unknown.name, unknown.high_bytes) == ("compile", 0)
    assert unknown.low_bytes < 0
    least = estimate.peak.reserved_bytes + unknown.low_bytes
    outside = estimate.outside_allocator_bytes
    sizes = {
        "fits": estimate.peak.reserved_bytes + outside.high,
        "depends": least + outside.low,
        "does_not_fit": least + outside.low - 1,
    }
    for fit, size in sizes.items():
        device = HardwareSpec(name="some", memory_mib=size / MIB)
        room = room_on(device, estimate.peak, outside, estimate.unknowns)
        assert room is not None
        assert room.fit == fit
        lines = depends_on(room, outside, estimate.unknowns)
        assert len(lines) == (3 if fit == "depends" else 0)  # context, communicator, compiler
    named = HardwareSpec(name="some", memory_mib=sizes["depends"] / MIB)
    assert estimate_memory(model, MESH, policy, hardware=named).fits is None


def test_recorded_streams_hold_memory_until_the_device_has_passed() -> None:
    mesh = MeshSpec(dp_shard=2, tp=2)
    policy = PolicySpec(seq_len=256, torch="2.6", allocator="expandable")
    recording = on_device(policy, LLAMA, mesh)
    held = with_recorded_streams(recording).allocations
    before = recording.allocations
    later = np.flatnonzero(held.free_order != before.free_order)
    assert len(later)
    assert (held.free_order[later] > before.free_order[later]).all()
    assert ((held.free_order == NEVER) == (before.free_order == NEVER)).all()
    births = np.sort(before.alloc_order)
    passed = np.searchsorted(births, held.free_order[later]) - np.searchsorted(
        births, before.free_order[later]
    )
    assert passed.max() <= 1024
    held_as_long = estimate_memory(LLAMA, mesh, policy)
    (unknown,) = [one for one in held_as_long.unknowns if one.name == "record_streams"]
    for settled in ({"record_streams": False}, {"torch": "2.8"}):
        released = estimate_memory(LLAMA, mesh, replace(policy, **settled))
        assert [one.name for one in released.unknowns] == ["prediction"]
    released = estimate_memory(LLAMA, mesh, replace(policy, record_streams=False))
    assert unknown.high_bytes == 0
    assert held_as_long.peak.reserved_bytes + unknown.low_bytes == released.peak.reserved_bytes
    with pytest.raises(ModelError, match=r"torch 2\.8 never does"):
        PolicySpec(torch="2.8", record_streams=True)


@pytest.mark.parametrize("name", known_stacks())
def test_every_stack_is_a_policy_and_says_where_each_fact_is_from(name: str) -> None:
    stack = known_stacks()[name]
    for ac in ("none", "op"):
        spec = make_spec({"model": "llama3-8b", "stack": name, "policy": {"ac": ac, "seq_len": 64}})
        assert spec.policy.seq_len == 64
        assert spec.policy.torch == stack.policy.get("torch")
        assert name in spec.notes[0]
    assert all(source.strip() for _, source in stack.facts.values())
    won = make_spec({"model": "llama3-8b", "stack": name, "policy": {"allocator": "classic"}})
    assert won.policy.allocator == "classic"


def test_a_stack_has_what_its_base_decides_but_for_its_own_facts() -> None:
    base, slurm = (known_stacks()[f"torchtitan-2024-12{kind}"] for kind in ("", "-slurm"))
    assert slurm.policy == {**base.policy, "allocator": "classic"}
    assert [*slurm.policy] == [*base.policy]
    assert "reshard_root" in known_stacks()["torchtitan-2025-06"].policy
    assert "reshard_root" not in known_stacks()["torchtitan-2025-08"].policy


@pytest.mark.parametrize(
    ("stack", "given", "loss"),
    [
        ("torchtitan-2025-06", {"compile": True}, "compiled"),
        ("torchtitan-2025-12", {"compile": True}, "compiled"),
        ("torchtitan-2025-12", {"compile": False}, "full"),
        ("torchtitan-2025-12", {"compile": True, "loss": "full"}, "full"),
        ("torchtitan-2025-03", {"compile": True}, "full"),
        ("torchtitan-2026-08", {"compile": True}, "chunked-backward:8"),
    ],
)
def test_a_trainer_compiles_its_loss_with_its_blocks(stack: str, given: dict[str, Any], loss: str) -> None:
    spec = make_spec({"model": "llama3-8b", "stack": stack, "policy": given})
    assert str(spec.policy.loss) == loss
    assert ("compile.components" in spec.notes[0]) is (loss == "compiled")


def test_an_unknown_stack_is_one_line() -> None:
    with pytest.raises(ModelError, match="did you mean torchtitan-2024-07"):
        make_spec({"model": "gpt2", "stack": "torchtitan-2024-071"})


AXOLOTL = """
base_model: {model}
micro_batch_size: 1
gradient_accumulation_steps: 4
sequence_len: 64
sample_packing: true
gradient_checkpointing: true
optimizer: adamw_torch_fused
bf16: true
dp_shard_size: 8
fsdp_config: {{fsdp_version: 2}}
"""


def test_a_file_without_a_date_may_be_of_older_software(tmp_path: Path) -> None:
    """Between micro-batches accelerate holds the gradients of the whole model since 1.11."""
    file = tmp_path / "axolotl.yaml"
    file.write_text(AXOLOTL.format(model="llama3.2-1b"))

    def described(**given: Any) -> Described:
        return describe(trainer_files=[file], given={"hardware": "h100-sxm", "layers": 2, **given}, policy={})

    found = workflow.estimate_memory(described())
    stated, older = (
        workflow.estimate_memory(described(stack=name)) for name in ("axolotl-2026", "axolotl-2025-08")
    )
    assert found.peak == stated.peak
    assert not [one for one in stated.unknowns if one.name == "software"]
    (unknown,) = [one for one in found.unknowns if one.name == "software"]
    off = older.peak.reserved_bytes - found.peak.reserved_bytes
    assert (unknown.low_bytes, unknown.high_bytes) == (off, 0)
    gradients = 2 * found.model.parameters  # unsharded, in bf16
    assert -off > gradients / 2
    assert "axolotl-2025-08" in unknown.why
    assert "the date of the software" in found.verdict[0]


def test_a_step_of_a_file_without_a_date_holds_that_of_older_software(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text(AXOLOTL.format(model="llama3.2-1b"))
    cluster = Cluster(
        hardware=HardwareSpec.parse("h100-sxm"), network=NetworkSpec.parse("100gb-eth"), gpus_per_node=2
    )
    found, older = (
        workflow.estimate_step(
            describe(
                trainer_files=[file],
                given={"layers": 2, **given},
                policy={},
            ),
            cluster,
        )
        for given in ({}, {"stack": "axolotl-2025-08"})
    )
    assert older.step_ns > found.step_ns  # four reduce-scatters of each group over a slow network
    assert found.range.high_ns == older.range.high_ns
    assert any("under axolotl-2025-08" in one for one in found.range.unknown)
    assert format_ns(found.range.high_ns) in found.verdict[0]
