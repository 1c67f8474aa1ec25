"""Kernels in the ledger that another setting makes faster: products without tensor cores, unfused ones."""

from __future__ import annotations

import re
from collections import Counter

from fsdp2prof.analyzers.ledger.book import Book, worst_layer
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.analyzers.ledger.thresholds import severity_of, worth_telling

_SINGLE = re.compile(r"sgemm|simt_\w*gemm|gemm_f32f32_f32f32_f32")
"""Names of matrix products in float32 that run beside the tensor cores (cuBLAS, CUTLASS)."""
_UNFUSED = re.compile(
    r"elementwise_kernel|\breduce_kernel|\b(?:vectorized_layer_norm|layer_norm_grad|batch_norm_|group_norm_)|"
    r"(?:Layer|Group)Norm(?:Forward|Backward|1d)|RowwiseMoments|GammaBetaBackward|\b(?:softmax_warp|cunn_\w*soft_?max)|"
    r"CatArrayBatchedCopy|dropout_kernel",
    re.IGNORECASE,
)
"""Names of torch's own kernels that read and write whole tensors and compute next to nothing; those of other
libraries (Liger, Apex, Transformer Engine) are fused."""
_FUSED = re.compile(r"^triton_|flash|fmha|gemm", re.IGNORECASE)
_MUCH, _MOST = 0.3, 0.5
"""Part of compute from which on products without tensor cores, or memory-bound kernels, are named."""
_TENSOR_CORES = 7 / 8
"""Part of such products that tensor cores save at most: TF32 is eight times as fast (A100 data sheet)."""
_SAVED_BY_FUSION = 0.5
_OLD = re.compile(r"^(?:volta|turing)_")
"""Begins names of kernels of devices whose tensor cores take neither bfloat16 nor TF32 (cuBLAS)."""


def enter_kernels(book: Book) -> None:
    """Enter the compute of kernels that another setting would make faster."""
    _in_double(book)
    if not book.on_device:
        return
    _without_tensor_cores(book)
    _unfused(book)


def _spent(book: Book, names: re.Pattern[str], least: float, but: re.Pattern[str] | None = None) -> float:
    """Return the part of compute in kernels of some names; 0 below the least that matters."""
    compute = [one for one in book.analysis.kernels if one.kind == "compute"]
    whole = sum(one.total_ns for one in compute)
    spent = sum(
        one.total_ns
        for one in compute
        if one.name and names.search(one.name) and not (but is not None and but.search(one.name))
    )
    return spent / whole if whole and spent >= least * whole else 0.0


def _gain_ns(book: Book, saved: float) -> int:
    """Return what a part saved of all compute gains.

    Where the device idles for the host's launches, shorter kernels only make it idle longer: up to that time,
    by phase, they gain nothing.
    """
    idle, spent = Counter[tuple[int, int, str]](), Counter[tuple[int, int, str]]()
    for cause, one in book.booked:
        idle[one.rank, one.step, one.phase] += one.ns if cause == "host" else 0
    for one in book.left("compute"):
        spent[one.rank, one.step, one.phase] += one.ns
    return sum(max(0, int(saved * ns) - idle[place]) for place, ns in spent.items())


def _take(book: Book, part: float) -> list[Charge]:
    return book.take("compute", part=(round(part * 1e9), 1_000_000_000)) if part else []


def _in_double(book: Book) -> None:
    mine = book.take("compute", lambda one: one.why == "float64")
    cost = sum(one.ns for one in mine)
    if worth_telling(severity_of(book.frac(cost / 2), book.thresholds, book.on_device)):
        book.enter(mine, "products_in_float64", fqn=worst_layer(mine), gain_ns=cost / 2)
    else:
        book.put_back(mine)


def _without_tensor_cores(book: Book) -> None:
    part = _spent(book, _SINGLE, _MUCH)
    gain = _gain_ns(book, part * _TENSOR_CORES)
    mine = _take(book, part)
    old = any(_OLD.search(one.name or "") for one in book.analysis.kernels)
    key = "float32_without_tensor_cores"
    spent = sum(one.ns for one in mine) / book.rank_steps
    book.enter(mine, f"{key}/old" if old else key, {"compute_frac": part}, gain_ns=gain, spent=spent)


def _unfused(book: Book) -> None:
    part = _spent(book, _UNFUSED, _MOST, _FUSED)
    gain = _gain_ns(book, part * _SAVED_BY_FUSION)
    if worth_telling(severity_of(book.frac(gain), book.thresholds, book.on_device)):
        book.enter(_take(book, part), "memory_bound_kernels", {"compute_frac": part}, gain_ns=gain)
