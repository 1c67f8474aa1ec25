"""Stacks of ranks that stand still: read as two tools write them, and told by the user's own line."""

from __future__ import annotations

import faulthandler
import threading
from pathlib import Path

import pytest
from support.flight_dumps import call, write

from fsdp2prof.analyzers.hang.groups import outside_collectives, stack_of
from fsdp2prof.errors import InputError
from fsdp2prof.files import write_json
from fsdp2prof.manifest import RankManifest, RunInfo
from fsdp2prof.readers.job.stacks import looks_like_stacks, read_stacks
from fsdp2prof.results.hang import HangStack
from fsdp2prof.tables.flight_recorder import RankStacks, StackFrame, ThreadStack
from fsdp2prof.workflows.hang import analyze_hang

SITE = "/env/lib/python3.12/site-packages"
LOADER = (f"{SITE}/torch/utils/data/dataloader.py", "_try_get_data")
QUEUE = ("/usr/lib/python3.12/multiprocessing/queues.py", "get")
GATHER = (f"{SITE}/torch/distributed/distributed_c10d.py", "all_gather_into_tensor")
FSDP = (f"{SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "unshard")
SAVE = (f"{SITE}/torch/distributed/checkpoint/state_dict_saver.py", "save")
MINE = ("/home/me/train.py", "main")

PY_SPY = """Process 4711: python train.py
Python v3.12.3 (/usr/bin/python3.12)

Thread 4711 (active): "MainThread"
    clock_nanosleep (libc.so.6)
    0x7fb4cc334f7a (libffi.so.8.1.2)
    _call_function_pointer (/tmp/Python-3.12/Modules/_ctypes/callproc.c:943)
    hold (/home/me/data.py:6)
    <module> (/home/me/train.py:70)
Thread 4712 (idle): "worker (1)"
    wait (/usr/lib/python3.12/threading.py:359)
"""


def stood(*calls: tuple[str, str], rank: int = 0) -> HangStack:
    frames = [StackFrame(file, 10 + n, name) for n, (file, name) in enumerate(calls)]
    main = ThreadStack(name="MainThread", frames=frames)
    found = stack_of(RankStacks(rank=rank, source="x", tool="faulthandler", main=main, others=[]))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("calls", "own", "doing"),
    [
        ([QUEUE, LOADER, MINE], "main", "loading_data"),
        ([GATHER, FSDP, MINE], "main", "communicating"),
        ([FSDP, MINE], "main", "sharding"),
        ([("/home/me/data.py", "__getitem__"), LOADER, MINE], "__getitem__", "loading_data"),
        ([QUEUE, SAVE, MINE], "main", "checkpointing"),
        ([QUEUE, MINE], "main", "waiting_for_process"),
        ([("/usr/lib/python3.12/pdb.py", "interaction"), MINE], "main", "debugging"),
        ([MINE], "main", None),
        (
            [GATHER, (f"{SITE}/trainer/loop.py", "fit"), ("<frozen runpy>", "_run_code")],
            "fit",
            "communicating",
        ),
        ([GATHER, ("/src/pytorch/torch/nn/modules/module.py", "_call_impl"), MINE], "main", "communicating"),
        ([GATHER], "all_gather_into_tensor", "communicating"),
    ],
)
def test_the_users_own_line_and_what_it_does(
    calls: list[tuple[str, str]], own: str, doing: str | None
) -> None:
    found = stood(*calls)
    assert (found.own.function, found.doing, found.at.function) == (own, doing, calls[0][1])


def test_what_the_recorder_itself_does_is_left_out() -> None:
    found = stood(("/env/fsdp2prof/recorder/rank/ending.py", "_on_sigterm"), LOADER, MINE)
    assert (found.at.function, len(found.frames)) == ("_try_get_data", 2)


def test_py_spys_text_is_read_with_native_frames(tmp_path: Path) -> None:
    file = tmp_path / "rank3.txt"
    file.write_text(PY_SPY)
    stacks = read_stacks(file, 3)
    assert (stacks.tool, len(stacks.others), stacks.others[0].name) == ("py-spy", 1, "worker (1)")
    found = stack_of(stacks)
    assert found is not None
    assert (found.own.short, found.own.function, found.native) == ("data.py:6", "hold", "clock_nanosleep")
    assert [one.line for one in found.frames] == [None, None, 943, 6, 70]


