"""What a fake execution allocates, against what FSDP2 is known to allocate, worked out by hand.

The model: three blocks ``Linear(64, 64)`` and a head ``Linear(64, 3)`` of the root, on 4 ranks, parameters in
fp32, gathered in bf16, reduced in fp32. A block has 4096 elements, a shard 1024. The head's 3 rows of 64 are
one row a rank on the first three: padded to 4 rows, 256 elements, a shard 64.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist
from support.torch_versions import TENSOR_PARALLEL_SHARDS_UNEVENLY
from torch.distributed.fsdp import FSDPModule

from fsdp2prof.analyzers.memory.attribution import attribute
from fsdp2prof.analyzers.memory.categories import categorize
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.allocator.cuda_kernels import BLAS_WORKSPACE_BYTES, as_on_cuda
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.engine import Execution, execute
from fsdp2prof.manifest import RankManifest
from fsdp2prof.tables.allocations import AllocationTable
from fsdp2prof.tables.columns import NEVER

SPEC = ModelSpec(source="support.linear_model:factory")
MESH = MeshSpec(dp_shard=4)
POLICY = PolicySpec(seq_len=8, batch_size=2)
COPY_IN, REDUCE_SCATTER, ALL_REDUCE = 1, 2, 3


def allocations_of(execution: Execution) -> AllocationTable:
    recording = execution.recording
    attributed = attribute(recording, recording.steps)
    return categorize(attributed, RankManifest(tensors=execution.tensors), recording.end_ns)


def in_step(allocations: AllocationTable, step: int, fqn: str, category: str) -> Counter:
    """(bytes, stream) of the allocations of one module and category in a step."""
    rows = (allocations.step == step) & allocations.fqn.equals(fqn) & allocations.category.equals(category)
    return Counter(zip(allocations.size[rows].tolist(), allocations.stream[rows].tolist(), strict=True))


@pytest.fixture(scope="module")
def run() -> Execution:
    return execute(SPEC, MESH, POLICY)


def test_states_are_sharded_and_padded(run: Execution) -> None:
    held: Counter[tuple[str, str | None]] = Counter()
    for tensor in run.tensors:
        if not tensor.name.endswith("step"):
            held[tensor.category, tensor.fqn] += tensor.nbytes
    for block in ("layers.0", "layers.1", "layers.2"):
        assert held["sharded_parameter", block] == 1024 * 4
        assert held["optimizer_state", block] == 2 * 1024 * 4
        assert held["sharded_gradient", block] == 1024 * 4
    # The head's shard is one row of 64, its padded storage too; the gradient's storage is the padded one.
    assert held["sharded_parameter", ""] == held["sharded_gradient", ""] == 64 * 4


def test_a_block_is_gathered_in_forward_and_again_in_backward(run: Execution) -> None:
    allocations = allocations_of(run)
    # Twice: a bf16 copy of the shard and the gathered output, both on the copy-in stream.
    assert in_step(allocations, 2, "layers.1", "all_gather_buffer") == {
        (1024 * 2, COPY_IN): 2,
        (4096 * 2, COPY_IN): 2,
    }
    assert in_step(allocations, 2, "layers.1", "unsharded_parameter") == {(4096 * 2, 0): 2}
    # The root stays gathered between its forward and its backward.
    assert in_step(allocations, 2, "", "all_gather_buffer") == {(64 * 2, COPY_IN): 1, (256 * 2, COPY_IN): 1}


def test_gradients_are_reduced_on_a_stream_of_their_own(run: Execution) -> None:
    allocations = allocations_of(run)
    assert in_step(allocations, 2, "layers.1", "unsharded_gradient") == {(4096 * 2, 0): 1}
    assert in_step(allocations, 2, "layers.1", "reduce_scatter_buffer") == {(4096 * 4, 0): 1}
    assert in_step(allocations, 2, "layers.1", "sharded_gradient") == {(1024 * 4, REDUCE_SCATTER): 1}


def test_replicas_accumulate_in_the_reduce_dtype_before_they_cast() -> None:
    mesh = MeshSpec(dp_replicate=2, dp_shard=4)
    allocations = allocations_of(execute(SPEC, mesh, replace(POLICY, reduce_dtype="bfloat16")))
    # The bf16 output is all-reduced in place and cast to fp32 on the all-reduce stream.
    assert in_step(allocations, 2, "layers.1", "sharded_gradient") == {(1024 * 4, ALL_REDUCE): 1}
    assert in_step(allocations, 2, "layers.1", "reduce_scatter_buffer")[1024 * 2, REDUCE_SCATTER] == 1


def test_no_gradient_sync_keeps_whole_gradients_in_the_reduce_dtype() -> None:
    allocations = allocations_of(execute(SPEC, MESH, replace(POLICY, grad_accum=2)))
    kept = in_step(allocations, 2, "layers.1", "unsharded_gradient")
    assert kept[4096 * 4, 0] == 1
    assert sum(in_step(allocations, 2, "layers.1", "sharded_gradient").values()) == 1


def test_a_gather_nobody_waits_for_is_dropped_after_backward() -> None:
    frozen = execute(SPEC, MESH, replace(POLICY, trainable=r"layers\.1"))
    allocations = allocations_of(frozen)
    assert in_step(allocations, 2, "layers.1", "sharded_gradient")
    assert not in_step(allocations, 2, "layers.0", "sharded_gradient")


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"separate_reduce_scatter_group": True}, "set_separate_reduce_scatter_group"),
        ({"reduce_scatter_buffers": 2}, "set_reduce_scatter_max_input_buffers"),
    ],
)
def test_what_the_installed_torch_does_not_have_is_refused(changes, method, monkeypatch) -> None:
    monkeypatch.delattr(FSDPModule, method, raising=False)
    with pytest.raises(ModelError, match=rf"torch .* has no FSDPModule.{method}: leave the option out"):
        execute(SPEC, MESH, replace(POLICY, **changes))


def test_uneven_tensor_parallel_parts_are_sharded_or_refused_in_one_line() -> None:
    """Five ranks do not divide what two tensor-parallel ones leave of 4096 rows."""
    policy, mesh = replace(POLICY, seq_len=16), MeshSpec(dp_shard=5, tp=2)
    spec = ModelSpec(source="llama3-8b", layers=1)
    if TENSOR_PARALLEL_SHARDS_UNEVENLY:
        assert execute(spec, mesh, policy).recording.allocations.size.sum() > 0
    else:
        with pytest.raises(ModelError, match=r"cannot shard .*uneven"):
            execute(spec, mesh, policy)


def test_reshard_to_fewer_ranks_keeps_a_part() -> None:
    allocations = allocations_of(execute(SPEC, MESH, replace(POLICY, reshard=2)))
    assert in_step(allocations, 2, "layers.1", "unsharded_parameter")[4096 * 2 // 2, 0] == 1


def test_offload_moves_states_to_the_host_and_copies_shards_to_the_device() -> None:
    run = execute(SPEC, MESH, replace(POLICY, offload=True))
    on_host = np.isin(run.recording.allocations.address, list(run.host))
    states = [t for t in run.tensors if t.nbytes > 4]
    assert {t.address for t in states} <= run.host
    device = allocations_of(
        replace(run, recording=replace(run.recording, allocations=run.recording.allocations.take(~on_host)))
    )
    # Before each gather the fp32 shard is copied over, then cast, then gathered; the host is stream 1 here.
    assert in_step(device, 2, "layers.1", "all_gather_buffer") == {
        (1024 * 4, COPY_IN + 1): 2,
        (1024 * 2, COPY_IN + 1): 2,
        (4096 * 2, COPY_IN + 1): 2,
    }


def test_step_counters_lie_on_the_host_unless_the_optimizer_is_fused(run: Execution) -> None:
    assert len(run.host) == 4 + 1  # one a parameter, and the mark of the host's stream
    fused = execute(SPEC, MESH, replace(POLICY, optimizer_impl="fused"))
    assert len(fused.host) == 1


def test_matrix_products_take_a_workspace_for_good(run: Execution) -> None:
    allocations = as_on_cuda(run.recording, run.host).allocations
    workspaces = allocations.size == BLAS_WORKSPACE_BYTES
    assert allocations.op.take(workspaces).to_list() == ["aten::mm (workspace)"] * 2
    assert allocations.free_order[workspaces].tolist() == [NEVER, NEVER]
    assert np.all(np.diff(allocations.alloc_order) > 0)


def test_flash_attention_accumulates_its_query_gradient_in_fp32() -> None:
    run = execute(ModelSpec(source="gpt2", layers=1), MeshSpec(dp_shard=2), replace(POLICY, seq_len=128))
    allocations = as_on_cuda(run.recording, run.host).allocations
    backward = allocations.op.matches(lambda name: "flash_attention_for_cpu_backward" in name)
    work = allocations.op.matches(lambda name: name.endswith("_backward (workspace)"))
    # B 2, S 128, 12 heads of 64: bf16 results of the three gradients, an fp32 accumulator of one.
    elements = 2 * 128 * 12 * 64
    assert set(allocations.size[backward & ~work].tolist()) == {2 * elements}
    assert allocations.size[work].tolist() == [4 * elements] * 2
    assert (allocations.free_order[work] - allocations.alloc_order[work]).tolist() == [1, 1]


def test_the_process_is_left_as_it_was(run: Execution) -> None:
    assert not dist.is_initialized()


def test_a_foreign_model_that_fails_is_named_in_one_line() -> None:
    with pytest.raises(
        ModelError, match=r"support.linear_model:broken: its training step failed .* KeyError"
    ):
        execute(ModelSpec(source="support.linear_model:broken"), MESH, POLICY)
    assert not dist.is_initialized()
