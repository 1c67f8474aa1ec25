"""What a run directory says about itself: ``run.json`` and each rank's ``manifest.json``.

Written by the recorder, read by everything else. Times are nanoseconds, sizes bytes. Fields may be added;
a reader refuses a schema with a higher number.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

RUN_SCHEMA = "fsdp2prof.run/1"
MANIFEST_SCHEMA = "fsdp2prof.manifest/1"
RECORDING_SCHEMA = "fsdp2prof.recording/1"

RANK_LIMIT = 1 << 17
"""No run has so many ranks."""

Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=RANK_LIMIT)]
"""A rank, or how many there are: more than the largest cluster has, few enough to list."""
Index: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 32)]
"""A position among parameters, groups, roots, steps, devices; -1 where it is unknown."""
Amount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Bytes, nanoseconds or elements: what fits 64 bits when it is added up."""
Shape: TypeAlias = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]], msgspec.Meta(max_length=64)
]

State = Literal["running", "complete", "partial", "crashed", "other"]
"""``running``: not ended, or killed unheard; ``partial``: less was captured than asked for."""


class _Record(msgspec.Struct, kw_only=True, omit_defaults=False):
    """Base: keyword-only, unknown keys ignored (a newer minor writer may add some)."""


def _told(description: str, **constraints: Any) -> msgspec.Meta:
    return msgspec.Meta(description=description, **constraints)


class TrialOptions(_Record):
    """What is tried in a running job, and for how long."""

    candidates: list[str] = msgspec.field(default_factory=list)
    """``NAME=VALUE`` each; none lets ``whatif`` choose on the first recorded steps."""
    best: int = 3
    """How many ``whatif`` chooses, those with the largest predicted gain."""
    steps: int = 240
    """Timed steps and those before each block; the recorded ones come on top."""
    seed: int = 0
    changes_results: bool = False
    """Whether candidates are allowed that change results."""


class RecordOptions(_Record):
    """What is recorded: which steps of which ranks, and what of them.

    The command line and ``Recorder`` are made from these fields; a description is an option's help.
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
        _told("Start no further recording once those of the run take this much space, for example 20GB."),
    ] = None
    memory: Annotated[bool, _told("Record allocations, on steps of their own after the traced ones.")] = True
    memory_steps: Annotated[int, _told("Steps whose allocations are recorded.", ge=0)] = 2
    summary: Annotated[
        bool, _told("Store no trace: the steps of each rank are analysed and the result is stored.")
    ] = False
    max_trace_size: Annotated[
        str | None,
        _told(
            "Trace fewer steps where a rank's file would pass this size, for example 200MB; one more step is "
            "traced first, to measure it."
        ),
    ] = None
    watch: Annotated[bool, _told("Write one line for every step, for `fsdp2prof watch`.")] = False
    hang_after: Annotated[
        int | None,
        _told("If no step ends for this many seconds, keep every rank's last collectives and stacks."),
    ] = None
    ranks: Annotated[str, _told("all, a list as 0,3 or sample:K: K of different mesh coordinates.")] = "all"
    shapes: Annotated[
        bool, _told("Record the shapes of operators' inputs; gloo's payload bytes come from them.")
    ] = True
    verify: Annotated[
        bool,
        _told("Compare every byte of replicas after the first step, not a sample: see `check`."),
    ] = False
    stacks: Annotated[bool, _told("Record Python stacks; slows the recorded steps.")] = False
    trial: TrialOptions | None = None
    """What is tried between steps; None is nothing."""


class Rehearsal(_Record):
    """One process that stood for a rank of a world that was not there: its collectives moved nothing."""

    world_size: Index
    rank: Index
    """The rank it was."""
    local_world_size: Index = 1
    """``LOCAL_WORLD_SIZE``, as torchrun would have set it."""
    meta: bool = False
    """Its tensors had sizes and no data."""


class RunInfo(_Record):
    """``run.json``, and ``run-node-0000N.json`` of every further node: what ran, where, and how it ended."""

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
    """Null where the training ran."""
    wrappers: list[str] = []
    """Classes beside ``fully_shard`` that wrapped a model: DistributedDataParallel, FSDP1."""
    messages: list[str] = []
    """What a person should know: ranks without a sign of life, a crash, a schedule cut short."""


class RecordingInfo(_Record):
    """``recording.json``: one of several recordings of a run, as its first rank planned it."""

    schema: str = RECORDING_SCHEMA
    number: Index = 0
    step: Index = 0
    """First traced step, of every rank; the first memory step where none is traced."""
    reason: str = ""
    """Why it was made, for a person."""
    announced_at_step: int = 0
    """The step with which it was decided on; 0 for a recording on schedule."""
    attempt: int = 0
    """How often torchrun had restarted the ranks."""


class DeviceInfo(_Record):
    """The rank's device."""

    type: str
    """torch's: ``cuda`` (also on ROCm builds), ``xpu``, ... or ``cpu``."""
    index: Index | None = None
    name: str = ""
    total_bytes: Amount | None = None
    capability: str | None = None
    uuid: str | None = None
    """The driver's: with a visible device each, as Slurm gives them, ranks have the same index."""


