"""Shares of their peaks that unmeasured accelerators and networks reach, with an error."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from fsdp2prof.estimators.config.documents import packaged


class RangeEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One end of a range."""

    value: float
    source: str
    fast: float | None = None
    """The margin for faster steps or lower peaks, if it differs from the margin for slower or higher ones."""
    median: float | None = None
    """Published over predicted steps, the median of the sources' medians, where predictions are biased."""
    median_of: str = ""
    """Which steps these are."""


@lru_cache(maxsize=1)
def _known() -> dict[str, RangeEnd]:
    return packaged("fsdp2prof.estimators.config", "ranges.yaml", dict[str, RangeEnd])


def range_end(name: str) -> RangeEnd:
    """The end of a range by its name."""
    return _known()[name]


ACHIEVED_MATMUL = 0.77
"""Share of the peak that large matrix products reach if nothing is published, taken from the H100."""
ACHIEVED_MATMUL_ENDS = (0.52, 0.84)
"""The same of an MI300X and of an A100, between which it may be."""
PARTS_DIFFER = 0.82
"""Rate of the slowest of many parts of one kind, for which a step waits: identical GPUs of a cluster differ
by 8 % on average over clusters and programs and by 22 % at the most (Sinha et al., "Not All GPUs Are Created
Equal", SC 2022, arXiv 2208.11035)."""
BEST_SHAPE = 1.10
"""Rate of the best shape and run over that of a training's shapes: 794 over 720 TFLOP/s on an H100."""
KERNELS_OF_COPY = (0.80, 1.06)
"""Rate at which kernels move memory, over a copy's: not published for eager ones; the high end is that of
large Triton kernels on an H100 of 2.4 TB/s, 92 % of the peak by torchao's ``roofline_utils.py``."""
ACHIEVED_MEMORY = 0.87
"""Share of the peak that a copy reaches, as on the A100 (0.89) and the H100 (0.87)."""
ACHIEVED_LINK = 0.77
"""Share of NVLink's rate that a large all-gather reaches as busbw, as on 8 H100 (345 of 450 GB/s)."""
LINK_ENDS = (0.93, 1.07)
"""Of collectives inside a node over the estimate's: 361 to 367 GB/s are published of rings over 8 H200s
(stas00/ml-engineering), 345 over 8 H100s, which the estimate has; the low end is as far below."""
SMALL_LINK_ENDS = (0.58, 1.07)
"""The same of payloads below 256 MiB, of which NCCL's model of latency and protocols says too little: of it
all-reduces of 2 MiB to 128 MiB over 8 H200s and 8 A100s reach 0.57 to 0.88 (stas00/ml-engineering)."""
NETWORK_LOW = 0.53
"""Rate of collectives between nodes over the estimate's, at the least: 200 GB/s of 376 on 32 nodes of 8 H100s
(NVIDIA/nccl#1218), where others reach 345 on 8 nodes and 260 on 128 (NVIDIA/nccl#1229)."""
ACHIEVED_PCIE = 0.8
"""Share of a pinned copy's rate that a ring over PCIe reaches where GPUs write to each other."""
PCIE_ENDS = (0.17, 1.25)
"""Over the estimate's: 3.3 GB/s between two GPUs through the memory of a host of PCIe 3
(forum.level1techs.com/t/185531), and all of a pinned copy's rate."""
ATTENTION = 0.44
"""Flash attention's rate over that of large matrix products, as on the H100 (335 of 766): the limits that
keep a part's products below its peak also keep attention's products below it."""

ATTENTION_CURVE = ((512, 0.57), (1024, 0.776), (2048, 0.89), (4096, 0.952), (8192, 0.994), (16384, 1.0))
"""Causal flash attention by sequence length, of its plateau: FlashAttention-3 (arXiv 2407.08608), figure 5.
"""
ATTENTION_DEPTH = {64: 0.876, 128: 1.0, 256: 0.805}
"""The same by head dimension: figure 5, FlashAttention-2's plateaus of 324, 370 and 298."""

CLOCK_EXPONENTS = (1.0, 1 / 2, 1 / 3)
"""Exponent of the power above idle by which the clock falls under a limit: voltage stays at its minimum,
falls half as much as the clock (the estimate), falls with the clock."""

IDLE_WATTS = 88.0
"""Power of an idle part, which no clock scales: an A100 (thonking.ai, "Strangely, Matrix Multiplications
on GPUs Run Faster When Given Predictable Data")."""

HOST_CORE_GB_PER_S = 13.3
"""Bandwidth of one core in an AdamW step on the host: 1.93 s for 536.9 million elements and 12 passes of 4
bytes over each, one thread of an 8 x H100 node (ISEEKYAN/Megatron-LM#188)."""
HOST_STARVED = 0.11
"""Rate of a rank over that where eight ranks share two cores, as a batch system may give a job: 17.2 s in the
same table."""

HOST_OPERATOR_NS = (3_000, 5_000, 10_000)
"""Host time to issue an operator with its autograd bookkeeping in eager mode: best case, estimate (200,000
per second), worst case. Chosen, not published; ``bench`` measures it."""

CONTENTION_FRACS = (0.05, 0.19, 0.40)
"""How much longer a compute kernel takes while a collective runs, if it was not measured: best case,
estimate, worst case; 18.9 % on average, up to 40 %, in arXiv 2507.03114."""
