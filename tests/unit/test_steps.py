"""Which steps of a trace hold training."""

from __future__ import annotations

import numpy as np

from fsdp2prof.analyzers.steps import host_steps, trained_steps
from fsdp2prof.tables.columns import Strings
from fsdp2prof.tables.trace import LabelTable


def labels(*ranges: tuple[int, int, str]) -> LabelTable:
    start, end, name = zip(*ranges, strict=True)
    return LabelTable(
        thread=np.zeros(len(ranges), dtype=np.int64),
        start_ns=np.array(start, dtype=np.int64),
        end_ns=np.array(end, dtype=np.int64),
        name=Strings.intern(name),
    )


def test_what_follows_the_last_step_is_no_training() -> None:
    """Step 5 begins after the last one and sees only the gradients cleared and the program end."""
    table = labels(
        (0, 100, "ProfilerStep#4"),
        (10, 20, "FSDP::pre_forward (layers.0)"),
        (90, 95, "Optimizer.step#AdamW.step"),
        (100, 300, "ProfilerStep#5"),
        (101, 102, "Optimizer.zero_grad#AdamW.zero_grad"),
        (150, 160, "something else"),
    )
    assert host_steps(table).step.tolist() == [4, 5]
    assert trained_steps(table) == {4}


def test_a_forward_that_began_is_training() -> None:
    table = labels((0, 100, "ProfilerStep#1"), (99, 100, "fsdp2prof::root (0)"))
    assert trained_steps(table) == {1}
    assert trained_steps(labels((0, 5, "FSDP::pre_forward (a)"))) == set(), "outside every step"
