"""What is recorded, and how the launcher tells the ranks: one environment variable."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import msgspec

from fsdp2prof.errors import UsageError
from fsdp2prof.manifest import RecordOptions, Rehearsal
from fsdp2prof.units import parse_bytes

VARIABLE = "FSDP2PROF_RECORD"
ALIVE_VARIABLE = "FSDP2PROF_ALIVE"
"""Folder in which every Python process of the run leaves an empty file named after its pid."""

MEASURED_STEPS = 4
"""Steps that ``--max-trace-size`` adds to the warm-up: one is traced for its size; in the others the ranks
learn how many steps fit: no rank is further ahead of another."""
_SIGNALS = ("USR1", "USR2")
_RANKS = re.compile(r"^(all|sample:[1-9]\d*|\d+(,\d+)*)$")


class Settings(msgspec.Struct, kw_only=True):
    """Where a run is recorded to, and its options."""

    run: str
    """Absolute path of the run directory."""
    options: RecordOptions
    node_rank: int = 0
    """Of the launcher; distinguishes its ranks from those of other nodes."""
    rehearsal: Rehearsal | None = None
    """The rank that the process rehearses; null in a training."""

    @property
    def path(self) -> Path:
        """The run directory."""
        return Path(self.run)

    def encode(self) -> str:
        """Return the value of :data:`VARIABLE`."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_environment(cls) -> Settings | None:
        """Return the launcher's settings, or None where no launcher recorded this process."""
        value = os.environ.get(VARIABLE)
        return None if value is None else msgspec.json.decode(value, type=cls)


def validate(options: RecordOptions) -> None:
    """Refuse inconsistent options. Raises ``UsageError``."""
    for name in ("wait", "warmup", "active", "memory_steps"):
        if getattr(options, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} must not be negative")
    if options.at_step is not None and options.at_step < 0:
        raise UsageError("--at-step must not be negative")
    if options.active == 0 and not options.memory and not options.watch:
        raise UsageError("--active 0 with --no-memory records nothing; ask for one of the two, or --watch")
    if options.hang_after is not None and options.hang_after < 1:
        raise UsageError(f"--hang-after {options.hang_after}: at least one second")
    if not _RANKS.match(options.ranks):
        raise UsageError(f"--ranks {options.ranks}: write all, a list as 0,3 or sample:K with K > 0")
    _validate_trace_size(options)
    _validate_repetition(options)


def _validate_trace_size(options: RecordOptions) -> None:
    if options.max_trace_size is None:
        return
    try:
        parse_bytes(options.max_trace_size)
    except UsageError as error:
        raise UsageError(f"--max-trace-size: {error}") from error
    if not options.active or options.trial is not None:
        other = "--active 0" if not options.active else "--try"
        raise UsageError(f"--max-trace-size would have no effect with {other}")
    if options.at_step is not None and options.at_step < warmup_of(options):
        raise UsageError(
            f"--max-trace-size measures a step first: --at-step {options.at_step} leaves no room for that, "
            f"{warmup_of(options)} is the first that does"
        )


def _validate_repetition(options: RecordOptions) -> None:
    if options.every is not None and options.every < 1:
        raise UsageError("--every must be a positive number of steps")
    if options.on_slow is not None and options.on_slow <= 1:
        raise UsageError(f"--on-slow {options.on_slow:g}: a factor above 1, for example 1.3x")
    if options.signal is not None and options.signal not in _SIGNALS:
        raise UsageError(f"--signal {options.signal}: {' or '.join(_SIGNALS)}")
    if options.max_size is not None:
        try:
            parse_bytes(options.max_size)
        except UsageError as error:
            raise UsageError(f"--max-size: {error}") from error
        if not records_again(options):
            raise UsageError(
                "--max-size would have no effect on one recording; it goes with --every, --on-slow, "
                "--on-demand or --signal"
            )
    length = length_of(options)
    if options.every is not None and options.every < length:
        raise UsageError(f"--every {options.every}: a recording takes {length} steps; record less often")


def warmup_of(options: RecordOptions) -> int:
    """Return the number of steps that the profiler needs before the traced ones."""
    if not options.active:
        return 0
    return options.warmup + (0 if options.max_trace_size is None else MEASURED_STEPS)


def length_of(options: RecordOptions) -> int:
    """Return the number of steps of a recording, warm-up included."""
    return warmup_of(options) + options.active + (options.memory_steps if options.memory else 0)


def records_again(options: RecordOptions) -> bool:
    """Whether a run may have several recordings."""
    return bool(options.every or options.on_slow or options.on_demand or options.signal or options.trial)


def leader(ranks: str, world_size: int) -> int:
    """Return the lowest selected rank: the one that decides on recordings that are not on schedule."""
    return next((rank for rank in range(world_size) if is_selected(ranks, rank, world_size)), 0)


def is_selected(ranks: str, rank: int, world_size: int) -> bool:
    """Whether ``--ranks`` selects ``rank``; ``sample:K`` is K of different mesh coordinates, rank 0 too."""
    if ranks == "all":
        return True
    if ranks.startswith("sample:"):
        return rank in _sample(min(int(ranks.removeprefix("sample:")), world_size), world_size)
    return rank in map(int, ranks.split(","))


@lru_cache(maxsize=8)
def _sample(count: int, world_size: int) -> frozenset[int]:
    """Ranks that have as many different coordinates as ``count`` can, whatever the mesh.

    A mesh dimension of size d and stride s has coordinate ``rank // s % d``, and both divide the world: of
    all that may be there, up to d = ``count``, each further rank is the one with most new coordinates.
    """
    import numpy as np

    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    dimensions = [(s, d) for s in divisors for d in divisors if 1 < d <= count and world_size % (s * d) == 0]
    ranks = np.arange(world_size)
    coordinates = [ranks // s % d for s, d in dimensions]
    unseen = [np.arange(d) > 0 for _, d in dimensions]
    chosen = {0}
    while len(chosen) < count:
        gain = sum((new[own] for new, own in zip(unseen, coordinates, strict=True)), np.zeros(world_size))
        rank = int(np.argmax(gain)) if gain.any() else next(r for r in range(world_size) if r not in chosen)
        chosen.add(rank)
        for new, own in zip(unseen, coordinates, strict=True):
            new[own[rank]] = False
    return frozenset(chosen)


_PREFIXES = (
    "NCCL_",
    "RCCL_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "CUBLAS",
    "HIP_",
    "ROCR_",
    "GLOO_",
    "TORCHINDUCTOR_",
    "UCX_",
    "FI_",
)
_NAMES = frozenset(
    {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "NVIDIA_VISIBLE_DEVICES", "LD_PRELOAD", "OMP_PROC_BIND"}
)
_OF_ONE_RUN = frozenset({"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"})
"""Paths that differ from run to run and change nothing."""


def relevant_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that change how a training runs, sorted by name."""
    kept = (name for name in environment if name.startswith(_PREFIXES) or name in _NAMES)
    names = sorted(name for name in kept if name not in _OF_ONE_RUN)
    return {name: environment[name] for name in names}
