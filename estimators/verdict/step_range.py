"""The range of a step's time: the fastest and the slowest that the unknown values allow, simulated.

What an estimate of a step's time assumes, in sentences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from fsdp2prof.estimators.config import shares
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.config.shares import RangeEnd, range_end
from fsdp2prof.estimators.simulate.micro_batches import CAPTURED_MICRO_BATCHES, captured_policy, repeated
from fsdp2prof.estimators.simulate.program import Kernel, Program, has_experts
from fsdp2prof.estimators.simulate.streams import host_tail_ns, simulate
from fsdp2prof.estimators.techniques.registry import notes_of
from fsdp2prof.estimators.timeline.calibrated import PlacedCosts
from fsdp2prof.estimators.timeline.costs import ClusterCosts, HostPace
from fsdp2prof.results.estimate import StepRange

_Value = TypeVar("_Value", int, float)


@dataclass(frozen=True, slots=True)
class _End:
    """One end of everything that is not known."""

    contention_frac: float
    operator_ns: int
    compute_frac: float
    memory_frac: float
    node_frac: float
    """Of collectives inside a node."""
    small_frac: float
    """Of small ones."""
    network_frac: float
    """Of collectives between nodes."""
    host_gb_per_s: float
    """Of an optimizer on the host."""
    behind_a_switch: bool
    """Whether a node whose GPUs may have a switch between them, or none, has one."""
    hardware: HardwareSpec
    """The part with the attention kernel that runs."""


def speed_class(mesh: MeshSpec, policy: PolicySpec, hardware: HardwareSpec, *, experts: bool = False) -> str:
    """Return the name in ``ranges.yaml`` of the margin that a published run of this kind bears on."""
    if policy.fused_kernels:
        return "speed_of_fused_kernels"
    return "speed_of_experts" if experts else _dense_class(mesh, policy, hardware)


def _dense_class(mesh: MeshSpec, policy: PolicySpec, hardware: HardwareSpec) -> str:
    """Return the class of a dense model that runs torch's kernels.

    The rows behind the margins of known software train all parameters, so adapters have the wider one.
    """
    if policy.torch is None or policy.lora is not None:
        return "speed_with_software_open"
    if not hardware.is_tried and hardware.host_operator_ns is None:  # `bench` measures it with all rates
        return "speed_on_untried_parts"
    return "speed_of_divided_models" if _is_divided(mesh) else "speed_of_sharded_models"


def margin_of(
    mesh: MeshSpec, policy: PolicySpec, hardware: HardwareSpec, *, experts: bool, reference: bool = False
) -> RangeEnd:
    """Return the margin of a run: of every class that it belongs to the larger one, on either side.

    A ``reference`` in plain torch may be slower than what runs by as much as torch's kernels than fused ones.
    """
    names = [_dense_class(mesh, policy, hardware), speed_class(mesh, policy, hardware, experts=experts)]
    if names[0] == "speed_on_untried_parts" and _is_divided(mesh):
        names.append("speed_of_divided_models")
    ends = [range_end(name) for name in names]
    slow = max(ends, key=lambda end: end.value)
    fast = max([*ends, *([range_end("speed_of_fused_kernels")] if reference else [])], key=_faster)
    source = slow.source if slow is fast else f"{fast.source}; slower steps: {slow.source}"
    median, of = ends[1].median, "mixtures of experts"
    if not experts:  # most of the published ones ran cuDNN's attention; flash attention is predicted slower
        median = hardware.published_median if policy.attention == "cudnn" else None
        of = f"dense models on {hardware.name}"
    return RangeEnd(value=slow.value, fast=_faster(fast), source=source, median=median, median_of=of)


def _faster(margin: RangeEnd) -> float:
    """Return the margin of faster steps."""
    return margin.value if margin.fast is None else margin.fast


def _is_divided(mesh: MeshSpec) -> bool:
    return mesh.tp * mesh.cp * mesh.pp * mesh.ep > 1


def range_of(
    program: Program,
    costs: ClusterCosts,
    policy: PolicySpec,
    bubble_ns: int,
    step_ns: int,
    part: HardwareSpec,
) -> StepRange:
    """Simulate the kindest and the harshest of what is not known; of a calibration, its steps' own spread.

    A margin of ``ranges.yaml`` multiplies the distance to the harshest. Another is the exponent of the ratio
    to the kindest, which so stays above zero. Where the policy leaves attention open, the fastest one of
    ``part`` may run.
    """
    calibration = costs.calibration if isinstance(costs, PlacedCosts) else None
    if calibration is not None:
        spread = f"{calibration.low_frac:.0%} to {calibration.high_frac:.0%}"
        return StepRange(
            low_ns=round(step_ns * calibration.low_frac) + bubble_ns,
            high_ns=round(step_ns * calibration.high_frac) + bubble_ns,
            unknown=[
                f"half of the {calibration.steps} steps that this is calibrated on took {spread} of their "
                "median"
            ],
        )
    hardware = costs.cluster.hardware
    if hardware.on_host:
        return StepRange(low_ns=step_ns, high_ns=step_ns, unknown=["no range for a CPU"])
    kernel = part.fastest_attention if policy.leaves_attention_open else None
    kernel = None if kernel == policy.attention else kernel
    kind, harsh = _ends(costs.cluster, hardware if kernel is None else part.with_attention(kernel))
    low = min(_step_ns(program, costs, kind), step_ns)
    high = max(_step_ns(program, costs, harsh), step_ns)
    reference = bool(program.references)
    margin = margin_of(costs.mesh, policy, hardware, experts=has_experts(program), reference=reference)
    return StepRange(
        low_ns=max(1, round(step_ns * (low / max(1, step_ns)) ** _faster(margin))) + bubble_ns,
        high_ns=round(step_ns + margin.value * (high - step_ns)) + bubble_ns,
        unknown=[
            *([] if kernel is None else [f"attention may be that of {kernel}"]),
            *_in_words(program, costs, kind, harsh),
            _margin_in_words(margin, is_narrower_with_torch=policy.torch is None and hardware.is_tried),
        ],
        simulated_low_ns=low + bubble_ns,
        simulated_high_ns=high + bubble_ns,
        published_ns=None if margin.median is None else round(margin.median * step_ns) + bubble_ns,
        published_of=None if margin.median is None else margin.median_of,
    )


def _margin_in_words(margin: RangeEnd, *, is_narrower_with_torch: bool) -> str:
    narrower = "; stating torch (--torch) narrows it" if is_narrower_with_torch else ""
    return (
        f"the range is {margin.value:g} times as wide as these make it towards slower steps, "
        f"{_faster(margin):g} times "
        f"towards faster ones: {margin.source}{narrower}"
    )


def _ends(cluster: Cluster, kindest: HardwareSpec) -> tuple[_End, _End]:
    """Best and worst case; rates that were measured on the part itself are unchanged."""
    hardware = cluster.hardware
    slow, fast = hardware.compute_range
    slow_memory, fast_memory = hardware.memory_range
    slow_link, fast_link = hardware.link_range
    slow_small, fast_small = hardware.small_link_range
    slow_network, fast_network = (1.0, 1.0) if cluster.network is None else cluster.network.range
    contention = _known(shares.CONTENTION_FRACS[::2], hardware.overlap_slowdown_frac)
    host = _known(shares.HOST_OPERATOR_NS[::2], hardware.host_operator_ns)
    starved = shares.HOST_CORE_GB_PER_S * shares.HOST_STARVED
    return (
        _End(
            contention[0],
            host[0],
            fast,
            fast_memory,
            fast_link,
            fast_small,
            fast_network,
            hardware.host_memory_gb_per_s,
            True,
            kindest,
        ),
        _End(
            contention[1],
            host[1],
            slow,
            slow_memory,
            slow_link,
            slow_small,
            slow_network,
            starved,
            False,
            hardware,
        ),
    )


def _known(ends: tuple[_Value, ...], measured: _Value | None) -> tuple[_Value, _Value]:
    return (ends[0], ends[1]) if measured is None else (measured, measured)


def _in_words(program: Program, costs: ClusterCosts, kind: _End, harsh: _End) -> list[str]:
    hardware = costs.cluster.hardware
    lines = []
    if kind.contention_frac != harsh.contention_frac:
        lines.append(
            f"kernels beside a collective take {kind.contention_frac:.0%} to {harsh.contention_frac:.0%} "
            f"longer ({shares.CONTENTION_FRACS[1]:.0%} in the estimate)"
        )
    if kind.operator_ns != harsh.operator_ns:
        lines.append(
            f"the host issues an operator in {kind.operator_ns / 1000:g} to {harsh.operator_ns / 1000:g} us "
            f"({shares.HOST_OPERATOR_NS[1] / 1000:g} us in the estimate)"
        )
    if any(isinstance(command, Kernel) and costs.host.work_ns(command) for command in program.commands):
        lines.append(
            f"the optimizer on the host moves {harsh.host_gb_per_s:.1f} GB/s (ranks that share two cores) to "
            f"{kind.host_gb_per_s:g} GB/s (all cores); {costs.host.memory_gb_per_s:g} GB/s in the estimate, "
            "one thread a rank, torchrun's default: OMP_NUM_THREADS changes it"
        )
    limited = "" if hardware.power_frac == 1 else ", the clock at its power limit included"
    lines.append(
        f"products and attention run at {harsh.compute_frac:.0%} to {kind.compute_frac:.0%} of the rates in "
        f"the estimate{limited}; other kernels at {harsh.memory_frac:.0%} to {kind.memory_frac:.0%}"
    )
    return [*lines, *_links_in_words(costs, kind, harsh)]


def _links_in_words(costs: ClusterCosts, kind: _End, harsh: _End) -> list[str]:
    """Report which costs of collectives are varied, for those that the mesh has."""
    cluster, mesh = costs.cluster, costs.mesh
    lines = []
    if mesh.world_size > 1 and cluster.gpus_per_node > 1 and not cluster.hardware.collectives:
        lines.append(
            f"collectives inside a node reach {harsh.node_frac:.0%} to {kind.node_frac:.0%} of the rate in "
            f"the estimate, those below 256 MiB from {harsh.small_frac:.0%} on"
        )
    if mesh.world_size > cluster.gpus_per_node:
        lines.append(f"between nodes {harsh.network_frac:.0%} to {kind.network_frac:.0%}")
    if cluster.is_direct and mesh.world_size > 1:
        lines.append(
            f"the {cluster.gpus_per_node} GPUs of a node may have a switch between them (none in the "
            "estimate)"
        )
    return lines


def _step_ns(program: Program, costs: ClusterCosts, end: _End) -> int:
    """Return the device's busy time in a step."""
    varied = replace(
        costs,
        cluster=replace(
            costs.cluster,
            hardware=end.hardware,
            node_frac=end.node_frac,
            small_frac=end.small_frac,
            network_frac=end.network_frac,
            behind_a_switch=end.behind_a_switch,
        ),
        contention_frac=end.contention_frac,
        host=HostPace(operator_ns=end.operator_ns, memory_gb_per_s=end.host_gb_per_s),
        compute_frac=end.compute_frac,
        memory_frac=end.memory_frac,
    )
    whole, timeline = repeated(program, simulate(program, varied))
    busy = timeline.end_ns[timeline.end_ns >= 0]
    first = timeline.start_ns[timeline.start_ns >= 0]
    return int(busy.max() - first.min()) + host_tail_ns(whole, timeline) if len(busy) else 0


