"""Recording real runs: what is left behind, whatever way they end."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.present import manifest_of, present
from support.recordings import SHORT

from fsdp2prof.readers.run.directory import open_run

from .alone_and_recorded import one_rank
from .conftest import training_environment

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
RECORD = [sys.executable, "-m", "fsdp2prof", "record", *SHORT]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TINY = HERE.parent.parent / "examples" / "train_tiny_fsdp2.py"


PATIENCE_S = 240


def record(run, *command, options=(), env=None, **keywords):
    return subprocess.run(
        [*RECORD, "-o", str(run), *options, "--", *map(str, command)],
        env=env or training_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        **keywords,
    )


def processes_of(run):
    """Living processes that carry this run in their environment."""
    alive = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            carries = f'"run":"{run}"'.encode() in (folder / "environ").read_bytes()
        except OSError:
            continue
        if carries:
            alive.append((folder / "cmdline").read_bytes())
    return alive


def trace_names(file):
    with gzip.open(file) as stream:
        return [event["name"] for event in json.load(stream)["traceEvents"] if event.get("ph") == "X"]


def temporary_files(run):
    return list(Path(run).rglob(".*"))


def test_a_run_under_torchrun_is_recorded_whole(recorded):
    recording = recorded("train_tiny_fsdp2", 2)
    run = open_run(recording.run)
    assert (run.info.state, run.info.exit_code, run.info.world_size, run.messages) == ("complete", 0, 2, ())
    assert temporary_files(recording.run) == []
    for record_of_rank in run.ranks:
        manifest = manifest_of(record_of_rank)
        assert manifest.state == "complete"
        assert manifest.traced_steps == [2, 3, 4]
        assert manifest.memory_steps == [5]
        kinds = ["plain", "warmup", "traced", "traced", "traced", "memory", "plain", "plain"]
        assert [step.kind for step in manifest.steps] == kinds
        starts = [step.start_ns for step in manifest.steps]
        assert all(a.start_ns + a.duration_ns <= b for a, b in zip(manifest.steps, starts[1:], strict=False))
        names = trace_names(record_of_rank.trace)
        assert [f"ProfilerStep#{n}" in names for n in range(7)] == [
            False,
            False,
            True,
            True,
            True,
            False,
            False,
        ]
        assert names.count("fsdp2prof::root (0)") == 3
        assert names.count("Optimizer.step#AdamW.step") == 3


def test_the_manifest_describes_every_group_of_the_example(recorded):
    manifest = manifest_of(open_run(recorded("train_tiny_fsdp2", 2).run).ranks[0])
    assert [group.fqn for group in manifest.param_groups] == ["", *(f"layers.{i}" for i in range(4))]
    root, *layers = manifest.param_groups
    assert (root.reshard_after_forward, layers[0].reshard_after_forward) == (False, True)
    assert {(g.param_dtype, g.reduce_dtype, g.offload) for g in layers} == {("bfloat16", "float32", False)}
    assert [parameter.fqn for parameter in root.parameters] == [
        "embedding.weight",
        "norm.weight",
        "norm.bias",
        "head.weight",
    ]
    embedding = root.parameters[0]
    assert (embedding.global_shape, embedding.local_shape, embedding.placement) == (
        [1024, 128],
        [512, 128],
        "Shard(0)",
    )
    assert (embedding.all_gather_dtypes, embedding.all_gather_numels) == (["bfloat16"], [512 * 128])
    # A block: two norms (256 each), qkv 3*128*128, proj 128*128, up 4*128*128 + 512, down 4*128*128 + 128.
    numel = 2 * 256 + 12 * 128 * 128 + 512 + 128
    assert sum(p.all_gather_numels[0] for p in layers[0].parameters) == numel // 2
    total = 4 * numel + 2 * 1024 * 128 + 256
    optimizer = manifest.optimizers[0]
    scalars = 44  # AdamW's step counters, 4 bytes each
    assert (optimizer.class_name, optimizer.parameters) == ("AdamW", scalars)
    assert optimizer.state_bytes == 2 * 4 * total // 2 + 4 * scalars
    groups = {group.name: group for group in manifest.process_groups}
    assert groups[present(root.shard_group)].ranks == [0, 1]
    assert groups[present(root.shard_group)].mesh_dim == "dp_shard"
    sharded = {t.address for t in manifest.tensors if t.category == "sharded_parameter"}
    assert sharded == {p.address for g in manifest.param_groups for p in g.parameters}


def test_hsdp_names_both_mesh_dimensions(recorded):
    for rank, record_of_rank in enumerate(open_run(recorded("hsdp", 4).run).ranks):
        group = manifest_of(record_of_rank).param_groups[1]
        ranks = {g.name: (g.mesh_dim, g.ranks) for g in manifest_of(record_of_rank).process_groups}
        pair, peers = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert ranks[present(group.shard_group)] == ("dp_shard", pair)
        assert ranks[present(group.all_reduce_group)] == ("dp_replicate", peers)
        assert (group.shard_world_size, group.replicate_world_size, group.mesh.shape) == (2, 2, [2, 2])


def test_resharding_to_a_smaller_group(recorded):
    for rank, record_of_rank in enumerate(open_run(recorded("int_reshard", 4).run).ranks):
        root, layer = manifest_of(record_of_rank).param_groups[:2]
        ranks = {g.name: g.ranks for g in manifest_of(record_of_rank).process_groups}
        assert (root.reshard_after_forward, layer.reshard_after_forward) == (False, 2)
        assert ranks[present(layer.post_forward_group)] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert ranks[present(layer.shard_group)] == [0, 1, 2, 3]


def test_two_roots_are_told_apart(recorded):
    record_of_rank = open_run(recorded("two_models", 2).run).ranks[0]
    manifest = manifest_of(record_of_rank)
    assert [(g.root, g.fqn) for g in manifest.param_groups] == [
        *((0, fqn) for fqn in ("", "layers.0", "layers.1")),
        *((1, fqn) for fqn in ("", "layers.0", "layers.1", "layers.2")),
    ]
    assert sorted(optimizer.class_name for optimizer in manifest.optimizers) == ["AdamW", "SGD"]
    assert manifest.traced_steps == [2, 3, 4]
    names = trace_names(record_of_rank.trace)
    # Per step: one forward, 1 + layers pre-backward and post-backward hooks each, and the final callback.
    assert names.count("fsdp2prof::root (0)") == 3 * (1 + 3 + 3 + 1)
    assert names.count("fsdp2prof::root (1)") == 3 * (1 + 4 + 4 + 1)


def test_frozen_groups_and_uneven_shards(recorded):
    frozen = manifest_of(open_run(recorded("adapters", 2).run).ranks[0]).param_groups
    trains = {group.fqn: group.requires_grad for group in frozen}
    assert trains["layers.0"] is trains["layers.1.up.base"] is False
    assert trains["layers.1"] is trains[""] is True

    short, padded = (
        manifest_of(record).param_groups[1].parameters[0]
        for record in reversed(open_run(recorded("uneven", 2).run).ranks)
    )
    assert (short.global_shape, short.local_shape, short.padded_local_shape) == ([7, 5], [3, 5], [4, 5])
    assert (padded.local_shape, padded.padded_local_shape) == ([4, 5], [4, 5])
    assert short.all_gather_numels == padded.all_gather_numels == [20]
    last = manifest_of(open_run(recorded("uneven", 2).run).ranks[1]).param_groups[3].parameters[0]
    assert (last.global_shape, last.local_shape, last.padded_local_shape) == ([1, 3], [0, 3], [1, 3])


def test_a_crash_on_one_rank_leaves_what_every_rank_had(tmp_path):
    run = tmp_path / "run"
    done = record(run, *TORCHRUN, "--nproc-per-node", 2, SCRIPTS / "ending.py", "--how", "raise", "--rank", 1)
    assert done.returncode == 1
    assert "rank 1: crashed: ValueError: no such token" in done.stderr
    opened = open_run(run)
    assert (opened.info.state, opened.info.exit_code) == ("crashed", 1)
    crashed = opened.rank(1)
    assert (manifest_of(crashed).state, manifest_of(crashed).error) == (
        "crashed",
        "ValueError: no such token",
    )
    assert manifest_of(opened.rank(0)).state in ("crashed", "partial")
    for record_of_rank in opened.ranks:
        assert manifest_of(record_of_rank).traced_steps == [2]
        assert "ProfilerStep#2" in trace_names(record_of_rank.trace)
    assert temporary_files(run) == []
    assert processes_of(run) == []


def test_a_killed_rank_is_marked_by_the_launcher(tmp_path):
    run = tmp_path / "run"
    done = record(run, sys.executable, SCRIPTS / "ending.py", "--how", "kill", env=one_rank())
    assert done.returncode == 128 + signal.SIGKILL
    opened = open_run(run)
    assert (opened.info.state, opened.info.exit_code) == ("crashed", 137)
    assert (manifest_of(opened.rank(0)).state, manifest_of(opened.rank(0)).error) == (
        "crashed",
        "ended without a message",
    )


@pytest.mark.parametrize(
    ("how", "number", "message"),
    [
        ("wait", signal.SIGTERM, "1 of 3 traced steps"),
        pytest.param("wait", signal.SIGINT, "1 of 3 traced steps", marks=pytest.mark.slow),
        ("hang", signal.SIGTERM, "main thread hung"),
    ],
)
def test_a_signal_reaches_the_training_and_ends_the_recording(tmp_path, how, number, message):
    run, ready = tmp_path / "run", tmp_path / "ready"
    training = [sys.executable, str(SCRIPTS / "ending.py"), "--how", how, "--ready", str(ready)]
    launcher = subprocess.Popen(
        [*RECORD, "-o", str(run), "--", *training],
        env=one_rank(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # tests may run with it ignored
    )
    deadline = time.monotonic() + PATIENCE_S
    while not ready.exists():
        assert time.monotonic() < deadline
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 128 + number
    assert message in errors
    opened = open_run(run)
    assert (opened.info.state, opened.info.exit_code) == ("partial", 128 + number)
    assert manifest_of(opened.rank(0)).state == "partial"
    assert manifest_of(opened.rank(0)).traced_steps == [2]
    if how == "wait":
        assert "ProfilerStep#2" in trace_names(present(opened.rank(0)).trace)
    assert processes_of(run) == []


def test_sigterm_under_torchrun_saves_all_ranks_and_leaves_no_process(tmp_path):
    run, ready = tmp_path / "run", tmp_path / "ready"
    script = [str(SCRIPTS / "ending.py"), "--how", "wait", "--rank", "0", "--ready", str(ready)]
    launcher = subprocess.Popen(
        [*RECORD, "-o", str(run), "--", *TORCHRUN, "--nproc-per-node", "2", *script],
        env=training_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launcher.terminate()
    launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode != 0
    opened = open_run(run)
    assert opened.info.state == "partial"
    # Rank 0 sleeps in Python; rank 1 waits for it inside a collective and hears of it when that fails.
    assert "ProfilerStep#2" in trace_names(present(opened.rank(0)).trace)
    assert {manifest_of(record_of_rank).state for record_of_rank in opened.ranks} <= {"partial", "crashed"}
    assert processes_of(run) == []


@pytest.mark.slow
def test_a_short_run_of_chosen_ranks_is_partial(tmp_path):
    run = tmp_path / "run"
    command = [*TORCHRUN, "--nproc-per-node", 2, SCRIPTS / "never_reshard.py", "--steps", 3]
    done = record(run, *command, options=["--ranks", "1"])
    assert done.returncode == 0, done.stderr
    assert "schedule incomplete: only 3 of 6 steps ran" in done.stderr
    opened = open_run(run)
    assert opened.info.state == "partial"
    left_out, chosen = opened.ranks
    assert (manifest_of(left_out).selected, left_out.trace, left_out.memory) == (False, None, None)
    assert manifest_of(left_out).state == "complete"
    assert (manifest_of(chosen).state, manifest_of(chosen).traced_steps) == ("partial", [2])
    assert "ProfilerStep#2" in trace_names(chosen.trace)


def test_at_step_without_memory(tmp_path):
    run = tmp_path / "run"
    options = ["--at-step", "1", "--warmup", "0", "--active", "2", "--no-memory"]
    done = record(
        run, sys.executable, SCRIPTS / "accumulation.py", "--steps", 4, options=options, env=one_rank()
    )
    assert done.returncode == 0, done.stderr
    manifest = manifest_of(open_run(run).rank(0))
    assert manifest.state == "complete"
    assert [step.kind for step in manifest.steps] == ["plain", "traced", "traced", "plain"]
    assert (
        manifest.traced_steps,
        manifest.memory_steps,
        manifest.memory_source,
    ) == ([1, 2], [], None)
    assert (
        trace_names(present(open_run(run).rank(0)).trace).count("fsdp2prof::root (0)") == 2 * 3
    )  # micro-batches


def test_an_isolated_interpreter_is_named_with_the_remedy(tmp_path):
    run = tmp_path / "run"
    command = [*TORCHRUN, "--nproc-per-node", 1, "--no-python", sys.executable, "-I", TINY, "--steps", 1]
    done = record(run, *command)
    assert done.returncode == 0, done.stderr
    expected = "rank 0: the recorder did not start: `python -I` disables it; start the rank without -I"
    assert f"fsdp2prof: {expected}" in done.stderr.splitlines()
    assert open_run(run).info.state == "partial"
    assert expected in open_run(run).info.messages


def test_dataloader_workers_are_left_alone(tmp_path):
    run, notes = tmp_path / "run", tmp_path / "notes"
    notes.mkdir()
    script = SCRIPTS / "loader_workers.py"
    done = record(run, sys.executable, script, "--steps", 8, env=one_rank(NOTES=str(notes)))
    assert done.returncode == 0, done.stderr
    assert [file.name for file in sorted(run.iterdir())] == ["rank-00000", "run.json"]
    forked, spawned = sorted(
        (json.loads(file.read_text()) for file in notes.iterdir()), key=lambda note: -note["session_module"]
    )
    assert forked == {"session_module": True, "excepthook": False, "wakeup_fd": -1}
    assert spawned == {"session_module": False, "excepthook": False, "wakeup_fd": -1}
    assert manifest_of(open_run(run).rank(0)).state == "complete"


@pytest.mark.parametrize(
    ("wrapper", "name"),
    [
        ("ddp", "DistributedDataParallel"),
        pytest.param("fsdp1", "FullyShardedDataParallel (FSDP1)", marks=pytest.mark.slow),
    ],
)
def test_another_wrapper_is_named(tmp_path, wrapper, name):
    done = record(tmp_path / "run", sys.executable, SCRIPTS / "other_wrappers.py", wrapper, env=one_rank())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss ")
    expected = f"fsdp2prof: this training uses {name}, not fully_shard: nothing was recorded"
    assert expected in done.stderr.splitlines()


def test_updates_in_place_end_the_steps_of_a_loop_without_an_optimizer(tmp_path):
    done = record(tmp_path / "run", sys.executable, SCRIPTS / "no_optimizer.py", "in_place", env=one_rank())
    assert done.returncode == 0, done.stderr
    manifest = manifest_of(open_run(tmp_path / "run").ranks[0])
    assert (manifest.state, manifest.micro_batches, len(manifest.steps)) == ("complete", 2, 11)


def test_a_loop_whose_updates_leave_no_mark_is_pointed_to_the_recorder(tmp_path):
    done = record(tmp_path / "run", sys.executable, SCRIPTS / "no_optimizer.py", "data", env=one_rank())
    assert done.returncode == 0, done.stderr
    (message,) = (line for line in done.stderr.splitlines() if line.startswith("fsdp2prof: "))
    assert message.startswith("fsdp2prof: rank 0: nothing was recorded: no optimizer stepped after a forward")
    assert "fsdp2prof.Recorder" in message
    assert open_run(tmp_path / "run").info.state == "partial"
