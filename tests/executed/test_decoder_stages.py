"""A Hugging Face decoder cut into pipeline stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.communication import estimate_comm
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.techniques.registry import part_of

pytest.importorskip("transformers", minversion="5.0")
MESH = MeshSpec(pp=2, dp_shard=2)
SMALL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 98,
}


def spec_of(folder: Path, **changes: Any) -> ModelSpec:
    path = folder / "config.json"
    path.write_text(json.dumps({**SMALL, **changes}))
    return ModelSpec(source=str(path))


def policy_of(stage: int, **options: Any) -> PolicySpec:
    values: dict[str, Any] = {"seq_len": 32, "grad_accum": 3, "reshard": "never", "pp_stage": stage}
    return PolicySpec(**values | options)


def test_stages_share_the_model(tmp_path: Path) -> None:
    """Three layers and the embedding; two, the last norm and the head: under their own names."""
    spec = spec_of(tmp_path)
    whole = dict(build_model(spec, seq_len=32).module.named_parameters())
    parts = [part_of(build_model(spec, seq_len=32), MESH, policy_of(stage)) for stage in (0, 1)]
    held = [{name: p.shape for name, p in part.module.named_parameters()} for part in parts]
    assert held[0] | held[1] == {name: p.shape for name, p in whole.items()}
    assert not held[0].keys() & held[1].keys()
    assert [part.blocks for part in parts] == [
        tuple(f"model.layers.{at}" for at in range(3)),
        ("model.layers.3", "model.layers.4"),
    ]
    assert {name for name in held[1] if ".layers." not in name} == {"model.norm.weight", "lm_head.weight"}
    assert parts[1].experts == ("model.layers.3.mlp.experts", "model.layers.4.mlp.experts")


@pytest.mark.parametrize(
    "mesh",
    [
        MESH,
        pytest.param(MeshSpec(pp=2, dp_shard=2, tp=2), marks=pytest.mark.slow),
        pytest.param(MeshSpec(pp=2, dp_shard=2, ep=2), marks=pytest.mark.slow),
    ],
)
def test_stages_send_hidden_states(mesh: MeshSpec, tmp_path: Path) -> None:
    """By hand: 32 x 64 in bf16 for each of three micro-batches, whole on every tensor-parallel rank."""
    if mesh.tp > 1:
        pytest.importorskip("transformers.distributed.tensor_parallel")
    rows = estimate_comm(spec_of(tmp_path), mesh, policy_of(1)).groups
    sent = [(row.phase, row.count, row.payload_bytes) for row in rows if row.op == "send_recv"]
    assert sent == [("backward", 3, 3 * 32 * 64 * 2)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"model_type": "opt", "word_embed_proj_dim": 64},
            "has model.decoder.embed_positions beside",
        ),
        ({"num_hidden_layers": 1}, "pp=2 stages for 1 layers"),
    ],
)
def test_what_no_pipeline_cuts(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    for estimate in (estimate_memory, estimate_comm):
        with pytest.raises(ModelError, match=reason):
            estimate(spec_of(tmp_path, **changes), MESH, policy_of(0))
