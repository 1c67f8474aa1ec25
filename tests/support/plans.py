"""A small plan, made by the engine itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.planner.plan import Planning
from fsdp2prof.estimators.planner.request import Call, PlanRequest, in_this_process
from fsdp2prof.results.plan import Plan
from support.shared import shared

__all__ = ["ENGINE", "NODE", "SMALL", "small_plan", "small_planning"]

NODE = Cluster(hardware=HardwareSpec.parse("h100"))
SMALL = PlanRequest(
    model=ModelSpec(source="gpt2", layers=4),
    cluster=NODE,
    gpus=4,
    global_batch=8,
    policy=PolicySpec(seq_len=64),
    price_per_gpu_hour=2.5,
)


def _run_once(call: Call) -> Any:
    function, item = call
    return shared(f"{function.__name__} {item!r}", lambda: in_this_process([call])[0])


def _run_all_once(calls: Sequence[Call]) -> list[Any]:
    return [_run_once(one) for one in calls]


ENGINE = _run_all_once
"""An engine that runs every call once."""


@lru_cache(maxsize=1)
def small_planning() -> Planning:
    """A search that ran to its end."""
    made = Planning(request=SMALL, engine=ENGINE)
    made.run()
    return made


@lru_cache(maxsize=1)
def small_plan() -> Plan:
    """Its result."""
    return small_planning().plan()
