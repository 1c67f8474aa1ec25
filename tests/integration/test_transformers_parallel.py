"""Tensor parallelism of Hugging Face models equals what transformers and torch do, without tolerance."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.interception import Interception, summed
from torch.distributed.tensor.parallel import loss_parallel

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.communication import estimate_comm
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.fake_world import fake_process_group, fsdp_mesh, tensor_parallel_mesh
from fsdp2prof.estimators.execution.training import clip_gradients, shard
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.sharding.groups import parameter_groups
from fsdp2prof.estimators.techniques.registry import part_of

from .conftest import SCRIPTS, torchrun, training_environment

pytestmark = pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning")
pytest.importorskip("transformers.distributed.tensor_parallel", reason="transformers 5.23 divides models so")

MESH = MeshSpec(dp_shard=2, tp=2)
SIZES: dict[str, Any] = {"seq_len": 16, "batch_size": 2}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 98,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "qwen2": {},  # biases
    "qwen3": {"tie_word_embeddings": True},  # norms of heads, whose gradients are summed
    "phi3": {},  # packed projections, gathered
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32},
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 16},
    "cohere2": {"tie_word_embeddings": True},
}


def config_of(tmp_path, family, **changes):
    values = {"model_type": family.partition(",")[0], **SMALL, **FAMILIES[family], **changes}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return ModelSpec(source=str(path))


def summed_rows(result):
    rows: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for row in result.groups:
        rows[row.phase, row.op, row.dtype] += row.count
        sizes[row.phase, row.op, row.dtype] += row.payload_bytes
    return {key: (rows[key], sizes[key]) for key in rows}


def executed(spec: ModelSpec, mesh: MeshSpec, policy: PolicySpec) -> Any:
    """Train a real model for two steps over a fake process group and count the second one's collectives."""
    model = build_model(spec, seq_len=policy.seq_len)
    root: Any = model.module
    mode = Interception()
    with fake_process_group(mesh) as device_mesh:
        shard(model, policy, fsdp_mesh(device_mesh), tensor_parallel_mesh(device_mesh))
        model.module.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in [*model.module.parameters(), *model.module.buffers()]:
                tensor.zero_()
        for _ in range(2):
            mode.counts.clear()
            with mode, loss_parallel() if policy.loss_parallel else nullcontext():
                for micro_batch in range(policy.grad_accum):
                    root.set_requires_gradient_sync(micro_batch == policy.grad_accum - 1)
                    mode.phase = "forward"
                    batch = model.make_batch(policy.batch_size, policy.seq_len, torch.device("cpu"))
                    loss = model.loss(model.module, batch, policy.loss)
                    mode.phase = "backward"
                    loss.backward()
                mode.phase = "optimizer"
                clip_gradients(model)
                model.module.zero_grad()
        local = {name: tuple(p.to_local().shape) for name, p in root.named_parameters()}
    return summed(mode.counts), local


BY_DEFAULT = ("qwen3", "qwen3_moe")


def cases(names, by_default):
    return [pytest.param(name, marks=() if name in by_default else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("family", cases(FAMILIES, BY_DEFAULT))
def test_collectives_and_shards_of_a_family(family, tmp_path):
    spec, policy = config_of(tmp_path, family), PolicySpec(**SIZES)
    sums, local = executed(spec, MESH, policy)
    assert summed_rows(estimate_comm(spec, MESH, policy)) == sums
    groups = parameter_groups(build_model(spec, seq_len=16), MESH, policy)
    shapes = {p.fqn: (p.shard_rows(0), *p.shape[1:]) for group in groups for p in group.parameters}
    assert shapes == local


POLICIES: dict[str, Any] = {"ac": "full", "grad_accum": 2, "loss": "chunked:2"}
IN_PARALLEL: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"loss": "chunked:2"},
    "gemma2": {"ac": "full"},  # capped
    "cohere2": {},  # tied, scaled
}


@pytest.mark.parametrize("option", cases(POLICIES, ("loss",)))
def test_policies(option, tmp_path):
    spec, policy = config_of(tmp_path, "llama"), PolicySpec(**SIZES, **{option: POLICIES[option]})
    assert summed_rows(estimate_comm(spec, MESH, policy)) == executed(spec, MESH, policy)[0]


