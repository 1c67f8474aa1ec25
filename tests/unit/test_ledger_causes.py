"""Causes that more than one rule could take: each is charged to what a person can change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import msgspec
import pytest
from support.results import trace_analysis
from support.sharded_groups import sharded_group

from fsdp2prof.analyzers.ledger.account import with_ledger
from fsdp2prof.analyzers.ledger.book import UNTRACED
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.analyzers.ledger.words import _larger, _unexplained, bound, try_first
from fsdp2prof.analyzers.recorded_groups import repeated_units, untrained_units
from fsdp2prof.analyzers.trace.operators import KernelSum, additional_ns
from fsdp2prof.manifest import (
    DeviceInfo,
    HostStep,
    MachineInfo,
    OptimizerInfo,
    ProcessGroupInfo,
    RankManifest,
    RootInfo,
    StepInfo,
    UnshardedInfo,
)
from fsdp2prof.results.communication import LateRank, LateRanks
from fsdp2prof.results.ledger import Ledger, LedgerEntry
from fsdp2prof.results.step import UnrecordedStep
from fsdp2prof.results.trace import HostSyncRow, KernelRow

MS = 1_000_000


def ledger_of(
    found: Sequence[dict[str, Any]],
    manifests: Sequence[RankManifest] = (),
    *,
    device: str = "cuda",
    syncs: Sequence[HostSyncRow] = (),
    additional_ns: Mapping[int, int] | None = None,
    among: LateRanks | None = None,
    unrecorded: UnrecordedStep | None = None,
    only_step: int | None = None,
) -> Ledger:
    """Charge the same to every step of two ranks; what is left of its 50 ms is compute in forward."""
    analysis = trace_analysis()
    ranks = [replace(one, device_type=device) for one in analysis.ranks]
    if only_step is not None:
        ranks = [replace(one, steps=[replace(one.steps[0], step=only_step)]) for one in ranks]
    charges = []
    for rank in ranks:
        for step in rank.steps:
            at = {"rank": rank.rank, "step": step.step}
            here = [one for one in found if at.items() <= (at | one).items()]
            mine = [Charge(**(at | one)) for one in here]
            left = step.duration_ns - sum(one.ns for one in mine)
            charges += [
                *mine,
                Charge(rank=rank.rank, step=step.step, cause="compute", ns=left, phase="forward"),
            ]
    analysis = replace(analysis, ranks=ranks, unrecorded_step=unrecorded, host_syncs=list(syncs))
    analysis = replace(analysis, cross_rank=replace(analysis.cross_rank, late=among))
    ledger = with_ledger(analysis, charges, manifests, None, additional_ns).ledger
    assert ledger is not None
    assert sum(one.total_ns for one in ledger.entries) == ledger.total_ns
    return ledger


def told(ledger: Ledger) -> list[LedgerEntry]:
    return [one for one in ledger.entries if one.told]


def sharded(**fields: Any) -> RankManifest:
    """Four layers with two parameters of 2 and 4 KiB shards each, reduced by FSDP once a step."""
    groups = []
    for i in range(4):
        alike = [sharded_group(f"layers.{i}", [rows, 64], ranks=2, rows=rows // 2) for rows in (16, 32)]
        parameters = [
            msgspec.structs.replace(one.parameters[0], fqn=f"layers.{i}.{name}")
            for one, name in zip(alike, "ab", strict=True)
        ]
        groups.append(msgspec.structs.replace(alike[0], parameters=parameters, reductions=1, **fields))
    return RankManifest(param_groups=groups, roots=[RootInfo(root=0, micro_batches=1)])


@pytest.mark.parametrize(("median_ms", "left_ms"), [(50, 20), (45, 15), (35, 5), (20, 0)])
def test_tracing_takes_what_an_unrecorded_step_has_no_room_for(median_ms: int, left_ms: int) -> None:
    """Every traced step takes 50 ms, and for 20 of them nothing is launched."""
    times: dict[str, Any] = dict.fromkeys(
        ("median_ns", "lower_quartile_ns", "upper_quartile_ns", "min_ns", "max_ns"), median_ms * MS
    )
    unrecorded = UnrecordedStep(steps=7, **times, traced_median_ns=None, slowdown=None)
    ledger = ledger_of([{"cause": "host", "ns": 20 * MS, "phase": "forward"}], unrecorded=unrecorded)
    spent = {one.id: one.ns for one in ledger.entries}
    assert spent.get("host_bound", 0) == left_ms * MS
    assert spent.get("tracing", 0) == (20 - left_ms) * MS


@pytest.mark.parametrize(("sizes", "deleted"), [((2048, 4096), True), ((2048, 40), False), ((8, 8), False)])
def test_gradients_that_fsdp_reduced_are_not_to_be_reduced_at_all(
    sizes: tuple[int, int], deleted: bool
) -> None:
    """Payloads of the shards of gradients, or others."""
    reduced = [
        {"cause": "other_communication", "ns": 5 * MS, "op": "all_reduce", "count": 10, "bytes": 10 * size,
         "each_bytes": size, "site": "all_reduce() (train.py:7 in sync())"}
        for size in sizes
    ]  # fmt: skip
    (first,) = told(ledger_of(reduced, [sharded()]))
    assert first.id == "all_reduce_outside_fsdp"
    assert first.remedy is not None
    assert first.remedy.change.startswith("Delete all_reduce() (train.py:7 in sync())") == deleted


@pytest.mark.parametrize(
    ("nbytes", "count", "together"), [(2048, 10, True), (2048, 4, False), (512, 10, False)]
)
def test_gradients_of_ignored_parameters_are_reduced_together_and_not_less_often(
    nbytes: int, count: int, together: bool
) -> None:
    """Ten parameters of 2 KiB that FSDP ignores; all-reduces of that size, one for each, or others."""
    whole: dict[str, Any] = {
        "root": 0,
        "shape": [512],
        "dtype": "float32",
        "nbytes": 2048,
        "requires_grad": True,
    }
    ignored = [UnshardedInfo(kind="parameter", fqn=f"adapters.{i}", **whole) for i in range(10)]
    manifest = msgspec.structs.replace(sharded(), unsharded=ignored)
    reduced = {
        "cause": "other_communication",
        "ns": 5 * MS,
        "op": "all_reduce",
        "site": "all_reduce() (a.py:7 in f())",
    }
    reduced |= {"count": count, "bytes": count * nbytes, "each_bytes": nbytes}
    (first,) = told(ledger_of([reduced], [manifest]))
    assert first.remedy is not None
    assert ("Flatten these gradients" in first.remedy.change) == together
    assert ("less often" in first.remedy.change) != together


@pytest.mark.parametrize("phase", ["backward", "other"])
def test_all_reduces_of_forward_and_backward_are_the_models(phase: str) -> None:
    """Synchronized statistics cannot be had less often; metrics and norms can."""
    reduced = {"cause": "other_communication", "op": "all_reduce", "count": 10, "bytes": 1 << 20}
    found = [
        reduced | {"ns": ns, "phase": one, "at_once": at_once}
        for one in ("forward", phase)
        for ns, at_once in ((3 * MS, False), (2 * MS, True))
    ]
    (first,) = told(ledger_of(found, [sharded()]))
    assert first.remedy is not None
    assert ("GroupNorm" in first.remedy.change) is (phase == "backward")
    assert first.remedy.gain_ns == (4 * MS if phase == "backward" else 10 * MS)


def test_statistics_that_are_reduced_together_are_nothing_to_change() -> None:
    """A product runs between any two of them: each layer has one all-reduce in forward and in backward."""
    reduced = {"cause": "other_communication", "op": "all_reduce", "count": 10, "bytes": 1 << 20}
    found = [reduced | {"ns": 5 * MS, "phase": one} for one in ("forward", "backward")]
    assert not told(ledger_of(found, [sharded()]))


@pytest.mark.parametrize(
    ("site", "saves"),
    [
        ("save() (train.py:64 in epoch())", True),
        ("train.py:64 in save_checkpoint()", True),
        ("checkpoint/state.py:3 in _save_shard()", True),
        ("train.py:64 in checkpoint()", True),
        ("train.py:64 in write_checkpoint()", True),
        ("checkpoint() (model.py:64 in forward())", False),
        ("train.py:64 in train_with_checkpointing()", False),
        ("train.py:64 in log_metrics()", False),
    ],
)
def test_everything_at_a_line_that_saves_is_one_cause(site: str, saves: bool) -> None:
    parts = ("garbage_collection", "host_pause", "other_communication")
    found = [{"cause": cause, "ns": 4 * MS, "site": site, "op": "all_gather"} for cause in parts]
    entries = told(ledger_of(found))
    assert ([one.id for one in entries] == ["checkpoint_in_step"]) == saves
    if saves:
        assert (entries[0].ns, entries[0].evidence["site"]) == (12 * MS, site)


@pytest.mark.parametrize(("steps", "is_told"), [(1, False), (2, True)])
def test_a_checkpoint_in_one_step_of_several_may_be_one_of_every_few_hundred(
    steps: int, is_told: bool
) -> None:
    site = "train.py:64 in save_checkpoint()"
    numbers = [one.step for one in trace_analysis().ranks[0].steps]
    found = [{"cause": "host_pause", "ns": 20 * MS, "site": site, "step": step} for step in numbers[:steps]]
    ledger = ledger_of(found)
    (entry,) = [one for one in ledger.entries if one.id == "checkpoint_in_step"]
    assert entry.told is is_told
    often = "every step" if steps == len(numbers) else f"{steps} of {len(numbers)} traced steps"
    assert entry.said.startswith(f"A checkpoint is saved at {site} in {often}: ")


def test_a_synchronisation_names_its_line_and_takes_its_copies_along() -> None:
    line = "train.py:9 in log()"
    sync = HostSyncRow(
        rank=0, fqn=None, phase="other", call="cudaStreamSynchronize", operator="aten::item", count=8,
        blocked_ns=9 * MS, site=line,
    )  # fmt: skip
    copy = {"cause": "offload", "ns": 3 * MS, "op": "Memcpy DtoH (Device -> Pageable)", "count": 2}
    (first,) = told(ledger_of([{"cause": "sync", "ns": 6 * MS}, copy], syncs=[sync]))
    assert (first.id, first.ns) == ("host_sync", 9 * MS)
    assert first.remedy is not None
    assert line in first.said
    assert line in first.remedy.change


def test_waiting_for_offloaded_parameters_is_not_a_synchronisation_of_the_script() -> None:
    sync = HostSyncRow(
        rank=0,
        fqn=None,
        phase="backward",
        call="cudaStreamSynchronize",
        operator=None,
        count=8,
        blocked_ns=MS,
    )
    copy = {"cause": "offload", "ns": 3 * MS, "op": "Memcpy HtoD (Pinned -> Device)", "count": 2}
    found = [{"cause": "sync", "ns": 6 * MS}, copy]
    (first,) = told(ledger_of(found, [sharded(offload=True, offload_pin_memory=True)], syncs=[sync]))
    assert (first.id, first.ns) == ("cpu_offload", 9 * MS)


@pytest.mark.parametrize(
    ("site", "change"),
    [
        ("generation/utils.py:3235 in _sample()", r"^Keep the model gathered while it generates"),
        ("ppo.py:80 in rollout()", r"^Keep the model gathered while it generates"),
        (
            "train.py:80 in per_sample_error()",
            r"^Run the forward at train\.py:80 in per_sample_error\(\) every few hundred steps if it only",
        ),
        (
            "train.py:80 in validate()",
            r"^Run the forward at train\.py:80 in validate\(\) every few hundred steps if it only",
        ),
    ],
)
def test_generation_is_not_to_be_left_out(site: str, change: str) -> None:
    """Four layers are gathered in each of four forwards; where they stay gathered, less is said."""
    forwards = {"cause": "evaluation", "ns": 4 * MS, "count": 4, "site": site, "phase": "forward"}
    gathers = {"cause": "evaluation", "ns": 6 * MS, "count": 16, "op": "all_gather", "phase": "forward"}
    (first,) = told(ledger_of([forwards, gathers], [sharded()]))
    assert first.remedy is not None
    assert first.remedy.gain_ns == (6 if "Keep" in change else 10) * MS
    assert re.match(change, first.remedy.change)
    for count in (1, 4):  # a series may be the training's own, as rollouts are
        kept = told(ledger_of([forwards | {"count": count}, gathers | {"count": 0}], [sharded()]))
        named = ("validate" in site or "error" in site) and count == 1
        assert ["gathered" in one.remedy.change for one in kept if one.remedy] == [False] * named


@pytest.mark.parametrize(("again", "is_told"), [(90, True), (40, False)])
def test_tokens_that_generation_computes_again_are_gained(again: int, is_told: bool) -> None:
    """Twelve forwards of 100 tokens take 20 ms; the model stays gathered."""
    forwards = {"cause": "evaluation", "ns": 20 * MS, "count": 12, "site": "a.py:8 in rollout()"}
    counts = [
        {"cause": "evaluation", "ns": 0, "op": "rows", "why": why, "count": count}
        for why, count in (("rows", 100), ("again", again))
    ]
    found = told(ledger_of([forwards, *counts], [sharded()]))
    assert [one.remedy.gain_ns for one in found if one.remedy] == [18 * MS] * is_told
    assert all("use_cache=True" in one.remedy.change for one in found if one.remedy)


def test_a_forward_that_keeps_its_graph_is_a_finding() -> None:
    analysis = trace_analysis()
    charges = [
        Charge(rank=0, step=step.step, cause="evaluation", ns=MS, count=1, why=why, site="gan.py:6 in add()")
        for step, why in zip(analysis.ranks[0].steps, ("graph", None), strict=False)
    ]
    made = with_ledger(analysis, charges)
    (found,) = [one for one in made.findings if one.id == "graph_without_backward"]
    assert found.message.startswith("1 forward in the traced steps, called at gan.py:6 in add(), ran with")
    assert made.ledger is not None
    (entry,) = [one for one in made.ledger.entries if one.id == "forward_without_backward"]
    assert entry.remedy is not None
    assert entry.remedy.change.startswith(
        "Run the forward that no backward uses, called at gan.py:6 in add(), under torch.no_grad() (it"
    )


@pytest.mark.parametrize("in_turns", [True, False])
def test_a_forward_for_another_model_that_is_updated_in_turns_is_not_to_be_left_out(in_turns: bool) -> None:
    """The generator runs forward alone in the first step, which updates the discriminator (or both)."""
    analysis = trace_analysis()
    first, *_ = sorted(step.step for step in analysis.ranks[0].steps)
    reduced = [
        replace(row, op="reduce_scatter", fqn=f"{root}:layers.0", step=step.step, count=1)
        for row in analysis.groups[:1]
        for step in analysis.ranks[0].steps
        for root in ("root0", "root1")
        if not (in_turns and root == "root0" and step.step == first)
    ]
    charges = [
        Charge(rank=rank.rank, step=step.step, cause=cause, ns=ns, count=1, phase="forward")
        for rank in analysis.ranks
        for step in rank.steps
        for cause, ns in (("evaluation", 20 * MS if step.step == first else 0), ("compute", 30 * MS))
        if ns
    ]
    ledger = with_ledger(replace(analysis, groups=reduced), charges).ledger
    assert ledger is not None
    assert [one.id for one in told(ledger)] == ([] if in_turns else ["forward_without_backward"])


def test_units_that_are_gathered_again_and_again_are_one_cause() -> None:
    gathers = [
        {"cause": "communication", "ns": 4 * MS, "op": "all_gather", "fqn": f"layers.{i}"} for i in range(4)
    ]
    (first,) = told(ledger_of(gathers, [sharded(gathers=8, forwards=4, evaluations=0)]))
    assert (first.id, first.ns) == ("gathered_repeatedly", 12 * MS)
    assert "4 units are gathered 8 times per step, although 2 would suffice" in first.said
    several = sharded(gathers=8, forwards=4, evaluations=0)
    root = msgspec.structs.replace(several.param_groups[0], fqn="", gathers=1)
    several.param_groups.append(root)
    (first,) = told(ledger_of(gathers, [several]))
    assert first.said.startswith(
        "The model runs forward 4 times before one backward, so 4 units are gathered"
    )
    assert first.remedy is not None
    assert "fully_shard" not in first.remedy.change


@pytest.mark.parametrize(
    ("op", "phase", "size", "change"),
    [
        ("all_reduce", "optimizer", 4, "stack them in one tensor"),
        ("all_reduce", "optimizer", 4096, None),
        ("broadcast", "forward", 4, "Pack these tensors into one"),
        ("broadcast", "forward", 1 << 20, "send them once, before training"),
    ],
)
def test_many_small_collectives_at_one_place_are_to_be_one(
    op: str, phase: str, size: int, change: str | None
) -> None:
    """Norms of an optimizer, one for each parameter; buffers one by one. Larger ones may be needed so."""
    sent = {"cause": "other_communication", "op": op, "count": 50, "bytes": 50 * size, "phase": phase}
    found = told(ledger_of([sent | {"ns": 10 * MS, "site": "a.py:9 in f()"}], [sharded()]))
    assert [change in one.remedy.change for one in found if one.remedy and change] == [True] * (
        change is not None
    )
    assert bool(found) is (change is not None)


def test_making_batches_in_the_training_is_one_cause() -> None:
    made = [
        at(site, 5, "loading", cause)
        for site in ("a.py:3 in get()", "a.py:9 in main()")
        for cause in ("compute", "host")
    ]
    (first,) = told(ledger_of([*made, {"cause": "data_loader", "ns": MS}], device="cpu"))
    assert (first.id, first.ns, first.evidence["site"]) == ("data_loader", 21 * MS, "a.py:3 in get()")


@pytest.mark.parametrize(("ms", "is_told"), [(10, True), (1, False)])
def test_products_with_one_hot_matrices_are_named_with_their_line(ms: int, is_told: bool) -> None:
    lines = ("a.py:7 in backward()", "backward() (a.py:9 in main())")
    found = told(ledger_of([at(line, ms, "one_hot") for line in lines], device="cpu"))
    assert [(one.id, one.evidence["site"]) for one in found] == [
        ("one_hot_products", "a.py:7 in backward()")
    ] * is_told


def test_overlap_hides_no_more_than_its_phase_computes() -> None:
    """30 ms of one unit's communication in backward, where nothing computes, and 10 in forward."""
    whole: list[dict[str, Any]] = [
        {"cause": "communication", "ns": ns * MS, "op": op, "fqn": "", "phase": phase}
        for op, phase, ns in (("all_gather", "forward", 10), ("reduce_scatter", "backward", 30))
    ]
    analysis = trace_analysis()
    rows = [replace(row, op="all_gather", phase="forward") for row in analysis.groups if row.fqn == ""]
    charges = [
        Charge(rank=rank.rank, step=step.step, **one)
        for rank in analysis.ranks
        for step in rank.steps
        for one in (*whole, {"cause": "compute", "ns": 10 * MS, "phase": "forward"})
    ]
    ranks = [replace(one, device_type="cuda") for one in analysis.ranks]
    ledger = with_ledger(replace(analysis, ranks=ranks, groups=rows, unrecorded_step=None), charges).ledger
    assert ledger is not None
    (first,) = told(ledger)
    assert first.remedy is not None
    assert (first.id, first.ns, first.remedy.gain_ns) == ("wrapping_too_coarse", 40 * MS, 10 * MS)