class ProcessGroupInfo(_Record):
    """A process group this rank belongs to."""

    name: str
    desc: str
    backend: str
    ranks: list[Rank]
    mesh_dim: str | None = None


class MeshInfo(_Record):
    """A device mesh some parameter group is sharded on."""

    device_type: str
    shape: Shape
    dim_names: list[str] | None = None
    dim_groups: list[str] = []
    """Process group name of each dimension."""


class ParameterInfo(_Record):
    """One parameter of a group."""

    fqn: str
    global_shape: Shape
    local_shape: Shape
    """This rank's shard, without padding."""
    padded_local_shape: Shape
    """What the all-gather sends: equal on all ranks."""
    dtype: str
    """Original (optimizer's) dtype, without ``torch.``."""
    placement: str
    requires_grad: bool
    all_gather_dtypes: list[str] = []
    """Dtypes of its all-gather inputs; several with tensor extensions (fp8)."""
    all_gather_numels: list[Amount] = []
    """Elements of each all-gather input on this rank, padding included."""
    address: int | None = None
    """Data pointer of the sharded storage when the memory recording began."""
    tensor_parallel: str | None = None
    """Placements on other mesh dimensions, as text; null for pure FSDP."""
    position: Index = -1
    """Index in ``named_parameters()`` of its root; -1 unknown."""
    optimized: bool | None = None
    """Whether an optimizer held it after the second step, one that had not stepped included; null unknown."""
    checksum: str | None = None
    """Of this rank's shard after the first step, with ``verify``; without it of the first 1,024 elements of
    the largest shard of a group with replicas."""
    gradient_checksum: str | None = None
    """Of its gradient then; null where it had none."""


