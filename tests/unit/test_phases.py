"""The phase map: labels in, (step, module, phase, activity) of every instant out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fsdp2prof.analyzers.phases import build_phases, find_rows
from fsdp2prof.labels import AUTOGRAD_NODE, parse_label
from fsdp2prof.tables.columns import Strings
from fsdp2prof.tables.trace import LabelTable, PhaseTable, StepTable

Span = tuple[str, int, int]
Range = Span | tuple[str, int, int, int]
"""Name, start, end and, if not 0, thread."""


def labels(*ranges: Range) -> LabelTable:
    rows = [(*item, 0)[:4] for item in ranges]
    return LabelTable(
        thread=np.array([row[3] for row in rows], dtype=np.int64),
        start_ns=np.array([row[1] for row in rows], dtype=np.int64),
        end_ns=np.array([row[2] for row in rows], dtype=np.int64),
        name=Strings.intern(str(row[0]) for row in rows),
    )


def steps(*rows: tuple[int, int, int]) -> StepTable:
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return StepTable(step=table[:, 0], start_ns=table[:, 1], end_ns=table[:, 2])


def at(phases: PhaseTable, time: int, thread: int = 0) -> tuple[str | None, str, str] | None:
    """(module, phase, activity) of one instant."""
    row = int(find_rows(phases, np.array([thread]), np.array([time]))[0])
    if row < 0:
        return None
    return phases.fqn[row], phases.phase[row] or "", phases.activity[row] or ""


@pytest.mark.parametrize(
    ("name", "kind", "fqn"),
    [
        ("FSDP::all_gather (layers.0)", "all_gather", "layers.0"),
        ("FSDP::all_gather", "all_gather", ""),
        ("FSDP::all_gather (layers.0) [pg=4]", "all_gather", "layers.0"),
        ("FSDP::all_gather [pg=8]", "all_gather", ""),
        ("FSDP::pre_forward (norm, head)", "pre_forward", "norm, head"),
        ("FSDP::backward_prefetch for layers.3", "backward_prefetch", "layers.3"),
        ("FSDP::backward_prefetch for ", "backward_prefetch", ""),
        ("FSDP::forward_prefetch for norm, head", "forward_prefetch", "norm, head"),
        ("FSDP::post_backward_rs_wait ()", "post_backward_rs_wait", ""),
        ("FSDP::cast_forward_inputs", "cast_forward_inputs", None),
        ("FSDP::root_post_backward_callback", "root_post_backward_callback", ""),
        ("Optimizer.step#AdamW.step", "optimizer", None),
    ],
)
def test_labels_are_parsed(name: str, kind: str, fqn: str | None) -> None:
    label = parse_label(name)
    assert label is not None
    assert (label.kind, label.fqn) == (kind, fqn)


@pytest.mark.parametrize("name", ["gloo:all_gather", "ProfilerStep#3", "my range", "FSDP", "aten::mm"])
def test_other_ranges_are_no_labels(name: str) -> None:
    assert parse_label(name) is None


def forward(start: int, fqn: str) -> list[Span]:
    """A module's forward: 10 ns of pre-forward, 20 ns of compute, 5 ns of post-forward."""
    name = f" ({fqn})" if fqn else ""
    return [
        (f"FSDP::pre_forward{name}", start, start + 10),
        (f"FSDP::all_gather{name}", start + 1, start + 5),
        (f"FSDP::all_gather_copy_out{name}", start + 6, start + 9),
        (f"FSDP::post_forward{name}", start + 30, start + 35),
    ]


def test_forward_compute_belongs_to_the_innermost_open_module() -> None:
    phases = build_phases(
        labels(
            ("FSDP::root_pre_forward", 0, 4),
            ("FSDP::cast_forward_inputs", 5, 8),
            ("FSDP::pre_forward", 10, 20),
            ("FSDP::cast_forward_inputs", 25, 28),
            *forward(30, "layers.0"),
            *forward(70, "layers.1"),
            ("FSDP::post_forward", 110, 120),
            ("FSDP::cast_forward_outputs", 121, 125),
        ),
        steps((7, 0, 200)),
    )
    assert at(phases, 2) == ("", "forward", "hooks")
    assert at(phases, 6) == ("", "forward", "cast")
    assert at(phases, 22) == ("", "forward", "compute")
    assert at(phases, 26) == ("layers.0", "forward", "cast")
    assert at(phases, 32) == ("layers.0", "forward", "all_gather")
    assert at(phases, 36) == ("layers.0", "forward", "copy_out")
    assert at(phases, 50) == ("layers.0", "forward", "compute")
    assert at(phases, 61) == ("layers.0", "forward", "reshard")
    assert at(phases, 67) == ("", "forward", "compute")
    assert at(phases, 90) == ("layers.1", "forward", "compute")
    assert at(phases, 115) == ("", "forward", "reshard")
    assert at(phases, 122) == ("", "forward", "cast")
    assert at(phases, 150) is None
    assert set(phases.step.tolist()) == {7}


