"""Contents of ``run.json`` and of each rank's ``manifest.json``.

Written by the recorder and read by everything else. Times are nanoseconds, sizes bytes. Fields may be added;
a reader refuses a newer schema.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

RUN_SCHEMA = "fsdp2prof.run/1"
MANIFEST_SCHEMA = "fsdp2prof.manifest/1"
RECORDING_SCHEMA = "fsdp2prof.recording/1"

RANK_LIMIT = 1 << 17
"""Upper limit of the number of ranks of a run."""

Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=RANK_LIMIT)]
"""A rank or a number of ranks: larger than any cluster, small enough to list."""
Index: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 32)]
"""Position of a parameter, group, root, step or device; -1 is unknown."""
Amount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Bytes, nanoseconds or elements, limited so that sums fit 64 bits."""
Shape: TypeAlias = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]], msgspec.Meta(max_length=64)
]

State = Literal["running", "complete", "partial", "crashed", "other"]
"""State of a run or rank. ``running``: not ended, or killed; ``partial``: less was captured than requested.
"""


class _Record(msgspec.Struct, kw_only=True, omit_defaults=False):
    """Base class: keyword-only; ignores unknown keys, which a newer version may add."""


def _told(description: str, **constraints: Any) -> msgspec.Meta:
    return msgspec.Meta(description=description, **constraints)


class TrialOptions(_Record):
    """Options of ``fsdp2prof try``: candidates and duration."""

    candidates: list[str] = msgspec.field(default_factory=list)
    """Candidates as ``NAME=VALUE``; if empty, ``whatif`` chooses from the first recorded steps."""
    best: int = 3
    """Number of candidates that ``whatif`` chooses, those with the largest predicted gain."""
    steps: int = 240
    """Number of timed steps, including the untimed first step of each block; recorded steps are extra."""
    seed: int = 0
    changes_results: bool = False
    """Whether to allow candidates that change results."""


class RecordOptions(_Record):
    """Options of a recording: ranks, steps, and contents.

    The command line and ``Recorder`` are generated from these fields; a field's description is the option's
    help.
    """

    wait: Annotated[int, _told("Steps before the warm-up.", ge=0)] = 1
    warmup: Annotated[int, _told("Steps the profiler warms up.", ge=0)] = 1
    active: Annotated[int, _told("Steps to trace.", ge=0)] = 5
    at_step: Annotated[int | None, _told("First step to trace, counted from 0; overrides --wait.")] = None
    every: Annotated[int | None, _told("Record again after every N steps.")] = None
    on_slow: Annotated[
        float | None, _told("Record when a step takes this many times the median of the steps before.")
    ] = None
    on_demand: Annotated[bool, _told("Record on request of `fsdp2prof trigger RUN`.")] = False
    signal: Annotated[
        str | None, _told("Record when fsdp2prof or a rank receives this signal, USR1 or USR2.")
    ] = None
    max_size: Annotated[
        str | None,
        _told("Start no further recording once the run's recordings take this much space, for example 20GB."),
    ] = None
    memory: Annotated[bool, _told("Record allocations, in separate steps after the traced ones.")] = True
    memory_steps: Annotated[int, _told("Steps whose allocations are recorded.", ge=0)] = 2
    summary: Annotated[
        bool, _told("Store no trace: the steps of each rank are analysed and the result is stored.")
    ] = False
    max_trace_size: Annotated[
        str | None,
        _told(
            "Trace fewer steps if a rank's file would exceed this size, for example 200MB; first traces one "
            "more step to measure it."
        ),
    ] = None
    watch: Annotated[bool, _told("Write one line for every step, for `fsdp2prof watch`.")] = False
    hang_after: Annotated[
        int | None,
        _told("If no step ends for this many seconds, save every rank's last collectives and stacks."),
    ] = None
    ranks: Annotated[
        str, _told("all, a list such as 0,3, or sample:K: K ranks with different mesh coordinates.")
    ] = "all"
    shapes: Annotated[
        bool, _told("Record the shapes of operators' inputs, from which gloo's payload bytes are computed.")
    ] = True
    verify: Annotated[
        bool,
        _told("Hash every byte of replicas after the first step, not a sample: see `check`."),
    ] = False
    stacks: Annotated[bool, _told("Record Python stacks; slows the recorded steps.")] = False
    trial: TrialOptions | None = None
    """Settings that `fsdp2prof try` alternates between steps, or None."""


