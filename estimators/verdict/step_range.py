"""Between what a step's time lies: the kindest and the harshest of what is not known, simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from fsdp2prof.estimators.spec.hardware import HardwareSpec
from fsdp2prof.estimators.timeline.calibrated import PlacedCosts
from fsdp2prof.estimators.timeline.commands import Program
from fsdp2prof.estimators.timeline.costs import ClusterCosts, HostPace
from fsdp2prof.estimators.timeline.micro_batches import repeated
from fsdp2prof.estimators.timeline.simulate import simulate
from fsdp2prof.results.step_estimate import StepRange

__all__ = ["CONTENTION", "HOST_NS", "range_of"]

CONTENTION = (0.05, 0.19, 0.40)
"""How much longer a kernel takes beside a collective: kindest, in the estimate, harshest."""
HOST_NS = (3_000, 5_000, 10_000)
"""What the eager host takes to issue an operator, likewise."""

_Value = TypeVar("_Value", int, float)


@dataclass(frozen=True, slots=True)
class _End:
    """One end of everything that is not known."""

    contention_frac: float
    operator_ns: int
    compute_frac: float
    memory_frac: float


def range_of(program: Program, costs: ClusterCosts, bubble_ns: int, step_ns: int) -> StepRange:
    """Simulate the kindest and the harshest of what is not known; of a calibration, its steps' own spread."""
    calibration = costs.calibration if isinstance(costs, PlacedCosts) else None
    if calibration is not None:
        spread = f"{calibration.low_frac:.0%} to {calibration.high_frac:.0%}"
        return StepRange(
            low_ns=round(step_ns * calibration.low_frac) + bubble_ns,
            high_ns=round(step_ns * calibration.high_frac) + bubble_ns,
            unknown=[
                f"half of the {calibration.steps} steps that this is calibrated on took {spread} of their "
                "median"
            ],
        )
    hardware = costs.cluster.hardware
    if hardware.on_host:
        return StepRange(low_ns=step_ns, high_ns=step_ns, unknown=["nothing is varied for a CPU"])
    kind, harsh = _ends(hardware)
    low, high = _step_ns(program, costs, kind), _step_ns(program, costs, harsh)
    return StepRange(
        low_ns=min(low, step_ns) + bubble_ns,
        high_ns=max(high, step_ns) + bubble_ns,
        unknown=_in_words(hardware, kind, harsh),
    )


def _ends(hardware: HardwareSpec) -> tuple[_End, _End]:
    """Kindest and harshest; what was measured on the part itself stays as it is."""
    slow, fast = hardware.compute_range
    slow_memory, fast_memory = hardware.memory_range
    contention = _known(CONTENTION[::2], hardware.overlap_slowdown_frac)
    host = _known(HOST_NS[::2], hardware.host_operator_ns)
    return (
        _End(contention[0], host[0], fast, fast_memory),
        _End(contention[1], host[1], slow, slow_memory),
    )


def _known(ends: tuple[_Value, ...], measured: _Value | None) -> tuple[_Value, _Value]:
    return (ends[0], ends[1]) if measured is None else (measured, measured)


def _in_words(hardware: HardwareSpec, kind: _End, harsh: _End) -> list[str]:
    lines = []
    if kind.contention_frac != harsh.contention_frac:
        lines.append(
            f"kernels beside a collective take {kind.contention_frac:.0%} to {harsh.contention_frac:.0%} "
            f"longer ({CONTENTION[1]:.0%} in the estimate)"
        )
    if kind.operator_ns != harsh.operator_ns:
        lines.append(
            f"the host issues an operator in {kind.operator_ns / 1000:g} to {harsh.operator_ns / 1000:g} us "
            f"({HOST_NS[1] / 1000:g} us in the estimate)"
        )
    limited = "" if hardware.power_frac == 1 else ", the clock at its power limit included"
    lines.append(
        f"products and attention run at {harsh.compute_frac:.0%} to {kind.compute_frac:.0%} of the rates in "
        f"the estimate{limited}; other kernels at {harsh.memory_frac:.0%} to {kind.memory_frac:.0%}"
    )
    return lines


def _step_ns(program: Program, costs: ClusterCosts, end: _End) -> int:
    """Return how long the device is at work for a step."""
    varied = replace(
        costs,
        contention_frac=end.contention_frac,
        host=HostPace(operator_ns=end.operator_ns),
        compute_frac=end.compute_frac,
        memory_frac=end.memory_frac,
    )
    _, timeline = repeated(program, simulate(program, varied))
    busy = timeline.end_ns[timeline.end_ns >= 0]
    first = timeline.start_ns[timeline.start_ns >= 0]
    return int(busy.max() - first.min()) if len(busy) else 0
