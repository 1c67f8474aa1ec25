"""The ``fully_shard`` calls of a policy: which modules are sharded together, and how each unit is treated.

A unit is what one call shards. Options that differ between units (``reshard``, dtypes, prefetching) name
units as ``wrap`` does: ``block``, ``root``, a class, a module with ``*`` for one name, or ``a+b``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import TYPE_CHECKING, Any

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import base_of, values_of
from fsdp2prof.estimators.config.option import ByUnit
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model

if TYPE_CHECKING:
    from torch import nn

ROOT = ("",)
EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
"""Modules of most decoders of transformers that stacks wrap; in a model that has other names, its own."""
_NORM_NAME = re.compile(r"norm|ln_f")
_BY_UNIT = (
    "reshard",
    "param_dtype",
    "reduce_dtype",
    "output_dtype",
    "forward_prefetch",
    "backward_prefetch",
    "unshard_in_backward",
)
"""Options that units may differ in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrapUnit:
    """One ``fully_shard`` call."""

    fqns: tuple[str, ...]
    """Modules sharded together; ``("",)`` is the root."""
    reshard_after_forward: bool | int
    """Argument of the same name, with the meaning of ``None`` written out: torch 2.7 does not know it."""
    param_dtype: str | None
    reduce_dtype: str | None
    output_dtype: str | None
    """Dtypes of its ``MixedPrecisionPolicy``."""
    forward_prefetch: tuple[tuple[str, ...], ...] = ()
    """Units it prefetches explicitly, in order, each by its modules; none leaves that to FSDP."""
    backward_prefetch: tuple[tuple[str, ...], ...] = ()
    unshard_in_backward: bool = True

    @property
    def label(self) -> str:
        """As FSDP's labels name it."""
        return ", ".join(self.fqns)


def wrap_units(model: Model, policy: PolicySpec) -> tuple[WrapUnit, ...]:
    """The ``fully_shard`` calls of a policy, bottom-up, the root last.

    Raises ``ModelError`` if an item names nothing in the model or no unit, or a module twice.
    """
    names = dict(model.module.named_modules())
    order = _ordered(model, policy, names)
    rule = base_of(policy.reshard)
    kept = _kept_by_torchtitan(model, order, names) if rule == "torchtitan" else frozenset()
    own = {name: _values(getattr(policy, name), order, model, names, name) for name in _BY_UNIT}
    known = frozenset(order)
    wrapped = ((fqn,) for fqn in model.blocks if (fqn,) in known)
    blocks: dict[tuple[str, ...], int] = {unit: index for index, unit in enumerate(wrapped)}

    def chosen(unit: tuple[str, ...], name: str) -> Any:
        return own[name].get(unit, base_of(getattr(policy, name)))

    def targets(unit: tuple[str, ...], name: str) -> tuple[tuple[str, ...], ...]:
        return _targets(own[name].get(unit), getattr(policy, name), unit, order, blocks, name)

    return tuple(
        WrapUnit(
            fqns=unit,
            reshard_after_forward=_reshard_of(policy, unit, own["reshard"].get(unit, rule), kept),
            param_dtype=chosen(unit, "param_dtype"),
            reduce_dtype=chosen(unit, "reduce_dtype"),
            output_dtype=chosen(unit, "output_dtype"),
            forward_prefetch=targets(unit, "forward_prefetch"),
            backward_prefetch=targets(unit, "backward_prefetch"),
            unshard_in_backward=chosen(unit, "unshard_in_backward"),
        )
        for unit in order
    )


def reshard_rule(model: Model, policy: PolicySpec) -> str | None:
    """What ``reshard="torchtitan"`` comes to for a model, in one sentence; ``None`` for other rules."""
    if base_of(policy.reshard) != "torchtitan":
        return None
    names = dict(model.module.named_modules())
    kept = _kept_by_torchtitan(model, _ordered(model, policy, names), names)
    listed = " and ".join(", ".join(unit) for unit in sorted(kept)) or "no unit"
    if all(unit[0] in model.blocks for unit in kept):
        return f"reshard as torchtitan until July 2025: all blocks but the last ({listed}), which is kept"
    return f"reshard as torchtitan from July 2025 on: every block; {listed} is kept"


