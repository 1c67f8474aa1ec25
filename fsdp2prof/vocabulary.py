"""The words of the toolkit: what columns and keys may hold, with the label, header and colour of each.

One table a concept, in the order in which it is shown. Whatever is made from a word (a column, a bar of a
chart, a line of a legend) is made from its row here, so that a new row appears everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from fsdp2prof.labels import is_root
from fsdp2prof.units import format_numbers

_WRAPPERS = re.compile(
    r"\.(?:_checkpoint_wrapped_module|_orig_mod)(?=\.|$)|^(?:_checkpoint_wrapped_module|_orig_mod)\."
)
"""Attributes that wrappers of torch (activation checkpointing, compile) add to a module's name."""
_MANY_MODULES = 4
"""Modules of one unit from which on their names are folded."""

NO_LAYER = "(no layer)"
"""Stands where a module's name would, for what no module caused or none is known to have caused."""


Sync = Literal["last", "each"]
"""Gradients are reduced after the last micro-batch of a step, or after each
(``set_requires_gradient_sync``)."""
AllReduce = Literal["each", "last", "never"]
"""Every reduction of a step is all-reduced, or the last one, or none (``set_requires_all_reduce``)."""


class Word(NamedTuple):
    """How a word of a column or key is shown."""

    label: str
    """In a sentence, a legend, a cell."""
    header: str = ""
    """Over a column of a table; may break lines."""
    colour: str = ""
    """In charts."""


class Measurement(NamedTuple):
    """Something that a bench measures on one device."""

    label: str
    amount: Literal["operations", "bytes", "calls"]
    """What is counted a second."""


PHASES = {
    "forward": Word("forward", "f", "#c7d9ec"),
    "backward": Word("backward", "b", "#f6d9b4"),
    "optimizer": Word("optimizer", "o", "#cbe5c9"),
    "other": Word("other", "·", "#e4e7eb"),
}
"""What the training loop was doing; a forward recomputed inside backward is ``backward``. The header is the
phase's letter in a line of text."""

ACTIVITIES = (
    "compute",
    "all_gather",
    "copy_out",
    "reduce",
    "reduce_wait",
    "final_wait",
    "reshard",
    "accumulate",
    "cast",
    "inputs_to_device",
    "hooks",
)
"""What FSDP was doing inside a phase: ``compute`` is the user's own work, the rest are FSDP labels."""

OPS = {
    "all_gather": Word("all-gather", "AG", "#e45756"),
    "reduce_scatter": Word("reduce-scatter", "RS", "#f58518"),
    "all_reduce": Word("all-reduce", "AR", "#eeca3b"),
    "broadcast": Word("broadcast", colour="#ff9da6"),
    "all_to_all": Word("all-to-all", colour="#b279a2"),
    "send_recv": Word("send/recv", colour="#9d755d"),
    "other": Word("other", colour="#79706e"),
}
"""Kinds of collectives; the header is the abbreviation where names are long."""

BREAKDOWN_PARTS = {
    "compute": Word("compute", "compute", "#4c78a8"),
    "fsdp_copy": Word("FSDP copies", "FSDP\ncopies", "#72b7b2"),
    "exposed_all_gather": Word("exposed all-gather", "all-\ngather", "#e45756"),
    "exposed_reduce_scatter": Word("exposed reduce-scatter", "reduce-\nscatter", "#f58518"),
    "exposed_all_reduce": Word("exposed all-reduce", "all-\nreduce", "#eeca3b"),
    "exposed_other_comm": Word("exposed other communication", "other\ncomm.", "#b279a2"),
    "exposed_memcpy": Word("exposed memcpy", "memcpy", "#9d755d"),
    "idle": Word("idle", "idle", "#d3d3d3"),
}
"""Disjoint parts of a step window, in the order of precedence."""