class Rehearsal(_Record):
    """A rehearsal: one process acted as one rank of a larger world, and its collectives moved nothing."""

    world_size: Index
    rank: Index
    """Rehearsed rank."""
    local_world_size: Index = 1
    """``LOCAL_WORLD_SIZE``, as torchrun would have set it."""
    meta: bool = False
    """Whether tensors had sizes and no data."""


class RunInfo(_Record):
    """``run.json`` and each further node's ``run-node-0000N.json``: command, hosts and outcome."""

    schema: str = RUN_SCHEMA
    command: list[str] = []
    state: State = "running"
    exit_code: int | None = None
    started_at: str = ""
    """ISO 8601 with time zone."""
    finished_at: str | None = None
    hosts: list[str] = []
    world_size: Rank | None = None
    versions: dict[str, str] = {}
    environment: dict[str, str] = {}
    options: RecordOptions = msgspec.field(default_factory=RecordOptions)
    rehearsal: Rehearsal | None = None
    """The rehearsal; null if the run was a real training."""
    wrappers: list[str] = []
    """Classes other than ``fully_shard`` that wrapped a model: DistributedDataParallel, FSDP1."""
    messages: list[str] = []
    """Messages for the user: ranks that were not recorded, a crash, an incomplete schedule."""


class RecordingInfo(_Record):
    """``recording.json``: one of several recordings of a run, as planned by its first rank."""

    schema: str = RECORDING_SCHEMA
    number: Index = 0
    step: Index = 0
    """First traced step of every rank; the first memory step if no step is traced."""
    reason: str = ""
    """Reason for the recording, in words."""
    announced_at_step: int = 0
    """Step in which the recording was decided; 0 for a scheduled recording."""
    attempt: int = 0
    """Number of times that torchrun had restarted the ranks."""


class DeviceInfo(_Record):
    """The rank's device."""

    type: str
    """torch's device type: ``cuda`` (also on ROCm builds), ``xpu``, ... or ``cpu``."""
    index: Index | None = None
    name: str = ""
    total_bytes: Amount | None = None
    capability: str | None = None
    uuid: str | None = None
    """The driver's id of the device, because ranks that see one device each (Slurm) all have index 0."""


class ProcessGroupInfo(_Record):
    """A process group this rank belongs to."""

    name: str
    desc: str
    backend: str
    ranks: list[Rank]
    mesh_dim: str | None = None


class MeshInfo(_Record):
    """A device mesh over which parameter groups are sharded."""

    device_type: str
    shape: Shape
    dim_names: list[str] | None = None
    dim_groups: list[str] = []
    """Process group name of each mesh dimension."""


class ParameterInfo(_Record):
    """One parameter of a group."""

    fqn: str
    global_shape: Shape
    local_shape: Shape
    """Shape of this rank's shard, without padding."""
    padded_local_shape: Shape
    """Shape of the shard that the all-gather sends, which is equal on all ranks."""
    dtype: str
    """Dtype of the original (the optimizer's) parameter, without ``torch.``."""
    placement: str
    requires_grad: bool
    all_gather_dtypes: list[str] = []
    """Dtypes of the all-gather inputs; several with tensor extensions (fp8)."""
    all_gather_numels: list[Amount] = []
    """Elements of each all-gather input on this rank, padding included."""
    address: int | None = None
    """Data pointer of the sharded storage at the start of the memory recording."""
    tensor_parallel: str | None = None
    """Placements on other mesh dimensions as text; null without tensor parallelism."""
    position: Index = -1
    """Index in the root module's ``named_parameters()``; -1 is unknown."""
    optimized: bool | None = None
    """Whether an optimizer held the parameter after the second step, stepped or not; null is unknown."""
    checksum: str | None = None
    """Checksum of this rank's shard after the first step: of all bytes with ``verify``, otherwise of the
    first 1,024 elements of the largest shard of a group with replicas."""
    gradient_checksum: str | None = None
    """Checksum of the parameter's gradient at that time; null if it had none."""


