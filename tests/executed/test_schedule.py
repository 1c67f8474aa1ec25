"""The schedule of FSDP2's events is FSDP2's own: real models, sharded every way, event for event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.execution.fake_world import fake_process_group, fsdp_mesh
from fsdp2prof.schedule import ScheduledGroup, block_counts, steady_step

WIDTH = 8
Seen = tuple[str, str, str, bool]
"""Operation, module, phase, whether over a part of the ranks."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x) + self.inner(x)


class Tiny(nn.Module):
    """An embedding, blocks that run one or several times, a head."""

    def __init__(self, times: tuple[int, ...]) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in times)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.times = times

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block, times in zip(self.blocks, self.times, strict=True):
            for _ in range(times):
                x = block(x)
        return 2 * self.head(x)  # not the head's own tensor, whose hooks would fire in forward order


@dataclass
class Arrangement:
    """How a model is sharded and trained."""

    times: tuple[int, ...] = (1, 1, 1)
    wrapped: frozenset[str] = frozenset()
    """Of ``embed``, ``head`` and ``inner`` (of every block)."""
    reshard: dict[str, bool | int] = field(default_factory=dict)
    """By module; others have the default."""
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    frozen: frozenset[str] = frozenset()
    replicas: int = 1
    micro_batches: int = 1
    sync_each: bool = False
    reference_forward: bool = False


def units(model: Tiny, how: Arrangement) -> list[str]:
    """Names of the modules to shard, inner ones first, the root last."""
    names = [name for name in ("embed",) if name in how.wrapped]
    for index in range(len(model.blocks)):
        names += [f"blocks.{index}.inner"] if "inner" in how.wrapped else []
        names.append(f"blocks.{index}")
    return [*names, *(name for name in ("head",) if name in how.wrapped), ""]


@contextmanager
def watched(events: list[Seen]) -> Iterator[None]:
    """Write down what FSDP2's parameter groups do."""
    unshard, wait = FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard
    whole, part = FSDPParamGroup._to_sharded, FSDPParamGroup._to_sharded_post_forward
    enter = record_function.__enter__

    def phase(group: Any) -> str:
        return "forward" if group._training_state == TrainingState.FORWARD else "backward"

    def seen_unshard(self: Any, *args: Any, **kwargs: Any) -> None:
        before, over_part = self._all_gather_result, self.is_sharded_post_forward
        unshard(self, *args, **kwargs)
        if before is None and self._all_gather_result is not None:
            events.append(("all_gather", self._module_fqn, phase(self), over_part))

    def seen_wait(self: Any) -> None:
        if self._all_gather_result is not None:
            events.append(("copy_out", self._module_fqn, phase(self), False))
        wait(self)

    def seen_whole(self: Any) -> None:
        if not self.is_sharded:
            events.append(("reshard", self._module_fqn, phase(self), False))
        whole(self)

    def seen_part(self: Any) -> None:
        if not self.is_sharded_post_forward:
            events.append(("reshard", self._module_fqn, phase(self), False))
        part(self)

    def seen_label(self: Any) -> Any:
        if self.name.startswith("FSDP::post_backward_reduce"):
            events.append(
                ("reduce_scatter", self.name.partition("(")[2].partition(")")[0], "backward", False)
            )
        return enter(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPParamGroup, "unshard", seen_unshard)
        patch.setattr(FSDPParamGroup, "wait_for_unshard", seen_wait)
        patch.setattr(FSDPParamGroup, "_to_sharded", seen_whole)
        patch.setattr(FSDPParamGroup, "_to_sharded_post_forward", seen_part)
        patch.setattr(record_function, "__enter__", seen_label)
        yield


def shard(model: Tiny, names: list[str], how: Arrangement, mesh: Any) -> None:
    for name in names:
        reshard: dict[str, Any] = {"reshard_after_forward": how.reshard[name]} if name in how.reshard else {}
        fully_shard(model.get_submodule(name), mesh=mesh, **reshard)
    modules: list[Any] = [model.get_submodule(name) for name in names if name.startswith("blocks")]
    for at, module in enumerate(modules):
        if how.forward_prefetch:
            module.set_modules_to_forward_prefetch(modules[at + 1 : at + 1 + how.forward_prefetch])
        if how.backward_prefetch:
            module.set_modules_to_backward_prefetch(modules[max(0, at - how.backward_prefetch) : at][::-1])


