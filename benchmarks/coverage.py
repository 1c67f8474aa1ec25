"""How often the printed ranges hold published numbers, by source left out.

    python -m benchmarks.coverage [--seconds N] [--cache FILE] [TABLE.csv ...]

The rows of ``benchmarks/data`` are always read; tables with the same columns as those of accuracy.py,
throughput.py or of other trainers (``loss`` among the columns) may be added. A prediction takes seconds to a
minute, so each is kept in the cache as soon as it is made: with ``--seconds`` the run stops then, and the
next one goes on. Delete the cache after a change of the estimators.

A range has two parts: the alternatives of everything that is not stated, evaluated, and a margin for what
the model itself misses. The score of a row is the margin that it needs: of memory the distance from the
nearer end of the evaluated alternatives over that end, of speed the distance from the prediction in units of
the simulated range. The margin of a class is a percentile of the scores: of a memory the lowest of the 85th,
90th and 95th with which 85 % of the rows of left-out sources are inside (the 85th if none is enough); a speed
has a margin for slower steps and one for faster ones, each the 95th. Every source has the same weight
regardless of its number of rows. Each source's rows are then evaluated with the margin derived from the other
sources. A row with known software is predicted a second time with the software left unspecified (``t1?``).
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.catalog import builtin_config
from fsdp2prof.estimators.config.measured import Measured, fitted
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.config.shares import range_end
from fsdp2prof.estimators.config.stacks import with_stack
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.simulate.program import has_experts
from fsdp2prof.estimators.step import prior_of, program_of, sensitivities, simulate_program
from fsdp2prof.estimators.verdict.memory_range import PREDICTION, memory_class
from fsdp2prof.estimators.verdict.step_range import speed_class

from . import throughput
from .accuracy import read
from .later import TABLE, policy_of

GIB = 1 << 30
WANTED = 0.85
"""Share of rows that a range should hold."""
LEVELS = (WANTED, 0.90, 0.95)
"""Percentiles of which the margin of a memory is one."""
OF_A_SIDE = 0.95
"""Share of rows that each margin of a speed is drawn at: a source left out holds fewer than the others."""
NOISE = 0.02
"""Within which a published step repeats, as ``estimate step --measured`` has it."""
DATA = Path(__file__).with_name("data")
SPEED = tuple(DATA / f"throughput_{name}.csv" for name in ("found_later", "same_sources", "prime_rl"))


_SAME = {
    "llama3_h100_202412": "torchtitan benchmarks/llama3_h100_202412",
    "asyncTP_llama3_h100": "torchtitan benchmarks/asyncTP_llama3_h100",
    "float8nocompile": "torchao float8nocompile/README",
    "5940ddeb5": "torchtitan 5940ddeb5",
    "069bae286": "torchtitan 069bae286",
    "docs/source/workflows/training.md": "torchao docs/source/workflows/training.md",
    "trainy-whitefiber": "torchtitan benchmarks/llama3-8b_h200_202506_trainy-whitefiber",
    "KempnerForge": "KempnerForge 5666d0d16",
}
"""Part of a source's name -> the source."""
_CONTRADICTS_ITSELF = ("f09", "f10", "f11")
"""Rows whose growth from the first step to the tenth, 3.67 GiB, is half of what AdamW's states take on the 8
GPUs that their source names: whatever is predicted, one of their numbers is wrong."""


Margins = tuple[float, float]
"""Of slower steps and of faster ones; of memory twice the same."""


@dataclass(frozen=True)
class Outcome:
    """A published row and its prediction."""

    id: str
    source: str
    kind: str
    """Class of its range, as ranges.yaml names it."""
    error: float
    """Predicted over published, less one."""
    score: float
    """The margin that its range needs to hold it."""
    unit: float
    """How far off the end of its range is (of speed the slower) by a margin of 1, over the prediction."""
    alternatives: float
    """Half-width of the evaluated alternatives that no margin multiplies."""
    fast_unit: float = 0.0
    """Of speed: logarithm of the prediction over the fastest step that is simulated."""
    family: str = ""
    """Of a speed: accelerator and source, whose rows may anchor each other."""
    elasticities: Sequence[float] = ()
    """Of a step: how far it follows compute, links and host."""
    prior: Sequence[float] = ()
    """Standard deviations of the logarithms of these, before any measurement."""

    @property
    def is_speed(self) -> bool:
        """Whether its class has a margin for slower steps and one for faster ones."""
        return self.kind.startswith("speed")

    def half_width(self, margins: Margins) -> float:
        """Of the range with such margins, over the prediction."""
        slow, fast = margins
        if self.is_speed:
            return (slow * self.unit + 1 - math.exp(-fast * self.fast_unit)) / 2
        return slow * self.unit + self.alternatives

    def fits(self, margins: Margins) -> bool:
        """Whether the range with such margins holds it."""
        return self.score <= margins[self.error > 0]


