"""Whether a predicted peak fits on a device, and the estimate in three sentences.

What would bring a predicted peak down: which options are left to set, and what each takes off at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp2prof.analyzers.memory.wording import where
from fsdp2prof.estimators.config.choices import dtype_bytes
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.optimizers import OptimizerFactory
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.sharding.groups import ParameterGroup, ShardedParameter, optimizer_state_bytes
from fsdp2prof.estimators.verdict.memory_range import (
    MEASURED,
    NOT_DECIDING,
    PREDICTION,
    RECORD_STREAMS,
    active_range,
)
from fsdp2prof.results.estimate import Fit, OutsideAllocator, PredictedPeak, Unknown
from fsdp2prof.results.peak import Remedy
from fsdp2prof.units import format_bytes, format_frac
from fsdp2prof.vocabulary import category_label

_WORDS = {
    "allocator": "allocator segments",
    "compile": "the tensors that the compiler saves",
    "kernels": "the tensors that fused kernels save",
    "software": "the date of the software",
    "cache": "whether freeing cached blocks makes room",
    RECORD_STREAMS: "how long record_stream holds memory",
    MEASURED: "the measured peak",
    "prediction": "the error of predictions of measured runs",
}
"""The unknowns, in a sentence."""

_NAMED = 2
"""Categories that the verdict names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Device memory left above the peak: a range, because the memory that no allocator counts is one."""

    device: str
    total_bytes: int
    least_bytes: int
    """Negative: missing."""
    most_bytes: int
    depends_on: tuple[str, ...] = ()
    """The conditions that decide where the value is within the range."""

    @property
    def fit(self) -> Fit:
        """Whether the peak fits."""
        if self.least_bytes >= 0:
            return "fits"
        return "depends" if self.most_bytes >= 0 else "does_not_fit"


def room_on(
    hardware: HardwareSpec | None,
    peak: PredictedPeak,
    outside: OutsideAllocator,
    unknown: Sequence[Unknown] = (),
) -> Room | None:
    """Return the room that a peak leaves on a device, whatever is not known; None without one."""
    if hardware is None:
        return None
    held = sum(one.low_bytes for one in unknown if one.name == RECORD_STREAMS)  # given up before memory ends
    left = hardware.memory_bytes - peak.reserved_bytes - held
    moving = [one for one in unknown if one.name not in NOT_DECIDING]
    return Room(
        device=hardware.name,
        total_bytes=hardware.memory_bytes,
        least_bytes=left - outside.high - sum(one.high_bytes for one in moving),
        most_bytes=left - outside.low - sum(one.low_bytes for one in moving),
        depends_on=deciding(moving),
    )


def deciding(unknown: Sequence[Unknown] = ()) -> tuple[str, ...]:
    """The conditions that decide whether a peak fits, in words."""
    names = [one.name for one in unknown if one.name not in NOT_DECIDING]
    return ("context and communicators", *(_WORDS.get(name, name) for name in names))


def depends_on(room: Room | None, outside: OutsideAllocator, unknown: Sequence[Unknown]) -> list[str]:
    """Report the conditions that decide whether a peak fits, and by how much, if it depends on any."""
    if room is None or room.fit != "depends":
        return []
    lines = [
        f"{part.name}: {format_bytes(part.low)} to {format_bytes(part.high)} ({part.source})"
        for part in outside.parts
    ]
    lines += [
        f"{_WORDS.get(one.name, one.name)}: {_signed(one.low_bytes)} to {_signed(one.high_bytes)} ({one.why})"
        for one in unknown
        if one.name not in NOT_DECIDING
    ]
    return lines


def _listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{format_bytes(abs(size))}"


def verdict(
    peak: PredictedPeak, room: Room | None, options: Sequence[Remedy], unknown: Sequence[Unknown] = ()
) -> list[str]:
    """Report how much a rank takes and where, whether it fits, and which category is largest or saves
    most."""
    in_step = f"{where(peak.phase, peak.fqn)}, step {peak.step}"
    place = "before the first step" if peak.step is None else in_step
    lines = [
        f"A rank reserves {_reserved(peak, unknown)}; "
        f"{format_bytes(peak.active_bytes)}{_active(peak, unknown)} of it is in use {place}."
    ]
    if room is None or room.fit == "fits" or not options:
        fits = [] if room is None else [fit_sentence(room, *prediction_errors(unknown))]
        return [*lines, *fits, _filling(peak)]
    best = options[0]
    none = all(one.enough is False for one in options)
    alone = "; no listed change is enough alone" if none else ""
    least = f"The largest saving: {best.how}, up to {format_bytes(best.saves_bytes)}{alone}."
    return [*lines, fit_sentence(room, *prediction_errors(unknown)), least]


def _reserved(peak: PredictedPeak, unknown: Sequence[Unknown]) -> str:
    """Report the reserved memory: as measured if known, otherwise as predicted, with its range."""
    predicted = format_bytes(peak.reserved_bytes)
    if not unknown:
        return f"{predicted} at its peak"
    low, high = (
        format_bytes(peak.reserved_bytes + sum(getattr(one, end) for one in unknown))
        for end in ("low_bytes", "high_bytes")
    )
    words = _listed([_WORDS.get(one.name, one.name) for one in unknown])
    if [one.name for one in unknown] == [MEASURED]:
        known = low if low == high else f"{low} to {high}"
        return f"{known} at its peak by {words} ({predicted} without)"
    return f"{predicted} at its peak ({low} to {high}, depending on {words})"


def _active(peak: PredictedPeak, unknown: Sequence[Unknown]) -> str:
    """Report the range of the allocated memory, in brackets."""
    found = active_range(peak.active_bytes, peak.reserved_bytes, unknown)
    if found is None or found[0] == found[1]:
        return ""
    return f" ({format_bytes(found[0])} to {format_bytes(found[1])})"


def prediction_errors(unknown: Sequence[Unknown]) -> tuple[int, int]:
    """By how much predictions of measured runs were too low and too high, in bytes."""
    found = [one for one in unknown if one.name == PREDICTION]
    return sum(one.high_bytes for one in found), -sum(one.low_bytes for one in found)


def fit_sentence(room: Room, too_low: int, too_high: int = 0) -> str:
    """Say whether a peak fits, does not, or depends, and by how much.

    It is probable where predictions of measured runs erred by more than what is left or missing: ``too_low``
    and ``too_high``, in bytes.
    """
    device = f"{room.device} ({format_bytes(room.total_bytes)})"
    least, most = format_bytes(abs(room.least_bytes)), format_bytes(abs(room.most_bytes))
    if room.fit == "fits":
        if room.least_bytes >= too_low:
            counted = _listed([*room.depends_on, *(["the prediction's error"] if too_low else [])])
            sure = format_bytes(room.least_bytes - too_low)
            return f"It fits on {device}: at least {sure} is left, with {counted} at their highest."
        counted, wrong = _listed(room.depends_on), format_bytes(too_low)
        return (
            f"It probably fits on {device}: {least} is left, with {counted} at their highest; "
            f"predictions of measured runs were up to {wrong} too low."
        )
    if room.fit == "depends":
        return (
            f"Whether it fits on {device} depends on {_listed(room.depends_on)}: "
            f"from {least} short to {most} left."
        )
    missing = f"does not fit on {device}: {most} to {least} is missing"
    if -room.most_bytes >= too_high:
        return f"It {missing}."
    return (
        f"It probably {missing}; predictions of measured runs were up to {format_bytes(too_high)} too high."
    )


def _filling(peak: PredictedPeak) -> str:
    largest = sorted(peak.categories.items(), key=lambda item: -item[1])[:_NAMED]
    parts = [
        f"{category_label(name)} ({format_bytes(size)}, {format_frac(size / peak.active_bytes)})"
        for name, size in largest
        if size
    ]
    return f"The largest parts in use are {' and '.join(parts)}."


_CHUNKS = 8
_STATES = ("sharded_parameter", "sharded_gradient", "optimizer_state")


def remedies(
    found: Sequence[Remedy],
    peak: PredictedPeak,
    mesh: MeshSpec,
    policy: PolicySpec,
    missing_bytes: int | None,
    padding: Remedy | None = None,
) -> list[Remedy]:
    """Return the options that are left to set, largest saving first.

    ``found`` is the memory analysis's result for the peak of the predicted recording; ``missing_bytes``
    the minimum that a device lacks, None without a device; ``padding`` that of experts.
    """
    options = [*_of_analysis(found, mesh, policy), *_of_policy(peak, policy)]
    if padding is not None:
        options.append(replace(padding, saves_bytes=min(padding.saves_bytes, peak.active_bytes)))
    return [
        replace(option, enough=False if missing_bytes and option.saves_bytes < missing_bytes else None)
        for option in sorted(options, key=lambda option: -option.saves_bytes)
        if option.saves_bytes > 0
    ]


def expert_padding(groups: Sequence[ParameterGroup], policy: PolicySpec) -> Remedy | None:
    """What cutting every expert, instead of dealing out whole ones, saves at most: states and buffers.

    Padding is also gathered and reduced: two groups are unsharded at once and a third copy is in flight,
    and two reduce-scatter inputs are alive. ``None`` where experts are not padded: they are as many as ranks
    or more, and divide among them.
    """
    padded = {group: _padded_experts(group) for group in groups}
    every = [one for parameters in padded.values() for one in parameters]
    spare = [(one, one.padded_shard_numel - one.numel // one.shards) for one in every]
    kept = not isinstance(policy.optimizer_kind, OptimizerFactory)  # whose state is known by running it
    saved = sum(
        2 * elements * dtype_bytes(one.dtype)
        + (optimizer_state_bytes(policy, (elements,), one.dtype) if kept else 0)
        for one, elements in spare
    )
    if saved <= 0:
        return None
    saved += max(
        sum(
            (one.padded_numel - one.numel)
            * (3 * dtype_bytes(one.gather_dtype) + 2 * dtype_bytes(group.gradient_dtype))
            for one in parameters
        )
        for group, parameters in padded.items()
    )
    first = every[0]
    how = (
        f"cut each expert instead of dealing out whole ones (expert_shards=hidden): {first.shape[0]} experts "
        f"on {first.shards} ranks are padded to {first.padded_numel // first.numel} times their size"
    )
    return _remedy("even_expert_shards", saved, how)


def _padded_experts(group: ParameterGroup) -> list[ShardedParameter]:
    return [
        parameter
        for parameter in group.parameters
        if parameter.is_expert and not parameter.dim and parameter.shape[1] % parameter.shards == 0
    ]


def advice(options: Sequence[Remedy], missing_bytes: int) -> list[str]:
    """Report the changes for a run that lacks at least ``missing_bytes`` of device memory."""
    lines = [f"{one.how}: saves {format_bytes(one.saves_bytes)} at most" for one in options]
    if lines and missing_bytes > 0 and all(one.enough is False for one in options):
        lines.append(
            f"each alone is less than the {format_bytes(missing_bytes)} that is missing: combine them"
        )
    return lines


def _of_analysis(found: Sequence[Remedy], mesh: MeshSpec, policy: PolicySpec) -> Iterator[Remedy]:
    """Proposals of the analysis of any recording, as options of an estimate."""
    hows = {
        "activation_checkpointing": "checkpoint every block (ac=full)" if policy.ac != "full" else None,
        "chunked_loss": f"compute head and loss in {_CHUNKS} chunks (loss=chunked:{_CHUNKS})"
        if policy.loss in ("full", "native")
        else None,
        "smaller_batch": f"halve the micro-batch (batch_size={policy.batch_size // 2}, "
        f"grad_accum={2 * policy.grad_accum})"
        if policy.batch_size > 1
        else None,
        "reshard_after_forward": "reshard what stays gathered (reshard=always)"
        if policy.reshard != "always"
        else None,
        "wider_sharding": f"shard over twice as many ranks (dp_shard={2 * mesh.dp_shard})",
    }
    for remedy in found:
        if how := hows.get(remedy.action):
            yield replace(remedy, how=how)


def _of_policy(peak: PredictedPeak, policy: PolicySpec) -> Iterator[Remedy]:
    """Proposals that only the options of an estimate allow."""
    held = peak.categories
    states = sum(held[name] for name in _STATES)
    if not policy.offload:
        yield _remedy(
            "cpu_offload", states, "keep parameters, gradients and optimizer state on the host (offload)"
        )
    if dtype_bytes(policy.orig_dtype) == 4:
        how = "hold parameters and optimizer state in bf16 (orig_dtype=bf16), at the price of precision"
        frozen = policy.lora is not None and policy.lora.base is not None  # in a dtype of their own
        yield _remedy("low_precision_states", (states - frozen * held["sharded_parameter"]) // 2, how)
    in_update = peak.phase == "optimizer" and not policy.offload_optimizer  # whose state is temporary, too
    if policy.optimizer_impl == "foreach" and in_update:
        how = "use the optimizer's fused implementation, which makes no temporaries (optimizer_impl=fused)"
        yield _remedy("fused_optimizer", held["temporary"], how)
    if policy.allocator == "classic":
        unused = peak.reserved_bytes - peak.active_bytes
        yield _remedy("expandable_segments", unused, "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")


def _remedy(action: str, saves_bytes: int, how: str) -> Remedy:
    return Remedy(action=action, saves_bytes=saves_bytes, enough=None, how=how)
