"""Accelerators as a Kineto trace shows them, a row each; whatever depends on their kind is read from it.

Sources: the activity types of ``libkineto/include/ActivityType.h``, the plugins that emit them, and the
interfaces of each runtime. ROCm's calls come under CUDA's categories.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from typing import TypeVar

_Thread = TypeVar("_Thread")
_NEVER = re.compile(r"(?!)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """How one kind of accelerator shows in a trace. Patterns match whole names unless said otherwise."""

    name: str
    """Maker and interface, as people call it."""
    device_type: str
    """torch's."""
    calls: tuple[str, ...]
    """Categories of the host's calls into its runtime and driver."""
    kernel: str = "kernel"
    """Category of its kernels."""
    copy: str = "gpu_memcpy"
    fill: str = "gpu_memset"
    records: tuple[str, ...] = ("gpu_user_annotation",)
    """Categories of what lies on its streams and occupies nothing."""
    waits: re.Pattern[str]
    """Calls made to return only when the device has caught up."""
    copies: re.Pattern[str]
    """Calls that copy, some of which block the host."""
    blocking_copies: re.Pattern[str] = _NEVER
    """Those that always block."""
    allocations: re.Pattern[str] = _NEVER
    """Calls that get memory from the device or the system, or give it back; most wait for the device."""
    graph_launches: re.Pattern[str] = _NEVER
    """Calls that launch a whole graph of kernels."""
    launches: re.Pattern[str] = _NEVER
    """Calls that put a kernel, a graph or a copy on a stream; each leaves a record of the device. A fill of
    zero bytes leaves none, and no call tells its size."""
    begins_capture: re.Pattern[str] = _NEVER
    """Calls from which on a thread's launches go into a graph, and not to the device."""
    ends_capture: re.Pattern[str] = _NEVER
    device_copies: re.Pattern[str]
    """Found in the name of a copy that stays on devices."""
    collective_kernels: re.Pattern[str]
    """Begins the name of a kernel of its collectives' library."""
    collective_ranges: str
    """Begins the name of the range around a collective (``nccl:all_reduce``)."""
    cuda_names: Mapping[str, str] = field(default_factory=dict)
    """CUDA runtime's name of calls that HolisticTraceAnalysis looks for."""


BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="NVIDIA CUDA",
        device_type="cuda",
        calls=("cuda_runtime", "cuda_driver"),
        records=("gpu_user_annotation", "cuda_sync"),
        waits=re.compile(r"cu(?:da)?(?:Stream|Device|Event|Ctx)Synchronize\w*"),
        copies=re.compile(r"cu(?:da)?Memcpy\w*"),
        blocking_copies=re.compile(r"cudaMemcpy"),
        allocations=re.compile(
            r"cu(?:da)?(?:(?:Malloc|Free|Host(?:Alloc|Register|Unregister))(?!\w*Async)|"
            r"Mem(?:Alloc|Free|Create|Release|Map|Unmap|SetAccess|Address\w+e)$)(?:Host)?\w*"
        ),
        graph_launches=re.compile(r"cu(?:da)?GraphLaunch\w*"),
        launches=re.compile(r"cu(?:da)?(?:Launch\w*Kernel\w*|GraphLaunch\w*|Memcpy\w*)"),
        begins_capture=re.compile(r"cu(?:da)?StreamBeginCapture\w*"),
        ends_capture=re.compile(r"cu(?:da)?StreamEndCapture\w*"),
        device_copies=re.compile(r"DtoD|PtoP"),
        collective_kernels=re.compile(r"nccl|msccl", re.IGNORECASE),
        collective_ranges="nccl:",
        cuda_names={"cuLaunchKernel": "cudaLaunchKernel", "cuLaunchKernelEx": "cudaLaunchKernelExC"},
    ),
    Backend(
        name="AMD ROCm",
        device_type="cuda",
        calls=("cuda_runtime", "cuda_driver"),
        waits=re.compile(r"hip(?:Stream|Device|Event|Ctx)Synchronize\w*"),
        copies=re.compile(r"hipMemcpy\w*"),
        blocking_copies=re.compile(r"hipMemcpy|hipMemcpyWithStream"),
        allocations=re.compile(
            r"hip(?:(?:Ext)?Malloc|Free|Host(?:Malloc|Free)|Mem(?:Create|Release|Map|Unmap|SetAccess|"
            r"Address\w+e)$)(?!\w*Async)\w*"
        ),
        graph_launches=re.compile(r"hipGraphLaunch\w*"),
        launches=re.compile(r"hip(?:\w*Launch\w*Kernel\w*|GraphLaunch\w*|Memcpy\w*)"),
        begins_capture=re.compile(r"hipStreamBeginCapture\w*"),
        ends_capture=re.compile(r"hipStreamEndCapture\w*"),
        device_copies=re.compile(r"DtoD|PtoP|DeviceToDevice|PeerToPeer"),
        collective_kernels=re.compile(r"rccl|nccl|msccl", re.IGNORECASE),
        collective_ranges="nccl:",
        cuda_names={
            "hipLaunchKernel": "cudaLaunchKernel",
            "hipExtLaunchKernel": "cudaLaunchKernel",
            "hipModuleLaunchKernel": "cudaLaunchKernel",
            "hipExtModuleLaunchKernel": "cudaLaunchKernel",
            "hipMemcpyAsync": "cudaMemcpyAsync",
            "hipMemcpyWithStream": "cudaMemcpyAsync",
            "hipMemsetAsync": "cudaMemsetAsync",
            "hipDeviceSynchronize": "cudaDeviceSynchronize",
            "hipStreamSynchronize": "cudaStreamSynchronize",
            "hipEventSynchronize": "cudaEventSynchronize",
            "hipEventRecord": "cudaEventRecord",
            "hipEventRecordWithFlags": "cudaEventRecord",
            "hipStreamWaitEvent": "cudaStreamWaitEvent",
        },
    ),
    Backend(
        name="Intel XPU",
        device_type="xpu",
        calls=("xpu_runtime", "xpu_driver"),
        records=("gpu_user_annotation", "xpu_sync"),
        # Unified Runtime (ur), its predecessor (pi), Level Zero (ze).
        waits=re.compile(r"(?:ur|pi)(?:QueueFinish|EventWait|EventsWait)|ze\w+(?:Host)?Synchronize"),
        copies=re.compile(r"(?:ur|piext|pi)\w*(?:Memcpy|MemBuffer(?:Copy|Read|Write))\w*|ze\w+MemoryCopy\w*"),
        graph_launches=re.compile(r"ur\w*(?:EnqueueCommandBuffer|CommandBufferEnqueue)\w*"),
        launches=re.compile(r"(?:ur|pi)\w*Enqueue\w*KernelLaunch\w*"),
        device_copies=re.compile(r"D2D|P2P|DtoD"),
        collective_kernels=re.compile(r"oneccl|xccl", re.IGNORECASE),
        collective_ranges="xccl:",
        cuda_names={
            "urEnqueueKernelLaunch": "cudaLaunchKernel",
            "urEnqueueKernelLaunchWithArgsExp": "cudaLaunchKernel",
            "urEnqueueCooperativeKernelLaunchExp": "cudaLaunchKernel",
            "piEnqueueKernelLaunch": "cudaLaunchKernel",
            "urEnqueueUSMMemcpy": "cudaMemcpyAsync",
            "urEnqueueUSMFill": "cudaMemsetAsync",
            "urQueueFinish": "cudaStreamSynchronize",
            "urEventWait": "cudaEventSynchronize",
        },
    ),
    Backend(
        name="an accelerator outside torch's tree",
        device_type="privateuseone",
        calls=("privateuse1_runtime", "privateuse1_driver"),
        waits=re.compile(r"\w*Synchronize\w*"),
        copies=re.compile(r"\w*Memcpy\w*"),
        device_copies=re.compile(r"D2D|DtoD"),
        collective_kernels=re.compile(r"hccl", re.IGNORECASE),
        collective_ranges="hccl:",
    ),
)
"""Every kind there is; a new one is one more row."""


_NAMES = 1 << 13
"""Names whose meaning is remembered: the ranks of a job have the same."""


def device_type(categories: Iterable[str]) -> str | None:
    """Return torch's name of the device that a trace's host calls went to, by their categories."""
    present = set(categories)
    return next((row.device_type for row in BACKENDS if not present.isdisjoint(row.calls)), None)


