"""What the search does not see, tried on the best configuration by the engine.

Explicit prefetching changes when things happen and nothing else: the best of it wins. Another precision
changes the training's numbers, and a compiler its code: what they would gain is shown, and they win only
where they are fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fsdp2prof.estimators.planner.request import Candidate, PlanRequest

__all__ = ["REFINED", "Variant", "variants"]

REFINED = ("forward_prefetch", "backward_prefetch", "reduce_dtype", "float8", "compile")
"""Options that are tried."""

_FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing changed in a configuration."""

    candidate: Candidate
    only_shown: bool
    """It changes the training's numbers or code."""


def variants(best: Candidate, request: PlanRequest) -> list[Variant]:
    """Return what to try on a configuration, without what is fixed or what it has already."""
    tried: list[tuple[dict[str, Any], bool]] = [
        ({"forward_prefetch": 1}, False),
        ({"forward_prefetch": 2}, False),
        ({"backward_prefetch": 2}, False),
        ({"reduce_dtype": "bfloat16"}, True),
    ]
    if not best.policy.compile:
        tried.append(({"compile": True}, True))
    elif request.cluster.hardware.flops.get(_FLOAT8):
        tried.append(({"float8": "tensorwise"}, True))
    found = []
    for changes, only_shown in tried:
        ((name, value),) = changes.items()
        if name not in request.fixed_policy and getattr(best.policy, name) != value:
            policy = replace(best.policy, **changes)
            found.append(Variant(replace(best, policy=policy), only_shown))
    return found
