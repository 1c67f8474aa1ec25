"""Packed documents: three ways to keep them apart compute the same, and hold what each of them holds."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.torch_versions import GROUPS_QUERIES_ON_CPU

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.engine import attention_kernel, execute
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.documents import with_documents
from fsdp2prof.estimators.simulate.program import Kernel
from fsdp2prof.estimators.timeline.capture import capture_step

pytest.importorskip("transformers", minversion="5.0")
LENGTH, BATCH, LAYERS, HEADS, KV_HEADS, WIDTH = 64, 2, 2, 4, 2, 24
SMALL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH,
    "vocab_size": 98,
}
MESH = MeshSpec(dp_shard=2)


def spec_of(folder: Path, **changes: Any) -> ModelSpec:
    path = folder / "config.json"
    path.write_text(json.dumps({**SMALL, **changes}))
    return ModelSpec(source=str(path))


def policy_of(documents: str | None, **options: Any) -> PolicySpec:
    values = {"seq_len": LENGTH, "batch_size": BATCH, "documents": documents, **options}
    return PolicySpec.from_mapping(values)


def logits_of(spec: ModelSpec, documents: str | None, tokens: torch.Tensor) -> torch.Tensor:
    policy = policy_of(documents)
    torch.manual_seed(0)
    model = with_documents(build_model(spec, seq_len=LENGTH), policy)
    model.module.to_empty(device="cpu")
    for tensor in model.module.parameters():
        torch.nn.init.normal_(tensor, std=0.3)
    model.module.model.rotary_emb.__init__(model.module.config)  # type: ignore[misc, union-attr]
    named = model.make_batch(BATCH, LENGTH, torch.device("cpu")).named
    with torch.no_grad(), attention_kernel(policy):
        logits: torch.Tensor = model.module(tokens, **named).logits
    return logits


def test_each_way_computes_the_same(tmp_path: Path) -> None:
    """And what each document gives alone: nothing of the documents before it."""
    spec, tokens = spec_of(tmp_path), torch.randint(98, (BATCH, LENGTH))
    masked, varlen, flex = (logits_of(spec, f"{way}:4", tokens) for way in ("mask", "varlen", "flex"))
    torch.testing.assert_close(masked, varlen, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(masked, flex, rtol=1e-4, atol=1e-4)
    changed = tokens.clone()
    changed[:, :16] = (changed[:, :16] + 1) % 98
    other = logits_of(spec, "varlen:4", changed)
    assert torch.equal(other[:, 16:], varlen[:, 16:])
    assert not torch.allclose(logits_of(spec, None, tokens)[:, 16:], varlen[:, 16:])


def sizes_of(spec: ModelSpec, documents: str | None) -> Counter[int]:
    """Bytes of what the second step allocates."""
    recording = execute(spec, MESH, policy_of(documents)).recording
    chosen = recording.allocations.alloc_ns >= int(recording.steps.start_ns[-1])
    return Counter(recording.allocations.size[chosen].tolist())


@pytest.mark.skipif(not GROUPS_QUERIES_ON_CPU, reason="torch 2.7 runs grouped queries as single operators")
def test_what_each_way_holds(tmp_path: Path) -> None:
    """By hand: a mask of 8192 pairs once and in bf16 in each block, with keys and values of every head; a
    block mask has one block of 128 tokens; FlashAttention's knows where documents begin."""
    spec = spec_of(tmp_path)
    varlen, masked, flex = (sizes_of(spec, f"{way}:4") for way in ("varlen", "mask", "flex"))
    pairs = BATCH * LENGTH * LENGTH
    assert masked[2 * pairs] - varlen[2 * pairs] == LAYERS
    assert masked[pairs] > varlen[pairs]
    repeated = BATCH * LENGTH * HEADS * WIDTH * 2
    assert masked[repeated] >= varlen[repeated] + 2 * LAYERS
    assert flex - varlen == {BATCH * 4: 8}
    assert not varlen - flex


def attention_flops(spec: ModelSpec, documents: str | None) -> float:
    program = capture_step(spec, MESH, policy_of(documents))
    works = [command.work for command in program.commands if isinstance(command, Kernel) and command.work]
    return sum(work.flops for work in works if work.kind == "attention")


@pytest.mark.skipif(not GROUPS_QUERIES_ON_CPU, reason="torch 2.7 runs grouped queries as single operators")
def test_attention_of_four_documents_is_a_quarter(tmp_path: Path) -> None:
    """A mask computes every pair, twice what a causal kernel does of a whole sequence."""
    whole, varlen, flex, masked = (
        attention_flops(spec_of(tmp_path), way) for way in (None, "varlen:4", "flex:4", "mask:4")
    )
    assert whole > 0
    assert (varlen, flex, masked) == (whole / 4, whole / 4, 2 * whole)


@pytest.mark.parametrize(
    ("changes", "documents", "options", "reason"),
    [
        ({}, "varlen:5", {}, "5 of equal length do not fill 64 tokens"),
        ({}, "mask:4", {"attention": "math"}, "attention=math computes all pairs"),
        ({"model_type": "gpt_oss", "num_local_experts": 4}, "mask:4", {}, "does not support SDPA"),
        (
            {"model_type": "lfm2", "full_attn_idxs": [1]},
            "varlen:4",
            {},
            "whose state continues from one document to the next",
        ),
    ],
)
def test_what_is_refused(
    changes: dict[str, Any], documents: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=reason):
        estimate_memory(spec_of(tmp_path, **changes), MESH, policy_of(documents, **options))


def test_built_in_models_have_no_mask_and_no_ring() -> None:
    spec = ModelSpec(source="llama3.2-1b", layers=1)
    with pytest.raises(ModelError, match="built-in models have no mask of documents"):
        estimate_memory(spec, MESH, policy_of("mask:4"))
    with pytest.raises(ModelError, match="ring attention takes no documents"):
        estimate_memory(spec, MeshSpec(dp_shard=1, cp=2), policy_of("varlen:4"))
    with pytest.raises(ModelError, match="one of none or mask:K with K >= 1 or varlen:K"):
        policy_of("padded:4")
    assert attention_flops(spec, "varlen:4") == attention_flops(spec, None) / 4


def test_a_stated_kernel_replaces_eager_attention_with_sinks(tmp_path: Path) -> None:
    """No tensor has a score for every pair of tokens; its sinks still get a gradient."""
    spec = spec_of(tmp_path, model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    scores = BATCH * HEADS * LENGTH * (LENGTH + 1)  # the sinks' column beside the pairs

    def made(**options: Any) -> tuple[int, int]:
        done = execute(spec, MESH, policy_of(None, **options), steps=1)
        sizes = done.recording.allocations.size
        sinks = [one for one in done.tensors if one.category == "sharded_gradient" and "sinks" in one.name]
        return int(((sizes == 2 * scores) | (sizes == 4 * scores)).sum()), len(sinks)

    eager, stated = made(), made(attention="flash")
    assert eager[0] >= LAYERS
    assert stated == (0, LAYERS)
    assert eager[1] == LAYERS
