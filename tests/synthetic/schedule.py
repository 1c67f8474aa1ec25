"""What a synthetic rank trains: layers with durations, and the FSDP2 policies in force."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

DTYPE_BYTES = {"BFloat16": 2, "Float": 4}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One FSDP parameter group and the compute of its module; durations in nanoseconds on the device.

    Odd nanoseconds on purpose: a rounding to microseconds anywhere shows.
    """

    fqn: str
    numel: int = 4_000_000
    """Elements of the whole group, padding included."""
    forward_ns: int = 300_017
    backward_ns: int = 600_031
    all_gather_ns: int = 120_013
    reduce_scatter_ns: int = 180_007
    all_reduce_ns: int = 90_019
    copy_ns: int = 7_001
    """Each of copy-in, copy-out and chunk-cat."""
    kernels: int = 3
    """Kernels a forward or a backward is cut into."""
    host_ns: int = 12_003
    """Host time to launch one compute kernel."""
    late_ns: int = 0
    """Extra host time spent before the module's pre-forward (a slow data loader, a Python loop, ...)."""
    late_backward_ns: int = 0
    """Extra host time before its pre-backward."""
    reshard: bool | None = None
    """``reshard_after_forward``: None is FSDP2's default (root kept, others resharded)."""
    forward_prefetch: tuple[str, ...] = ()
    backward_prefetch: tuple[str, ...] = ()
    sync: bool = False
    """Whether the module's forward ends in ``.item()``."""
    kernel_names: tuple[str, ...] = ()
    """Names of its compute kernels, in turns; empty: products in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Outside:
    """Collectives besides FSDP2's, one after the other."""

    op: Literal["all_gather", "all_reduce"]
    count: int
    transfer_ns: int
    numel: int = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One rank's training run."""

    roots: tuple[tuple[Layer, ...], ...]
    """Each root model: its own group (fqn ``""``) first, then its children in forward order."""
    steps: int = 2
    first_step: int = 3
    microbatches: int = 1
    sync_every_microbatch: bool = True
    """False: ``set_requires_gradient_sync(False)`` but for the last micro-batch."""
    shard: int = 4
    replicas: int = 1
    param_dtype: str = "BFloat16"
    reduce_dtype: str = "Float"
    orig_dtype: str = "Float"
    unshard_async_op: bool = False
    separate_reduce_scatter_group: bool = False
    checkpoint: Literal["none", "inside", "outside"] = "none"
    """``inside``: an FSDP module checkpoints its body; ``outside``: the FSDP module is checkpointed."""
    flavour: Literal["nccl", "rccl", "rccl_old", "symmetric_memory", "copy_engine"] = "nccl"
    labels: Literal["host", "launch", "none"] = "host"
    """``launch``: the collective's own range carries the name (``FSDP::all_gather (fqn)``)."""
    metadata: bool = True
    """Whether collectives carry names, sizes, Seq and Comms Id."""
    graph: bool = False
    """The whole step is one replayed CUDA graph: one launch, no hooks, no labels, no metadata."""
    frozen_roots: frozenset[int] = frozenset()
    """Roots that run no backward: teachers of a distillation."""
    mark_roots: bool = False
    """Each root's forward and backward inside a range of its own, as the recorder does with several roots."""
    user_ranges: bool = False
    """The user's own annotations around the model, around each layer, and around the loss's backward."""
    compiled: bool = False
    """Layers are compiled: one region and one generated kernel each, launched through the driver."""
    input_stream: bool = False
    """Inputs are copied on a stream of their own, which nothing holds back: steps overlap on the device."""
    optimizer_ns: int = 800_003
    input_ns: int = 40_009
    loading_ns: int = 0
    """Host time in which a ``DataLoader`` makes the step's batch; 0 is a script without one."""
    optimizer_kernels: int = 1
    """Kernels that update the parameters in ``optimizer_ns``; each costs the host ``optimizer_host_ns``."""
    optimizer_host_ns: int = 0
    offload: bool = False
    """``CPUOffloadPolicy``: shards are copied from the host before each gather, gradients to it after each
    reduction, and the host updates the parameters for ``optimizer_ns``."""
    offload_ns: int = 400_009
    """Each of these copies."""
    outside: tuple[Outside, ...] = ()
    """Collectives that the script issues itself at the end of a step."""
    evaluations: int = 0
    """Forwards without a backward at the end of a step."""
    pause_ns: int = 0
    """Host time at a step's end in which nothing is launched, in a range ``pause_range`` if set."""
    pause_range: str = ""
    host_copies: int = 0
    """Values that the end of a step copies to the host, which waits for each."""
    host_copy_ns: int = 1_500
    """Each of these copies on the device."""
    pageable_input: bool = False
    """Inputs come from memory that is not pinned: the host waits while they are copied."""
    allocations: int = 0
    """Blocks that the allocator gets from the device in each step, after freeing others: calls that wait for
    the device, ``allocation_ns`` each."""
    allocation_ns: int = 0
    slow_transfer: frozenset[tuple[str, str]] = frozenset()
    """(op, fqn) whose transfer takes four times as long."""

    def scaled(self, factor: float, only: str | None = None) -> Schedule:
        """Return the schedule with compute ``factor`` times as long (of one layer only, if named)."""
        roots = tuple(
            tuple(
                replace(
                    layer,
                    forward_ns=int(layer.forward_ns * factor),
                    backward_ns=int(layer.backward_ns * factor),
                )
                if only in (None, layer.fqn)
                else layer
                for layer in root
            )
            for root in self.roots
        )
        return replace(self, roots=roots)

    def changed(self, fqn: str, **fields: Any) -> Schedule:
        """Return the schedule with one layer's fields replaced."""
        roots = tuple(
            tuple(replace(layer, **fields) if layer.fqn == fqn else layer for layer in root)
            for root in self.roots
        )
        return replace(self, roots=roots)


def transformer(layers: int = 3, prefix: str = "layers", **fields: Any) -> tuple[Layer, ...]:
    """Build a root with embedding and head and ``layers`` equal children; ``fields`` go to the children."""
    root = Layer(
        fqn="", numel=6_000_000, forward_ns=100_003, backward_ns=200_009, all_gather_ns=150_001, kernels=2
    )
    return (root, *(Layer(fqn=f"{prefix}.{i}", **fields) for i in range(layers)))
