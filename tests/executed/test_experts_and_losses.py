"""Mixtures of experts, losses and adapters: by hand, against plain computations, and what is refused."""

from __future__ import annotations

import importlib
import json
import math
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.present import present
from support.torch_versions import LOSSES_IN_PIECES
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

from fsdp2prof.analyzers.memory.prepared import allocated_totals
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.communication import estimate_comm
from fsdp2prof.estimators.config.catalog import ExpertShape, TransformerConfig
from fsdp2prof.estimators.config.choices import (
    Chunked,
    ChunkedBackward,
    ChunkedBlocks,
    ChunkedKept,
    ChunkedTokens,
    ChunkedVocabulary,
)
from fsdp2prof.estimators.config.extra_models import ExtraModel
from fsdp2prof.estimators.config.lora import Lora
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.engine import execute
from fsdp2prof.estimators.execution.fake_world import fake_process_group
from fsdp2prof.estimators.execution.second_models import with_role
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.builtin import build_builtin
from fsdp2prof.estimators.models.experts import ExpertExchange, GroupedExperts
from fsdp2prof.estimators.models.losses import CompiledCrossEntropy, logits_loss, loss_of_model
from fsdp2prof.estimators.models.model import Batch
from fsdp2prof.estimators.sharding.groups import freeze, parameter_groups
from fsdp2prof.estimators.techniques.adapters import with_adapters, without_adapters
from fsdp2prof.estimators.techniques.quantized import PackedLinear, dequantized
from fsdp2prof.estimators.techniques.registry import check_parallelism, part_of
from fsdp2prof.estimators.torch_rules import expert_mesh_refusal, packed_parameters_refusal
from fsdp2prof.estimators.verdict.memory_fit import expert_padding
from fsdp2prof.storage_tracker import StorageTracker
from fsdp2prof.tables.columns import NEVER