@pytest.mark.parametrize(
    ("names", "is_told"), [(["layers.0.w", "layers.1.w"], True), (["embed.w", "rnn.w", "head.w"], False)]
)
def test_on_a_cpu_one_unit_is_told_only_of_a_model_with_blocks(names: list[str], is_told: bool) -> None:
    """Overlap cannot be measured there, and three different modules may well be one unit."""
    group = sharded_group("", [8, 8], ranks=2, rows=4)
    weights = [msgspec.structs.replace(group.parameters[0], fqn=name) for name in names]
    analysis = trace_analysis()
    rows = [replace(row, op="all_gather", phase="forward") for row in analysis.groups if row.fqn == ""]
    found = {"cause": "communication", "ns": 20 * MS, "op": "all_gather", "fqn": "", "phase": "forward"}
    charges = [
        Charge(rank=rank.rank, step=step.step, **one)  # type: ignore[arg-type]
        for rank in analysis.ranks
        for step in rank.steps
        for one in (found, {"cause": "compute", "ns": 30 * MS, "phase": "forward"})
    ]
    ranks = [replace(one, device_type="cpu") for one in analysis.ranks]
    analysis = replace(analysis, ranks=ranks, groups=rows, unrecorded_step=None)
    manifest = RankManifest(param_groups=[msgspec.structs.replace(group, parameters=weights)])
    ledger = with_ledger(analysis, charges, [manifest]).ledger
    assert ledger is not None
    assert ("wrapping_too_coarse" in [one.id for one in told(ledger)]) == is_told


