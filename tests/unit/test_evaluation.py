"""Forwards without a backward, told from those of a model that is never trained."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.sharded_groups import sharded_group
from support.traces import TraceBuilder
from synthetic import Schedule, record, transformer, write

from fsdp2prof.analyzers.trace.evaluation import evaluation, keeps_graph, repeated_rows
from fsdp2prof.analyzers.trace.rank_tables import rank_tables
from fsdp2prof.manifest import RankManifest
from fsdp2prof.readers.trace.chrome_trace import read_trace


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_teacher_with_the_students_names_is_part_of_the_training(
    frozen: bool, tmp_path: Path
) -> None:
    """A trained model whose output is not used has the same labels, and is a forward too many."""
    schedule = Schedule(
        roots=(transformer(2), transformer(2)), mark_roots=True, frozen_roots=frozenset({0}), shard=2
    )
    path = write(record(schedule, schedule)[0], tmp_path / "rank0.json")
    groups = [
        msgspec.structs.replace(
            sharded_group(f"layers.{layer}", [64, 64], ranks=2, rows=32),
            root=root,
            requires_grad=not frozen or root == 1,
        )
        for root in (0, 1)
        for layer in (0, 1)
    ]
    manifest = RankManifest(param_groups=groups)
    assert len(evaluation(rank_tables(read_trace(path, workers=1), manifest)).passes) == (
        0 if frozen else schedule.steps
    )


@pytest.mark.parametrize("in_turns", [True, False])
def test_a_forward_whose_backward_comes_after_another_models_update_is_no_evaluation(in_turns: bool) -> None:
    """A GAN's steps: ``g`` forward, ``d`` forward, backward and update; then ``g`` backward and update.

    Of the last step, which is of ``d``, the backward of ``g`` is not recorded. Where ``g`` never has one, it
    is not trained and no evaluation either.
    """
    trace, at = TraceBuilder(), 0

    def label(*names: str) -> None:
        nonlocal at
        for name in names:
            trace.label(name, at, at + 5)
            at += 10

    def forward(module: str) -> None:
        label("FSDP::root_pre_forward", f"FSDP::pre_forward ({module})", f"FSDP::post_forward ({module})")

    def update(module: str) -> None:
        label(f"FSDP::pre_backward ({module})", "FSDP::root_post_backward_callback")
        label("Optimizer.step#AdamW.step")

    begins = []
    for step in range(5):
        begins.append(at)
        if step % 2 == 0:
            forward("g")
            forward("d")
            update("d")
        elif in_turns:
            update("g")
    for step, begin in enumerate([*begins, at][1:]):
        trace.label(f"ProfilerStep#{step}", begins[step], begin)
    assert evaluation(rank_tables(trace.build())).passes == []


@pytest.mark.parametrize("evaluated", [0, 2])
def test_a_head_that_runs_again_for_its_loss_leaves_the_blocks_their_forward(evaluated: int) -> None:
    """A loss in pieces calls the head outside the model's forward, which makes it a root of its own there."""
    trace, at = TraceBuilder(), 0

    def label(*names: str) -> None:
        nonlocal at
        for name in names:
            trace.label(f"FSDP::{name}", at, at + 5)
            at += 10

    for _ in range(evaluated + 1):
        label("root_pre_forward", "pre_forward (layers.0)", "pre_forward (output)", "post_forward (output)")
    label("root_pre_forward", *["pre_forward (output)"] * 8)
    label("pre_backward (output)", "pre_backward (layers.0)", "root_post_backward_callback")
    trace.device("update", at, at + 5, launch=at)
    trace.label("ProfilerStep#0", 0, at + 10)
    assert len(evaluation(rank_tables(trace.build())).passes) == evaluated


@pytest.mark.parametrize(
    ("lengths", "again"),
    [
        (range(5, 15), sum(range(5, 14))),
        ([5] + [1] * 9, 0),  # with a cache
        ([5] * 10, 0),  # rollouts
        ([5, 6, 7, 8, 5, 6, 7, 8, 9], 0),  # evaluation by length
    ],
)
def test_rows_that_generation_computes_again(lengths: list[int], again: int) -> None:
    """Two sequences grow by one token a pass; their first product has a row for each token."""
    trace, passes = TraceBuilder(), []
    for number, length in enumerate(lengths):
        begin = 100 * number
        trace.host("aten::embedding", begin + 10, begin + 20, dims=f"[[9,4],[2,{length}]]", types='["float"]')
        trace.host("aten::mm", begin + 30, begin + 40, dims=f"[[{2 * length},4],[4,4]]", types='["float"]')
        passes.append((3, begin, begin + 50))
    trace.label("ProfilerStep#3", 0, 2_000)
    tables = rank_tables(trace.build())
    assert repeated_rows(tables, passes) == {3: (2 * sum(lengths), 2 * again)}


def test_a_forward_with_gradients_puts_a_node_in_the_graph() -> None:
    trace = TraceBuilder()
    trace.label("ProfilerStep#3", 0, 2_000)
    trace.host("RegisterPostBackwardFunction", 120, 130)
    times = np.array([100, 300]), np.array([200, 400])
    assert keeps_graph(rank_tables(trace.build()), *times).tolist() == [True, False]


@pytest.mark.parametrize("graph_in", [0, 1])
def test_the_forward_with_a_graph_has_the_backward(graph_in: int) -> None:
    """Two forwards, then a backward: a metric without gradients may come before or after the training's."""
    trace = TraceBuilder()
    for number in range(2):
        begin = 100 * number
        trace.label("FSDP::root_pre_forward", begin, begin + 5)
        trace.label("FSDP::pre_forward (layers.0)", begin + 10, begin + 50)
        if number == graph_in:
            trace.host("RegisterPostBackwardFunction", begin + 20, begin + 30)
    trace.label("FSDP::pre_backward (layers.0)", 200, 210)
    trace.label("FSDP::root_post_backward_callback", 220, 230)
    trace.device("update", 240, 250, launch=240)
    trace.label("ProfilerStep#3", 0, 300)
    other = 100 * (1 - graph_in)
    assert evaluation(rank_tables(trace.build())).passes == [(3, other, other + 50)]