def _of_any(row_matches: Callable[[Backend, str], object]) -> Callable[[str], bool]:
    """Return the question whether a name matches any kind of accelerator."""

    @lru_cache(maxsize=_NAMES)
    def matches(name: str) -> bool:
        return any(row_matches(row, name) for row in BACKENDS)

    return matches


is_call = _of_any(lambda row, category: category in row.calls)
"""Whether a category is of host calls into a device's runtime or driver."""
is_copy = _of_any(lambda row, category: category == row.copy)
"""Whether a category is of a device's memory copies."""
is_fill = _of_any(lambda row, category: category == row.fill)
"""Whether a category is of a device's memory fills."""
is_work = _of_any(lambda row, category: category in (row.kernel, row.copy, row.fill))
"""Whether a category is of activities that occupy a device: kernels, copies, fills."""
is_on_device = _of_any(lambda row, category: is_work(category) or category in row.records)
"""Whether a category is of anything on a device's streams."""
waits_for_device = _of_any(lambda row, call: row.waits.fullmatch(call))
"""Whether a host call is made to return only when the device has caught up."""
always_blocks = _of_any(lambda row, call: waits_for_device(call) or row.blocking_copies.fullmatch(call))
"""Whether a host call always stops the host until the device has caught up, as some copies do."""
may_block_for_copy = _of_any(lambda row, call: row.copies.fullmatch(call))
"""Whether a host call copies, which may block it."""
allocates = _of_any(lambda row, call: row.allocations.fullmatch(call))
"""Whether a host call gets memory from the device or gives it back, past torch's caches."""
launches_graph = _of_any(lambda row, call: row.graph_launches.fullmatch(call))
"""Whether one host call launches a whole graph of kernels."""
is_launch = _of_any(lambda row, call: row.launches.fullmatch(call))
"""Whether a host call puts work on a device that leaves a record of its own."""
begins_capture = _of_any(lambda row, call: row.begins_capture.fullmatch(call))
"""Whether a host call turns what its thread launches into a graph, which does not run."""
ends_capture = _of_any(lambda row, call: row.ends_capture.fullmatch(call))
"""Whether a host call ends that."""
stays_on_device = _of_any(lambda row, copy: row.device_copies.search(copy))
"""Whether a copy, by its name, is from device to device: a copy engine can gather, a host cannot."""


def blocks_its_host(copy: str) -> bool:
    """Whether a copy, by its name, is one of ``.item()`` or ``.cpu()``: to memory that is not pinned."""
    return "DtoH" in copy and "Pinned" not in copy


is_collective_kernel = _of_any(lambda row, function: row.collective_kernels.match(function))
"""Whether a kernel is of a kind's library of collectives, by the name of its function alone."""
is_collective_range = _of_any(lambda row, name: name.startswith(row.collective_ranges))
"""Whether a host range is one that a process group puts around its collectives."""


def captures(calls: Iterable[tuple[float, _Thread, str]]) -> list[tuple[_Thread, float, float]]:
    """Return thread, start and end of each capture of a graph; to infinity where its end is not there.

    ``calls`` are start, thread and name of host calls, in any order. What a thread launches meanwhile does
    not run, so that it leaves no record.
    """
    found: list[tuple[_Thread, float, float]] = []
    open_since: dict[_Thread, float] = {}
    for start, thread, name in sorted(calls, key=lambda call: call[0]):
        if begins_capture(name):
            open_since.setdefault(thread, start)
        elif ends_capture(name):
            found.append((thread, open_since.pop(thread, -inf), start))
    return found + [(thread, start, inf) for thread, start in open_since.items()]


_WORKSPACE = re.compile(r":(\d+):(\d+)")
_LARGE_WORKSPACES = ("9.0", "10.0")
"""Compute capabilities whose workspace is 32 MiB; others have 8,320 KiB."""


def blas_workspace_bytes(capability: str | None, setting: str | None = None) -> int:
    """Return the size of a cuBLAS workspace: torch keeps one for each thread and stream with products.

    ``setting`` is ``CUBLAS_WORKSPACE_CONFIG``, as ``:4096:8``. Source: ``getChosenWorkspaceSize`` of
    ``aten/src/ATen/cuda/CublasHandlePool.cpp`` (torch 2.7 to 2.13).
    """
    if setting and (parts := _WORKSPACE.findall(setting)):
        return sum(int(kib) * int(count) for kib, count in parts) << 10
    return (4096 * 8 if capability in _LARGE_WORKSPACES else 4096 * 2 + 16 * 8) << 10