def assumptions_of(
    mesh: MeshSpec, policy: PolicySpec, costs: ClusterCosts, program: Program, kind: str
) -> list[str]:
    """Return the assumptions of a step's time other than the captured commands; ``kind`` is that of the
    model's source."""
    return [
        *_of_costs(mesh, policy, costs),
        *([] if isinstance(costs, PlacedCosts) else _not_modelled(mesh, policy, program, kind)),
        *_of_compiler(policy, program.guessed_fusion),
        *notes_of("step", mesh, policy),
        *program.references,
    ]


def _not_modelled(mesh: MeshSpec, policy: PolicySpec, program: Program, kind: str) -> list[str]:
    """Some trainers' kernels, with the errors of predictions for published runs that used them."""
    notes = []
    if kind == "huggingface" and policy.attention in ("flash", "flash3"):
        notes.append(
            "attention as scaled_dot_product_attention runs it: with attn_implementation=flash_attention_2 "
            "the host waits for the device in every layer; published steps took 1.24 to 1.39 times as long"
        )
    if mesh.ep > 1:
        notes.append(
            "experts' rows exchanged by NCCL's all-to-all: with DeepEP or HybridEP published rates differ "
            "from predicted ones by up to 42 %"
        )
    elif has_experts(program):
        notes.append(
            "grouped products of experts as one product each: without expert parallelism published steps "
            "took 1.38 to 1.42 times as long"
        )
    return notes


