"""Policies per wrapped unit: one notation, what each unit gets, torchtitan's two rules."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.communication import estimate_comm
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.option import ByUnit
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.engine import execute
from fsdp2prof.estimators.execution.stitching import execute_stitched
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.sharding.wrapping import (
    EMBEDDING,
    HEAD,
    NORM,
    fold_blocks,
    names_a_block,
    reshard_rule,
    wrap_units,
)

LLAMA = ModelSpec(source="llama3-8b", layers=3)
TODAY: dict[str, Any] = {"wrap": "block,tok_embeddings,norm+output", "clip_grad": False}
PARAMETERS = 8_030_261_248
NORM_AND_HEAD = 128_256 * 4096 + 4096


def units_of(**policy: Any) -> dict[str, Any]:
    model = build_model(LLAMA, seq_len=8)
    return {unit.label: unit for unit in wrap_units(model, PolicySpec(**{**TODAY, **policy}))}


@pytest.mark.parametrize(
    ("ranks", "reshard", "gigabytes"), [(8, "torchtitan", 3.8838), (4, "always", 8.0303)]
)
def test_what_two_published_runs_gathered(ranks: int, reshard: Any, gigabytes: float) -> None:
    """All-gather input bytes per rank and step that two runs of Llama 3.1 8B measured (ccl-bench)."""
    policy = PolicySpec(**TODAY, reshard=reshard, torch="2.8")
    estimate = estimate_comm(ModelSpec(source="llama3-8b"), MeshSpec(dp_shard=ranks), policy)
    once = NORM_AND_HEAD if reshard == "torchtitan" else 0
    inputs = estimate.per_step["all_gather"].payload_bytes // ranks
    assert inputs == 2 * (2 * PARAMETERS - once) // ranks
    assert inputs / 1e9 == pytest.approx(gigabytes, abs=5e-5)
    rule = [note for note in estimate.assumptions if note.startswith("reshard as torchtitan")]
    assert len(rule) == (reshard == "torchtitan")


def test_torchtitans_rule_of_today_and_the_one_before() -> None:
    model = build_model(LLAMA, seq_len=8)
    today = {name: unit.reshard_after_forward for name, unit in units_of(reshard="torchtitan").items()}
    assert today == {
        "layers.0": True,
        "layers.1": True,
        "layers.2": True,
        "tok_embeddings": True,
        "norm, output": False,
        "": False,
    }
    assert "from July 2025 on" in str(reshard_rule(model, PolicySpec(**TODAY, reshard="torchtitan")))
    before = PolicySpec(reshard="torchtitan")
    kept = {unit.label for unit in wrap_units(model, before) if not unit.reshard_after_forward}
    assert kept == {"layers.2", ""}
    assert "until July 2025" in str(reshard_rule(model, before))
    assert reshard_rule(model, PolicySpec()) is None


def test_each_unit_may_have_its_own() -> None:
    units = units_of(
        reshard="always,norm+output=never,layers.1=2,TransformerBlock=always,layers.0=2",
        param_dtype="bf16,norm+output=fp32",
        reduce_dtype="tok_embeddings=bf16",
        output_dtype="root=fp32",
        forward_prefetch="1,tok_embeddings=layers.0>layers.1,layers.2=norm+output",
        backward_prefetch="norm+output=layers.2",
        torch="2.8",
    )
    assert units["norm, output"].reshard_after_forward is False
    assert units["layers.1"].reshard_after_forward is True  # the later one wins
    assert units["layers.0"].reshard_after_forward == 2
    assert units[""].reshard_after_forward is True
    assert (units["norm, output"].param_dtype, units["layers.0"].param_dtype) == ("float32", "bfloat16")
    assert (units["tok_embeddings"].reduce_dtype, units[""].reduce_dtype) == ("bfloat16", "float32")
    assert (units[""].output_dtype, units["layers.0"].output_dtype) == ("float32", None)
    assert units["tok_embeddings"].forward_prefetch == (("layers.0",), ("layers.1",))
    assert units["layers.0"].forward_prefetch == (("layers.1",),)
    assert units["layers.2"].forward_prefetch == (("norm", "output"),)
    assert units["norm, output"].backward_prefetch == (("layers.2",),)
    assert units["layers.1"].backward_prefetch == ()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"reshard": "always,norm=never"}, "reshard: norm is not wrapped separately; add it to --wrap"),
        ({"reshard": "always,nope=never"}, "reshard: no class or module 'nope'"),
        ({"reshard": "nope,block=never"}, "reshard: unknown value 'nope'"),
        ({"reshard": "always,block="}, "'block=' must be unit=value"),
        ({"param_dtype": "block=int8"}, "param_dtype: unknown dtype 'int8'"),
        ({"forward_prefetch": "layers.0>layers.1"}, "say which unit prefetches them"),
        ({"forward_prefetch": "layers.0=norm"}, "forward_prefetch: norm is not wrapped separately"),
        ({"forward_prefetch": "norm+output=2"}, "norm\\+output is not a block: name the units"),
    ],
)
def test_what_names_no_unit_is_refused_in_one_line(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        units_of(**policy)
    assert "\n" not in str(error.value)


def test_the_notation_is_read_back_from_what_is_written() -> None:
    given: dict[str, Any] = {
        "reshard": {"default": "always", "norm+output": "never"},
        "param_dtype": "block=none",
        "forward_prefetch": "a=b>c+d,block=2",
    }
    policy = PolicySpec(**given)
    values = policy.to_mapping()
    assert values["reshard"] == "always,norm+output=never"
    assert values["param_dtype"] == "bfloat16,block=none"
    assert values["forward_prefetch"] == "0,a=b>c+d,block=2"
    assert PolicySpec.from_mapping(values) == policy
    assert PolicySpec(reshard="always").reshard == "always"
    assert (policy.compute_dtype, policy.gradient_dtype) == ("bfloat16", "float32")


def test_names_of_all_blocks_are_one_pattern() -> None:
    """A recorded run names every block; the same model with fewer has to be built from its policy."""
    blocks = ("layers.0", "layers.1")
    policy = PolicySpec(
        wrap=("layers.0.attention", "layers.0", "layers.1.attention", "layers.1", "norm+output"),
        reshard=ByUnit("never", (("layers.0", "always"), ("layers.1", "always"), ("layers.0.attention", 2))),
    )
    folded = fold_blocks(policy, blocks)
    assert folded.wrap == ("layers.*.attention", "layers.*", "norm+output")
    assert str(folded.reshard) == "never,layers.*=always,layers.0.attention=2"
    assert names_a_block(folded, blocks)
    assert not names_a_block(fold_blocks(PolicySpec(wrap=policy.wrap), blocks), blocks)


def test_a_policy_that_names_every_block_is_stitched_like_one_that_does_not() -> None:
    by_name = PolicySpec(seq_len=32, wrap=tuple(f"layers.{index}" for index in range(12)))
    _, how = execute_stitched(ModelSpec(source="gpt2", layers=12), MeshSpec(dp_shard=2), by_name)
    assert how == "4 and 5 blocks executed, found to repeat exactly, and repeated to 12"


def test_a_unit_that_backward_does_not_gather_is_gathered_once() -> None:
    """By the labels of an execution of FSDP2 itself, and as counted."""
    policy = PolicySpec(
        seq_len=8,
        wrap=("block", "tok_embeddings"),
        unshard_in_backward=ByUnit(True, (("tok_embeddings", False),)),
    )
    spec, mesh = ModelSpec(source="llama3-8b", layers=1), MeshSpec(dp_shard=2)
    recording = execute(spec, mesh, policy).recording
    second = recording.labels.start_ns >= recording.steps.start_ns[recording.steps.step == 2]
    labels = recording.labels.name.take(second).to_list()
    executed = Counter(
        label.partition(" (")[2].rstrip(")")
        for label in labels
        if label is not None and label.partition(" (")[0] == "FSDP::all_gather"
    )
    counted: Counter[str] = Counter()
    for row in estimate_comm(spec, mesh, policy).groups:
        if row.op == "all_gather":
            counted[row.fqn or ""] += row.count
    assert executed == counted == {"": 1, "tok_embeddings": 1, "layers.0": 2}


CONFIGS = Path(__file__).parents[1] / "data" / "configs"


@pytest.mark.parametrize(
    ("config", "embedding", "ends"),
    [
        ("phi-2", "model.embed_tokens", ("model.final_layernorm", "lm_head")),
        ("gpt-neox-20b", "gpt_neox.embed_in", ("gpt_neox.final_layer_norm", "lm_head")),
        ("qwen3-vl-8b", "model.language_model.embed_tokens", ("model.language_model.norm", "lm_head")),
    ],
)
def test_modules_that_stacks_wrap_have_each_models_own_names(
    config: str, embedding: str, ends: tuple[str, ...]
) -> None:
    spec = ModelSpec(source=str(CONFIGS / f"{config}.json"), layers=1)
    settings: dict[str, Any] = {"wrap": f"block,{EMBEDDING},{NORM}+{HEAD}"}
    policy = PolicySpec(**settings, reshard=ByUnit(base="always", units=((f"{NORM}+{HEAD}", "never"),)))
    model = build_model(spec, seq_len=16, orig_dtype="float32")
    units = {unit.fqns: unit.reshard_after_forward for unit in wrap_units(model, policy)}
    assert units[(embedding,)] is True
    assert units[ends] is False