class ParamGroupInfo(_Record):
    """One FSDP parameter group: parameters gathered in one all-gather, reduced in one reduce-scatter."""

    root: Index
    """Index of its root module among the roots of the process, in order of first forward."""
    fqn: str
    """Module name relative to the root in FSDP's labels: ``a, b`` if grouped, empty for the root."""
    index: Index
    """Position among the groups of one module."""
    group_count: Index
    """Groups of that module."""
    mesh: MeshInfo
    shard_group: str | None
    """Process group name of the all-gather; null if not sharded."""
    reduce_scatter_group: str | None
    all_reduce_group: str | None
    """Process group name of the HSDP all-reduce."""
    post_forward_group: str | None
    """Process group of the backward all-gather under ``reshard_after_forward=int``."""
    shard_world_size: Rank
    replicate_world_size: Rank
    param_dtype: str | None
    reduce_dtype: str | None
    output_dtype: str | None
    reshard_after_forward: bool | Rank
    """False, True, or the world size resharded to."""
    offload: bool
    offload_pin_memory: bool
    unshard_async_op: bool
    requires_grad: bool
    parameters: list[ParameterInfo]
    forward_prefetch: list[str] = []
    backward_prefetch: list[str] = []
    unshard_in_backward: bool = True
    """False if its parameters are not gathered again for the backward."""
    reshard_after_backward: bool = True
    reduce_scatter_max_input_buffers: int = 1
    """Reduce-scatter inputs that its root keeps at a time; 1 where this torch cannot set it."""
    all_gather_comm: str | None = None
    """Class that allocates and runs its all-gathers if it is not FSDP's default; null: the default."""
    reduce_scatter_comm: str | None = None
    cast_forward_inputs: bool = True
    gradient_divide_factor: float | None = None
    """What gradients are divided by, if not by the number of ranks."""
    comm_context: int = 0
    """Index of the root whose streams and buffers it uses; another's after ``share_comm_ctx``."""
    forward_positions: list[Index] = []
    """Places at which its forwards ended among those of its root before one backward; empty: not seen."""
    gathers: Index | None = None
    """All-gathers of its parameters in each captured step; null unknown or not always the same."""
    forwards: Index | None = None
    """Forwards of its modules with gradients in each captured step, recomputed ones too; null as above."""
    evaluations: Index | None = None
    """Forwards of its modules without gradients; null as above."""
    counts_vary: bool | None = None
    """Whether gathers or reductions differed between captured steps; null where they were not counted."""
    backward_gathers: Index | None = None
    """Those of ``gathers`` made in a backward."""
    post_forward_gathers: Index | None = None
    """Those of ``backward_gathers`` over the ranks of ``post_forward_group``."""
    reductions: Index | None = None
    """Reduce-scatters of its gradients in each captured step (all-reduces alone where it is not sharded)."""
    reduced_numel: Amount | None = None
    """Elements of one rank's padded shards in all of them: of parameters that had a gradient."""
    all_reductions: Index | None = None
    """Those of ``reductions`` that went on over the replicas."""
    all_reduced_numel: Amount | None = None
    """``reduced_numel`` of those."""


class RootInfo(_Record):
    """What a root module did in each captured step; a number is null where it was not always the same."""

    root: Index
    """As in :class:`ParamGroupInfo`."""
    micro_batches: Index | None = None
    """Backwards; of a root without any its forwards."""
    gradient_syncs: Index | None = None
    """Times gradients were reduced (``set_requires_gradient_sync``)."""
    unreduced: Index | None = None
    """Backwards after the last of those: their gradients wait for another step."""
    all_reduces: Index | None = None
    """Those of them that went on over the replicas (``set_requires_all_reduce``)."""
    reshards: Index | None = None
    """Times parameters were resharded behind a backward (``set_reshard_after_backward``)."""
    method_forwards: Index | None = None
    """Forwards with gradients by methods (``register_fsdp_forward_method``)."""
    evaluations: Index | None = None
    """Forwards without gradients."""


class OptimizerInfo(_Record):
    """One optimizer and the bytes of its state on this rank."""

    class_name: str
    state_bytes: Amount
    param_groups: Index
    parameters: Amount
    defaults: dict[str, str] = {}
    state_dtypes: dict[str, Amount] = {}
    """Dtype -> bytes of its state on this rank, step counters left out."""


class UnshardedInfo(_Record):
    """A tensor that every rank holds whole: FSDP neither shards it nor reduces its gradient."""

    kind: str
    """``parameter`` or ``buffer`` of a root module, or ``optimizer`` for what an optimizer alone holds."""
    fqn: str
    """Name under its root; of an optimizer's its class and position: ``AdamW[3]``."""
    root: Index
    shape: Shape
    dtype: str
    nbytes: Amount
    requires_grad: bool
    has_gradient: bool = False


StepKind = Literal["plain", "warmup", "traced", "memory", "other"]


class StepInfo(_Record):
    """Wall time of one training step as the recorder saw it."""

    step: Index
    start_ns: Amount
    """``time.time_ns`` at the step's start."""
    duration_ns: Amount
    kind: StepKind = "plain"
    """How it was captured; also ``traced`` where the training's own profiler covered it."""


