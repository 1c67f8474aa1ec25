"""What compiled blocks save and allocate: by hand, and beside ``torch.compile`` itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.saved_tensors import saved_sizes
from torch import Tensor, nn

from fsdp2prof.analyzers.memory.attribution import attribute
from fsdp2prof.estimators.compiler.blocks import compile_blocks
from fsdp2prof.estimators.compiler.graphs import told_of_launches
from fsdp2prof.estimators.config.catalog import builtin_config
from fsdp2prof.estimators.config.choices import CheckpointingMode
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.engine import execute
from fsdp2prof.estimators.memory import predict_memory
from fsdp2prof.estimators.models.llama import TransformerBlock
from fsdp2prof.estimators.techniques.recomputation import (
    Recompute,
    Selective,
    checkpoint_blocks,
    recomputation,
)
from fsdp2prof.estimators.torch_rules import torch_rules
from fsdp2prof.fake_tensors import fake_tensors
from fsdp2prof.storage_tracker import StorageTracker
from fsdp2prof.tables.allocations import MemoryRecording
from fsdp2prof.tables.columns import NEVER

TOKENS, DIM, HIDDEN = 128, 64, 256
ELEMENT = 4


class FeedForward(nn.Module):
    """Two products with five pointwise operators around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x + down(2 * relu(up(sin(x))))``."""
        out: Tensor = x + self.down(2.0 * F.relu(self.up(torch.sin(x))))
        return out


def history(recompute: Recompute) -> tuple[MemoryRecording, int]:
    """A forward and a backward of one compiled block, and the order of the last event of the forward."""
    with fake_tensors() as mode:
        root = nn.Sequential(FeedForward())
        compile_blocks(root, {"0": recompute}, {}, torch_rules())
        x = torch.empty(TOKENS, DIM, requires_grad=True)
        gradient = torch.empty(TOKENS, DIM)
        tracker = StorageTracker(fake_mode=mode)
        with tracker:
            out = root(x)
            mark = torch.empty(1)
            out.backward(gradient)
        recording = tracker.recording()
    after = recording.allocations.alloc_order[recording.allocations.size == ELEMENT][0]
    del mark
    return recording, int(after)


SMALL, LARGE, WEIGHT = TOKENS * DIM * ELEMENT, TOKENS * HIDDEN * ELEMENT, DIM * HIDDEN * ELEMENT
RELU_MASK = TOKENS * HIDDEN


@pytest.mark.parametrize(
    ("recompute", "kept"),
    [
        # sin(x), and relu of the first product, doubled, both read by products of the backward; relu's mask.
        ("none", [SMALL, LARGE, RELU_MASK]),
        ("full", []),
        (Selective(), [LARGE]),  # the first product; sin and relu are run again
    ],
)
def test_what_a_block_saves_by_hand(recompute: Recompute, kept: list[int]) -> None:
    recording, forward_ends = history(recompute)
    allocations = recording.allocations
    made = (allocations.alloc_order > -1) & (allocations.alloc_order < forward_ends)
    alive = made & (allocations.free_order > forward_ends)
    # The block's result lives, too; it is what the last product wrote to, in place.
    assert sorted(allocations.size[alive].tolist()) == sorted([*kept, SMALL])


def test_what_a_forward_allocates_by_hand() -> None:
    recording, forward_ends = history("full")
    allocations = recording.allocations
    made = (allocations.alloc_order > -1) & (allocations.alloc_order < forward_ends)
    # sin(x), the first product, where its relu lies too, the second, where the sum lies: no other memory.
    assert allocations.size[made].tolist() == [SMALL, LARGE, SMALL]
    assert allocations.op.take(made).to_list() == ["aten::empty_strided", "aten::mm", "aten::mm"]


class Latent(nn.Module):
    """Attention whose values are narrower than its keys, as in DeepSeek-V3."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` attends to itself."""
        return F.scaled_dot_product_attention(2.0 * x, 3.0 * x, 4.0 * x[..., : DIM // 2], is_causal=True)


def test_compiled_attention_keeps_no_scores_of_narrow_values() -> None:
    with fake_tensors():
        root = nn.Sequential(Latent())
        compile_blocks(root, {"0": "none"}, {}, torch_rules())
        x = torch.empty(1, 2, 1024, DIM, requires_grad=True)
        with saved_sizes([x]) as sizes:
            root(x)
    assert sizes
    assert max(sizes) < 1024 * 1024 * ELEMENT  # the scores of one head


def test_backward_leaves_gradients_alone() -> None:
    allocations = history("none")[0].allocations
    left = (allocations.alloc_order > -1) & (allocations.free_order == NEVER) & (allocations.size > ELEMENT)
    assert sorted(allocations.size[left].tolist()) == sorted(
        [WEIGHT, WEIGHT, SMALL, SMALL]
    )  # of the input, and the result


CONFIG = replace(
    builtin_config("llama3-8b"),
    dim=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn_dim=192,
    vocab_size=128,
    layers=1,
)


GENERATOR_STATES = (16, 5056)
"""Bytes of CUDA's, as on paper, and of the host's: saved where attention, which may draw, runs again."""


def saved_by(run: Callable[[nn.Module], nn.Module]) -> list[int]:
    root: nn.Module = nn.Sequential(TransformerBlock(CONFIG, 0))
    x, rotary = torch.empty(2, 32, 64, requires_grad=True), torch.empty(32, 8, dtype=torch.complex64)
    block = run(root)
    block(x, rotary)  # compiles, with tensors and saved tensors of its own
    with saved_sizes([x, rotary, *root.parameters()]) as sizes:
        block(x, rotary)
    return sorted(size for size in sizes if size not in GENERATOR_STATES)


@pytest.mark.slow
@pytest.mark.parametrize("ac", ["none", "full", "op"])
@pytest.mark.filterwarnings("ignore")
def test_what_a_block_saves_is_what_torch_compile_saves(ac: CheckpointingMode) -> None:
    """Dynamo, AOTAutograd and inductor's decompositions on real tensors, a checkpoint around the block."""

    def really(root: nn.Module) -> nn.Module:
        checkpoint_blocks(root, ("0",), PolicySpec(ac=ac))
        return torch.compile(root.get_submodule("0"), backend="aot_eager_decomp_partition", fullgraph=True)  # type: ignore[return-value]

    def on_paper(root: nn.Module) -> nn.Module:
        compile_blocks(root, recomputation(root, ("0",), PolicySpec(ac=ac)), {}, torch_rules())
        return root.get_submodule("0")

    with fake_tensors():
        ours = saved_by(on_paper)
    assert ours == saved_by(really)
    assert bool(ours) is (ac != "full")


GPT = ModelSpec(source="gpt2", layers=12)
POLICY = PolicySpec(seq_len=128, compile=True, allocator="expandable")


def test_a_compiled_estimate_says_how_and_repeats_its_blocks() -> None:
    estimate = predict_memory(GPT, MeshSpec(dp_shard=4), POLICY).estimate
    assert estimate.assumptions[0] == "4 and 5 blocks executed, found to repeat exactly, and repeated to 12"
    assert estimate.assumptions[1].startswith("compile: each block's graph traced whole")
    assert [unknown.name for unknown in estimate.unknowns] == ["prediction"]


def test_what_cannot_be_traced_is_guessed_and_says_so() -> None:
    """Modules inside a block that gather their own parameters end its graph."""
    policy = replace(POLICY, wrap=("block", "layers.*.up"))
    estimate = predict_memory(replace(GPT, layers=1), MeshSpec(dp_shard=4), policy).estimate
    (note,) = [line for line in estimate.assumptions if line.startswith("compile, guessed")]
    assert "layers.0 holds modules that fully_shard wraps on their own" in note
    assert {unknown.name for unknown in estimate.unknowns} == {"compile", "prediction"}


def test_fused_kernels_move_each_tensor_once() -> None:
    """``sin(x)``; ``2 * relu`` with its mask; the sum; and backward ``2 * gradient * mask`` and ``sin``'s."""
    moved: list[int] = []
    with fake_tensors():
        root = nn.Sequential(FeedForward())
        compile_blocks(root, {"0": "none"}, {}, torch_rules())
        x = torch.empty(TOKENS, DIM, requires_grad=True)
        root(x)  # traces the graph
        with told_of_launches(lambda nbytes, dtype, moves: moved.append(nbytes)):
            out = root(x)
            forward = len(moved)
            out.backward(torch.empty(TOKENS, DIM))
    assert moved[:forward] == [2 * SMALL, 2 * LARGE + RELU_MASK, 3 * SMALL]
    assert sorted(moved[forward:]) == [4 * SMALL, 2 * LARGE + RELU_MASK]


@pytest.mark.parametrize("ac", ["none", "full", "op"])
def test_tensor_parallel_blocks_are_partitioned_under_every_checkpointing(ac: CheckpointingMode) -> None:
    """Two ranks: fully checkpointed, a block leaves its result alone, this rank's half of the tokens.

    Else it leaves the gathered tokens, too, which the first products of attention and feed-forward read.
    """
    llama, mesh = ModelSpec(source="llama3-8b", layers=1), MeshSpec(dp_shard=2, tp=2)
    recording = execute(llama, mesh, replace(POLICY, ac=ac), graphs={}).recording
    attributed = attribute(recording, recording.steps)
    allocations = attributed.allocations
    rows = allocations.fqn.equals("layers.0") & allocations.activity.equals("compute")
    rows &= allocations.phase.equals("forward") & (allocations.step == 2) & ~attributed.recomputed
    rows &= attributed.alloc_row != attributed.free_row
    kept = int(allocations.size[rows].sum())
    half = 128 // 2 * 4096 * 2
    assert (half <= kept < half + 1024) if ac == "full" else (kept > 3 * half)
