"""The step of a training whose shards live on the host: what goes over its link, and what the host runs."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.config.shares import HOST_CORE_GB_PER_S
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.simulate.program import HostWait, Kernel, Program
from fsdp2prof.estimators.step import estimate_step
from fsdp2prof.estimators.timeline.capture import capture_step

MODEL = ModelSpec(source="gpt2", layers=2)
RANKS = 4


@pytest.fixture(scope="module")
def program() -> Program:
    return capture_step(MODEL, MeshSpec(dp_shard=RANKS), PolicySpec(seq_len=32, offload=True))


def copied(program: Program, direction: str) -> int:
    works = [command.work for command in program.commands if isinstance(command, Kernel)]
    return sum(work.bytes for work in works if work is not None and work.kind == direction)


def test_every_shard_comes_over_the_link_for_each_gather_and_its_gradient_goes_back(program: Program) -> None:
    """In fp32: blocks twice, forward and backward; the rest once, it stays gathered; dimension 0 padded."""
    model = build_model(MODEL, seq_len=32)
    shards = {
        name: -(-parameter.shape[0] // RANKS) * parameter[0].numel() * 4
        for name, parameter in model.module.named_parameters()
    }
    blocks = sum(size for name, size in shards.items() if name.startswith("layers."))
    whole = sum(shards.values())
    assert copied(program, "host_to_device") == whole + blocks
    assert copied(program, "device_to_host") == whole


def test_the_optimizer_runs_on_the_host_once_the_gradients_are_there(program: Program) -> None:
    update = [c for c in program.commands if isinstance(c, Kernel) and "_foreach" in c.op and "norm" in c.op]
    assert update
    assert all(command.work is not None and command.work.kind == "host" for command in update)
    first = program.commands.index(update[0])
    assert any(isinstance(command, HostWait) for command in program.commands[:first])


@pytest.mark.parametrize(("implementation", "bytes_each"), [("fused", 32 + 12), ("foreach", 80 + 12)])
def test_the_optimizer_on_the_host_takes_what_its_bytes_take(implementation: str, bytes_each: int) -> None:
    """Fused AdamW reads four tensors and writes four, foreach many more; clipping moves 12 bytes."""
    policy = PolicySpec.from_mapping({"seq_len": 32, "optimizer_impl": implementation})
    mesh, cluster = MeshSpec(dp_shard=RANKS), Cluster(hardware=HardwareSpec.parse("h100"))
    on_device = estimate_step(MODEL, mesh, policy, cluster)
    on_host = estimate_step(MODEL, mesh, replace(policy, offload=True), cluster)
    elements = on_host.model.parameters / RANKS
    copies = 4 * 4 * elements / cluster.hardware.host_link_bytes_per_s
    seconds = bytes_each * elements / 1e9 / HOST_CORE_GB_PER_S
    assert (on_host.step_ns - on_device.step_ns) / 1e9 == pytest.approx(seconds, rel=0.1, abs=copies)
    assert on_host.bound_by == "host_optimizer"
    parts = asdict(on_host.breakdown_ns)
    assert sum(parts.values()) + on_host.bubble_ns == on_host.step_ns
    ledger = on_host.trace.ledger
    assert ledger is not None
    assert ledger.step_ns == on_host.step_ns
    assert ledger.entries[0].cause == "offload"
    assert "host_pause" not in {entry.cause for entry in ledger.entries}, "clipping is part of the update"
    assert ledger.entries[0].ns == pytest.approx(seconds * 1e9, rel=0.1, abs=copies * 1e9)
    assert on_host.range.low_ns < on_host.step_ns < on_host.range.high_ns
    assert any("OMP_NUM_THREADS" in line for line in on_host.range.unknown)


def test_state_of_the_optimizer_is_on_the_device_only_while_it_updates() -> None:
    """AdamW's two moments of a rank's shard, in fp32; the peak is in forward or backward without them."""
    mesh, policy = MeshSpec(dp_shard=RANKS), PolicySpec(seq_len=512)
    kept, moved = (
        estimate_memory(MODEL, mesh, replace(policy, offload_optimizer=offload)) for offload in (False, True)
    )
    state = kept.peak.categories["optimizer_state"]
    assert state > 0
    assert moved.peak.categories["optimizer_state"] < 0.01 * state, "but for counters"
    assert kept.peak.active_bytes - moved.peak.active_bytes == pytest.approx(state, rel=0.01)
    assert moved.host_bytes - kept.host_bytes == pytest.approx(state, rel=0.01)
    assert any("among the temporaries" in line for line in moved.assumptions)
    full = replace(policy, seq_len=64, ac="full")
    alone = MeshSpec(dp_shard=1)
    updates = [estimate_memory(MODEL, alone, replace(full, offload_optimizer=one)) for one in (False, True)]
    assert [one.peak.phase for one in updates] == ["optimizer", "optimizer"]
    proposed = [{option.action for option in one.remedies} for one in updates]
    assert ["fused_optimizer" in actions for actions in proposed] == [True, False], "state is temporary, too"
    program = capture_step(MODEL, mesh, replace(policy, offload_optimizer=True))
    assert copied(program, "host_to_device") == copied(program, "device_to_host")
    assert copied(program, "host_to_device") == pytest.approx(state, rel=0.01)


def test_what_forward_saves_is_on_the_host_until_backward_asks_for_it() -> None:
    """With full checkpointing a block saves its input: 1024 x 768 numbers in bf16; without, far more."""
    mesh, policy = MeshSpec(dp_shard=RANKS), PolicySpec(seq_len=1024, ac="full")
    deep = ModelSpec(source="gpt2", layers=6)
    inputs = 6 * 1024 * 768 * 2
    moved = replace(policy, offload_activations=True)
    assert inputs <= copied(capture_step(deep, mesh, moved), "device_to_host")
    host, counters = (estimate_memory(deep, mesh, one).host_bytes for one in (moved, policy))
    assert inputs <= host - counters
    kept = estimate_memory(deep, mesh, replace(policy, ac="none"))
    away = estimate_memory(deep, mesh, replace(moved, ac="none"))
    assert away.host_bytes > 10 * inputs
    assert kept.peak.active_bytes - away.peak.active_bytes > 5 * inputs


def test_logits_that_are_kept_stay_on_the_device() -> None:
    """They are the forward's result: the loss, which saves them, comes after it."""
    policy = PolicySpec.from_mapping({"seq_len": 1024, "ac": "full", "loss": "chunked-kept:4"})
    moved = capture_step(MODEL, MeshSpec(dp_shard=RANKS), replace(policy, offload_activations=True))
    assert copied(moved, "device_to_host") < 1024 * 50_257 * 2


def test_offloads_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ModelError, match="on the host already"):
        PolicySpec(seq_len=32, offload=True, offload_optimizer=True)
    with pytest.raises(ModelError, match="pipeline"):
        estimate_memory(
            ModelSpec(source="gpt2", layers=4),
            MeshSpec(dp_shard=2, pp=2),
            PolicySpec(seq_len=32, grad_accum=2, offload_activations=True),
        )