class WatchedStep(_Record):
    """One line of ``steps.jsonl``."""

    step: Index = 0
    start_ns: Amount = 0
    """``time.time_ns`` at the step's start."""
    duration_ns: Amount = 0
    kind: str = "plain"
    """As in :class:`StepInfo`."""
    exposed_ns: Amount | None = None
    """Time in FSDP2's waits for communication: of the compute stream, on a CPU of the host; null unknown."""
    allocated_peak_bytes: Amount | None = None
    """Of the CUDA allocator, since the training began or reset it itself; null on a CPU."""
    reserved_peak_bytes: Amount | None = None
    retries: Amount | None = None
    """Times the CUDA allocator had to free its cache to go on, so far."""
    resident_peak_bytes: Amount | None = None
    """Most memory the process has had, on a CPU."""


class MachineInfo(_Record):
    """The processors of the rank's host."""

    cores: Amount = 0
    """Logical processors of the host."""
    usable_cores: Amount = 0
    """Those that the rank may run on (its affinity), shared with the other ranks of the host."""
    torch_threads: Amount = 0
    """``torch.get_num_threads()``."""
    torch_interop_threads: Amount = 0
    python_hooks: list[str] = []
    """Packages that see every call or line of the training's thread: ``cProfile``, a debugger."""


class HostSpan(_Record):
    """A stretch of host time: a line that the training's thread was seen on, or a garbage collection."""

    start_ns: Amount
    """``time.time_ns``."""
    duration_ns: Amount = 0
    """From the first to the last time that the line was seen, without another in between; 0: seen once."""
    line: str = ""
    """``full_tensor() in train.py:88 (clip)``: a call into a library, its file, line and function."""


class HostStep(_Record):
    """The rank's host during one captured step; null where the system does not tell."""

    step: Index
    load_average: float = 0.0
    """Of the last minute, at the end of the step: processes of the host that run or wait to."""
    cpu_time_ns: Amount = 0
    """CPU time of all threads of the rank."""
    main_thread_cpu_ns: Amount = 0
    """CPU time of the thread that runs the training loop."""
    main_thread_waiting_ns: Amount | None = None
    """Time in which that thread could run and had no processor: others had it (Linux)."""
    preemptions: Amount = 0
    """Times a thread of the rank had to leave its processor to another."""
    machine_busy_ns: Amount | None = None
    """CPU time of all programs of the host, over all its cores (Linux; a container sees its host's)."""
    machine_steal_ns: Amount | None = None
    """Time that the hypervisor gave to other machines, over all cores."""
    machine_time_ns: Amount | None = None
    """All time of all cores, which the two are parts of: about the step's duration times the cores."""
    quota_throttled_ns: Amount | None = None
    """Time in which a container's CPU quota was used up (cgroup v2)."""
    slowed_by: list[str] | None = None
    """Why the GPU's clock was lowered at the end of the step: ``power_cap``, ``hardware_slowdown``,
    ``thermal_slowdown``, ``hardware_thermal_slowdown``, ``power_brake``; null without pynvml."""
    garbage_collection_ns: Amount | None = None
    """Time in which Python collected garbage, and nothing else of the process ran Python."""
    garbage_collections: list[HostSpan] = []
    """Those of 0.1 ms and more."""
    lines: list[HostSpan] = []
    """Lines that the training's thread was seen on in a traced step, in order of time."""
    callers: list[HostSpan] = []
    """Lines that had called a module then, from outside every module."""
    python_threads: dict[str, Amount] = {}
    """CPU time of other Python threads that took 1 % of the step or more, by the line they were seen on."""


class TensorInfo(_Record):
    """A storage whose role is known, alive when the memory recording began or ended."""

    category: str
    """One of ``fsdp2prof.vocabulary.CATEGORIES``."""
    fqn: str
    """Parameter group's fqn."""
    address: int
    """Data pointer of the storage."""
    nbytes: Amount
    """Bytes of the storage, padding included."""
    name: str = ""
    root: Index = 0
    """Index of its root, as in :class:`ParamGroupInfo`."""