def fold_blocks(policy: PolicySpec, blocks: Sequence[str]) -> PolicySpec:
    """The same policy with names of all blocks, one by one, written as one pattern.

    A recorded run names every unit; a pattern also fits the same model with fewer blocks.
    """
    wrap = tuple(item for item, _ in _folded([(item, None) for item in policy.wrap], blocks))
    folded: dict[str, Any] = {
        name: ByUnit(option.base, tuple(_folded(option.units, blocks)))
        for name in _BY_UNIT
        if isinstance(option := getattr(policy, name), ByUnit)
    }
    return replace(policy, wrap=wrap, **folded)


def names_a_block(policy: PolicySpec, blocks: Sequence[str]) -> bool:
    """Whether an option is about single blocks, by their names."""
    options = [getattr(policy, name) for name in _BY_UNIT]
    items = [*policy.wrap, *(unit for option in options for unit, _ in _units_of(option))]
    items += [target for option in options for value in values_of(option) for target in _names_in(value)]
    return any(_block_part(part, blocks) is not None for item in items for part in item.split("+"))


def _folded(items: Sequence[tuple[str, Any]], blocks: Sequence[str]) -> list[tuple[str, Any]]:
    """Items, with those that stand for all blocks as one pattern, in place of the first one."""
    seen: dict[tuple[str, Any], set[str]] = {}
    for item, value in items:
        part = _block_part(item, blocks)
        if part is not None:
            seen.setdefault((part[1], value), set()).add(part[0])
    whole = {key for key, found in seen.items() if len(found) == len(blocks)}
    folded: dict[tuple[str, Any], None] = {}
    for item, value in items:
        part = _block_part(item, blocks)
        if part is None or (part[1], value) not in whole:
            folded[item, value] = None
        else:
            parent = blocks[0].rpartition(".")[0]
            folded[f"{parent}.*{part[1]}".lstrip("."), value] = None
    return list(folded)


def _block_part(item: str, blocks: Sequence[str]) -> tuple[str, str] | None:
    """A block and the items after it, if an item is a block's name or that of a module inside a block."""
    depth = blocks[0].count(".") + 1 if blocks else 0
    head = ".".join(item.split(".")[:depth])
    return (head, item[len(head) :]) if head in blocks else None


def _units_of(option: Any) -> Sequence[tuple[str, Any]]:
    return option.units if isinstance(option, ByUnit) else ()


def _names_in(value: Any) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else ()


def _ordered(model: Model, policy: PolicySpec, names: Mapping[str, nn.Module]) -> list[tuple[str, ...]]:
    """Units bottom-up, the root last."""
    units: dict[tuple[str, ...], None] = {}
    for item in policy.wrap:
        if item != "root":
            units.update(dict.fromkeys(_matching(item, names, model, "wrap")))
    repeated = [fqn for fqn, count in Counter(chain.from_iterable(units)).items() if count > 1]
    if repeated:
        raise ModelError(f"wrap: {repeated[0]} would be sharded twice")
    position = {fqn: index for index, fqn in enumerate(names)}
    return [*sorted(units, key=lambda unit: (-unit[0].count("."), position[unit[0]])), ROOT]


def _kept_by_torchtitan(
    model: Model, order: Sequence[tuple[str, ...]], names: Mapping[str, nn.Module]
) -> frozenset[tuple[str, ...]]:
    """Units that torchtitan does not reshard: those after the last block, otherwise the last block.

    Source: torchtitan ``apply_fsdp`` before and after #1094 (July 2025).
    """
    if not model.blocks:
        return frozenset()
    position = {fqn: index for index, fqn in enumerate(names)}
    last = model.blocks[-1]
    inside = f"{last}."
    after = [
        unit
        for unit in order
        if unit != ROOT and position[unit[0]] > position[last] and not unit[0].startswith(inside)
    ]
    return frozenset(after or [(last,)])


