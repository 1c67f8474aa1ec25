"""A pipeline stage by hand: GPT-2 with 6 blocks in 3 stages of 2, each sharded over 2 ranks.

T = 256 tokens of a micro-batch, D = 768. A block saves for backward, in bf16, 2TD bytes each of: two norms,
the attention's output, the hidden states before and after the MLP; 6TD of queries, keys, values; 8TD before
and after the GELU. Beside: two norms' mean and rstd in bf16 (8T) and the attention's logsumexp of 12 heads in
fp32 (48T).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fsdp2prof.analyzers.memory.attribution import attribute
from fsdp2prof.analyzers.memory.categories import categorize
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.engine import Execution, execute
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.manifest import RankManifest
from fsdp2prof.tables.columns import NEVER

SPEC = ModelSpec(source="gpt2", layers=6)
MESH = MeshSpec(pp=3, dp_shard=2)
T, D = 256, 768
HIDDEN = 2 * T * D
BLOCK = 32 * T * D + 8 * T + 48 * T
BLOCK_PARAMETERS = 12 * D * D + 13 * D
FIRST = 2 * BLOCK + HIDDEN + 8 * T
"""Two blocks, the sum of the embeddings, the positions (int64)."""


def run(stage: int, micro_batches: int) -> Execution:
    policy = PolicySpec(seq_len=T, reshard="never", grad_accum=micro_batches, pp_stage=stage)
    return execute(SPEC, MESH, policy)


def most_activations(execution: Execution) -> int:
    """Most bytes saved for backward at once in the second step, without the receive buffers."""
    recording = execution.recording
    manifest = RankManifest(tensors=execution.tensors)
    allocations = categorize(attribute(recording, recording.steps), manifest, recording.end_ns)
    saved = allocations.category.equals("activation") & (allocations.free_order != NEVER)
    rows = saved & (allocations.step == 2)
    changes = np.concatenate([allocations.size[rows], -allocations.size[rows]])
    orders = np.concatenate([allocations.alloc_order[rows], allocations.free_order[rows]])
    return int(changes[np.argsort(orders)].cumsum().max())


@pytest.mark.parametrize(
    ("stage", "micro_batches", "in_flight", "each"),
    [
        (0, 1, 1, FIRST),
        (0, 2, 2, FIRST),
        (0, 5, 3, FIRST),
        (1, 1, 1, 2 * BLOCK),
        (1, 5, 2, 2 * BLOCK),
    ],
)
def test_as_many_micro_batches_are_alive_as_the_schedule_runs_ahead(
    stage: int, micro_batches: int, in_flight: int, each: int
) -> None:
    assert most_activations(run(stage, micro_batches)) == in_flight * each


@pytest.mark.parametrize(
    ("stage", "parameters", "activations", "gradients"),
    [
        (0, (50_257 + 1024) * D, 0, 4),
        (1, 0, 4, 4),
        (2, 50_257 * D + 2 * D, 4, 0),  # the head is a copy of the embedding there
    ],
)
def test_a_stage_holds_its_own_states_and_receive_buffers(
    stage: int, parameters: int, activations: int, gradients: int
) -> None:
    execution = run(stage, 4)
    held: Counter[str] = Counter()
    for tensor in execution.tensors:
        if not tensor.name.endswith("step"):
            kind = tensor.category if tensor.category != "activation" else tensor.name.partition(".")[0]
            held[kind] += tensor.nbytes
    assert execution.parameters == parameters + 2 * BLOCK_PARAMETERS
    padded = execution.parameters + (D if stage != 1 else 0)  # 50,257 rows over 2 ranks
    assert held["sharded_parameter"] == padded * 4 // 2
    assert held["optimizer_state"] == 2 * held["sharded_parameter"]
    assert held["received"] == activations * HIDDEN
    assert held["received_gradient"] == gradients * HIDDEN
    assert execution.blocks == (f"layers.{2 * stage}", f"layers.{2 * stage + 1}")


def test_gradients_are_reduced_once_after_the_last_backward() -> None:
    recording = run(1, 3).recording
    names = np.array(recording.labels.name.to_list())
    reduces = np.char.startswith(names, "FSDP::post_backward_reduce")
    assert reduces.sum() == 2 * 2  # two blocks in each of two steps
    per_step = recording.labels.start_ns[reduces].reshape(2, 2)
    begins = recording.labels.start_ns[np.char.startswith(names, "FSDP::pre_backward")]
    assert ((begins < per_step[0].min()) | (begins > per_step[0].max())).all()
    assert (begins < per_step[0].min()).sum() == (begins < per_step[1].min()).sum() // 2


def test_tensor_parallel_stages_are_split_and_the_estimate_says_what_it_assumes() -> None:
    spec = ModelSpec(source="llama2-7b", layers=2)
    policy = PolicySpec(seq_len=T, reshard="never", grad_accum=3, pp_stage=1, ac="full")
    estimate = estimate_memory(spec, MeshSpec(pp=2, dp_shard=2, tp=2), policy)
    # Four 4096 x 4096 projections, three of 4096 x 11,008 and the head, split over tp; three norms are not.
    split = 4 * 4096 * 4096 + 3 * 4096 * 11_008 + 32_000 * 4096
    assert estimate.peak.categories["sharded_parameter"] == (split // 2 + 3 * 4096) * 4 // 2
    (note,) = [line for line in estimate.assumptions if "1F1B" in line]
    assert "pipeline stage 1 of 2 under 1F1B: 1 of 3 micro-batches in flight" in note


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reshard": "default"}, "with pp use reshard=never"),
        ({"sync": "each"}, "with pp use sync=last"),
        ({"extra_model": "gpt2"}, "beside a pipeline is not modelled"),
        ({"pp_stage": 3}, "3 is not one of the 3 pipeline stages"),
    ],
)
def test_what_no_schedule_does_is_refused(changes: dict[str, object], message: str) -> None:
    policy = PolicySpec.from_mapping({"seq_len": T, "reshard": "never", **changes})
    with pytest.raises(ModelError, match=message):
        estimate_memory(SPEC, MESH, policy)
