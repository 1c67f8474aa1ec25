"""Models that run forward only beside the trained one: ``reference=MODEL,reward=MODEL``, or itself."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

import msgspec

from fsdp2prof.estimators.config.option import Written

_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")
_MOST_PIXELS = 1 << 26


class ImageSize(Written, frozen=True):
    """Width and height in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


class ImageSizeText(msgspec.Struct, frozen=True):
    """``WIDTHxHEIGHT``, or nothing."""

    @property
    def values(self) -> str:
        """As the user writes it."""
        return "WIDTHxHEIGHT"

    def read(self, value: Any) -> ImageSize | None:
        """Return the size."""
        if value is None or isinstance(value, ImageSize):
            return value
        found = _SIZE.fullmatch(str(value))
        width, height = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 0 < width * height <= _MOST_PIXELS:
            raise ValueError(f"{value!r} is not WIDTHxHEIGHT in pixels, of at most {_MOST_PIXELS} pixels")
        return ImageSize(width, height)


Role = Literal["reference", "reward"]
"""``reference``: its logits are used as the trained model's are. ``reward``: one number a token, of a head of
one output."""

ITSELF = "self"
"""Stands for the trained model: a forward of its own parameters without gradients, before the trained one."""

_MOST = 8
_LONGEST = 4096


class ExtraModel(msgspec.Struct, frozen=True, kw_only=True):
    """One frozen model and its role."""

    source: str
    """As ``--model`` takes it."""
    role: Role = "reference"

    def __str__(self) -> str:
        return self.source if self.role == "reference" else f"{self.role}={self.source}"


class ExtraModels(Written, frozen=True):
    """The models in the order in which they run."""

    others: tuple[ExtraModel, ...]
    """Models with parameters of their own."""
    runs_itself: bool = False
    """Whether the trained model also runs forward without gradients, before its own forward."""

    def __str__(self) -> str:
        return ",".join([*map(str, self.others), *[ITSELF] * self.runs_itself])


class ExtraModelsText(msgspec.Struct, frozen=True):
    """Models with commas between, each perhaps with its role before it; or nothing."""

    @property
    def values(self) -> str:
        """As the user writes them."""
        return "none|[reference|reward=]MODEL,..."

    def read(self, value: Any) -> ExtraModels | None:
        """Return the models."""
        if value is None or isinstance(value, ExtraModels):
            return value
        if value == "none":
            return None
        if not isinstance(value, str):
            raise ValueError(f"{value!r} must be text")
        if len(value) > _LONGEST:
            raise ValueError(f"longer than {_LONGEST} characters")
        models = [_model_of(part.strip()) for part in value.split(",")]
        if len(models) > _MOST:
            raise ValueError(f"{len(models)} models are more than {_MOST}")
        itself = [model for model in models if model.source == ITSELF]
        if len(itself) > 1 or any(model.role != "reference" for model in itself):
            raise ValueError(f"{value!r}: {ITSELF} may appear once, and only for a reference")
        return ExtraModels(tuple(model for model in models if model.source != ITSELF), bool(itself))


def _model_of(text: str) -> ExtraModel:
    role, found, source = text.partition("=")
    if not found:
        role, source = "reference", text
    elif role not in get_args(Role):
        raise ValueError(f"{text!r}: a model is for {' or '.join(get_args(Role))}, not {role!r}")
    if not source:
        raise ValueError(f"{text!r} names no model; write MODEL, reference=MODEL or reward=MODEL")
    return ExtraModel(source=source, role=role)  # type: ignore[arg-type]
