"""The labels of a training step: the ranges FSDP2 puts around its work, and our own around a root's forward.

Parsed here once, for the recorder that tags allocations by them and for the analyses that map time by them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

AUTOGRAD_NODE = "autograd::engine::evaluate_function"
"""Prefix of the ranges that autograd puts around each backward node, where the labels include them."""

BACKWARD = "fsdp2prof::backward"
"""Our own range around a run of the autograd engine while memory is recorded: it covers the loss's backward,
which comes before FSDP's first label."""

PIPELINE_ACTION = "PP:"
"""Prefix of the ranges that torch's schedules put around a stage's work: stage, kind, micro-batch."""

RECOMPUTED = "fsdp2prof::recomputed"
"""Our own range around a forward that activation checkpointing runs again inside backward."""

_FSDP = re.compile(r"FSDP::(?P<kind>\w+)(?: for ?(?P<target>.*?))?(?: \((?P<fqn>.*)\))?(?: \[pg=\d+\])?")
_ROOT = re.compile(r"fsdp2prof::root \((\d{1,9})\)")
_MEGATRON = re.compile(r"MFSDP (?P<fqn>\S+) (?P<phase>forward|backward)")
"""Range that Megatron-FSDP puts around a module's work."""
_ROOT_NAME = re.compile(r"(root\d+:)?")

_ACTIVITY = {
    "inputs_to_device": "inputs_to_device",
    "cast_forward_inputs": "cast",
    "cast_forward_outputs": "cast",
    "all_gather": "all_gather",
    "all_gather_copy_out": "copy_out",
    "post_forward": "reshard",
    "post_backward_accumulate": "accumulate",
    "post_backward_reshard": "reshard",
    "post_backward_rs_wait": "reduce_wait",
    "post_backward_reduce": "reduce",
    "reduce_scatter": "reduce",
    "all_reduce": "reduce",
    "root_post_backward_callback": "final_wait",
}
BEFORE_FORWARD = frozenset({"root_pre_forward", "inputs_to_device", "cast_forward_inputs"})
"""Labels without a module that come before the ``pre_forward`` of theirs."""
NAMELESS = BEFORE_FORWARD | {"cast_forward_outputs"}
"""Labels that never carry a module."""


class FsdpLabel(NamedTuple):
    """A parsed label."""

    kind: str
    """The label's own word (``all_gather``, ``pre_forward``, ...), ``optimizer``, or ``root`` (our own)."""
    fqn: str | None = None
    """Module; the empty string is the root, null is a label that never names one."""
    activity: str = "compute"
    root: int | None = None
    """Index in our own ``fsdp2prof::root (i)``."""

    @property
    def is_backward(self) -> bool:
        """Whether only a backward pass emits this label."""
        return "backward" in self.kind


@lru_cache(maxsize=4096)
def parse_label(name: str) -> FsdpLabel | None:
    """Parse a range's name; ``None`` for every range that is not a label of interest."""
    if name.startswith("Optimizer."):
        return FsdpLabel("optimizer")
    if root := _ROOT.fullmatch(name):
        return FsdpLabel("root", root=int(root[1]))
    match = _FSDP.fullmatch(name)
    if match is None:
        module = _MEGATRON.fullmatch(name)
        return None if module is None else FsdpLabel(f"module_{module['phase']}", module["fqn"])
    kind, target, fqn = match.group("kind", "target", "fqn")
    named = None if kind in NAMELESS else (target if target is not None else fqn or "")
    return FsdpLabel(kind, named, _ACTIVITY.get(kind, "hooks"))


def qualified_fqn(fqn: str, root: int, roots: int) -> str:
    """Return the name a module goes by in every table: prefixed with its root where there are several."""
    return fqn if roots < 2 else f"root{root}:{fqn}"


def unqualified_fqn(fqn: str) -> str:
    """Return a name of :func:`qualified_fqn` without its root."""
    return _ROOT_NAME.sub("", fqn, count=1)


def is_root(fqn: str) -> bool:
    """Tell whether a name of :func:`qualified_fqn` is a root module's own."""
    return _ROOT_NAME.fullmatch(fqn) is not None


def root_label(root: int) -> str:
    """Return the range that the recorder puts around the forward of root number ``root``."""
    return f"fsdp2prof::root ({root})"