LANES = {
    "host": Word("host", colour="#b8c4d0"),
    "compute": Word("compute", colour=BREAKDOWN_PARTS["compute"].colour),
    "fsdp_copy": Word("FSDP copies", colour=BREAKDOWN_PARTS["fsdp_copy"].colour),
    "all_gather": Word("all-gather", colour=OPS["all_gather"].colour),
    "reduce_scatter": Word("reduce-scatter", colour=OPS["reduce_scatter"].colour),
    "all_reduce": Word("all-reduce", colour=OPS["all_reduce"].colour),
    "other_comm": Word("other comm.", colour=OPS["all_to_all"].colour),
    "memcpy": Word("copies", colour=BREAKDOWN_PARTS["exposed_memcpy"].colour),
}
"""Lanes of a rank in a timeline, from top to bottom."""

EXPOSED_PARTS = (
    "exposed_all_gather",
    "exposed_reduce_scatter",
    "exposed_all_reduce",
    "exposed_other_comm",
)
"""Parts of a step window that are communication which nothing hides."""

CATEGORIES = {
    "sharded_parameter": Word("sharded parameters", "sharded\nparams", "#4c78a8"),
    "sharded_gradient": Word("sharded gradients", "sharded\ngrads", "#9ecae9"),
    "optimizer_state": Word("optimizer state", "optim.\nstate", "#54a24b"),
    "buffer": Word("buffers of the model", "buffers", "#72b7b2"),
    "parameter_copy": Word("copies of the parameters", "copies of\nparams", "#86bcb6"),
    "unsharded_parameter": Word("unsharded parameters", "unshard.\nparams", "#e45756"),
    "unsharded_gradient": Word("unsharded gradients", "unshard.\ngrads", "#ff9d98"),
    "all_gather_buffer": Word("all-gather buffers", "all-gath.\nbuffers", "#f58518"),
    "reduce_scatter_buffer": Word("reduce-scatter buffers", "red.-scat.\nbuffers", "#ffbf79"),
    "activation": Word("activations", "activations", "#b279a2"),
    "input": Word("inputs", "inputs", "#eeca3b"),
    "temporary": Word("temporaries", "temporaries", "#9d755d"),
    "unattributed": Word("unattributed", "unattributed", "#bab0ac"),
}
"""What an allocation holds, lasting ones first."""

FITS = {
    "fits": Word("fits"),
    "depends": Word("may fit"),
    "does_not_fit": Word("does not fit"),
}
"""Whether a predicted peak fits on a device."""

REMEDIES = {
    "activation_checkpointing": Word("activation checkpointing"),
    "backward_after_each_forward": Word("backward after each forward"),
    "smaller_batch": Word("smaller batch"),
    "chunked_loss": Word("chunked loss"),
    "low_precision_logits": Word("low-precision logits"),
    "reshard_after_forward": Word("reshard after forward"),
    "less_prefetch": Word("less prefetch"),
    "reduced_gradients": Word("gradients reduced in every micro-batch"),
    "wider_sharding": Word("wider sharding"),
    "no_grad": Word("forward under no_grad"),
    "expandable_segments": Word("expandable segments"),
    "cpu_offload": Word("CPU offload"),
    "low_precision_states": Word("low-precision states"),
    "fused_optimizer": Word("fused optimizer"),
    "even_expert_shards": Word("even shards of experts"),
}
"""What may bring a peak down."""

PACKING_METHODS = {
    "padded": Word("padded"),
    "longest_in_batch": Word("to the longest in a batch"),
    "packed": Word("packed"),
    "concatenated": Word("concatenated"),
}
"""How documents become sequences."""

LATE_CAUSES = {
    "launch": Word("began too late to hide"),
    "communicator": Word("queued behind another collective"),
    "stream": Word("queued behind other work"),
    "transfer": Word("slow transfer"),
    "peer": Word("waited for a late peer"),
    "transfer_or_peer": Word("slow transfer or late peer"),
}
"""Why a collective came late."""

