"""Compiled blocks: the commands the compiler removes from a captured step, and which of them are guessed."""

from __future__ import annotations

from dataclasses import replace

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.simulate.program import Command, Kernel, Program, within_blocks
from fsdp2prof.estimators.techniques.technique import Technique


class Compilation(Technique):
    """``torch.compile`` of each block (``compile``)."""

    def change_program(self, program: Program, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Program:
        """Drop commands that only eager mode has in each block, and fuse where its graph has not fused."""
        return _compiled(program, model.blocks) if policy.compile else program


def _compiled(program: Program, blocks: tuple[str, ...]) -> Program:
    """Drop commands that only eager mode has in each block, and fuse where its graph has not fused."""
    made: list[Command] = []
    run: list[Kernel] = []
    for command, inside in within_blocks(program.commands, blocks):
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


def _fused(run: list[Kernel]) -> list[Kernel]:
    if not run:
        return []
    largest = max(run, key=lambda kernel: kernel.work.bytes if kernel.work else 0)
    return [replace(largest, op="fused")]


def compile_notes(policy: PolicySpec, why_guessed: str | None) -> list[str]:
    """How the memory of compiled blocks was found, and why it was guessed if it was."""
    if not policy.compile:
        return []
    if why_guessed is None:
        return [
            "compile: each block's graph traced whole and cut by AOTAutograd's partitioner, that of the "
            "installed torch; kernels fused, and results kept out of memory, after inductor's rules"
        ]
    notes = [
        f"compile, guessed: {why_guessed}; pointwise work between two FSDP labels of a block is left out of "
        "the eager execution instead, which is approximate"
    ]
    if policy.ac == "none":
        notes.append("compile without checkpointing: the compiler saves less than eager does: an upper bound")
    return notes
