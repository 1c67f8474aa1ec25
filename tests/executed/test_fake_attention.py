"""Attention on fake tensors is one kernel wherever a GPU has one, though the host has none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2prof.fake_tensors import fake_tensors


class Operators(TorchDispatchMode):
    """Names the operators that run, and adds up what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def attend(width: int = 64, **named: Any) -> Tensor:
    query, key = (torch.ones(2, 4, 32, 64, requires_grad=True) for _ in range(2))
    value = torch.ones(2, 4, 32, width, requires_grad=True)
    return F.scaled_dot_product_attention(query, key, value, **named)


CASES: dict[str, tuple[Callable[[], Tensor], Any]] = {
    "plain": (lambda: attend(is_causal=True), None),
    "narrow values": (lambda: attend(48, is_causal=True), None),
    "dropout": (lambda: attend(is_causal=True, dropout_p=0.1), None),
    "narrow values under a mask": (lambda: attend(48, attn_mask=torch.ones(32, 32, dtype=torch.bool)), None),
    "a trained bias": (lambda: attend(attn_mask=torch.zeros(1, 4, 32, 32, requires_grad=True)), None),
    "efficient alone": (lambda: attend(is_causal=True), SDPBackend.EFFICIENT_ATTENTION),
    "cuDNN alone": (lambda: attend(is_causal=True, dropout_p=0.1), SDPBackend.CUDNN_ATTENTION),
}


@pytest.mark.parametrize("name", CASES)
def test_no_scores_of_all_pairs(name: str) -> None:
    run, backend = CASES[name]
    with fake_tensors(), nullcontext() if backend is None else sdpa_kernel(backend), Operators() as ran:
        out = run()
        assert out.shape == (2, 4, 32, 48 if "narrow" in name else 64)
        out.sum().backward()
    assert any("attention" in made for made in ran.names)
    assert not {made for made in ran.names if "softmax" in made or made in ("bmm", "native_dropout")}


def test_separate_operators_where_they_are_asked_for() -> None:
    with fake_tensors(), sdpa_kernel(SDPBackend.MATH), Operators() as ran:
        attend(48, is_causal=True, dropout_p=0.1)
    assert "bmm" in ran.names
    assert any("softmax" in made for made in ran.names)
    assert any("bernoulli" in made or "dropout" in made for made in ran.names)
