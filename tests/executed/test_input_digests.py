"""Hashes of what a model gets, which tell ranks that read the same data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp2prof.recorder.model.inputs import input_digest

WORDS = torch.arange(6).view(2, 3)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (WORDS, True),
        ({"input_ids": WORDS, "labels": None}, True),
        ([(torch.zeros(4), WORDS.float().bfloat16().requires_grad_())], True),
        (torch.zeros(4), False),
        ("no tensor", False),
        (WORDS.t(), False),
        (torch.empty(3, device="meta"), False),
    ],
)
def test_only_tensors_that_can_be_read_and_vary_say_something(inputs: Any, says: bool) -> None:
    assert (input_digest((inputs,), {}) is not None) is says


def test_digests_differ_as_the_data_do() -> None:
    first = input_digest((WORDS,), {"mask": torch.ones(2)})
    assert first == input_digest((WORDS.clone(),), {"mask": torch.ones(2)})
    assert first != input_digest((WORDS + 1,), {"mask": torch.ones(2)})
    assert first != input_digest((WORDS.view(3, 2),), {"mask": torch.ones(2)})
