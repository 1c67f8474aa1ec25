"""A step estimated from the execution trace of a real gloo run, beside the estimator's own operators."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli import call

from fsdp2prof.errors import InputError, ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.simulate.program import Collective, Kernel, Program
from fsdp2prof.estimators.step import program_of
from fsdp2prof.estimators.timeline.execution_trace import program_of_trace
from fsdp2prof.readers.execution_trace import read_execution_trace

from .conftest import script_path, torchrun, training_environment

MESH = MeshSpec(dp_shard=2)
BESIDES = {
    "aten::copy_",
    "aten::add",
    "aten::add_",
    "aten::div_",
    "aten::randint",
    "aten::ones_like",
    "aten::_to_copy",
}
"""Gloo's own divisions and copies, the optimizer's counters, and what the batch is made of."""


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("observed")
    command = torchrun(script_path("observed"), 2, str(folder), "--steps", "2")
    done = subprocess.run(
        command, env=training_environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "et_rank0.json"


@pytest.fixture(scope="module")
def programs(observed: Path) -> tuple[Program, Program]:
    policy = PolicySpec.from_mapping(
        {
            "batch_size": 2,
            "seq_len": 8,
            "param_dtype": "bf16",
            "reduce_dtype": "fp32",
            "optimizer": "adamw",
            "wrap": ["Block"],
            "clip_grad": False,
        }
    )
    model = ModelSpec(source="support.observed_model:factory")
    return program_of_trace(read_execution_trace(observed), MESH, 16), program_of(model, MESH, policy)


def collectives(program: Program) -> Counter[Any]:
    made = [one for one in program.commands if isinstance(one, Collective)]
    return Counter(
        (one.op, one.payload_bytes, one.nelems_in, one.nelems_out, one.dtype, one.stream) for one in made
    )


def kernels(program: Program, kinds: tuple[str, ...]) -> Counter[Any]:
    found = [one for one in program.commands if isinstance(one, Kernel) and one.work is not None]
    return Counter(
        (one.op, one.work.shape, one.work.bytes, one.stream)
        for one in found
        if one.work is not None and one.work.kind in kinds and one.op not in BESIDES
    )


def test_operators_and_collectives_are_the_estimators_own(programs: tuple[Program, Program]) -> None:
    trace, own = programs
    assert (trace.parameters, trace.model_flops, trace.tokens) == (
        own.parameters,
        own.model_flops,
        own.tokens,
    )
    assert collectives(trace) == collectives(own)
    assert kernels(trace, ("matmul", "attention")) == kernels(own, ("matmul", "attention"))
    assert kernels(trace, ("copy",)) == kernels(own, ("copy",))
    pointwise, expected = kernels(trace, ("pointwise",)), kernels(own, ("pointwise",))
    assert sum((pointwise & expected).values()) >= 0.9 * sum(expected.values())


def test_a_trace_of_one_step_is_that_step(observed: Path, programs: tuple[Program, Program]) -> None:
    trace = read_execution_trace(observed)
    second = [node.id for node in trace.nodes if node.name == "FSDP::root_pre_forward"][1]
    alone = replace(trace, nodes=[node for node in trace.nodes if node.id < second])
    assert collectives(program_of_trace(alone, MESH, 16)) == collectives(programs[0])


def test_a_step_on_more_ranks_gathers_the_same_bytes(observed: Path) -> None:
    program = program_of_trace(read_execution_trace(observed), MeshSpec(dp_shard=8), 16)
    gathers = [one for one in program.commands if isinstance(one, Collective) and one.op == "all_gather"]
    assert sum(one.payload_bytes for one in gathers) == 6 * 2208 + 3072
    assert {one.group_size for one in gathers} == {8}
    assert {one.nelems_in for one in gathers} == {1104 // 8, 1536 // 8}


def test_the_command_line_says_what_it_rests_on(observed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = ("--execution-trace", observed, "--mesh", "dp_shard=8", "--hardware", "h100-sxm")
    ended = call(capfd, "estimate", "step", *given, "--batch-size", "2", "--seq-len", "8", "--format", "json")
    found = json.loads(ended.out)
    assert found["tokens_per_step"] == 8 * 16
    assert found["model"]["name"] == "execution trace et_rank0.json"
    assert "1.1.1-chakra" in found["assumptions"][0]
    assert {row["fqn"] for row in found["by_layer"]} == {"", "layers.0", "layers.1", "layers.2"}
    for more, said in (
        ((), "has no token count: add --batch-size and --seq-len"),
        (("--batch-size", "2", "--seq-len", "8", "--ac", "full"), "ac would have no effect"),
        (("--model", "gpt2"), "--model would have no effect"),
    ):
        ended = call(capfd, "estimate", "step", *given, *more)
        assert ended.code == 2
        assert said in ended.err, ended


def test_what_a_trace_does_not_say_is_refused(observed: Path, tmp_path: Path) -> None:
    trace = read_execution_trace(observed)
    for mesh, said in (
        (MeshSpec(dp_shard=2, tp=2), "keeps the tp, pp and cp"),
        (MeshSpec(dp_replicate=2, dp_shard=2), "without dp_replicate"),
    ):
        with pytest.raises(ModelError, match=said):
            program_of_trace(trace, mesh, 16)
    document = json.loads(observed.read_text())
    bad = tmp_path / "et.json"
    for spoilt, said in (
        ({**document, "schema": "2.0"}, "of schema 2.0"),
        ({**document, "nodes": []}, "without operators"),
        ({"traceEvents": []}, "not a PyTorch execution trace"),
    ):
        bad.write_text(json.dumps(spoilt))
        with pytest.raises(InputError, match=said):
            read_execution_trace(bad)
    bad.write_bytes(observed.read_bytes()[:100_000])
    with pytest.raises(InputError, match="not a PyTorch execution trace, or one cut off"):
        read_execution_trace(bad)
    document["nodes"] = [node for node in document["nodes"] if not node["name"].startswith("FSDP::")]
    bad.write_text(json.dumps(document))
    with pytest.raises(ModelError, match="no labels of FSDP2"):
        program_of_trace(read_execution_trace(bad), MESH, 16)
