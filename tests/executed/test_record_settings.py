"""Which steps and ranks are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp2prof.commands.record import record
from fsdp2prof.errors import UsageError
from fsdp2prof.manifest import ProcessGroupInfo, RankManifest, RecordOptions, RunInfo
from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.recorder import Recorder
from fsdp2prof.recorder.rank.captures import Schedule
from fsdp2prof.recorder.settings import Settings, is_selected, validate
from fsdp2prof.run_directory import MANIFEST_FILE, RUN_FILE, rank_folder

SHORT: dict[str, Any] = {"active": 3, "memory_steps": 1}
"""Less than the default, so that the schedules below stay short."""


def kinds(count, **options):
    schedule = Schedule(RecordOptions(**(SHORT | options)))
    return "".join(schedule.kind(step)[0] for step in range(count))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "pwtttmpp"),
        ({"wait": 0, "warmup": 0, "active": 1}, "tmpppppp"),
        ({"wait": 2, "warmup": 2, "active": 2, "memory": False}, "ppwwttpp"),
        ({"at_step": 4, "active": 1, "memory_steps": 2}, "pppwtmmp"),
        ({"at_step": 0}, "tttmpppp"),
        ({"active": 0, "memory_steps": 2}, "ppmmpppp"),
    ],
)
def test_schedule(options, expected):
    assert kinds(8, **options) == expected


@given(
    st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.none() | st.integers(0, 9)
)
def test_each_kind_is_one_run_of_the_asked_length(wait, warmup, active, memory_steps, at_step):
    text = kinds(40, wait=wait, warmup=warmup, active=active, memory_steps=memory_steps, at_step=at_step)
    assert text.count("t") == active
    assert text.count("m") == memory_steps
    assert text.strip("p").lstrip("w").lstrip("t").strip("m") == ""
    if active and at_step is not None:
        assert text.index("t") == at_step


def put_off(step, **how):
    """The schedule (``pwtttmpp``) up to ``step``, and what becomes of it if that is put off."""
    schedule = Schedule(RecordOptions(**SHORT))
    schedule.put_off(step, **how)
    return "".join(schedule.kind(number)[0] for number in range(step, step + 8))


@pytest.mark.parametrize(
    ("step", "how", "expected"),
    [
        (1, {}, "pwtttmpp"),  # not begun: all of it one step later
        (1, {"begun": True}, "pmwtttpp"),  # interrupted in the warm-up: memory has its turn first
        (3, {"begun": True}, "pmwtttpp"),
        (3, {"begun": True, "keep": True}, "pmpppppp"),  # step 2 is kept
        (5, {}, "pmpppppp"),
        (5, {"begun": True, "keep": True}, "pppppppp"),
    ],
)
def test_what_becomes_of_a_step_that_cannot_be_captured(step, how, expected):
    assert put_off(step, **how) == expected


def test_a_part_is_begun_three_times_at_most():
    schedule = Schedule(RecordOptions(**(SHORT | {"memory": False})))
    for step in (1, 2, 3):
        assert schedule.kind(step) == "warmup"
        schedule.put_off(step, begun=True)
    assert schedule.end == 4


def test_only_what_was_put_off_comes_forward_and_not_a_traced_step():
    schedule = Schedule(RecordOptions(**SHORT))
    assert not schedule.bring_forward(2)
    schedule.put_off(1)
    assert schedule.bring_forward(1)
    assert schedule.kind(1) == "warmup"
    without_warmup = Schedule(RecordOptions(**(SHORT | {"warmup": 0})))
    without_warmup.put_off(1)
    assert not without_warmup.bring_forward(1)


@pytest.mark.parametrize(
    ("ranks", "world_size", "expected"),
    [
        ("all", 3, {0, 1, 2}),
        ("0,3", 4, {0, 3}),
        ("sample:1", 8, {0}),
        ("sample:2", 8, {0, 7}),
        ("sample:5", 6, {0, 1, 2, 3, 5}),
        ("sample:9", 4, {0, 1, 2, 3}),
    ],
)
def test_ranks(ranks, world_size, expected):
    assert {rank for rank in range(world_size) if is_selected(ranks, rank, world_size)} == expected


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": "0-3"},
        {"ranks": "sample:0"},
        {"wait": -1},
        {"at_step": -1},
        {"active": 0, "memory": False},
    ],
)
def test_options_that_cannot_be_meant(options):
    with pytest.raises(UsageError, match="--"):
        validate(RecordOptions(**(SHORT | options)))


def test_settings_travel_through_the_environment(monkeypatch):
    settings = Settings(run="/data/ä run", options=RecordOptions(at_step=7, ranks="0,3"))
    monkeypatch.setenv("FSDP2PROF_RECORD", settings.encode())
    assert Settings.from_environment() == settings
    monkeypatch.delenv("FSDP2PROF_RECORD")
    assert Settings.from_environment() is None


def test_the_command_and_the_recorder_take_every_recording_option() -> None:
    """One dataclass declares them: a field without an option, a help or a place in Recorder fails here."""
    fields = set(RecordOptions.__struct_fields__) - {"trial"}  # made of --try, and by fsdp2prof try
    command = {option.name: option for option in record.params if isinstance(option, click.Option)}
    assert set(command) == fields | {"output", "force", "quiet", "node_rank", "help_all", "candidates"}
    assert all(command[name].help for name in fields)
    made = {"wait": 2, "active": 1, "at_step": 4, "ranks": "0,1", "stacks": True, "memory": False}
    assert Recorder("unused", **made)._options == RecordOptions(**made)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no option 'activ'; there are wait, "):
        Recorder("unused", activ=3)


def test_a_sample_has_every_coordinate_of_every_mesh_of_powers_of_two():
    def meshes(world_size: int) -> Iterator[tuple[int, ...]]:
        yield from ((),) if world_size == 1 else ()
        for size in (2, 4, 8, 16, 32):
            if world_size % size == 0:
                yield from ((size, *rest) for rest in meshes(world_size // size))

    for world_size in (4, 8, 32):
        for count in range(2, world_size + 1):
            chosen = [r for r in range(world_size) if is_selected(f"sample:{count}", r, world_size)]
            assert len(chosen) == count
            for mesh in (mesh for mesh in meshes(world_size) if max(mesh) <= count):
                coordinates = np.array(np.unravel_index(chosen, mesh))
                assert [len(set(row)) for row in coordinates.tolist()] == list(mesh)


@pytest.mark.parametrize(
    ("selected", "said"),
    [
        ({0, 3}, "1, 2; every coordinate of dp, tp has a recorded rank"),
        ({0, 1}, "2, 3; no recorded rank has the mesh coordinates dp 1,"),
    ],
)
def test_a_run_says_which_ranks_it_did_not_see(tmp_path, selected, said):
    for rank in range(4):
        first = rank // 2 * 2
        members = {"dp": [rank % 2, rank % 2 + 2], "tp": [first, first + 1]}
        groups = [
            ProcessGroupInfo(name=dim, desc="", backend="gloo", ranks=ranks, mesh_dim=dim)
            for dim, ranks in members.items()
        ]
        one = RankManifest(rank=rank, world_size=4, state="complete", selected=rank in selected)
        one.process_groups = groups if rank in selected else []
        folder = tmp_path / rank_folder(rank)
        folder.mkdir()
        (folder / MANIFEST_FILE).write_bytes(msgspec.json.encode(one))
    (tmp_path / RUN_FILE).write_bytes(msgspec.json.encode(RunInfo(state="complete", world_size=4)))
    said = f"2 of 4 ranks were not recorded (--ranks): {said}"
    assert any(message.startswith(said) for message in open_run(tmp_path).messages)
