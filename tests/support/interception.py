"""Counts the collectives of a training step below DTensor and FSDP."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Interception", "summed"]


class Interception(TorchDispatchMode):
    """Counts collectives by (phase, op, dtype, payload bytes) below DTensor and FSDP.

    Those of one rank, which torch still calls before 2.10, move nothing and do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.counts: Counter[tuple[str, str, str, int]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any("DTensor" in kind.__name__ for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")
        if name[0] in ("c10d", "_c10d_functional"):
            op, payload = self._payload(name[2], args, result)
            if op is not None and self._ranks(args) > 1:
                dtype = str(payload.dtype).removeprefix("torch.")
                self.counts[self.phase, op, dtype, payload.numel() * payload.element_size()] += 1
        return result

    @staticmethod
    def _ranks(args):
        """Size of the group: the first boxed object of a c10d operator, else the name at the end."""
        boxed = next((item for item in args if isinstance(item, torch.ScriptObject)), None)
        if boxed is None:
            return dist.distributed_c10d._resolve_process_group(args[-1]).size()
        return dist.ProcessGroup.unbox(boxed).size()

    @staticmethod
    def _payload(name, args, result):
        match name.rstrip("_"):
            case "_allgather_base":
                return "all_gather", args[0]
            case "all_gather_into_tensor":
                return "all_gather", result
            case "_reduce_scatter_base":
                return "reduce_scatter", args[1]
            case "reduce_scatter_tensor":
                return "reduce_scatter", args[0]
            case "all_to_all_single":
                return "all_to_all", args[0]
            case "alltoall_base":
                return "all_to_all", args[1]
            case "allreduce":
                return "all_reduce", args[0][0]
            case "all_reduce":
                return "all_reduce", args[0]
        return None, None


def summed(counts):
    """Sum intercepted collectives of several sizes: count and bytes by phase, op and dtype."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for (phase, op, dtype, payload), count in counts.items():
        known = sums.get((phase, op, dtype), (0, 0))
        sums[phase, op, dtype] = known[0] + count, known[1] + count * payload
    return sums
