"""Cases about memory: allocator histories of a healthy schedule on a full device, and on one with room."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from support.snapshots import Training

from fsdp2prof.manifest import ParamGroupInfo, RankManifest, TensorInfo
from fsdp2prof.run_directory import MANIFEST_FILE, SNAPSHOT_FILE, rank_folder
from lab.case import Case
from lab.traces import HEALTHY, LAYERS, write_run

__all__ = ["MEMORIES"]

MIB = 1 << 20
FULL, ROOMY = 0.92, 0.4
"""Of the device, reserved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What a step allocates on a rank, in MiB."""

    states: int = 2000
    """Parameters and states of the optimizer, over all layers."""
    saved: int = 50
    """Activations of a layer; of which it keeps eight tensors."""
    passing: int = 60
    """Temporaries of a layer."""
    unsharded: int = 160
    """Gathered parameters of a layer."""
    logits: int = 100
    """Of which the loss makes four."""
    ahead: int = 1
    """Layers that are gathered ahead of the one that runs."""
    kept: bool = False
    """Whether layers stay gathered from forward to backward."""
    micro_batches: int = 1
    reduced: bool = True
    """Whether every micro-batch reduces its gradients."""
    leaked: int = 0
    """A step."""
    split: int = 0
    """Free parts of segments in use."""


def history(m: Memory) -> tuple[Training, list[TensorInfo]]:
    """Two steps, and what was there before them."""
    t = Training()
    there = []
    for step in range(6 if m.leaked else 0):
        t.hold(f"leaked before {step}", m.leaked * MIB)
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        for category, part in (("sharded_parameter", 3), ("optimizer_state", 1.5)):
            size = int(m.states * MIB / part / LAYERS)
            there.append(
                TensorInfo(
                    category=category, fqn=name, address=t.hold(f"{category} {name}", size), nbytes=size
                )
            )
    for step in (6, 7):
        t.label("START", f"ProfilerStep#{step}")
        for batch in range(m.micro_batches):
            _micro_batch(t, m, f"{step}.{batch}", reduced=m.reduced or batch == m.micro_batches - 1)
        t.within("Optimizer.step#AdamW.step", ("get", "update", MIB), "update")
        t.label("START", "Optimizer.zero_grad#AdamW.zero_grad")
        t.drop(*(name for name in t.held if name.startswith("sharded gradient")))
        t.label("END", "Optimizer.zero_grad#AdamW.zero_grad")
        t.label("END", f"ProfilerStep#{step}")
    return t, there


def _micro_batch(t: Training, m: Memory, named: str, *, reduced: bool) -> None:
    gathered: set[int] = set()
    t.get("batch", MIB)
    t.within("FSDP::root_pre_forward")
    for layer in range(LAYERS):
        _gather(t, m, gathered, range(layer, min(LAYERS, layer + m.ahead + 1)))
        for part in range(8):
            t.get(f"saved {layer}.{part}", m.saved * MIB // 8)
        t.get("passing", m.passing * MIB).drop("passing")
        t.label("START", f"FSDP::post_forward (layers.{layer})")
        if not m.kept and layer < LAYERS - 1:
            t.drop(f"parameter {layer}")
            gathered.remove(layer)
        t.label("END", f"FSDP::post_forward (layers.{layer})")
    frames = [{"filename": "/x/torch/nn/functional.py", "line": 3, "name": "cross_entropy"}]
    for part in range(4):
        t.get(f"logits {part}", m.logits * MIB, frames=frames)
    t.drop("logits 3")
    if m.leaked:
        t.get(f"leaked {named}", m.leaked * MIB)
    for layer in reversed(range(LAYERS)):
        _gather(t, m, gathered, range(layer, max(-1, layer - m.ahead - 1), -1))
        if layer == LAYERS - 1:
            t.drop("logits 0", "logits 1", "logits 2")
        t.get(f"gradient {layer} {named}", m.unsharded * MIB).get("upstream", m.passing * MIB)
        t.drop("upstream", *(f"saved {layer}.{part}" for part in range(8)))
        t.within(f"FSDP::post_backward_reshard (layers.{layer})", f"parameter {layer}")
        gathered.remove(layer)
        if reduced:
            t.label("START", f"FSDP::post_backward_reduce (layers.{layer})")
            t.get("input", m.unsharded * MIB)
            t.drop(*(name for name in t.held if name.startswith(f"gradient {layer} ")))
            t.get(f"sharded gradient {layer} {named}", m.unsharded * MIB // 8).drop("input")
            t.label("END", f"FSDP::post_backward_reduce (layers.{layer})")
    t.within("FSDP::root_post_backward_callback").drop("batch")


def _gather(t: Training, m: Memory, gathered: set[int], layers: range) -> None:
    hook = "forward" if layers.step > 0 else "backward"
    t.label("START", f"FSDP::pre_{hook} (layers.{layers[0]})")
    for layer in [one for one in layers if one not in gathered]:
        t.within(f"FSDP::all_gather (layers.{layer})", ("get", f"gathered {layer}", m.unsharded * MIB))
        t.within(
            f"FSDP::all_gather_copy_out (layers.{layer})", ("get", f"parameter {layer}", m.unsharded * MIB)
        )
        t.drop(f"gathered {layer}")
        gathered.add(layer)
    t.label("END", f"FSDP::pre_{hook} (layers.{layers[0]})")


def write(folder: Path, m: Memory, full: float) -> Path:
    """A run whose trace is healthy, with the same memory on both ranks."""
    one = replace(HEALTHY, microbatches=m.micro_batches, sync_every_microbatch=m.reduced)
    run = write_run(folder, [one, one])
    t, there = history(m)
    reserved = t.fill(m.split * MIB)
    for rank in range(2):
        t.write(run / rank_folder(rank) / SNAPSHOT_FILE)
        path = run / rank_folder(rank) / MANIFEST_FILE
        manifest = msgspec.json.decode(path.read_bytes(), type=RankManifest)
        manifest.device.total_bytes = int(reserved / full)
        manifest.tensors, manifest.memory_source = there, "cuda_snapshot"
        manifest.param_groups = [_policy(group, m) for group in manifest.param_groups]
        path.write_bytes(msgspec.json.encode(manifest))
    return run


def _policy(group: ParamGroupInfo, m: Memory) -> ParamGroupInfo:
    if not group.fqn:
        return group
    following = range(int(group.fqn.rpartition(".")[2]) + 1, LAYERS)
    ahead = [f"layers.{one}" for one in following][: m.ahead if m.ahead > 1 else 0]
    return msgspec.structs.replace(
        group, reshard_after_forward=not m.kept and bool(following), forward_prefetch=ahead
    )


SAVINGS = {
    "activation_checkpointing",
    "chunked_loss",
    "smaller_batch",
    "reshard_after_forward",
    "less_prefetch",
    "reduced_gradients",
    "wider_sharding",
    "expandable_segments",
}
"""Other changes lower the peak, too."""
FINDINGS = {
    "chunked_loss": "logits_in_loss",
    "reduced_gradients": "unsharded_gradients",
    "reshard_after_forward": "groups_unsharded_together",
    "less_prefetch": "prefetched_ahead",
    "expandable_segments": "fragmentation",
}


AS_CAUSES = frozenset({"prefetched_ahead"})
"""Findings that come before the savings."""


def _cases(name: str, action: str, remedy: str, fault: Memory) -> list[Case]:
    """The fault on a device that it fills, and on one that has room."""
    true = {*SAVINGS, FINDINGS.get(action, action), "logits_in_loss"}
    return [
        Case(
            name=f"memory/{name}/much",
            fault=name,
            size="much",
            causes=frozenset({action, *({FINDINGS[action]} & AS_CAUSES if action in FINDINGS else ())}),
            remedy=remedy,
            excused=frozenset(true),
            write=lambda folder: write(folder, fault, FULL),
        ),
        Case(
            name=f"memory/{name}/little",
            fault=name,
            size="little",
            write=lambda folder: write(folder, fault, ROOMY),
        ),
    ]


MEMORIES = [
    *_cases("logits", "chunked_loss", "chunk", Memory(logits=900)),
    *_cases("activations", "activation_checkpointing", "checkpoint", Memory(saved=900)),
    *_cases("states", "wider_sharding", "twice as many ranks", Memory(states=9000)),
    *_cases(
        "no-sync",
        "reduced_gradients",
        "set_requires_gradient_sync",
        Memory(unsharded=600, micro_batches=3, reduced=False),
    ),
    *_cases("prefetch", "less_prefetch", "one (or two )?layers? ahead", Memory(unsharded=700, ahead=4)),
    *_cases("kept", "reshard_after_forward", "reshard", Memory(unsharded=700, kept=True)),
    *_cases("fragmentation", "expandable_segments", "expandable_segments", Memory(split=6000)),
    *_cases("balanced", "wider_sharding", "twice as many ranks", Memory()),
    Case(
        name="memory/leak/much",
        fault="leak",
        size="much",
        causes=frozenset({"leak"}),
        remedy="loss.item",
        write=lambda folder: write(folder, Memory(leaked=300), ROOMY),
    ),
]
"""Every case about memory."""
