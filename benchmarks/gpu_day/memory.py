"""Peaks of one rank of a large world, measured, beside their estimates.

``tests/gpu/train_fake_world.py`` trains one rank with a process group without peers: tensors, kernels,
streams and the caching allocator are real. Its configuration file is the estimate's, too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Condition
from typing import Any

from benchmarks.gpu_day.day import Day, Failed, Job, Outcome, Skipped
from fsdp2prof.estimators.allocator.cuda_kernels import BLAS_WORKSPACE_BYTES

STATED_ERROR_FRAC = 0.03
"""Largest expected error: of reserved bytes on a GPU, of allocated bytes on a CPU."""

_TRAIN = "tests/gpu/train_fake_world.py"
_LIMIT_S = 120.0
_GIB = 1 << 30
_BESIDE_BYTES = 3 * _GIB
"""Room for the CUDA context and for an estimate that is too low."""
_STEPS = "3"
_WORLDS = (8, 64, 512)
_VARIATIONS: dict[str, dict[str, Any]] = {
    "base": {},
    "AC full": {"ac": "full"},
    "AC by operator": {"ac": "op"},
    "reshard never": {"reshard": "never"},
    "reshard to 4 ranks": {"reshard": 4},
    "reduce in bf16": {"reduce_dtype": "bf16"},
    "fused optimizer": {"optimizer_impl": "fused"},
    "classic allocator": {"allocator": "classic"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Configuration:
    """One rank of one world."""

    name: str
    model: str
    layers: int
    world_size: int
    policy: dict[str, Any] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        return f"{self.model}-{self.layers}-{self.world_size}-{self.name}".replace(" ", "-").lower()

    def write(self, folder: Path, **policy: Any) -> Path:
        """Write the file that training and estimate both read."""
        path = folder / f"{self.slug}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        mesh = {"dp_shard": self.world_size}
        values = {"model": self.model, "layers": self.layers, "mesh": mesh}
        path.write_text(json.dumps({**values, "policy": {**self.policy, **policy}}))
        return path


def run(day: Day) -> list[Outcome]:
    """Measure and estimate every configuration; on a GPU as many at a time as fit."""
    configurations = _on_gpu() if day.machine.has_gpu else _on_cpu()
    space = _Space(day.machine.device_bytes[0]) if day.machine.has_gpu else None
    jobs = [
        Job(f"{one.name}, {one.world_size} ranks", partial(_compare, day, one, space))
        for one in configurations
    ]
    base = next(one for one in configurations if one.name == "base")
    jobs.insert(1, Job("kinds at the peak", partial(_compare_kinds, day, base, space)))
    workers = max(1, min(8, (os.cpu_count() or 1) // 2)) if day.machine.has_gpu else 1
    return day.perform("memory", jobs, workers=workers)


def _on_gpu() -> list[_Configuration]:
    """The largest first: others run beside them."""
    whole = {"whole model": (32, _policy(8192, ac="op"))}
    variations = {name: (4, _policy(4096, **change)) for name, change in _VARIATIONS.items()}
    return [
        _Configuration(name=name, model="llama3-8b", layers=layers, world_size=world, policy=policy)
        for name, (layers, policy) in {**whole, **variations}.items()
        for world in _WORLDS
    ]


def _on_cpu() -> list[_Configuration]:
    """Small enough for a CPU, in fp32, as bf16 takes minutes on some.

    Its foreach kernels differ from CUDA's, so the optimizer takes one parameter after the other. No parameter
    is shared: while the recorder counts, autograd adds two gradients into new memory, else in place.
    """
    base = _policy(16, optimizer_impl="for-loop", param_dtype="fp32")
    return [
        _Configuration(
            name=name, model="llama2-7b", layers=1, world_size=8, policy={**base, **_VARIATIONS[name]}
        )
        for name in ("base", "AC full", "reshard never")
    ]


def _policy(seq_len: int, **change: Any) -> dict[str, Any]:
    return {"seq_len": seq_len, "batch_size": 1, **change}


class _Space:
    """The device's memory, which concurrent jobs share."""

    def __init__(self, total_bytes: int) -> None:
        self._total = self._free = total_bytes
        self._changed = Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Wait until ``size`` bytes are free. Raises ``Skipped`` if they never will be."""
        if size > self._total:
            raise Skipped(f"needs {size / _GIB:.1f} GiB, the device has {self._total / _GIB:.1f}")
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


def _compare(day: Day, configuration: _Configuration, space: _Space | None) -> tuple[str, dict[str, Any]]:
    allocator = configuration.policy.get("allocator", "expandable")
    estimated = _estimate(day, configuration, allocator)
    if space is None:
        measured = _count_storages(day, configuration)
    else:
        with space.taken(estimated["reserved"] + _BESIDE_BYTES):
            allocator_there, measured = _measure(day, configuration, allocator)
        if allocator_there != allocator:  # a driver without expandable segments
            allocator = allocator_there
            estimated = _estimate(day, configuration, allocator)
    errors = {name: estimated[name] / measured[name] - 1 for name in estimated if name in measured}
    row = {
        "name": configuration.name,
        "model": configuration.model,
        "layers": configuration.layers,
        "world_size": configuration.world_size,
        "policy": {**configuration.policy, "allocator": allocator},
        "measured_bytes": measured,
        "estimated_bytes": {name: estimated[name] for name in errors},
        "error_frac": errors,
    }
    return ", ".join(f"{name} {100 * error:+.2f} %" for name, error in errors.items()), row


def _measure(day: Day, configuration: _Configuration, allocator: str) -> tuple[str, dict[str, int]]:
    """Return the allocator that ran and its own peaks over all steps."""
    path = configuration.write(day.folder / "memory")
    out = day.run(
        f"memory-{configuration.slug}",
        [sys.executable, _TRAIN, "--config", path, "--steps", _STEPS],
        limit_s=_LIMIT_S,
        environment={"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{allocator == 'expandable'}"},
    )
    steps = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if steps[-1]["retries"]:
        raise Failed("the device was full: the allocator gave memory back and tried again")
    names = ("reserved", "allocated", "requested", "active")
    peaks = {name: max(step[f"{name}_bytes"] for step in steps) for name in names}
    return "expandable" if steps[-1]["expandable"] else "classic", peaks


def _compare_kinds(
    day: Day, configuration: _Configuration, space: _Space | None
) -> tuple[str, dict[str, Any]]:
    """Compare what a recording says the peak is made of with what is allocated in the estimate, by kind.

    The estimate knows: it executes the same training and allocates each tensor for what it is.
    """
    estimated = _peak(day, configuration, "expandable")
    with nullcontext() if space is None else space.taken(estimated["reserved_bytes"] + _BESIDE_BYTES):
        recorded = _record(day, configuration)
    kinds = {name: (size, estimated["categories"][name]) for name, size in recorded["categories"].items()}
    apart = {name: abs(seen - known) / estimated["active_bytes"] for name, (seen, known) in kinds.items()}
    worst = max(apart, key=lambda name: apart[name])
    listed = "; ".join(f"{name} {seen} and {known}" for name, (seen, known) in kinds.items() if seen or known)
    said = f"{worst} differs most, by {100 * apart[worst]:.2f} % of the peak (bytes: {listed})"
    if apart[worst] > STATED_ERROR_FRAC:
        raise Failed(said)
    return said, {}


def _count_storages(day: Day, configuration: _Configuration) -> dict[str, int]:
    """Return the recorder's exact count of one step's storages, and the cuBLAS workspaces a CPU lacks."""
    return {"allocated": int(_record(day, configuration)["allocated_bytes"]) + 2 * BLAS_WORKSPACE_BYTES}


def _record(day: Day, configuration: _Configuration) -> dict[str, Any]:
    """Return the peak of a recorded step."""
    path = configuration.write(day.folder / "memory")
    run = day.folder / "memory" / configuration.slug
    record = [sys.executable, "-m", "fsdp2prof", "record", "-f", "-o", run, "--warmup", "0", "--active", "0"]
    training = [sys.executable, _TRAIN, "--config", path, "--steps", _STEPS]
    day.run(f"memory-{configuration.slug}", [*record, "--", *training], limit_s=_LIMIT_S)
    analyze = [sys.executable, "-m", "fsdp2prof", "analyze", "memory", run, "--format", "json"]
    analysis = json.loads(day.run(f"memory-{configuration.slug}-analysis", analyze, limit_s=_LIMIT_S))
    peak: dict[str, Any] = analysis["ranks"][0]["peak"]
    return peak


def _estimate(day: Day, configuration: _Configuration, allocator: str) -> dict[str, int]:
    peak = _peak(day, configuration, allocator)
    return {"reserved": peak["reserved_bytes"], "allocated": peak["active_bytes"]}


def _peak(day: Day, configuration: _Configuration, allocator: str) -> dict[str, Any]:
    path = configuration.write(day.folder / "memory", allocator=allocator)
    command = [sys.executable, "-m", "fsdp2prof", "estimate", "memory", "--config", path, "--format", "json"]
    out = day.run(f"memory-{configuration.slug}-estimate", command, limit_s=_LIMIT_S)
    peak: dict[str, Any] = json.loads(out)["peak"]
    return peak