def _of_compiler(policy: PolicySpec, guessed_fusion: str | None) -> list[str]:
    if not policy.compile:
        return []
    if guessed_fusion is None:
        return ["compile: kernels of each block's graph, fused by inductor's rules, each tensor moved once"]
    return [
        "compile: pointwise work between two products of a block is one kernel that reads and writes once: "
        f"{guessed_fusion}"
    ]


def _of_costs(mesh: MeshSpec, policy: PolicySpec, costs: ClusterCosts) -> list[str]:
    hardware = costs.cluster.hardware
    calibration = costs.calibration if isinstance(costs, PlacedCosts) else None
    if calibration is not None:
        return [
            "a steady step as FSDP2, autograd and the optimizer command it, captured on fake tensors",
            f"calibrated on {calibration.source}: its operators by layer and phase, its host times, its "
            "collectives by size (waiting for other ranks as it was there)",
            *(
                ["collectives block the host, as gloo's do"]
                if calibration.on_host
                else [f"what it did not run, by the models of {hardware.name}"]
            ),
        ]
    notes = [
        "a steady step as FSDP2, autograd and the optimizer command it, captured on fake tensors",
        f"{hardware.name}: {hardware.source}",
        *hardware.assumed(),
        "all ranks are equally fast; data loading, logging and checkpoints cost nothing",
        "collectives by NCCL's own latencies and protocols, at the bandwidth that large ones reach",
    ]
    if hardware.power_frac < 1:
        notes.append(
            f"matrix rates at {hardware.power_frac:.0%} of those measured at "
            f"{hardware.achieved_at_watts:g} W: the part is limited to {hardware.watts:g} W"
        )
    if costs.cluster.is_direct and mesh.world_size > 1:
        notes.append(
            f"{costs.cluster.gpus_per_node} GPUs a node: links go from each to each other without a switch, "
            "as on NVIDIA's boards of four; for some GPUs of a node of eight say --gpus-per-node 8"
        )
    if costs.cluster.copy_engine_gathers:
        notes.append(
            "copy engines gather parameters: as fast as kernels do, and products beside them are not slowed"
        )
    if costs.cluster.network is not None:
        notes.append(f"network {costs.cluster.network.name}: {costs.cluster.network.source}")
    if policy.offload:
        notes.append(
            f"offload: shards and gradients are copied at {hardware.host_link_gb_per_s:g} GB/s each way; "
            "clipping and the optimizer run on the host by the bytes that they move, "
            f"{costs.host.memory_gb_per_s:g} GB/s a rank, and the next step waits for them"
        )
    if captured_policy(mesh, policy) != policy:
        notes.append(
            f"{CAPTURED_MICRO_BATCHES} of {policy.grad_accum} micro-batches captured and simulated: the "
            "others repeat the middle one"
        )
    return notes