class Pause(_Record):
    """Time in which the training stood still while a rank stopped a recording and wrote its file."""

    kind: Literal["trace", "memory"]
    after_step: Index
    """The last recorded step."""
    duration_ns: Amount
    file_bytes: Amount


class RankManifest(_Record):
    """``manifest.json`` of one rank. Every field has a default so that a crash leaves a readable file."""

    schema: str = MANIFEST_SCHEMA
    state: State = "running"
    rank: Rank = 0
    local_rank: int = 0
    world_size: Rank = 1
    node_rank: int = 0
    """``--node-rank`` of the launcher above it; the launchers of several nodes may share a run."""
    host: str = ""
    pid: int = 0
    script: list[str] = []
    selected: bool = True
    """False where ``--ranks`` left this rank out: it has a manifest and nothing else."""
    rehearsal: Rehearsal | None = None
    """Null where the training ran."""
    versions: dict[str, str] = {}
    environment: dict[str, str] = {}
    device: DeviceInfo = msgspec.field(default_factory=lambda: DeviceInfo(type="cpu"))
    machine: MachineInfo = msgspec.field(default_factory=MachineInfo)
    host_steps: list[HostStep] = []
    """The host in every captured step, the warm-up included."""
    compiled_modules: list[str] | None = None
    """Modules that run compiled, by their names under their root, which is the empty string itself; null if
    ``torch.compile`` made no graph, empty if it made those of something else alone, a function say."""
    attention_backends: list[str] = []
    """Kernels of ``scaled_dot_product_attention`` that are allowed outside of the model's own contexts, the
    preferred one first; empty on CPU."""
    norms: list[str] = []
    """Classes of the models' normalizations, with their modules."""
    process_groups: list[ProcessGroupInfo] = []
    param_groups: list[ParamGroupInfo] = []
    optimizers: list[OptimizerInfo] = []
    unsharded: list[UnshardedInfo] | None = None
    """What every rank holds whole, the largest first and a thousand at most; null unknown."""
    steps: list[StepInfo] = []
    micro_batches: Index | None = None
    """Backwards of each root in a training step, of a root without any its forwards with gradients; null if
    unknown or not always the same."""
    gradient_syncs: Index | None = None
    """Those of them that reduced gradients (``set_requires_gradient_sync``)."""
    roots: list[RootInfo] = []
    """What each root did in the captured steps; empty unknown."""
    traced_steps: list[Index] = []
    memory_steps: list[Index] = []
    recordings: list[Index] = []
    """Numbers of those it took part in, in a run that may record several times."""
    pauses: list[Pause] = []
    memory_source: str | None = None
    """``cuda_snapshot``, ``storage_count`` or null."""
    tensors: list[TensorInfo] = []
    tensors_are_all: bool = False
    """Whether ``tensors`` holds every storage of model and optimizers: buffers, parameters that FSDP does not
    shard and nested optimizer state, too."""
    allocator: dict[str, int] = {}
    """``torch.cuda.memory_stats`` of interest; empty on CPU."""
    allocator_settings: dict[str, str] = {}
    """How the CUDA allocator is set, ``backend`` and ``expandable_segments`` among it; empty on CPU."""
    messages: list[str] = []
    error: str | None = None
    """Last line of the exception that ended the rank."""

    @property
    def device_key(self) -> tuple[str, str, str] | None:
        """What two ranks of one device have in common; null where the device is not known, or a CPU."""
        device = self.device
        if device.uuid is not None:
            return self.host, "uuid", device.uuid
        if device.type == "cpu" or device.index is None:
            return None
        return self.host, self.environment.get("CUDA_VISIBLE_DEVICES", ""), str(device.index)

    @property
    def ignored_parameters(self) -> list[str]:
        """Parameters under a root that FSDP does not shard (``ignored_params``)."""
        return [one.fqn for one in self.unsharded or () if one.kind == "parameter"]

    @property
    def root_count(self) -> int:
        """Root modules of the process that have parameter groups."""
        return len({group.root for group in self.param_groups})
