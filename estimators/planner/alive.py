"""What a shallow run holds at the instants that a deep model's peak is made of, wherever its own peak is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdp2prof.analyzers.memory.attribution import attribute
from fsdp2prof.analyzers.memory.categories import categorize
from fsdp2prof.estimators.memory import MemoryPrediction
from fsdp2prof.tables import BoolArray, IntArray

__all__ = ["Alive"]

_GROW_WITH_TOKENS = frozenset({"activation", "temporary", "input", "unattributed"})
_STATES = frozenset({"sharded_parameter", "optimizer_state"})


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
        """Most bytes in a block's backward beside states, gradients' shards, the root's parameters and what
        ``blocks`` saved."""
        counted = ~(self._states | self._gradients | self._root_gathered)
        most = self._most(self._born[self._backward & self._of[fqn]], counted)
        return max(0, most - sum(map(self.saved, blocks)))

    def at_loss(self) -> int:
        """Most bytes between the blocks' forward and their backward beside states and the gathered root."""
        instants = self._born[(self._born >= self._begin) & (self._born <= self._end)]
        return self._most(instants, self._default & ~(self._states | self._root_gathered))

    def _most(self, instants: IntArray, counted: BoolArray) -> int:
        born, freed, size = self._born[counted], self._freed[counted], self._size[counted]
        totals = (int(size[(born <= instant) & (freed > instant)].sum()) for instant in instants.tolist())
        return max(totals, default=0)