_FIELDS = [one.name for one in fields(Outcome)]


@dataclass(frozen=True)
class Row:
    """A published row that can be predicted."""

    id: str
    source: str
    what: tuple[object, ...]
    """Everything that the prediction depends on."""
    predict: partial[Outcome]

    @property
    def key(self) -> str:
        """Names the prediction in the cache."""
        return hashlib.sha256(repr((self.id, self.what)).encode()).hexdigest()[:16]


def memory_rows(tables: Iterable[Path]) -> Iterator[Row]:
    """Rows of the tables that publish a peak."""
    for path in tables:
        columns = _columns(path)
        if "peak_gib" in columns:
            for row in _read(path):
                if row["id"] not in _CONTRADICTS_ITSELF:
                    model, mesh = ModelSpec(source=row["model"]), MeshSpec.parse(row["mesh"])
                    yield from _peaks(row["id"], row["source"], model, mesh, policy_of(row), row["peak_gib"])
        elif {"loss", "peak_reserved_gib"} <= columns:
            for row in _read(path):
                if row["peak_reserved_gib"] and "prime-rl" in row["source"] and row["certainty"] == "known":
                    yield from _peaks(row["id"], row["source"], *_of_prime_rl(row), row["peak_reserved_gib"])
        elif "activation_checkpointing" in columns:
            sources = {row["id"]: row["source"] for row in _read(path)}
            for run in read(path):
                policy = run.policy(run.stack)
                yield from _peaks(run.id, sources[run.id], run.model, run.mesh, policy, str(run.reserved_gib))


def _of_prime_rl(row: dict[str, str]) -> tuple[ModelSpec, MeshSpec, PolicySpec]:
    """A run of prime-rl by its stack; versions before August 2026 kept optimizer states on the device."""
    options = {
        "batch_size": int(row["batch_per_gpu"]),
        "seq_len": int(row["seq_len"]),
        "ac": row["activation_checkpointing"],
        "loss": row["loss"],
        "compile": row["compile"] == "yes",
        "optimizer_impl": row["optimizer"].rpartition("-")[2],
    }
    model = ModelSpec(source=row["model"].removeprefix("hf:"))
    tied = builtin_config(model.source).tied
    stack = "prime-rl-2026-01-sft" if row["loss"] == "full" else "prime-rl-2026"
    policy = PolicySpec.from_mapping(with_stack(stack, options, tied=tied))
    return model, MeshSpec.parse(row["mesh"]), policy


def _peaks(
    name: str, source: str, model: ModelSpec, mesh: MeshSpec, policy: PolicySpec, published_gib: str
) -> Iterator[Row]:
    """A row as its stack says it, and as somebody describes it who does not know the software."""
    yield _peak(name, source, model, mesh, policy, float(published_gib))
    if _class_of(model, mesh, policy) == "memory_with_software_stated":
        unknown = replace(policy, **_UNKNOWN_SOFTWARE)
        yield _peak(f"{name}?", source, model, mesh, unknown, float(published_gib))


def _class_of(model: ModelSpec, mesh: MeshSpec, policy: PolicySpec) -> str:
    has_experts = builtin_config(model.source).experts is not None
    return memory_class(mesh, policy, has_experts=has_experts)


_UNKNOWN_SOFTWARE: dict[str, Any] = {
    "torch": None,
    "allocator": None,
    "norm": None,
    "attention": "flash",
    "attention_is_saved": None,
    "ac_saves": None,
    "ac_recomputes": None,
    "record_streams": None,
    "keep_logits": None,
}
"""Options of the software and their defaults."""


def _peak(
    name: str, source: str, model: ModelSpec, mesh: MeshSpec, policy: PolicySpec, published_gib: float
) -> Row:
    what = (model, mesh, policy.to_mapping())
    return Row(
        name, _short(source), what, partial(_memory, name, _short(source), *what[:2], policy, published_gib)
    )


def _memory(
    name: str, source: str, model: ModelSpec, mesh: MeshSpec, policy: PolicySpec, published_gib: float
) -> Outcome:
    made = estimate_memory(model, mesh, policy)
    low, high, peak = made.reserved_low_bytes, made.reserved_high_bytes, made.peak.reserved_bytes
    assert low is not None
    assert high is not None
    margin = next(one for one in made.unknowns if one.name == PREDICTION)
    published = published_gib * GIB
    least, most = low - margin.low_bytes, high - margin.high_bytes
    return Outcome(
        id=name,
        source=source,
        kind=_class_of(model, mesh, policy),
        error=peak / published - 1,
        score=max(1 - published / least, published / most - 1, 0),
        unit=(least + most) / 2 / peak,
        alternatives=(most - least) / 2 / peak,
    )