def test_nested_modules_give_time_back_to_their_parent() -> None:
    phases = build_phases(
        labels(
            ("FSDP::pre_forward (block)", 0, 10),
            ("FSDP::pre_forward (block.experts)", 20, 30),
            ("FSDP::post_forward (block.experts)", 40, 45),
            ("FSDP::post_forward (block)", 60, 65),
        ),
        steps(),
    )
    assert [at(phases, t) for t in (15, 35, 50)] == [
        ("block", "forward", "compute"),
        ("block.experts", "forward", "compute"),
        ("block", "forward", "compute"),
    ]
    assert set(phases.step.tolist()) == {-1}


BACKWARD: list[Span] = [
    ("FSDP::pre_backward", 200, 210),
    ("FSDP::backward_prefetch for layers.1", 203, 208),
    ("FSDP::all_gather (layers.1)", 204, 207),
    ("FSDP::pre_backward (layers.1)", 220, 230),
    ("FSDP::post_backward_accumulate (layers.1)", 250, 252),
    ("FSDP::post_backward_reshard (layers.1)", 254, 256),
    ("FSDP::post_backward_rs_wait (layers.1)", 257, 258),
    ("FSDP::post_backward_reduce (layers.1)", 260, 270),
    ("FSDP::root_post_backward_callback", 300, 340),
    ("FSDP::post_backward_reduce", 310, 320),
]


def test_backward_runs_from_the_first_label_to_the_final_callback() -> None:
    phases = build_phases(
        labels(
            ("FSDP::pre_forward", 100, 110),
            ("FSDP::post_forward", 150, 160),
            *BACKWARD,
            ("Optimizer.step#AdamW.step", 350, 380),
        ),
        steps((1, 0, 400)),
    )
    assert at(phases, 180) == (None, "forward", "compute"), "the loss"
    assert at(phases, 205) == ("layers.1", "backward", "all_gather"), "a prefetch is its target's"
    assert at(phases, 215) == ("", "backward", "compute")
    assert at(phases, 240) == ("layers.1", "backward", "compute")
    assert at(phases, 253) == ("layers.1", "backward", "hooks"), "between a module's own labels"
    assert at(phases, 257) == ("layers.1", "backward", "reduce_wait")
    assert at(phases, 265) == ("layers.1", "backward", "reduce")
    assert at(phases, 280) == ("", "backward", "compute"), "the root's own backward"
    assert at(phases, 305) == ("", "backward", "final_wait")
    assert at(phases, 315) == ("", "backward", "reduce")
    assert at(phases, 345) is None
    assert at(phases, 360) == (None, "optimizer", "compute")


@pytest.mark.parametrize("backward_thread", [0, 5])
def test_what_an_optimizers_closure_runs_is_what_its_labels_say(backward_thread: int) -> None:
    backward: list[Range] = [(name, start, end, backward_thread) for name, start, end in BACKWARD]
    phases = build_phases(
        labels(
            ("Optimizer.step#AdamW.step", 50, 400),
            ("FSDP::pre_forward", 100, 110),
            ("FSDP::post_forward", 150, 160),
            *backward,
            ("Optimizer.step#AdamW.step", 500, 550),
        ),
        steps((1, 0, 600)),
    )
    assert at(phases, 60) is None, "the closure before its forward"
    assert at(phases, 130) == ("", "forward", "compute")
    assert at(phases, 180) == (None, "forward", "compute"), "the loss"
    assert at(phases, 240, backward_thread) == ("layers.1", "backward", "compute")
    if backward_thread:
        assert at(phases, 240) is None, "the thread that waits for the backward"
    assert at(phases, 370) == (None, "optimizer", "compute"), "the update"
    assert at(phases, 520) == (None, "optimizer", "compute"), "the next one has no closure"
    (one_step,) = set(phases.step.tolist())
    assert one_step == 1


