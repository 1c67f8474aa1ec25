"""Groups of their own for what lies before and after the blocks: embedding, and norm with head."""

from __future__ import annotations

from fsdp2prof.estimators.models.model import Model

_MOST = 2
"""Modules on one side of the blocks that make groups: a plain decoder has no more."""


def units_of_ends(model: Model) -> tuple[str, ...] | None:
    """Return ``wrap`` with a group for each module before the blocks and one for all that come after.

    ``None`` where there is nothing on a side, where a parameter is shared between them, or where there are
    other towers.
    """
    if not model.blocks or model.towers:
        return None
    before: list[str] = []
    after: list[str] = []
    seen: dict[int, list[str]] = {}
    inside = set(model.blocks)
    side = before
    for fqn, module in model.module.named_modules():
        if fqn in inside or fqn.rpartition(".")[0] in inside:
            inside.add(fqn)
            side = after
            continue
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        if not fqn or any(seen.setdefault(id(parameter), side) is not side for parameter in own):
            return None
        side.append(fqn)
    if not 1 <= len(before) <= _MOST or not 1 <= len(after) <= _MOST:
        return None
    return ("block", *before, "+".join(after))