DOING = {
    "loading_data": Word("loading data"),
    "checkpointing": Word("at a checkpoint"),
    "joining": Word("setting up a process group"),
    "communicating": Word("in a collective"),
    "sharding": Word("in FSDP2's own code"),
    "forward": Word("in forward"),
    "backward": Word("in backward"),
    "stepping": Word("in the optimizer"),
    "compiling": Word("compiling"),
    "waiting_for_device": Word("waiting for the device"),
    "waiting_for_process": Word("waiting for another process"),
    "waiting_for_thread": Word("waiting for another thread"),
    "using_network": Word("on the network"),
    "debugging": Word("in a debugger"),
}
"""Activity of a blocked main thread, by the calls on its stack."""

IDLE_CAUSES = {
    "host_bound": Word("nothing launched in time"),
    "data_loader": Word("waiting for the data loader"),
    "device_sync": Word("the host waited for the device"),
    "memcpy": Word("the host waited for a copy"),
    "communication": Word("blocked on communication"),
    "queued": Word("launch latency"),
    "profiler": Word("profiler"),
    "unknown": Word("unknown"),
}
"""Why nothing ran."""

LEDGER_CAUSES = {
    "compute": Word("compute", colour="#4c78a8"),
    "recompute": Word("recomputed forwards", colour="#9ecae9"),
    "evaluation": Word("forwards without backward", colour="#54a24b"),
    "late_rank": Word("waiting for a slow rank", colour="#e45756"),
    "uneven_ranks": Word("ranks waiting for each other", colour="#ff9d98"),
    "communication": Word("exposed FSDP communication", colour="#f58518"),
    "other_communication": Word("collectives outside FSDP", colour="#b279a2"),
    "offload": Word("copies between host and device", colour="#9d755d"),
    "fsdp_copy": Word("FSDP copies", colour="#72b7b2"),
    "data_loader": Word("waiting for the data loader", colour="#eeca3b"),
    "host": Word("Python and dispatch", colour="#bab0ac"),
    "host_pause": Word("host pauses", colour="#79706e"),
    "script": Word("the script's own work", colour="#86bcb6"),
    "starved": Word("waiting for a CPU core", colour="#b07aa1"),
    "compilation": Word("compiling", colour="#8cd17d"),
    "garbage_collection": Word("garbage collection", colour="#499894"),
    "allocation": Word("allocating and freeing device memory", colour="#d37295"),
    "sync": Word("idle device after a synchronization", colour="#d6a5c9"),
    "queued": Word("launch latency", colour="#d8d8d8"),
    "tracing": Word("tracing overhead", colour="#e8e8e8"),
    "unknown": Word("unknown", colour="#d3d3d3"),
}
"""Causes of the ledger of lost time; ``compute`` alone is useful work."""

GAIN_BASES = {
    "replay": Word("replayed"),
    "bound": Word("at most"),
    "estimate": Word("about"),
    "unknown": Word("not known"),
}
"""How the gain of a remedy was found."""

CONFIDENCES = {"high": Word("certain"), "medium": Word("likely"), "low": Word("unclear")}
"""How sure the cause of a loss is; its gain apart."""

STREAM_IDLE_CAUSES = {
    "host_wait": Word("the host had launched nothing"),
    "kernel_wait": Word("the gap between two kernels"),
    "other": Word("mostly waiting for another stream"),
}
"""Why one stream stood idle between its activities, as HTA tells them apart."""

PATH_BOUNDS = {
    "host": Word("host work"),
    "compute": Word("compute"),
    "communication": Word("communication"),
    "between_kernels": Word("gaps between kernels"),
    "launch_delay": Word("launch delay"),
}
"""What bounds a stretch of a critical path."""

BENCH_KINDS = {
    "matmul": Measurement("matrix product", "operations"),
    "attention": Measurement("attention", "operations"),
    "copy": Measurement("copy on the device", "bytes"),
    "host_to_device_pinned": Measurement("copy to the device, pinned", "bytes"),
    "host_to_device_pageable": Measurement("copy to the device, pageable", "bytes"),
    "operator": Measurement("small eager operators", "calls"),
    "launch": Measurement("empty kernels", "calls"),
    "matmul_alone": Measurement("product, alone", "operations"),
    "matmul_beside_collective": Measurement("product, beside an all-gather", "operations"),
}
"""What a bench measures on one device."""

