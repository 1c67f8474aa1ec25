"""What a profiler would have recorded of a product's or an attention's inputs: the shapes of a roofline."""

from __future__ import annotations

import json

from fsdp2prof.estimators.timeline.commands import Kernel, Work

__all__ = ["inputs_of", "recorded_name"]

_OF_HOSTS = "_for_cpu"
"""Part of the name of the host's flash attention, which stands in for the device's."""
_PLAIN = ("aten::mm", "aten::_scaled_mm")
_BIASED = ("aten::addmm", "aten::baddbmm")
_BATCHED = ("aten::bmm", "aten::baddbmm")


def recorded_name(kernel: Kernel) -> str:
    """Return the operator's name as an accelerator would record it."""
    return kernel.op.replace(_OF_HOSTS, "")


def inputs_of(kernel: Kernel) -> tuple[str, str] | None:
    """Return ``Input Dims`` and ``Input type`` as JSON texts; None for other operators."""
    work = kernel.work
    if work is None or work.kind not in ("matmul", "attention"):
        return None
    shapes = _attention(work) if work.kind == "attention" else _product(kernel.op, work)
    if not shapes:
        return None
    types = [work.dtype] * len(shapes)
    return json.dumps(shapes, separators=(",", ":")), json.dumps(types, separators=(",", ":"))


def _product(op: str, work: Work) -> list[list[int]]:
    batch, m, n, k = work.shape
    if op in _PLAIN or op == "aten::addmm":
        factors = [[batch * m, k], [k, n]]
    elif op in _BATCHED:
        factors = [[batch, m, k], [batch, k, n]]
    elif op == "aten::_grouped_mm":
        factors = [[batch * m, k], [batch, k, n]]
    else:
        return []
    return [[n], *factors] if op in _BIASED else factors


def _attention(work: Work) -> list[list[int]]:
    batch, heads, queries, keys, depth, kv_heads, value_depth = work.shape
    query, key = [batch, heads, queries, depth], [batch, kv_heads, keys, depth]
    value, result = [batch, kv_heads, keys, value_depth], [batch, heads, queries, value_depth]
    return [result, query, key, value] if work.backward else [query, key, value]
