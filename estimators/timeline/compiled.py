"""A program as ``torch.compile`` and float8 training change it: fused pointwise work, faster products.

Each block is compiled on its own, as torchtitan does, and its kernels are those of its own graph
(:mod:`fsdp2prof.estimators.compiler`). Of a block whose graph cannot be traced the pointwise work between two
products, or a product and one of FSDP2's labels, becomes one kernel that reads and writes once: it moves as
much as the largest of what it replaces. The host issues a compiled block's kernels without eager dispatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdp2prof.estimators.timeline.commands import Collective, Command, Enter, Kernel, Leave, Program, Work
from fsdp2prof.labels import parse_label

__all__ = ["compiled", "in_float8"]

_SCALED = "aten::_scaled_mm"
_BEGINS = ("pre_forward", "pre_backward")
_ENDS = ("post_forward", "post_backward_reshard", "post_backward_accumulate", "post_backward_reduce")


def compiled(program: Program, blocks: tuple[str, ...]) -> Program:
    """Drop what only the eager host does in each block, and fuse there what its graph has not fused."""
    made: list[Command] = []
    run: list[Kernel] = []
    for command, inside in _with_block(program.commands, blocks):
        if inside and isinstance(command, Kernel) and command.stream == 0:
            if command.work is None:
                continue
            if program.guessed_fusion is not None and command.work.kind in ("pointwise", "copy"):
                run.append(command)
                continue
        made += _fused(run)
        run = []
        made.append(command)
    return replace(program, commands=[*made, *_fused(run)])


def in_float8(program: Program, blocks: tuple[str, ...], *, fused: bool = False) -> Program:
    """Multiply in float8 inside the blocks; both factors are scaled and cast before, in one pass each.

    A pass reads a factor twice (for its largest value, and to cast it) and writes it at half the size. Where
    the compiler fuses, what made the factor finds its largest value (torchao's ``float8_roofline``).
    """
    moved_an_element = 3 if fused else 5
    made: list[Command] = []
    for command, inside in _with_block(program.commands, blocks):
        work = command.work if isinstance(command, Kernel) else None
        if not inside or work is None or work.kind != "matmul" or not isinstance(command, Kernel):
            made.append(command)
            continue
        batch, m, n, k = work.shape
        factors = batch * (m * k + k * n)
        made.append(
            Kernel(command.stream, "float8_cast", Work("pointwise", work.dtype, moved_an_element * factors))
        )
        moved = work.bytes - factors
        made.append(replace(command, op=_SCALED, work=replace(work, dtype="float8_e4m3fn", bytes=moved)))
    return replace(program, commands=made)


def _with_block(commands: list[Command], blocks: tuple[str, ...]) -> Iterator[tuple[Command, bool]]:
    """Yield every command with whether it is a block's own work, outside of FSDP2's labels."""
    names = frozenset(blocks)
    depth, inside = 0, False
    labels: list[bool] = []
    for command in commands:
        if isinstance(command, Enter):
            label = parse_label(command.name)
            own = label is not None and label.kind != "root"
            labels.append(own)
            depth += own
            if label is not None and label.fqn in names and label.kind in _BEGINS:
                inside = True
            elif label is not None and (label.kind in _ENDS or label.kind in _BEGINS):
                inside = False
        elif isinstance(command, Leave):
            depth -= labels.pop()
        yield command, inside and not depth and not isinstance(command, Collective)


def _fused(run: list[Kernel]) -> list[Kernel]:
    if not run:
        return []
    largest = max(run, key=lambda kernel: kernel.work.bytes if kernel.work else 0)
    return [replace(largest, op="fused")]
