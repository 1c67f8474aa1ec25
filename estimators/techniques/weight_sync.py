"""Weights sent to inference engines after a step (``--weight-sync engines=2,tp=4,per=layer``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fsdp2prof.errors import ModelError, UsageError
from fsdp2prof.estimators.config.choices import dtype_bytes
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.option import Dtype
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.sharding.groups import ParameterGroup
from fsdp2prof.results.estimate import WeightSync
from fsdp2prof.units import parse_bytes

Per = Literal["parameter", "layer", "whole"]
"""What is gathered at once: each parameter (``DTensor.full_tensor``), each FSDP unit (``unshard``), or a full
state dict."""

_MOST_RANKS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSyncSpec:
    """Inference engines that are given the weights of each step."""

    engines: int
    """Copies of the model that serve; 0: on the training's own devices, which each receive a part of the
    gathered weights."""
    tp: int = 1
    """Tensor-parallel ranks of an engine."""
    dtype: str = "bfloat16"
    """The dtype or format that engines hold."""
    per: Per = "parameter"
    bandwidth_bytes_per_s: int | None = None
    """The bandwidth at which one rank sends and receives."""

    @classmethod
    def parse(cls, text: str) -> WeightSyncSpec:
        """Read ``engines=N[,tp=K][,dtype=bf16][,per=layer][,bandwidth=50GB]``; ``colocated`` is none.

        Raises ``ModelError`` with one line.
        """
        given = dict(part.strip().partition("=")[::2] for part in text.split(","))
        if "colocated" in given:
            given |= {"engines": "0"}
            del given["colocated"]
        unknown = sorted(set(given) - {"engines", "tp", "dtype", "per", "bandwidth"})
        if unknown or "engines" not in given:
            raise ModelError(
                f"weight_sync: {text!r} is not engines=N (or colocated), then tp=K, dtype=DTYPE, "
                f"per={'|'.join(get_args(Per))}, bandwidth=BYTES as wanted"
            )
        per = given.get("per", "parameter")
        if per not in get_args(Per):
            raise ModelError(f"weight_sync: per={per!r} is none of {', '.join(get_args(Per))}")
        try:
            dtype = Dtype().read(given.get("dtype", "bf16"))
            rate = parse_bytes(given["bandwidth"].removesuffix("/s")) if "bandwidth" in given else None
        except (ValueError, UsageError) as error:
            raise ModelError(f"weight_sync: {error}") from None
        if rate is not None and rate <= 0:
            raise ModelError("weight_sync: bandwidth must be more than 0 bytes per second")
        return cls(
            engines=_count("engines", given["engines"], 0),
            tp=_count("tp", given.get("tp", "1"), 1),
            dtype=str(dtype),
            per=per,  # type: ignore[arg-type]
            bandwidth_bytes_per_s=rate,
        )


def _count(name: str, text: str, least: int) -> int:
    if not text.isdecimal() or len(text) > 7 or not least <= int(text) <= _MOST_RANKS:
        raise ModelError(f"weight_sync: {name}={text!r} is not a number of at least {least}")
    return int(text)


def weight_sync(
    groups: Sequence[ParameterGroup], mesh: MeshSpec, policy: PolicySpec, spec: WeightSyncSpec
) -> WeightSync:
    """Bytes of one synchronization, for the model with the given parameter groups.

    Raises ``ModelError`` for unsupported cases: parameters that are not divided by FSDP alone, packed
    weights.
    """
    if mesh.tp * mesh.pp * mesh.ep > 1:
        raise ModelError("weight_sync is modelled for FSDP and HSDP meshes: leave tp, pp and ep at 1")
    if policy.lora is not None and policy.lora.quantized is not None:
        raise ModelError("weight_sync of a quantized base: what engines are sent then is not modelled")
    shards = mesh.fsdp_size
    parameters = [parameter for group in groups for parameter in group.parameters]
    by_unit = spec.per == "layer"
    gathered = [
        sum(p.padded_numel * dtype_bytes(p.gather_dtype if by_unit else p.dtype) for p in part)
        for part in ([group.parameters for group in groups] if by_unit else [(p,) for p in parameters])
    ]
    sizes = [parameter.numel * dtype_bytes(spec.dtype) for parameter in parameters]
    payload = sum(gathered) if shards > 1 else 0
    wire = payload * (shards - 1) // shards
    sent = sum(sizes) if spec.engines else 0
    rate = spec.bandwidth_bytes_per_s
    return WeightSync(
        engines=spec.engines,
        engine_tp=spec.tp,
        dtype=spec.dtype,
        per=spec.per,
        gathers=len(gathered) if shards > 1 else 0,
        gather_payload_bytes=payload,
        gather_wire_bytes=wire,
        broadcasts=len(sizes) if spec.engines else 0,
        sent_bytes=sent,
        received_bytes=sent * spec.engines * spec.tp,
        kept_bytes=-(-sum(sizes) // spec.tp),
        buffer_bytes=_buffer_bytes(groups, spec),
        bandwidth_bytes_per_s=rate,
        gather_seconds=None if rate is None else wire / rate,
        send_seconds=None if rate is None else sent / rate,
    )


def _buffer_bytes(groups: Sequence[ParameterGroup], spec: WeightSyncSpec) -> int:
    """Most bytes that a training rank holds gathered at once, with the cast copy of one tensor."""
    whole: list[list[int]] = []
    casts: list[list[int]] = []
    for group in groups:
        held = [(p, p.gather_dtype if spec.per == "layer" else p.dtype) for p in group.parameters]
        whole.append([p.padded_numel * dtype_bytes(dtype) for p, dtype in held])
        casts.append([p.numel * dtype_bytes(spec.dtype) * (dtype != spec.dtype) for p, dtype in held])
    units = list(zip(whole, casts, strict=True))
    if spec.per == "layer":
        return max(sum(sizes) + max(copies) for sizes, copies in units)
    if spec.per == "parameter":
        return max(size + copy for sizes, copies in units for size, copy in zip(sizes, copies, strict=True))
    return sum(map(sum, whole)) + max(map(max, casts))