KERNEL_BOUNDS = {
    "matmul": Word("matrix products"),
    "attention": Word("attention"),
    "memory": Word("memory bandwidth"),
    "launch": Word("launch overhead"),
}
"""What a predicted kernel's time goes to."""

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def op_label(op: str) -> str:
    """Return an operation as people write it: ``all-gather``."""
    return OPS[op].label if op in OPS else op


def dtype_label(dtype: str | None) -> str:
    """Return a dtype's short name (``bf16``), ``-`` for an unknown one."""
    return "-" if dtype is None else _DTYPES.get(dtype, printable(dtype))


def category_label(category: str) -> str:
    """Return a memory category in words."""
    return CATEGORIES[category].label if category in CATEGORIES else printable(category)


def remedy_label(action: str) -> str:
    """Return a change that saves memory in words."""
    return REMEDIES[action].label if action in REMEDIES else printable(action)


def layer_name(fqn: str | None) -> str:
    """Return a layer's name for people: ``(root)``, ``root1:(root)``, ``(no layer)`` for null.

    Of many modules that are sharded together, those that differ in a number are one: ``experts.0-19``.
    """
    if fqn is None:
        return NO_LAYER
    name = f"{fqn}(root)" if is_root(fqn) else _WRAPPERS.sub("", fqn) or fqn
    modules = name.split(", ")
    return name if len(modules) < _MANY_MODULES else _folded(modules)


def _folded(modules: Sequence[str]) -> str:
    numbers: dict[tuple[str, ...], list[int]] = {}
    for name in modules:
        match = last_number(name)
        key = (name,) if match is None else (name[: match.start()], name[match.end() :])
        numbers.setdefault(key, []).extend([] if match is None else [int(match.group())])
    return ", ".join(format_numbers(sorted(found)).join(key) for key, found in numbers.items())


def last_number(name: str) -> re.Match[str] | None:
    """The last number in a name; longer strings of digits count as several numbers."""
    return next(reversed(list(re.finditer(r"\d{1,18}", name))), None)


def in_family(name: str, family: str) -> bool:
    """Whether ``layers.0-2`` is the folded name of ``layers.1`` and others."""
    match = last_number(name)
    if match is None:
        return False
    before, after = name[: match.start()], name[match.end() :]
    if not (family.startswith(before) and family.endswith(after)):
        return False
    number, parts = int(match.group()), family[len(before) : len(family) - len(after)].split(",")
    spans = [part.split("-") for part in parts if part != "..."]
    if not all(part.isdecimal() for span in spans for part in span):
        return False
    if "..." in parts and len(spans) == 3:
        first, second, last = (int(span[0]) for span in spans)
        return number in range(first, last + 1, max(1, second - first))
    return any(int(span[0]) <= number <= int(span[-1]) for span in spans)


ERROR_LENGTH = 200
"""Characters of a rank's error that its manifest keeps."""


def quoted_error(error: str) -> str:
    """Return a rank's error; of one that is kept in part its whole sentences, else with an ellipsis."""
    if not error.endswith("...") and len(error) < ERROR_LENGTH:
        return error
    whole = error.rpartition(". ")[0]
    return f"{whole}." if whole else f"{error.rstrip(' .')} ..."


def printable(text: str) -> str:
    """Make untrusted text safe on a terminal: control characters and escapes become visible codes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def doing_label(doing: str) -> str:
    """Return what a main thread is doing in words."""
    return DOING[doing].label if doing in DOING else printable(doing)


def packing_label(method: str) -> str:
    """How documents become sequences, for people."""
    return PACKING_METHODS[method].label if method in PACKING_METHODS else printable(method)
