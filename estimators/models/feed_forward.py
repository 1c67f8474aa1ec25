"""SwiGLU of the built-in models, in separate operators or as one kernel would run it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from fsdp2prof.fake_tensors import FusedSwiGLU


def swiglu(gate: Tensor, up: Tensor, *, fused: bool) -> Tensor:
    """Return ``silu(gate) * up``; ``fused`` as one kernel would, on fake tensors."""
    if not fused or not is_fake(gate):
        return F.silu(gate) * up
    out: Tensor = FusedSwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class FeedForward(nn.Module):
    """SwiGLU that every token passes: ``w2(silu(w1 x) * w3 x)``."""

    fused = False
    """Run SiLU and the product as one kernel would."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position."""
        out: Tensor = self.w2(swiglu(self.w1(x), self.w3(x), fused=self.fused))
        return out
