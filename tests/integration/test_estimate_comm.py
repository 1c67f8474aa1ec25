"""Predicted communication equals what FSDP2 does, collective by collective, with no tolerance.

Once against an interception of the dispatcher while real ``fully_shard``ed models train over a fake process
group, once against runs recorded under real torchrun.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cli import call
from support.interception import Interception, summed
from support.present import manifest_of, present
from support.recordings import RECORDED, SHORT, STEPS
from support.scripts import load_script
from support.torch_versions import (
    FROZEN_PARAMETERS_MAY_DIFFER_IN_DTYPE,
    LOSSES_IN_PIECES,
    TENSOR_PARALLEL_SHARDS_UNEVENLY,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2prof.api import analyze_trace
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.communication import estimate_built, estimate_comm, scheduled_groups
from fsdp2prof.estimators.config.catalog import (
    BUILTIN_MODELS,
    ExpertShape,
    LatentShape,
    TransformerConfig,
)
from fsdp2prof.estimators.config.inputs import make_spec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.engine import execute
from fsdp2prof.estimators.execution.fake_world import (
    expert_mesh,
    fake_process_group,
    fsdp_mesh,
    tensor_parallel_mesh,
)
from fsdp2prof.estimators.execution.training import clip_gradients, exchange_tokens, shard
from fsdp2prof.estimators.models.builtin import build_builtin
from fsdp2prof.estimators.of_run.communication import estimate_comm_of_run
from fsdp2prof.estimators.of_run.policy import values_of_run
from fsdp2prof.estimators.sharding.groups import parameter_groups
from fsdp2prof.estimators.techniques.registry import part_of
from fsdp2prof.estimators.techniques.weight_sync import WeightSyncSpec
from fsdp2prof.estimators.torch_rules import expert_mesh_refusal, fsdp_method_refusal
from fsdp2prof.estimators.traffic import Ledger
from fsdp2prof.labels import qualified_fqn
from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.schedule import steady_step

from .conftest import SCRIPTS, script_path, torchrun, training_environment


def tiny(family="llama", **changes):
    options = {
        "name": "tiny",
        "family": family,
        "dim": 32,
        "layers": 3,
        "heads": 4,
        "kv_heads": 4 if family == "gpt" else 2,
        "head_dim": 8,
        "ffn_dim": 72,
        "vocab_size": 98,
        "context": 64,
        "tied": family == "gpt",
    }
    return TransformerConfig(**{**options, **changes})


def executed(config, mesh, policy):
    """Train a real model for two steps over a fake process group and count the second one's collectives."""
    model = build_builtin(config, policy.seq_len, policy.orig_dtype)
    mode = Interception()
    with fake_process_group(mesh) as device_mesh:
        model, experts = part_of(model, mesh, policy), expert_mesh(mesh)
        shard(model, policy, fsdp_mesh(device_mesh), tensor_parallel_mesh(device_mesh), experts)
        exchange_tokens(model, policy, experts)
        model.module.to_empty(device="cpu")
        for _ in range(2):
            mode.counts.clear()
            with (
                mode,
                loss_parallel() if mesh.tp > 1 and policy.loss_parallel is not False else nullcontext(),
            ):
                train_step(model, policy, mode)
    return mode.counts


def train_step(model, policy, mode):
    for micro_batch in range(policy.grad_accum):
        last = micro_batch == policy.grad_accum - 1
        model.module.set_requires_gradient_sync(last or policy.sync == "each")
        mode.phase = "forward"
        if policy.runs_itself_before:
            with torch.no_grad():
                model.module(*model.make_batch(2, policy.seq_len, torch.device("cpu")).args)
        loss = model.loss(model.module, model.make_batch(2, policy.seq_len, torch.device("cpu")), policy.loss)
        mode.phase = "backward"
        loss.backward()
    mode.phase = "optimizer"
    if policy.clip_grad:
        clip_gradients(model)
    model.module.zero_grad()


def estimate(config, mesh, policy):
    return estimate_built(build_builtin(config, policy.seq_len, policy.orig_dtype), mesh, policy)