CONFIG = TransformerConfig(
    name="tiny-experts",
    family="llama",
    dim=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_dim=64,
    vocab_size=96,
    context=64,
    experts=ExpertShape(count=4, top_k=2, ffn_dim=16, shared_ffn_dim=8, normalised=True),
)
PUBLISHED = {
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3-16b": 15_706_484_224,
    "deepseek-v3-671b": 671_026_419_200 - 58 * 256,  # without the routers' correction biases, buffers here
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_mixtures_have_their_published_parameters(name: str, parameters: int) -> None:
    model = build_model(ModelSpec(source=name), seq_len=16)
    assert model.parameters == present(model.config).parameters == parameters


def test_every_token_passes_its_own_experts() -> None:
    """One rank, balanced by construction: the mixture equals a loop over tokens."""
    torch.manual_seed(0)
    model = build_builtin(CONFIG, 8, "float32")
    model.module.to_empty(device="cpu")
    for parameter in model.module.parameters():
        nn.init.normal_(parameter, std=0.2)
    mixture: Any = model.module.get_submodule("layers.0.feed_forward")
    mixture.router.expert_bias.zero_()
    x = torch.randn(1, 8, 32)
    turns = torch.tensor([[0, 1], [2, 3]]).repeat(4, 1)
    mixture.router.forward = lambda flat: (torch.full((8, 2), 0.5), turns)
    experts, shared = mixture.experts, mixture.shared_experts
    expected = shared(x[0])
    for token, chosen in enumerate(turns.tolist()):
        for expert in chosen:
            hidden = F.silu(experts.w1[expert] @ x[0, token]) * (experts.w3[expert] @ x[0, token])
            expected[token] += 0.5 * (experts.w2[expert] @ hidden)
    torch.testing.assert_close(mixture(x)[0], expected)


def test_the_busiest_rank_receives_its_multiple() -> None:
    nobody: Any = None
    exchange = ExpertExchange(nobody, 4, 1.5)
    assert exchange.sent(10) == [3, 3, 2, 2]
    assert exchange.received(10) == [4, 4, 4, 3]  # 15 rows


@pytest.mark.parametrize(
    ("mesh", "options", "reason"),
    [
        ({"dp_shard": 8, "ep": 3}, {}, "ep=3 does not divide the 4 experts"),
        ({"dp_shard": 2, "ep": 4}, {}, "ep=4 does not divide the 2 ranks"),
        ({"dp_shard": 4}, {"imbalance": 2}, "add ep to the mesh"),
        ({"dp_shard": 1, "cp": 2, "ep": 4}, {}, "does not divide the 2 ranks of dp_shard x cp x tp"),
        pytest.param(
            {"dp_shard": 4, "ep": 2, "tp": 2},
            {"seq_len": 15},
            "seq_len 15 is not a multiple of 2",
            marks=pytest.mark.skipif(expert_mesh_refusal() is not None, reason="refused before"),
        ),
        ({"dp_shard": 4, "ep": 2}, {"reshard": 2}, "reshard to a number"),
    ],
)
def test_what_expert_parallelism_refuses(mesh, options, reason) -> None:
    model = build_builtin(CONFIG, 16, "float32")
    with pytest.raises(ModelError, match=reason):
        check_parallelism(model, MeshSpec(**mesh), PolicySpec(**{"seq_len": 16, **options}))


def test_a_model_without_experts_has_no_expert_parallelism() -> None:
    with pytest.raises(ModelError, match="llama3-8b, which has no experts"):
        estimate_comm(ModelSpec(source="llama3-8b", layers=1), MeshSpec(dp_shard=2, ep=2), PolicySpec())


def test_padded_experts_are_found_with_what_avoids_it() -> None:
    model, mesh, policy = build_builtin(CONFIG, 16, "float32"), MeshSpec(dp_shard=16), PolicySpec(seq_len=16)
    finding = present(expert_padding(parameter_groups(model, mesh, policy), policy))
    assert "4 experts on 16 ranks are padded to 4 times their size" in finding.how
    assert "expert_shards=hidden" in finding.how
    # Of w1, w2 and w3 in two layers a rank holds one expert of 512 numbers, not 4 x 512 / 16 = 128:
    # parameter, gradient and two moments in fp32. Of a block's 3 x 4 x 512 numbers four times as many are
    # gathered, in bf16, three copies at once, and reduced in fp32, from two inputs.
    states, buffers = 2 * 3 * (512 - 128) * 4 * 4, 3 * 3 * 4 * 512 * (3 * 2 + 2 * 4)
    assert finding.saves_bytes == states + buffers
    hidden = replace(policy, expert_shards="hidden")
    assert expert_padding(parameter_groups(model, mesh, hidden), hidden) is None


class Head(nn.Module):
    """A head over given hidden states."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11, bias=bias)

    def forward(self, hidden):
        return self.head(hidden)


IN_PIECES = [
    Chunked(3),
    ChunkedKept(3),
    ChunkedBackward(3),
    ChunkedTokens(5),
    ChunkedVocabulary(4),
    ChunkedBlocks(5),
]


@pytest.mark.parametrize("how", ["compiled", "fused", "logprobs", *IN_PIECES])
def test_every_loss_is_the_cross_entropy_on_real_tensors(how) -> None:
    torch.manual_seed(0)
    module, targets = Head(bias=False), torch.randint(11, (2, 6))
    hidden = torch.randn(2, 6, 8, requires_grad=True)
    gradients = []
    for one in ("full", how):
        module.zero_grad()
        hidden.grad = None
        loss = loss_of_model("head", module, Batch(args=(hidden,), targets=targets), one)
        loss.backward()
        gradients.append([loss.detach(), present(hidden.grad), present(module.head.weight.grad).clone()])
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(gradients[0][0], logits_loss(module(hidden), targets).detach())


@pytest.mark.parametrize(
    ("mesh", "policy", "reason"),
    [
        (MeshSpec(dp_shard=2), {"loss": "chunked-backward:4"}, r"add output or norm\+output to wrap"),
        (MeshSpec(dp_shard=2, tp=2), {"loss": "fused"}, "use loss=compiled, or chunked:8"),
        (MeshSpec(pp=2), {"loss": "chunked:4", "reshard": "never"}, "use loss=full"),
    ],
)
def test_losses_that_are_refused_say_which_to_use(mesh, policy, reason) -> None:
    with pytest.raises(ModelError, match=reason):
        estimate_memory(ModelSpec(source="llama2-7b", layers=2), mesh, PolicySpec(seq_len=64, **policy))


@pytest.mark.skipif(not LOSSES_IN_PIECES, reason="torch 2.7 has no losses in pieces")
def test_what_each_loss_in_pieces_holds() -> None:
    """Logits in fp32 of 8192 tokens of a vocabulary of 32000; only torchtune's pieces keep them.

    With a backward of its own each piece leaves the gradient of the head while the next ones run.
    """
    model, mesh = ModelSpec(source="llama2-7b", layers=1), MeshSpec(dp_shard=8)
    policy = PolicySpec(seq_len=8192, wrap=("block", "norm+output"), allocator="expandable")
    peaks = {
        how: estimate_memory(
            model, mesh, PolicySpec.from_mapping(policy.to_mapping() | {"loss": how})
        ).peak.active_bytes
        for how in (
            "full",
            "native",
            "chunked-kept:8",
            "chunked-backward:8",
            "chunked-tokens:1024",
            "chunked-vocab:2000",
        )
    }
    logits = 8192 * 32000 * 4
    assert peaks["full"] - peaks["native"] > logits  # of three tensors two are in fp32
    assert peaks["full"] - peaks["chunked-kept:8"] < logits
    for how in ("chunked-backward:8", "chunked-tokens:1024", "chunked-vocab:2000"):
        assert peaks["chunked-kept:8"] - peaks[how] > logits / 4


class Capped(Head):
    """Logits that the model caps (Gemma 2) and divides (Granite) after its head, and multiplies (Cohere)."""

    logit_scale = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(final_logit_softcapping=3.0, logits_scaling=0.5)

    def forward(self, hidden):
        logits = self.head(hidden) / self.config.logits_scaling * self.logit_scale
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


@pytest.mark.parametrize(
    "how",
    [
        "fused",
        Chunked(3),
        ChunkedKept(3),
        ChunkedBackward(3),
        ChunkedTokens(5),
        ChunkedVocabulary(4),
        ChunkedBlocks(5),
    ],
)
def test_what_a_model_does_to_its_logits_is_done_to_each_piece(how) -> None:
    torch.manual_seed(0)
    module, targets, hidden = Capped(), torch.randint(11, (2, 6)), 4 * torch.randn(2, 6, 8)
    hidden.requires_grad_()
    module.head.register_parameter("bias", None)  # which prime-rl's head does not take
    losses = []
    for one in ("full", how):
        module.zero_grad()
        loss = loss_of_model("head", module, Batch(args=(hidden,), targets=targets), one)
        loss.backward()
        losses.append([loss.detach(), present(module.head.weight.grad).clone()])
    torch.testing.assert_close(*losses)
    assert vars(module.config) == {"final_logit_softcapping": 3.0, "logits_scaling": 0.5}
    assert module.logit_scale == 0.25


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_nothing_holds_the_last_blocks_output_while_the_head_runs(family: Any) -> None:
    """As in Meta's, torchtitan's and transformers' code, which give norm and blocks one name."""
    config = replace(CONFIG, experts=None, family=family, kv_heads=CONFIG.heads, context=16)
    module: Any = build_builtin(config, 16, "float32").module.to_empty(device="cpu")
    seen: list[Any] = []
    module.layers[-1].register_forward_hook(lambda *given: seen.append(weakref.ref(given[-1])))
    module.output.register_forward_pre_hook(lambda *_: seen.append(seen[0]() is None))
    with torch.no_grad():
        module(torch.zeros(1, 16, dtype=torch.long))
    assert seen[1] is True


@pytest.mark.parametrize(("kept", "element"), [("own", 2), ("fp32", 4)])
def test_logits_that_a_script_keeps_live_until_the_next(kept, element) -> None:
    spec, mesh, policy = ModelSpec(source="gpt2", layers=1), MeshSpec(dp_shard=4), PolicySpec(seq_len=64)
    nbytes = 64 * 50_257 * element

    def alive_at_the_end(policy: PolicySpec) -> int:
        allocations = execute(spec, mesh, policy).recording.allocations
        return int(((allocations.size == nbytes) & (allocations.free_order == NEVER)).sum())

    assert (alive_at_the_end(policy), alive_at_the_end(replace(policy, keep_logits=kept))) == (0, 1)
    with pytest.raises(ModelError, match="keep_logits: loss=fused never makes them whole"):
        replace(policy, keep_logits=kept, loss="fused")
    with pytest.raises(ModelError, match="keep_logits: a pipeline's last stage"):
        execute(spec, MeshSpec(dp_shard=4, pp=2), replace(policy, keep_logits=kept, reshard="never"))


def test_losses_hold_less_and_less() -> None:
    """Of a vocabulary that dwarfs the model: fp32 copies, the logits once, no logits."""
    spec, mesh = ModelSpec(source="qwen3-0.6b", layers=1), MeshSpec(dp_shard=64)
    policy = PolicySpec(seq_len=2048, batch_size=2, optimizer="none")
    tokens = 2 * 2048
    logits = tokens * 151_936
    peaks = {
        how: estimate_memory(
            spec, mesh, PolicySpec.from_mapping(policy.to_mapping() | {"loss": how})
        ).peak.active_bytes
        for how in ("full", "compiled", "fused")
    }
    # Two fp32 tensors of them, against one fp32 number a token.
    assert peaks["full"] - peaks["compiled"] == 8 * logits - 4 * tokens
    assert peaks["compiled"] - peaks["fused"] > logits


def test_a_compiled_loss_takes_logits_that_are_divided() -> None:
    """A rank makes its part of the logits and of their gradient, in bf16, and two tensors of them in fp32."""
    spec, mesh = ModelSpec(source="llama3-8b", layers=1), MeshSpec(dp_shard=2, tp=2)
    policy = PolicySpec(seq_len=64, loss="compiled", orig_dtype="bfloat16")
    part = 64 * 128_256 // 2

    def made(policy: PolicySpec) -> tuple[int, int]:
        sizes = execute(spec, mesh, policy, steps=1).recording.allocations.size
        return int((sizes == 2 * part).sum()), int((sizes == 4 * part).sum())

    assert made(policy) == (2, 2)
    assert made(replace(policy, loss="full"))[1] >= 2
    told, full = (estimate_comm(spec, mesh, replace(policy, loss=how)) for how in ("compiled", "full"))
    assert told.per_step == full.per_step


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("tp", [1, 2])
def test_a_compiled_loss_saves_what_the_compiler_saves(tp: int) -> None:
    """Of torch's own partitioner: the logits in bf16, or an unscaled gradient of them in fp32 where ranks
    have a part of the vocabulary each."""
    tokens, vocabulary = 16, 64
    held: list[tuple[torch.Size, torch.dtype]] = []

    def keep(saved: Tensor) -> Tensor:
        held.append((saved.shape[-1:], saved.dtype))
        return saved

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    with (
        fake_process_group(MeshSpec(dp_shard=1, tp=tp)) as mesh,
        loss_parallel() if tp > 1 else nullcontext(),
    ):
        local = torch.randn(1, tokens, vocabulary // tp, dtype=torch.bfloat16, requires_grad=True)
        logits = DTensor.from_local(local, mesh["tp"], [Shard(-1)]) if tp > 1 else local
        targets = torch.randint(vocabulary, (1, tokens))
        group = mesh["tp"].get_group() if tp > 1 else None
        compiled = torch.compile(loss, backend="aot_eager_decomp_partition")
        for call in (
            lambda: compiled(logits, targets),
            lambda: CompiledCrossEntropy.apply(local.flatten(0, 1), targets, group),
        ):
            held.clear()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
                call()
            wide = {dtype for shape, dtype in held if shape == (vocabulary // tp,)}
            assert wide == {torch.bfloat16 if tp == 1 else torch.float32}


@pytest.mark.parametrize("tp", [1, 2])
def test_a_kernel_in_place_leaves_the_gradient_where_the_logits_were(tp: int) -> None:
    with fake_process_group(MeshSpec(dp_shard=1, tp=tp)) as mesh, FakeTensorMode():
        head = torch.randn(64 // tp, 8, requires_grad=True)
        logits = torch.randn(1, 32, 8) @ head.t()
        gradients: list[Tensor] = []
        logits.register_hook(gradients.append)
        given = DTensor.from_local(logits, mesh["tp"], [Shard(-1)]) if tp > 1 else logits
        logits_loss(given, torch.zeros(1, 32, dtype=torch.long), "in-place").backward()
    assert gradients[0].untyped_storage()._cdata == logits.untyped_storage()._cdata
    assert present(head.grad).shape == head.shape


def adapters(text: Any) -> Lora | None:
    return PolicySpec(lora=text).lora


def test_adapters_stand_beside_their_targets_alone() -> None:
    model = build_builtin(replace(CONFIG, experts=None), 16, "float32")
    before = model.parameters
    lora = present(adapters("r=4,targets=wq+w2,base=bf16"))
    adapted = with_adapters(model, lora, "float32", "bfloat16")
    # r (in + out) of wq 32 -> 32 and w2 64 -> 32, in two layers.
    assert adapted.parameters - before == 2 * 4 * (64 + 96)
    dtypes = {name: p.dtype for name, p in adapted.module.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if ".lora_" in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if ".lora_" not in name} == {torch.bfloat16}
    assert PolicySpec.from_mapping(PolicySpec(lora=lora).to_mapping()).lora == lora


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}),
        ("*_proj", {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}),  # by Hugging Face's names
        ("*self_attn*", {"wq", "wk", "wv", "wo"}),
    ],
)
def test_targets_by_kind_and_by_pattern_leave_out_head_and_router(targets: str, expected: set[str]) -> None:
    model = build_builtin(CONFIG, 16, "float32")
    adapted = with_adapters(model, present(adapters(f"r=8,targets={targets}")), "float32", "bfloat16")
    found = {name.partition(".lora_")[0] for name, _ in adapted.module.named_parameters() if ".lora_" in name}
    assert {name.rpartition(".")[2] for name in found} == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("r=0,targets=wq", "rank of at least 1"),
        ("r=4", "names no targets"),
        ("r=4,targets=wq,base=int8", "base=int8 is not modelled; base=nf4, base=bnb-nf4 and base=bf16 are"),
        ("rank=4,targets=wq", "is not r=K"),
    ],
)
def test_adapters_that_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        adapters(text)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("query", r"no linear layer of tiny-experts is named 'query'; it has .*wq"),
        ("key?", r"no linear layer of tiny-experts is named key\?; the target experts adapts stacked"),
        ("experts", "r=4: grouped products of experts need a multiple of 8"),
    ],
)
def test_a_target_that_no_layer_has(target: str, reason: str) -> None:
    lora = present(adapters(f"r=4,targets={target}"))
    with pytest.raises(ModelError, match=reason):
        with_adapters(build_builtin(CONFIG, 16, "float32"), lora, "float32", "bfloat16")


