"""Kinds of compute that another setting would make faster, by the names of kernels."""

from __future__ import annotations

import re

KINDS = ("float64", "attention_in_float32", "layout", "unaligned", "scores", "memory")
"""Matrix products in double precision; fused attention in single precision; conversions between channels
first and last; products of half-precision matrices that 16 bytes do not divide; attention's scores as a
tensor; torch's own kernels that read and write whole tensors and compute next to nothing."""

NAMES = {
    "float64": re.compile(r"(?:^|_)d(?:884|1688)?gemm|gemm_f64f64"),  # cuBLAS, CUTLASS
    "attention_in_float32": re.compile(r"fmha_cutlass[FB]_f32"),  # torch's memory-efficient attention
    "layout": re.compile(r"nchwToNhwc|nhwcToNchw", re.IGNORECASE),  # cuDNN
    "unaligned": re.compile(r"(?:f16|bf16|h)_?s?\d*gemm\w*_align[124](?!\d)"),  # CUTLASS, called by cuBLAS
}
"""Kind -> names of its kernels."""
_MEMORY = re.compile(
    r"elementwise_kernel|\breduce_kernel|\b(?:vectorized_layer_norm|layer_norm_grad|batch_norm_|group_norm_)|"
    r"(?:Layer|Group)Norm(?:Forward|Backward|1d)|RowwiseMoments|GammaBetaBackward|\b(?:softmax_warp|cunn_\w*soft_?max)|"
    r"CatArrayBatchedCopy|dropout_kernel",
    re.IGNORECASE,
)
"""Names of torch's own; those of other libraries (Liger, Apex, Transformer Engine) are fused."""
_FUSED = re.compile(r"^triton_|flash|fmha|gemm", re.IGNORECASE)


def moves_memory(name: str) -> bool:
    """Whether a kernel is one of torch's that read and write whole tensors and compute next to nothing."""
    return _MEMORY.search(name) is not None and _FUSED.search(name) is None
