"""Models that are not built in: a Hugging Face configuration, or the user's own factory."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.models.builtin import meta_construction, token_batch
from fsdp2prof.estimators.models.model import Batch, Model
from fsdp2prof.estimators.spec.model import MOST_LAYERS

__all__ = ["build_factory", "build_huggingface"]


_COUNTED = re.compile(r"(?:layers?|blocks?|heads?|experts?|depth)s?$")
_LONGEST = 300
"""Characters of another library's message that are shown."""


def build_huggingface(path: Path, orig_dtype: str, layers: int | None) -> Model:
    """Build the ``transformers`` causal language model of a ``config.json`` on meta, attention by SDPA.

    Raises ``ModelError`` without transformers, for an unreadable file or an unknown architecture.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"model {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"model {path} is not JSON: {error}") from None
    _check_sizes(path, values)
    if not isinstance(values, dict) or "model_type" not in values:
        raise ModelError(f"model {path}: no architecture: a Hugging Face config.json has a model_type")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise ModelError(f"model {path} needs transformers: pip install 'fsdp2prof[hf]'") from None
    if layers is not None:
        values["num_hidden_layers"] = layers
    for name in ("torch_dtype", "dtype"):  # else it wins over the default dtype
        values.pop(name, None)
    try:
        config = transformers.AutoConfig.for_model(**values)
        with meta_construction(orig_dtype):
            module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except Exception as error:  # a wrong value fails wherever transformers first uses it
        raise ModelError(f"model {path}: transformers cannot build it: {_one_line(error)}") from None
    module.config.use_cache = False
    return Model(
        name=str(values.get("_name_or_path") or values["model_type"]),
        module=module,
        blocks=_no_split_blocks(module),
        config=None,
        make_batch=partial(token_batch, int(config.vocab_size)),
        loss=_logits_loss,
    )


def _check_sizes(path: Path, values: Any) -> None:
    """Refuse more layers, heads or experts than any model has, in whatever part: each is built."""
    for key, value in values.items() if isinstance(values, dict) else ():
        _check_sizes(path, value)
        if _COUNTED.search(str(key)) and isinstance(value, int) and value > MOST_LAYERS:
            raise ModelError(f"model {path}: {key} {value} is more than {MOST_LAYERS}")


def build_factory(source: str, orig_dtype: str, layers: int | None = None) -> Model:
    """Call ``package.module:factory`` under the meta device and describe what it returns.

    The current directory is importable, as for a script. A number of layers goes to a factory that has an
    argument of that name. Raises ``ModelError`` if it cannot be imported,
    fails, returns something else, or allocates real memory.
    """
    module_name, _, attribute = source.partition(":")
    with _current_directory_importable():
        try:
            factory = getattr(importlib.import_module(module_name), attribute)
        except (Exception, SystemExit) as error:  # the user's own code may raise anything
            raise ModelError(f"model {source}: cannot be imported: {_one_line(error)}") from None
        if layers is not None and "layers" not in _arguments(factory):
            raise ModelError(f"model {source}: a factory without an argument `layers` decides their number")
        given = {} if layers is None else {"layers": layers}
        try:
            with meta_construction(orig_dtype):
                made = factory(**given)
        except (Exception, SystemExit) as error:  # as above
            raise ModelError(f"model {source}: the factory failed: {_one_line(error)}") from None
    parts = made if isinstance(made, tuple) else (made,)
    module, loss, batch = (*parts, None, None, None)[:3]
    if not isinstance(module, nn.Module) or len(parts) > 3:
        raise ModelError(
            f"model {source}: returned {type(made).__name__}, "
            "not a module, (module, loss) or (module, loss, batch)"
        )
    real = next((fqn for fqn, tensor in _tensors(module) if tensor.device.type != "meta"), None)
    if real is not None:
        raise ModelError(
            f"model {source}: {real} has real memory; the factory must not choose a device or load weights"
        )
    return Model(
        name=source,
        module=module,
        blocks=_no_split_blocks(module) or _repeated_blocks(module),
        config=None,
        make_batch=partial(_own_batch, batch) if batch else _default_batch(source, module),
        loss=partial(_own_loss, loss) if loss else _logits_loss,
    )


def _arguments(factory: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # a callable written in C
        return frozenset()


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    """Search modules in the current directory, too, as ``python -m`` does."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _no_split_blocks(module: nn.Module) -> tuple[str, ...]:
    classes = set(getattr(module, "_no_split_modules", None) or ())
    return tuple(fqn for fqn, part in module.named_modules() if type(part).__name__ in classes)


def _repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """Children of the list whose members, all of one class, hold the most parameters."""
    best: tuple[int, tuple[str, ...]] = (0, ())
    for fqn, part in module.named_modules():
        if not isinstance(part, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        children = dict(part.named_children())
        if len(children) > 1 and len(Counter(type(child) for child in children.values())) == 1:
            size = sum(parameter.numel() for parameter in part.parameters())
            best = max(best, (size, tuple(f"{fqn}.{name}".lstrip(".") for name in children)))
    return best[1]


def _own_batch(
    factory: Callable[[int, int, torch.device], Any], batch_size: int, seq_len: int, device: torch.device
) -> Batch:
    made = factory(batch_size, seq_len, device)
    return Batch(args=(made,))


def _own_loss(
    loss: Callable[[nn.Module, Any], Tensor], module: nn.Module, batch: Batch, chunks: int | None
) -> Tensor:
    if chunks is not None:
        raise ModelError("loss=chunked:K is modelled for built-ins only: chunk inside your own loss function")
    return loss(module, batch.args[0])


def _default_batch(source: str, module: nn.Module) -> Callable[[int, int, torch.device], Batch]:
    embedding = next((part for part in module.modules() if isinstance(part, nn.Embedding)), None)
    if embedding is not None:
        return partial(token_batch, embedding.num_embeddings)

    def no_batch(batch_size: int, seq_len: int, device: torch.device) -> Batch:
        raise ModelError(f"model {source}: no token embedding to feed; return (module, loss, batch) instead")

    return no_batch


def _logits_loss(module: nn.Module, batch: Batch, chunks: int | None) -> Tensor:
    if chunks is not None:
        raise ModelError("loss=chunked:K is modelled for built-ins only")
    output = module(*batch.args)
    logits = output if isinstance(output, Tensor) else output.logits
    assert batch.targets is not None
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