def _reshard_of(
    policy: PolicySpec, unit: tuple[str, ...], value: Any, kept: frozenset[tuple[str, ...]]
) -> bool | int:
    if unit == ROOT:
        if not policy.rules.root_obeys_reshard:
            return False
        if policy.reshard_root is not None:
            return policy.reshard_root
        if value in ("default", "torchtitan"):
            return False
    if value in ("default", "torchtitan"):
        return unit not in kept
    return value == "always" if isinstance(value, str) else value


def _values(
    option: Any,
    units: Sequence[tuple[str, ...]],
    model: Model,
    names: Mapping[str, nn.Module],
    name: str,
) -> dict[tuple[str, ...], Any]:
    """Units with a value of their own."""
    found: dict[tuple[str, ...], Any] = {}
    known = frozenset(units)
    for item, value in _units_of(option):
        matching = [unit for unit in _matching(item, names, model, name) if unit in known]
        if not matching:
            raise ModelError(f"{name}: {item} is not wrapped separately; add it to --wrap")
        found.update(dict.fromkeys(matching, value))
    return found


def _targets(
    own: Any,
    option: Any,
    unit: tuple[str, ...],
    units: Sequence[tuple[str, ...]],
    blocks: Mapping[tuple[str, ...], int],
    name: str,
) -> tuple[tuple[str, ...], ...]:
    """Units that ``unit`` prefetches: named, or the next of ``blocks`` in the direction of ``name``."""
    value = base_of(option) if own is None else own
    if isinstance(value, tuple):
        return tuple(_named_unit(target, units, name) for target in value)
    if not value or unit not in blocks:
        if value and own is not None:
            raise ModelError(f"{name}: {'+'.join(unit)} is not a block: name the units that it prefetches")
        return ()
    index, ordered = blocks[unit], list(blocks)
    if name == "forward_prefetch":
        return tuple(ordered[index + 1 : index + 1 + value])
    return tuple(ordered[max(index - value, 0) : index][::-1])


def _named_unit(target: str, units: Sequence[tuple[str, ...]], name: str) -> tuple[str, ...]:
    unit = ROOT if target == "root" else tuple(target.split("+"))
    if unit not in units:
        raise ModelError(f"{name}: {target} is not wrapped separately; add it to --wrap")
    return unit


def _matching(
    item: str, names: Mapping[str, nn.Module], model: Model, option: str
) -> Iterable[tuple[str, ...]]:
    if item == "root":
        return [ROOT]
    if item == "block":
        if not model.blocks:
            raise ModelError(f"{option}: {model.name} has no repeated block; name classes or modules to wrap")
        return [(fqn,) for fqn in (*model.towers, *model.blocks)]
    item = "+".join(_own_name(part, names, model) for part in item.split("+"))
    if "+" in item:
        unit = tuple(item.split("+"))
        missing = next((fqn for fqn in unit if fqn not in names), None)
        if missing is not None:
            raise ModelError(f"{option}: no module {missing!r} in {model.name}")
        return [unit]
    found = [(fqn,) for fqn, module in names.items() if fqn and _matches(item, fqn, type(module).__name__)]
    if not found:
        raise ModelError(f"{option}: no class or module {item!r} in {model.name}")
    return found


def _own_name(name: str, names: Mapping[str, nn.Module], model: Model) -> str:
    """A model's own name of a module that most decoders of transformers call ``name``; otherwise ``name``."""
    if name in names or not model.blocks:
        return name
    found: nn.Module | None = None
    if name == EMBEDDING:
        found = getattr(model.module, "get_input_embeddings", lambda: None)()
    elif name == HEAD:
        found = getattr(model.module, "get_output_embeddings", lambda: None)()
    elif name == NORM:
        blocks = model.blocks[-1].rpartition(".")[0]
        beside = list(names[blocks.rpartition(".")[0]].named_children())
        after = next(at for at, (_, part) in enumerate(beside) if part is names[blocks])
        found = next((part for child, part in beside[after:] if _NORM_NAME.search(child)), None)
    return next((fqn for fqn, part in names.items() if part is found), name)


def _matches(item: str, fqn: str, class_name: str) -> bool:
    return item == class_name or (fqn.count(".") == item.count(".") and fnmatchcase(fqn, item))
