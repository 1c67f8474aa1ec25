"""Counts FSDP's collectives from inside the training, by other means than the tool under test.

Put on PYTHONPATH by the exactness tests. Wraps the functions of ``torch.distributed`` that FSDP calls,
finds the parameter group in the caller's frames, and writes one JSON file per rank at exit:
``[{"root", "fqn", "op", "dtype", "ranks", "count", "payload_bytes"}]``; ``root`` numbers the root modules in
the order of their first collective, each known by the context its groups share.
"""

import atexit
import importlib.abc
import importlib.util
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

_TARGET = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_counts: Counter[tuple] = Counter()
_bytes: Counter[tuple] = Counter()
_roots: list = []


def _calling_group(frame):
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner).__name__ == "FSDPParamGroup":
            return owner
        frame = frame.f_back
    return None


def _root(owner):
    known = [index for index, context in enumerate(_roots) if context is owner.comm_ctx]
    if not known:
        _roots.append(owner.comm_ctx)
        return len(_roots) - 1
    return known[0]


def _wrap(dist, name, op, tensor_position, tensor_keyword):
    original = getattr(dist, name, None)
    if original is None:
        return

    def counted(*args, **kwargs):
        tensor = kwargs[tensor_keyword] if tensor_keyword in kwargs else args[tensor_position]
        owner = _calling_group(sys._getframe(1))
        ranks = tuple(dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD))
        name = (_root(owner), owner._module_fqn) if owner else (None, None)
        key = (*name, op, str(tensor.dtype).removeprefix("torch."), ranks)
        _counts[key] += 1
        _bytes[key] += tensor.numel() * tensor.element_size()
        return original(*args, **kwargs)

    setattr(dist, name, counted)


def _install():
    import torch.distributed as dist

    for name in ("all_gather_single", "all_gather_into_tensor"):
        _wrap(dist, name, "all_gather", 0, "output_tensor")
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
        _wrap(dist, name, "reduce_scatter", 1, "input")
    _wrap(dist, "all_reduce", "all_reduce", 0, "tensor")
    atexit.register(_write)


def _write():
    rows = [
        {
            "root": root,
            "fqn": fqn,
            "op": op,
            "dtype": dtype,
            "ranks": list(ranks),
            "count": count,
            "payload_bytes": _bytes[(root, fqn, op, dtype, ranks)],
        }
        for (root, fqn, op, dtype, ranks), count in _counts.items()
    ]
    path = Path(os.environ["COUNT_DIRECTORY"], f"rank{os.environ['RANK']}.json")
    path.write_text(json.dumps(rows))


class _AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module):
            load(module)
            _install()

        loader.exec_module = exec_module
        return spec


if "COUNT_DIRECTORY" in os.environ:
    sys.meta_path.insert(0, _AfterImport())