def run(how: Arrangement) -> tuple[list[Seen], list[ScheduledGroup]]:
    """Train two steps for real; return the second one's events, and the groups as the schedule takes them."""
    events: list[Seen] = []
    uses: list[str] = []
    leads_back: dict[str, bool] = {}
    from_gradient: dict[str, bool] = {}
    mesh = MeshSpec(dp_shard=4, dp_replicate=how.replicas)
    with fake_process_group(mesh) as device_mesh:
        model = Tiny(how.times)
        names = units(model, how)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(how.frozen)))
        trained = [
            any(
                p.requires_grad
                and max((n for n in names if n == "" or q.startswith(f"{n}.")), key=len) == name
                for q, p in model.named_parameters()
            )
            for name in names
        ]
        shard(model, names, how, fsdp_mesh(device_mesh))
        for name in names:

            def ended(module: nn.Module, inputs: Any, output: Tensor, name: str = name) -> None:
                if torch.is_grad_enabled():
                    uses.append(name)
                    leads_back[name] = output.requires_grad
                    from_gradient.setdefault(name, any(one.requires_grad for one in inputs))

            model.get_submodule(name).register_forward_hook(ended)
        train: Any = model
        tokens = torch.zeros(2, dtype=torch.int64)
        with watched(events):
            for _ in range(2):
                events.clear()
                for micro_batch in range(how.micro_batches):
                    uses.clear()
                    train.set_requires_gradient_sync(how.sync_each or micro_batch == how.micro_batches - 1)
                    if how.reference_forward:
                        with torch.no_grad():
                            train(tokens)
                    train(tokens).sum().backward()
                for parameter in model.parameters():
                    parameter.grad = None
        groups = {
            name: ScheduledGroup(
                fqn=name,
                reshard=_reshards(model.get_submodule(name)),
                has_backward=leads_back[name],
                input_has_gradient=from_gradient[name],
                reduce_bytes=int(trains),
                forward_prefetch=_names(model, model.get_submodule(name), "forward"),
                backward_prefetch=_names(model, model.get_submodule(name), "backward"),
            )
            for name, trains in zip(names, trained, strict=True)
            if _groups(model.get_submodule(name))  # a root may have no parameters of its own
        }
    return list(events), [groups[name] for name in uses if name in groups]


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # before torch 2.11


def _reshards(module: Any) -> bool | int:
    (group,) = _groups(module)
    info = group.post_forward_mesh_info
    if info is None:
        return False
    return True if info.shard_mesh_size == group.mesh_info.shard_mesh_size else int(info.shard_mesh_size)


def _names(model: nn.Module, module: Any, phase: str) -> tuple[str, ...]:
    names = {one: name for name, one in model.named_modules()}
    states = getattr(module._get_fsdp_state(), f"_states_to_{phase}_prefetch")
    return tuple(names[state._modules[0]] for state in states)


def check(how: Arrangement) -> None:
    seen, uses = run(how)
    events = steady_step(
        uses,
        micro_batches=how.micro_batches,
        sync="each" if how.sync_each else "last",
        forwards=2 if how.reference_forward else 1,
    )
    made = [(one.op, one.group.fqn, one.phase, one.over_part) for one in events if one.op != "all_reduce"]
    assert made == seen


CASES = {
    "default": Arrangement(),
    "kept": Arrangement(reshard={"": False, "blocks.1": False}),
    "root too": Arrangement(reshard={"": True}),
    "over two ranks": Arrangement(reshard={"blocks.0": 2, "blocks.2": 2}),
    "nested": Arrangement(wrapped=frozenset({"inner", "head"})),
    "ends apart": Arrangement(wrapped=frozenset({"embed", "head"})),
    "ahead": Arrangement(forward_prefetch=2, backward_prefetch=2),
    "ahead, nested": Arrangement(wrapped=frozenset({"inner"}), forward_prefetch=3, backward_prefetch=1),
    "frozen blocks": Arrangement(frozen=frozenset({"embed", "blocks.0", "blocks.1"})),
    "frozen blocks prefetched": Arrangement(
        frozen=frozenset({"embed", "blocks.0", "blocks.1"}), backward_prefetch=2
    ),
    "shared block": Arrangement(times=(1, 3, 1)),
    "shared block, accumulated": Arrangement(times=(2, 1), micro_batches=2),
    "accumulation, each": Arrangement(micro_batches=3, sync_each=True),
    "hybrid": Arrangement(replicas=2, micro_batches=2),
    "reference forward": Arrangement(reference_forward=True, wrapped=frozenset({"embed", "head"})),
}


@pytest.mark.parametrize("case", CASES)
def test_events_of_a_step(case: str) -> None:
    check(CASES[case])


MODULES = ["", "embed", "head", "blocks.0", "blocks.1", "blocks.0.inner", "blocks.1.inner"]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.builds(
        Arrangement,
        times=st.tuples(st.integers(1, 3), st.integers(1, 2)),
        wrapped=st.frozensets(st.sampled_from(["embed", "head", "inner"])),
        reshard=st.dictionaries(st.sampled_from(MODULES), st.sampled_from([True, False, 2]), max_size=4),
        forward_prefetch=st.integers(0, 3),
        backward_prefetch=st.integers(0, 3),
        frozen=st.frozensets(st.sampled_from(["embed", "blocks.0", "blocks.1", "blocks.0.inner"])),
        replicas=st.integers(1, 2),
        micro_batches=st.integers(1, 3),
        sync_each=st.booleans(),
        reference_forward=st.booleans(),
    )
)
def test_events_of_any_step(how: Arrangement) -> None:
    check(how)


@pytest.mark.parametrize("keep_between", [False, True])
def test_a_block_is_counted(keep_between: bool) -> None:
    counts = block_counts(4, "last", keep_between=keep_between)
    assert counts == ((1 if keep_between else 4), 4, 1)
    assert block_counts(4, "each", reshard=False) == (4, 0, 4)