@pytest.mark.parametrize("family", cases(IN_PARALLEL, ()))
def test_logits_that_stay_divided(family, tmp_path):
    spec = config_of(tmp_path, family)
    policy = PolicySpec(**SIZES, **IN_PARALLEL[family], loss_parallel=True)
    assert summed_rows(estimate_comm(spec, MESH, policy)) == executed(spec, MESH, policy)[0]


def test_divided_logits_are_not_gathered(tmp_path):
    """By hand: two ranks have 49 of 98 logits of 32 tokens; three numbers a token are reduced in fp32."""
    spec, policy = config_of(tmp_path, "llama"), PolicySpec(**SIZES, clip_grad=False)
    gathered, divided = (
        Counter({key: size for key, (_, size) in summed_rows(estimate_comm(spec, MESH, one)).items()})
        for one in (policy, replace(policy, loss_parallel=True))
    )
    assert gathered - divided == {("forward", "all_gather", "bfloat16"): 32 * 98 * 2}
    assert divided - gathered == {("forward", "all_reduce", "float32"): 3 * 32 * 4}


def test_what_cannot_be_divided_says_why(tmp_path):
    policy = PolicySpec(**SIZES)
    for family, changes, mesh, reason in (
        ("llama", {}, MeshSpec(tp=4), "tp=4 does not divide the 2 kv_heads of llama: torchtitan and"),
        ("llama", {"model_type": "gpt_oss"}, MESH, "GptOssForCausalLM none"),
    ):
        spec = config_of(tmp_path, family, **changes)
        for estimate in (estimate_memory, estimate_comm):
            with pytest.raises(ModelError, match=reason):
                estimate(spec, mesh, policy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "in_parallel"),
    [("llama, tied", None), ("qwen3", None), ("mixtral", None), ("qwen3", True), ("llama", True)],
)
def test_a_real_run_of_four_ranks(family, in_parallel, tmp_path):
    """Two by two gloo ranks: every rank's bytes and collectives."""
    spec, policy = config_of(tmp_path, family), PolicySpec(**SIZES, loss_parallel=in_parallel)
    how = ["loss_parallel"] if in_parallel else []
    command = torchrun(SCRIPTS / "transformers_parallel.py", 4, spec.source, str(tmp_path), *how)
    subprocess.run(command, check=True, env=training_environment(), timeout=300)
    groups = parameter_groups(build_model(spec, seq_len=16), MESH, policy)
    sums = summed_rows(estimate_comm(spec, MESH, policy))
    for rank in range(4):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        held = {p.fqn: 4 * p.shard_numel(rank // 2) for group in groups for p in group.parameters}
        assert found["held"] == held
        counts = {tuple(key): count for *key, count in found["rows"]}
        assert summed(counts) == sums


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tp", "ep", "how"),
    [
        ("qwen3_moe", 1, 2, ""),
        ("mixtral", 1, 4, ""),
        ("qwen3_moe", 2, 4, ""),
        ("mixtral", 2, 2, ""),
        ("qwen3_moe", 1, 2, "offload"),
        ("mixtral", 1, 2, "checkpoint"),
        ("qwen3_moe", 1, 4, "self_attn"),
        ("mixtral", 1, 2, r"layers.1.*experts"),
        ("mixtral", 1, 2, r"layers.[12].*gate\.weight"),
    ],
)
def test_experts_that_transformers_deals_out_on_four_ranks(family, tp, ep, how, tmp_path):
    """Real routing: what comes back from an expert differs from rank to rank, its sum does not."""
    kinds: dict[str, dict[str, Any]] = {"offload": {"offload": True}, "checkpoint": {"ac": "full"}}
    kind = kinds.get(how, {"trainable": how or None})
    spec, policy = config_of(tmp_path, family), PolicySpec(**SIZES, **kind, clip_grad=False)
    mesh = MeshSpec(dp_shard=4 // tp, tp=tp, ep=ep)
    command = torchrun(
        SCRIPTS / "transformers_experts.py", 4, spec.source, str(tmp_path), str(tp), str(ep), how
    )
    subprocess.run(command, check=True, env=training_environment(), timeout=300)
    groups = parameter_groups(part_of(build_model(spec, seq_len=16), mesh, policy), mesh, policy)
    rows = summed_rows(estimate_comm(spec, mesh, policy))
    totals: Counter[Any] = Counter()
    for rank in range(4):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        held = {
            p.fqn: 4 * p.shard_numel(rank // ep if p.is_expert else rank // tp)
            for group in groups
            for p in group.parameters
        }
        assert found["held"] == held
        sums = summed({tuple(key): count for *key, count in found["rows"]})
        exchanged = {key: value for key, value in sums.items() if key[1] == "all_to_all"}
        assert {key: value for key, value in sums.items() if key not in exchanged} == {
            key: value for key, value in rows.items() if key[1] != "all_to_all"
        }
        for key, (count, size) in exchanged.items():
            assert count == rows[key][0]
            totals[key] += size
    assert totals == {key: 4 * size for key, (_, size) in rows.items() if key[1] == "all_to_all"}


def test_experts_of_a_configuration_are_dealt_out(tmp_path):
    """By hand: 32 tokens go to 2 of 8 experts, 64 numbers of bf16 each, there and back."""
    spec = config_of(tmp_path, "qwen3_moe", num_hidden_layers=2, num_experts_per_tok=2)
    found = summed_rows(estimate_comm(spec, MeshSpec(dp_shard=2, ep=2), PolicySpec(**SIZES)))
    rows = 2 * 2 * 32 * 2 * 64 * 2
    assert found["forward", "all_to_all", "bfloat16"] == (4, rows)
    assert found["backward", "all_to_all", "bfloat16"] == (4, rows)
    assert found["forward", "all_to_all", "int64"] == (2, 2 * 8 * 8)
    frozen = PolicySpec(**SIZES, trainable=r"layers\.1\.mlp\.gate")  # whose rows need no gradient
    kept = summed_rows(estimate_comm(spec, MeshSpec(dp_shard=2, ep=2), frozen))
    assert kept["forward", "all_to_all", "bfloat16"] == (4, rows)
    assert not any(phase == "backward" and op == "all_to_all" for phase, op, _ in kept)
    with pytest.raises(ModelError, match="which has no experts"):
        estimate_comm(config_of(tmp_path, "llama"), MeshSpec(dp_shard=2, ep=2), PolicySpec(**SIZES))


@pytest.mark.parametrize(("ac", "again"), [("full", 2), ("every:2", 1), ("op", 2)])
def test_experts_of_checkpointed_blocks_exchange_again(ac, again, tmp_path):
    """By hand: a recomputed block sends its rows there and back, and counts them, once more."""
    spec = config_of(tmp_path, "qwen3_moe", num_hidden_layers=2, num_experts_per_tok=2)
    mesh, policy = MeshSpec(dp_shard=2, ep=2), PolicySpec(**SIZES, ac=ac)
    found = summed_rows(estimate_comm(spec, mesh, policy))
    rows = 2 * 32 * 2 * 64 * 2
    assert found["forward", "all_to_all", "bfloat16"] == (4, 2 * rows)
    assert found["backward", "all_to_all", "bfloat16"] == (4 + 2 * again, (2 + again) * rows)
    assert found["backward", "all_to_all", "int64"] == (again, again * 8 * 8)
    longer = replace(policy, seq_len=512)
    without, with_it = (
        estimate_memory(spec, mesh, replace(longer, ac=one)).peak.active_bytes for one in ("none", ac)
    )
    assert with_it < without


def test_a_ring_takes_plain_attention_alone(tmp_path):
    """Keys and values of 2 heads of 16, of 32 tokens in 3 blocks; windows and eager attention are refused."""
    mesh, policy = MeshSpec(dp_shard=1, cp=2), PolicySpec(**SIZES)
    for family in ("llama", "qwen3_moe"):
        found = summed_rows(estimate_comm(config_of(tmp_path, family), mesh, policy))
        assert found["backward", "all_to_all", "float32"] == (6, 3 * 32 * 2 * 2 * 16 * 4)
    windows = {"model_type": "mistral", "sliding_window": 8}
    with pytest.raises(ModelError, match="cp=2: mistral has its own mask"):
        estimate_comm(config_of(tmp_path, "llama", **windows), mesh, policy)
