"""Predicted against published peaks that were found after the estimator was built.

    python benchmarks/later.py [ID ...]

``data/published_later.csv`` has a row a run: the model, the mesh, the stack of its source, what the source
says besides (options of ``estimate memory``, ``;`` between), the peak after the first step where it is
published, and the peak. docs/accuracy.md tells what the rows are and why some are missed.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.catalog import builtin_config
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.config.stacks import with_stack
from fsdp2prof.estimators.memory import estimate_memory

GIB = 1 << 30
TABLE = Path(__file__).parent / "data" / "published_later.csv"
WORDS: dict[str, Any] = {"yes": True, "no": False}
OWN_OPTIONS = "-"
"""Stack of a row whose options say all."""


def options_of(text: str) -> dict[str, Any]:
    """``batch_size=1;compile=yes`` as options of a policy."""
    pairs = (pair.partition("=") for pair in text.split(";"))
    return {name: int(value) if value.isdigit() else WORDS.get(value, value) for name, _, value in pairs}


def policy_of(row: dict[str, str]) -> PolicySpec:
    """The policy of a row: its stack, and what its source says besides."""
    pipelined, tied = MeshSpec.parse(row["mesh"]).pp > 1, builtin_config(row["model"]).tied
    options = options_of(row["options"])
    if row["stack"] == OWN_OPTIONS:
        return PolicySpec.from_mapping(options)
    return PolicySpec.from_mapping(with_stack(row["stack"], options, tied=tied, pipelined=pipelined))


def main(ids: list[str]) -> None:
    """Print a line a row, and the mean error."""
    errors: list[float] = []
    with TABLE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if not ids or row["id"] in ids]
    for row in rows:
        told = float(row["peak_gib"])
        try:
            found = estimate_memory(
                ModelSpec(source=row["model"]), MeshSpec.parse(row["mesh"]), policy_of(row)
            )
        except ModelError as refusal:
            print(f"{row['id']:5}{told:8.2f}  refused: {refusal}", flush=True)
            continue
        peak = found.peak.reserved_bytes / GIB
        errors.append(100 * (peak / told - 1))
        first = ""
        if row["step1_gib"]:
            step = found.steps[0].reserved_bytes / GIB
            first = f"  step 1 {float(row['step1_gib']):6.2f} {step:6.2f}"
        print(f"{row['id']:5}{told:8.2f}{peak:8.2f}{errors[-1]:+8.2f} %{first}  {row['run']}", flush=True)
    if errors:
        print(f"{len(errors)} rows, mean error {mean(map(abs, errors)):.2f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
