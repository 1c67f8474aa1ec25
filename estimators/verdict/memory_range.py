"""Unknowns of a memory estimate, and the range of the reserved peak that each leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp2prof.estimators.allocator.caching import OutOfMemory, allocator_settings, peak_reserved
from fsdp2prof.estimators.allocator.cuda_kernels import with_fused_blocks, with_least_saved
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.config.shares import range_end
from fsdp2prof.results.estimate import Unknown
from fsdp2prof.tables.allocations import MemoryRecording
from fsdp2prof.units import format_bytes

RECORD_STREAMS = "record_streams"
"""The unknown that decides speed and not whether a run fits."""
PREDICTION = "prediction"
"""How far off predictions of measured runs were."""
MEASURED = "measured"
NOT_DECIDING = (RECORD_STREAMS, PREDICTION)
"""Unknowns that the verdict on a device leaves out: the verdict depends on facts that can be found out
before the run."""


def widest_first(found: Iterable[Unknown]) -> list[Unknown]:
    """Return the unknowns that move the peak, each of them from zero."""
    ranges = [
        replace(one, low_bytes=min(0, one.low_bytes), high_bytes=max(0, one.high_bytes)) for one in found
    ]
    moving = [one for one in ranges if one.low_bytes or one.high_bytes]
    return sorted(moving, key=lambda one: one.low_bytes - one.high_bytes)


def unknowns(
    recording: MemoryRecording,
    released: MemoryRecording | None,
    reserved: int,
    blocks: tuple[str, ...],
    guessed: bool,
    mesh: MeshSpec,
    policy: PolicySpec,
    room: int | None,
) -> Iterator[Unknown]:
    """Yield what may move the reserved peak from ``reserved`` bytes, but for the prediction's error.

    ``released`` is the recording without the memory that ``record_stream`` holds, where ``recording`` has it.
    Where ``guessed``, it is not known what the compiled ``blocks`` save. ``room`` is what a device
    leaves to the allocator, in bytes.
    """
    if room is not None and reserved > room:
        try:
            within = _reserved(recording, policy, room)
        except OutOfMemory:
            within = reserved
        yield Unknown(
            name="cache",
            low_bytes=within - reserved,
            high_bytes=0,
            why="an allocation without room frees all cached blocks and tries again, so the run may fit; "
            "each retry waits for the device: see num_alloc_retries in torch.cuda.memory_stats()",
        )
    if policy.allocator is None:
        other = _reserved(recording, replace(policy, allocator="classic")) - reserved
        yield Unknown(
            name="allocator",
            low_bytes=other,
            high_bytes=other,
            why="the allocator is not given: predicted with expandable segments, the other end with classic "
            "ones, torch's default; say allocator=expandable or classic",
        )
    if policy.fused_kernels and not guessed:
        fused = with_fused_blocks(recording, blocks)
        if policy.ac == "none":
            fused = with_least_saved(fused, blocks)
        yield Unknown(
            name="kernels",
            low_bytes=_reserved(fused, policy) - reserved,
            high_bytes=0,
            why="unknown tensors that fused kernels of the blocks save and use: at most those of torch's "
            "operators, at least the results of matrix products and attention",
        )
    if guessed and policy.ac == "none":
        least = _reserved(with_least_saved(recording, blocks), policy) - reserved
        yield Unknown(
            name="compile",
            low_bytes=least,
            high_bytes=0,
            why="unknown tensors that the compiler saves for backward: at most as in eager mode, at least "
            "the results of matrix products and attention",
        )
    if released is not None:
        least = _reserved(released, policy) - reserved
        told = "say record_streams=false if it is set; " if policy.record_streams is None else ""
        yield Unknown(
            name=RECORD_STREAMS,
            low_bytes=least,
            high_bytes=0,
            why="tensor parallelism's collectives call record_stream, so that how far the host runs ahead of "
            f"the device decides when their memory is reused; TORCH_NCCL_AVOID_RECORD_STREAMS=1 ends that, "
            f"{told}the allocator waits for the device before it gives up, which costs time and no memory",
        )


_OF_SEGMENTS = ("allocator", "cache")
"""Unknowns of memory reserved beyond the allocated memory."""


def active_range(active: int, reserved: int, unknown: Sequence[Unknown]) -> tuple[int, int] | None:
    """Return the range of the bytes in use; None where a measured peak takes the range's place.

    The prediction's margin is the same share of them as of the ``reserved`` bytes; tensors that may or may
    not be there are the same bytes in both.
    """
    if any(one.name == MEASURED for one in unknown):
        return None
    ends = []
    for name in ("low_bytes", "high_bytes"):
        others = [one for one in unknown if one.name != PREDICTION]
        in_use = active + sum(getattr(one, name) for one in others if one.name not in _OF_SEGMENTS)
        margin = sum(getattr(one, name) for one in unknown if one.name == PREDICTION)
        whole = reserved + sum(getattr(one, name) for one in others)
        ends.append(max(0, in_use + round(in_use * margin / max(1, whole))))
    return ends[0], ends[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPeaks:
    """Reserved peaks that somebody measured: of this run, or of others."""

    own_bytes: int | None = None
    """Of this run; then the others do not matter."""
    off_fracs: tuple[float, ...] = ()
    """Measured over predicted of other runs, less one."""


def as_measured(reserved: int, in_use: int, measured: MeasuredPeaks) -> Unknown:
    """Return the difference of measured peaks from the prediction; it replaces every unknown.

    ``in_use`` is the most that is predicted to be allocated: the allocator cannot reserve less.
    """
    if measured.own_bytes is not None:
        off = measured.own_bytes - reserved
        own = format_bytes(measured.own_bytes)
        why = f"the run's own peak is {own}, {off / reserved:+.1%} from the prediction"
        if measured.own_bytes < in_use:
            why += f" and less than the {format_bytes(in_use)} predicted in use: that run had other options"
        low = high = off
    else:
        low, high = (round(end * reserved) for end in (min(measured.off_fracs), max(measured.off_fracs)))
        found = ", ".join(f"{one:+.1%}" for one in measured.off_fracs)
        why = f"measured peaks of other runs lie {found} from their predictions"
    return Unknown(
        name=MEASURED,
        low_bytes=low,
        high_bytes=high,
        why=f"{why}; the parts and the changes that are listed are predicted",
    )


def memory_class(mesh: MeshSpec, policy: PolicySpec, *, has_experts: bool) -> str:
    """Return the name in ``ranges.yaml`` of the margin of a run."""
    if has_experts:
        return "memory_of_experts"
    if mesh.tp > 1 and policy.float8 is not None:
        return "memory_of_tensor_parallel_float8"
    stated = None not in (policy.torch, policy.allocator)
    return "memory_with_software_stated" if stated else "memory_with_software_open"


def of_older_software(reserved: int, older: Mapping[str, int], margin: str) -> Iterator[Unknown]:
    """Yield how far reserved peaks under older stacks lie from ``reserved``, beyond its margin."""
    most = range_end(margin).value * reserved
    off = {stack: peak - reserved for stack, peak in older.items() if abs(peak - reserved) > most}
    if off:
        peaks = ", ".join(f"{stack} {format_bytes(older[stack])}" for stack in off)
        yield Unknown(
            name="software",
            low_bytes=min(off.values()),
            high_bytes=max(off.values()),
            why=f"the date of the software is in no file: {peaks}; --stack says which it is",
        )


def with_prediction(found: Iterable[Unknown], reserved: int, margin: str) -> list[Unknown]:
    """Add the spread of measured runs around their predictions, a share of what each end of all others
    leaves of ``reserved`` bytes; ``margin`` is its name in ``ranges.yaml``."""
    others = widest_first(found)
    low, high = (reserved + sum(getattr(one, end) for one in others) for end in ("low_bytes", "high_bytes"))
    end = range_end(margin)
    least = end.value if end.fast is None else end.fast
    more = "; stating torch and the allocator narrows it" if margin == "memory_with_software_open" else ""
    within = f"{end.value:.0%}" if least == end.value else f"-{least:.0%} and +{end.value:.0%}"
    error = Unknown(
        name=PREDICTION,
        low_bytes=-round(low * least),
        high_bytes=round(high * end.value),
        why=f"within {within}: {end.source}{more}",
    )
    return [*others, error]


def _reserved(recording: MemoryRecording, policy: PolicySpec, room: int | None = None) -> int:
    """The reserved peak, on a device without limit or with so many bytes. Raises ``OutOfMemory``."""
    return peak_reserved(recording, replace(allocator_settings(policy.allocator), device_bytes=room))
