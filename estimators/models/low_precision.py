"""Which linear layers of a model train in float8, and how each recipe casts the factors of their products.

The recipes are torchao's, by its names: ``tensorwise``, ``rowwise`` and ``rowwise_with_gw_hp`` of
``Float8LinearConfig.from_recipe_name``, and ``mxfp8``, its ``MXFP8Linear``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fsdp2prof.estimators.models.model import ADAPTERS

_MULTIPLE = {"mxfp8": 32}
"""Of both sizes of a weight; torchao's ``MXTensor`` scales 32 elements together."""
_MULTIPLE_OF_OTHERS = 16
"""``torch._scaled_mm``'s own."""


@dataclass(frozen=True, slots=True)
class Cast:
    """How one factor of a product is cast."""

    each: Literal["tensor", "row", "never"]
    """The elements that share a scale; ``never`` leaves the factor unchanged."""
    dtype: str = "float8_e4m3fn"


_TENSOR, _ROW, _NEVER = Cast("tensor"), Cast("row"), Cast("never")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The six factors of a linear layer's three products."""

    input: Cast
    weight: Cast
    gradient: Cast
    """Of the output, for the input's gradient."""
    weight_for_input: Cast
    gradient_for_weight: Cast
    input_for_weight: Cast
    powers_of_two: bool
    """Scales are rounded down to powers of two."""


_E5M2 = Cast("tensor", "float8_e5m2")

RECIPES: Mapping[str, Recipe] = {
    "tensorwise": Recipe(
        input=_TENSOR,
        weight=_TENSOR,
        gradient=_E5M2,
        weight_for_input=_TENSOR,
        gradient_for_weight=_E5M2,
        input_for_weight=_TENSOR,
        powers_of_two=False,
    ),
    "rowwise": Recipe(
        input=_ROW,
        weight=_ROW,
        gradient=_ROW,
        weight_for_input=_ROW,
        gradient_for_weight=_ROW,
        input_for_weight=_ROW,
        powers_of_two=True,
    ),
    "rowwise_with_gw_hp": Recipe(
        input=_ROW,
        weight=_ROW,
        gradient=_ROW,
        weight_for_input=_TENSOR,
        gradient_for_weight=_NEVER,
        input_for_weight=_NEVER,
        powers_of_two=True,
    ),
}
"""Source: torchao 0.18 ``float8/config.py``."""


def multiple_of(recipe: str) -> int:
    """The number that must divide both sizes of a weight that trains with a recipe."""
    return _MULTIPLE.get(recipe, _MULTIPLE_OF_OTHERS)


def is_in_float8(fqn: str, shape: Sequence[int], blocks: Iterable[str], recipe: str) -> bool:
    """Whether the linear layer ``fqn`` with a weight of ``shape`` trains in float8.

    Those inside the blocks do, adapters left out, whose sizes the products can take.
    """
    multiple = multiple_of(recipe)
    fits = len(shape) == 2 and all(size and size % multiple == 0 for size in shape)
    inside = any(f"{fqn}.".startswith(f"{block}.") for block in blocks)
    return fits and inside and not any(name in f".{fqn}." for name in ADAPTERS)