def test_adapters_of_experts_by_hand() -> None:
    """Tokens pass their expert's adapters; other runs' adapters are held and not used."""
    lora = present(adapters("r=8,targets=experts+gate_proj+up?,runs=3"))
    bare, model = build_builtin(CONFIG, 16, "float32"), build_builtin(CONFIG, 16, "float32")
    adapted = with_adapters(model, lora, "float32", "bfloat16")
    # 3 runs in 2 layers: r (in + out) of 3 projections 32 <-> 16 of 4 experts, and of the shared 32 -> 8
    assert adapted.parameters - bare.parameters == 3 * 2 * 8 * (3 * 4 * (32 + 16) + 32 + 8)
    experts = present(adapted.module.get_submodule("layers.0.feed_forward.experts")).to_empty(device="cpu")
    assert isinstance(experts, GroupedExperts)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    rows, counts = torch.randn(8, 32), torch.full((4,), 2)
    with torch.no_grad():
        merged = GroupedExperts(CONFIG, present(CONFIG.experts))
        for name in ("w1", "w2", "w3"):
            a, b = (getattr(experts, f"{name}_lora_{part}") for part in "ab")
            getattr(merged, name).copy_(getattr(experts, name) + 2 * b @ a)
    torch.testing.assert_close(experts(rows, counts), merged(rows, counts))
    with without_adapters(experts):
        assert not torch.allclose(experts(rows, counts), merged(rows, counts))


