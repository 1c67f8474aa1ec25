"""Which part of a result is shown: ``--layer``, ``--show-rank``, ``--show-step``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from fsdp2prof.commands.help import option
from fsdp2prof.commands.options import numbers_option

if TYPE_CHECKING:
    from fsdp2prof.analyzers.focus import Focused

__all__ = ["VIEW_FLAGS", "View", "view_part_options"]

VIEW_FLAGS = ("--layer", "--show-rank", "--show-step")
"""Long names of these options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What is shown of a result that was analysed as a whole."""

    layers: list[str] | None
    ranks: list[int] | None
    steps: list[int] | None

    def of(self, result: Focused) -> Focused:
        """Return the part of a result; raises ``UsageError`` for what is not in it."""
        if self.layers is None and self.ranks is None and self.steps is None:
            return result
        from fsdp2prof.analyzers.focus import focus_on
        from fsdp2prof.results.focus import Focus

        focus = Focus(layers=self.layers, ranks=self.ranks, steps=self.steps)
        return focus_on(result, focus) if str(focus) else result


def view_part_options(*, steps: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add ``--layer``, ``--show-rank`` and, with ``steps``, ``--show-step``; the command gets a ``view``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_view(
            *args: Any,
            layer: Sequence[str],
            show_rank: frozenset[int] | None,
            show_step: frozenset[int] | None = None,
            **rest: Any,
        ) -> None:
            view = View(layers=list(layer) or None, ranks=_listed(show_rank), steps=_listed(show_step))
            command(*args, view=view, **rest)

        decorated: Callable[..., None] = with_view
        if steps:
            decorated = numbers_option(
                "--show-step",
                "Show only these steps; all are analysed",
                group="Shown part",
                everyday=True,
                former=["--step"],
            )(decorated)
        decorated = numbers_option(
            "--show-rank",
            "Show only these ranks; all are read and compared",
            group="Shown part",
            everyday=True,
            former=["--rank"],
        )(decorated)
        layers = "Show only layers whose name matches, for example 'layers.1?'. May be repeated."
        return option(
            "--layer", multiple=True, metavar="GLOB", help=layers, group="Shown part", everyday=True
        )(decorated)

    return decorate


def _listed(numbers: frozenset[int] | None) -> list[int] | None:
    return None if numbers is None else sorted(numbers)
