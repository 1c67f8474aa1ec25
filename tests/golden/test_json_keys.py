"""The JSON contract: keys may be added, never renamed or removed.

``*.keys`` list every key of a schema as a path (``ranks[].steps[].step``). A new field gets its line there.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.results import (
    memory_analysis,
    memory_comparison,
    run_analysis,
    run_comparison,
    trace_analysis,
)
from support.traces import two_kernel_trace

from fsdp2prof import results
from fsdp2prof.analyzers.hta.critical_path import critical_path
from fsdp2prof.analyzers.hta.idle_causes import idle_causes
from fsdp2prof.analyzers.hta.launch_statistics import launch_statistics
from fsdp2prof.analyzers.hta.trace_diff import trace_diff
from fsdp2prof.estimators.checkpoint import estimate_checkpoint
from fsdp2prof.estimators.communication import estimate_comm
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.spec.cluster import Cluster
from fsdp2prof.estimators.spec.hardware import HardwareSpec
from fsdp2prof.estimators.spec.mesh import MeshSpec
from fsdp2prof.estimators.spec.model import ModelSpec
from fsdp2prof.estimators.spec.policy import PolicySpec
from fsdp2prof.estimators.step import estimate_step
from fsdp2prof.reporters.documents import BUILDERS, build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "json.md"
MODEL, MESH = ModelSpec(source="gpt2", layers=1), MeshSpec(dp_shard=2)
POLICY = PolicySpec(seq_len=16)

SCHEMAS = {
    "trace": (results.TraceAnalysis, "fsdp2prof.trace/1", trace_analysis),
    "memory": (results.MemoryAnalysis, "fsdp2prof.memory/1", memory_analysis),
    "memory_comparison": (results.MemoryComparison, "fsdp2prof.memory_comparison/1", memory_comparison),
    "compare": (results.RunComparison, "fsdp2prof.compare/1", run_comparison),
    "run_analysis": (results.RunAnalysis, "fsdp2prof.run_analysis/1", run_analysis),
    "memory_estimate": (
        results.MemoryEstimate,
        "fsdp2prof.estimate.memory/1",
        lambda: estimate_memory(MODEL, MESH, POLICY),
    ),
    "comm_estimate": (
        results.CommEstimate,
        "fsdp2prof.estimate.comm/1",
        lambda: estimate_comm(MODEL, MESH, POLICY),
    ),
    "step_estimate": (
        results.StepEstimate,
        "fsdp2prof.estimate.step/1",
        lambda: estimate_step(MODEL, MESH, POLICY, Cluster(hardware=HardwareSpec.parse("h100"))),
    ),
    "checkpoint_estimate": (
        results.CheckpointEstimate,
        "fsdp2prof.estimate.checkpoint/1",
        lambda: estimate_checkpoint(MODEL, MESH, POLICY),
    ),
    "critical_path": (
        results.CriticalPath,
        "fsdp2prof.trace.critical_path/1",
        lambda: critical_path(two_kernel_trace()),
    ),
    "launch_statistics": (
        results.LaunchStatistics,
        "fsdp2prof.trace.launch_statistics/1",
        lambda: launch_statistics(two_kernel_trace()),
    ),
    "idle_causes": (
        results.IdleCauses,
        "fsdp2prof.trace.idle_causes/1",
        lambda: idle_causes(two_kernel_trace()),
    ),
    "trace_diff": (
        results.TraceDiff,
        "fsdp2prof.trace.diff/1",
        lambda: trace_diff(two_kernel_trace(), two_kernel_trace()),
    ),
}


def as_json(result: Any) -> str:
    return str(RENDERERS["json"].render(build(result), RenderOptions()))


def declared_keys(kind: Any, path: str = "") -> Iterator[str]:
    """Key paths of a result type, through lists, optionals and nested dataclasses."""
    if dataclasses.is_dataclass(kind):
        for name, hint in typing.get_type_hints(kind).items():
            if name != "__slots__":
                here = f"{path}.{name}" if path else name
                yield here
                yield from declared_keys(hint, here)
    elif typing.get_origin(kind) is list:
        yield from declared_keys(typing.get_args(kind)[0], f"{path}[]")
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for option in typing.get_args(kind):
            yield from declared_keys(option, path)


def written_keys(value: Any, declared: set[str], path: str = "") -> Iterator[str]:
    """Key paths of a JSON document, down to where the keys are data (ranks, categories, evidence)."""
    if isinstance(value, list):
        for item in value:
            yield from written_keys(item, declared, f"{path}[]")
    elif isinstance(value, dict) and (not path or any(key.startswith(f"{path}.") for key in declared)):
        for name, item in value.items():
            here = f"{path}.{name}" if path else name
            yield here
            yield from written_keys(item, declared, here)


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_key_was_renamed_or_removed(name: str) -> None:
    kind, _, _ = SCHEMAS[name]
    frozen = (HERE / f"{name}.keys").read_text().split()
    assert set(frozen) - set(declared_keys(kind)) == set()


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_document_has_exactly_the_declared_keys(name: str) -> None:
    kind, schema, sample = SCHEMAS[name]
    document = json.loads(as_json(sample()))
    declared = set(declared_keys(kind))
    written = set(written_keys(document, declared))
    assert document["schema"] == schema
    assert written <= declared
    top = {field.name for field in dataclasses.fields(kind)}
    assert top <= written


def test_every_schema_that_can_be_printed_is_frozen_and_documented() -> None:
    """A result that has a document has its keys here and its line in the docs."""
    frozen = {kind: schema for kind, schema, _ in SCHEMAS.values()}
    row = r"^\|.*\| `(fsdp2prof\.[^`]+)` \| `(\w+)` \|$"
    documented = dict(re.findall(row, DOCS.read_text(), re.MULTILINE))
    assert set(BUILDERS) <= set(frozen)
    assert documented == {schema: kind.__name__ for kind, schema in frozen.items()}
    assert {path.stem for path in HERE.glob("*.keys")} == set(SCHEMAS)


def test_integers_are_written_exactly() -> None:
    """2**53 + 1 survives: a float would lose its last bit."""
    analysis = trace_analysis()
    rank = analysis.ranks[0]
    communication = dataclasses.replace(rank.communication, total_ns=2**53 + 1)
    exact = dataclasses.replace(analysis, ranks=[dataclasses.replace(rank, communication=communication)])
    assert '"total_ns": 9007199254740993' in as_json(exact)