class ParamGroupInfo(_Record):
    """One FSDP parameter group: parameters with a common all-gather and a common reduce-scatter."""

    root: Index
    """Index of the group's root module among the process's roots, in order of first forward."""
    fqn: str
    """Module name relative to the root, as in FSDP's labels: ``a, b`` for a grouped call, empty for the root.
    """
    index: Index
    """Position among the parameter groups of the same module."""
    group_count: Index
    """Number of parameter groups of that module."""
    mesh: MeshInfo
    shard_group: str | None
    """Process group name of the all-gather; null if the group is not sharded."""
    reduce_scatter_group: str | None
    all_reduce_group: str | None
    """Process group name of the HSDP all-reduce."""
    post_forward_group: str | None
    """Process group name of the backward all-gather with ``reshard_after_forward=int``."""
    shard_world_size: Rank
    replicate_world_size: Rank
    param_dtype: str | None
    reduce_dtype: str | None
    output_dtype: str | None
    reshard_after_forward: bool | Rank
    """Resharding after forward: False, True, or the number of ranks to reshard to."""
    offload: bool
    offload_pin_memory: bool
    unshard_async_op: bool
    requires_grad: bool
    parameters: list[ParameterInfo]
    forward_prefetch: list[str] = []
    backward_prefetch: list[str] = []
    unshard_in_backward: bool = True
    """Whether the parameters are gathered again for backward."""
    reshard_after_backward: bool = True
    reduce_scatter_max_input_buffers: int = 1
    """Reduce-scatter inputs that the root keeps in flight; 1 if this torch cannot set it."""
    all_gather_comm: str | None = None
    """Class of a custom all-gather implementation; null is FSDP's default."""
    reduce_scatter_comm: str | None = None
    cast_forward_inputs: bool = True
    gradient_divide_factor: float | None = None
    """Divisor of the gradients, if it is not the number of ranks."""
    comm_context: int = 0
    """Index of the root whose streams and buffers the group uses; a different root after ``share_comm_ctx``.
    """
    forward_positions: list[Index] = []
    """Positions at which the group's forwards ended among those of its root before one backward; empty if
    unknown."""
    only_inputs: bool = False
    """Whether backward runs through the frozen group to no parameter, because its inputs need gradients."""
    gathers: Index | None = None
    """All-gathers of the parameters per captured step; null if unknown or if steps differ."""
    forwards: Index | None = None
    """Forwards with gradients per captured step, recomputation included; null if unknown or if steps differ.
    """
    evaluations: Index | None = None
    """Forwards without gradients per captured step; null if unknown or if steps differ."""
    counts_vary: bool | None = None
    """Whether gathers or reductions differed between captured steps; null if they were not counted."""
    backward_gathers: Index | None = None
    """All-gathers of ``gathers`` during a backward."""
    post_forward_gathers: Index | None = None
    """All-gathers of ``backward_gathers`` over the ranks of ``post_forward_group``."""
    reductions: Index | None = None
    """Reduce-scatters of the gradients per captured step; all-reduces if the group is not sharded."""
    reduced_numel: Amount | None = None
    """Elements of one rank's padded shards that were reduced, counting parameters that had a gradient."""
    distinct_numel: Amount | None = None
    """Elements of them whose gradients were reduced at least once per captured step."""
    all_reductions: Index | None = None
    """Reductions of ``reductions`` that were followed by an all-reduce over the replicas."""
    all_reduced_numel: Amount | None = None
    """Part of ``reduced_numel`` that was all-reduced over the replicas."""