def test_gradients_set_to_zero_between_the_loss_and_its_backward_do_not_end_the_loss() -> None:
    phases = build_phases(
        labels(
            ("FSDP::pre_forward", 100, 110),
            ("FSDP::post_forward", 150, 160),
            ("FSDP::cast_forward_outputs", 160, 162),
            ("Optimizer.zero_grad#AdamW.zero_grad", 170, 180),
            *BACKWARD,
        ),
        steps((1, 0, 600)),
    )
    assert [at(phases, time) for time in (165, 175, 190)] == [
        (None, "forward", "compute"),
        (None, "optimizer", "compute"),
        (None, "forward", "compute"),
    ]


def test_a_backward_without_an_end_is_not_the_optimizers_closure() -> None:
    phases = build_phases(
        labels(
            ("FSDP::pre_backward", 100, 110),
            ("FSDP::post_backward_reduce", 120, 130),
            ("Optimizer.step#AdamW.step", 150, 200),
        ),
        steps((1, 0, 400)),
    )
    assert at(phases, 170) == (None, "optimizer", "compute")


def test_backward_on_its_own_thread_leaves_the_blocked_one_alone() -> None:
    backward = [(name, start, end, 5) for name, start, end in BACKWARD]
    phases = build_phases(
        labels(("FSDP::pre_forward", 100, 110), ("FSDP::post_forward", 150, 160), *backward),
        steps((1, 0, 400)),
    )
    assert at(phases, 240, thread=5) == ("layers.1", "backward", "compute")
    assert at(phases, 240, thread=0) is None
    assert at(phases, 180, thread=0) == (None, "forward", "compute")
    assert at(phases, 180, thread=5) is None


def test_a_forward_recomputed_in_backward_is_backward() -> None:
    phases = build_phases(
        labels(
            ("FSDP::pre_backward", 200, 210),
            ("FSDP::root_pre_forward", 212, 214),
            ("FSDP::cast_forward_inputs", 215, 217),
            *forward(220, "layers.1"),
            ("FSDP::pre_backward (layers.1)", 260, 262),
            ("FSDP::post_backward_reduce (layers.1)", 280, 290),
            ("FSDP::root_post_backward_callback", 300, 310),
        ),
        steps((1, 0, 400)),
    )
    assert at(phases, 213) == ("layers.1", "backward", "hooks"), "not the root's: it recomputes layers.1"
    assert at(phases, 222) == ("layers.1", "backward", "all_gather")
    assert at(phases, 240) == ("layers.1", "backward", "compute")
    assert at(phases, 270) == ("layers.1", "backward", "compute")


def test_the_loss_ends_where_autograd_begins() -> None:
    phases = build_phases(
        labels(
            ("FSDP::pre_forward", 100, 110),
            ("FSDP::post_forward", 150, 160),
            (AUTOGRAD_NODE + ": NllLossBackward0", 180, 185, 5),
            (AUTOGRAD_NODE + ": AddmmBackward0", 190, 215, 5),
            ("FSDP::pre_backward", 200, 210, 5),
            ("FSDP::root_post_backward_callback", 300, 310, 5),
        ),
        steps(),
    )
    assert at(phases, 170) == (None, "forward", "compute")
    assert at(phases, 181) == (None, "backward", "compute")
    assert at(phases, 182, thread=5) == (None, "backward", "compute")
    assert at(phases, 187, thread=5) is None
    assert at(phases, 195, thread=5) == (None, "backward", "compute")
    assert at(phases, 205, thread=5) == ("", "backward", "hooks")


def test_without_fsdp_autograd_alone_marks_backward() -> None:
    phases = build_phases(
        labels(
            (AUTOGRAD_NODE + ": A", 10, 20), (AUTOGRAD_NODE + ": B", 20, 30), ("Optimizer.step#SGD", 40, 50)
        ),
        steps((0, 0, 100)),
    )
    assert [at(phases, t) for t in (15, 25, 35, 45)] == [
        (None, "backward", "compute"),
        (None, "backward", "compute"),
        None,
        (None, "optimizer", "compute"),
    ]