def predicted(config, mesh, policy):
    counts: Counter[tuple[object, ...]] = Counter()
    for row in estimate(config, mesh, policy).groups:
        assert row.payload_bytes % row.count == 0
        counts[row.phase, row.op, row.dtype, row.payload_bytes // row.count] += row.count
    return counts


def summed_rows(result):
    """The same of an estimate."""
    rows: dict[tuple[str, str, str], tuple[int, int]] = {}
    for row in result.groups:
        known = rows.get((row.phase, row.op, row.dtype), (0, 0))
        rows[row.phase, row.op, row.dtype] = known[0] + row.count, known[1] + row.payload_bytes
    return rows


SIZES: dict[str, Any] = {"seq_len": 16, "batch_size": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "never": ({}, {"reshard": "never"}),
    "always": ({}, {"reshard": "always"}),
    "torchtitan": ({}, {"reshard": "torchtitan"}),
    "over two ranks": ({}, {"reshard": 2}),
    "over two ranks, the root kept": ({}, {"reshard": 2, "reshard_root": False}),
    "original precision": ({}, {"param_dtype": None, "reduce_dtype": None}),
    "bf16 throughout": ({}, {"orig_dtype": "bf16", "reduce_dtype": "bf16"}),
    "accumulation, last": ({}, {"grad_accum": 3}),
    "accumulation, each": ({}, {"grad_accum": 3, "sync": "each"}),
    "hybrid": ({"dp_replicate": 2, "dp_shard": 2}, {}),
    "hybrid, accumulation": ({"dp_replicate": 2, "dp_shard": 2}, {"grad_accum": 2}),
    "replicas of whole shards": ({"dp_replicate": 4, "dp_shard": 1}, {}),
    "root only": ({}, {"wrap": ("root",)}),
    "submodules": ({}, {"wrap": ("block", "Attention", "layers.*.feed_forward")}),
    "grouped head": ({}, {"wrap": ("block", "tok_embeddings", "norm+output")}),
    "loss in pieces": ({}, {"wrap": ("block", "norm+output"), "loss": "chunked:4"}),
    "loss in pieces of the vocabulary": ({}, {"wrap": ("block", "output"), "loss": "chunked-vocab:32"}),
    "last layer trained": ({}, {"trainable": r"layers\.2\.|output"}),
    "one projection trained": (
        {},
        {"trainable": r"layers\.1\.attention\.wq", "wrap": ("block", "Attention")},
    ),
    "frozen embedding wrapped": (
        {},
        {"trainable": r"layers|norm|output", "wrap": ("block", "tok_embeddings")},
    ),
    "head trained": ({}, {"trainable": "output", "reshard": "never"}),
    "frozen blocks prefetched": ({}, {"trainable": r"layers\.2\.|output", "backward_prefetch": 2}),
    "separate communicator": ({}, {"separate_reduce_scatter_group": True, "reduce_scatter_buffers": 2}),
}


@pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_every_collective_of_a_step(case):
    sizes, options = CASES[case]
    if "separate_reduce_scatter_group" in options and fsdp_method_refusal(
        "set_separate_reduce_scatter_group"
    ):
        pytest.skip("this torch has one communicator for both")
    mesh = MeshSpec(**(sizes or {"dp_shard": 4}))
    policy = PolicySpec(**SIZES | options)
    counts = executed(tiny(), mesh, policy)
    assert predicted(tiny(), mesh, policy) == counts
    assert counts


@pytest.mark.parametrize(
    "options",
    [
        {"wrap": ("block", "norm+output")},
        {"wrap": ("block", "norm+output"), "tp": 2},
        {"wrap": ("block", "norm+output"), "reshard": "torchtitan", "grad_accum": 2},
        {"wrap": ("block", "norm+output"), "reshard": "always", "grad_accum": 2, "sync": "each"},
        {"wrap": ("block", "output"), "grad_accum": 2, "sync": "each"},
        {"wrap": ("block", "output"), "reshard": "never"},
        {"wrap": ("block", "output"), "grad_accum": 3},
        {"wrap": ("block", "tok_embeddings+norm+output"), "tied": True},
        {"wrap": ("block", "tok_embeddings+norm+output"), "tied": True, "grad_accum": 2, "sync": "each"},
    ],
)
@pytest.mark.skipif(not LOSSES_IN_PIECES, reason="torch 2.7 has no losses in pieces")
@pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning")
def test_a_head_whose_backward_runs_in_the_forward(options, monkeypatch):
    """Torch's labels call its reductions backward, this test's account forward: phases are left out."""
    options = dict(options)
    config, mesh = tiny(tied=options.pop("tied", False), vocab_size=96), MeshSpec(dp_shard=4)
    monkeypatch.setitem(BUILTIN_MODELS, config.name, config)
    mesh = replace(mesh, tp=options.pop("tp", 1))
    policy = PolicySpec(**SIZES | options | {"loss": "chunked-backward:4"})
    sums: Counter[tuple[str, str]] = Counter()
    for (_, op, dtype, payload), count in executed(config, mesh, policy).items():
        sums[op, dtype] += count * payload
        sums[op, "count"] += count
    for row in estimate_comm(ModelSpec(source=config.name), mesh, policy).groups:
        sums[row.op, row.dtype] -= row.payload_bytes
        sums[row.op, "count"] -= row.count
    assert not any(sums.values()), sums


@pytest.mark.parametrize(
    ("config", "shards"),
    [
        (tiny("gpt"), 5),  # a vocabulary of 98 and heads that 5 ranks do not divide: padded shards
        (tiny("qwen", qkv_bias=True), 7),
        (tiny("qwen", qk_norm=True, tied=True), 64),  # more ranks than rows: empty shards
    ],
)
def test_padding_and_shared_parameters(config, shards):
    mesh, policy = MeshSpec(dp_shard=shards), PolicySpec(seq_len=16, batch_size=2)
    assert predicted(config, mesh, policy) == executed(config, mesh, policy)


@pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning")
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (tiny(), {}),
        (tiny(), {"dp_replicate": 2}),
        (tiny(), {"loss_parallel": False}),
        (tiny(), {"ac": "full"}),
        (tiny(), {"ac": "every:2"}),
        (tiny(), {"ac": "op"}),
        (tiny(), {"grad_accum": 2}),
        (tiny(), {"grad_accum": 2, "sync": "each", "param_dtype": None}),
        (tiny("qwen", qk_norm=True), {}),
        (tiny(tied=True), {}),
    ],
)
def test_tensor_parallelism(config, options):
    if not TENSOR_PARALLEL_SHARDS_UNEVENLY:
        config = replace(config, vocab_size=96)
    mesh = MeshSpec(dp_replicate=options.get("dp_replicate", 1), dp_shard=2, tp=2)
    options = {name: value for name, value in options.items() if name != "dp_replicate"}
    policy = PolicySpec(**SIZES | options)
    assert summed_rows(estimate(config, mesh, policy)) == summed(executed(config, mesh, policy))