def test_adapters_of_experts_are_dealt_out_with_them() -> None:
    policy = PolicySpec.from_mapping({"lora": "r=8,targets=experts"})
    mesh = MeshSpec(dp_shard=4, ep=2)
    model = part_of(build_builtin(CONFIG, 16, "float32"), mesh, policy)
    freeze(model, policy)
    trained = {name: p.shape for name, p in model.module.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 6
    assert trained["layers.1.feed_forward.experts.w2_lora_b"] == (2, 32, 8)
    of_experts = [group for group in parameter_groups(model, mesh, policy) if group.is_expert]
    assert [(len(group.parameters), group.shards) for group in of_experts] == [(9, 2)] * 2


def test_adapters_of_another_models_experts_are_refused_or_said_to_be_missing(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"num_experts": 4, "moe_intermediate_size": 32, "vocab_size": 96, "head_dim": 16}
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **shape, **more})
    )
    for text, said in (("experts?+q_proj", True), ("q_proj", False)):
        model = build_model(ModelSpec(source=str(path)), seq_len=16)
        adapted = with_adapters(model, adapters(f"r=8,targets={text}"), "float32", "bfloat16")
        assert any("adapters of stacked experts" in note for note in adapted.notes) is said
    model = build_model(ModelSpec(source=str(path)), seq_len=16)
    with pytest.raises(ModelError, match="modelled in built-in models only"):
        with_adapters(model, adapters("r=8,targets=experts"), "float32", "bfloat16")