def late(**fields: Any) -> dict[str, Any]:
    """Rank 0 waits 10 ms of each step for rank 1."""
    return {"rank": 0, "cause": "uneven_ranks", "ns": 10 * MS, "late_rank": 1, "why": "kernel", **fields}


@pytest.mark.parametrize(("additional_ms", "named"), [(0, False), (4, False), (8, True)])
def test_ranks_that_share_processors_are_slow_only_with_more_to_do(additional_ms: int, named: bool) -> None:
    """Rank 1 is late by 20 ms in two steps, and runs that much which rank 0 does not."""
    entries = told(ledger_of([late()], device="cpu", additional_ns={0: 0, 1: 2 * additional_ms * MS}))
    assert [one.id for one in entries] == (["straggler"] if named else [])
    assert [one.rank for one in entries] == ([1] if named else [])


@pytest.mark.parametrize("where", ["a.py:1 in f()", None])
def test_waiting_for_a_rank_that_pauses_at_one_place_joins_its_pauses(where: str | None) -> None:
    """Rank 1 pauses at one line in every step; rank 0 waits for it there, or at an unknown place."""
    pause = {"rank": 1, "cause": "host_pause", "ns": 10 * MS, "site": "a.py:1 in f()"}
    (first,) = told(ledger_of([late(why="host", site=where), pause], device="cpu"))
    assert (first.id, first.rank, first.ns) == ("straggler", 1, (10 if where else 5) * MS)


EMA = "train.py:12 in ema()"


def at(site: str | None, ms: int, why: str, cause: str = "compute", phase: str = "other") -> dict[str, Any]:
    return {"cause": cause, "ns": ms * MS, "site": site, "why": why, "phase": phase}


@pytest.mark.parametrize(("why", "begins"), [(None, "Load in workers"), ("workers", "Use more workers")])
def test_workers_are_proposed_where_there_are_none(why: str | None, begins: str) -> None:
    (first,) = told(ledger_of([{"cause": "data_loader", "ns": 20 * MS, "why": why}]))
    assert first.remedy is not None
    assert first.remedy.change.startswith(begins)


@pytest.mark.parametrize(
    ("of_both", "waiting_ms", "named"), [(False, 0, True), (True, 0, False), (False, 19, False)]
)
def test_a_rank_that_is_late_at_its_own_line_is_named_for_it_on_a_cpu(
    of_both: bool, waiting_ms: int, named: bool
) -> None:
    """Many short calls in one line. A line where either rank may be late belongs to neither.

    Rank 1 waits 20 ms of each step; where rank 0 waited 19 for a processor, that is why.
    """
    late = {"cause": "uneven_ranks", "why": "host", "detail": "its host was elsewhere", "ns": 10 * MS}
    found = [
        {**late, "rank": 1, "late_rank": 0, "site": "histogram() (train.py:7 in log())"},
        {**late, "rank": 1, "late_rank": 0, "site": "percentile() (train.py:7 in log())"},
        {"cause": "host", "rank": 0, "ns": 20 * MS},
    ]
    if of_both:
        found.append({**late, "ns": MS, "rank": 0, "late_rank": 1, "site": "train.py:7 in log()"})
    waits = [
        HostStep(step=one.step, cpu_time_ns=1, main_thread_cpu_ns=MS, main_thread_waiting_ns=waiting_ms * MS)
        for one in trace_analysis().ranks[0].steps
    ]
    ledger = ledger_of(found, [RankManifest(rank=0, host_steps=waits)], device="cpu")
    own = [one for one in told(ledger) if one.id == "straggler"]
    assert [(one.rank, one.evidence["site"]) for one in own] == (
        [(0, "train.py:7 in log()")] if named else []
    )


@pytest.mark.parametrize(
    ("pause_ms", "waiting_ms", "gain_ms"), [(4, 0, 4), (4, 25, 4), (4, 75, 4), (2, 25, None), (2, 0, None)]
)
def test_a_line_has_its_share_of_the_waiting_for_a_processor(
    pause_ms: int, waiting_ms: int, gain_ms: int | None
) -> None:
    """Both ranks compute 25 of 50 ms. A line with less to do has less to wait for, too."""
    pause = {"cause": "host_pause", "ns": pause_ms * MS, "site": "a.py:1 in read()"}
    steps = [
        HostStep(step=step, main_thread_cpu_ns=25 * MS, main_thread_waiting_ns=waiting_ms * MS)
        for step in (3, 4)
    ]
    manifests = [RankManifest(rank=rank, host_steps=steps) for rank in (0, 1)]
    found = told(ledger_of([pause], manifests, device="cpu"))
    assert [one.ns for one in found] == ([] if gain_ms is None else [gain_ms * MS])
    assert [one.remedy.gain_ns for one in found if one.remedy] == [one.ns for one in found]


def busy(computing_ms: int, waiting_ms: int) -> list[RankManifest]:
    """Two ranks whose threads compute and wait for a processor in both steps."""
    steps = [
        HostStep(step=step, main_thread_cpu_ns=computing_ms * MS, main_thread_waiting_ns=waiting_ms * MS)
        for step in (3, 4)
    ]
    return [RankManifest(rank=rank, host_steps=steps) for rank in (0, 1)]


@pytest.mark.parametrize(("asleep", "waited_ns"), [(True, 37.8 * MS), (False, 45 * MS)])
def test_a_thread_that_slept_waited_for_no_processor(asleep: bool, waited_ns: float) -> None:
    """A pause of 8 of 50 ms on a host on which a thread that is ready to run waits 9/10 of the time."""
    pause = {"cause": "host_pause", "ns": 8 * MS, "asleep": asleep}
    ledger = ledger_of([pause], busy(10, 90), device="cpu")
    assert sum(one.ns for one in ledger.entries if one.cause == "starved") == waited_ns


def test_work_is_judged_with_the_waiting_for_its_processor() -> None:
    """Of 8 ms of products in float64 the thread waits 4.8: half of all 8 of 50 ms is worth a word."""
    products = {"cause": "compute", "ns": 8 * MS, "why": "float64"}
    (first,) = told(ledger_of([products], busy(10, 30), device="cpu"))
    assert first.remedy is not None
    assert (first.id, first.remedy.gain_ns) == ("products_in_float64", 4 * MS)


@pytest.mark.parametrize(("waiting_ms", "named"), [(0, True), (10, False)])
def test_one_long_pause_counts_beyond_the_waiting_for_a_processor(waiting_ms: int, named: bool) -> None:
    """Rank 0 pauses for 20 of 50 ms in its first step alone."""
    step = min(one.step for one in trace_analysis().ranks[0].steps)
    waits = HostStep(step=step, cpu_time_ns=1, main_thread_cpu_ns=MS, main_thread_waiting_ns=waiting_ms * MS)
    pause = {"rank": 0, "step": step, "cause": "host_pause", "ns": 20 * MS, "site": "a.py:1 in f()"}
    ledger = ledger_of([pause], [RankManifest(rank=0, host_steps=[waits])], device="cpu")
    assert ("a.py:1 in f()" in " ".join(one.said for one in told(ledger))) is named


def test_neighbouring_lines_of_a_function_are_one_place() -> None:
    """6 + 2 ms in lines 12 and 13 of one function; line 40 of it and another function are apart."""
    found = [
        at(EMA, 6, "outside_loop"),
        at("lerp_() (train.py:13 in ema())", 2, "outside_loop", "host"),
        at("train.py:40 in ema()", 1, "outside"),
        at("train.py:12 in main()", 1, "outside"),
    ]
    (first,) = told(ledger_of(found))
    assert (first.id, first.ns, first.evidence["site"]) == ("work_outside_training", 8 * MS, EMA)
    assert "torch._foreach" in (first.remedy.change if first.remedy else "")


@pytest.mark.parametrize(
    ("site", "cause", "is_told"),
    [
        ("deepcopy() (train.py:9 in main())", "compute", True),
        ("clip_grad_norm_() (train.py:9 in main())", "compute", False),
        ("train.py:9 in main()", "host_pause", False),
    ],
)
def test_what_training_needs_and_what_pauses_is_no_work_outside_training(
    site: str, cause: str, is_told: bool
) -> None:
    ledger = ledger_of([at(site, 10, "outside", cause)])
    assert ("work_outside_training" in [one.id for one in ledger.entries]) is is_told


