"""Linear layers in float8 and MXFP8 beside torchao's own, which runs here on fake tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from support.saved_tensors import saved_sizes
from torch import Tensor, library, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp2prof.analyzers.memory.attribution import attribute
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.communication import estimate_comm
from fsdp2prof.estimators.compiler.blocks import KNOWS_WHAT_IS_THERE, compile_blocks
from fsdp2prof.estimators.config.choices import CheckpointingMode, Float8
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.engine import execute
from fsdp2prof.estimators.execution.fake_world import fake_process_group, fsdp_mesh
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.models.low_precision import RECIPES
from fsdp2prof.estimators.techniques.float8.layers import MxLinear
from fsdp2prof.estimators.techniques.float8.linear import Float8Linear
from fsdp2prof.estimators.techniques.float8.weight import compute_scales
from fsdp2prof.estimators.techniques.recomputation import checkpoint_blocks, recomputation
from fsdp2prof.estimators.torch_rules import torch_rules
from fsdp2prof.fake_tensors import fake_tensors
from fsdp2prof.storage_tracker import StorageTracker
from fsdp2prof.tables.columns import NEVER

MESH = MeshSpec(dp_shard=4)
MIB = 1 << 20

Event = tuple[str, int]


def history(run: Callable[[], object]) -> list[Event]:
    """The sizes of the storages that ``run`` makes and drops, in order, on fake tensors.

    What is dropped between two that are made is in the order of size.
    """
    tracker = StorageTracker(fake_mode=torch._guards.active_fake_mode())
    with tracker:
        kept = run()
    allocations = tracker.recording().allocations
    del kept
    births = zip(allocations.alloc_order.tolist(), allocations.size.tolist(), strict=True)
    deaths = zip(allocations.free_order.tolist(), allocations.size.tolist(), strict=True)
    events = [(order, "+", size) for order, size in births if order >= 0]
    events += [(order, "-", size) for order, size in deaths if order != NEVER]
    in_order = [(sign, size) for _, sign, size in sorted(events)]
    runs = (list(run) for _, run in groupby(in_order, key=lambda event: event[0]))
    return [event for run in runs for event in (sorted(run) if run[0][0] == "-" else run)]


def step(module: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], object]:
    x = torch.empty(shape, dtype=dtype, requires_grad=True)
    gradient = torch.empty((*shape[:-1], module.out_features), dtype=dtype)

    def run() -> object:
        out = module(x)
        out.backward(gradient)
        return out

    return run


@pytest.mark.parametrize("shape", [(2, 64, 32), (48, 32)], ids=["batch", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_eager_float8_allocates_and_drops_what_torchao_does(
    recipe: Float8, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torchao = pytest.importorskip("torchao.float8", reason="needs torchao")
    with fake_tensors():
        theirs = torchao.convert_to_float8_training(
            nn.Sequential(nn.Linear(32, 80, dtype=dtype)),
            config=torchao.Float8LinearConfig.from_recipe_name(recipe),
        )[0]
        ours = Float8Linear(nn.Linear(32, 80, dtype=dtype), RECIPES[recipe], gathered=False)
        expected, found = (history(step(module, shape, dtype)) for module in (theirs, ours))
    assert found == expected
    assert ("+", 48 * 80) in found or ("+", 128 * 80) in found  # the gradient in float8, a byte an element


def test_mxfp8_allocates_and_drops_what_torchao_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two casts, which are CUDA kernels, give what they say: data, and a byte for 32 elements."""
    linear = pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear", reason="needs torchao")
    from torchao.prototype.mx_formats import kernels, mx_tensor

    @library.custom_op("fsdp2prof_tests::rows", mutates_args=())
    def rows(x: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("runs on tensors without data alone")

    @rows.register_fake
    def _(x: Tensor) -> tuple[Tensor, Tensor]:
        data = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
        return data, torch.empty((x.shape[0], x.shape[1] // 32), dtype=torch.float8_e8m0fnu)

    @library.custom_op("fsdp2prof_tests::columns", mutates_args=())
    def columns(x: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("runs on tensors without data alone")

    @columns.register_fake
    def _(x: Tensor) -> tuple[Tensor, Tensor]:
        data = torch.empty((x.shape[1], x.shape[0]), dtype=torch.float8_e4m3fn).t()
        return data, torch.empty((x.shape[0] // 32, x.shape[1]), dtype=torch.float8_e8m0fnu).t()

    def quantize(x: Tensor, **_: object) -> tuple[object, Tensor, object, Tensor]:
        data, scales = columns(x)
        return None, data, None, scales

    monkeypatch.setattr(mx_tensor, "triton_to_mxfp8_dim0", lambda x, **_: rows(x))
    monkeypatch.setattr(kernels, "mxfp8_quantize_cuda", quantize)
    with fake_tensors():
        theirs = linear.MXFP8Linear(96, 160, bias=False, dtype=torch.bfloat16)
        ours = MxLinear(nn.Linear(96, 160, bias=False, dtype=torch.bfloat16))
        for shape in ((2, 64, 96), (256, 96)):
            expected, found = (history(step(module, shape, torch.bfloat16)) for module in (theirs, ours))
            assert found == expected
            assert ("+", shape[0] * 96 if len(shape) == 2 else 128 * 96) in found


class Pair(nn.Module):
    """Two layers and a norm, each pair of weights gathered as bytes, the norm in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64, bias=False)
        self.norm = nn.LayerNorm(64, bias=False)
        self.second = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., 32) -> (..., 32)."""
        out: Tensor = self.second(self.norm(self.first(x)))
        return out


def trained(
    convert: Callable[[nn.Module], Callable[[nn.Module], None]], world: MeshSpec = MESH, rank: int = 0
) -> list[Event]:
    """Two steps of two sharded pairs whose layers ``convert`` replaces and whose scales it computes."""
    with fake_process_group(world, rank=rank) as mesh, fake_tensors():
        with torch.device("meta"):
            model: Any = nn.Sequential(Pair(), Pair())
        rescale = convert(model)
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*model, model):
            fully_shard(part, mesh=fsdp_mesh(mesh), mp_policy=precision)
        model.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def run() -> object:
            for _ in range(2):
                model(torch.empty(16, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                rescale(model)
            return model

        return history(run)


def theirs(model: nn.Module) -> Callable[[nn.Module], None]:
    """torchao's layers, whose weights are gathered as float8."""
    torchao = pytest.importorskip("torchao.float8", reason="needs torchao")
    config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    torchao.convert_to_float8_training(model, config=config)
    rescale: Callable[[nn.Module], None] = torchao.precompute_float8_dynamic_scale_for_fsdp
    return rescale


def test_weights_gathered_as_float8_allocate_what_torchao_s_do() -> None:
    def ours(model: nn.Module) -> Callable[[nn.Module], None]:
        for fqn, part in list(model.named_modules()):
            if isinstance(part, nn.Linear):
                model.set_submodule(fqn, Float8Linear(part, RECIPES["tensorwise"], gathered=True))
        return lambda model: compute_scales(model.parameters())

    expected, found = trained(theirs), trained(ours)
    large = [[event for event in one if event[1] > 64] for one in (expected, found)]
    assert large[0] == large[1]
    # A pair gathered: two weights as bytes, the norm as two bytes an element.
    assert found.count(("+", 2 * 32 * 64 + 2 * 64)) == 2 * (2 + 2)


def test_uneven_shards_are_refused_as_torchao_cannot_gather_them() -> None:
    """Of 64 and 32 rows the last of three ranks has 20 and 10, the first 22 and 11: their gathers differ.

    Norms are gathered padded, as ever: 22 elements a rank.
    """
    first, last = (trained(theirs, MeshSpec(dp_shard=3), rank=rank) for rank in (0, 2))
    assert ("+", 3 * (22 * 32 + 11 * 64 + 22 * 2)) in first
    assert ("+", 3 * (20 * 32 + 10 * 64 + 22 * 2)) in last
    with pytest.raises(ModelError, match="5 ranks do not divide its 2304 rows"):
        estimate_comm(GPT, MeshSpec(dp_shard=5), FLOAT8)


GPT = ModelSpec(source="gpt2", layers=2)
FLOAT8 = PolicySpec(seq_len=128, float8="tensorwise", fp8_all_gather=True, allocator="expandable")


def test_what_is_gathered_as_bytes_by_hand_and_in_the_communication_estimate() -> None:
    """A block of GPT-2: 12 x 768 x 768 weights as bytes, 13 x 768 biases and norms in bf16."""
    recording = execute(GPT, MESH, FLOAT8).recording
    attributed = attribute(recording, recording.steps).allocations
    rows = attributed.activity.equals("all_gather") & attributed.fqn.equals("layers.1")
    rows &= (attributed.step == 2) & attributed.phase.equals("forward")
    gathered = 12 * 768 * 768 + 2 * 13 * 768
    assert gathered in attributed.size[rows].tolist()
    estimate = estimate_comm(GPT, MESH, FLOAT8)
    (row,) = [
        row
        for row in estimate.groups
        if (row.fqn, row.op, row.phase) == ("layers.1", "all_gather", "forward")
    ]
    assert row.payload_bytes == gathered


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_every_recipe_is_estimated(recipe: Float8, compiled: bool) -> None:
    policy = replace(FLOAT8, float8=recipe, fp8_all_gather=False, compile=compiled)
    estimate = estimate_memory(GPT, MESH, policy)
    assert any("torchao's" in line for line in estimate.assumptions)
    assert not [line for line in estimate.assumptions if "guessed" in line]


def odd() -> tuple[nn.Module, object, object]:
    """Blocks of 24 rows, which 16 does not divide."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.ReLU()) for _ in range(2))
    return model, lambda *_: None, lambda *_: None


def test_sizes_that_no_float8_product_takes_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "odd_model", sys.modules[__name__])
    with pytest.raises(ModelError, match="no linear layer with sizes that are multiples of 16"):
        execute(ModelSpec(source="odd_model:odd"), MESH, replace(FLOAT8, fp8_all_gather=False))


def saved_of(block: nn.Module, inputs: list[Tensor]) -> list[int]:
    """Bytes of the storages that a compiled block saves for backward and that are no inputs."""
    block(*inputs)  # compiles, with tensors and saved tensors of its own
    with saved_sizes([*inputs, *block.parameters()]) as sizes:
        block(*inputs)
    return sorted(size for size in sizes if size > 16)


class Gated(nn.Module):
    """A feed-forward of three layers, as a block has it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(64, 192, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.down = nn.Linear(192, 64, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """``x + down(silu(gate(x)) * up(x))``."""
        out: Tensor = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


@pytest.mark.skipif(not KNOWS_WHAT_IS_THERE, reason="this torch's partitioner saves parameters at their size")
def test_an_older_partitioner_saves_weights_as_float8() -> None:
    """A byte an element is less than the two of a parameter that it does not know to be there anyway."""
    saved = []
    for version in ("2.8", "2.7"):
        with fake_tensors():
            paper = nn.Sequential(Gated())
            for name, part in list(paper.named_modules()):
                if isinstance(part, nn.Linear):
                    paper.set_submodule(name, Float8Linear(part, RECIPES["tensorwise"], gathered=False))
            compile_blocks(paper, {"0": "none"}, {}, torch_rules(version))
            saved.append(saved_of(paper[0], [torch.empty(128, 64, dtype=torch.bfloat16, requires_grad=True)]))
    weight = 64 * 192
    assert saved[1].count(weight) - saved[0].count(weight) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ac", ["none", "full"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_compiled_block_saves_what_torch_compile_saves_of_torchao_s(
    recipe: Float8, ac: CheckpointingMode
) -> None:
    """Dynamo, AOTAutograd and inductor's decompositions on real tensors, with the products a CPU has."""
    torchao = pytest.importorskip("torchao.float8", reason="needs torchao")
    real = nn.Sequential(Gated())
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    torchao.convert_to_float8_training(real, config=config)
    checkpoint_blocks(real, ("0",), PolicySpec(ac=ac))
    run = torch.compile(real.get_submodule("0"), backend="aot_eager_decomp_partition", fullgraph=True)
    expected = saved_of(run, [torch.zeros(128, 64, dtype=torch.bfloat16, requires_grad=True)])  # type: ignore[arg-type]
    with fake_tensors():
        paper = nn.Sequential(Gated())
        for name, part in list(paper.named_modules()):
            if isinstance(part, nn.Linear):
                paper.set_submodule(name, Float8Linear(part, RECIPES[recipe], gathered=False))
        compile_blocks(paper, recomputation(paper, ("0",), PolicySpec(ac=ac)), {}, torch_rules())
        found = saved_of(paper[0], [torch.empty(128, 64, dtype=torch.bfloat16, requires_grad=True)])
    assert found == expected
    assert bool(found) is (ac == "none")
