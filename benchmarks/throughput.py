"""Predicted against published speed of real FSDP2 runs.

    python benchmarks/throughput.py PUBLISHED.csv [ID ...]

The table (or the environment variable FSDP2PROF_PUBLISHED_THROUGHPUT) has a row a run: id, model, gpus, gpu,
interconnect, mesh, batch_per_gpu, seq_len, ac, reshard, compile, float8, tokens_per_s_per_gpu, source; where
a source says more, also stack (else the source's own) and options, as ``grad_accum=4 attention=cudnn``.
``benchmarks/data/throughput_found_later.csv`` is such a table, of runs found when the constants stood.
*Cold* uses data sheets and published measurements of the parts alone, and one stack of software a source;
whether the published speed lies in the printed range is said too. *Calibrated* multiplies every prediction by
the one factor that makes the first row of the same accelerator and source exact; that row is left out of its
errors.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.catalog import builtin_config
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec, NetworkSpec, known_hardware
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.config.stacks import with_stack
from fsdp2prof.estimators.step import estimate_step

PARTS = {
    "H100-SXM-96": "h100-sxm-96gb",
    "H100-96": "h100-sxm-96gb",
    "H100-SXM": "h100-sxm",
    "H200": "h200",
    "GB200": "gb200",
    "GB300": "gb300",
    "A100-40": "a100-40gb",
    "A100-SXM-40": "a100-40gb",
    "A100": "a100-80gb",
    "MI300X": "mi300x",
    "B200": "b200",
}
"""What a row calls its accelerator, by the beginning, the longest first -> its name here."""

THE_SOURCES_OWN = {("pytorch/ao", "h100-sxm"): "h100-sxm-96gb", ("pytorch/ao", "b200"): "b200-750w"}
"""A source's parts that are not the usual ones: torchao's ``roofline_utils.py`` gives its H100s 2.4 TB/s, a
variant; its B200s are limited to 750 W (pytorch/ao#3566)."""

STACKS = {
    "pytorch/torchtitan@b5bcd76c66:benchmarks/llama3_h100_202412": "torchtitan-2024-12-slurm",
    "pytorch/torchtitan@b5bcd76c66:benchmarks/asyncTP": "torchtitan-2025-06",
    "pytorch/torchtitan@015ccb237": "torchtitan-2024-07",
    "pytorch/torchtitan@": "torchtitan-2025-02",
    "pytorch/ao float8nocompile": "torchtitan-2024-12",
    "pytorch/ao@": "torchtitan-2025-06",
}
"""The software of each source, by the beginning of its name, the first that fits."""

FOUR_A_NODE = ("Perlmutter", "Kempner", "GB200", "GB300")
"""Words of a row's accelerator that say that its nodes have four."""

CUDNN_FIRST = ("b200", "b200-750w")
"""Parts on which torchtitan runs cuDNN's attention since May 2025 (pytorch/torchtitan#1196)."""

NETWORKS = {
    "XDR": "800gb-ib",
    "InfiniBand": "400gb-ib",
    "EFA": "400gb-efa",
    "RDMA": "400gb-roce",
    "RoCE": "400gb-roce",
    "Slingshot": "200gb-slingshot",
    "Ethernet": "100gb-eth",
}
"""A word of the row's interconnect -> the network's name here."""

INTERLEAVED = "interleaved:2"
"""Two stages a rank where torchtitan is given no split, and as many micro-batches as ranks
(``torchtitan/parallelisms/pipelining_utils.py`` at 9dec370)."""

WITH_ASYNC_TP = ("(table 5)", "(table 6)")
"""Tables of torchtitan's benchmark of December 2024 whose headings say asynchronous tensor parallelism."""

OWN_OPTIONS = "-"
"""Stack of a row whose options say all."""

UNSAID = {"?", ""}


@dataclass(frozen=True)
class Row:
    """One published run that can be predicted."""

    id: str
    kind: str
    family: tuple[str, str]
    """Accelerator and source: what one row calibrates the others of."""
    published: float
    model: ModelSpec
    mesh: MeshSpec
    policy: PolicySpec
    cluster: Cluster


def read(row: dict[str, str]) -> Row:
    """Understand a row. Raises ``ModelError`` with the reason why it cannot be predicted."""
    if row["ac"] in UNSAID or not row["batch_per_gpu"].isdecimal():
        raise ModelError("its checkpointing or its batch per GPU is not published")
    sizes = (part for part in row["mesh"].split() if "=" in part)
    mesh = MeshSpec.parse(",".join(sizes))
    named = (name for name in known_hardware() if row["gpu"].lower().startswith(name))
    part = next((name for start, name in PARTS.items() if row["gpu"].startswith(start)), next(named, None))
    if part is None:
        raise ModelError(f"accelerator {row['gpu']!r} is not known")
    source = row["source"].partition(" ")[0].partition("@")[0]
    part = THE_SOURCES_OWN.get((source, part), part)
    network = next((name for word, name in NETWORKS.items() if word in row["interconnect"]), None)
    cluster = Cluster(
        hardware=HardwareSpec.parse(part),
        gpus_per_node=72
        if "NVL72" in row["interconnect"]
        else next((4 for name in FOUR_A_NODE if name in row["gpu"]), 8),
        network=NetworkSpec.parse(network) if network else None,
    )
    float8 = row["float8"].partition("+")[0]
    compiled = row["compile"] == "yes"
    batch = int(row["batch_per_gpu"])
    reshard = row["reshard"].partition("(")[0]
    stack = row.get("stack") or next(
        (name for start, name in STACKS.items() if row["source"].startswith(start)), OWN_OPTIONS
    )
    micro_batches = mesh.pp if batch % mesh.pp == 0 else batch
    policy = {
        "batch_size": batch // micro_batches,
        "grad_accum": micro_batches,
        "seq_len": int(row["seq_len"]),
        "ac": row["ac"],
        "reshard": "torchtitan" if reshard == "default" else reshard,
        "reshard_root": False,
        "compile": compiled,
        "async_tp": "asyncTP" in row["mesh"] or any(table in row["source"] for table in WITH_ASYNC_TP),
        "float8": None if float8 == "no" else float8,
        "fp8_all_gather": float8 == "tensorwise",
    }
    if "interleaved" in row["mesh"]:
        policy["pp_schedule"] = INTERLEAVED
    if part in CUDNN_FIRST and not row.get("stack"):
        policy["attention"] = "cudnn"
    policy |= _options(row.get("options") or "")
    model = _model(row["model"])
    nodes = "nodes" if int(row["gpus"]) > cluster.gpus_per_node else None
    kind = "tp" if mesh.tp > 1 else "float8" if float8 != "no" else "compiled" if compiled else "eager"
    return Row(
        id=row["id"],
        kind=f"{kind}, several {nodes}" if nodes else kind,
        family=(row["gpu"], row["source"].partition(" ")[0].partition("(")[0]),
        published=float(row["tokens_per_s_per_gpu"]),
        model=ModelSpec(source=model),
        mesh=mesh,
        policy=PolicySpec.from_mapping(
            policy
            if stack == OWN_OPTIONS
            else with_stack(stack, policy, tied=_is_tied(model), pipelined=mesh.pp > 1)
        ),
        cluster=cluster,
    )


def _model(name: str) -> str:
    """A configuration beside the table, else a name."""
    return (
        str(Path(__file__).with_name("data") / name) if name.endswith(".json") else name.removeprefix("hf:")
    )


def _is_tied(model: str) -> bool:
    """Whether head and embedding share a parameter."""
    if model.endswith(".json"):
        return bool(json.loads(Path(model).read_text()).get("tie_word_embeddings"))
    return builtin_config(model).tied


def _options(text: str) -> dict[str, str | int | bool]:
    """``name=value`` of a policy, between spaces: numbers, yes and no, words."""
    made: dict[str, str | int | bool] = {}
    for option in text.split():
        name, _, value = option.partition("=")
        known: dict[str, str | int | bool] = {"yes": True, "no": False}
        made[name] = int(value) if value.isdecimal() else known.get(value, value)
    return made


def main(given: Sequence[str]) -> None:
    """Print the table and the errors of each class."""
    arguments = list(given)
    named = [arguments.pop(0)] if arguments and arguments[0].endswith(".csv") else []
    path = Path(named[0] if named else os.environ["FSDP2PROF_PUBLISHED_THROUGHPUT"])
    factors: dict[tuple[str, str], float] = {}
    cold: dict[str, list[float]] = defaultdict(list)
    calibrated: dict[str, list[float]] = defaultdict(list)
    covered: list[bool] = []
    print(
        f"{'id':7}{'class':26}{'published':>10}{'cold':>10}{'error':>8}{'calibrated':>11}"
        "  range, tokens/s per GPU"
    )
    with path.open(newline="") as file:
        for found in csv.DictReader(file):
            if arguments and found["id"] not in arguments:
                continue
            try:
                row = read(found)
                made = estimate_step(row.model, row.mesh, row.policy, row.cluster)
            except ModelError as refusal:
                print(f"{found['id']:7}not predicted: {refusal}", flush=True)
                continue
            speed = made.tokens_per_s_per_gpu
            ends = made.range.high_ns, made.range.low_ns
            slowest, fastest = (speed * made.step_ns / end for end in ends)
            inside = slowest <= row.published <= fastest
            covered.append(inside)
            error = speed / row.published - 1
            cold[row.kind].append(error)
            shown = "(reference)"
            if row.family in factors:
                tuned = speed * factors[row.family] / row.published - 1
                calibrated[row.kind].append(tuned)
                shown = f"{100 * tuned:+.1f}%"
            factors.setdefault(row.family, row.published / speed)
            line = f"{row.id:7}{row.kind:26}{row.published:10.0f}{speed:10.0f}{100 * error:+7.1f}%{shown:>11}"
            line += f"  {slowest:.0f} to {fastest:.0f}{'' if inside else ' (outside)'}"
            print(line, flush=True)
    print(f"inside the printed range: {sum(covered)} of {len(covered)}")
    for name, errors in (("cold", cold), ("calibrated", calibrated)):
        for kind, values in errors.items():
            sizes = [abs(value) for value in values]
            print(f"{name}, {kind}: mean {mean(sizes):.1%}, largest {max(sizes):.1%} of {len(sizes)}")


if __name__ == "__main__":
    main(sys.argv[1:])