def speed_rows(tables: Iterable[Path]) -> Iterator[Row]:
    """Rows of the tables that publish a speed; of those with one id the first.

    Those that cannot be predicted are named by their refusal.
    """
    known: set[str] = set()
    for path in tables:
        columns = _columns(path)
        if not {"tokens_per_s_per_gpu", "interconnect"} <= columns:
            continue
        for found in _read(path):
            if found["id"] in known:
                continue
            known.add(found["id"])
            yield Row(found["id"], _short(found["source"]), tuple(found.items()), partial(_speed, found))


def _speed(found: dict[str, str]) -> Outcome:
    row = throughput.read(found)
    program = program_of(row.model, row.mesh, row.policy)
    made = simulate_program(program, row.model, row.mesh, row.policy, row.cluster).estimate
    anchor = (Measured(name="step_ms", value=1.0), program, row.model, row.mesh, row.policy)
    published_ns = made.step_ns * made.tokens_per_s_per_gpu / row.published
    low, high = made.range.simulated_low_ns, made.range.simulated_high_ns
    assert low is not None
    assert high is not None
    if published_ns > made.step_ns:
        score = (published_ns - made.step_ns) / max(1, high - made.step_ns)
    else:
        score = math.log(published_ns / made.step_ns) / min(-1e-9, math.log(low / made.step_ns))
    return Outcome(
        id=found["id"],
        source=_short(found["source"]),
        kind=speed_class(row.mesh, row.policy, row.cluster.hardware, experts=has_experts(program)),
        error=made.step_ns / published_ns - 1,
        score=score,
        unit=(high - made.step_ns) / made.step_ns,
        alternatives=0.0,
        fast_unit=math.log(made.step_ns / low),
        family=" ".join(row.family),
        elasticities=sensitivities(anchor, row.cluster)[1],
        prior=prior_of(row.cluster, [anchor]),
    )


def _columns(path: Path) -> set[str]:
    return set(path.read_text().partition("\n")[0].split(","))


