"""Predicted against published bandwidth of NCCL's collectives.

    python benchmarks/collectives.py [benchmarks/data/collectives_published.csv]

The table has a row a measurement of nccl-tests (or of a script with its definitions): busbw of an operation
over some GPUs at one payload. A source that says no payload is taken at 8 GiB. Nothing is fitted to it,
but for what :file:`hardware.yaml` names as its source.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec, NetworkSpec
from fsdp2prof.estimators.timeline.costs import transfer

_MIB = 1 << 20
_LARGE = 512 * _MIB


def predicted(row: dict[str, str]) -> float:
    """Bus bandwidth in GB/s that the model has for a row."""
    cluster = Cluster(
        hardware=HardwareSpec.parse(row["part"]),
        gpus_per_node=int(row["gpus_per_node"]),
        network=NetworkSpec.parse(row["network"]) if row["network"] else None,
        nics_per_node=int(row["nics_per_node"]) if row["nics_per_node"] else None,
    )
    ranks, payload = int(row["gpus"]), int(row["bytes"])
    taken = transfer(row["op"], payload, cluster.place(ranks, 1), cluster).ns
    passes = 2 if row["op"] == "all_reduce" else 1
    return passes * (ranks - 1) / ranks * payload / taken


def main(given: Sequence[str]) -> None:
    """Print every row, then the errors of each class."""
    path = Path(given[0]) if given else Path(__file__).with_name("data") / "collectives_published.csv"
    errors: dict[str, list[float]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found, published = predicted(row), float(row["busbw_gb_per_s"])
            error = found / published - 1
            ranks, payload = int(row["gpus"]), int(row["bytes"])
            size = f"{payload // _MIB} MiB"
            print(
                f"{row['part']:12}{ranks:5}{row['op']:>16}{size:>11}{published:8.1f}{found:8.1f}{error:+8.1%}"
            )
            where = "one node" if ranks <= int(row["gpus_per_node"]) else "several nodes"
            large = "512 MiB and more" if payload >= _LARGE else "less"
            errors[f"{row['op']}, {where}, {large}"].append(abs(error))
    for kind, found_errors in sorted(errors.items()):
        print(
            f"{kind}: mean {mean(found_errors):.1%}, largest {max(found_errors):.1%} of {len(found_errors)}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
