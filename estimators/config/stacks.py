"""Named stacks: training programs at a date, as options of a policy. ``stacks.yaml`` holds them.

A stack is a set of facts with a source each. Values that the user or a configuration file gives override
it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import msgspec

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import SELECTION
from fsdp2prof.estimators.config.documents import packaged

_MONTH = re.compile(r"-(\d{4}-\d{2})(?:-|$)")
_OWN_NAMES: Mapping[str, str] = {}
_UNITS = frozenset({"wrap", "reshard", "unshard_in_backward"})
"""Options of a stack that name units."""


class Stack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training program at a date."""

    what: str
    facts: dict[str, tuple[Any, str]] = msgspec.field(name="policy", default_factory=dict)
    """Option -> its value, as the user writes it, and the source of the value."""
    compiled: dict[str, tuple[Any, str]] = {}
    """The same of options that it sets where blocks are compiled."""
    base: str | None = None
    """The stack whose other options it has."""
    leaves: tuple[str, ...] = ()
    """Options and defaults of the base that it does not have."""
    defaults: dict[str, tuple[Any, str]] = {}
    """Key of the trainer's configuration -> its default at that date, and the source."""
    before: str | None = None
    """The stack of the time before, which a configuration that gives no date may be of."""

    @property
    def policy(self) -> dict[str, Any]:
        """Options that the stack sets, as the user writes them."""
        return {option: value for option, (value, _) in self.facts.items()}

    def where_compiled(self) -> Stack:
        """Return the stack as it is where blocks are compiled."""
        return msgspec.structs.replace(self, facts=self.compiled | self.facts)


@lru_cache(maxsize=1)
def known_stacks() -> Mapping[str, Stack]:
    """Every stack by its name, complete."""
    return _completed(packaged("fsdp2prof.estimators.config", "stacks.yaml", dict[str, Stack]))


def _completed(own: Mapping[str, Stack]) -> dict[str, Stack]:
    def complete(name: str) -> Stack:
        stack = own[name]
        if stack.base is None:
            return stack
        base = complete(stack.base)
        facts, compiled, defaults = (
            {key: fact for key, fact in inherited.items() if key not in stack.leaves} | mine
            for inherited, mine in (
                (base.facts, stack.facts),
                (base.compiled, stack.compiled),
                (base.defaults, stack.defaults),
            )
        )
        return msgspec.structs.replace(stack, facts=facts, compiled=compiled, defaults=defaults)

    return {name: complete(name) for name in own}


def month_of(name: str) -> str | None:
    """The month in a stack's name, as ``2025-06``; None if it has none."""
    found = _MONTH.search(name)
    return None if found is None else found[1]


def stack_named(name: str) -> Stack:
    """Return a stack. Raises ``ModelError`` for an unknown one."""
    stacks = known_stacks()
    if name not in stacks:
        close = get_close_matches(name, stacks, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ModelError(f"unknown stack {name!r}: {hint}there are {', '.join(sorted(stacks))}")
    return stacks[name]


def with_stack(
    name: str | None,
    policy: Mapping[str, Any],
    *,
    tied: bool = False,
    pipelined: bool = False,
    names: Mapping[str, str] = _OWN_NAMES,
) -> dict[str, Any]:
    """A policy's values, completed with those of a stack.

    If head and embedding share a parameter (``tied``), units that end in ``?`` are left to the root, and
    units that end in ``!`` are used only then. What a stack says of pipelines has no effect without one
    (``pipelined``). ``names`` are the model's own names of the modules that stacks name. Raises
    ``ModelError`` for an unknown stack.
    """
    if name is None:
        return dict(policy)
    decided = _stack_of(name, policy.get("compile")).policy
    values = {
        **decided,
        **{option: _of_model(decided[option], tied, names) for option in _UNITS & decided.keys()},
    }
    values.pop("sync" if pipelined else "pp_end_layers", None)  # a schedule reduces after its last backward
    values |= policy
    if values.get("ac", "none") != "op":
        for option in SELECTION:
            if option not in policy:
                values.pop(option, None)
    return values


def _of_model(text: str, tied: bool, names: Mapping[str, str]) -> str:
    """An option of a stack whose units are those of a model: ``always,norm+output?=never``."""
    parts = []
    for part in text.split(","):
        unit, equals, value = part.partition("=")
        if unit.endswith("?" if tied else "!"):
            continue
        own = "+".join(names.get(one, one) for one in unit.rstrip("?!").split("+"))
        parts.append(f"{own}{equals}{value}")
    return ",".join(parts)


def _stack_of(name: str, compiled: object) -> Stack:
    stack = stack_named(name)
    return stack.where_compiled() if compiled is True else stack


def stack_notes(name: str | None, given: Mapping[str, Any] = _OWN_NAMES) -> list[str]:
    """A stack's content and source, as an estimate's assumptions; ``given`` are options that override it.

    Raises as :func:`stack_named`.
    """
    if name is None:
        return []
    stack = _stack_of(name, given.get("compile"))
    own = [f"{option}: {source}" for option, (_, source) in stack.facts.items() if option not in given]
    return [f"stack {name}: {stack.what}; {'; '.join(own)}"]
