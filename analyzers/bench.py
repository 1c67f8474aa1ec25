"""Evaluate bench measurements: medians, spreads, fits, and a description of the machine.

A collective's time is fitted as ``latency + wire bytes / bus bandwidth``, by least squares of the relative
errors, with a latency of at least 0. Payload and wire bytes are those of nccl-tests (PERFORMANCE.md).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import numpy as np

from fsdp2prof.by_key import grouped
from fsdp2prof.errors import InputError
from fsdp2prof.measured import CollectiveTimes, Measured, RateTimes
from fsdp2prof.results.bench import BenchCollective, BenchFit, BenchRate, BenchResult, MeasuredPart
from fsdp2prof.units import format_bytes, format_count, format_frac

_BYTES_A_PARAMETER = 2
"""Bytes of a parameter gathered in bfloat16."""
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def bench_result(measured: Measured, *, quick: bool = False) -> BenchResult:
    """Evaluate measurements. Raises ``InputError`` if there is no rate to describe a device."""
    groups = grouped(((one.op, one.mesh_dim, one.ranks), one) for one in measured.collectives)
    fits = [_fit(key, rows) for key, rows in groups.items()]
    by_group = {(fit.op, fit.mesh_dim): fit for fit in fits}
    rates = [_rate(one) for one in measured.rates]
    slowdown = _slowdown(measured.rates)
    return BenchResult(
        verdict=_verdict(measured, fits, rates),
        device=measured.device,
        backend=measured.backend,
        world_size=measured.world_size,
        ranks_per_node=measured.ranks_per_node,
        torch=measured.torch,
        quick=quick,
        seconds=measured.seconds,
        collectives=[_collective(one, by_group[one.op, one.mesh_dim]) for one in measured.collectives],
        fits=fits,
        rates=rates,
        overlap_slowdown_frac=slowdown,
        accelerators={_file_name(measured.device): _part(measured, rates, slowdown)},
        notes=measured.notes,
    )


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return (a, b) of ``y = a + b x`` with the smallest relative errors, neither below 0."""
    points, values = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    columns = np.stack([1 / values, points / values], axis=1)
    (a, b), *_ = np.linalg.lstsq(columns, np.ones(len(values)), rcond=None)
    if a < 0:  # through the origin instead
        column = points / values
        return 0.0, float(max(0.0, column.sum() / (column**2).sum()))
    if b < 0:
        inverse = 1 / values
        return float(inverse.sum() / (inverse**2).sum()), 0.0
    return float(a), float(b)


