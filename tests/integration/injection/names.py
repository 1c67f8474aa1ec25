"""What the recorder imports and which names of torch it touches, found in its source."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import getsource
from pathlib import Path
from typing import Any

import fsdp2prof.recorder

from .running import VARIANTS

__all__ = ["hidden_names", "modules", "removed_names"]

_RECORDER = Path(fsdp2prof.recorder.__file__).parent
_OUTSIDE_RANKS = ("launch", "bootstrap", "one_process", "__init__")
_EVERYTHING = VARIANTS["everything"]
_FSDP = "torch.distributed.fsdp._fully_shard"
_OF_FSDP = (
    "_fsdp_state:FSDPState",
    "_fsdp_state:FSDPStateContext",
    "_fsdp_param_group:FSDPParamGroup",
    "_fsdp_param:FSDPParam",
    "_fsdp_param:ParamModuleInfo",
    "_fsdp_common:FSDPMeshInfo",
)
"""FSDP2's private classes."""
_REMOVED = (
    "torch._dynamo.eval_frame:OptimizedModule",
    "torch.autograd.profiler:_disable_profiler",
    "torch.autograd.profiler:_enable_profiler",
    "torch.autograd.profiler:_prepare_profiler",
    "torch.autograd.profiler:profile.export_chrome_trace",
    "torch.autograd:_profiler_enabled",
    "torch.cuda.memory:_record_memory_history",
    "torch.cuda.memory:_snapshot",
    "torch.profiler.profiler:_KinetoProfile",
    "torch.profiler.profiler:_KinetoProfile._get_distributed_info",
    "torch.profiler.profiler:_KinetoProfile.add_metadata_json",
    "torch.profiler.profiler:_KinetoProfile.export_chrome_trace",
    "torch.profiler.profiler:_KinetoProfile.prepare_trace",
    "torch.profiler.profiler:_KinetoProfile.start_trace",
    "torch.profiler.profiler:_KinetoProfile.stop_trace",
    "torch.utils._python_dispatch:TorchDispatchMode",
)
"""Private names that the training does not need itself."""


def modules() -> list[dict[str, Any]]:
    """An injection into the import of every module of the recorder that a rank may import."""
    files = (file.relative_to(_RECORDER).with_suffix("") for file in sorted(_RECORDER.rglob("*.py")))
    names = [file.parts for file in files if not set(file.parts) & set(_OUTSIDE_RANKS)]
    return [
        {"module": ".".join(("fsdp2prof.recorder", *parts)), "options": options}
        for parts in names
        for options in VARIANTS.values()
    ]


def hidden_names() -> list[dict[str, Any]]:
    """Attributes of FSDP2's classes that the recorder reads, each hidden from the recorder alone."""
    read: set[str] = set()
    for file in _RECORDER.rglob("*.py"):
        read |= set(re.findall(r"\.(\w+)", file.read_text()))
    found = []
    for path in _OF_FSDP:
        module, _, kind = path.partition(":")
        source = getsource(getattr(import_module(f"{_FSDP}.{module}"), kind))
        names = set(re.findall(r"self\.(\w+)", source))
        names |= set(re.findall(r"^    (?:def )?(\w+)", source, re.MULTILINE))
        found += [f"{path}.{name}" for name in sorted(read & names) if not name.startswith("__")]
    return [{"torch": name, "how": "hide", "options": _EVERYTHING} for name in found]


def removed_names() -> list[dict[str, Any]]:
    """Private names that are gone, or take other arguments."""
    return [
        {"torch": name, "how": how, "options": _EVERYTHING}
        for name in _REMOVED
        for how in ("delete", "change")
    ]
