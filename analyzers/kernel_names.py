"""Kernel names that show compute which another setting would speed up."""

from __future__ import annotations

import re

KINDS = (
    "float64",
    "float32",
    "attention_in_float32",
    "layout",
    "unaligned",
    "indexed",
    "scores",
    "memory",
    "sliced",
    "update",
    "one_hot",
)
"""Operators in double precision; matrix products in single precision without tensor cores; fused attention
in single precision; conversions between channels first and last; half-precision matrix products whose rows
are not aligned to 16 bytes; gradients of a tensor that is indexed by a tensor; attention with its scores in
memory; torch's own kernels that read and write whole tensors and compute almost nothing; gradients of parts
of one tensor, each added as a whole one; matrix products of the optimizer; products with a matrix that
one_hot made, with the making."""

SINGLE = re.compile(r"sgemm|simt_\w*gemm|gemm_f32f32_f32f32_f32")
"""Names of matrix products in float32 that run beside the tensor cores (cuBLAS, CUTLASS)."""
NAMES = {
    "float64": re.compile(r"(?:^|_)d(?:884|1688)?gemm|gemm_f64f64"),  # cuBLAS, CUTLASS
    "float32": SINGLE,
    "attention_in_float32": re.compile(r"fmha_cutlass[FB]_f32"),  # torch's memory-efficient attention
    "layout": re.compile(r"nchwToNhwc|nhwcToNchw|^batched_transpose_\d", re.IGNORECASE),  # cuDNN, MIOpen
    "indexed": re.compile(r"\bindexing_backward_kernel"),  # torch's index_put_ with accumulate
    "unaligned": re.compile(r"(?:f16|bf16|h)_?s?\d*gemm\w*_align[124](?!\d)"),  # CUTLASS, called by cuBLAS
}
"""Kind -> pattern of its kernels' names."""
PRODUCT_KERNEL = re.compile(r"gemm|^nvjet|^Cijk_")
"""Names of matrix products (cuBLAS, CUTLASS, hipBLASLt)."""
_MEMORY = re.compile(
    r"elementwise_kernel|\breduce_kernel|\b(?:vectorized_layer_norm|layer_norm_grad|batch_norm_|group_norm_)|"
    r"(?:Layer|Group)Norm(?:Forward|Backward|1d)|RowwiseMoments|GammaBetaBackward|\b(?:softmax_warp|cunn_\w*soft_?max)|"
    r"CatArrayBatchedCopy|dropout_kernel",
    re.IGNORECASE,
)
"""Names of torch's own kernels; those of other libraries (Liger, Apex, Transformer Engine) are fused."""
_FUSED = re.compile(r"^triton_|flash|fmha|gemm", re.IGNORECASE)


def moves_memory(name: str) -> bool:
    """Whether this is a torch kernel that reads and writes whole tensors and computes almost nothing."""
    return _MEMORY.search(name) is not None and _FUSED.search(name) is None