def _wire(op: str, payload: int, ranks: int) -> float:
    return payload * (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks


def _fit(key: tuple[str, str, int], rows: Sequence[CollectiveTimes]) -> BenchFit:
    op, mesh_dim, ranks = key
    wire = [_wire(op, one.payload_bytes, ranks) for one in rows]
    times = [median(one.times_ns) for one in rows]
    latency, each = fit_line(wire, times)
    errors = [abs(latency + each * size - time) / time for size, time in zip(wire, times, strict=True)]
    per_payload = each * _wire(op, 1, ranks) if ranks else 0.0
    return BenchFit(
        op=op,
        mesh_dim=mesh_dim,
        ranks=ranks,
        latency_ns=latency,
        busbw_bytes_per_s=1e9 / each if each else None,
        residual_frac=median(errors),
        worst_residual_frac=max(errors),
        half_payload_bytes=round(latency / per_payload) if per_payload else None,
    )


def _quartiles(times: Sequence[int]) -> tuple[float, float, float]:
    low, middle, high = np.percentile(times, [25, 50, 75]).tolist()
    return low, middle, high


def _collective(one: CollectiveTimes, fit: BenchFit) -> BenchCollective:
    low, middle, high = _quartiles(one.times_ns)
    wire = _wire(one.op, one.payload_bytes, one.ranks)
    each = 0.0 if fit.busbw_bytes_per_s is None else 1e9 / fit.busbw_bytes_per_s
    return BenchCollective(
        op=one.op,
        mesh_dim=one.mesh_dim,
        ranks=one.ranks,
        payload_bytes=one.payload_bytes,
        count=len(one.times_ns),
        median_ns=middle,
        lower_quartile_ns=low,
        upper_quartile_ns=high,
        busbw_bytes_per_s=wire * 1e9 / middle,
        fitted_ns=fit.latency_ns + each * wire,
    )


def _rate(one: RateTimes) -> BenchRate:
    low, middle, high = _quartiles(one.times_ns)
    return BenchRate(
        kind=one.kind,
        dtype=one.dtype,
        size=one.size,
        count=len(one.times_ns),
        median_ns=middle,
        lower_quartile_ns=low,
        upper_quartile_ns=high,
        per_s=one.amount * 1e9 / middle,
    )


def _slowdown(rates: Sequence[RateTimes]) -> float | None:
    times = {one.kind: median(one.times_ns) for one in rates}
    if not {"matmul_alone", "matmul_beside_collective"} <= set(times):
        return None
    return max(0.0, times["matmul_beside_collective"] / times["matmul_alone"] - 1)


def _best(rates: Sequence[BenchRate], kind: str, dtype: str | None = None) -> float | None:
    found = [one.per_s for one in rates if one.kind == kind and dtype in (None, one.dtype)]
    return max(found, default=None)


def _part(measured: Measured, rates: Sequence[BenchRate], slowdown: float | None) -> MeasuredPart:
    copied, attended, paced = (_best(rates, kind) for kind in ("copy", "attention", "operator"))
    if copied is None or attended is None or paced is None:
        raise InputError("the ranks measured no copy, attention or operator: the device cannot be described")
    launched, pinned = _best(rates, "launch"), _best(rates, "host_to_device_pinned")
    on_host = measured.device_type == "cpu"
    products = {
        _SHORT[dtype]: rate / 1e12
        for dtype in dict.fromkeys(one.dtype for one in rates if one.kind == "matmul")
        if (rate := _best(rates, "matmul", dtype)) is not None
    }
    return MeasuredPart(
        memory_mib=measured.memory_bytes / (1 << 20),
        achieved_memory_gb_per_s=copied / 1e9,
        multiprocessors=measured.units,
        achieved_tflops=products,
        attention_tflops=attended / 1e12,
        host_link_gb_per_s=(pinned or copied) / 1e9,
        kernel_floor_ns=0 if on_host else round(1e9 / launched) if launched else 2000,
        host_operator_ns=round(1e9 / paced),
        overlap_slowdown_frac=slowdown,
        on_host=on_host,
        collectives=_curves(measured),
        source=f"measured: bench of {measured.world_size} ranks, {measured.backend}, torch {measured.torch}",
    )


def _curves(measured: Measured) -> dict[str, dict[str, list[list[int]]]]:
    """Return the times of groups on one node; for several of one size, those of the outermost dimension."""
    found: dict[str, dict[str, list[list[int]]]] = defaultdict(dict)
    chosen: dict[tuple[str, int], str] = {}
    for one in measured.collectives:
        if one.ranks <= measured.ranks_per_node:
            dim = chosen.setdefault((one.op, one.ranks), one.mesh_dim)
            if dim == one.mesh_dim:
                curve = found[one.op].setdefault(str(one.ranks), [])
                curve.append([one.payload_bytes, round(median(one.times_ns))])
    return dict(found)


def _rounded_up(value: float) -> int:
    """Round up to two figures: a fit knows no more."""
    whole = math.ceil(value)
    scale = int("1" + "0" * max(0, len(str(whole)) - 2))
    return -(-whole // scale) * scale


def _verdict(measured: Measured, fits: Sequence[BenchFit], rates: Sequence[BenchRate]) -> list[str]:
    lines = []
    gathers = [fit for fit in fits if fit.op == "all_gather"]
    for fit in gathers[:1]:
        where = f"{fit.ranks} ranks" if len(gathers) == 1 else f"{fit.ranks} ranks of {fit.mesh_dim}"
        largest = max(one.payload_bytes for one in measured.collectives if one.op == fit.op)
        if fit.half_payload_bytes is None:
            lines.append(f"Larger all-gathers over {where} took no longer, so bandwidth cannot be estimated.")
        elif fit.half_payload_bytes > largest:
            lines.append(
                f"All-gathers here ({where}) are latency-bound up to the largest measured size "
                f"({format_bytes(largest)}): measure larger ones to see how much to wrap together."
            )
        else:
            parameters = format_count(_rounded_up(fit.half_payload_bytes / _BYTES_A_PARAMETER))
            lines.append(
                f"Below {format_bytes(fit.half_payload_bytes)} an all-gather here ({where}) is "
                f"latency-bound: wrap at least {parameters} parameters together (bf16)."
            )
    best = _best(rates, "matmul")
    if best is not None:
        lines.append(f"Matrix products reach {best / 1e12:,.3g} TFLOP/s on {measured.device}.")
    slowdown = _slowdown(measured.rates)
    if slowdown is not None:
        lines.append(f"Beside an all-gather they take {format_frac(slowdown)} longer.")
    return lines


def _file_name(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"measured {device}".lower()).strip("-")