_IN_PIECES = pytest.mark.skipif(not LOSSES_IN_PIECES, reason="torch 2.7 has no losses in pieces")


@pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"loss": "chunked:4"}, marks=_IN_PIECES),
        pytest.param({"loss": "chunked-tokens:5", "ac": "full"}, marks=_IN_PIECES),
        {"trainable": "wq"},  # torch's SequenceParallel makes norms that train again
        {"trainable": r"layers\.1", "ac": "full", "grad_accum": 2},
        {"lora": "r=4,targets=wq+wv+wo+w2"},
    ],
)
def test_tensor_parallelism_that_no_formula_counts(options, monkeypatch):
    """How often a loss in pieces reduces its normalisers, and what frozen parameters leave out."""
    config, mesh = tiny(vocab_size=96), MeshSpec(dp_shard=2, tp=2)
    policy = PolicySpec(**SIZES | options)
    monkeypatch.setitem(BUILTIN_MODELS, config.name, config)
    made = estimate_comm(ModelSpec(source=config.name), mesh, policy)
    assert summed_rows(made) == summed(executed(config, mesh, policy))


def test_divided_adapters_train_like_whole_ones() -> None:
    """Loss and gradients on two ranks, checked by the script itself."""
    command = torchrun(script_path("adapters_in_parallel"), 2)
    ran = subprocess.run(command, capture_output=True, text=True, env=training_environment(), cwd=SCRIPTS)
    assert ran.stdout.split() == ["equal"], ran.stderr


EXPERTS = ExpertShape(count=8, top_k=2, ffn_dim=24, shared_ffn_dim=16, first=1, normalised=True)
LATENT = LatentShape(q_rank=16, kv_rank=12, nope_dim=4, rope_dim=4, value_dim=4)


@pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning")
@pytest.mark.parametrize(
    "changes", [{}, {"family": "qwen", "qk_norm": True}, {"experts": replace(EXPERTS, ffn_dim=32, first=0)}]
)
def test_tensor_parallelism_of_whole_sequences(changes, monkeypatch):
    """Megatron's: a sum over the ranks after attention and feed-forward, and of both inputs' gradients."""
    config, mesh = tiny(vocab_size=96, **changes), MeshSpec(dp_shard=2, tp=2)
    policy = PolicySpec(**SIZES, param_dtype="bf16", sequence_parallel=False)
    monkeypatch.setitem(BUILTIN_MODELS, config.name, config)
    made = estimate_comm(ModelSpec(source=config.name), mesh, policy)
    hidden = policy.batch_size * policy.seq_len * config.dim
    # weights that every rank has whole, and uses for its heads or its part of each expert
    shared = (2 * config.head_dim if config.qk_norm else 0) + (
        EXPERTS.count * config.dim if changes.get("experts") else 0
    )
    rows = [row for row in made.groups if row.mesh_dim == "tp" and row.dtype == "bfloat16"]
    wanted = {
        "forward": (2 * config.layers + 1) * hidden,
        "backward": (2 * config.layers + 1) * hidden + config.layers * shared,
    }
    for phase, elements in wanted.items():  # the embedding forward, the head backward
        assert sum(row.payload_bytes for row in rows if row.phase == phase) == 2 * elements
    assert {row.op for row in made.groups if row.mesh_dim == "tp"} == {"all_reduce"}


def test_sequences_stay_whole_only_where_something_divides_them():
    with pytest.raises(ModelError, match="sequence_parallel needs tensor parallelism"):
        estimate(tiny(), MeshSpec(dp_shard=2), PolicySpec(**SIZES, sequence_parallel=False))


@pytest.mark.parametrize(
    ("sizes", "options", "latent"),
    [
        ({"dp_shard": 4, "ep": 4}, {"imbalance": 1.5, "wrap": ("block", "GroupedExperts")}, None),
        ({"dp_shard": 4, "ep": 2}, {"ac": "op"}, LATENT),
        ({"dp_shard": 4, "ep": 2, "dp_replicate": 2}, {"ac": "full", "grad_accum": 2}, None),
        ({"dp_shard": 8, "ep": 2}, {"expert_shards": "hidden", "reshard": "never"}, LATENT),
        ({"dp_shard": 4}, {"expert_shards": "hidden"}, None),
    ],
)
def test_expert_parallelism(sizes, options, latent):
    if sizes.get("ep") and expert_mesh_refusal():
        pytest.skip("this torch has one mesh for a module")
    config = tiny(experts=EXPERTS, latent=latent)
    mesh, policy = MeshSpec(**sizes), PolicySpec(**SIZES | options)
    sums = summed(executed(config, mesh, policy))
    assert summed_rows(estimate(config, mesh, policy)) == sums
    assert any(op == "all_to_all" for _, op, _ in sums) == (mesh.ep > 1)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    shards=st.integers(1, 5),
    replicas=st.integers(1, 2),
    options=st.fixed_dictionaries(
        {
            "reshard": st.sampled_from(["default", "torchtitan", "always", "never", 2]),
            "reshard_root": st.sampled_from([None, True, False]),
            "grad_accum": st.integers(1, 3),
            "sync": st.sampled_from(["last", "each"]),
            "param_dtype": st.sampled_from([None, "bf16"]),
            "reduce_dtype": st.sampled_from([None, "fp32"]),
            "clip_grad": st.booleans(),
            "backward_prefetch": st.integers(0, 2),
            "trainable": st.sampled_from(
                [None, "output", "wq", r"layers\.[12]", "norm", "tok_embeddings", "w2"]
            ),
            "wrap": st.lists(
                st.sampled_from(
                    ["block", "Attention", "FeedForward", "tok_embeddings", "norm+output", "Linear"]
                ),
                min_size=1,
                unique=True,
            ).filter(lambda wrap: {"Linear", "norm+output"} - set(wrap)),
        }
    ),
)
def test_any_policy(shards, replicas, options):
    """Whatever is wrapped, frozen, accumulated and resharded: the same collectives."""
    if options["reshard"] == 2 and shards % 2:
        options = {**options, "reshard": "default"}
    mesh = MeshSpec(dp_replicate=replicas, dp_shard=shards)
    policy = PolicySpec.from_mapping({"seq_len": 16, "batch_size": 2, **options})
    assert predicted(tiny(), mesh, policy) == executed(tiny(), mesh, policy)


