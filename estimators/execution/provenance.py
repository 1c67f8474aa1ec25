"""Which block the storages belong to that are made outside of the blocks' own work.

Parameters are materialized, gradients clipped and parameters updated for the whole model at once, with no
label of a module around. What an operator makes there belongs to the block its inputs belong to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2prof.estimators.models.float8_weight import Float8Shard, with_memory
from fsdp2prof.storage_tracker import StorageTracker

__all__ = ["BlockProvenance"]


class BlockProvenance:
    """Follows storages from the parameters of a model's blocks through operators."""

    def __init__(self, module: nn.Module, blocks: tuple[str, ...], tracker: StorageTracker) -> None:
        self._module = module
        self._prefixes = {f"{fqn}.": index for index, fqn in enumerate(blocks)}
        self._tracker = tracker
        self._owner: WeakKeyDictionary[UntypedStorage, int] = WeakKeyDictionary()
        self.block_of: dict[int, int] = {}
        """Address in the tracker's recording -> index of the block."""

    @contextmanager
    def following(self, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Follow what happens inside to parameters, their gradients and the optimizer's state."""
        self._owner.clear()
        for name, parameter in self._module.named_parameters():
            block = next((index for prefix, index in self._prefixes.items() if name.startswith(prefix)), None)
            if block is not None:
                state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
                for tensor in (parameter, parameter.grad, *state.values()):
                    if isinstance(tensor, Tensor):
                        self._owner[_storage(tensor)] = block
        with _Follow(self._see):
            yield

    def _see(self, inputs: Any, outputs: Any) -> None:
        given = {_storage(tensor) for tensor in _tensors(inputs)}
        results = list(_tensors(outputs))
        rows = [list(_tensors(item)) for item in inputs if isinstance(item, (list, tuple))]
        parallel = [row for row in rows if isinstance(outputs, (list, tuple)) and len(row) == len(results)]
        for index, tensor in enumerate(results):
            storage = _storage(tensor)
            if storage in given:
                continue
            sources = [_storage(row[index]) for row in parallel] or given
            owners = {self._owner[source] for source in sources if source in self._owner}
            address = self._tracker.address(tensor)
            if len(owners) == 1 and address >= 0:
                self._owner[storage] = self.block_of[address] = owners.pop()


class _Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operator's inputs and outputs."""

    def __init__(self, see: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types or Float8Shard in types:
            return NotImplemented  # unfolds into operators on local tensors
        result = func(*args, **(kwargs or {}))
        self._see((*args, *(kwargs or {}).values()), result)
        return result


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, (list, tuple)):
        for value in item:
            yield from _tensors(value)


def _storage(tensor: Tensor) -> UntypedStorage:
    """The storage itself, one Python object for life: its address is another storage's after its death."""
    return with_memory(tensor).untyped_storage()
