"""Planted faults come first with their remedy, and nothing is proposed where nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp2prof.workflows.check import check_run
from lab.devices import DEVICES
from lab.judge import judge
from lab.memories import MEMORIES
from lab.traces import TRACES
from lab.trainings import PACKAGES, TRAININGS

CASES = {one.name: one for one in [*TRACES, *DEVICES, *MEMORIES, *TRAININGS]}


def test_every_fault_has_a_truth() -> None:
    """A fault that costs much has causes and a remedy that can be judged; names are unique."""
    assert len(CASES) == len(TRACES) + len(DEVICES) + len(MEMORIES) + len(TRAININGS)
    for one in CASES.values():
        assert (one.size == "much") <= (bool(one.causes) and bool(one.remedy)), one.name
        assert (one.training is None) != (one.write is None), one.name


def test_the_laboratory_is_large_enough() -> None:
    faults = [one for one in CASES.values() if one.size == "much"]
    assert len(faults) >= 40
    assert len({one.fault for one in faults}) >= 20
    assert sum(one.size == "healthy" for one in CASES.values()) >= 20


QUICK = [
    "cuda/loader-all/much",
    "cuda/loader-one/much",
    "cuda/straggler/much",
    "cuda/host-bound/much",
    "cuda/whole/much",
    "cuda/full-tensor/much",
    "cuda/metric/much",
    "cuda/evaluation/much",
    "cuda/root/much",
    "cuda/loader-one/little",
    "cuda/sync/little",
    "cuda/metric/little",
    "cuda/healthy/plain",
    "cuda/healthy/hsdp",
    "cuda/healthy/accumulation",
    "cuda/healthy/async",
    "device/late-host-bare/much",
    "device/slow-group/much",
    "device/pcie/much",
    "device/allocator/much",
    "device/logging/much",
    "device/elementwise/much",
    "device/copies/much",
    "device/pageable/much",
    "device/offload-bare/much",
    "device/launches/little",
    "device/queued/little",
    "device/healthy/alone-bare",
    "device/healthy/rccl-old",
    "device/healthy/unlabelled-unnamed",
    "device/healthy/thirty-two",
    "memory/logits/much",
    "memory/activations/little",
    "memory/no-sync/much",
    "memory/prefetch/much",
    "memory/fragmentation/much",
    "memory/leak/much",
]
"""A part of the laboratory that takes seconds."""

TRAINED = [
    f"cpu/{name}/much"
    for name in (
        "loader-all",
        "sync",
        "whole",
        "tiny",
        "root",
        "full-tensor",
        "state-dict",
        "barrier",
        "evaluation",
        "clip",
        "save",
        "unbalanced",
    )
]
"""Trainings whose planted fault outweighs what else runs on the machine."""

OF_THE_MACHINE = {"host_pause", "straggler", "starved_host", "data_loader", "ranks_take_turns"}
"""Causes that a busy machine has, whatever it trains."""


@pytest.mark.parametrize("name", QUICK)
def test_the_first_cause_and_its_remedy_are_right(name: str, tmp_path: Path) -> None:
    found = judge(CASES[name], tmp_path)
    assert (found.cause_right, found.remedy_right) == (True, True), found
    if found.size != "much":
        assert found.false == [], found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in CASES.items() if one.write and name not in QUICK])
def test_every_other_trace_and_snapshot(name: str, tmp_path: Path) -> None:
    found = judge(CASES[name], tmp_path)
    assert (found.cause_right, found.remedy_right) == (True, True), found
    if found.size != "much":
        assert found.false == [], found


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_faults_of_real_trainings_are_named(name: str, tmp_path: Path) -> None:
    found = judge(CASES[name], tmp_path)
    assert (found.cause_right, found.remedy_right) == (True, True), found


@pytest.mark.slow
@pytest.mark.parametrize("program", PACKAGES)
def test_real_programs_pass_and_are_not_told_of_memory(program: str, tmp_path: Path) -> None:
    """Two gloo ranks under ``record``; what a busy machine does to them is not judged here."""
    pytest.importorskip(PACKAGES[program])
    found = judge(CASES[f"program/{program}"], tmp_path)
    assert set(found.false) <= OF_THE_MACHINE, found
    assert not [one for one in check_run(tmp_path / "planted").findings if one.severity == "high"]
