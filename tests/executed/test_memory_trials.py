"""What is tried where a run does not fit: each change is an estimate of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.memory_trials import with_tried_changes

MODEL, MESH = ModelSpec(source="gpt2", layers=1), MeshSpec(dp_shard=2)
POLICY = PolicySpec(batch_size=32, seq_len=512, allocator="expandable")
H100 = HardwareSpec.parse("h100")


def device(size: int) -> HardwareSpec:
    """An accelerator with so many bytes, rounded down to whole MiB."""
    return structs.replace(H100, memory_mib=size >> 20)


def test_a_run_that_does_not_fit_ends_with_changes_that_do() -> None:
    free = estimate_memory(MODEL, MESH, POLICY)
    hardware = device(free.peak.active_bytes)
    estimate = estimate_memory(MODEL, MESH, POLICY, hardware=hardware)
    assert estimate.fit == "does_not_fit"
    made = with_tried_changes(estimate, MODEL, MESH, POLICY, hardware)
    fitting = [one for one in made.tried if one.fits]
    assert fitting
    assert len(made.advice) == len(fitting) <= 2
    first = fitting[0]
    again = estimate_memory(
        MODEL,
        MeshSpec(dp_shard=first.mesh.dp_shard or 1),
        PolicySpec.from_mapping({name: getattr(first.policy, name) for name in POLICY.to_mapping()}),
        hardware=hardware,
    )
    assert again.fits
    assert (again.peak.reserved_bytes, again.headroom_bytes) == (first.reserved_bytes, first.headroom_bytes)
    assert made.advice[0].startswith(f"fits, tried: {' with '.join(first.changes)}")


@pytest.mark.slow
def test_where_nothing_is_enough_the_smallest_is_named() -> None:
    hardware = device(1 << 30)
    estimate = estimate_memory(MODEL, MESH, POLICY, hardware=hardware)
    made = with_tried_changes(estimate, MODEL, MESH, POLICY, hardware)
    assert not any(one.fits for one in made.tried)
    assert len(made.advice) == 1


def test_a_run_that_fits_is_left_alone() -> None:
    estimate = estimate_memory(MODEL, MESH, POLICY, hardware=H100)
    assert with_tried_changes(estimate, MODEL, MESH, POLICY, H100) is estimate


def test_a_trial_that_costs_much_is_one() -> None:
    """What an execution allocates says how long the others take."""
    hardware = device(1 << 30)
    estimate = estimate_memory(MODEL, MESH, POLICY, hardware=hardware)
    cheap, dear = (
        with_tried_changes(estimate, MODEL, MESH, POLICY, hardware, allocations=count)
        for count in (50_000, 10**6)
    )
    assert (len(cheap.tried), len(dear.tried)) == (2, 1)
    assert dear.tried[0] == cheap.tried[0]


def test_an_estimate_that_is_known_is_not_made_again() -> None:
    hardware = device(1 << 30)
    estimate = estimate_memory(MODEL, MESH, POLICY, hardware=hardware)
    told: list[str] = []
    known = {replace(POLICY, ac="full"): replace(estimate, headroom_bytes=7)}
    made = with_tried_changes(
        estimate, MODEL, MESH, POLICY, hardware, allocations=10**6, known=known, progress=told.append
    )
    assert told == ["trying ac=full"]
    assert [(one.changes, one.headroom_bytes) for one in made.tried] == [(["ac=full"], 7)]
