"""Predicted against published peak memory of real FSDP2 runs.

    python benchmarks/accuracy.py PUBLISHED.csv [ID ...]
    python benchmarks/accuracy.py --experts
    python benchmarks/accuracy.py --throughput PUBLISHED.csv [ID ...]

The second form predicts the run of a mixture of experts that docs/accuracy.md tells of, the third is about
speed: see benchmarks/throughput.py.

The table (or the environment variable FSDP2PROF_PUBLISHED_PEAKS) has a row a run, with the columns that
docs/accuracy.md explains, with what does rest on rows. What a row does not say comes from one stack a source.
"""

from __future__ import annotations

import csv
import os
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from msgspec import structs

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.catalog import builtin_config
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.config.stacks import with_stack
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.torch_rules import TorchRules

GIB = 1 << 30

STACKS = {
    "torchtitan commit": "torchtitan-2025-02",
    "torchao float8nocompile README": "torchtitan-2024-12",  # January 2025
    "torchtitan benchmarks": "torchtitan-2024-12-slurm",  # up to 512 GPUs: the multi-node launcher, inferred
}
"""The software of each source, by the beginning of its name."""

FIXED = "torchtitan-2024-12"
"""One setting for all rows: what is predicted without knowing who launched them, and how."""


@dataclass(frozen=True)
class Published:
    """One published run."""

    id: str
    kind: str
    """``eager``, ``compile``, ``float8``, ``tp`` or ``cp``."""
    model: ModelSpec
    mesh: MeshSpec
    stack: str
    options: dict[str, Any]
    """What the row says of the policy; the stack says the rest."""
    reserved_gib: float
    gpus: int

    def policy(self, stack: str) -> PolicySpec:
        """The run's policy with the software of a stack."""
        return PolicySpec.from_mapping(with_stack(stack, self.options))


EXPERTS = (63.55, 78.14)
"""GiB that torchtitan f738a03bf publishes of DeepSeek-V3 16B on 8 GPUs after the first and the tenth step."""


def experts() -> None:
    """Predict both steps of that run as its configuration had it before the evening of the log, and after."""
    model, mesh = ModelSpec(source="deepseek-v3-16b"), MeshSpec(dp_shard=8, ep=8)
    given = {
        "batch_size": 8,
        "seq_len": 4096,
        "wrap": "block,GroupedExperts,tok_embeddings,norm+output",
        "forward_prefetch": 1,
        "backward_prefetch": 1,
        "attention": "efficient",
    }
    print(f"{'ac':6}{'loss':10}{'norm':10}{'load':>5}{'step 1':>8}{'of it':>9}{'step 10':>9}{'of it':>9}")
    for ac, loss, norm, load in (
        ("full", "full", "fused", 1.0),
        ("full", "full", "fused", 1.5),
        ("full", "full", "composed", 1.0),
        ("op", "compiled", "fused", 1.0),
        ("op", "full", "fused", 1.0),
    ):
        options = {**given, "ac": ac, "loss": loss, "norm": norm, "imbalance": load}
        policy = PolicySpec.from_mapping(with_stack("torchtitan-2025-08", options))
        steps = [step.reserved_bytes / GIB for step in estimate_memory(model, mesh, policy).steps]
        pairs = zip(steps, EXPERTS, strict=True)
        found = "".join(f"{step:8.2f}{100 * (step / told - 1):+8.2f}%" for step, told in pairs)
        print(f"{ac:6}{loss:10}{norm:10}{load:5.1f}{found}", flush=True)