def test_a_root_without_parameters_still_has_a_forward() -> None:
    phases = build_phases(
        labels(
            ("FSDP::root_pre_forward", 0, 5),
            *forward(10, "layers.0"),
            ("FSDP::pre_backward (layers.0)", 100, 110),
            ("FSDP::root_post_backward_callback", 150, 160),
        ),
        steps(),
    )
    assert at(phases, 47) == ("", "forward", "compute")
    assert at(phases, 120) == ("layers.0", "backward", "compute")


def test_a_group_of_modules_is_one_module() -> None:
    phases = build_phases(
        labels(
            ("FSDP::pre_forward (norm, head)", 0, 10),
            ("FSDP::pre_forward (norm, head)", 20, 30),
            ("FSDP::post_forward (norm, head)", 40, 45),
            ("FSDP::pre_forward (tail)", 60, 65),
        ),
        steps(),
    )
    assert [at(phases, t) for t in (15, 35)] == [("norm, head", "forward", "compute")] * 2
    assert at(phases, 50) is None


def test_several_groups_of_one_module_share_its_name() -> None:
    phases = build_phases(
        labels(
            ("FSDP::pre_forward (moe) [pg=2]", 0, 10),
            ("FSDP::all_gather (moe) [pg=2]", 2, 4),
            ("FSDP::pre_forward (moe) [pg=8]", 12, 20),
            ("FSDP::post_forward (moe) [pg=2]", 40, 45),
            ("FSDP::post_forward (moe) [pg=8]", 46, 50),
        ),
        steps(),
    )
    assert at(phases, 3) == ("moe", "forward", "all_gather")
    assert at(phases, 30) == ("moe", "forward", "compute")
    assert at(phases, 60) is None


def test_roots_are_told_apart_by_the_ranges_around_them() -> None:
    phases = build_phases(
        labels(
            ("fsdp2prof::root (0)", 0, 100),
            ("FSDP::pre_forward", 5, 10),
            *forward(20, "layers.0"),
            *forward(60, "encoder"),
            ("FSDP::post_forward", 96, 98),
            ("fsdp2prof::root (1)", 100, 200),
            ("FSDP::pre_forward", 105, 110),
            *forward(120, "layers.0"),
            ("FSDP::post_forward", 170, 175),
            ("fsdp2prof::root (1)", 210, 220),
            ("FSDP::pre_backward (layers.0)", 212, 218),
            ("FSDP::pre_backward (encoder)", 230, 240),
            ("FSDP::pre_backward (layers.0)", 250, 260),
        ),
        steps(),
    )
    assert at(phases, 22) == ("root0:layers.0", "forward", "all_gather")
    assert at(phases, 40) == ("root0:layers.0", "forward", "compute")
    assert at(phases, 140) == ("root1:layers.0", "forward", "compute")
    assert at(phases, 115) == ("root1:", "forward", "compute")
    assert at(phases, 215) == ("root1:layers.0", "backward", "hooks"), "inside a range of the recorder's"
    assert at(phases, 235) == ("root0:encoder", "backward", "hooks"), "only one root has it"
    assert at(phases, 255) == ("layers.0", "backward", "hooks"), "either root's: not guessed"


def test_names_are_qualified_even_if_one_root_alone_ran() -> None:
    ranges = labels(("fsdp2prof::root (0)", 0, 50), *forward(5, "layers.0"))
    assert at(build_phases(ranges, steps()), 7) == ("layers.0", "forward", "all_gather")
    assert at(build_phases(ranges, steps(), roots=2), 7) == ("root0:layers.0", "forward", "all_gather")
    other = labels(("fsdp2prof::root (1)", 0, 50), *forward(5, "layers.0"))
    assert at(build_phases(other, steps()), 7) == ("root1:layers.0", "forward", "all_gather")


def test_rows_end_at_step_boundaries() -> None:
    phases = build_phases(
        labels(("Optimizer.step#A", 90, 130), ("FSDP::pre_forward", 140, 150)),
        steps((3, 0, 100), (4, 110, 200)),
    )
    rows = list(zip(phases.start_ns.tolist(), phases.end_ns.tolist(), phases.step.tolist(), strict=True))
    assert rows[:3] == [(90, 100, 3), (100, 110, -1), (110, 130, 4)]


