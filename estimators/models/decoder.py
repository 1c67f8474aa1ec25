"""A Hugging Face decoder as a pipeline cuts it: embedding, blocks, a last norm, a head.

Stages are cut as in scripts on ``torch.distributed.pipelining``: modules that a stage does not hold return
their input, and hidden states enter as ``inputs_embeds``.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp2prof.estimators.models.losses import head_of

RECEIVED_AS = "inputs_embeds"
"""The argument that takes the hidden states of the stage before."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Names of the parts of a decoder beside its blocks."""

    embedding: str
    norm: str
    head: str
    width: int
    """Elements of a token's hidden state, which stages send."""

    def absent(self, *, is_first: bool, is_last: bool) -> frozenset[str]:
        """Modules other than blocks that a stage does not hold."""
        ends = set() if is_last else {self.norm, self.head}
        return frozenset(ends if is_first else {*ends, self.embedding})


def decoder_of(
    module: nn.Module, blocks: tuple[str, ...], towers: tuple[str, ...], text: Any
) -> Decoder | str:
    """The parts of a model, or why a pipeline is not known to cut it, as the end of a sentence.

    ``text`` is the configuration of its text model.
    """
    if towers:
        return "has a tower beside its blocks: how stages share it is not modelled"
    if RECEIVED_AS not in inspect.signature(module.forward).parameters:
        return f"takes no {RECEIVED_AS}, as which a pipeline stage is given hidden states"
    if getattr(text, "num_kv_shared_layers", 0):
        return "shares keys and values between layers, which a pipeline would cut apart"
    names = {part: fqn for fqn, part in module.named_modules()}
    embedding = names.get(getattr(module, "get_input_embeddings", lambda: None)())
    head, width = head_of(module), getattr(text, "hidden_size", None)
    parent = blocks[0].rpartition(".")[0].rpartition(".")[0] if blocks else ""
    beside = module.get_submodule(parent).named_children()
    norms = [f"{parent}.{name}" for name, part in beside if "norm" in type(part).__name__.lower()]
    if embedding is None or head is None or not isinstance(width, int) or len(norms) != 1:
        return "is not known to be an embedding, blocks, one last norm and a head, which a pipeline cuts"
    held = (embedding, head, norms[0], *blocks)
    for fqn, _ in module.named_parameters():
        if not fqn.startswith(tuple(f"{part}." for part in held)):
            owner = fqn.rpartition(".")[0]
            return (
                f"has {owner} beside embedding, blocks, last norm and head: which stage runs it is not known"
            )
    return Decoder(embedding=embedding, norm=norms[0], head=head, width=width)


def cut_decoder(
    module: nn.Module, absent: Collection[str], blocks: tuple[str, ...], kept: Collection[int]
) -> None:
    """Leave the ``kept`` blocks of a decoder's ``blocks`` under their names, and the modules not in
    ``absent``."""
    container = blocks[0].rpartition(".")[0]
    layers = module.get_submodule(container)
    layers._modules = {name: part for at, (name, part) in enumerate(layers.named_children()) if at in kept}
    config: Any = module.config
    text = config.get_text_config()
    for name, values in per_layer(text, len(blocks)).items():
        setattr(text, name, [values[at] for at in kept])
    text.num_hidden_layers = len(kept)
    for fqn in absent:
        module.set_submodule(fqn, nn.Identity())


def view_of(module: nn.Module, blocks: tuple[str, ...]) -> nn.Module:
    """A module that shares all parts of ``module``, so that cutting its ``blocks`` leaves the other whole.

    The modules around the blocks are copies, which share parameters and buffers but not hooks.
    """
    configs: dict[int, Any] = {}
    root = part = _shallow(module, configs)
    for name in blocks[0].split(".")[:-1]:
        inner = _shallow(getattr(part, name), configs)
        part._modules[name] = inner
        part = inner
    return root


def _shallow(module: nn.Module, configs: dict[int, Any]) -> nn.Module:
    made = copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict) and name not in ("_parameters", "_buffers"):
            made.__dict__[name] = value.copy()
    if "config" in vars(module):
        made.config = deepcopy(module.config, configs)
    return made


def per_layer(text: Any, layers: int) -> dict[str, list[Any]]:
    """Lists of a configuration with an entry for every layer (attention types, layers without positions)."""
    values = vars(text).items()
    return {name: value for name, value in values if isinstance(value, list) and len(value) == layers > 1}
