"""A step's commands captured from FSDP2, and what the simulation of them says."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.torch_versions import GROUPED_PRODUCTS

from fsdp2prof.analyzers.trace.analysis import analyze_trace
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.communication import estimate_comm
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec, NetworkSpec
from fsdp2prof.estimators.config.measured import Measured, Slower, anchored
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.config.shares import range_end
from fsdp2prof.estimators.simulate.program import Collective, Kernel, Program, Work
from fsdp2prof.estimators.step import (
    anchored_on,
    estimate_step,
    predict_step,
    program_of,
    simulate_program,
)
from fsdp2prof.estimators.timeline.costs import kernel_ns
from fsdp2prof.estimators.verdict.step_range import margin_of
from fsdp2prof.readers.trace.chrome_trace import read_trace
from fsdp2prof.workflows.saved_estimates import write_trace

MODEL = ModelSpec(source="llama3-8b", layers=3)
ONE_LAYER = replace(MODEL, layers=1)
POLICY = PolicySpec(seq_len=256)
H100 = Cluster(hardware=HardwareSpec.parse("h100"), network=NetworkSpec.parse("400gb-ib"))

_UNKNOWN_PEAKS: dict[str, Any] = {"of_peak_flops_frac": None, "of_peak_bytes_frac": None, "roof_frac": None}

POLICIES = {
    "default": (MeshSpec(dp_shard=8), POLICY),
    "never": (MeshSpec(dp_shard=8), replace(POLICY, reshard="never")),
    "int": (MeshSpec(dp_shard=8), replace(POLICY, reshard=4)),
    "hsdp": (MeshSpec(dp_replicate=2, dp_shard=4), POLICY),
    "accumulation": (MeshSpec(dp_shard=4), replace(POLICY, grad_accum=3)),
    "checkpointing": (MeshSpec(dp_shard=4), replace(POLICY, ac="full")),
    "prefetch": (MeshSpec(dp_shard=4), replace(POLICY, forward_prefetch=2, backward_prefetch=2)),
    "tp": (MeshSpec(dp_shard=4, tp=2), POLICY),
    "float8": (
        MeshSpec(dp_shard=8),
        replace(POLICY, float8="tensorwise", fp8_all_gather=True, ac="full", grad_accum=2),
    ),
}


def sums_of(program: Program) -> Counter[tuple[str, str]]:
    """Payload by operation and mesh dimension, of what FSDP does."""
    sums: Counter[tuple[str, str]] = Counter()
    for command in program.commands:
        if isinstance(command, Collective) and command.mesh_dim != "tp":
            sums[command.op, "dp_replicate" if command.mesh_dim == "dp_replicate" else "shard"] += (
                command.payload_bytes
            )
    return sums


@pytest.mark.parametrize("name", POLICIES)
def test_the_captured_collectives_are_those_of_the_communication_estimate(name: str) -> None:
    mesh, policy = POLICIES[name]
    expected: Counter[tuple[str, str]] = Counter()
    for row in estimate_comm(MODEL, mesh, policy).groups:
        if row.mesh_dim != "tp":
            expected[row.op, "dp_replicate" if row.mesh_dim == "dp_replicate" else "shard"] += (
                row.payload_bytes
            )
    assert sums_of(program_of(MODEL, mesh, policy)) == expected


def test_a_forward_without_gradients_adds_a_third_of_the_operations(program: Program) -> None:
    policy = PolicySpec.from_mapping({**POLICY.to_mapping(), "extra_model": "self"})
    twice = program_of(MODEL, MeshSpec(dp_shard=8), policy)
    assert 3 * twice.model_flops == 4 * program.model_flops


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of(MODEL, MeshSpec(dp_shard=8), POLICY)


def test_the_products_are_those_of_the_model(program: Program) -> None:
    """2 x parameters of the blocks and the head x tokens, and causal attention; backward is twice forward."""
    tokens, dim, ffn, heads, head_dim, kv = 256, 4096, 14336, 32, 128, 1024
    block = dim * dim * 2 + dim * kv * 2 + 3 * dim * ffn
    attention = 4 * heads * head_dim * tokens * tokens // 2
    forward = 2 * tokens * (3 * block + dim * 128_256) + 3 * attention
    assert program.model_flops == 3 * forward
    executed = sum(c.work.flops for c in program.commands if isinstance(c, Kernel) and c.work is not None)
    assert executed == 3 * forward + 3 * attention // 2  # flash attention's backward repeats a product


@pytest.mark.parametrize("ac", ["none", "full"])
def test_frozen_weights_need_no_products_for_their_gradients(ac: str) -> None:
    """By hand: forward, and backward to a block's input; the first block's needs no gradient."""
    policy = PolicySpec.from_mapping({"seq_len": 256, "ac": ac, "lora": "r=16,targets=q_proj"})
    tokens, dim, ffn, kv, vocabulary = 256, 4096, 14336, 1024, 128_256
    behind = dim * dim + 3 * dim * ffn  # attention
    block, adapter = behind + dim * dim + 2 * dim * kv, 3 * 2 * 16 * dim
    attention = 3 * 4 * 32 * 128 * tokens * tokens // 2
    made = [program_of(replace(MODEL, layers=n), MeshSpec(dp_shard=1), policy).model_flops for n in (1, 2)]
    assert made[1] - made[0] == 2 * tokens * (2 * block + adapter) + attention
    first = block + behind + adapter - 16 * dim
    assert made[0] == 2 * tokens * (first + 2 * dim * vocabulary) + attention


@pytest.mark.parametrize("compiled", [False, True])
def test_tensor_parallelism_divides_the_models_operations(compiled: bool) -> None:
    policy = PolicySpec(seq_len=32, compile=compiled)
    alone, divided = (program_of(MODEL, MeshSpec(dp_shard=2, tp=tp), policy).model_flops for tp in (1, 2))
    assert alone == 2 * divided


def test_the_parts_sum_to_the_step_and_every_layer_is_named(program: Program) -> None:
    made = simulate_program(program, MODEL, MeshSpec(dp_shard=8), POLICY, H100)
    estimate = made.estimate
    parts = estimate.breakdown_ns
    assert sum(getattr(parts, name) for name in parts.__slots__) == estimate.step_ns
    layers = {row.fqn for row in estimate.by_layer if row.op != "all_reduce"}
    assert layers == {"", "layers.0", "layers.1", "layers.2"}
    assert sum(row.exposed_ns for row in estimate.by_layer) == (
        parts.exposed_all_gather + parts.exposed_reduce_scatter + parts.exposed_all_reduce
    )
    assert estimate.range.low_ns <= estimate.range.high_ns
    assert estimate.tokens_per_s_per_gpu == pytest.approx(256e9 / estimate.step_ns)


def test_a_slower_network_exposes_communication(program: Program) -> None:
    mesh = MeshSpec(dp_shard=8)
    ends = {}
    for name in ("400gb-ib", "100gb-eth"):
        cluster = replace(H100, gpus_per_node=1, network=NetworkSpec.parse(name))
        ends[name] = simulate_program(program, MODEL, mesh, POLICY, cluster).estimate
    assert ends["100gb-eth"].step_ns > 2 * ends["400gb-ib"].step_ns
    assert ends["100gb-eth"].bound_by == "network"


def test_compiling_and_float8_make_it_faster() -> None:
    mesh, long = MeshSpec(dp_shard=8), replace(POLICY, seq_len=2048)
    times = [
        estimate_step(ONE_LAYER, mesh, policy, H100).step_ns
        for policy in (
            long,
            replace(long, compile=True),
            replace(long, compile=True, float8="tensorwise"),
        )
    ]
    assert times == sorted(times, reverse=True)
    assert times[2] < times[0]


def test_several_nodes_need_a_network() -> None:
    alone = Cluster(hardware=HardwareSpec.parse("h100"))
    with pytest.raises(ModelError, match="--network"):
        estimate_step(MODEL, MeshSpec(dp_shard=16), POLICY, alone)


def test_a_missing_network_is_said_before_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp2prof.estimators.step.program_of", lambda *_: pytest.fail("the model ran"))
    alone = Cluster(hardware=HardwareSpec.parse("gb200"))
    with pytest.raises(ModelError, match="72 in an NVL72 rack"):
        estimate_step(ModelSpec(source="llama3-8b"), MeshSpec(dp_shard=12), PolicySpec(), alone)


def test_a_pipelines_bubble_is_the_other_stages_micro_batches() -> None:
    policy = replace(POLICY, reshard="never", grad_accum=4, ac="full")
    made = estimate_step(MODEL, MeshSpec(dp_shard=4, pp=3), policy, H100)
    parts = made.breakdown_ns
    own = sum(getattr(parts, name) for name in parts.__slots__)
    assert made.step_ns == own + made.bubble_ns
    assert 0 < made.bubble_ns <= 2 * own // 4  # two further micro-batches of four, the optimizer apart


def test_context_parallelism_keeps_a_ranks_share_of_the_work() -> None:
    """Twice the sequence on twice the ranks: the same tokens a rank, and attention over all of them."""
    mesh, long = MeshSpec(dp_shard=4, cp=2), replace(POLICY, seq_len=512)
    one, two = program_of(ONE_LAYER, MeshSpec(dp_shard=8), POLICY), program_of(ONE_LAYER, mesh, long)
    forward = 4 * 32 * 128 * 256 * 256 // 2
    assert two.model_flops - one.model_flops == 3 * forward
    recomputed = program_of(ONE_LAYER, mesh, replace(long, ac="full"))
    assert recomputed.model_flops == two.model_flops
    made = simulate_program(two, ONE_LAYER, mesh, long, H100).estimate
    assert made.tokens_per_step == 4 * 512


def test_the_parts_of_a_ring_are_merged_in_float32() -> None:
    """Two parts, by hand, bytes an element of queries: 6 + 6 + 12 + 8 + 12 forward and 6 to narrow again,
    4 + 10 + 10 + 6 backward; of keys and values 4 to pack them a pass, 4 + 10 + 5 + 8 + 16 + 6 backward.
    """
    one = program_of(ONE_LAYER, MeshSpec(dp_shard=8), POLICY)
    two = program_of(ONE_LAYER, MeshSpec(dp_shard=4, cp=2), replace(POLICY, seq_len=512))
    rows = 32 * 256 * 128
    sent = [one for one in two.commands if isinstance(one, Collective) and one.mesh_dim == "cp"]
    assert len(sent) == 2
    kv = sent[0].nelems_in
    assert kv in (2 * rows, 2 * rows // 4)  # every head's own, or the 8 of the model
    assert _moved(two) - _moved(one) == (50 + 30) * rows + (8 + 49) * kv


def _moved(program: Program) -> int:
    works = [command.work for command in program.commands if isinstance(command, Kernel)]
    return sum(work.bytes for work in works if work is not None and work.kind in ("pointwise", "copy"))


def test_a_memory_size_alone_has_no_speed() -> None:
    """It is refused before anything is executed."""
    with pytest.raises(ModelError, match="80GiB: memory_gb_per_s is not stated"):
        Cluster(hardware=HardwareSpec.parse("80GiB"))


def test_a_predicted_trace_written_and_read_again_says_the_same(program: Program, tmp_path: Path) -> None:
    made = simulate_program(program, MODEL, MeshSpec(dp_shard=8), POLICY, H100)
    write_trace(tmp_path / "trace.json.gz", made.trace)
    again = analyze_trace([(read_trace(tmp_path / "trace.json.gz"), None)])
    assert again.ranks[0].steps == made.estimate.trace.ranks[0].steps
    assert again.groups == made.estimate.trace.groups
    assert again.prefetch == made.estimate.trace.prefetch
    assert again.by_layer == made.estimate.by_layer
    assert [replace(row, **_UNKNOWN_PEAKS) for row in made.estimate.trace.operators] == again.operators


def test_products_and_attention_have_a_roofline(program: Program) -> None:
    """Every product of the program, with the operations of its shapes, below the peak of an H100."""
    made = simulate_program(program, MODEL, MeshSpec(dp_shard=8), POLICY, H100).estimate
    rows = made.trace.operators
    products = [
        c.work for c in program.commands if isinstance(c, Kernel) and c.work and c.work.kind == "matmul"
    ]
    found = [row for row in rows if row.name == "aten::mm"]
    assert sum(row.count for row in found) == len(products)
    assert sum(row.flops * row.count for row in found) == sum(work.flops for work in products)
    head = next(row for row in found if row.shapes == "256x4096, 4096x128256")
    assert (head.flops, head.dtype) == (2 * 256 * 4096 * 128_256, "bfloat16")
    assert head.bytes == 2 * (256 * 4096 + 4096 * 128_256 + 256 * 128_256)
    assert all(row.roof_frac is not None and 0 < row.roof_frac <= 1 for row in found)
    attention = [row for row in rows if "attention" in row.name]
    assert {row.name.rpartition("::")[2] for row in attention} == {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    }
    assert {row.count for row in attention} == {3}


@pytest.mark.slow
def test_published_overlap_comes_out_in_order() -> None:
    """Llama-3.1-8B on A100s of 40 GB: 80.2 % in one node, 7.9 % over two nodes with one NIC each, whose
    collectives reached 5.7 GB/s (ccl-bench @1d257f07)."""
    model = ModelSpec(source="llama3.1-8b")
    part = HardwareSpec.parse("a100-40gb")
    slow = NetworkSpec(name="as measured", gb_per_s=5.7, achieved_frac=1.0)
    one = Cluster(hardware=part, gpus_per_node=4)
    two = Cluster(hardware=part, gpus_per_node=4, network=slow, nics_per_node=1)
    runs = (
        (MeshSpec(dp_shard=4), PolicySpec(seq_len=512, reshard="always"), one, 0.802, 0.1),
        (MeshSpec(dp_shard=8), PolicySpec(batch_size=4, seq_len=1024), two, 0.079, 0.1),
    )
    for mesh, policy, cluster, published, off in runs:
        totals = estimate_step(model, mesh, policy, cluster).trace.totals
        assert totals.exposed_ns is not None
        assert totals.communication_ns
        assert 1 - totals.exposed_ns / totals.communication_ns == pytest.approx(published, abs=off)


@pytest.mark.slow
def test_resharding_costs_in_the_published_order() -> None:
    """Never, default, always: 5763, 5605 and 5593 tokens/s on 8 H100 (torchtitan @5940ddeb5)."""
    model, mesh = ModelSpec(source="llama3-8b"), MeshSpec(dp_shard=8)
    part = Cluster(hardware=HardwareSpec.parse("h100-sxm-96gb"))
    times = [
        estimate_step(model, mesh, PolicySpec(seq_len=8192, ac="op", reshard=reshard), part).step_ns
        for reshard in ("never", "torchtitan", "always")
    ]
    assert times == sorted(times)
    assert 1.005 < times[1] / times[0] < 1.05
    assert times[2] / times[1] < 1.01


def test_a_power_limit_slows_by_the_square_root_of_what_it_leaves_above_idling() -> None:
    limited, whole = HardwareSpec.parse("h100-sxm-96gb"), HardwareSpec.parse("h100-sxm")
    left = (500 - 88) / (700 - 88)
    assert limited.achieved_flops("bfloat16") == pytest.approx(left**0.5 * whole.achieved_flops("bfloat16"))
    assert whole.power_frac == 1
    (slow, fast), (slower, faster) = whole.compute_range, limited.compute_range
    assert slower == pytest.approx(slow * left / left**0.5)
    assert faster == pytest.approx(fast * left ** (1 / 3) / left**0.5)


def test_attention_runs_at_the_rate_of_its_kernel() -> None:
    part = HardwareSpec.parse("b200")
    flash = part.attention_flops("bfloat16", 128, 16384)
    assert flash == pytest.approx(361e12)
    assert part.with_attention("efficient").attention_flops("bfloat16", 128, 16384) == flash
    cudnn = part.with_attention("cudnn")
    assert cudnn.attention_flops("bfloat16", 64, 8192) == pytest.approx(1071e12, rel=0.02)
    assert cudnn.attention_flops("bfloat16", 128, 16384, backward=True) == pytest.approx(0.79 * 1220e12)


def test_a_faster_attention_kernel_makes_the_step_faster() -> None:
    """Twice the rate: half the time of attention, whose bytes at this length take less."""
    mesh, long = MeshSpec(dp_shard=8), replace(POLICY, seq_len=4096)
    program = program_of(ONE_LAYER, mesh, long)
    flash, cudnn = (
        simulate_program(
            program, ONE_LAYER, mesh, replace(long, attention=kernel), H100
        ).estimate.trace.operators
        for kernel in ("flash", "cudnn")
    )
    spent = [sum(row.total_ns for row in rows if "attention" in row.name) for rows in (flash, cudnn)]
    floors = 2 * H100.hardware.kernel_floor_ns
    assert spent[0] - floors == pytest.approx(
        2 * (spent[1] - floors), rel=0.2
    )  # a collective slows some of it


@pytest.mark.skipif(not GROUPED_PRODUCTS, reason="torch 2.7 has no grouped products")
def test_kernels_of_other_trainers_are_named_with_how_far_predictions_were_off(program: Program) -> None:
    sparse = ModelSpec(source="qwen3-30b-a3b", layers=1)
    mesh, policy = MeshSpec(dp_shard=8), replace(POLICY, seq_len=128)
    for model, of_model in ((MODEL, program), (sparse, program_of(sparse, mesh, policy))):
        notes = simulate_program(of_model, model, mesh, policy, H100).estimate.assumptions
        assert any("1.38 to 1.42 times" in note for note in notes) is (model is sparse)
        assert not any("flash_attention_2" in note for note in notes)


def test_the_estimate_lies_in_its_range_and_measured_figures_are_not_varied(program: Program) -> None:
    mesh = MeshSpec(dp_shard=8)
    wide = simulate_program(program, MODEL, mesh, POLICY, H100).estimate
    assert wide.range.low_ns < wide.step_ns < wide.range.high_ns
    measured = msgspec.structs.replace(H100.hardware, host_operator_ns=5000, overlap_slowdown_frac=0.19)
    narrow = simulate_program(program, MODEL, mesh, POLICY, replace(H100, hardware=measured)).estimate
    assert narrow.step_ns == wide.step_ns
    assert wide.range.low_ns <= narrow.range.low_ns < narrow.range.high_ns < wide.range.high_ns
    assert len(narrow.range.unknown) == len(wide.range.unknown) - 2


def test_attention_is_varied_and_margins_are_those_of_the_part_where_nothing_else_is_stated(
    program: Program,
) -> None:
    mesh, stated = MeshSpec(dp_shard=8), PolicySpec.from_mapping({"seq_len": 256, "attention": "flash"})
    for policy, varies in ((POLICY, True), (stated, False), (replace(POLICY, attention="math"), False)):
        unknown = simulate_program(program, MODEL, mesh, policy, H100).estimate.range.unknown
        assert any(line.startswith("attention may be") for line in unknown) is varies
    known = replace(POLICY, torch="2.9")
    untried = HardwareSpec.parse("mi300x")
    benched = msgspec.structs.replace(untried, host_operator_ns=5000)
    divided = MeshSpec(dp_shard=4, tp=2)
    margins = [
        margin_of(one, known, part, experts=False) for part in (untried, benched) for one in (mesh, divided)
    ]
    assert [margin.value for margin in margins] == [1.1, 1.1, 0.55, 1.07]
    assert [margin.fast for margin in margins] == [2.2, 2.2, 0.52, 0.6]
    sparse = [margin_of(mesh, known, part, experts=True) for part in (untried, benched)]
    assert [(margin.value, margin.fast) for margin in sparse] == [(3.9, 2.2), (3.9, 0.52)]
    fused = margin_of(mesh, replace(known, fused_kernels=True), benched, experts=False)
    assert (fused.value, fused.fast) == (3.9, 7.2)
    reference = margin_of(mesh, known, benched, experts=False, reference=True)
    assert (reference.value, reference.fast) == (0.55, 7.2)


def test_the_range_has_collectives_as_slow_as_they_were_seen(program: Program) -> None:
    """Half the network at the harsh end: a step that its network bounds takes about twice as long there."""
    mesh = MeshSpec(dp_shard=8)
    slow = Cluster(hardware=H100.hardware, gpus_per_node=1, network=NetworkSpec.parse("100gb-eth"))
    made = simulate_program(program, MODEL, mesh, POLICY, slow).estimate
    assert made.bound_by == "network"
    assert made.range.simulated_high_ns is not None
    assert made.range.simulated_high_ns / made.step_ns == pytest.approx(1 / 0.53, rel=0.1)
    assert any("between nodes 53%" in line for line in made.range.unknown)


def test_compiled_blocks_move_what_their_own_graphs_do() -> None:
    """Products stay; kernels get fewer, and move less."""
    mesh = MeshSpec(dp_shard=8)
    eager, fused = (program_of(MODEL, mesh, replace(POLICY, compile=on)) for on in (False, True))
    assert fused.guessed_fusion is None
    assert fused.model_flops == eager.model_flops
    sums = []
    for made in (eager, fused):
        kernels = [c for c in made.commands if isinstance(c, Kernel) and c.stream == 0 and c.work is not None]
        other = [c.work.bytes for c in kernels if c.work is not None and c.work.kind in ("pointwise", "copy")]
        sums.append((len(other), sum(other)))
    assert sums[1][0] < sums[0][0]
    assert sums[1][1] < sums[0][1]
    assert any(isinstance(c, Kernel) and c.op == "fused" for c in fused.commands)


def test_the_measured_products_come_out_at_the_measured_rate() -> None:
    """720 TFLOP/s over shapes of Llama 70B on an H100, 257 for a cube of 8192 on an A100, as published."""
    shapes = [(16384, 8192, 1280), (16384, 1024, 8192), (16384, 8192, 7168), (16384, 3584, 8192), (8192,) * 3]
    rates = {}
    for name in ("h100-sxm", "a100-80gb"):
        spec = HardwareSpec.parse(name)
        times = [
            kernel_ns(Work("matmul", "bfloat16", 0, 2 * m * n * k, (1, m, n, k)), spec) - spec.kernel_floor_ns
            for m, n, k in shapes
        ]
        rates[name] = [2 * m * n * k / time / 1000 for (m, n, k), time in zip(shapes, times, strict=True)]
    assert sum(rates["h100-sxm"]) / 5 == pytest.approx(720, rel=0.01)
    assert rates["a100-80gb"][-1] == pytest.approx(257, rel=0.01)


def test_measured_runs_correct_the_part_that_they_constrain(program: Program) -> None:
    """On a network that is slower than its sheet says, one measured run puts another one right."""
    mesh, never = MeshSpec(dp_shard=8), replace(POLICY, reshard="never")
    sheet = Cluster(hardware=H100.hardware, gpus_per_node=1, network=NetworkSpec.parse("100gb-eth"))
    truth = anchored(sheet, Slower(links=1.3))
    spent = simulate_program(program, MODEL, mesh, POLICY, truth).estimate.step_ns
    run = (Measured(name="step_ms", value=spent / 1e6), program, MODEL, mesh, POLICY)
    found = anchored_on([run], sheet, exact=False)
    assert "links 1.2" in found.note or "links 1.3" in found.note
    assert "compute 1.00 x (hardly constrained)" in found.note
    other = predict_step(MODEL, mesh, never, sheet, anchors=[run]).estimate
    expected = estimate_step(MODEL, mesh, never, truth)
    cold = estimate_step(MODEL, mesh, never, sheet)
    assert other.step_ns == pytest.approx(expected.step_ns, rel=0.04)
    assert cold.step_ns < 0.85 * expected.step_ns
    assert other.range.low_ns <= expected.step_ns <= other.range.high_ns
    assert other.range.high_ns - other.range.low_ns < cold.range.high_ns - cold.range.low_ns
    assert found.note in other.assumptions


def test_a_number_of_this_run_is_met() -> None:
    mesh = MeshSpec(dp_shard=8)
    measured = Measured(name="step_ms", value=123.0)
    made = predict_step(MODEL, mesh, POLICY, H100, measured=measured).estimate
    assert made.step_ns == pytest.approx(123e6, rel=0.01)
    assert made.range.low_ns < 123e6 < made.range.high_ns


def test_a_mixtures_step_is_beside_what_published_ones_took() -> None:
    """A dense model's predictions are not biased."""
    mixture, dense = (
        estimate_step(ModelSpec(source=name, layers=2), MeshSpec(dp_shard=8), POLICY, H100)
        for name in ("qwen3-30b-a3b", "llama3-8b")
    )
    median = range_end("speed_of_experts").median
    assert median is not None
    assert mixture.range.published_ns == pytest.approx(median * mixture.step_ns, abs=1)
    assert any("mixtures of experts" in line for line in mixture.verdict)
    assert dense.range.published_ns is None
