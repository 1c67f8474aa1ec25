"""Calibration on a run of known costs: a simulated device of one kind, calibrated on by another's figures."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from fsdp2prof.analyzers.trace.analysis import analyze_tables
from fsdp2prof.analyzers.trace.rank_tables import rank_tables
from fsdp2prof.analyzers.whatif.recorded import program_of as recorded_program
from fsdp2prof.analyzers.whatif.what_if import replay_job
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.extra_models import ExtraModel, ExtraModels
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.of_run.calibration import calibration_of
from fsdp2prof.estimators.step import program_of, simulate_program
from fsdp2prof.estimators.timeline.calibrated import Calibration

MODEL, MESH = ModelSpec(source="llama3-8b", layers=2), MeshSpec(dp_shard=8)
SMALL, LARGE = PolicySpec(seq_len=1024), PolicySpec(seq_len=1024, batch_size=2)
RECORDED, BELIEVED = (Cluster(hardware=HardwareSpec.parse(name)) for name in ("a100", "h100"))


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    """An A100's simulated step, compared with an H100's figures."""
    program = program_of(MODEL, MESH, SMALL)
    recorded = simulate_program(program, MODEL, MESH, SMALL, RECORDED)
    tables = rank_tables(recorded.trace)
    summary = analyze_tables(tables).summary
    job = replay_job([(recorded_program(tables, summary), summary)]).job
    return calibration_of([tables], job, program, BELIEVED, "an A100")


@pytest.mark.parametrize(
    "policy", [SMALL, LARGE, replace(SMALL, reshard="never")], ids=["same", "batch", "never"]
)
def test_what_was_measured_wins_over_what_is_believed(calibration: Calibration, policy: PolicySpec) -> None:
    program = program_of(MODEL, MESH, policy)
    true = simulate_program(program, MODEL, MESH, policy, RECORDED).estimate.step_ns
    cold = simulate_program(program, MODEL, MESH, policy, BELIEVED).estimate.step_ns
    made = simulate_program(program, MODEL, MESH, policy, BELIEVED, calibration).estimate
    assert made.step_ns == pytest.approx(true, rel=0.05)
    assert abs(cold / true - 1) > 0.2
    assert any("calibrated on an A100" in line for line in made.assumptions)


def test_a_calibrated_step_says_which_other_models_run(calibration: Calibration) -> None:
    program = program_of(MODEL, MESH, SMALL)
    policy = replace(SMALL, extra_model=ExtraModels((ExtraModel(source="gpt2"),)))
    made = simulate_program(program, MODEL, MESH, policy, BELIEVED, calibration).estimate
    assert any(line.startswith("gpt2 ") and "runs forward only" in line for line in made.assumptions)


def test_a_collective_of_another_size_or_group_follows_the_recorded_ones() -> None:
    known = Calibration(
        source="by hand",
        on_host=False,
        kernel_factor={},
        operator_ns={},
        rest_ns=0,
        collectives={("all_gather", 2): [(1_000, 30), (2_000, 50)], ("all_reduce", 2): [(1_000, 40)]},
        low_frac=1.0,
        high_frac=1.0,
        steps=1,
    )
    assert known.collective_ns("all_gather", 2, 1_000) == 30
    assert known.collective_ns("all_gather", 2, 4_000) == 90  # 10 at no size, 20 for each 1,000
    assert known.collective_ns("all_gather", 4, 1_000) == 45  # 3/4 of it is sent instead of 1/2
    assert known.collective_ns("all_reduce", 2, 500) == 20
    assert known.collective_ns("reduce_scatter", 2, 500) is None


def blocks(layers: int = 3) -> nn.Module:
    """A factory that takes a number of layers."""
    return nn.Sequential(nn.Embedding(8, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(layers)))


def fixed() -> nn.Module:
    """One that does not."""
    return nn.Embedding(8, 4)


def test_layers_reach_a_factory_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("factories")
    module.blocks, module.fixed = blocks, fixed
    monkeypatch.setitem(sys.modules, "factories", module)
    built = build_model(ModelSpec(source="factories:blocks", layers=5), seq_len=8)
    assert len(built.blocks) == 5
    assert all(parameter.device == torch.device("meta") for parameter in built.module.parameters())
    with pytest.raises(ModelError, match="without an argument `layers` decides their number"):
        build_model(ModelSpec(source="factories:fixed", layers=5), seq_len=8)
