"""A program as float8 training changes it: faster products, casts before them, narrower parallel gathers.

With tensorwise scaling torchao's parallel layers cast what tensor parallelism gathers (the input of a block's
attention and feed-forward, and the gradients of their outputs) before they gather it, and the products behind
take it as it comes; other recipes gather in the compute dtype. Source: torchao's
``float8/float8_tensor_parallel.py``, torchtitan's ``parallelize.py``.
"""

from __future__ import annotations

from dataclasses import replace

from fsdp2prof.estimators.timeline.commands import Collective, Command, Kernel, Program, Work
from fsdp2prof.estimators.timeline.compiled import with_block

__all__ = ["in_float8"]

_SCALED = "aten::_scaled_mm"
_FLOAT8 = "float8_e4m3fn"


def in_float8(
    program: Program, blocks: tuple[str, ...], *, fused: bool = False, casts_before_gathers: bool = False
) -> Program:
    """Multiply in float8 inside the blocks; both factors are scaled and cast before, in one pass each.

    A pass reads a factor twice (for its largest value, and to cast it) and writes it at half the size. Where
    the compiler fuses, what made the factor finds its largest value (torchao's ``float8_roofline``).
    ``casts_before_gathers``: tensor parallelism gathers what is cast already.
    """
    moved_an_element = 3 if fused else 5
    gathered = _gathered(program, blocks) if casts_before_gathers else frozenset()
    made: list[Command] = []
    narrow = False  # behind a gather, up to the first product: copies that put the ranks' parts in order
    for command, inside in with_block(program.commands, blocks):
        if inside and casts_before_gathers and _is_gather(command):
            made += _cast_and_gather(command, moved_an_element)
            narrow = True
            continue
        work = command.work if isinstance(command, Kernel) else None
        if not inside or work is None or not isinstance(command, Kernel):
            made.append(command)
        elif work.kind == "matmul":
            narrow = False
            made += _product(command, work, moved_an_element, gathered)
        elif narrow and work.kind == "copy":
            made.append(replace(command, work=replace(work, bytes=work.bytes // 2)))
        else:
            made.append(command)
    return replace(program, commands=made)


def _product(kernel: Kernel, work: Work, moved_an_element: int, gathered: frozenset[int]) -> list[Command]:
    """Return the casts of the factors that are none of the gathered ones, and the product."""
    batch, m, n, k = work.shape
    factors = batch * m * k, batch * k * n
    cast = sum(elements for elements in factors if elements not in gathered)
    made: list[Command] = []
    if cast:
        casts = Work("pointwise", work.dtype, moved_an_element * cast)
        made.append(Kernel(kernel.stream, "float8_cast", casts))
    scaled = replace(work, dtype=_FLOAT8, bytes=work.bytes - sum(factors))
    return [*made, replace(kernel, op=_SCALED, work=scaled)]


def _is_gather(command: Command) -> bool:
    return isinstance(command, Collective) and command.mesh_dim == "tp" and command.op == "all_gather"


def _gathered(program: Program, blocks: tuple[str, ...]) -> frozenset[int]:
    """Elements of what tensor parallelism gathers in the blocks: a factor of so many was one of them."""
    return frozenset(
        command.nelems_out
        for command, inside in with_block(program.commands, blocks)
        if inside and isinstance(command, Collective) and _is_gather(command)
    )


def _cast_and_gather(command: Command, moved_an_element: int) -> list[Command]:
    assert isinstance(command, Collective)
    casts = Work("pointwise", command.dtype, moved_an_element * command.nelems_in)
    narrower = replace(command, dtype=_FLOAT8, payload_bytes=command.nelems_out)
    return [Kernel(0, "float8_cast", casts), narrower]
