"""What the search does not see, tried on the best configuration by the engine.

Explicit prefetching, and units that keep their parameters, change when things happen and nothing else: the
best of them wins. Another precision changes the training's numbers: what it would gain is shown, and it wins
only where it is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fsdp2prof.estimators.planner.request import Candidate, PlanRequest

__all__ = ["REFINED", "Variant", "variants"]

REFINED = ("forward_prefetch", "backward_prefetch", "reduce_dtype", "float8")
"""Options that are tried; ``reshard`` is searched, too."""

_FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing changed in a configuration."""

    candidate: Candidate
    changes_numbers: bool
    """Of the training: its precision."""


def variants(best: Candidate, request: PlanRequest) -> list[Variant]:
    """Return what to try on a configuration, without what is fixed or what it has already."""
    tried: list[tuple[dict[str, Any], bool]] = [
        ({"forward_prefetch": 1}, False),
        ({"forward_prefetch": 2}, False),
        ({"backward_prefetch": 2}, False),
        ({"reduce_dtype": "bfloat16"}, True),
    ]
    if best.mesh.pp == 1:
        tried.append(({"reshard": "torchtitan"}, False))
    if request.cluster.hardware.flops.get(_FLOAT8):
        tried.append(({"float8": "tensorwise"}, True))
    found = []
    for changes, changes_numbers in tried:
        ((name, value),) = changes.items()
        if name not in request.fixed_policy and getattr(best.policy, name) != value:
            policy = replace(best.policy, **changes)
            found.append(Variant(replace(best, policy=policy), changes_numbers))
    return found
