"""Trainings recorded on an H100 or H200: a planted fault comes first, and healthy trainings get no advice.

Two traced steps each of ``python train.py``, without memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from fsdp2prof.results.run import RunAnalysis
from fsdp2prof.workflows.analyze import analyze_run
from fsdp2prof.workflows.job.job_files import open_job

FAULTS = Path(__file__).parents[1] / "data" / "gpu" / "faults"


@dataclass(frozen=True, slots=True)
class Fault:
    """A recording, and what is wrong with it."""

    name: str
    cause: str
    remedy: str
    gain_ms: float
    """What a step of the same script without its fault was shorter, both unrecorded."""


RECORDED = [
    Fault("eager_attention", "attention_scores", "scaled_dot_product_attention", 50.3),
    Fault("float32_attention", "attention_in_float32", "bfloat16", 53.5),
    Fault("channels_first", "layout_conversions", "channels_last", 10.6),
    Fault("many_units", "wrapping_too_fine", "whole blocks", 89.8),
    Fault("unfrozen_teacher", "backward_untrained", "torch.no_grad", 43.6),
    Fault("indexed_table", "indexed_gradients", "nn.functional.embedding", 15.6),
    Fault("sliced_logits", "sliced_gradients", "unbind, split", 44.5),
    Fault("float32_similarity", "float32_without_tensor_cores", "set_float32_matmul_precision", 28.9),
    Fault("forward_for_metrics", "forward_without_backward", r"train\.py:\d+ in fit_one\(\)", 29.8),
    Fault("statistics_of_weights", "host_sync", r"train\.py:\d+ in log\(\) out of the step", 51.4),
]


def analysed(name: str) -> RunAnalysis:
    return analyze_run(open_job(FAULTS / name))


@pytest.mark.parametrize("fault", RECORDED, ids=lambda fault: fault.name)
def test_the_fault_comes_first_with_its_remedy_and_about_its_gain(fault: Fault) -> None:
    trace = analysed(fault.name).trace
    assert trace is not None
    assert trace.ledger is not None
    first = trace.ledger.entries[0]
    assert first.told
    assert first.id == fault.cause
    assert first.remedy is not None
    assert re.search(fault.remedy, first.remedy.change)
    assert first.remedy.gain_ns is not None
    # A bound holds time that tracing stretched, an estimate is for the part that is certain to go.
    assert 0.5 * fault.gain_ms <= first.remedy.gain_ns / 1e6 <= 1.5 * fault.gain_ms


def test_a_prefetched_batch_that_holds_up_small_copies_is_to_be_split() -> None:
    """The batch has a stream of its own already, and is copied a step ahead: that is not proposed."""
    trace = analysed("copies_in_front").trace
    assert trace is not None
    assert trace.ledger is not None
    first = trace.ledger.entries[0]
    assert first.id == "host_copies"
    assert first.remedy is not None
    assert "in chunks" in first.remedy.change


@pytest.mark.parametrize("name", ["healthy_gpt", "healthy_vit", "healthy_moe", "healthy_chunked_loss"])
def test_healthy_trainings_are_told_nothing(name: str) -> None:
    analysis = analysed(name)
    assert analysis.trace is not None
    assert analysis.trace.ledger is not None
    assert [entry.id for entry in analysis.trace.ledger.entries if entry.told] == []
    assert analysis.verdict[0].startswith("Nothing to fix was found")
