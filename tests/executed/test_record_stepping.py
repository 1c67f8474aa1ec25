"""Where a training step ends, event by event: F forward, S step, B step inside backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp2prof.recorder.rank.stepping import TrainingSteps, UnseenUpdates


def play(events):
    """Return the position of the event at which each training step ended; -1 for the end of the run."""
    ends = []
    position = -1
    steps = TrainingSteps(lambda: ends.append(position))
    for position, event in enumerate(events):  # noqa: B007 (read by the callback)
        if event == "F":
            steps.forward()
        else:
            steps.optimizer_stepped(in_backward=event == "B")
    position = -1
    steps.finish()
    return ends


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("FSFS", [1, 3]),
        ("FSSFSS", [1, 4]),  # two optimizers
        ("FFFSFFFS", [3, 7]),  # micro-batches, or several models
        ("SSFS", [3]),  # updates before any forward
        ("FBBBFBB", [4, -1]),  # optimizers in backward: up to the next forward
        ("FBBSFBBS", [3, 7]),  # some in backward, the rest after it
        ("FF", []),
    ],
)
def test_steps(events, expected):
    assert play(events) == expected


@given(st.text("FSB", max_size=40))
def test_there_are_as_many_steps_as_turns_from_forward_to_update(events):
    collapsed = "".join("u" if event in "SB" else event for event in events)
    assert len(play(events)) == collapsed.count("Fu")


def test_updates_without_an_optimizer_are_seen() -> None:
    """In place, or by gradients that are gone; not of the first forward, nor between micro-batches."""
    updates, parameter = UnseenUpdates(), torch.zeros(3, requires_grad=True)
    assert not updates.since_last_forward(parameter, reduced=False)
    parameter.grad = torch.ones(3)
    assert not updates.since_last_forward(parameter, reduced=True)
    with torch.no_grad():
        parameter.sub_(1)
    assert updates.since_last_forward(parameter, reduced=True)
    parameter.grad = None
    assert updates.since_last_forward(parameter, reduced=False)
    assert not updates.since_last_forward(parameter, reduced=False)
    assert updates.since_last_forward(parameter, reduced=True)
    assert not updates.since_last_forward(torch.zeros(3, requires_grad=True), reduced=True)