def test_a_module_left_open_by_a_crash_does_not_reach_into_the_next_step() -> None:
    phases = build_phases(
        labels(("FSDP::pre_forward (a)", 10, 20), ("FSDP::pre_forward (b)", 120, 130)),
        steps((0, 0, 100), (1, 110, 200)),
    )
    assert at(phases, 50) == ("a", "forward", "compute")
    assert at(phases, 115) is None


def test_labels_of_coarse_clocks_may_have_no_length() -> None:
    phases = build_phases(
        labels(
            ("FSDP::pre_forward (a)", 10, 10),
            ("FSDP::post_forward (a)", 15, 15),
            ("FSDP::pre_forward (b)", 15, 16),
            ("FSDP::all_gather (b)", 15, 15),
            ("FSDP::post_forward (b)", 20, 21),
        ),
        steps(),
    )
    assert at(phases, 12) == ("a", "forward", "compute")
    assert at(phases, 18) == ("b", "forward", "compute")


def test_a_backends_own_thread_is_none_of_fsdps() -> None:
    phases = build_phases(
        labels(
            *forward(0, "a"),
            ("FSDP::all_gather (a)", 4, 25, 9),
            ("FSDP::reduce_scatter (a)", 80, 90, 9),
        ),
        steps(),
    )
    assert at(phases, 20) == ("a", "forward", "compute")
    assert at(phases, 20, thread=9) is None


KINDS = [
    "FSDP::pre_forward (m)",
    "FSDP::post_forward (m)",
    "FSDP::pre_backward (n)",
    "FSDP::post_backward_reduce (n)",
    "FSDP::root_post_backward_callback",
    "FSDP::all_gather_copy_out (m)",
    "Optimizer.step#A",
    "fsdp2prof::root (0)",
    AUTOGRAD_NODE + ": A",
]


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(0, 80), st.integers(0, 80), st.integers(0, 2)),
        max_size=14,
    )
)
@example(
    [
        ("FSDP::post_forward (m)", 0, 0, 0),
        ("FSDP::pre_backward (n)", 2, 2, 0),
        ("FSDP::all_gather_copy_out (m)", 0, 1, 0),
        ("autograd::engine::evaluate_function: A", 1, 1, 0),
    ]
)
def test_any_labels_give_disjoint_sorted_rows_with_the_innermost_label_first(
    ranges: list[tuple[str, int, int, int]],
) -> None:
    ranges = [(name, min(a, b), max(a, b), thread) for name, a, b, thread in ranges]
    phases = build_phases(labels(*ranges), steps((0, 0, 30), (1, 35, 70)))
    key = list(zip(phases.thread.tolist(), phases.start_ns.tolist(), phases.end_ns.tolist(), strict=True))
    assert key == sorted(key)
    assert all(start < end for _, start, end in key)
    assert all(a[2] <= b[1] for a, b in itertools.pairwise(key) if a[0] == b[0])
    for name, start, end, thread in ranges:
        others = [item for item in ranges if item[3] == thread and item != (name, start, end, thread)]
        if any(start < item[2] and item[1] < end for item in others):
            continue
        if name.startswith("Optimizer") and any(
            start <= item[1] < end for item in ranges if "FSDP" in item[0]
        ):
            continue  # a closure
        expected = {
            "Optimizer.step#A": (None, "optimizer"),
            "FSDP::all_gather_copy_out (m)": ("m", None),
        }.get(name)
        if expected is None:
            continue
        for time in range(start, end):
            found = at(phases, time, thread)
            assert found is not None
            assert (found[0], expected[1] and found[1]) == expected


def test_ranges_of_megatron_fsdp_are_labels() -> None:
    """``MFSDP <name> forward|backward`` brackets the module's work and nothing else."""
    phases = build_phases(
        labels(("MFSDP decoder.layers.3 forward", 10, 30), ("MFSDP decoder.layers.3 backward", 50, 90)),
        steps((1, 0, 100)),
    )
    assert at(phases, 20) == ("decoder.layers.3", "forward", "compute")
    assert at(phases, 60) == ("decoder.layers.3", "backward", "compute")
    assert (at(phases, 40) or (None,))[0] is None
    assert parse_label("MFSDP decoder.layers.3 sideways") is None
