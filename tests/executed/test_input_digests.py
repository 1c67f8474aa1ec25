"""Hashes of what a model gets, which tell ranks that read the same data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.execution.fake_world import fake_process_group, fsdp_mesh
from fsdp2prof.manifest import LabelsInfo
from fsdp2prof.recorder.model import ownership
from fsdp2prof.recorder.model.inputs import (
    Padding,
    are_same,
    identities,
    ignored_labels,
    input_digest,
    need_only_inputs,
)
from fsdp2prof.recorder.model.roots import Roots

WORDS = torch.arange(6).view(2, 3)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (WORDS, True),
        ({"input_ids": WORDS, "labels": None}, True),
        ([(torch.zeros(4), WORDS.float().bfloat16().requires_grad_())], True),
        (torch.zeros(4), False),
        ("no tensor", False),
        (WORDS.t(), True),
        ((torch.tensor(3), WORDS), True),
        (torch.tensor(3), False),
        (torch.empty(3, device="meta"), False),
    ],
)
def test_only_tensors_that_can_be_read_and_vary_say_something(inputs: Any, says: bool) -> None:
    assert (input_digest((inputs,), {}) is not None) is says


def test_digests_differ_as_the_data_do() -> None:
    first = input_digest((WORDS,), {"mask": torch.ones(2)})
    assert first == input_digest((WORDS.clone(),), {"mask": torch.ones(2)})
    assert first != input_digest((WORDS + 1,), {"mask": torch.ones(2)})
    assert first != input_digest((WORDS.view(3, 2),), {"mask": torch.ones(2)})
    many = torch.arange(1 << 14)
    other = torch.cat([many[:-16], many[:16]])
    assert input_digest((many,), {}) != input_digest((other,), {}), "samples come from all of a tensor"


def test_a_few_tensors_are_read_however_deep_they_lie() -> None:
    rows = [{"a": WORDS + n, "b": WORDS - n} for n in range(100)]
    assert input_digest((rows,), {}) == input_digest((rows[:50],), {})
    assert input_digest((rows[1:],), {}) != input_digest((rows,), {})


def test_nothing_is_read_while_a_profiler_runs() -> None:
    with torch.profiler.profile() as profiler:
        assert input_digest((WORDS,), {}) is None
    assert not [one for one in profiler.events() or () if one.name.startswith("aten::")]


@pytest.mark.parametrize(
    ("labels", "share"),
    [
        (torch.tensor([[-100, -100, -100, 4]]), 0.75),
        (torch.tensor([[-100, 4], [-100, 4], [-100, 4]]).t(), 0.5),  # rows that are not contiguous
        (torch.full((4, 4096), -100).index_fill(1, torch.arange(2048), 7), 0.5),  # sampled
        (WORDS, None),
        (torch.tensor([-100.0, 1.0]), None),
    ],
)
def test_labels_that_the_loss_ignores_are_counted(labels: torch.Tensor, share: float | None) -> None:
    found = ignored_labels((WORDS,), {"labels": labels})
    assert found == (None if share is None else LabelsInfo(positions=labels.numel(), ignored_frac=share))


ROWS = torch.tensor([[5, 6, 7, 8, 0, 0, 0, 0], [5, 6, 0, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("inputs", "share"),
    [
        ({"ids": ROWS}, 0.5),
        ({"ids": ROWS.flip(1)}, 0.5),
        ({"ids": ROWS, "mask": (ROWS != 0).long(), "kind": torch.zeros_like(ROWS)}, 0.5),
        ({"ids": ROWS, "mask": torch.ones_like(ROWS)}, 0.0),  # an image begins or ends each row
        ({"ids": ROWS, "positions": torch.arange(8).expand(2, 8)}, 0.0),
        ({"ids": ROWS[:, :4]}, 0.0),  # one row needs it all
        ({"ids": ROWS, "labels": torch.where(ROWS == 0, -100, ROWS)}, 0.5),
        ({"labels": torch.full((2, 8), -100)}, None),
        ({"image": torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "x": torch.zeros(2, 8)}, None),
    ],
)
def test_padding_that_no_row_needs_is_counted(inputs: dict[str, torch.Tensor], share: float | None) -> None:
    padding = Padding()
    padding.note((), inputs)
    assert padding.share == share
    padding.note((ROWS[:, :4],), {})
    assert padding.share == (0.0 if share is None else share * 2 / 3)


def test_inputs_that_lead_to_no_parameter_are_known() -> None:
    weight, words = nn.Linear(4, 4), torch.rand(2, 4)
    needing = words.clone().requires_grad_()
    assert need_only_inputs((needing,), {})
    assert need_only_inputs((needing * 2 + 1, words), {})
    assert not need_only_inputs((words * 2,), {"mask": None})
    assert not need_only_inputs((weight(needing),), {})
    hidden = torch.utils.checkpoint.checkpoint(lambda x: weight(x), needing, use_reentrant=True)
    assert not need_only_inputs((hidden * 2,), {})
    long = needing
    for _ in range(3000):
        long = long + 1
    assert not need_only_inputs((long,), {})


def test_reused_tensors_are_known_without_reading_them() -> None:
    words, mask = torch.arange(6), torch.ones(2, 3)
    before = identities((words[:4],), {"mask": mask})
    with torch.profiler.profile() as profiler:
        assert are_same(before, identities((words[:4],), {"mask": mask}))
        assert not are_same(before, identities((words[1:5],), {"mask": mask}))
        assert not are_same(before, identities((words.clone()[:4],), {"mask": mask}))
        assert not are_same(before, identities((words[:4],), {}))
    called = {one.name for one in profiler.events() or ()}
    assert not called & {"aten::eq", "aten::equal", "aten::_local_scalar_dense"}
    words.add_(1)
    assert not are_same(before, identities((words[:4],), {"mask": mask}))
    del words
    assert not are_same(before, before)
    assert not are_same([], [])


def test_captured_and_evaluated_forwards_are_left_out() -> None:
    """The two that follow are kept, and no more."""
    roots = Roots(lambda: None)
    mesh = MeshSpec(dp_shard=2)
    with fake_process_group(mesh) as device_mesh:
        model: Any = fully_shard(nn.Linear(4, 4), mesh=fsdp_mesh(device_mesh))
        roots.watch(model)
        with torch.no_grad():
            model(torch.rand(2, 4))
        roots.mark(True)
        model(torch.rand(2, 4))
        roots.mark(False)
        (root,) = roots
        assert root.inputs == []
        for _ in range(3):
            model(torch.rand(2, 4))
        assert len(set(root.inputs)) == 2
        assert None not in root.inputs
        roots.remove()


def test_of_a_frozen_root_the_first_forward_of_each_step_is_kept() -> None:
    """Whether gradients are enabled or not."""
    roots = Roots(lambda: None)
    with fake_process_group(MeshSpec(dp_shard=2)) as device_mesh:
        mesh = fsdp_mesh(device_mesh)
        teacher: Any = fully_shard(nn.Linear(4, 4).requires_grad_(False), mesh=mesh)
        roots.watch(teacher)
        words = torch.rand(2, 4)
        for _ in range(2):
            with torch.no_grad():
                teacher(words)
            teacher(words + 1)
            roots.end_step()
        (root,) = roots
        assert root.inputs == [input_digest((words,), {})] * 2
        roots.remove()


@pytest.mark.parametrize(
    ("mask", "fraction"),
    [(torch.ones(128, 128).tril().bool(), 0.5), (torch.eye(128), None), (torch.ones(2, 128).bool(), None)],
)
def test_a_square_boolean_buffer_is_described_with_what_is_true(
    mask: torch.Tensor, fraction: float | None
) -> None:
    assert ownership._true_frac(mask) == (None if fraction is None else pytest.approx(fraction, abs=0.01))


@torch.no_grad()
def climb(model: nn.Module) -> None:
    for one in model.parameters():
        one.add_(1.0)


def test_parameters_that_change_between_the_forwards_of_a_step_are_counted() -> None:
    """As in sharpness-aware minimization; an update between steps is the optimizer's."""
    roots = Roots(lambda: None)
    with fake_process_group(MeshSpec(dp_shard=2)) as device_mesh:
        model: Any = fully_shard(nn.Linear(4, 4), mesh=fsdp_mesh(device_mesh))
        roots.watch(model)
        counted = []
        for climbs in (False, True):
            for second in (False, True):
                if climbs and second:
                    climb(model)
                model(torch.rand(2, 4)).sum().backward()
            counted += [one.updates for one in roots.end_step().values()]
            climb(model)
        assert counted == [0, 1]
        roots.remove()