@pytest.mark.parametrize("reshard", ["default", "never", "always"])
def test_a_frozen_model_run_forward_only(reshard):
    """The steady step of a reference model: what its forward keeps gathered is gathered never again."""
    mesh, policy = MeshSpec(dp_shard=4), PolicySpec(seq_len=16, batch_size=2, reshard=reshard)
    model = build_builtin(tiny(), policy.seq_len, policy.orig_dtype)
    mode = Interception()
    with fake_process_group(mesh) as device_mesh, torch.no_grad():
        shard(model, policy, fsdp_mesh(device_mesh), None)
        model.module.to_empty(device="cpu").requires_grad_(False)
        for _ in range(2):
            mode.counts.clear()
            with mode:
                model.module(*model.make_batch(2, policy.seq_len, torch.device("cpu")).args)
    ledger = Ledger()
    model = build_builtin(tiny(), policy.seq_len, policy.orig_dtype)
    groups = scheduled_groups(parameter_groups(model, mesh, policy), model, mesh, policy, root=1)
    ledger.add_events(steady_step(groups, trains=False))
    counts: Counter[tuple[object, ...]] = Counter()
    for row in ledger.to_rows():
        counts[row.phase, row.op, row.dtype, row.payload_bytes // row.count] += row.count
    assert counts == mode.counts


def test_context_parallelism_is_torchs_ring_attention():
    """One layer's K and V, and their gradients, through the ring that torch runs around any attention."""
    _attention = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")

    mesh, policy = MeshSpec(dp_shard=1, cp=4), PolicySpec(seq_len=64, batch_size=2)
    config = tiny(layers=1)

    def attend(query, key, value, is_causal, **_):
        return torch.zeros_like(query), torch.zeros(query.shape[:3])

    def attend_backward(query, key, value, **_):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    query, key, value = torch.zeros(3, 2, config.kv_heads, 64 // mesh.cp, config.head_dim).bfloat16()
    mode = Interception()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=mesh.cp)
    try:
        with mode:
            out, normaliser = _attention._templated_ring_attention(
                dist.group.WORLD, 2, attend, query, key, value, is_causal=True
            )
            mode.phase = "backward"
            _attention._templated_ring_attention_backward(
                dist.group.WORLD,
                2,
                attend_backward,
                query,
                "grad_out",
                query,
                key,
                value,
                out,
                normaliser,
                True,
            )
    finally:
        dist.destroy_process_group()
    rows = [row for row in estimate(config, mesh, policy).groups if row.mesh_dim == "cp"]
    sums: Counter[tuple[object, ...]] = Counter()
    for row in rows:
        sums[row.phase, row.op, row.dtype, row.payload_bytes // row.count] += row.count
    assert sums == mode.counts


@pytest.mark.parametrize(("script", "nproc"), RECORDED)
@pytest.mark.sampled(3)
def test_a_recorded_run_from_its_manifest(recorded, script, nproc):
    recording = recorded(script, nproc)
    for record, counted in zip(open_run(recording.run).ranks, recording.counts, strict=True):
        estimate = estimate_comm_of_run(manifest_of(record))
        sizes = {group.name: group.ranks for group in manifest_of(record).process_groups}
        predicted_rows: Counter[tuple[object, ...]] = Counter()
        for row in estimate.groups:
            key = (row.fqn, row.op, row.dtype, tuple(sizes[present(row.process_group)]))
            predicted_rows.update(
                {(*key, "count"): row.count * STEPS, (*key, "payload_bytes"): row.payload_bytes * STEPS}
            )
        measured: Counter[tuple[object, ...]] = Counter()
        for row in counted:
            if row["fqn"] is not None:
                key = (row["fqn"], row["op"], row["dtype"], tuple(row["ranks"]))
                measured.update(
                    {(*key, "count"): row["count"], (*key, "payload_bytes"): row["payload_bytes"]}
                )
        assert predicted_rows == measured
        assert measured


def rows_of_steps(run):
    """What each traced step of rank 0 did: op, layer, dtype and ranks -> count and bytes, phases together."""
    steps: dict[int, Counter[tuple[object, ...]]] = {}
    for row in analyze_trace(run).groups:
        if row.rank == 0 and row.fqn is not None:
            key = (row.fqn, row.op, row.dtype, row.group_size)
            sums = {(*key, "count"): row.count, (*key, "bytes"): row.payload_bytes}
            steps.setdefault(row.step, Counter()).update(sums)
    return list(steps.values())


def rows_of_estimate(run):
    counts: Counter[tuple[object, ...]] = Counter()
    manifest = manifest_of(open_run(run).ranks[0])
    for row in estimate_comm_of_run(manifest).groups:
        fqn = qualified_fqn(present(row.fqn), row.root, manifest.root_count)
        key = (fqn, row.op, row.dtype, row.group_size)
        counts.update({(*key, "count"): row.count, (*key, "bytes"): row.payload_bytes})
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "rollouts",
        "evaluation",
        "evaluation_now_and_then",
        "reference",
        "chunked_loss",
        "kept",
        "two_of_three",
        "unused",
        "by_hand",
        "gan",
    ],
)
def test_steps_of_any_kind_are_as_recorded_or_refused(tmp_path, kind):
    script, *options = ["gan"] if kind == "gan" else ["step_kinds", "--kind", kind]
    command = [sys.executable, "-m", "fsdp2prof", "record", *SHORT, "-o", str(tmp_path / "run"), "--"]
    done = subprocess.run(
        [*command, *torchrun(script_path(script), 2, *options, "--steps", str(STEPS))],
        env=training_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = rows_of_steps(tmp_path / "run")
    assert len(steps) == 3
    if kind in ("evaluation_now_and_then", "gan"):  # a GAN's recorded steps are of its two optimizers in turn
        assert steps[0] != steps[1]
        with pytest.raises(ModelError, match="not gathered and reduced equally often"):
            rows_of_estimate(tmp_path / "run")
        return
    assert [rows_of_estimate(tmp_path / "run")] * 3 == steps


@pytest.mark.parametrize(("script", "nproc"), RECORDED)
def test_the_rules_say_what_was_counted(recorded, script, nproc):
    """A manifest of an older recorder counts nothing: FSDP2's rules give the same rows, phase by phase."""
    manifest = manifest_of(open_run(recorded(script, nproc).run).ranks[0])
    groups = [
        msgspec.structs.replace(group, counts_vary=None, reductions=None) for group in manifest.param_groups
    ]
    by_rule = estimate_comm_of_run(msgspec.structs.replace(manifest, param_groups=groups))
    counted = estimate_comm_of_run(manifest)
    assert sorted(map(repr, by_rule.groups)) == sorted(map(repr, counted.groups))
    assert "as often as in each captured step" in counted.assumptions[1]


@pytest.mark.parametrize(
    ("script", "nproc"),
    [
        ("hsdp", 4),
        ("int_reshard", 4),
        ("accumulation", 2),
        pytest.param("nested", 2, marks=pytest.mark.slow),
        pytest.param("never_reshard", 2, marks=pytest.mark.slow),
    ],
)
def test_specifications_read_from_a_run_predict_the_same(recorded, script, nproc, monkeypatch):
    """Mesh and policy of the manifest with the script's own model: the same rows, process groups apart."""
    monkeypatch.syspath_prepend(SCRIPTS)
    manifest = manifest_of(open_run(recorded(script, nproc).run).ranks[0])
    values = values_of_run(manifest)
    spec = make_spec({**values, "model": "_common:Tower", "policy": {**values["policy"], "clip_grad": False}})
    from_specs = estimate_comm(spec.model, spec.mesh, spec.policy).groups
    from_manifest = [replace(row, process_group=None) for row in estimate_comm_of_run(manifest).groups]
    assert sorted(map(repr, from_manifest)) == sorted(map(repr, from_specs))


def test_a_first_step_alone_stands_for_none(recorded):
    manifest = manifest_of(open_run(recorded("train_tiny_fsdp2", 2).run).ranks[0])
    groups = [msgspec.structs.replace(group, counts_vary=None) for group in manifest.param_groups]
    first = msgspec.structs.replace(manifest, param_groups=groups, traced_steps=[0])
    with pytest.raises(ModelError, match="only the training's first step was recorded"):
        estimate_comm_of_run(first)
    assert estimate_comm_of_run(first, grad_accum=1).groups


KEYS = ("fqn", "phase", "op", "process_group", "mesh_dim", "dtype", "group_size")
SUMS = ("count", "payload_bytes", "wire_bytes")


def command_output(capfd, *arguments):
    ended = call(capfd, *arguments, "--format", "json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


@pytest.mark.parametrize(("script", "nproc"), [("hsdp", 4), ("int_reshard", 4), ("adapters", 2)])
def test_the_rows_are_those_of_the_trace(recorded, capfd, script, nproc):
    """``estimate comm --from-run`` and ``analyze trace`` of one run, key by key."""
    run = recorded(script, nproc).run
    estimate = command_output(capfd, "estimate", "comm", "--from-run", run)
    predicted_rows = {
        tuple(row[key] for key in KEYS): [row[key] for key in SUMS] for row in estimate["groups"]
    }
    analysis = command_output(capfd, "analyze", "trace", run)
    steps = [step["step"] for step in analysis["ranks"][0]["steps"]]
    assert len(steps) == 3
    for step in steps:
        rows = [row for row in analysis["groups"] if (row["rank"], row["step"]) == (0, step)]
        measured = {tuple(row[key] for key in KEYS): [row[key] for key in SUMS] for row in rows}
        assert measured == predicted_rows


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_expert_parallelism_of_real_ranks(tmp_path, tp, monkeypatch):
    """A mixture written apart, with real routing and split sizes, under torchrun: to the byte."""
    if expert_mesh_refusal():
        pytest.skip("this torch has one mesh for a module")
    script = load_script(script_path("experts"), "experts_script")
    output = tmp_path / "counts.json"
    command = torchrun(script_path("experts"), script.RANKS, str(output), str(tp))
    done = subprocess.run(
        command, env=training_environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert output.exists(), done.stderr[-4000:]
    counted = {
        (phase, op, dtype, size): count for phase, op, dtype, size, count in json.loads(output.read_text())
    }
    mesh = MeshSpec(dp_shard=script.RANKS // tp, tp=tp, ep=script.EP)
    policy = PolicySpec(seq_len=script.SEQ_LEN, batch_size=script.BATCH, clip_grad=False, loss_parallel=False)
    monkeypatch.setitem(BUILTIN_MODELS, script.CONFIG.name, script.CONFIG)
    made = estimate_comm(ModelSpec(source=script.CONFIG.name), mesh, policy)
    assert summed_rows(made) == summed(counted)


@pytest.mark.parametrize(
    "options",
    [
        {"lora": "r=4,targets=wq+wv"},
        pytest.param(
            {"lora": "r=4,targets=wq+w2,base=bf16", "ac": "full"},
            marks=pytest.mark.skipif(
                not FROZEN_PARAMETERS_MAY_DIFFER_IN_DTYPE, reason="this torch wants one dtype of a group"
            ),
        ),
    ],
)
def test_adapters(options):
    mesh, policy = MeshSpec(dp_shard=4), PolicySpec(**SIZES | options)
    counts = executed(tiny(), mesh, policy)
    assert predicted(tiny(), mesh, policy) == counts
    # A: (4, in) pads to 4 rows, B: (out, 4); blocks reduce nothing else: 3 blocks of 2 adapters.
    reduced = {key: count for key, count in counts.items() if key[1] == "reduce_scatter"}
    sizes = {"wq+wv": 4 * 32 + 32 * 4 + 4 * 32 + 16 * 4, "wq+w2": 4 * 32 + 32 * 4 + 4 * 72 + 32 * 4}
    target = options["lora"].split("=")[2].split(",")[0]
    assert reduced == {("backward", "reduce_scatter", "float32", 4 * sizes[target]): 3}


@pytest.mark.parametrize(
    ("wrap", "reshard"),
    [
        (("block",), "always"),
        (("root",), "default"),
        (("block", "tok_embeddings", "norm+output"), "default"),
        (("block", "tok_embeddings", "norm+output"), "never"),
    ],
)
def test_a_model_that_runs_before_its_own_forward(wrap, reshard):
    """Old log-probabilities: the prefetch of the first unit goes on to the last one of the forward before."""
    options = {"extra_model": "self", "grad_accum": 2, "wrap": wrap, "reshard": reshard, "sync": "each"}
    mesh, policy = MeshSpec(dp_shard=4), PolicySpec.from_mapping(SIZES | options)
    assert predicted(tiny(), mesh, policy) == executed(tiny(), mesh, policy)


PREFERENCES: dict[str, dict[str, Any]] = {
    "dpo": {"extra_model": "preferences:reference,reward=preferences:reward"},
    "adapters": {
        "extra_model": "self",
        "lora": "r=4,targets=up",
        "wrap": ("block", "tok_embeddings", "norm+output"),
    },
}


@pytest.mark.slow
def test_preference_tuning_of_real_ranks(tmp_path, monkeypatch):
    """A DPO loop written apart, over two ranks: policy, reference and reward model, to the byte."""
    script = load_script(script_path("preferences"), "preferences")
    output = tmp_path / "counts.json"
    command = torchrun(script_path("preferences"), script.RANKS, str(output))
    done = subprocess.run(
        command, env=training_environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert output.exists(), done.stderr[-4000:]
    monkeypatch.setitem(sys.modules, "preferences", script)
    spec, mesh = ModelSpec(source="preferences:policy"), MeshSpec(dp_shard=script.RANKS)
    sizes = {"seq_len": script.SEQ_LEN, "batch_size": script.PAIRS, "loss": "dpo", "clip_grad": False}
    for case, rows in json.loads(output.read_text()).items():
        counted = {(phase, op, dtype, size): count for phase, op, dtype, size, count in rows}
        policy = PolicySpec.from_mapping(sizes | PREFERENCES[case])
        assert summed_rows(estimate_comm(spec, mesh, policy)) == summed(counted), case


@pytest.mark.slow
def test_qlora_of_real_ranks(tmp_path, monkeypatch):
    """torchao's NF4Tensor under fully_shard over two ranks: what is sent and held, to the byte."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = load_script(script_path("qlora"), "qlora")
    output = tmp_path / "counts.json"
    command = torchrun(script_path("qlora"), script.RANKS, str(output))
    done = subprocess.run(
        command, env=training_environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert output.exists(), done.stderr[-4000:]
    found = json.loads(output.read_text())
    counted = {(phase, op, dtype, size): count for phase, op, dtype, size, count in found["counts"]}
    monkeypatch.setitem(sys.modules, "qlora", script)
    spec, mesh = ModelSpec(source="qlora:base"), MeshSpec(dp_shard=script.RANKS)
    policy = PolicySpec.from_mapping(
        {
            "seq_len": script.SEQ_LEN,
            "batch_size": script.BATCH,
            "clip_grad": False,
            "lora": "r=4,targets=up,base=nf4",
        }
    )
    assert summed_rows(estimate_comm(spec, mesh, policy)) == summed(counted)
    execution = execute(spec, mesh, policy)
    held = sum(tensor.nbytes or 0 for tensor in execution.tensors if tensor.category == "sharded_parameter")
    assert held == found["shard_bytes"]


@pytest.mark.parametrize("per", ["parameter", "layer"])
def test_weights_gathered_for_engines(per):
    """What ``full_tensor`` and ``unshard`` of every parameter of a sharded model gather."""
    mesh, policy = MeshSpec(dp_shard=3), PolicySpec.from_mapping(SIZES)
    model = build_builtin(tiny(), policy.seq_len, policy.orig_dtype)
    mode = Interception()
    with fake_process_group(mesh) as device_mesh, mode:
        shard(model, policy, fsdp_mesh(device_mesh), None)
        model.module.to_empty(device="cpu")
        mode.counts.clear()
        if per == "parameter":
            for parameter in model.module.parameters():
                cast(DTensor, parameter).full_tensor()
        else:
            for part in model.module.modules():
                if isinstance(part, FSDPModule):
                    part.unshard()
    sync = WeightSyncSpec(engines=2, tp=4, per=per)
    built = build_builtin(tiny(), policy.seq_len, policy.orig_dtype)
    found = present(estimate_built(built, mesh, policy, sync).weight_sync)
    assert found.gathers == mode.counts.total()
    assert found.gather_payload_bytes == sum(key[3] * count for key, count in mode.counts.items())


def test_replicate_reduces_what_replicas_of_whole_parameters_do():
    module = pytest.importorskip(
        "torch.distributed._composable.replicate_with_fsdp", reason="this torch has none"
    )
    mesh, policy = MeshSpec(dp_replicate=4), PolicySpec.from_mapping(SIZES | {"clip_grad": False})
    model, mode = build_builtin(tiny(), policy.seq_len, policy.orig_dtype), Interception()
    with fake_process_group(mesh) as device_mesh:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*model.module.get_submodule("layers").children(), model.module):
            module.replicate(part, mesh=device_mesh["dp_replicate"], mp_policy=precision)
        model.module.to_empty(device="cpu")
        with mode:
            train_step(model, replace(policy, sync="each"), mode)
    assert predicted(tiny(), mesh, policy) == mode.counts
