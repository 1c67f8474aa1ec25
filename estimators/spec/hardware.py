"""Accelerators by name: memory, peak throughput and bandwidth, each with its source. No silent default."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field

from fsdp2prof.errors import ModelError, UsageError
from fsdp2prof.units import parse_bytes

__all__ = ["HARDWARE", "HardwareSpec"]

_MIB = 1 << 20
_TERA = 10**12
_GIGA = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareSpec:
    """One accelerator. Rates are peaks of the data sheet, dense (no sparsity)."""

    name: str
    memory_bytes: int
    """Memory the driver reports in total, of which the context takes a part."""
    flops: dict[str, int] = field(default_factory=dict)
    """torch dtype name -> floating-point operations per second; a dtype without hardware is absent."""
    memory_bytes_per_s: int | None = None
    """Device memory bandwidth."""
    link_bytes_per_s: int | None = None
    """Bandwidth to peers inside a node, one direction, all links of a device together."""
    source: str = ""

    @classmethod
    def parse(cls, text: str) -> HardwareSpec:
        """Look up a name, or take a memory size such as ``80GiB`` alone. Raises ``ModelError``."""
        known = HARDWARE.get(text.lower())
        if known is not None:
            return known
        if re.match(r"^\s*[0-9.]+\s*[kmgtKMGT]", text):
            try:
                return cls(
                    name=text.strip(), memory_bytes=parse_bytes(text), source="given by its memory size"
                )
            except UsageError as error:
                raise ModelError(f"hardware: {error}") from None
        close = difflib.get_close_matches(text.lower(), HARDWARE, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(HARDWARE)}"
        raise ModelError(f"unknown hardware {text!r}: {hint} (or give a memory size: 80GiB)")


def _gpu(
    name: str,
    memory_mib: int,
    memory_gb_per_s: float,
    link_gb_per_s: float | None,
    source: str,
    **tera_flops: float,
) -> HardwareSpec:
    names = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn", "fp32": "float32"}
    return HardwareSpec(
        name=name,
        memory_bytes=memory_mib * _MIB,
        flops={names[dtype]: round(value * _TERA) for dtype, value in tera_flops.items()},
        memory_bytes_per_s=round(memory_gb_per_s * _GIGA),
        link_bytes_per_s=None if link_gb_per_s is None else round(link_gb_per_s * _GIGA),
        source=f"{source}; memory as the driver reports it",
    )


_ALL = (
    _gpu("v100-16gb", 16_160, 900, 150, "NVIDIA V100 data sheet", fp16=125, fp32=15.7),
    _gpu("v100-32gb", 32_510, 900, 150, "NVIDIA V100 data sheet", fp16=125, fp32=15.7),
    _gpu("a100-40gb", 40_536, 1555, 300, "NVIDIA A100 data sheet", bf16=312, fp16=312, fp32=19.5),
    _gpu("a100-80gb", 81_251, 2039, 300, "NVIDIA A100 data sheet", bf16=312, fp16=312, fp32=19.5),
    _gpu(
        "h100-sxm", 81_559, 3350, 450, "NVIDIA H100 data sheet", bf16=989.4, fp16=989.4, fp8=1978.9, fp32=67
    ),
    _gpu(
        "h100-sxm-96gb",
        97_871,
        3350,
        450,
        "NVIDIA H100 data sheet",
        bf16=989.4,
        fp16=989.4,
        fp8=1978.9,
        fp32=67,
    ),
    _gpu("h100-pcie", 81_559, 2000, 300, "NVIDIA H100 data sheet", bf16=756, fp16=756, fp8=1513, fp32=51),
    _gpu("h200", 143_771, 4800, 450, "NVIDIA H200 data sheet", bf16=989.4, fp16=989.4, fp8=1978.9, fp32=67),
    _gpu("b200", 183_359, 8000, 900, "NVIDIA DGX B200 data sheet", bf16=2250, fp16=2250, fp8=4500, fp32=75),
    _gpu("l4", 23_034, 300, None, "NVIDIA L4 data sheet", bf16=121, fp16=121, fp8=242.5, fp32=30.3),
    _gpu("l40s", 46_068, 864, None, "NVIDIA L40S data sheet", bf16=362, fp16=362, fp8=733, fp32=91.6),
    _gpu("a10g", 23_028, 600, None, "NVIDIA A10G specification", bf16=70, fp16=70, fp32=35),
    _gpu("rtx3090", 24_576, 936, None, "NVIDIA GA102 white paper", bf16=71, fp16=71, fp32=35.6),
    _gpu(
        "rtx4090", 24_564, 1008, None, "NVIDIA Ada white paper", bf16=165.2, fp16=165.2, fp8=330.3, fp32=82.6
    ),
    _gpu(
        "mi250x-gcd",
        65_520,
        1638,
        None,
        "AMD MI250X data sheet, one of two dies",
        bf16=191.5,
        fp16=191.5,
        fp32=23.9,
    ),
    _gpu(
        "mi300x",
        196_592,
        5300,
        448,
        "AMD MI300X data sheet",
        bf16=1307.4,
        fp16=1307.4,
        fp8=2614.9,
        fp32=163.4,
    ),
)

HARDWARE: dict[str, HardwareSpec] = {spec.name: spec for spec in _ALL}
"""Accelerators by name."""