def test_built_in_models_know_the_names_of_hugging_face() -> None:
    adapted = []
    for targets in ("wq+wo", "q_proj+o_proj", "self_attn.q_proj+attention.wo"):
        lora = present(adapters(f"r=4,targets={targets}"))
        model = with_adapters(build_builtin(CONFIG, 16, "float32"), lora, "float32", "bfloat16")
        adapted.append({fqn for fqn, _ in model.module.named_parameters() if "lora_a" in fqn})
    assert adapted[0] == adapted[1] == adapted[2] != set()
    shared = with_adapters(
        build_builtin(CONFIG, 16, "float32"),
        adapters("r=4,targets=shared_expert.up_proj"),
        "float32",
        "bfloat16",
    )
    policy = PolicySpec.from_mapping({"seq_len": 16, "lora": "r=4,targets=self_attn.q_proj?"})
    check_parallelism(build_builtin(CONFIG, 16, "float32"), MeshSpec(dp_shard=2, cp=2), policy)
    names = {fqn for fqn, _ in shared.module.named_parameters() if "lora_a" in fqn}
    assert names == {f"layers.{layer}.feed_forward.shared_experts.w3.lora_a.weight" for layer in range(2)}


def test_preferences_by_hand() -> None:
    """One pair of one token each over a vocabulary of 2; the reference says a half to everything."""
    logits = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]], dtype=torch.bfloat16)  # chosen, rejected
    targets = torch.zeros(2, 1, dtype=torch.int64)
    chosen, rejected = -math.log(1 + math.exp(-1)), -math.log(1 + math.exp(2))
    wanted = math.log(1 + math.exp(-0.1 * (chosen - rejected)))
    half = torch.full((2, 1), -math.log(2))
    assert logits_loss(logits, targets, "dpo").item() == pytest.approx(wanted)
    assert logits_loss(logits, targets, "dpo", half).item() == pytest.approx(wanted)  # it cancels out
    ratios = [-math.log(2) - taken for taken in (chosen, rejected)]
    divergence = sum(math.exp(ratio) - ratio - 1 for ratio in ratios) / 2
    assert logits_loss(logits, targets, "logprobs", half).item() == pytest.approx(
        divergence - (chosen + rejected) / 2, rel=1e-6
    )


