"""Models of the user's own factory."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import Loss
from fsdp2prof.estimators.config.optimizers import current_directory_importable
from fsdp2prof.estimators.models.builtin import meta_construction, token_batch
from fsdp2prof.estimators.models.losses import head_of, loss_of_model, one_line
from fsdp2prof.estimators.models.model import Batch, Model


def build_factory(source: str, orig_dtype: str, layers: int | None = None) -> Model:
    """Call ``package.module:factory`` under the meta device and describe what it returns.

    The current directory is importable, as for a script. A number of layers goes to a factory that has an
    argument of that name. Raises ``ModelError`` if it cannot be imported,
    fails, returns something else, or allocates real memory.
    """
    module_name, _, attribute = source.partition(":")
    with current_directory_importable():
        try:
            factory = getattr(importlib.import_module(module_name), attribute)
        except (Exception, SystemExit) as error:  # the user's own code may raise anything
            raise ModelError(f"model {source}: cannot be imported: {one_line(error)}") from None
        if layers is not None and "layers" not in _arguments(factory):
            raise ModelError(f"model {source}: a factory without an argument `layers` decides their number")
        given = {} if layers is None else {"layers": layers}
        try:
            with meta_construction(orig_dtype):
                made = factory(**given)
        except (Exception, SystemExit) as error:  # as above
            raise ModelError(f"model {source}: the factory failed: {one_line(error)}") from None
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
        blocks=no_split_blocks(module) or repeated_blocks(module),
        config=None,
        make_batch=partial(_own_batch, batch) if batch else _default_batch(source, module),
        loss=partial(_own_loss, loss) if loss else partial(loss_of_model, head_of(module)),
    )


def _arguments(factory: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # a callable written in C
        return frozenset()


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _own_batch(
    factory: Callable[[int, int, torch.device], Any], batch_size: int, seq_len: int, device: torch.device
) -> Batch:
    made = factory(batch_size, seq_len, device)
    return Batch(args=(made,))


def _own_loss(loss: Callable[[nn.Module, Any], Tensor], module: nn.Module, batch: Batch, how: Loss) -> Tensor:
    if how != "full":
        raise ModelError(
            f"loss={how} is of the models whose loss is ours: compute it in your own loss function"
        )
    if batch.keeps_logits is not None:
        raise ModelError("keep_logits: this model has its own loss: keep the logits in that function")
    return loss(module, batch.args[0])


def _default_batch(source: str, module: nn.Module) -> Callable[[int, int, torch.device], Batch]:
    embedding = next((part for part in module.modules() if isinstance(part, nn.Embedding)), None)
    if embedding is not None:
        return partial(token_batch, embedding.num_embeddings)

    def no_batch(batch_size: int, seq_len: int, device: torch.device) -> Batch:
        raise ModelError(f"model {source}: no token embedding to feed; return (module, loss, batch) instead")

    return no_batch


def no_split_blocks(module: nn.Module) -> tuple[str, ...]:
    """FQNs of the modules of the classes in ``_no_split_modules``; none inside another."""
    classes = set(getattr(module, "_no_split_modules", None) or ())
    found: list[str] = []
    for fqn, part in module.named_modules():
        inside = bool(found) and fqn.startswith(f"{found[-1]}.")
        if type(part).__name__ in classes and not inside:
            found.append(fqn)
    return tuple(found)


def repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """FQNs of the model's blocks: members of lists with two or more of one class, outermost first.

    Besides the list that holds the most parameters, those count whose members consist of several parts and
    hold at least a tenth as many parameters each: the two kinds of blocks of an image transformer, or encoder
    and decoder, but no list of heads.
    """
    found: list[tuple[int, bool, tuple[str, ...]]] = []
    for fqn, part in module.named_modules():
        inside = bool(found) and fqn.startswith(
            tuple(f"{block}." for _, _, blocks in found for block in blocks)
        )
        if inside or not isinstance(part, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        children = dict(part.named_children())
        if len(children) > 1 and len({type(child) for child in children.values()}) == 1:
            sizes = [sum(own.numel() for own in child.parameters()) for child in children.values()]
            composed = any(next(child.children(), None) is not None for child in children.values())
            names = tuple(f"{fqn}.{name}".lstrip(".") for name in children)
            found.append((sum(sizes), composed, names))
    if not found:
        return ()
    total, _, most = max(found)
    least = total / len(most) / 10
    return tuple(
        block
        for size, composed, blocks in found
        if blocks == most or (composed and size / len(blocks) >= least)
        for block in blocks
    )