def read(path: Path) -> Iterator[Published]:
    """Read the table."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            mesh = MeshSpec.parse(row["mesh"])
            compiled, float8 = row["compile"] == "yes", None if row["float8"] == "no" else row["float8"]
            reshard = row["reshard_after_forward"]
            kind = "cp" if "cp=" in row["mesh"] else "tp" if mesh.tp > 1 else "float8" if float8 else None
            yield Published(
                id=row["id"],
                kind=kind or ("compile" if compiled else "eager"),
                model=ModelSpec(source=row["model"]),
                mesh=mesh,
                stack=_stack(row["source"]),
                options={
                    "batch_size": int(row["batch_per_gpu"]),
                    "seq_len": int(row["seq_len"]),
                    "ac": row["activation_checkpointing"],
                    "reshard": "torchtitan" if reshard == "default" else reshard,
                    "param_dtype": row["param_dtype"],
                    "reduce_dtype": row["reduce_dtype"],
                    "optimizer": row["optimizer"],
                    "compile": compiled,
                    "float8": float8,
                    "fp8_all_gather": float8 == "tensorwise",
                },
                reserved_gib=float(row["peak_reserved_gib"]),
                gpus=int(row["gpus"]),
            )


def _stack(source: str) -> str:
    return next(stack for start, stack in STACKS.items() if source.startswith(start))


def predictions(run: Published) -> tuple[float, float]:
    """Reserved GiB with the run's own stack, and with the fixed one."""
    own, fixed = run.policy(run.stack), run.policy(FIXED)
    predicted = _predicted(run, own)
    same = _without_version(own) == _without_version(fixed)
    return predicted, predicted if same else _predicted(run, fixed)


def _predicted(run: Published, policy: PolicySpec) -> float:
    return estimate_memory(run.model, run.mesh, policy).peak.reserved_bytes / GIB


def _without_version(policy: PolicySpec) -> tuple[PolicySpec, TorchRules]:
    return replace(policy, torch=None), structs.replace(policy.rules, version="")


def formulas(run: Published, parameters: int, largest_layer: int) -> dict[str, float]:
    """Peak in GiB by the formulas in common use, none of which knows activations.

    ``16 B/param``: bf16 weight and gradient, fp32 master copy and Adam's moments, divided by the ranks.
    DeepSpeed: ``estimate_zero3_model_states_mem_needs`` without offload, 18 bytes a parameter divided by the
    ranks plus the largest layer in bf16 weights and gradients. accelerate: ``accelerate estimate-memory``,
    four times the fp32 weights (training with Adam), on one device.
    """
    return {
        "16 B/param": 16 * parameters / run.gpus / GIB,
        "DeepSpeed": (4 * largest_layer + 18 * parameters / run.gpus) / GIB,
        "accelerate": 16 * parameters / GIB,
    }


def main() -> None:
    """Print the table and the errors of each class."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] == "--throughput":
        runpy.run_path(str(Path(__file__).with_name("throughput.py")))["main"](arguments[1:])
        return
    if arguments == ["--experts"]:
        experts()
        return
    named = [arguments.pop(0)] if arguments and arguments[0].endswith(".csv") else []
    path = Path(named[0] if named else os.environ["FSDP2PROF_PUBLISHED_PEAKS"])
    errors: dict[str, list[tuple[float, float]]] = {}
    names = "  16 B/param DeepSpeed accelerate"
    print(f"{'id':5}{'class':9}{'published':>10}{'predicted':>10}{'error':>8}{'fixed':>8} {names}")
    for run in read(path):
        if arguments and run.id not in arguments:
            continue
        parameters = builtin_config(run.model.source).parameters
        naive = formulas(
            run,
            parameters,
            builtin_config(run.model.source).vocab_size * builtin_config(run.model.source).dim,
        )
        others = "".join(f"{100 * (value / run.reserved_gib - 1):+10.0f}%" for value in naive.values())
        try:
            predicted, fixed = predictions(run)
        except ModelError as refusal:
            print(f"{run.id:5}{run.kind:9}{run.reserved_gib:10.2f}   refused: {refusal}")
            continue
        error, at_fixed = predicted / run.reserved_gib - 1, fixed / run.reserved_gib - 1
        errors.setdefault(run.kind, []).append((abs(error), abs(at_fixed)))
        print(
            f"{run.id:5}{run.kind:9}{run.reserved_gib:10.2f}{predicted:10.2f}{100 * error:+7.2f}%"
            f"{100 * at_fixed:+7.2f}% {others}",
            flush=True,
        )
    for kind, found in errors.items():
        for name, of in (("own stack", 0), (FIXED, 1)):
            sizes = [pair[of] for pair in found]
            print(
                f"{kind}, {name}: mean {100 * mean(sizes):.2f}%, max {100 * max(sizes):.2f}% of {len(sizes)}"
            )


if __name__ == "__main__":
    main()
