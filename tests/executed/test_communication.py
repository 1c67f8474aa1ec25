"""Communication by hand: what each policy and mesh sends, what FSDP pads, what cannot be modelled."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.present import present

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.communication import estimate_built, estimate_comm
from fsdp2prof.estimators.communication_summary import summarise
from fsdp2prof.estimators.config.catalog import TransformerConfig
from fsdp2prof.estimators.config.choices import Every
from fsdp2prof.estimators.config.extra_models import ExtraModel, ExtraModels
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.pipeline import Interleaved
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.description import policy_as_recorded
from fsdp2prof.estimators.models.builtin import build_builtin
from fsdp2prof.estimators.sharding.groups import ShardedParameter, parameter_groups
from fsdp2prof.estimators.techniques.pipeline import blocks_of_ranks, blocks_of_stages
from fsdp2prof.estimators.techniques.weight_sync import WeightSyncSpec
from fsdp2prof.estimators.torch_rules import torch_rules
from fsdp2prof.estimators.traffic import Ledger
from fsdp2prof.results.estimate import CommRow, EstimatedMesh, EstimatedModel
from fsdp2prof.schedule import Axis, ScheduledGroup, steady_step

CONFIG = TransformerConfig(
    name="tiny",
    family="llama",
    dim=32,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_dim=64,
    vocab_size=128,
    context=64,
)
# A block: wq, wo 2 x 1024, wk, wv 2 x 512, ffn 3 x 2048, norms 64: 9,280. Root: 2 x 4096 + 32: 8,224.
BLOCK, ROOT = 9_280, 8_224
PLAIN = PolicySpec(batch_size=3, seq_len=16, clip_grad=False)


def rows_of(mesh, policy=PLAIN, config=CONFIG):
    model = build_builtin(config, policy.seq_len, policy.orig_dtype)
    rows = estimate_built(model, MeshSpec.parse(mesh), policy).groups
    return {(row.fqn, row.phase, row.op, row.mesh_dim): row for row in rows}


def test_llama3_8b_by_hand():
    estimate = estimate_comm(
        ModelSpec(source="llama3-8b"), MeshSpec(dp_shard=8), PolicySpec(reshard="always", clip_grad=False)
    )
    gathered = 2 * 2 * 8_030_261_248
    gathers = 66
    if not torch_rules().root_obeys_reshard:  # embedding and head, and the last norm, are gathered once
        gathers, gathered = 65, gathered - 2 * (2 * 128_256 + 1) * 4096
    reduced = 4 * 8_030_261_248
    totals = {op: (t.count, t.payload_bytes, t.wire_bytes) for op, t in estimate.per_step.items()}
    assert totals == {
        "all_gather": (gathers, gathered, gathered * 7 // 8),
        "reduce_scatter": (33, reduced, reduced * 7 // 8),
    }
    assert estimate.assumptions


def test_default_policy_of_a_tiny_model():
    rows = rows_of("dp_replicate=2,dp_shard=4")
    sent = {key: (row.dtype, row.count, row.payload_bytes, row.wire_bytes) for key, row in rows.items()}
    expected = {}
    for layer in range(4):
        fqn = f"layers.{layer}"
        for phase in ("forward", "backward"):
            gather = ("bfloat16", 1, 2 * BLOCK, 2 * BLOCK * 3 // 4)
            expected[fqn, phase, "all_gather", "dp_shard"] = gather
        expected[fqn, "backward", "reduce_scatter", "dp_shard"] = ("float32", 1, 4 * BLOCK, 3 * BLOCK)
        expected[fqn, "backward", "all_reduce", "dp_replicate"] = ("float32", 1, BLOCK, BLOCK)
    expected["", "forward", "all_gather", "dp_shard"] = ("bfloat16", 1, 2 * ROOT, 2 * ROOT * 3 // 4)
    expected["", "backward", "reduce_scatter", "dp_shard"] = ("float32", 1, 4 * ROOT, 3 * ROOT)
    expected["", "backward", "all_reduce", "dp_replicate"] = ("float32", 1, ROOT, ROOT)
    assert sent == expected


def test_gradient_clipping_is_one_all_reduce():
    row = rows_of("dp_shard=4", replace(PLAIN, clip_grad=True))[None, "optimizer", "all_reduce", "dp_shard"]
    parameters = 4 * 9 + 3  # nine a block, three at the root
    assert (row.count, row.payload_bytes) == (
        1,
        4 * (parameters if torch_rules().clipping_reduces_every_norm else 1),
    )


def test_backward_over_two_of_eight_ranks():
    row = rows_of("dp_shard=8", replace(PLAIN, reshard=2))["layers.0", "backward", "all_gather", "dim_1"]
    assert (row.group_size, row.payload_bytes, row.wire_bytes) == (2, 2 * BLOCK, BLOCK)


def test_one_rank_sends_nothing():
    assert rows_of("dp_shard=1") == {}
    assert {key[2] for key in rows_of("dp_replicate=4")} == {"all_reduce"}


def test_float8_gathers_linear_weights_as_bytes_and_reduces_their_scales():
    policy = replace(PLAIN, float8="tensorwise", fp8_all_gather=True)
    rows = rows_of("dp_shard=4", policy)
    gather = rows["layers.0", "forward", "all_gather", "dp_shard"]
    # The 9,216 weights as one byte, the two norms' 64 elements as two.
    assert (gather.dtype, gather.payload_bytes) == ("uint8", 9_216 + 128)
    assert rows["", "forward", "all_gather", "dp_shard"].dtype == "bfloat16"
    assert rows["layers.0", "backward", "reduce_scatter", "dp_shard"].payload_bytes == 4 * BLOCK
    scales = rows[None, "optimizer", "all_reduce", "dp_shard"]
    assert (scales.count, scales.payload_bytes) == (1, 4 * 7 * 4)


def test_a_frozen_extra_model_gathers_its_blocks_only():
    second = ExtraModels((ExtraModel(source="gpt2"),))
    policy = replace(PLAIN, seq_len=1024, grad_accum=2, extra_model=second)
    estimate = estimate_comm(ModelSpec(source="llama3-8b", layers=1), MeshSpec(dp_shard=4), policy)
    extra = [row for row in estimate.groups if row.root == 1]
    assert {(row.phase, row.op, row.count) for row in extra} == {("forward", "all_gather", 2)}
    assert {row.fqn for row in extra} == {f"layers.{layer}" for layer in range(12)}


def test_context_parallelism_moves_grouped_heads():
    rows = rows_of("dp_shard=2,cp=4")
    # K and V: 2 x 3 sequences x 16 tokens x 2 heads x 8 = 1,536 elements in bf16; gradients in fp32, a
    # quarter of them passed on four times.
    for phase in ("forward", "backward"):
        row = rows["layers.1", phase, "all_gather", "cp"]
        assert (row.count, row.payload_bytes, row.wire_bytes) == (1, 3_072, 2_304)
    ring = rows["layers.1", "backward", "all_to_all", "cp"]
    assert (ring.dtype, ring.count, ring.payload_bytes, ring.wire_bytes) == ("float32", 4, 6_144, 6_144)
    assert rows["layers.1", "forward", "all_gather", "dp_shard_cp"].group_size == 8


def test_context_parallelism_gathers_again_when_blocks_are_recomputed():
    rows = rows_of("dp_shard=2,cp=2", replace(PLAIN, ac=Every(2)))
    assert rows["layers.0", "backward", "all_gather", "cp"].count == 1
    assert rows["layers.1", "backward", "all_gather", "cp"].count == 2


def test_tensor_parallelism_by_hand():
    rows = rows_of("dp_shard=2,tp=2")
    hidden = 2 * 3 * 16 * 32  # bf16 x batch x sequence x dim
    for phase in ("forward", "backward"):
        for op in ("all_gather", "reduce_scatter"):
            assert rows["layers.0", phase, op, "tp"].payload_bytes == 2 * hidden
            assert rows["", phase, op, "tp"].payload_bytes == hidden
    assert rows["layers.0", "backward", "all_reduce", "tp"].payload_bytes == 2 * 2 * 32  # two norms
    assert rows["", "forward", "all_reduce", "tp"].payload_bytes == 3 * 4 * 48  # max, sum and target logit
    # FSDP gathers what tensor parallelism leaves: half of each matrix and the whole norms.
    assert rows["layers.0", "forward", "all_gather", "dp_shard"].payload_bytes == 2 * (9_216 // 2 + 64)


def test_tensor_parallel_ends_belong_to_their_group():
    rows = rows_of("dp_shard=2,tp=2", replace(PLAIN, wrap=("block", "tok_embeddings", "norm+output")))
    assert rows["tok_embeddings", "forward", "reduce_scatter", "tp"].count == 1
    assert rows["norm, output", "forward", "all_gather", "tp"].count == 1
    assert rows["", "forward", "all_reduce", "tp"].count == 3


@pytest.mark.parametrize(
    ("stage", "sends", "fqns"),
    [
        (0, {("forward", 5)}, {"", "layers.0", "layers.1"}),
        (1, {("forward", 5), ("backward", 5)}, {"", "layers.2"}),
        (2, {("backward", 5)}, {"", "layers.3"}),
    ],
)
def test_pipeline_stages(stage, sends, fqns):
    policy = replace(PLAIN, grad_accum=5, reshard="never", pp_stage=stage)
    rows = rows_of("pp=3,dp_shard=2", policy)
    pipeline = [row for row in rows.values() if row.mesh_dim == "pp"]
    assert {(row.phase, row.count) for row in pipeline} == sends
    assert {row.payload_bytes // row.count for row in pipeline} == {2 * 3 * 16 * 32}
    assert {row.fqn for row in rows.values()} == fqns
    sharded = [row for row in rows.values() if row.mesh_dim == "dp_shard"]
    assert {(row.phase, row.op, row.count) for row in sharded} == {
        ("forward", "all_gather", 1),
        ("backward", "reduce_scatter", 1),
    }


@given(layers=st.integers(1, 200), ranks=st.integers(2, 32), ends=st.integers(0, 2), twice=st.booleans())
def test_stages_hold_every_layer_once(layers, ranks, ends, twice):
    """And are equally long to a layer, embedding and head counted as ``ends`` each."""
    mesh = MeshSpec(pp=ranks)
    policy = PolicySpec(pp_schedule=Interleaved(2) if twice else "1f1b", pp_end_layers=ends)
    try:
        stages = blocks_of_stages(layers, mesh, policy)
    except ModelError:
        assert (layers + 2 * ends) // (ranks * (1 + twice)) < max(1, ends)
        return
    assert [layer for held in stages for layer in held] == list(range(layers))
    sizes = [len(held) for held in stages]
    sizes[0] += ends
    sizes[-1] += ends
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    of_ranks = blocks_of_ranks(layers, mesh, policy)
    assert of_ranks[0] == (*stages[0], *(stages[ranks] if twice else ()))


@pytest.mark.parametrize(
    ("layers", "pp", "schedule", "expected"),
    [
        # generate_llm_fqn_per_model_part(8, 27), torchtitan 92ed8b318: 29 effective layers in 8 stages
        (27, 4, Interleaved(2), [3, 4, 4, 4, 4, 3, 3, 2]),
        (61, 8, Interleaved(2), [3, *[4] * 14, 2]),
        (32, 4, "1f1b", [8, 9, 8, 7]),
        (27, 2, "zbv", [7, 7, 7, 6]),
    ],
)
def test_torchtitan_counts_the_ends_as_a_layer(layers, pp, schedule, expected):
    policy = PolicySpec(pp_schedule=schedule, pp_end_layers=1)
    assert [len(held) for held in blocks_of_stages(layers, MeshSpec(pp=pp), policy)] == expected
    if schedule == "zbv":  # the first rank has the first and the last stage
        assert blocks_of_ranks(layers, MeshSpec(pp=pp), policy)[0] == (*range(7), *range(21, 27))


@given(rows=st.integers(1, 300), columns=st.integers(1, 9), shards=st.integers(1, 64))
def test_shards_hold_every_row_once_and_padding_less_than_a_row_each(rows, columns, shards):
    parameter = ShardedParameter(
        fqn="w",
        shape=(rows, columns),
        dtype="float32",
        requires_grad=True,
        shards=shards,
        gather_dtype="bfloat16",
        position=0,
    )
    held = [parameter.shard_rows(rank) for rank in range(shards)]
    assert sum(held) == rows
    assert held == sorted(held, reverse=True)
    assert parameter.padded_numel == shards * held[0] * columns
    assert 0 <= parameter.padded_numel - parameter.numel < shards * columns


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=6),
    shards=st.integers(2, 16),
    replicas=st.integers(1, 4),
    micro_batches=st.integers(1, 4),
    reshard=st.booleans(),
)
def test_trained_groups_follow_the_formulas(sizes, shards, replicas, micro_batches, reshard):
    """all-gather A x P x bp, twice if resharded; reduce-scatter and all-reduce once, of P x br and S x br."""
    shard, replicate = Axis(size=shards, mesh_dim="s"), Axis(size=replicas, mesh_dim="r")
    groups = [
        ScheduledGroup(
            root=0,
            fqn=f"layers.{index}",
            gather_bytes=2 * size * shards,
            gather_dtype="bfloat16",
            reduce_bytes=4 * size * shards,
            reduce_dtype="float32",
            reshard=reshard,
            has_backward=True,
            shard=shard,
            reduce=shard,
            replicate=replicate,
            post_forward=shard,
        )
        for index, size in enumerate(sizes)
    ]
    ledger = Ledger()
    ledger.add_events(steady_step(groups, micro_batches=micro_batches))
    payload = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
    for row in ledger.to_rows():
        payload[row.op] += row.payload_bytes
    elements = sum(sizes)
    assert payload["all_gather"] == (2 if reshard else 1) * micro_batches * 2 * elements * shards
    assert payload["reduce_scatter"] == 4 * elements * shards
    assert payload["all_reduce"] == (4 * elements if replicas > 1 else 0)


def test_groups_are_fsdps_own():
    model = build_builtin(CONFIG, 16, "float32")
    policy = replace(PLAIN, wrap=("block", "Attention", "norm+output"))
    groups = {group.fqn: group for group in parameter_groups(model, MeshSpec(dp_shard=2), policy)}
    assert [p.fqn for p in groups[""].parameters] == ["tok_embeddings.weight"]
    assert [p.fqn for p in groups["norm, output"].parameters] == ["norm.weight", "output.weight"]
    assert len(groups["layers.0.attention"].parameters) == 4
    assert [p.fqn.rsplit(".", 2)[1] for p in groups["layers.0"].parameters] == [
        "w1",
        "w2",
        "w3",
        "attention_norm",
        "ffn_norm",
    ]
    assert groups["layers.0"].reshard_after_forward is True
    assert groups[""].reshard_after_forward is False


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ("dp_shard=2,tp=3", {}, "tp=3 does not divide the 4 heads"),
        ("dp_shard=2,tp=4", {}, "tp=4 does not divide the 2 kv_heads"),
        ("dp_shard=2,cp=3", {}, "seq_len 16 is not a multiple of 6"),
        ("dp_shard=8", {"reshard": 3}, "3 ranks do not divide the 8"),
        ("dp_shard=2", {"reshard": 4}, "4 ranks do not divide the 2"),
        ("dp_shard=2", {"wrap": ("Decoder",)}, "no class or module 'Decoder' in tiny"),
        ("dp_shard=2", {"wrap": ("norm+head",)}, "no module 'head' in tiny"),
        ("dp_shard=2", {"wrap": ("norm", "norm+output")}, "norm would be sharded twice"),
        ("dp_shard=2", {"trainable": "lora"}, "matches no parameter"),
        ("pp=8", {"reshard": "never"}, "pp=8 stages for 4 layers"),
        ("pp=2", {}, "with pp use reshard=never"),
        ("dp_shard=2,tp=2", {"lora": "r=3,targets=wq"}, "needs one run, a rank that it divides"),
        ("dp_shard=2,cp=2", {"lora": "r=4,targets=w1"}, "lora: with cp modelled for adapters at queries"),
        ("dp_shard=2,cp=2", {"trainable": "norm"}, "trainable: with cp modelled for adapters at queries"),
        ("dp_shard=2,tp=2", {"loss": "chunked-blocks:8"}, "prime-rl's fused head needs the whole head"),
        ("dp_shard=2,tp=2", {"loss": "chunked:8", "loss_parallel": False}, "over gathered logits is not"),
        ("pp=2", {"reshard": "never", "pp_stage": 2}, "2 is not one of the 2 pipeline stages"),
        ("dp_shard=4,tp=2", {"reshard": 2}, "not supported by FSDP2 with tensor parallelism"),
        (
            "dp_shard=4",
            {"reshard": 2, "float8": "tensorwise", "fp8_all_gather": True},
            "not supported by FSDP2 with float8",
        ),
    ],
)
def test_what_is_not_modelled_is_refused(mesh, options, message):
    with pytest.raises(ModelError, match=message) as error:
        rows_of(mesh, replace(PLAIN, **options))
    assert "\n" not in str(error.value)


def test_a_model_whose_forward_fails_is_refused(tmp_path, monkeypatch):
    (tmp_path / "crooked.py").write_text(
        "from torch import nn\n"
        "def model():\n    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(3, 3), nn.Linear(3, 3))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    policy = replace(PLAIN, trainable="^1", wrap=("root",))
    with pytest.raises(ModelError, match="its forward failed on fake tensors") as error:
        estimate_comm(ModelSpec(source="crooked:model"), MeshSpec(dp_shard=2), policy)
    assert "\n" not in str(error.value)
    everything = replace(policy, trainable=None)  # no forward is needed when everything trains
    assert estimate_comm(ModelSpec(source="crooked:model"), MeshSpec(dp_shard=2), everything).groups


def test_tied_weights_in_two_groups_are_refused():
    config = replace(CONFIG, tied=True)
    with pytest.raises(ModelError, match="share one parameter but fall into different groups"):
        rows_of("dp_shard=2", replace(PLAIN, wrap=("block", "output")), config)


def test_weights_to_engines_by_hand():
    """fp32 shards of 4 ranks; two engines of two ranks hold bf16, one receives 1 GB a second."""
    spec, mesh = ModelSpec(source="gpt2", layers=2), MeshSpec(dp_shard=4)
    text = "engines=2,tp=2,per={},bandwidth=1GB"
    policy = replace(PLAIN, seq_len=64)
    syncs = [
        present(estimate_comm(spec, mesh, policy, WeightSyncSpec.parse(text.format(per))).weight_sync)
        for per in ("parameter", "layer", "whole")
    ]
    width, rows = 768, 50_257
    layer, root = 12 * width**2 + 13 * width, (rows + 1024 + 2) * width
    padded = 2 * layer + root + 3 * width  # 50,257 rows on 4 ranks
    elements = 2 * layer + root
    assert [one.gather_payload_bytes for one in syncs] == [4 * padded, 2 * padded, 4 * padded]
    assert {one.sent_bytes for one in syncs} == {2 * elements}
    assert {one.received_bytes for one in syncs} == {4 * 2 * elements}
    assert {one.kept_bytes for one in syncs} == {elements}
    largest = (rows + 3) * width
    assert syncs[0].buffer_bytes == 4 * largest + 2 * rows * width
    assert syncs[1].buffer_bytes == 2 * (root + 3 * width)
    assert syncs[2].buffer_bytes == 4 * padded + 2 * rows * width
    assert syncs[0].send_seconds == 2 * elements / 1e9
    assert syncs[0].gather_seconds == 3 * padded / 1e9
    here = present(estimate_comm(spec, mesh, policy, WeightSyncSpec.parse("colocated,tp=4")).weight_sync)
    assert (here.broadcasts, here.sent_bytes, here.kept_bytes) == (0, 0, elements // 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=4", "is not engines=N"),
        ("engines=2,ranks=3", "is not engines=N"),
        ("engines=-1", "engines='-1' is not a number of at least 0"),
        ("engines=2,tp=0", "tp='0' is not a number of at least 1"),
        ("engines=2,per=row", "per='row' is none of parameter, layer, whole"),
        ("engines=2,dtype=int4", "unknown dtype 'int4'"),
        ("engines=2,bandwidth=fast", "weight_sync: not a size: 'fast'"),
        ("engines=2,bandwidth=0", "must be more than 0"),
    ],
)
def test_bad_weight_syncs(text, message):
    with pytest.raises(ModelError, match=message):
        WeightSyncSpec.parse(text)


@pytest.mark.parametrize(
    ("forward", "backward", "reduced", "saved"),
    [
        (1, 1, 1, 1),
        (4, 1, 1, 4),  # three rollouts, a forward, a backward
        (2, 2, 1, 2),  # a module shared by two forwards of one loss: each backward reshards it
        (3, 0, 0, 3),  # a frozen model: nothing reshards it
    ],
)
def test_keeping_parameters_gathered_saves(forward: int, backward: int, reduced: int, saved: int) -> None:
    """Gathers counted in two-rank gloo trainings with reshard_after_forward True, and then False."""
    counts = (("forward", "all_gather", forward), ("backward", "all_gather", backward))
    rows = [
        CommRow(
            root=0,
            fqn="layers.0",
            phase=phase,
            op=op,
            process_group="0",
            mesh_dim="dp_shard",
            dtype="float32",
            group_size=2,
            count=count,
            payload_bytes=2048 * count,
            wire_bytes=1024 * count,
        )
        for phase, op, count in (*counts, ("backward", "reduce_scatter", reduced))
        if count
    ]
    estimate = summarise(
        rows,
        model=EstimatedModel(name="", parameters=512, groups=1),
        mesh=EstimatedMesh(dp_replicate=1, dp_shard=2, world_size=2),
        policy=policy_as_recorded(grad_accum=1, sync="last", param_dtype="float32", reduce_dtype="float32"),
        assumptions=[],
    )
    assert f"saves {saved}.00 KiB, and holds 2.00 KiB" in estimate.advice[0]