@pytest.mark.parametrize(
    ("defaults", "operators", "is_told"),
    [
        ({"lr": "0.1"}, 400, True),
        ({"lr": "0.1"}, 200, False),
        ({"foreach": "None"}, 400, False),
        ({"foreach": "False"}, 0, True),
        ({"foreach": "False", "fused": "True"}, 0, False),
    ],
)
def test_an_optimizer_that_goes_through_its_parameters_in_turn(
    defaults: dict[str, str], operators: int, is_told: bool
) -> None:
    """100 parameters: the script's own optimizer by what it issues, torch's by what it was told."""
    one = OptimizerInfo(class_name="Mine", state_bytes=0, param_groups=1, parameters=100, defaults=defaults)
    spent: dict[str, Any] = {"cause": "compute", "phase": "optimizer"}
    found = [spent | {"ns": 20 * MS}, spent | {"ns": 0, "why": "one_by_one", "count": operators}]
    ledger = ledger_of(found, [RankManifest(optimizers=[one])], device="cpu")
    assert [entry.id for entry in told(ledger)] == ["optimizer_per_tensor"] * is_told


@pytest.mark.parametrize(
    ("device", "foreach", "groups", "is_told"),
    [
        ("cpu", "True", 100, True),
        ("cpu", "True", 2, False),
        ("cpu", "None", 100, False),
        ("cuda", "None", 100, True),
        ("cuda", "None", 40, False),
    ],
)
def test_an_optimizer_with_a_group_for_each_parameter(
    device: str, foreach: str, groups: int, is_told: bool
) -> None:
    defaults = {"foreach": foreach, "fused": "None"}
    one = OptimizerInfo(
        class_name="AdamW", state_bytes=0, param_groups=groups, parameters=100, defaults=defaults
    )
    found = {"cause": "host" if device == "cuda" else "compute", "phase": "optimizer", "ns": 20 * MS}
    titles = [
        entry.title for entry in told(ledger_of([found], [RankManifest(optimizers=[one])], device=device))
    ]
    assert ("optimizer, one small group at a time" in titles) == is_told


def test_a_loop_takes_its_backward_along() -> None:
    found = [
        at("loss.py:5 in loss()", 3, "loop"),
        at("loss.py:5 in loss()", 4, "loop", phase="backward"),
        at("loss.py:5 in loss()", 1, "loop", "host"),
    ]
    (first,) = told(ledger_of(found))
    assert (first.id, first.ns) == ("python_loop", 8 * MS)
    assert first.said.startswith(
        "A Python loop runs small operators one by one at loss.py:5 in loss(), 8.00 ms"
    )
    assert "with its backward" in first.said


@pytest.mark.parametrize(
    ("place", "at_once"), [("norm() (loss.py:5 in loss())", True), ("loss.py:5 in loss()", False)]
)
def test_norms_of_parameters_have_a_remedy_of_their_own(place: str, at_once: bool) -> None:
    (first,) = told(ledger_of([at(place, 8, "loop")]))
    assert first.remedy is not None
    assert ("weight_decay" in first.remedy.change) is at_once


@pytest.mark.parametrize(
    ("reason", "checks", "is_told"), [("anomaly", 200, True), ("anomaly", 2, True), ("loop", 200, False)]
)
def test_anomaly_detection_is_named_by_its_checks(reason: str, checks: int, is_told: bool) -> None:
    analysis = trace_analysis()
    charges = [
        Charge(rank=rank.rank, step=step.step, cause="compute", ns=ns, phase="backward", why=why, count=count)
        for rank in analysis.ranks
        for step in rank.steps
        for ns, why, count in ((step.duration_ns, None, 0), (0, reason, checks))
    ]
    found = with_ledger(analysis, charges).findings
    assert any(one.id == "anomaly_detection" for one in found) is is_told