class RootInfo(_Record):
    """Activity of a root module in the captured steps; a number is null if steps differ."""

    root: Index
    """Index of the root module, as in :class:`ParamGroupInfo`."""
    micro_batches: Index | None = None
    """Backwards per step; for a root without any, its forwards."""
    gradient_syncs: Index | None = None
    """Backwards that reduced gradients (``set_requires_gradient_sync``)."""
    unreduced: Index | None = None
    """Backwards after the last one that reduced gradients: their gradients enter the next update."""
    all_reduces: Index | None = None
    """Backwards whose reduced gradients were all-reduced over replicas (``set_requires_all_reduce``)."""
    reshards: Index | None = None
    """Backwards after which parameters were resharded (``set_reshard_after_backward``)."""
    method_forwards: Index | None = None
    """Forwards with gradients through registered methods (``register_fsdp_forward_method``)."""
    evaluations: Index | None = None
    """Forwards without gradients per captured step."""
    updates: Index | None = None
    """Forwards before which parameters had changed since the forward before, as in sharpness-aware
    minimization, in the captured step with most. Of changes that torch's version counters show."""


class OptimizerInfo(_Record):
    """One optimizer and the bytes of its state on this rank."""

    class_name: str
    state_bytes: Amount
    param_groups: Index
    parameters: Amount
    defaults: dict[str, str] = {}
    state_dtypes: dict[str, Amount] = {}
    """Bytes of the optimizer's state on this rank by dtype, without step counters."""
    learning_rates: list[float | None] = []
    """Of each of its groups when last described; null where reading it would stop the host."""


class LabelsInfo(_Record):
    """Labels among the inputs of a root's forward, of which the loss ignores some."""

    positions: Amount
    ignored_frac: float
    """Share of them that are -100, in samples."""


class UnshardedInfo(_Record):
    """A tensor that every rank holds whole: FSDP neither shards it nor reduces its gradient."""

    kind: str
    """``parameter`` or ``buffer`` of a root module, or ``optimizer`` for a tensor that only an optimizer
    holds."""
    fqn: str
    """Name under the root module; for an optimizer's tensor, class and position: ``AdamW[3]``."""
    root: Index
    shape: Shape
    dtype: str
    nbytes: Amount
    requires_grad: bool
    has_gradient: bool = False
    true_frac: float | None = None
    """Of a square boolean buffer, such as a mask: the fraction of true elements in a sample of its rows; null
    of others, and where reading it would disturb the training."""


StepKind = Literal["plain", "warmup", "traced", "memory", "other"]


class StepInfo(_Record):
    """Wall time of one training step, as measured by the recorder."""

    step: Index
    start_ns: Amount
    """Start of the step, from ``time.time_ns``."""
    duration_ns: Amount
    kind: StepKind = "plain"
    """Kind of capture; also ``traced`` if the training's own profiler covered the step."""


class WatchedStep(_Record):
    """One line of ``steps.jsonl``: a watched step."""

    step: Index = 0
    start_ns: Amount = 0
    """Start of the step, from ``time.time_ns``."""
    duration_ns: Amount = 0
    kind: str = "plain"
    """Kind of capture, as in :class:`StepInfo`."""
    exposed_ns: Amount | None = None
    """Time in FSDP2's waits for communication: on the compute stream, or on a CPU on the host; null is
    unknown."""
    allocated_peak_bytes: Amount | None = None
    """Peak of the CUDA allocator since the training began or last reset it; null on a CPU."""
    reserved_peak_bytes: Amount | None = None
    retries: Amount | None = None
    """Number of times so far that the CUDA allocator freed its cache and retried."""
    resident_peak_bytes: Amount | None = None
    """Peak resident memory of the process, on a CPU."""


class MachineInfo(_Record):
    """The processors of the rank's host."""

    cores: Amount = 0
    """Logical processors of the host."""
    usable_cores: Amount = 0
    """Processors in the rank's CPU affinity, which other ranks of the host share."""
    torch_threads: Amount = 0
    """``torch.get_num_threads()``."""
    torch_interop_threads: Amount = 0
    python_hooks: list[str] = []
    """Packages that trace every call or line of the training's thread: ``cProfile``, a debugger."""


