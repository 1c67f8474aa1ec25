"""Model input: a built-in name, a Hugging Face ``config.json`` or ``package.module:factory``.

Every source ends in a :class:`Model`: a module on the meta device (no memory, no weights, no downloads)
with the layers FSDP wraps, a batch to feed it and a loss to differentiate.
"""

from __future__ import annotations

from dataclasses import replace

from fsdp2prof.estimators.config.catalog import TransformerConfig, builtin_config
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.models.model import Model


def build_model(spec: ModelSpec, *, seq_len: int, orig_dtype: str = "float32") -> Model:
    """Build a model on the meta device with parameters of ``orig_dtype``.

    Raises ``ModelError`` for an unknown model, a configuration without an architecture, or a factory
    that fails or allocates memory.
    """
    if spec.kind == "huggingface":
        from fsdp2prof.estimators.models.huggingface import build_huggingface

        return build_huggingface(spec, orig_dtype)
    if spec.kind == "factory":
        from fsdp2prof.estimators.models.factory import build_factory

        return build_factory(spec.source, orig_dtype, spec.layers)
    from fsdp2prof.estimators.models.builtin import build_builtin

    return build_builtin(builtin_of(spec), seq_len, orig_dtype)


def builtin_of(spec: ModelSpec) -> TransformerConfig:
    """Return the shape of a built-in model with the given number of blocks. Raises ``ModelError``."""
    config = builtin_config(spec.source)
    return config if spec.layers is None else replace(config, layers=spec.layers)