def test_faulthandlers_own_text_is_read(tmp_path: Path) -> None:
    file, leave = tmp_path / "stacks_0.txt", threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    with file.open("w") as opened:
        faulthandler.dump_traceback(opened)
    leave.set()
    thread.join()
    assert looks_like_stacks(file)
    stacks = read_stacks(file, 0)
    assert stacks.main is not None
    assert stacks.main.frames[0].function == "test_faulthandlers_own_text_is_read"
    assert any(frame.function == "wait" for one in stacks.others for frame in one.frames)


def test_what_holds_no_stack_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rank0.txt"
    file.write_bytes(b"Thread of thoughts\n  File \xff\n" + b"x" * 100_000)
    assert not looks_like_stacks(file)
    with pytest.raises(InputError, match="no thread stack"):
        read_stacks(file, 0)
    with pytest.raises(InputError, match="log of a timeout or stacks of a rank"):
        analyze_hang(tmp_path)


@pytest.mark.parametrize("name", ["rank{}.log", "pyspy_{}.out", "dump-{}.err"])
def test_stacks_are_known_by_what_is_in_them(name: str, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / name.format(rank)).write_text(PY_SPY)
    assert [one.ranks for one in analyze_hang(tmp_path).places] == [[0, 1]]


def test_stacks_of_several_processes_are_not_one_ranks(tmp_path: Path) -> None:
    for file, said in ((tmp_path / "all.txt", "end in the rank"), (tmp_path / "all_0.txt", "of 3 processes")):
        file.write_text(3 * PY_SPY)
        with pytest.raises(InputError, match=said):
            analyze_hang(file)


def test_stacks_alone_say_who_is_outside(tmp_path: Path) -> None:
    for rank, frame in enumerate((GATHER, LOADER, GATHER)):
        thread = f"Thread 0x{rank:x} [MainThread] (most recent call first):"
        calls = f'  File "{frame[0]}", line 5 in {frame[1]}\n  File "/home/me/train.py", line 9 in main\n'
        (tmp_path / f"stacks_{rank}.txt").write_text(f"{thread}\n{calls}")
    found = analyze_hang(tmp_path)
    assert (found.cause, found.culprits) == ("stacks", [1])
    assert [one.ranks for one in found.places] == [[1], [0, 2]]
    assert found.verdict[1] == (
        "Rank 1 is in `main` (train.py:9), loading data; ranks 0, 2 in `main` (train.py:9), in a collective."
    )
    assert "data" in found.verdict[-1]
    assert outside_collectives({0: stood(LOADER), 1: stood(MINE)}) == []


def test_the_newest_stacks_of_a_rank_stand_beside_its_dump(tmp_path: Path) -> None:
    write(tmp_path, {0: [call("all_reduce", 8, 1, state="started")], 1: []}, {"0": [0, 1]})
    (tmp_path / "stacks_1.txt").write_text(PY_SPY)
    (tmp_path / "py-spy of host").write_text(PY_SPY)
    found = analyze_hang(tmp_path)
    assert (found.cause, found.culprits) == ("not_come", [1])
    assert "Rank 1 is in `hold` (data.py:6), inside `clock_nanosleep`." in found.verdict
    assert any("without a rank in the file name" in one for one in found.warnings)
    assert found.ranks[0].stack is None


def test_a_rank_that_crashed_outside_collectives_is_to_blame(tmp_path: Path) -> None:
    """Rank 0 failed inside a collective since rank 1 was gone; rank 2 was told to end."""
    write_json(tmp_path / "run.json", RunInfo(state="crashed"))
    errors = ("RuntimeError: Connection closed by peer", "ValueError: no such file", "SIGTERM")
    for rank, (error, inner) in enumerate(zip(errors, (GATHER, LOADER, GATHER), strict=True)):
        folder = tmp_path / f"rank-0000{rank}"
        folder.mkdir()
        state = "crashed" if rank < 2 else "partial"
        one = RankManifest(rank=rank, world_size=3, state=state, error=error)  # type: ignore[arg-type]
        write_json(folder / "manifest.json", one)
        calls = f'  File "{inner[0]}", line 5 in {inner[1]}\n  File "/home/me/train.py", line 9 in main\n'
        (folder / "stacks.txt").write_text(f"Main thread 0x1 (most recent call first):\n{calls}")
    found = analyze_hang(tmp_path)
    assert (found.cause, found.culprits, found.places[0].ranks) == ("crashed", [1], [1])
    assert found.verdict[0] == "Rank 1 ended with ValueError: no such file."
    assert [one.error for one in found.ranks] == list(errors)