def test_what_watches_python_is_named() -> None:
    manifests = [RankManifest(rank=0, machine=MachineInfo(python_hooks=["cProfile"]))]
    analysis = trace_analysis()
    charges = [
        Charge(rank=rank.rank, step=step.step, cause="compute", ns=step.duration_ns)
        for rank in analysis.ranks
        for step in rank.steps
    ]
    [found] = [one for one in with_ledger(analysis, charges, manifests).findings if one.id == "python_hooks"]
    assert found.evidence == {"tools": ["cProfile"]}
    assert "runs under cProfile" in found.message


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("batches", "gathers", "each_ms", "is_entered"),
    [(8, 16, 1.0, True), (8, 1, 1.0, False), (8, 16, 0.2, True), (4, 8, 1.0, True), (4, 8, 0.2, False)],
)
def test_parameters_gathered_anew_in_each_micro_batch(
    batches: int, gathers: int, each_ms: float, is_entered: bool, device: str
) -> None:
    """All gathers but one of a 50 ms step could be saved, for the 2 x 96 x 64 elements that others hold."""
    manifest = sharded(gathers=gathers, evaluations=0)
    manifest.roots[0].micro_batches = batches
    found = {"cause": "communication", "fqn": "layers.0", "op": "all_gather", "phase": "forward"}
    ledger = ledger_of([found | {"ns": int(16 * each_ms * MS), "count": 16}], [manifest], device=device)
    named = [one for one in ledger.entries if one.id == "gathered_every_micro_batch"]
    assert [one.told for one in named] == [device == "cuda" or batches == 8] * len(named)
    assert [(one.ns, one.remedy and one.remedy.memory_bytes) for one in named] == (
        [(int(16 * each_ms * MS) * (gathers - 1) // gathers, 4 * (8 + 16) * 64 * 4)] if is_entered else []
    )


def test_a_hook_that_computes_in_forward_is_named_with_its_line() -> None:
    site = "debug.py:7 in stats(), a hook"
    (first,) = told(ledger_of([at(site, 10, "outside", phase="forward")]))
    assert first.said.startswith(f"In forward, the script spends 10.0 ms (20.0%) per step at {site}")
    assert (first.remedy.change if first.remedy else "").startswith("Remove the hook, or")


@pytest.mark.parametrize("caught_up", [False, True])
def test_the_end_of_waits_gains_nothing_where_the_host_is_the_limit(caught_up: bool) -> None:
    """Rank 0 waits 10 ms of each step for rank 1, and its device then idles for launches or does not."""
    among = LateRanks(
        ranks=[LateRank(rank=1, wait_caused_ns=50 * MS, wait_ns=0, late_steps=5)], compared=2, steps=5,
        late_steps=5, explained_frac=1.0, least_explained_frac=1.0,
        chance=0.0625, steps_needed=5, steady=True,
    )  # fmt: skip
    entries = [one.id for one in told(ledger_of([late(caught_up=caught_up)], among=among))]
    assert entries == ([] if caught_up else ["straggler"])


def test_operators_beyond_the_others_count_a_step() -> None:
    """Rank 0 has five steps and rank 1 four, 10 calls of 1 ms in each; then rank 1 has two more a step."""

    def ran(calls: int, steps: int) -> tuple[list[KernelSum], int]:
        return [KernelSum("aten::mm", "compute", calls, calls * MS)], steps

    assert additional_ns([ran(50, 5), ran(40, 4)]) == [0, 0]
    assert additional_ns([ran(50, 5), ran(48, 4)]) == [0, 8 * MS]
    assert additional_ns([ran(50, 5), ran(41, 4)]) == [0, 0]


@pytest.mark.parametrize(
    ("line", "count", "joined"),
    [(12, 1, True), (13, 12, True), (13, 1, False), (20, 12, False)],
    ids=["one line", "the loop that issues them", "a neighbouring line", "elsewhere"],
)
def test_a_collective_and_the_work_at_its_place_are_one_gain(line: int, count: int, joined: bool) -> None:
    """8 ms in a loop at line 12, and 4 ms of all-reduces: one entry of 12 ms, or two."""
    reduced = {"cause": "other_communication", "ns": 4 * MS, "op": "all_reduce", "count": count}
    reduced |= {"site": f"all_reduce() (train.py:{line} in ema())", "bytes": count << 20}
    ledger = ledger_of([at(EMA, 8, "outside_loop"), reduced], device="cpu")
    found = told(ledger)
    assert [one.ns for one in found] == ([12 * MS] if joined else [8 * MS, 4 * MS])
    assert [one.remedy and one.remedy.gain_ns for one in found] == [one.ns for one in found]
    assert sum(one.total_ns for one in ledger.entries) == ledger.total_ns


@pytest.mark.parametrize(("again", "gain_ms"), [(8, None), (16, 5), (12, 10 / 3)])
def test_checkpoints_inside_checkpoints_recompute_forwards_more_than_once(
    again: int, gain_ms: float | None
) -> None:
    """10 ms of recomputed forwards; operators of eight forwards run again."""
    spent: dict[str, Any] = {"cause": "recompute", "phase": "backward"}
    counts = spent | {"ns": 0, "why": "forwards"}
    counted = [counts | {"count": 8, "phase": "forward"}, counts | {"count": again}]
    found = told(ledger_of([spent | {"ns": 10 * MS}, *counted]))
    gains = [one.remedy.gain_ns for one in found if one.remedy]
    assert gains == ([] if gain_ms is None else [pytest.approx(gain_ms * MS)])


@pytest.mark.parametrize(
    ("device", "others_ms", "named"), [("cuda", 3, True), ("cpu", 3, False), ("cpu", 1, True)]
)
def test_a_rank_is_named_for_its_loader_where_cores_do_not_explain_it(
    device: str, others_ms: int, named: bool
) -> None:
    """Rank 0 waits 8 ms for each batch, rank 1 3 ms or 1; on a CPU their loaders share cores."""
    waits = [{"cause": "data_loader", "ns": ms * MS, "rank": rank} for rank, ms in enumerate((8, others_ms))]
    (entry,) = told(ledger_of(waits, device=device))
    assert (entry.rank, entry.said.startswith("Rank 0 waits")) == ((0, True) if named else (None, False))


@pytest.mark.parametrize("count", [1, 0])
def test_an_iterator_made_in_every_step_is_to_be_made_once(count: int) -> None:
    """4 ms of waiting and 6 ms at the line that makes it; without a new iterator they are two causes."""
    line = "train.py:9 in main()"
    wait: dict[str, Any] = {"cause": "data_loader", "ns": 4 * MS, "why": "workers"}
    made = {"cause": "data_loader", "ns": 0, "why": "rebuilt", "site": line, "count": count}
    start = {"cause": "host_pause", "ns": 6 * MS, "site": line, "phase": "other"}
    first, *others = told(ledger_of([wait, start, *[made] * count], device="cpu"))
    assert (first.ns, len(others)) == ((10 * MS, 0) if count else (6 * MS, 1))
    assert ("iterator once" in (first.remedy.change if first.remedy else "")) is bool(count)


def test_objects_are_to_be_sent_as_tensors() -> None:
    """Their bytes are as many as the model's, and the host pauses beside them: it is not a checkpoint."""
    line = "all_gather_object() (train.py:9 in exchange())"
    gathered = {"cause": "other_communication", "ns": 2 * MS, "op": "all_gather", "bytes": 1 << 40,
                "dtype": "uint8", "site": line}  # fmt: skip
    pause = {"cause": "host_pause", "ns": 6 * MS, "site": line, "phase": "other"}
    (first,) = told(ledger_of([gathered, pause], [sharded()], device="cpu"))
    assert first.remedy is not None
    assert first.remedy.change.startswith("Exchange tensors instead of objects")
    tensors = gathered | {"dtype": "float32"}
    (first,) = told(ledger_of([tensors, pause], [sharded()], device="cpu"))
    assert first.id == "checkpoint_in_step"


@pytest.mark.parametrize(
    ("ranks", "fqn", "other"),
    [
        ([0, 1], "layers.0", True),
        ([0, 1], None, False),
        ([0, 2], "layers.0", False),
        ([0], "layers.0", False),
    ],
)
def test_all_reduces_of_layers_without_a_group_are_those_of_another_dimension(
    ranks: list[int], fqn: str | None, other: bool
) -> None:
    """Four ranks, sharded over 0 and 2; the trace names no group, as gloo's."""
    groups = [
        ProcessGroupInfo(name="0", desc="default_pg", backend="gloo", ranks=[0, 1, 2, 3]),
        ProcessGroupInfo(name="1", desc="mesh_dp", backend="gloo", ranks=[0, 2], mesh_dim="dp"),
        ProcessGroupInfo(name="2", desc="mesh_tp", backend="gloo", ranks=ranks),
    ]
    mine = sharded(shard_group="1", reduce_scatter_group="1")
    manifest = msgspec.structs.replace(mine, process_groups=groups)
    reduced = {"cause": "other_communication", "ns": 5 * MS, "op": "all_reduce", "count": 9, "fqn": fqn,
               "bytes": 9 << 20, "phase": "backward"}  # fmt: skip
    ledger = ledger_of([reduced], [manifest], device="cpu")
    assert ("other_parallelism" in {one.id for one in ledger.entries}) is other


@pytest.mark.parametrize("stages", [True, False])
def test_stages_of_a_pipeline_send_and_compute_differently_by_design(stages: bool) -> None:
    """Ranks 0 and 1 are of one sharding group or of two; rank 1 computes half as much again."""
    ranks = [[0, 2], [1, 3]] if stages else [[0, 1], [0, 1]]
    manifests = [
        msgspec.structs.replace(
            sharded(shard_group="1"),
            rank=rank,
            process_groups=[ProcessGroupInfo(name="1", desc="mesh_dp", backend="gloo", ranks=mine)],
        )
        for rank, mine in enumerate(ranks)
    ]
    sent = Charge(rank=0, step=0, cause="other_communication", ns=9 * MS, op="send_recv", count=9)
    waits = Charge(rank=0, step=0, cause="uneven_ranks", ns=9 * MS, why="kernel", phase="forward")
    analysis = trace_analysis()
    worked = [
        replace(one, steps=[replace(step, work=(2 + one.rank) << 30) for step in one.steps])
        for one in analysis.ranks
    ]
    charges = [
        replace(charge, rank=one.rank, step=step.step)
        for one in worked
        for step in one.steps
        for charge in (sent, waits)
    ]
    ledger = with_ledger(replace(analysis, ranks=worked), charges, manifests).ledger
    assert ledger is not None
    found = {one.id: one for one in ledger.entries}
    assert ("other_parallelism" in found) is stages
    assert ("send_recv_outside_fsdp" in found) is not stages
    assert ("ranks_take_turns" in found and "batches" in found["ranks_take_turns"].title) is not stages


@pytest.mark.parametrize(
    ("cause", "beside_ms", "told_as"),
    [("update", 0, "repeated_update"), (None, 0, None), ("update", 2, None)],
)
def test_products_of_an_optimizer_that_gathers_every_matrix_are_to_be_shared(
    cause: str | None, beside_ms: int, told_as: str | None
) -> None:
    """The matrices are gathered once; with broadcasts beside that, ranks may exchange shares."""
    size = 4 * sum(prod(one.global_shape) for group in sharded().param_groups for one in group.parameters)
    optimizer: dict[str, Any] = {"phase": "optimizer"}
    gathers = {"cause": "other_communication", "ns": MS, "op": "all_gather", "bytes": size, "count": 8}
    beside = {"cause": "other_communication", "ns": beside_ms * MS, "op": "broadcast", "bytes": beside_ms}
    products = {"cause": "compute", "ns": 20 * MS, "why": cause}
    ledger = ledger_of([one | optimizer for one in (gathers, beside, products)], [sharded()])
    assert [one.id for one in told(ledger)] == ([told_as] if told_as else [])
    if told_as:
        (entry,) = told(ledger)
        assert entry.remedy is not None
        assert entry.remedy.gain_ns == 9 * MS


@pytest.mark.parametrize(("steps", "wait_ms", "named"), [(2, 0, True), (1, 0, False), (2, 4, True)])
def test_iterators_made_where_nearly_all_waiting_is_are_to_be_made_once(
    steps: int, wait_ms: int, named: bool
) -> None:
    line = "train.py:9 in main()"
    numbers = [one.step for one in trace_analysis().ranks[0].steps][:steps]
    made = [
        {"cause": "data_loader", "ns": ns, "why": why, "site": site, "count": 1, "step": step}
        for step in numbers
        for ns, why, site in ((0, "rebuilt", line), (9 * MS, "workers", None))
    ]
    waits = {"cause": "data_loader", "ns": wait_ms * MS, "why": "workers"}
    entries = told(ledger_of([*made, waits], device="cpu"))
    assert ("A new data loader iterator" in entries[0].said) is named


@pytest.mark.parametrize(("forwards", "remedy"), [(1, "backward() once"), (2, "set_requires_gradient_sync")])
def test_two_backwards_of_one_forward_are_no_micro_batches(forwards: int, remedy: str) -> None:
    """Gradients reduced twice a step, after one forward or after two."""
    manifest = sharded(forwards=forwards)
    groups = [msgspec.structs.replace(one, reductions=2) for one in manifest.param_groups]
    roots = [RootInfo(root=0, micro_batches=2, gradient_syncs=2)]
    manifest = msgspec.structs.replace(manifest, param_groups=groups, roots=roots)
    analysis = trace_analysis()
    rows = [replace(row, count=2) if row.op == "reduce_scatter" else row for row in analysis.groups]
    reduced = Charge(rank=0, step=0, cause="communication", ns=20 * MS, op="reduce_scatter", phase="backward")
    gathered = replace(reduced, op="all_gather")
    computed = replace(reduced, cause="compute", ns=8 * MS, op=None)
    charges = [
        replace(one, rank=rank.rank, step=step.step)
        for rank in analysis.ranks
        for step in rank.steps
        for one in (reduced, gathered, computed)
    ]
    ledger = with_ledger(replace(analysis, groups=rows), charges, [manifest]).ledger
    assert ledger is not None
    (first,) = [one for one in told(ledger) if one.id == "reduced_every_micro_batch"]
    assert first.remedy is not None
    assert remedy in first.remedy.change
    assert first.ns == (24 if forwards == 1 else 10) * MS, "a second backward gathers and computes, too"


@pytest.mark.parametrize(
    ("reductions", "named"), [((1, 4, 4, 4), True), ((4, 4, 4, 4), False), ((1,) * 4, False)]
)
def test_units_that_reduce_in_every_micro_batch_are_named_beside_those_that_wait(
    reductions: tuple[int, ...], named: bool
) -> None:
    """Four micro-batches; a call for the root alone (recurse=False) leaves out the units inside."""
    manifest = sharded(forwards=4)
    groups = [
        msgspec.structs.replace(one, reductions=times)
        for one, times in zip(manifest.param_groups, reductions, strict=True)
    ]
    roots = [RootInfo(root=0, micro_batches=4)]
    manifest = msgspec.structs.replace(manifest, param_groups=groups, roots=roots)
    analysis = trace_analysis()
    charges = [
        Charge(
            rank=rank.rank,
            step=step.step,
            cause="communication",
            ns=8 * MS,
            op="reduce_scatter",
            phase="backward",
            fqn=f"layers.{layer}",
        )
        for rank in analysis.ranks
        for step in rank.steps
        for layer in range(4)
    ]
    ledger = with_ledger(analysis, charges, [manifest]).ledger
    assert ledger is not None
    found = [one for one in ledger.entries if one.id == "reduced_every_micro_batch"]
    assert [one.ns for one in found] == [3 * 8 * MS * 3 / 4] * named, (
        "three units, and all reductions but one"
    )
    assert all("recurse=False" in one.remedy.change for one in found if one.remedy is not None)


@pytest.mark.parametrize(("updates", "named"), [(0, True), (1, False), (None, True)])
def test_gradients_at_other_parameters_are_no_micro_batches(updates: int | None, named: bool) -> None:
    """Two passes a step; where the parameters change in between, both reduce."""
    manifest = sharded(forwards=2)
    roots = [RootInfo(root=0, micro_batches=2, gradient_syncs=2, updates=updates)]
    manifest = msgspec.structs.replace(manifest, roots=roots)
    analysis = trace_analysis()
    rows = [replace(row, count=2) if row.op == "reduce_scatter" else row for row in analysis.groups]
    reduced = Charge(rank=0, step=0, cause="communication", ns=20 * MS, op="reduce_scatter", phase="backward")
    charges = [
        replace(reduced, rank=rank.rank, step=step.step) for rank in analysis.ranks for step in rank.steps
    ]
    ledger = with_ledger(replace(analysis, groups=rows), charges, [manifest]).ledger
    assert ledger is not None
    assert ("reduced_every_micro_batch" in [one.id for one in told(ledger)]) is named


@pytest.mark.parametrize(("own_ms", "named"), [(10, True), (15, False)])
def test_a_thread_that_computes_more_than_the_training_holds_it_up_after_collectives(
    own_ms: int, named: bool
) -> None:
    """20 of 50 ms in collectives; another Python thread computes 12 ms, the training's 10 or 15."""
    analysis = trace_analysis()
    steps = [step.step for step in analysis.ranks[0].steps]
    host = [
        HostStep(step=step, main_thread_cpu_ns=own_ms * MS, python_threads={"a.py:7 in monitor()": 12 * MS})
        for step in steps
    ]
    took = [StepInfo(step=step, start_ns=0, duration_ns=50 * MS) for step in steps]
    manifests = [RankManifest(rank=rank, host_steps=host, steps=took) for rank in (0, 1)]
    gathered = {"cause": "communication", "ns": 20 * MS, "op": "all_gather"}
    found = told(ledger_of([gathered], manifests, device="cpu"))
    assert [(one.id, one.ns) for one in found] == ([("starved_host", 12 * MS)] if named else [])


@pytest.mark.parametrize("steps", [1, 2])
def test_collectives_of_one_step_of_several_may_be_those_of_every_few_hundred(steps: int) -> None:
    numbers = [one.step for one in trace_analysis().ranks[0].steps]
    gathered = {
        "cause": "other_communication",
        "ns": 8 * MS,
        "op": "all_gather",
        "count": 9,
        "bytes": 9 << 20,
    }
    ledger = ledger_of([gathered | {"step": step} for step in numbers[:steps]], [sharded()])
    (entry,) = [one for one in ledger.entries if one.id == "all_gather_outside_fsdp"]
    assert entry.told is (steps == len(numbers))


@pytest.mark.parametrize(
    ("device", "threads", "said"), [("cpu", 1, True), ("cpu", 0, False), ("cuda", 1, False)]
)
def test_workers_of_a_loader_need_cores_that_no_rank_runs_on(device: str, threads: int, said: bool) -> None:
    machine = MachineInfo(cores=2, usable_cores=2, torch_threads=threads)
    manifests = [RankManifest(rank=rank, host="a", machine=machine) for rank in (0, 1)]
    waited = {"cause": "data_loader", "ns": 9 * MS, "phase": "other"}
    entries = ledger_of([waited], manifests, device=device).entries
    (entry,) = [one for one in entries if one.cause == "data_loader"]
    assert entry.remedy is not None
    assert ("on all 2 here" in entry.remedy.change) is said


@pytest.mark.parametrize("times", [1, 2])
def test_an_optimizer_that_gathers_each_matrix_twice_takes_norms(times: int) -> None:
    """Muon gathers each matrix once."""
    manifest = sharded()
    matrices = [
        one
        for group in manifest.param_groups
        for one in group.parameters
        if one.requires_grad and len(one.global_shape) > 1
    ]
    assert matrices
    steps = [one.step for one in trace_analysis().ranks[0].steps]
    charges = [
        {
            "cause": "other_communication",
            "ns": 4 * MS,
            "op": "all_gather",
            "phase": "optimizer",
            "step": step,
            "count": times,
            "bytes": times * size,
            "each_bytes": size,
        }
        for step in steps
        for size in [prod(one.global_shape) * 4 for one in matrices]
    ]
    ledger = ledger_of(charges, [manifest])
    (entry,) = [one for one in ledger.entries if one.id == "all_gather_outside_fsdp"]
    assert (entry.remedy is not None) is (times == 2)
    assert entry.remedy is None or "norms" in entry.remedy.change


@pytest.mark.parametrize(
    ("phases", "of_model"), [(("forward", "backward"), True), (("other", "other"), False)]
)
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_collectives_of_forward_and_backward_are_not_those_of_a_metric(
    op: str, phases: tuple[str, str], of_model: bool
) -> None:
    sent = {"cause": "other_communication", "ns": 5 * MS, "op": op, "count": 9, "bytes": 9 << 20}
    (first,) = told(ledger_of([sent | {"phase": phase} for phase in phases], [sharded()]))
    assert first.id == f"{op}_outside_fsdp"
    assert first.remedy is not None
    assert ("activations" in first.remedy.change) is of_model


@pytest.mark.parametrize(("count", "named"), [(21, True), (2, False)])
def test_barriers_are_no_usual_collectives(count: int, named: bool) -> None:
    """Fewer than FSDP's own on a CPU, where as many small all-reduces are what a training needs."""
    barriers = {"cause": "other_communication", "ns": 8 * MS, "count": count, "operator": "c10d::barrier"}
    own = {"cause": "communication", "ns": 5 * MS, "op": "all_gather", "count": 40}
    found = told(ledger_of([barriers, own], [sharded()], device="cpu"))
    assert [one.id for one in found] == ["barrier_outside_fsdp"] * named


@pytest.mark.parametrize(("other_ms", "why"), [(10, "all of this idle time"), (5, "no rank can gain more")])
def test_a_gain_says_when_it_is_that_of_the_rank_that_gains_least(other_ms: int, why: str) -> None:
    """The device of rank 0 idles 10 ms per step for its host, that of rank 1 as long or half as long."""
    ledger = ledger_of(
        [{"cause": "host", "rank": rank, "ns": ms * MS} for rank, ms in ((0, 10), (1, other_ms))]
    )
    (first,) = told(ledger)
    assert first.remedy is not None
    assert first.remedy.gain_ns == other_ms * MS
    assert first.remedy.reason.startswith(why)


@pytest.mark.parametrize(
    ("site", "named"),
    [
        ("time.sleep() (train.py:9 in log())", "at time.sleep() (train.py:9 in log())"),
        ("train.py:9 in log()", "at train.py:9 in log()"),
        ("## backward ##", "in `## backward ##`"),
        ("aten::cudnn_convolution", ""),
    ],
)
def test_a_pause_inside_an_operator_is_not_the_scripts(site: str, named: str) -> None:
    pauses = [
        {"cause": "host_pause", "ns": 10 * MS, "site": site, "step": step.step}
        for step in trace_analysis().ranks[0].steps
    ]
    ledger = ledger_of(pauses)
    (entry,) = [one for one in ledger.entries if one.cause == "host_pause"]
    assert entry.told is bool(named)
    if named:
        assert entry.remedy is not None
        assert entry.remedy.change.startswith(f"Move the script's work {named} out of the step")
    else:
        assert (entry.remedy, entry.confidence) == (None, "low")


@pytest.mark.parametrize(("ns", "is_told"), [(20 * MS, True), (1 * MS, False)])
def test_products_in_float64_gain_half_of_their_time(ns: int, is_told: bool) -> None:
    double = {"cause": "compute", "ns": ns, "why": "float64", "fqn": "layers.1", "phase": "forward"}
    ledger = ledger_of([double])
    found = told(ledger)
    assert [one.id for one in found] == ["products_in_float64"] * is_told
    if is_told:
        assert found[0].remedy is not None
        assert (found[0].remedy.gain_ns, found[0].remedy.basis) == (ns / 2, "estimate")
        assert "layers.1" in found[0].said


@pytest.mark.parametrize(("steps", "is_told"), [(1, False), (2, True)])
def test_garbage_collected_in_one_step_of_several_may_come_every_few_hundred(
    steps: int, is_told: bool
) -> None:
    numbers = [one.step for one in trace_analysis().ranks[0].steps]
    found = [{"cause": "garbage_collection", "ns": 20 * MS, "step": step} for step in numbers[:steps]]
    (entry,) = [one for one in ledger_of(found).entries if one.id == "garbage_collection"]
    assert entry.told is is_told


def test_a_host_that_does_not_keep_up_with_micro_batches_gains_all_but_one() -> None:
    found = [{"cause": "host", "ns": 20 * MS, "phase": "forward", "count": 100}]
    manifests = [RankManifest(rank=rank, micro_batches=8) for rank in (0, 1)]
    (first,) = told(ledger_of(found, manifests))
    assert first.remedy is not None
    assert (first.id, first.remedy.gain_ns) == ("host_bound", 17.5 * MS)
    assert first.evidence["micro_batches"] == 8
    assert "micro-batches" in first.remedy.change
    (first,) = told(ledger_of(found))
    assert first.remedy is not None
    assert (first.id, first.remedy.gain_ns) == ("host_bound", 20 * MS)
    assert "micro" not in first.said + first.remedy.change


@pytest.mark.parametrize(("memory", "pinned"), [("Pinned", True), ("Pageable", False)])
def test_pinned_memory_is_not_to_be_pinned(memory: str, pinned: bool) -> None:
    copy = {"cause": "offload", "ns": 9 * MS, "op": f"Memcpy HtoD ({memory} -> Device)", "bytes": 1 << 28}
    (first,) = told(ledger_of([copy]))
    assert first.remedy is not None
    assert (first.id, first.ns) == ("host_copies", 9 * MS)
    assert ("non_blocking" in first.remedy.change) is not pinned
    (unnamed,) = told(ledger_of([copy | {"op": None}]))
    assert unnamed.remedy is not None
    assert "non_blocking" in unnamed.remedy.change, "nothing says how the memory is held"


def teacher_and_student(*, optimizer: bool = True) -> list[RankManifest]:
    """Two roots, of which an optimizer holds the second."""
    groups = []
    for root in (0, 1):
        group = sharded_group("blocks.0", [8, 8], ranks=2, rows=4)
        (weight,) = group.parameters
        weight = msgspec.structs.replace(weight, optimized=optimizer and root == 1)
        groups.append(msgspec.structs.replace(group, root=root, parameters=[weight]))
    return [RankManifest(rank=rank, param_groups=groups) for rank in (0, 1)]


def test_backward_of_what_no_optimizer_updates_is_one_cause_with_its_reductions() -> None:
    backward = {"phase": "backward", "fqn": "root0:blocks.0"}
    found = [
        backward | {"cause": "compute", "ns": 8 * MS, "why": "untrained"},
        backward | {"cause": "communication", "ns": 3 * MS, "op": "reduce_scatter", "why": "launch"},
        backward | {"cause": "communication", "ns": 4 * MS, "op": "reduce_scatter", "why": "launch"}
        | {"fqn": "root1:blocks.0"},
    ]  # fmt: skip
    first = told(ledger_of(found, teacher_and_student()))[0]
    assert first.remedy is not None
    assert (first.id, first.ns) == ("backward_untrained", 11 * MS)
    assert "no_grad" in first.remedy.change
    assert untrained_units(teacher_and_student()[0]) == {"root0:blocks.0": ["blocks.0.weight"]}
    assert untrained_units(teacher_and_student(optimizer=False)[0]) == {}


def stem_and_frozen_layer(*, trained_in_front: bool) -> RankManifest:
    """A root whose stem no optimizer holds, a frozen layer, and a trained head, in the order of forward."""
    frozen, head, root = (sharded_group(name, [8, 8], ranks=2, rows=4) for name in ("frozen", "head", ""))
    at = {"frozen": (1, 1, False, False), "head": (2, 2, True, True), "": (3, 0, True, trained_in_front)}
    groups = []
    for group in (frozen, head, root):
        forward, position, trains, held = at[group.fqn]
        weight = msgspec.structs.replace(
            group.parameters[0], position=position, requires_grad=trains, optimized=held
        )
        groups.append(
            msgspec.structs.replace(
                group, parameters=[weight], requires_grad=trains, forward_positions=[forward]
            )
        )
    return RankManifest(rank=0, param_groups=groups)


def test_backward_through_frozen_layers_to_what_no_optimizer_holds_is_for_nothing() -> None:
    assert untrained_units(stem_and_frozen_layer(trained_in_front=True)) == {}
    manifest = stem_and_frozen_layer(trained_in_front=False)
    assert untrained_units(manifest) == {"frozen": ["weight"], "": ["weight"]}
    found = [{"cause": "compute", "phase": "backward", "fqn": "frozen", "ns": 9 * MS, "why": "untrained"}]
    first = told(ledger_of(found, [manifest, msgspec.structs.replace(manifest, rank=1)]))[0]
    assert first.id == "backward_untrained"
    assert "`frozen`, which are frozen" in first.said


def test_backward_through_frozen_layers_to_inputs_alone_is_for_nothing() -> None:
    """The stem in front of the frozen layer has no gradient either."""
    manifest = stem_and_frozen_layer(trained_in_front=False)
    (stem,) = (one for one in manifest.param_groups if one.fqn == "")
    for one in stem.parameters:
        one.requires_grad = False
    assert untrained_units(manifest) == {}
    (frozen,) = (one for one in manifest.param_groups if one.fqn == "frozen")
    frozen.only_inputs = True
    assert untrained_units(manifest) == {"frozen": []}
    found = [{"cause": "compute", "phase": "backward", "fqn": "frozen", "ns": 9 * MS, "why": "untrained"}]
    first = told(ledger_of(found, [manifest, msgspec.structs.replace(manifest, rank=1)]))[0]
    assert first.id == "backward_untrained"
    assert "nothing in front of them is trained" in first.said
    for group in manifest.param_groups:  # a frozen model whose gradients another one needs
        group.requires_grad = False
    assert untrained_units(manifest) == {}


def test_padding_costs_its_part_of_forward_and_backward() -> None:
    """42 of 50 ms are theirs; of the ranks, the one with less padding counts."""
    found = [
        {"cause": "compute", "phase": phase, "ns": ns * MS}
        for phase, ns in (("backward", 20), ("optimizer", 8))
    ]
    manifests = [RankManifest(rank=rank, padding=[share]) for rank, share in ((0, 0.5), (1, 0.4))]
    first = told(ledger_of(found, manifests))[0]
    assert (first.id, first.ns) == ("padding", 0.4 * 42 * MS)
    assert "40.0% of the tokens" in first.said
    none = ledger_of(found, [RankManifest(rank=rank, padding=[0.0]) for rank in (0, 1)])
    assert "padding" not in {one.id for one in none.entries}


@pytest.mark.parametrize(
    ("inputs", "repeated"),
    [
        ([["a", "b"], ["c", "c"]], True),
        ([["a", "b"], ["c", "d"]], False),
        ([["a", "a"], ["c", "c"]], False),  # one batch, again and again
        ([["a", "b"], ["c"]], False),
        ([["a", "b"], [None, None]], False),
        ([["a", "b"]], False),
    ],
)
def test_a_frozen_model_with_the_same_inputs_runs_once(
    inputs: list[list[str | None]], repeated: bool
) -> None:
    groups = [
        msgspec.structs.replace(
            sharded_group("blocks.0", [8, 8], ranks=2, rows=4), root=root, requires_grad=root == 0
        )
        for root in (0, 1)
    ]
    manifests = [RankManifest(rank=rank, param_groups=groups, inputs=inputs) for rank in (0, 1)]
    assert repeated_units(manifests[0]) == ({"root1:blocks.0": 1} if repeated else {})
    place = {"phase": "forward", "fqn": "root1:blocks.0"}
    compute = place | {"cause": "compute", "ns": 8 * MS, "why": "repeated" if repeated else None}
    gather = place | {"cause": "communication", "ns": 3 * MS, "op": "all_gather", "why": "launch"}
    entries = {one.id: one for one in ledger_of([compute, gather], manifests).entries}
    assert ("repeated_forward" in entries) is repeated
    if repeated:
        assert entries["repeated_forward"].ns == 11 * MS


@pytest.mark.parametrize(
    ("reused", "share"),
    [
        ([[False, True, False, True], [True, True, False, True]], 0.75),
        ([[False, False], [True, True]], 1),
        ([[True, True], [True, True]], None),  # one batch, again and again
        ([[True, False], [False, False]], None),
        ([[], []], None),
    ],
)
def test_a_frozen_model_runs_once_for_a_batch_of_several_steps(
    reused: list[list[bool]], share: float | None
) -> None:
    groups = [
        msgspec.structs.replace(
            sharded_group("blocks.0", [8, 8], ranks=2, rows=4), root=root, requires_grad=root == 0
        )
        for root in (0, 1)
    ]
    manifests = [RankManifest(rank=rank, param_groups=groups, reused_inputs=reused) for rank in (0, 1)]
    manifests[1].reused_inputs = [
        *reused[:1],
        [*reused[1], *reused[1][:1]],
    ]  # the rank with most does not count
    assert repeated_units(manifests[0]) == ({} if share is None else {"root1:blocks.0": share})
    found = [
        {"cause": "compute", "phase": "forward", "fqn": "root1:blocks.0", "ns": 8 * MS, "why": "repeated"}
    ]
    entries = {one.id: one for one in ledger_of(found, manifests).entries}
    if share is None:
        return
    remedy = entries["repeated_forward"].remedy
    assert remedy is not None
    assert remedy.gain_ns == share * 8 * MS


@pytest.mark.parametrize("offload", [True, False])
def test_an_update_on_the_cpu_is_the_cost_of_offload_and_not_of_tracing(offload: bool) -> None:
    group = msgspec.structs.replace(
        sharded_group("blocks.0", [1 << 10, 1 << 10], ranks=2, rows=1 << 9), offload=offload
    )
    manifests = [
        RankManifest(
            rank=rank,
            param_groups=[group],
            device=DeviceInfo(type="cuda", total_bytes=80 << 30),
            allocator={"reserved_bytes.all.peak": 8 << 30},
        )
        for rank in (0, 1)
    ]
    idle = {"cause": "sync", "phase": "optimizer", "ns": 30 * MS}
    copies = {"cause": "offload", "fqn": "blocks.0", "op": "Memcpy HtoD (Pinned -> Device)", "ns": 2 * MS}
    names = ("min_ns", "lower_quartile_ns", "median_ns", "upper_quartile_ns", "max_ns")
    times = dict.fromkeys(names, 20 * MS)
    slow = UnrecordedStep(steps=8, **times, traced_median_ns=50 * MS, slowdown=2.5)
    ledger = ledger_of([idle, copies], manifests, unrecorded=slow)
    if not offload:
        assert ledger.causes_ns["tracing"] == 30 * MS
        return
    first = told(ledger)[0]
    assert first.remedy is not None
    assert (first.id, first.ns, first.remedy.memory_bytes) == ("cpu_offload", 32 * MS, 4 << 20)
    assert "4.00 MiB of the 72.0 GiB left" in first.remedy.change
    assert (first.remedy.gain_ns, first.remedy.reason) == (2 * MS, UNTRACED), "of 20 ms, 18 are compute"
    assert "at most 2.00 ms (10.0%) of a step:" in try_first(first, ledger)


def test_kernels_of_a_loop_are_named_with_its_line() -> None:
    here = {"cause": "compute", "ns": 30 * MS, "why": "memory", "fqn": "", "phase": "forward"}
    (first,) = told(ledger_of([here | {"site": "a.py:4 in pairs()"}]))
    assert (first.id, first.evidence["site"]) == ("memory_bound_kernels", "a.py:4 in pairs()")
    assert first.remedy is not None
    assert first.remedy.change.startswith("Replace the loop at a.py:4 in pairs()")
    (first,) = told(ledger_of([here]))
    assert first.remedy is not None
    assert "loop" not in first.said + first.remedy.change


@pytest.mark.parametrize(
    ("seen", "gain_ms", "basis"), [(None, 10, "estimate"), (0.25, 15, "bound"), (1, None, "")]
)
def test_masked_attention_gains_what_its_mask_hides(
    seen: float | None, gain_ms: int | None, basis: str
) -> None:
    mask = UnshardedInfo(
        kind="buffer", fqn="seen", root=0, shape=[256, 256], dtype="bool", nbytes=1 << 16,
        requires_grad=False, true_frac=seen,
    )  # fmt: skip
    manifests = [RankManifest(rank=rank, unsharded=[mask]) for rank in (0, 1)]
    attention = {"cause": "compute", "ns": 20 * MS, "why": "masked", "fqn": "blocks.0", "phase": "forward"}
    found = told(ledger_of([attention], manifests))
    assert [one.id for one in found] == ["masked_attention"] * (gain_ms is not None)
    if gain_ms is not None:
        assert found[0].remedy is not None
        assert (found[0].remedy.gain_ns, found[0].remedy.basis) == (gain_ms * MS, basis)


@pytest.mark.parametrize(
    ("site", "named"),
    [
        (None, False),
        ("train.py:9", False),
        ("train.py:8 in train()", False),
        ("own.py:5 in step()", True),
    ],
)
def test_pauses_of_torchs_optimizer_are_not_the_scripts(site: str | None, named: bool) -> None:
    """``train`` calls ``step()``, and runs elsewhere, too."""
    pause = {"cause": "host_pause", "ns": 4 * MS, "phase": "optimizer", "site": site}
    other = {"cause": "host", "ns": MS, "phase": "forward", "site": "train.py:7 in train()"}
    entries = {one.id: one for one in ledger_of([pause, other]).entries}
    assert ("host_pause" in entries) is named
    assert entries["host_bound"].ns == (1 if named else 5) * MS


@pytest.mark.parametrize(
    ("beside", "loss"),
    [
        ([{"fqn": "blocks.0", "phase": "forward"}, {"fqn": "blocks.0", "phase": "backward"}], True),
        ([{"fqn": "blocks.0", "phase": "forward"}], False),
        ([{"fqn": None, "phase": "backward"}], False),
    ],
)
def test_a_loss_is_named_only_where_layers_and_a_backward_are_known(
    beside: list[dict[str, object]], loss: bool
) -> None:
    """Inference has neither, and a trace without layers has everything outside of them."""
    outside = {"cause": "compute", "ns": 30 * MS, "why": "memory", "fqn": None, "phase": "forward"}
    (first,) = told(ledger_of([outside, *({"cause": "compute", "ns": MS} | one for one in beside)]))
    assert first.id == "memory_bound_kernels"
    assert ("loss" in first.said) == loss


def test_the_largest_cause_opens_where_no_change_is_known() -> None:
    queued = {"cause": "queued", "ns": 20 * MS, "phase": "forward"}
    alone, both = ledger_of([queued]), ledger_of([queued, {"cause": "fsdp_copy", "ns": 26 * MS}])
    assert not told(both)
    first, second = _unexplained(both, "A step takes 70 ms.")
    assert "FSDP copies" in first
    assert second.startswith("Launched work waits")
    assert _unexplained(alone, "A step takes 20 ms.")[0].startswith("Launched work waits")


@pytest.mark.parametrize("why", ["graphs", None])
def test_compilation_in_the_first_step_alone_is_not_told(why: str | None) -> None:
    """Everything is compiled in a training's first step."""
    compiled = {"cause": "compilation", "ns": 30 * MS, "phase": "forward", "why": why}
    assert not told(ledger_of([compiled], only_step=0))
    assert [one.id for one in told(ledger_of([compiled], only_step=1))] == ["recompilation"]


@pytest.mark.parametrize(("lost_ns", "named"), [(24 * MS, True), (12 * MS, False)])
def test_a_much_larger_cause_without_a_change_is_named_beside_the_change(lost_ns: int, named: bool) -> None:
    memory = {"cause": "compute", "ns": 8 * MS, "why": "loop", "site": "a.py:4 (pairs)", "phase": "forward"}
    ledger = ledger_of([memory | {"why": "float64"}, {"cause": "unknown", "ns": lost_ns, "phase": "forward"}])
    (first,) = told(ledger)
    assert ("A larger part" in _larger(first, ledger)) == named


@pytest.mark.parametrize(
    ("name", "frac", "named"),
    [
        ("aten::div", 0.2, True),
        ("aten::div", 0.05, False),
        ("aten::addmm", 0.4, False),
        ("gelu_kernel", 0.3, False),
    ],
)
def test_an_operator_that_models_do_not_consist_of_is_named_where_it_takes_much(
    name: str, frac: float, named: bool
) -> None:
    row = KernelRow(name=name, kind="compute", count=4, total_ns=9 * MS, mean_ns=2 * MS, step_frac=frac)
    said = bound(ledger_of([]), replace(trace_analysis(), kernels=[row]))
    assert ("Of that, 9.00 ms in aten::div" in said) is named


def test_all_reduces_one_after_another_are_those_of_no_buckets() -> None:
    """A trace without FSDP's labels: 20 of 50 ms in 40 all-reduces, or in three."""
    for count, expected in ((40, ["unattributed_communication"]), (3, [])):
        one = {"cause": "other_communication", "op": "all_reduce", "phase": "backward", "at_once": True}
        found = [one | {"ns": 20 * MS, "count": count}]
        analysis = trace_analysis()
        unlabelled = replace(analysis.attribution, attributed=False)
        charges = [
            charge
            for rank in analysis.ranks
            for step in rank.steps
            for charge in (
                *(Charge(rank=rank.rank, step=step.step, **each) for each in found),  # type: ignore[arg-type]
                Charge(rank=rank.rank, step=step.step, cause="compute", ns=step.duration_ns - 20 * MS),
            )
        ]
        ledger = with_ledger(replace(analysis, attribution=unlabelled), charges).ledger
        assert ledger is not None
        assert [entry.id for entry in told(ledger)] == expected


@pytest.mark.parametrize(
    ("took_ms", "is_told"),
    [
        ((900, 300, *range(100, 200, 10)), True),
        ((900, 300, *range(100, 115)), False),  # by a seventh
        ((900, 300, 100, 180, 110, 170, 120, 160, 130, 190), False),  # up and down
        ((900, 300, 100, 130, 160, 200), False),  # too few
    ],
)
def test_steps_of_which_each_is_longer_than_the_one_before(took_ms: tuple[int, ...], is_told: bool) -> None:
    steps = [StepInfo(step=at, start_ns=0, duration_ns=ms * MS) for at, ms in enumerate(took_ms)]
    manifests = [RankManifest(rank=rank, steps=steps) for rank in (0, 1)]
    found = with_ledger(trace_analysis(), manifests=manifests).findings
    assert ("steps_get_longer" in [one.id for one in found]) is is_told


def test_a_bound_of_the_hosts_gain_has_the_waiting_that_ends_with_it() -> None:
    """Rank 1's host is slower by 10 ms, for which rank 0 waits: both gain all of their idle time."""
    found = [
        {"cause": "host", "ns": 5 * MS, "rank": 0},
        {"cause": "host", "ns": 15 * MS, "rank": 1},
        {"cause": "uneven_ranks", "ns": 10 * MS, "rank": 0, "late_rank": 1, "why": "host"},
    ]
    (entry, *_) = told(ledger_of(found))
    assert entry.id == "host_bound"
    assert entry.remedy is not None
    assert entry.remedy.gain_ns == 10 * MS


def test_the_rate_of_copies_is_that_of_the_copies_and_not_of_their_exposed_part() -> None:
    """512 MiB in 10 ms, of which 5 ms are exposed: 53.7 GB/s, and not twice that."""
    size = 512 << 20
    copied = {"cause": "offload", "op": "Memcpy HtoD", "phase": "other", "bytes": size, "count": 1}
    ledger = ledger_of([copied | {"ns": 5 * MS, "whole_ns": 10 * MS}])
    (found,) = (one for one in ledger.entries if one.id == "host_copies")
    assert found.evidence["bytes_per_s"] == size * 100
    assert "at 53.7 GB/s" in found.said