class HostSpan(_Record):
    """An interval of host time: a sampled line of the training's thread, or a garbage collection."""

    start_ns: Amount
    """``time.time_ns``."""
    duration_ns: Amount = 0
    """Time from the first to the last consecutive sample of the line; 0 for a single sample."""
    line: str = ""
    """Call into a library with file, line and function: ``full_tensor() in train.py:88 (clip)``."""


class HostStep(_Record):
    """The rank's host during one captured step; values that the system does not provide are null."""

    step: Index
    load_average: float = 0.0
    """Load average over the last minute at the end of the step: running and waiting processes of the host."""
    cpu_time_ns: Amount = 0
    """CPU time of all threads of the rank."""
    main_thread_cpu_ns: Amount = 0
    """CPU time of the thread that runs the training loop."""
    main_thread_waiting_ns: Amount | None = None
    """Time in which the training thread was ready to run but had no processor (Linux)."""
    preemptions: Amount = 0
    """Times that a thread of the rank was preempted."""
    machine_busy_ns: Amount | None = None
    """CPU time of all processes of the host over all cores (Linux; in a container, of its host)."""
    machine_steal_ns: Amount | None = None
    """Time taken by the hypervisor for other machines, over all cores."""
    machine_time_ns: Amount | None = None
    """Total time of all cores, about the step's duration times the cores."""
    quota_throttled_ns: Amount | None = None
    """Time lost to an exhausted CPU quota of the container (cgroup v2)."""
    slowed_by: list[str] | None = None
    """Reasons for a lowered GPU clock at the end of the step: ``power_cap``, ``hardware_slowdown``,
    ``thermal_slowdown``, ``hardware_thermal_slowdown``, ``power_brake``; null without pynvml."""
    garbage_collection_ns: Amount | None = None
    """Time of Python's garbage collection, which blocks all Python threads of the process."""
    garbage_collections: list[HostSpan] = []
    """Garbage collections of 0.1 ms or more."""
    lines: list[HostSpan] = []
    """Sampled lines of the training's thread in a traced step, in order of time."""
    callers: list[HostSpan] = []
    """Lines outside every module that had called a module at the sample."""
    sleeps: list[HostSpan] = []
    """Times in which the training's thread was seen asleep: neither computing nor ready to (Linux)."""
    python_threads: dict[str, Amount] = {}
    """CPU time of other Python threads with at least 1 % of the step, by sampled line."""


class TensorInfo(_Record):
    """A storage of known role that was alive at the start or end of the memory recording."""

    category: str
    """Category of the storage, one of ``fsdp2prof.vocabulary.CATEGORIES``."""
    fqn: str
    """Name of the parameter group."""
    address: int
    """Data pointer of the storage."""
    nbytes: Amount
    """Bytes of the storage, padding included."""
    name: str = ""
    root: Index = 0
    """Index of the root module, as in :class:`ParamGroupInfo`."""


class Pause(_Record):
    """Time for which the training stopped while a rank stopped a recording and wrote its file."""

    kind: Literal["trace", "memory"]
    after_step: Index
    """Last recorded step."""
    duration_ns: Amount
    file_bytes: Amount


