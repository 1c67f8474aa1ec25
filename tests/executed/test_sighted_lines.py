"""Which files are the training's own, for the lines that the recorder names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fsdp2prof.recorder.rank import host


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, one of which imports torch."""
    folder = tmp_path / "site-packages"
    for name, text in (("knows_torch", "import torch\n"), ("knows_none", "import math\n")):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("knows_torch", "knows_none"):
        importlib.import_module(name)
    yield folder
    for name in ("knows_torch", "knows_none"):
        sys.modules.pop(name, None)


def test_reasons_for_a_lowered_clock_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By NVML's bits; without pynvml nothing is known."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="12-34"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert host._Gpu().slowed_by() is None
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID={"GPU-12-34": 7}.__getitem__,
        nvmlDeviceGetCurrentClocksThrottleReasons={7: 0x1 | 0x4 | 0x40}.__getitem__,
        NVMLError=RuntimeError,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert host._Gpu().slowed_by() == ["power_cap", "hardware_thermal_slowdown"]


def test_libraries_that_know_no_torch_are_not_the_training(installed: Path) -> None:
    """A sort of NumPy is named by the line that calls it; a trainer's own lines are named."""
    assert host._is_library(str(np.__file__))
    assert host._is_library(str(installed / "knows_none" / "part.py"))
    assert not host._is_library(str(installed / "knows_torch" / "part.py"))
    assert not host._is_library(__file__)


def line_seen(*, hook: bool) -> str:
    """Return the line seen in a hook of a module or, as accelerate has it, in a function as its forward."""
    seen: list[str] = []

    def look(*_: object) -> None:
        frame: FrameType = sys._getframe()
        seen.append(host._line(frame))

    def new_forward(x: torch.Tensor) -> torch.Tensor:
        look()
        return x

    inner = nn.Identity()
    if hook:
        inner.register_forward_hook(look)
    else:
        inner.forward = new_forward  # type: ignore[assignment, method-assign]
    nn.Sequential(inner)(torch.zeros(1))
    return seen[0]


def test_a_hook_is_told_from_a_forward() -> None:
    assert line_seen(hook=True).endswith("(look, a hook)")
    assert line_seen(hook=False).endswith("(look)")


def test_a_line_names_the_function_that_it_calls_through_a_wrapper() -> None:
    """torch wraps ``clip_grad_norm_`` in ``torch.no_grad``."""
    seen: list[str] = []

    def parameters() -> Iterator[torch.Tensor]:
        seen.append(host._line(sys._getframe(1)))
        yield torch.nn.Parameter(torch.ones(2))

    nn.utils.clip_grad_norm_(parameters(), 1.0)
    (line,) = seen
    assert line.startswith("clip_grad_norm_() in ")