def test_a_reward_model_has_a_head_of_one_output() -> None:
    model = build_model(ModelSpec(source="gpt2"), seq_len=16)
    made = with_role(model, ExtraModel(source="gpt2", role="reward"))
    assert made.module.get_submodule("output").weight.shape == (1, 768)
    with pytest.raises(ModelError, match=r"a reward model \(gpt2\) under tensor parallelism"):
        with_role(model, ExtraModel(source="gpt2", role="reward"), 2)


def test_pairs_take_the_memory_of_twice_as_many_sequences() -> None:
    """The log-probabilities of all tokens alike; a reference of the same size in between leaves nothing."""
    spec, mesh = ModelSpec(source="gpt2", layers=2), MeshSpec(dp_shard=2)
    options = {"seq_len": 64, "optimizer": "sgd"}

    def peak(**more: Any) -> int:
        policy = PolicySpec.from_mapping({**options, **more})
        return estimate_memory(spec, mesh, policy).peak.categories["activation"]

    several = peak(batch_size=8, loss="logprobs")
    assert peak(batch_size=4, loss="dpo", extra_model="self") == pytest.approx(several, abs=64 * 1024)


@pytest.mark.skipif(packed_parameters_refusal() is not None, reason="this torch gathers no packed parameters")
def test_a_base_of_four_bits_by_hand() -> None:
    """128 x 256 elements: half a byte each, a byte for 64 of them, a number for 256 such bytes."""
    config = replace(CONFIG, experts=None, dim=128, heads=4, kv_heads=4, head_dim=32, ffn_dim=256)
    sizes = {
        "nf4": 128 * 256 // 2 + 128 * 256 // 64 + 2 * 128 * 256 // (64 * 256),
        "bnb-nf4": 128 * 256 // 2,
    }
    for kind, size in sizes.items():
        model = build_builtin(config, 16, "float32")
        whole = model.parameters
        policy = PolicySpec.from_mapping({"lora": f"r=4,targets=w1,base={kind}"})
        adapted = part_of(model, MeshSpec(), policy)
        weight = adapted.module.get_submodule("layers.1.feed_forward.w1.base_layer").weight
        assert isinstance(weight, torch.Tensor)
        assert weight.numel() * weight.element_size() == size
        assert adapted.parameters == whole + 2 * 4 * (128 + 256)
        assert {p.dtype for n, p in adapted.module.named_parameters() if "norm" in n} == {torch.bfloat16}


