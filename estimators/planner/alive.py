"""What a shallow run holds at the instants that a deep model's peak is made of, wherever its own peak is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers.memory.attribution import attribute
from fsdp2prof.analyzers.memory.categories import categorize
from fsdp2prof.estimators.memory import MemoryPrediction
from fsdp2prof.tables import BoolArray, IntArray

__all__ = ["Alive", "Held"]

_GROW_WITH_TOKENS = frozenset({"activation", "temporary", "input", "unattributed"})
_STATES = frozenset({"sharded_parameter", "optimizer_state"})


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes at one instant."""

    of_tokens: int
    """What grows with the tokens."""
    of_parameters: int
    """Gathered parameters, gradients, and buffers for them."""


class Alive:
    """The last step of an execution, asked for what is alive in it. All sizes are bytes."""

    def __init__(self, prediction: MemoryPrediction, blocks: Sequence[str]) -> None:
        recording = prediction.recording
        table = categorize(attribute(recording, recording.steps), prediction.manifest, recording.end_ns)
        self._born, self._freed, self._size = table.alloc_order, table.free_order, table.size
        self._default = table.stream == 0
        self._token_sized = table.category.matches(lambda name: name in _GROW_WITH_TOKENS)
        self._states = table.category.matches(lambda name: name in _STATES)
        self._gradients = table.category.equals("sharded_gradient")
        gathered = table.category.equals("unsharded_parameter")
        last = table.step == int(table.step.max())
        self._forward = last & table.phase.equals("forward")
        self._backward = last & table.phase.equals("backward")
        self._of = {fqn: table.fqn.equals(fqn) for fqn in blocks}
        in_block = np.logical_or.reduce(list(self._of.values()))
        self._root_gathered = gathered & ~in_block
        self._begin = int(self._born[self._forward & in_block].max())
        """Of the loss: after the last block's forward."""
        self._end = int(self._born[self._backward & in_block].min())

    def saved(self, fqn: str) -> int:
        """Activations of a block that are alive when backward begins."""
        kept = self._of[fqn] & self._token_sized & self._forward
        return int(self._size[kept & (self._born < self._end) & (self._freed >= self._end)].sum())

    def in_backward(self, fqn: str, blocks: Sequence[str]) -> int:
        """Most bytes that grow with the tokens in a block's backward, beside what ``blocks`` saved."""
        most = self._most(self._born[self._backward & self._of[fqn]], self._token_sized)
        return max(0, most - sum(map(self.saved, blocks)))

    def at_loss(self) -> tuple[Held, Held]:
        """What is alive between the blocks' forward and their backward beside states and the gathered root:
        when most is that grows with the tokens, and when most is that does not."""
        instants = self._born[(self._born >= self._begin) & (self._born <= self._end)]
        tokens = self._totals(instants, self._default & self._token_sized)
        others = self._default & ~(self._states | self._root_gathered | self._token_sized)
        parameters = self._totals(instants, others)
        made = [Held(*pair) for pair in zip(tokens.tolist(), parameters.tolist(), strict=True)]
        return max(made, key=lambda one: one.of_tokens), max(made, key=lambda one: one.of_parameters)

    def active(self) -> int:
        """Most bytes of the default stream in the last step."""
        return self._most(self._born[self._forward | self._backward], self._default)

    def _most(self, instants: IntArray, counted: BoolArray) -> int:
        return int(self._totals(instants, counted).max(initial=0))

    def _totals(self, instants: IntArray, counted: BoolArray) -> IntArray:
        born, freed, size = self._born[counted], self._freed[counted], self._size[counted]
        made = [int(size[(born <= instant) & (freed > instant)].sum()) for instant in instants.tolist()]
        return np.array(made, dtype=np.int64)
