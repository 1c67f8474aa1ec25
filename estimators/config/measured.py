"""Measured values, of this run or of several: ``tokens_per_s_per_gpu=5600``."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from fsdp2prof.errors import InputError, UsageError
from fsdp2prof.estimators.config import shares
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.documents import parse_yaml, read_text
from fsdp2prof.estimators.config.option import options_of
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.config.shares import HOST_OPERATOR_NS

_UNITS = {
    "tokens_per_s_per_gpu": "tokens/s on each GPU",
    "step_ms": "ms per step",
    "mfu": "of the peak",
    "peak_reserved_gib": "GiB reserved",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The measured quantity and its value."""

    name: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Measured:
        """Parse ``name=number``. Raises ``UsageError``."""
        name, _, number = text.partition("=")
        try:
            value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
        except ValueError:
            value = 0.0
        if name not in _UNITS or not (isfinite(value) and value > 0):
            raise UsageError(
                f"--measured {text!r} is not NAME=NUMBER with a positive number and NAME one of "
                f"{', '.join(_UNITS)}"
            )
        if name == "mfu" and value > 1:
            raise UsageError(f"--measured {text!r}: an MFU is at most 1; write 0.45 or 45%")
        return cls(name=name, value=value)

    @property
    def is_memory(self) -> bool:
        """Whether it is a memory value; otherwise it is a time."""
        return self.name == "peak_reserved_gib"

    def step_ns(self, *, step_ns: int, tokens_per_s_per_gpu: float, mfu: float | None) -> int:
        """The measured step time, calculated with the predicted step.

        Raises ``UsageError`` without a peak, and for a step that is faster than the peak allows.
        """
        if self.name == "step_ms":
            found = round(self.value * 1e6)
        else:
            predicted = tokens_per_s_per_gpu if self.name == "tokens_per_s_per_gpu" else mfu
            if predicted is None:
                raise UsageError("--measured mfu: the hardware states no peak for this dtype; give step_ms")
            found = round(step_ns * predicted / self.value)
        if mfu is not None and mfu * step_ns > found:
            reached = f"{mfu * step_ns / max(1, found):.0%}"
            raise UsageError(
                f"--measured {self}: an MFU of {reached}, more than the hardware's peak; "
                "check the number, --hardware, and the batch size"
            )
        return found

    def __str__(self) -> str:
        return f"{self.value:g} {_UNITS[self.name]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slower:
    """How many times as long each part takes as the estimate has it."""

    compute: float = 1.0
    """Kernels: matrix products, attention, and memory-bound kernels."""
    links: float = 1.0
    """Collectives and copies to the host."""
    host: float = 1.0
    """Host time to issue a command."""

    @classmethod
    def all(cls, factor: float) -> Slower:
        """Everything alike."""
        return cls(compute=factor, links=factor, host=factor)

    def times(self, other: Slower) -> Slower:
        """Both, one after the other."""
        return Slower(
            compute=self.compute * other.compute,
            links=self.links * other.links,
            host=self.host * other.host,
        )


def anchored(cluster: Cluster, slower: Slower) -> Cluster:
    """Return a cluster whose parts take so many times as long."""
    hardware = cluster.hardware
    products = hardware.achieved_tflops or {
        name: rate * shares.ACHIEVED_MATMUL for name, rate in hardware.peak_tflops.items()
    }
    attention = hardware.attention_tflops
    changed = msgspec.structs.replace(
        hardware,
        achieved_tflops={name: rate / slower.compute for name, rate in products.items()},
        achieved_memory_gb_per_s=hardware.achieved_memory_bytes_per_s / 1e9 / slower.compute,
        attention_tflops={name: rate / slower.compute for name, rate in attention.items()}
        if isinstance(attention, dict)
        else None
        if attention is None
        else attention / slower.compute,
        host_link_gb_per_s=hardware.host_link_gb_per_s / slower.links,
        kernel_floor_ns=round(hardware.kernel_floor_ns * slower.compute),
        host_operator_ns=round((hardware.host_operator_ns or HOST_OPERATOR_NS[1]) * slower.host),
    )
    return replace(
        cluster,
        hardware=changed,
        node_frac=cluster.node_frac / slower.links,
        small_frac=cluster.small_frac / slower.links,
        network_frac=cluster.network_frac / slower.links,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """A configuration and its measured values."""

    values: Mapping[str, Any]
    """Differences from this run, as ``make_spec`` takes them; ``policy`` is a separate table."""
    measured: Measured


_OF_A_RUN = ("model", "layers", "mesh", "stack", "world_size")
"""Columns other than options of a policy."""


def read_measured(path: Path) -> list[MeasuredRun]:
    """Read configurations with their measured values: a YAML list, or a CSV with one row each.

    Columns are options of ``estimate`` by name (``batch_size``, ``mesh``), and one of ``step_ms``,
    ``tokens_per_s_per_gpu``, ``mfu`` and ``peak_reserved_gib``. Raises ``InputError``.
    """
    try:
        text = read_text(path)
        rows = list(csv.DictReader(text.splitlines())) if path.suffix == ".csv" else parse_yaml(text)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path}: not a list of configurations, each with a number of {', '.join(_UNITS)}")
    return [_measured_run(row, f"{path}, configuration {index}") for index, row in enumerate(rows, start=1)]


def _measured_run(row: Mapping[Any, Any], where: str) -> MeasuredRun:
    given = {str(name).replace("-", "_"): value for name, value in row.items() if value not in (None, "")}
    numbers = [name for name in _UNITS if name in given]
    if len(numbers) != 1:
        raise InputError(f"{where}: needs one of {', '.join(_UNITS)}")
    policy = {
        name: value for name, value in given.items() if name not in (*_OF_A_RUN, *_UNITS) and name != "policy"
    }
    own = given.get("policy", {})
    if not isinstance(own, dict):
        raise InputError(f"{where}: policy is not a table")
    policy |= own
    options = options_of(PolicySpec)
    unknown = [name for name in policy if name not in options]
    if unknown:
        raise InputError(f"{where}: unknown option {unknown[0]!r}")
    return MeasuredRun(
        values={
            **{name: given[name] for name in _OF_A_RUN if name in given},
            "policy": {name: _typed(value, f"{where}, {name}") for name, value in policy.items()},
        },
        measured=Measured.parse(f"{numbers[0]}={given[numbers[0]]}"),
    )


def _typed(value: Any, where: str) -> Any:
    """A cell of a CSV as YAML has it: numbers, yes and no."""
    try:
        return parse_yaml(value) if isinstance(value, str) and value else value
    except ValueError as error:
        raise InputError(f"{where}: {' '.join(str(error).split())}") from None


def fitted(
    elasticities: Sequence[Sequence[float]],
    off: Sequence[float],
    prior: Sequence[float],
    noise: float,
) -> tuple[list[float], list[list[float]]]:
    """Return the most likely logarithms of the slowdown of compute, links and host, and their covariance.

    ``elasticities`` has a row per run: the percentage by which its step grows when each part takes one per
    cent longer. ``off`` is the logarithm of measured over predicted. Before any measurement, each
    logarithm is normal around 0 with standard deviation ``prior``; a measured step repeats within
    ``noise``.
    """
    import numpy as np

    sensitive, spread = np.asarray(elasticities, float), np.diag(np.square(np.asarray(prior, float)))
    shared = spread @ sensitive.T
    gain = shared @ np.linalg.inv(sensitive @ shared + noise**2 * np.eye(len(off)))
    return (gain @ np.asarray(off, float)).tolist(), (spread - gain @ shared.T).tolist()
