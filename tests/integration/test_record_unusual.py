"""Trainings that do unusual things, and unusual ways to start one: recorded, they do the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.workflows.check import check_run
from fsdp2prof.workflows.description import describe
from fsdp2prof.workflows.estimate import estimate_communication
from fsdp2prof.workflows.inspect import inspect_run_sharding

from .alone_and_recorded import RECORD, compare, ended, one_rank, processes_that_mention
from .conftest import SCRIPTS, free_port, script_path, torchrun, training_environment

pytestmark = pytest.mark.slow

UNUSUAL = str(script_path("unusual"))


@pytest.mark.parametrize(
    "way",
    [
        "in_a_loop_of_asyncio",
        "in_threads",
        "in_a_thread",
        "compiled",
        "beside_ddp",
        "with_pools",
        "elsewhere",
        "saving",
        "step_in_backward",
        "saved_on_the_host",
        "by_methods",
        "replicated",
        "dropped",
        "under_modes",
        "with_children",
        "listing",
        "tracing",
        "with_a_helper",
    ],
)
def test_of_ways_to_train(tmp_path: Path, way: str) -> None:
    run = compare(tmp_path, [sys.executable, UNUSUAL, "--way", way], state={"complete"})
    (rank,) = open_run(run).ranks
    assert rank.manifest is not None
    assert rank.manifest.traced_steps == [1]
    assert rank.trace is not None
    if way in ("listing", "tracing"):
        assert rank.manifest.memory_steps == [2, 3]
    if way == "with_a_helper":
        assert len(rank.manifest.steps) == 7


def test_of_a_training_that_waits_for_any_child(tmp_path: Path) -> None:
    """A summary is not made by a child of the rank."""
    run, command = tmp_path / "run", [sys.executable, UNUSUAL, "--way", "waiting"]
    alone = ended(command, tmp_path / "alone")
    assert ended([*RECORD, "--summary", "-o", str(run), "--", *command], tmp_path / "recorded") == alone
    assert alone[0] == 0
    assert {file.name for file in (run / "rank-00000").iterdir()} == {"manifest.json", "summary.json"}
    assert list(run.rglob(".*")) == []


def test_of_a_script_that_imports_dynamo_first(tmp_path: Path) -> None:
    """FSDP2 is then imported while torch._dynamo is half imported, as Lightning does."""
    script = tmp_path / "train.py"
    lines = ["import torch._dynamo, runpy, sys", f"sys.path.insert(0, {str(SCRIPTS)!r})"]
    lines += [f"runpy.run_path({UNUSUAL!r}, run_name='__main__')"]
    script.write_text("\n".join(lines))
    run = compare(tmp_path, [sys.executable, str(script), "--way", "saving"], state={"complete"})
    (rank,) = open_run(run).ranks
    assert rank.trace is not None


def test_what_a_replicated_model_is_called(tmp_path: Path) -> None:
    run = compare(tmp_path, [*torchrun(Path(UNUSUAL), 2), "--way", "replicated"], state={"complete"})
    assert check_run(run).verdict[0] == "14 parameters are replicated over 2 ranks as their meshes define."
    assert [one.placements for one in inspect_run_sharding(run).parameters] == [["Replicate()"]] * 14
    (all_reduces,) = estimate_communication(describe(from_run=run, given={}, policy={})).per_step.items()
    assert (all_reduces[0], all_reduces[1].count) == ("all_reduce", 3)


@pytest.mark.parametrize("note", [["x" * 100_000] * 10, ["é\n\x1b[31m"] * 2000], ids=["a-megabyte", "many"])
def test_of_a_very_long_command_line(tmp_path: Path, note: list[str]) -> None:
    run = compare(tmp_path, [sys.executable, UNUSUAL, "--note", *note], state={"complete"})
    assert json.loads((run / "run.json").read_text())["command"][-len(note) :] == note


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_of_a_module(tmp_path: Path, launcher: str) -> None:
    where = {"PYTHONPATH": str(SCRIPTS), "PYTHONDONTWRITEBYTECODE": "1"}
    if launcher == "python":
        compare(tmp_path, [sys.executable, "-m", "unusual"], state={"complete"}, env=one_rank(**where))
        return
    command = torchrun(Path("unusual"), 2)
    command[-1:] = ["-m", "unusual"]
    compare(tmp_path, command, state={"complete"}, env=training_environment(**where))


def test_of_accelerate_launch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the launcher is accelerate's own")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--use_fsdp", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", "0", UNUSUAL]
    run = compare(tmp_path, command, state={"complete"}, env=training_environment())
    assert [rank.rank for rank in open_run(run).ranks] == [0, 1]


def test_of_a_reader_that_leaves(tmp_path: Path) -> None:
    """``record ... | head``: nobody reads stdout any more; the same exit code, and what was kept stays."""
    codes = []
    for prefix in ([], [*RECORD, "-o", str(tmp_path / "run"), "--"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [*prefix, sys.executable, UNUSUAL],
            stdout=writer,
            stderr=subprocess.PIPE,
            env=one_rank(),
            timeout=200,
            check=False,
        )
        os.close(writer)
        codes.append(done.returncode)
    assert codes[0] == codes[1] != 0
    assert open_run(tmp_path / "run").info.state == "crashed"


def test_of_stderr_that_nobody_reads(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    compare_stderr = [*RECORD, "-o", str(tmp_path / "run"), "--", sys.executable, UNUSUAL]
    done = subprocess.run(
        compare_stderr, stdout=subprocess.PIPE, stderr=writer, env=one_rank(), timeout=200, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stdout) == ended([sys.executable, UNUSUAL], tmp_path / "alone")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_of_closed_streams(tmp_path: Path, closed: str) -> None:
    without = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    alone = ended([*without, sys.executable, UNUSUAL], tmp_path / "alone")
    record = [*RECORD, "-o", str(tmp_path / "run"), "--"]
    assert ended([*without, *record, sys.executable, UNUSUAL], tmp_path / "recorded") == alone
    assert alone[0] == 0
    assert open_run(tmp_path / "run").info.state == "complete"


def test_of_a_folder_that_is_named_from_here(tmp_path: Path) -> None:
    """``-o run`` is relative to where the command began, not to where the training went."""
    command = [sys.executable, UNUSUAL, "--way", "elsewhere"]
    alone = ended(command, tmp_path / "alone")
    assert ended([*RECORD, "-o", "run", "--", *command], tmp_path / "recorded") == alone
    assert [entry.name for entry in (tmp_path / "recorded").iterdir()] == ["run"]
    assert open_run(tmp_path / "recorded" / "run").info.state == "complete"


def test_of_two_jobs_at_once(tmp_path: Path) -> None:
    """Two launchers on one host, each with a recording of its own: they stay apart."""
    command = torchrun(Path(UNUSUAL), 2)
    alone = ended(command, tmp_path / "alone", env=training_environment())
    both = [
        subprocess.Popen(
            [*RECORD, "-o", str(tmp_path / name), "--", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=training_environment(),
        )
        for name in ("first", "second")
    ]
    for name, job in zip(("first", "second"), both, strict=True):
        output, _ = job.communicate(timeout=200)
        assert (job.returncode, output) == alone
        opened = open_run(tmp_path / name)
        assert (opened.info.state, [rank.rank for rank in opened.ranks]) == ("complete", [0, 1])


def test_of_two_nodes_under_one_recording(tmp_path: Path) -> None:
    """A command that starts both of its launchers itself: all ranks are in one run."""
    node = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend static"
    node += f" --rdzv-endpoint 127.0.0.1:{free_port()} --node-rank"
    command = ["sh", "-c", f"{node} 1 {UNUSUAL} & {node} 0 {UNUSUAL}; code=$?; wait; exit $code"]
    run = compare(tmp_path, command, state={"complete"}, env=training_environment())
    assert [rank.rank for rank in open_run(run).ranks] == [0, 1]


def test_of_a_reset_pythonpath(tmp_path: Path) -> None:
    command = ["sh", "-c", f"unset PYTHONPATH; exec {sys.executable} {UNUSUAL}"]
    run = compare(tmp_path, command, state={"partial"})
    assert "PYTHONPATH" in " ".join(open_run(run).info.messages)


def test_of_an_interpreter_that_cannot_import_the_recorder(tmp_path: Path) -> None:
    """One line names it, whatever the number of processes."""
    hiding = "import runpy, sys; sys.modules['fsdp2prof.recorder'] = None; sys.argv.pop(0); "
    hiding += f"sys.path.insert(0, {str(SCRIPTS)!r}); runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", hiding, UNUSUAL]
    run = compare(tmp_path, command, state={"partial"})
    (message,) = open_run(run).info.messages
    assert message.startswith(f"not recorded: {sys.executable} cannot load the recorder (ModuleNotFoundError")


def test_of_an_environment_of_which_a_part_is_handed_on(tmp_path: Path) -> None:
    command = ["env", "-u", "FSDP2PROF_ALIVE", sys.executable, UNUSUAL]
    compare(tmp_path, command, state={"complete"})


def test_of_every_rank_raising(tmp_path: Path) -> None:
    command = torchrun(script_path("endings"), 2, "--how", "all_raise")
    run = compare(tmp_path, command, state={"crashed"}, env=training_environment())
    states = [rank.manifest.state for rank in open_run(run).ranks if rank.manifest is not None]
    assert "crashed" in states


def test_of_a_restart_of_two_ranks(tmp_path: Path) -> None:
    """Each attempt with a store of its own: in a shared one a rank may find where a dead one listened.

    That race is torch's own: without a recorder 7 of 8 restarts of this script over a shared store failed or
    hung.
    """
    command = torchrun(script_path("endings"), 2, "--how", "restart")
    command.insert(command.index("--standalone"), "--max-restarts=1")
    apart = training_environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    compare(tmp_path, command, state={"complete"}, env=apart)


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_a_recorder_that_is_killed(tmp_path: Path, ranks: int) -> None:
    """SIGKILL of ``fsdp2prof record`` itself: the training goes on, its ranks finish the recording."""
    run, said = tmp_path / "run", tmp_path / "said"
    script = [UNUSUAL, "--way", "as_usual"]
    command = [sys.executable, *script] if ranks == 1 else torchrun(Path(script[0]), ranks, *script[1:])
    environment = one_rank() if ranks == 1 else training_environment()
    alone = ended(command, tmp_path / "alone", env=environment)
    with said.open("wb") as output:
        launcher = subprocess.Popen(
            [*RECORD, "-o", str(run), "--", *command],
            stdout=output,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    deadline = time.monotonic() + 100
    while not said.stat().st_size:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    launcher.kill()
    assert launcher.wait() == -signal.SIGKILL
    while processes_that_mention(str(run)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert said.read_bytes() == alone[1]
    opened = open_run(run)
    assert [rank.manifest.state for rank in opened.ranks if rank.manifest] == ["complete"] * ranks
    assert opened.info.state == "running"
