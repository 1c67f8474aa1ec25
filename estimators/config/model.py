"""The model of an estimate, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.catalog import configuration_of
from fsdp2prof.estimators.config.option import Integer

MOST_LAYERS = 4096
"""Blocks of a model: published ones have up to a thousand, and each is built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model, by built-in name, configuration file or factory.

    ``source`` is a known name (``llama3-8b``, ``google/gemma-2-9b``), a path of a Hugging Face
    ``config.json`` (or its folder), or ``package.module:factory``. The factory takes no argument and returns
    the module, or ``(module, loss)`` or ``(module, loss, batch)`` where ``loss(module, batch)`` gives the
    scalar and ``batch(batch_size, seq_len, device)`` what it is passed; it runs under
    ``torch.device("meta")``.
    """

    source: str
    layers: int | None = None
    """Number of blocks, instead of the model's own; built-ins and Hugging Face models only."""

    def __post_init__(self) -> None:
        if not self.source:
            raise ModelError("model: empty; name a built-in, a config.json or package.module:factory")
        if self.layers is not None:
            try:
                Integer(1, MOST_LAYERS).read(self.layers)
            except ValueError as error:
                raise ModelError(f"layers: {error}") from None

    @property
    def kind(self) -> str:
        """``huggingface``, ``factory`` or ``builtin``, from the look of ``source``."""
        if self.source.endswith(".json") or _is_folder(self.source):
            return "huggingface"
        if ":" in self.source:
            return "factory"
        return "builtin" if configuration_of(self.source) is None else "huggingface"

    def configuration(self) -> dict[str, Any] | Path:
        """The ``config.json`` of a Hugging Face model: its values if they are known, otherwise its file."""
        path = Path(self.source)
        if path.suffix == ".json":
            return path
        return path / "config.json" if _is_folder(self.source) else configuration_of(self.source) or path

    def with_layers(self, layers: int) -> ModelSpec:
        """The same model with another number of blocks."""
        return replace(self, layers=layers)


def _is_folder(source: str) -> bool:
    try:
        return Path(source).is_dir()
    except (OSError, ValueError):  # no path at all: too long, or with a null character
        return False