@pytest.mark.skipif(packed_parameters_refusal() is not None, reason="this torch gathers no packed parameters")
@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        (
            MeshSpec(dp_shard=4),
            "torchao divides layers.0.attention.wq evenly only, and 4 ranks do not",
        ),
        (MeshSpec(dp_shard=2, tp=2), "a quantized base is modelled with FSDP and HSDP"),
    ],
)
def test_a_base_of_four_bits_that_does_not_divide(mesh: MeshSpec, reason: str) -> None:
    config = replace(CONFIG, experts=None, dim=128, heads=4, kv_heads=4, head_dim=32, ffn_dim=256)
    policy = PolicySpec.from_mapping({"lora": "r=4,targets=w1,base=nf4"})
    with pytest.raises(ModelError, match=reason):
        part_of(build_builtin(config, 16, "float32"), mesh, policy)


def test_dequantizing_takes_what_torchao_takes() -> None:
    """The most bytes at once while one weight is made, both outside of the compiler."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    path = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
    to_nf4 = importlib.import_module(path).to_nf4

    rows, columns = 512, 1024
    theirs = to_nf4(torch.randn(rows, columns, dtype=torch.bfloat16))
    layer = PackedLinear(nn.Linear(columns, rows, bias=False), "nf4", torch.bfloat16)
    peaks = [
        most_bytes(lambda: theirs.to(torch.bfloat16)),
        most_bytes(lambda: dequantized(layer.weight, None, (rows, columns), torch.bfloat16)),
    ]
    held = 2 * (rows * columns // 2 + rows * columns // 64)  # both weights, beside what is made
    assert peaks[0] - held == pytest.approx(14 * rows * columns, rel=0.01)
    assert peaks[1] == pytest.approx(peaks[0], abs=4096)


def most_bytes(work: Any) -> int:
    tracker = StorageTracker()
    with tracker:
        tracker.mark_step(0)
        work()
    recording = tracker.recording()
    return int(allocated_totals(recording.allocations, recording.events).max())


def test_a_number_of_pieces_given_for_their_size_is_refused():
    model, mesh = ModelSpec(source="llama2-7b", layers=1), MeshSpec(dp_shard=8)
    policy = PolicySpec.from_mapping({"seq_len": 2048, "loss": "chunked-vocab:2"})
    with pytest.raises(ModelError, match="makes 16,000 pieces"):
        estimate_memory(model, mesh, policy)