def cuda_names() -> dict[str, str]:
    """Return the CUDA runtime's names of the other kinds' calls, where they have one."""
    return {call: name for row in BACKENDS for call, name in row.cuda_names.items()}


_ANONYMOUS = "(anonymous namespace)"
_PARAMETERS = re.compile(r"(?<=[\w>])\(")
"""Parameters stand right behind a name; ``Memcpy DtoH (Device -> Pinned)`` has none."""


@lru_cache(maxsize=_NAMES)
def kernel_name(signature: str) -> str:
    """Return a function's own name, without return type, namespaces, template arguments and parameters.

    ``void at::native::vectorized_elementwise_kernel<4, ...>(int, ...)`` becomes
    ``vectorized_elementwise_kernel``. A name that is no C++ signature stays as it is.
    """
    bare = _without_templates(signature.replace(_ANONYMOUS, ""))
    if bare is None:
        return signature
    parameters = _PARAMETERS.search(bare)
    if parameters is None and bare == signature and not bare.startswith("void "):
        return signature
    called = bare[: parameters.start()] if parameters else bare
    return called.strip().rpartition(" ")[2].rpartition("::")[2] or signature


def _without_templates(text: str) -> str | None:
    """Leave out what stands between angle brackets; None where these do not pair."""
    kept: list[str] = []
    depth = 0
    for before, char in zip(" " + text, text, strict=False):
        if char == "<":
            depth += 1
        elif char == ">" and before != "-":
            depth -= 1
            if depth < 0:
                return None
        elif depth == 0:
            kept.append(char)
    return "".join(kept) if depth == 0 else None


KERNEL_KINDS = (
    "float64",
    "float32",
    "attention_in_float32",
    "layout",
    "unaligned",
    "indexed",
    "scores",
    "returned_weights",
    "memory",
    "sliced",
    "update",
    "one_hot",
    "bluestein",
    "contraction",
    "distances",
    "masked",
    "frozen_gradient",
    "ignored",
    "unused_logits",
    "all_experts",
)
"""Operators in double precision; matrix products in single precision without tensor cores; fused attention
in single precision; conversions between channels first and last; half-precision matrix products whose rows
are not aligned to 16 bytes; gradients of a tensor that is indexed by a tensor; attention with its scores in
memory; such attention that also returns them, averaged over heads; torch's own kernels that read and write
whole tensors and compute almost nothing; gradients of parts of one tensor, each added as a whole one;
matrix products of the optimizer; products with a matrix that one_hot made, with the making; Fourier
transforms of a length with a large prime factor; products of expanded tensors that are stored and then
summed; such differences; attention with one boolean mask for all samples and heads; gradients of frozen
weights; logits of positions whose labels the loss ignores, with all others; logits of positions that no loss
takes; experts that compute tokens which are not theirs, with those that are."""

SINGLE_PRECISION = re.compile(r"sgemm|simt_\w*gemm|gemm_f32f32_f32f32_f32")
"""Names of matrix products in float32 that run beside the tensor cores (cuBLAS, CUTLASS)."""
KERNEL_PATTERNS = {
    "float64": re.compile(r"(?:^|_)d(?:884|1688)?gemm|gemm_f64f64"),  # cuBLAS, CUTLASS
    "float32": SINGLE_PRECISION,
    "attention_in_float32": re.compile(r"fmha_cutlass[FB]_f32"),  # torch's memory-efficient attention
    "layout": re.compile(r"nchwToNhwc|nhwcToNchw|^batched_transpose_\d", re.IGNORECASE),  # cuDNN, MIOpen
    "indexed": re.compile(r"\bindexing_backward_kernel"),  # torch's index_put_ with accumulate
    "bluestein": re.compile(r"bluestein", re.IGNORECASE),  # cuFFT, rocFFT
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


@lru_cache(maxsize=4096)
def moves_memory(name: str) -> bool:
    """Whether this is a torch kernel that reads and writes whole tensors and computes almost nothing."""
    return _MEMORY.search(name) is not None and _FUSED.search(name) is None