class RankManifest(_Record):
    """``manifest.json`` of one rank. Every field has a default, so the file of a crashed rank is readable."""

    schema: str = MANIFEST_SCHEMA
    state: State = "running"
    rank: Rank = 0
    local_rank: int = 0
    world_size: Rank = 1
    node_rank: int = 0
    """``--node-rank`` of the rank's launcher; launchers of several nodes may share a run."""
    host: str = ""
    pid: int = 0
    script: list[str] = []
    selected: bool = True
    """Whether ``--ranks`` selects this rank; otherwise it has only a manifest."""
    rehearsal: Rehearsal | None = None
    """The rehearsal; null if the run was a real training."""
    versions: dict[str, str] = {}
    environment: dict[str, str] = {}
    device: DeviceInfo = msgspec.field(default_factory=lambda: DeviceInfo(type="cpu"))
    machine: MachineInfo = msgspec.field(default_factory=MachineInfo)
    host_steps: list[HostStep] = []
    """The host in every captured step, including the warm-up."""
    compiled_modules: list[str] | None = None
    """Names of compiled modules under their root (empty string: the root itself); null if ``torch.compile``
    made no graph, empty if it compiled only other code, such as a function."""
    attention_backends: list[str] = []
    """Allowed kernels of ``scaled_dot_product_attention`` outside the model's own contexts, preferred one
    first; empty on CPU."""
    inputs: list[list[str | None]] = []
    """Hashes of the inputs of each root's first two forwards outside captured steps: with gradients, or of a
    frozen root the first one of a step; null without a readable one."""
    reused_inputs: list[list[bool]] = []
    """Whether each root's first forward of a step gets the very tensors of the step before, unchanged."""
    padding: list[float | None] = []
    """Share of each root's tokens, in two forwards, that are padding beyond the longest row: columns with one
    value in every row at either end; null without a matrix of integers among the inputs."""
    labels: list[LabelsInfo | None] = []
    """Each root's labels; null where a forward gets none, or the loss ignores none."""
    norms: list[str] = []
    """Normalization layers of the models: classes with their modules."""
    process_groups: list[ProcessGroupInfo] = []
    param_groups: list[ParamGroupInfo] = []
    optimizers: list[OptimizerInfo] = []
    unsharded: list[UnshardedInfo] | None = None
    """Tensors that every rank holds whole, largest first, at most a thousand; null is unknown."""
    steps: list[StepInfo] = []
    micro_batches: Index | None = None
    """Backwards of each root in a training step (for a root without any, forwards with gradients); null if
    unknown or if steps differ."""
    gradient_syncs: Index | None = None
    """Backwards of each root that reduced gradients (``set_requires_gradient_sync``); null if unknown."""
    roots: list[RootInfo] = []
    """Activity of each root in the captured steps; empty if unknown."""
    traced_steps: list[Index] = []
    memory_steps: list[Index] = []
    recordings: list[Index] = []
    """Numbers of the recordings that the rank took part in, if the run may record several times."""
    pauses: list[Pause] = []
    memory_source: str | None = None
    """Source of the memory recording: ``cuda_snapshot``, ``storage_count`` or null."""
    tensors: list[TensorInfo] = []
    tensors_are_all: bool = False
    """Whether ``tensors`` lists every storage of model and optimizers, including buffers, parameters that
    FSDP does not shard and nested optimizer state."""
    allocator: dict[str, int] = {}
    """Selected values of ``torch.cuda.memory_stats``; empty on CPU."""
    allocator_settings: dict[str, str] = {}
    """Settings of the CUDA allocator, with ``backend`` and ``expandable_segments``; empty on CPU."""
    messages: list[str] = []
    error: str | None = None
    """Last line of the exception that ended the rank."""

    @property
    def device_key(self) -> tuple[str, str, str] | None:
        """Identity of the rank's device, equal for ranks that share it; null if unknown or for a CPU."""
        device = self.device
        if device.uuid is not None:
            return self.host, "uuid", device.uuid
        if device.type == "cpu" or device.index is None:
            return None
        return self.host, self.environment.get("CUDA_VISIBLE_DEVICES", ""), str(device.index)

    @property
    def has_peers(self) -> bool:
        """Whether other ranks exist: torch's ``fake`` backend makes groups of a world without them."""
        return all(group.backend != "fake" for group in self.process_groups)

    @property
    def ignored_parameters(self) -> list[str]:
        """Parameters under a root that FSDP ignores (``ignored_params``)."""
        return [one.fqn for one in self.unsharded or () if one.kind == "parameter"]

    @property
    def root_count(self) -> int:
        """Number of root modules with parameter groups in the process."""
        return len({group.root for group in self.param_groups})
