"""The device and the libraries of a rank, for its manifest."""

from __future__ import annotations

import platform
import re
from typing import Any

import torch

from fsdp2prof import __version__
from fsdp2prof.manifest import DeviceInfo

_ATTENTION = ("math", "flash", "efficient", "cudnn")
"""By torch's number of each (``torch.nn.attention.SDPBackend``)."""
_ATTENTION_ORDER = (1, 2, 0, 3)
"""torch's own preference, if it cannot be queried."""

_STATS = (
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "reserved_bytes.all.peak",
    "active_bytes.all.peak",
    "inactive_split_bytes.all.peak",
    "num_alloc_retries",
    "num_ooms",
)


def package_versions() -> dict[str, str]:
    """Return the versions of Python, torch, fsdp2prof and, on GPUs, of CUDA or ROCm and NCCL."""
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "fsdp2prof": __version__,
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if torch.version.hip:
        versions["hip"] = torch.version.hip
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return versions


def device_info(device_type: str) -> DeviceInfo:
    """Describe the current device of a type."""
    if device_type != "cuda":
        # Not platform.processor(): it runs uname, and the training's SIGCHLD handler would see that child.
        return DeviceInfo(type=device_type, name=platform.machine() if device_type == "cpu" else device_type)
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    return DeviceInfo(
        type="cuda",
        index=index,
        name=properties.name,
        total_bytes=properties.total_memory,
        capability=f"{properties.major}.{properties.minor}",
        uuid=str(getattr(properties, "uuid", "")) or None,
    )


def attention_backends(device_type: str) -> list[str]:
    """Return the allowed kernels of attention, the preferred one first; empty on other devices than CUDA."""
    if device_type != "cuda":
        return []
    cuda: Any = torch.backends.cuda
    allowed = (
        cuda.math_sdp_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )
    order = getattr(torch._C, "_get_sdp_priority_order", lambda: _ATTENTION_ORDER)()
    return [_ATTENTION[number] for number in order if number < len(allowed) and allowed[number]]


def allocator_stats(device_type: str) -> dict[str, int]:
    """Return the CUDA allocator's statistics of interest; empty on other devices."""
    if device_type != "cuda":
        return {}
    stats = torch.cuda.memory_stats()
    return {name: int(stats[name]) for name in _STATS if name in stats}


def allocator_settings(device_type: str) -> dict[str, str]:
    """Return the settings of the CUDA allocator that torch reports outside a snapshot; empty elsewhere."""
    if device_type != "cuda":
        return {}
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return {"backend": torch.cuda.memory.get_allocator_backend(), **parse_settings(str(ask()) if ask else "")}


def parse_settings(text: str) -> dict[str, str]:
    """Split an allocator configuration, ``expandable_segments:True,roundup_power2_divisions:[256:1,>:4]``."""
    pairs = (pair.partition(":") for pair in re.split(r",(?![^\[]*\])", text))
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip()}
