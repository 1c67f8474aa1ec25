"""``estimate step --calibrate`` on a real gloo recording: its own step and its order of events."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli import call
from torch import nn

from fsdp2prof.analyzers.whatif.what_if import RecordedRank, replay_job
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.of_run.calibration import calibration_of, recorded_configuration, recorded_cpus
from fsdp2prof.estimators.step import StepPrediction, predict_step, program_of
from fsdp2prof.estimators.timeline.calibrated import Calibration
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.job.job_files import open_job
from fsdp2prof.workflows.whatif import recorded_ranks

Recorded = Callable[[str, int], Any]
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_tiny_fsdp2.py"
MODEL = ModelSpec(source="test_calibrated_step:tiny")


def tiny() -> nn.Module:
    """The example's model."""
    example: Any = runpy.run_path(str(EXAMPLE))
    made: nn.Module = example["TinyTransformer"](1024, 128, 4, 4)
    return made


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's factory lies beside this test."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@cache
def calibrated(run: Path) -> tuple[Calibration, tuple[RecordedRank, ...]]:
    ranks, _ = recorded_ranks(open_job(run))
    job = replay_job([(one.program, one.analysis.summary) for one in ranks]).job
    model, mesh, policy = recorded_configuration(ranks[0].tables, MODEL, PolicySpec(clip_grad=False))
    program = program_of(model, mesh, policy)
    tables = [one.tables for one in ranks]
    return calibration_of(tables, job, program, recorded_cpus(mesh), str(run)), tuple(ranks)


def predict(run: Path, **changed: Any) -> StepPrediction:
    calibration, ranks = calibrated(run)
    model, mesh, policy = recorded_configuration(ranks[0].tables, MODEL, PolicySpec(clip_grad=False))
    return predict_step(model, mesh, replace(policy, **changed), recorded_cpus(mesh), calibration)


def collectives_of_a_step(rank: RecordedRank) -> list[tuple[str | None, str | None, str | None]]:
    """(op, layer, phase) in the order of their start, of the first analysed step."""
    table = rank.tables.collectives.table
    rows = [i for i, step in enumerate(table.step.tolist()) if step == rank.tables.windows.step[0]]
    return [(table.op[i], table.fqn[i], table.phase[i]) for i in rows]


def test_a_run_calibrated_on_itself_gives_back_its_mean_step(recorded: Recorded) -> None:
    run = recorded("train_tiny_fsdp2", 2).run
    step = analyze_trace(open_job(run)).totals.step_ns
    assert predict(run).estimate.step_ns == pytest.approx(step, rel=0.02)


def test_the_predicted_order_of_collectives_is_the_recorded_one(recorded: Recorded, tmp_path: Path) -> None:
    run = recorded("train_tiny_fsdp2", 2).run
    from fsdp2prof.workflows.saved_estimates import save_step_run

    save_step_run(tmp_path / "predicted", predict(run))
    (predicted,), _ = recorded_ranks(open_job(tmp_path / "predicted"))
    for rank in calibrated(run)[1]:
        assert collectives_of_a_step(predicted) == collectives_of_a_step(rank)


def test_twice_the_batch_sends_as_much_and_computes_more(recorded: Recorded) -> None:
    run = recorded("train_tiny_fsdp2", 2).run
    same, twice = predict(run).estimate, predict(run, batch_size=8).estimate
    assert twice.kernels_ns["matmul"] == pytest.approx(2 * same.kernels_ns["matmul"], rel=0.4)
    assert twice.step_ns > same.step_ns
    exposed = [sum(row.total_ns for row in one.by_layer) for one in (same, twice)]
    assert exposed[0] == pytest.approx(exposed[1], rel=1e-6)


def test_the_saved_run_says_what_the_estimate_says_to_the_nanosecond(
    recorded: Recorded, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, saved = recorded("train_tiny_fsdp2", 2).run, tmp_path / "saved"
    options: list[str | Path] = ["--model", MODEL.source, "--mesh", "dp_shard=2", "--batch-size", "4"]
    options += ["--seq-len", "64"]
    options += ["--no-clip-grad", "--optimizer-impl", "for-loop", "--calibrate", run, "--save-run", saved]
    ended = call(capfd, "estimate", "step", *options, "--format", "json")
    assert ended.code == 0, ended
    estimate = json.loads(ended.out)
    analysis = json.loads(call(capfd, "analyze", "trace", saved, "--format", "json").out)
    assert analysis["totals"]["step_ns"] == estimate["step_ns"]
    assert analysis["ranks"][0]["steps"][0]["breakdown_ns"] == estimate["breakdown_ns"]
    assert analysis["by_layer"] == estimate["by_layer"]


def test_a_folder_of_traces_says_too_little_to_calibrate_on(
    recorded: Recorded, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = next(recorded("train_tiny_fsdp2", 2).run.glob("rank-00000/trace*"))
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "rank0.json.gz").write_bytes(trace.read_bytes())
    options = ["--model", "gpt2", "--layers", "1", "--mesh", "dp_shard=2", "--seq-len", "16"]
    ended = call(capfd, "estimate", "step", *options, "--calibrate", tmp_path / "traces")
    ended.refused("calibration needs a run recorded by fsdp2prof")


def test_a_model_without_attention_has_its_batch_from_its_embedding(recorded: Recorded) -> None:
    """Without the attention's shapes the embedding's say the same."""
    _, ranks = calibrated(recorded("train_tiny_fsdp2", 2).run)
    tables = ranks[0].tables
    names = tables.trace.events.name.take(tables.trace.shapes.event).to_list()
    rows = np.flatnonzero([name is not None and "attention" not in name for name in names])
    assert 0 < len(rows) < len(names)
    blind = replace(tables.trace, shapes=tables.trace.shapes.take(rows))
    known = recorded_configuration(tables, MODEL)
    assert recorded_configuration(replace(tables, trace=blind), MODEL) == known
    nothing = replace(tables.trace, shapes=tables.trace.shapes.take(rows[:0]))
    with pytest.raises(ModelError, match="of an attention or of an embedding"):
        recorded_configuration(replace(tables, trace=nothing), MODEL)