def _read(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def _short(source: str) -> str:
    """A source by its commit or its file, without what a row says besides; tables name some differently."""
    short = source.partition("(")[0].strip()
    return next((name for part, name in _SAME.items() if part in short), short)


def margins_of(outcomes: Sequence[Outcome]) -> Margins:
    """Margins that rows of a class need."""
    if not any(one.is_speed for one in outcomes):
        both = margin_of(outcomes, _level_of(outcomes))
        return both, both
    slow, fast = (
        margin_of(
            [one if (one.error > 0) is faster else replace(one, score=0.0) for one in outcomes],
            OF_A_SIDE,
        )
        for faster in (False, True)
    )
    return slow, fast


def _level_of(outcomes: Sequence[Outcome]) -> float:
    """The lowest percentile at which sources hold the wanted share of each other's rows."""
    for level in LEVELS:
        inside = [
            own.score <= margin_of([one for one in outcomes if one.source != own.source], level)
            for own in outcomes
            if any(one.source != own.source for one in outcomes)
        ]
        if inside and mean(inside) >= WANTED:
            return level
    return LEVELS[0]


def margin_of(outcomes: Iterable[Outcome], wanted: float) -> float:
    """The point below which a share of the scores lies, each source weighing the same."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        by_source[outcome.source].append(outcome.score)
    weighed = sorted(
        (score, 1 / len(by_source) / len(scores)) for scores in by_source.values() for score in scores
    )
    total = 0.0
    for score, weight in weighed:
        total += weight
        if total >= wanted - 1e-9:
            return score
    return weighed[-1][0]


def held_out(outcomes: Sequence[Outcome]) -> Mapping[str, tuple[Margins, list[bool]]]:
    """Source -> the margins of the others, and which of its rows they hold; nothing for a single source."""
    found = {}
    for source in sorted({one.source for one in outcomes}):
        others = [one for one in outcomes if one.source != source]
        if others:
            margins = margins_of(others)
            found[source] = margins, [one.fits(margins) for one in outcomes if one.source == source]
    return found


def predictions(rows: Iterable[Row], cache: Path, seconds: float) -> tuple[list[Outcome], int]:
    """Outcomes of the rows, those of the cache without predicting again, and how many are left."""
    known: dict[str, dict[str, object]] = {}
    if cache.exists():
        for line in cache.read_text().splitlines():
            entry = json.loads(line)
            known[entry.pop("key")] = entry
    cache.parent.mkdir(parents=True, exist_ok=True)
    outcomes, left, began = [], 0, time.monotonic()
    for row in rows:
        entry = known.get(row.key)
        if entry is None:
            if time.monotonic() - began > seconds:
                left += 1
                continue
            try:
                entry = asdict(row.predict())
            except ModelError as refusal:
                entry = {"refused": str(refusal)}
            with cache.open("a") as file:
                file.write(json.dumps({"key": row.key, **entry}) + "\n")
        if "refused" in entry:
            print(f"{row.id:6}not predicted: {entry['refused']}", flush=True)
            continue
        kept = {name: entry[name] for name in _FIELDS if name in entry}
        outcomes.append(Outcome(**{**kept, "source": row.source}))
        print(_line(outcomes[-1]), flush=True)
    return outcomes, left


def _line(one: Outcome) -> str:
    held = "inside" if one.fits(_printed(one.kind)) else "outside"
    return f"{one.id:6}{one.error:+8.1%}  score {one.score:6.3f}  {held:8}{one.kind:33}{one.source[:60]}"


def _printed(kind: str) -> Margins:
    end = range_end(kind)
    return end.value, end.value if end.fast is None else end.fast


def show(kind: str, outcomes: Sequence[Outcome]) -> None:
    """Print a class: coverage by source left out, and the margin that all of its sources give."""
    margins, found = margins_of(outcomes), held_out(outcomes)
    print(f"\n{kind}: {len(outcomes)} rows of {len({one.source for one in outcomes})} sources")
    print(f"{'left out':70}{'margins of others':>17}{'rows inside':>13}")
    for source, ((slow, fast), own) in found.items():
        print(f"{source[:69]:70}{slow:9.3f}{fast:8.3f}{sum(own):9} of {len(own)}")
    if found:
        inside = [one for _, own in found.values() for one in own]
        sources = mean(mean(own) for _, own in found.values())
        print(
            f"held out: {mean(inside):.0%} of rows inside, {sources:.0%} with each source weighing the same"
        )
    of_sources = defaultdict(list)
    for one in outcomes:
        of_sources[one.source].append(1 / (1 + one.error))
    typical = median(map(median, of_sources.values()))
    print(f"published over predicted: {typical:.2f}, the median of the sources' medians")
    for name, value in (("of all its sources", margins), ("printed today", _printed(kind))):
        widths = [one.half_width(value) for one in outcomes]
        share = mean(one.fits(value) for one in outcomes)
        print(
            f"margins {name}: {value[0]:.3f}, {value[1]:.3f}; {share:.0%} of rows inside, "
            f"half-width {mean(widths):.1%} on average, {max(widths):.1%} at most"
        )


def show_anchoring(outcomes: Sequence[Outcome]) -> None:
    """Print what measurements of a family's other rows are worth for each of its rows."""
    families: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.family:
            families[outcome.family].append(outcome)
    cold: list[float] = []
    anchored: dict[str, list[float]] = {"one other row": [], "all other rows": []}
    for rows in families.values():
        for own in rows:
            others = [one for one in rows if one is not own]
            if not others:
                continue
            cold.append(abs(own.error))
            singly = [abs(_left(own, [one])) for one in others]
            anchored["one other row"].append(mean(singly))
            anchored["all other rows"].append(abs(_left(own, others)))
    if cold:
        print(f"\nanchoring, {len(cold)} rows with another of the same accelerator and source:")
        print(f"cold: mean error {mean(cold):.1%}")
        for name, errors in anchored.items():
            print(f"anchored on {name}: mean error {mean(errors):.1%}")


def _left(own: Outcome, others: Sequence[Outcome]) -> float:
    """A row's error once the others' measurements have corrected it, to the first order."""
    off = [-math.log(1 + one.error) for one in others]
    logs, _ = fitted([one.elasticities for one in others], off, own.prior, NOISE)
    change = sum(e * x for e, x in zip(own.elasticities, logs, strict=True))
    return (1 + own.error) * math.exp(change) - 1


def main() -> None:
    """Print coverage by source left out, class by class."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tables", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--cache", type=Path, default=Path("build/coverage.jsonl"))
    given = parser.parse_args()
    rows = [*memory_rows([TABLE, *given.tables]), *speed_rows([*SPEED, *given.tables])]
    outcomes, left = predictions(rows, given.cache, given.seconds)
    for kind in sorted({one.kind for one in outcomes}):
        show(kind, [one for one in outcomes if one.kind == kind])
    show_anchoring(outcomes)
    if left:
        print(f"\n{left} rows are left: run again to go on")


if __name__ == "__main__":
    main()
