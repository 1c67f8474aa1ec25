"""Hangs from the lines that torch's NCCL watchdog writes into a training's log."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from support.cli import call

from fsdp2prof.errors import FlightRecorderError
from fsdp2prof.workflows.hang import analyze_hang

DEFAULT = "PG ID 0 PG GUID 0(default_pg)"


def head(rank: int, line: int) -> str:
    return f"[rank{rank}]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:{line}]"


def timed_out(rank: int, seq: int, op: str = "ALLREDUCE", numel: tuple[int, int] = (8, 8)) -> str:
    """A rank's first line."""
    work = f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel[0]}, NumelOut={numel[1]}, Timeout(ms)=600000)"
    said = f"[Rank {rank}] Watchdog caught collective operation timeout: {work}"
    return f"{head(rank, 616)} {said} ran for 600020 milliseconds before timing out."


def at_work(rank: int, seq: int, enqueued: int, completed: int, group: str = DEFAULT) -> str:
    """The line after it, as torch 2.6 and newer write it."""
    status = f"PG status: last enqueued work: {enqueued}, last completed work: {completed}"
    said = f"[{group} Rank {rank}]  failure detected by watchdog at work sequence id: {seq} {status}"
    return f"{head(rank, 1785)} {said}"


def at_work_before(rank: int, seq: int, enqueued: int, completed: int, group: str = DEFAULT) -> str:
    """The same as torch 2.3 to 2.5 write it."""
    said = f"[{group} Rank {rank}] Exception (either an error or timeout) detected by watchdog at work: {seq}"
    status = f"last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}."
    return f"{head(rank, 1664)} {said}, {status}"


def asked(rank: int, enqueued: int, completed: int, group: str = DEFAULT) -> str:
    """A rank that has not timed out, when another's timeout makes it dump."""
    said = (
        f"[{group} Rank {rank}] Received a dump signal due to a collective timeout from  rank 0 and we will"
    )
    status = f"Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}."
    return f"{head(rank, 1575)} {said} try our best to dump the debug info. {status}"


def write(folder: Path, *lines: str) -> Path:
    path = folder / "train.log"
    path.write_text(
        "step 34 loss 1.2\n" + "\n".join(lines) + "\n[rank0]: Traceback (most recent call last):\n"
    )
    return path


@pytest.mark.parametrize("second", [at_work, at_work_before])
def test_posted_everywhere_and_never_completed(tmp_path: Path, second) -> None:
    lines = [
        line
        for rank in range(3)
        for line in (
            timed_out(rank, 35, "_REDUCE_SCATTER_BASE", (300, 100)),
            second(rank, 35, 40 + rank, 34),
        )
    ]
    found = analyze_hang(write(tmp_path, *lines))
    assert (found.cause, found.culprits, len(found.standings)) == ("inside", [], 1)
    (standing,) = found.standings
    assert (standing.came, standing.not_come, standing.no_dump) == ([0, 1, 2], [], [])
    said = standing.call
    assert (said.op, said.seq, said.input_sizes, said.output_sizes) == (
        "reduce_scatter",
        35,
        [[300]],
        [[100]],
    )
    assert "default_pg" in found.verdict[0]


def test_one_rank_has_not_come(tmp_path: Path) -> None:
    """Rank 2 says itself that it has ended 34 of 34, when the others' timeout makes it dump."""
    lines = [
        timed_out(0, 35),
        at_work(0, 35, 38, 34),
        timed_out(1, 35),
        at_work(1, 35, 38, 34),
        asked(2, 34, 34),
    ]
    found = analyze_hang(write(tmp_path, *lines))
    assert (found.cause, found.culprits) == ("not_come", [2])
    assert [(one.rank, one.behind) for one in found.ranks] == [(0, 0), (1, 0), (2, 4)]


def test_one_rank_says_nothing_of_collectives(tmp_path: Path) -> None:
    lines = [timed_out(0, 35), at_work(0, 35, 38, 34), timed_out(1, 35), at_work(1, 35, 38, 34)]
    found = analyze_hang(write(tmp_path, *lines, "[rank2]: RuntimeError: out of files"))
    assert (found.cause, found.culprits) == ("no_dump", [2])
    assert "rank 2" in found.verdict[0]


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (timed_out(1, 35, "_ALLGATHER_BASE", (4, 8)), "op"),
        (timed_out(1, 35, "ALLREDUCE", (9, 9)), "size"),
        (timed_out(1, 37), "diverged"),
    ],
)
def test_ranks_diverged(tmp_path: Path, other: str, kind: str) -> None:
    seq = 37 if kind == "diverged" else 35
    lines = [timed_out(0, 35), at_work(0, 35, 38, 34), other, at_work(1, seq, 38, seq - 1)]
    lines += [timed_out(2, 35), at_work(2, 35, 38, 34)]
    found = analyze_hang(write(tmp_path, *lines))
    assert (found.cause, found.culprits, found.mismatches[0].kind) == ("mismatch", [1], kind)


@pytest.mark.parametrize(("numel", "missing"), [((100, 400), [8]), ((100, 500), [8, 12])])
def test_a_silent_rank_of_a_mesh_dimension_is_named(
    tmp_path: Path, numel: tuple[int, int], missing: list[int]
) -> None:
    """Ranks 4, 6 and 10 have places 0, 1 and 3: every second rank, as many as the all-gather's sizes say."""
    group = "PG ID 2 PG GUID 9(mesh_dp_shard)"
    lines = [asked(8, -1, -1)]
    for place, rank in ((0, 4), (1, 6), (3, 10)):
        lines.append(timed_out(rank, 35, "_ALLGATHER_BASE", numel))
        lines.append(at_work(rank, 35, 35, 34, group).replace(f" Rank {rank}]", f" Rank {place}]"))
    found = analyze_hang(write(tmp_path, *lines))
    assert (found.standings[0].came, found.standings[0].ranks_known) == ([4, 6, 10], True)
    assert sorted([*found.standings[0].not_come, *found.standings[0].no_dump]) == missing
    assert 8 in found.culprits


def test_ranks_of_an_unknown_group_are_not_called_all(tmp_path: Path) -> None:
    lines = [timed_out(rank, 35).replace(f"[rank{rank}]:", "") for rank in range(2)]
    found = analyze_hang(write(tmp_path, *lines))
    assert found.verdict[0].startswith("Ranks 0, 1 issued all-reduce 35")
    assert found.verdict[-1].startswith("If these are all its ranks")


def test_a_rank_that_only_dumps_is_read_from_its_own_file(tmp_path: Path) -> None:
    for rank, lines in enumerate([[timed_out(0, 35), at_work(0, 35, 35, 34)], [asked(1, 34, 34)]]):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text("\n".join(lines) + "\n")
    found = analyze_hang(tmp_path)
    assert (found.cause, found.culprits) == ("not_come", [1])


def test_numbers_of_groups_that_no_line_names_are_not_compared(tmp_path: Path) -> None:
    """Older torch names no group: 10 of one and 20 of another may both be right."""
    lines = [
        line.replace("[rank0]:", "").replace("[rank1]:", "") for line in (timed_out(0, 10), timed_out(1, 20))
    ]
    found = analyze_hang(write(tmp_path, *lines))
    assert found.mismatches == []
    assert found.cause == "not_come"
    assert found.culprits == []


def test_logs_of_ranks_in_files_of_their_own_and_packed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        text = "\n".join([timed_out(rank, 35), at_work(rank, 35, 38, 34)])
        (tmp_path / f"rank_{rank}.log.gz").write_bytes(
            gzip.compress(text.replace(f"[rank{rank}]:", "").encode())
        )
    found = analyze_hang(tmp_path)
    assert (found.cause, [one.rank for one in found.ranks]) == ("inside", [0, 1])
    ended = call(capfd, "analyze", "hang", tmp_path)
    assert ended.code == 0
    assert "all-reduce 35" in ended.out


GATHER = ("_ALLGATHER_BASE", (8, 32))
"""Of four ranks, as its sizes say."""


def gathers(rank: int, seq: int = 50, **at: int) -> list[str]:
    return [timed_out(rank, seq, *GATHER), at_work(rank, seq, at.get("enqueued", seq + 2), seq - 1)]


def test_a_rank_that_writes_nothing_is_missing_from_the_gather_of_the_others(tmp_path: Path) -> None:
    found = analyze_hang(write(tmp_path, *(line for rank in (0, 1, 2) for line in gathers(rank))))
    assert (found.cause, found.culprits) == ("no_dump", [3])


def test_messages_that_share_a_line_are_read_one_by_one(tmp_path: Path) -> None:
    found = analyze_hang(write(tmp_path, "".join(line for rank in (0, 1, 3) for line in gathers(rank))))
    assert (found.cause, found.culprits) == ("no_dump", [2])


def test_a_log_that_ends_within_a_message(tmp_path: Path) -> None:
    lines = [line for rank in range(4) for line in gathers(rank)]
    found = analyze_hang(write(tmp_path, *lines[:-1], lines[-1][:90]))
    assert (found.cause, len(found.standings)) == ("inside", 1)


def test_a_log_of_two_starts_tells_of_the_second(tmp_path: Path) -> None:
    first = [line for rank in (0, 1, 3) for line in gathers(rank)]
    second = [line for rank in (0, 1, 2) for line in gathers(rank, 7)]
    found = analyze_hang(write(tmp_path, *first, "restarting", *second))
    assert (found.culprits, found.standings[0].call.seq) == ([3], 7)


def test_ranks_behind_the_last_one_that_writes_may_exist(tmp_path: Path) -> None:
    """All-reduces do not say how many ranks take part."""
    lines = [line for rank in range(3) for line in (timed_out(rank, 9), at_work(rank, 9, 9, 8))]
    found = analyze_hang(write(tmp_path, *lines))
    assert found.verdict[0].startswith("Ranks 0, 1, 2 issued all-reduce 9")
    assert found.verdict[-1].startswith("If these are all its ranks")


def test_the_timeout_line_of_torch_2_2(tmp_path: Path) -> None:
    said = "Timeout at NCCL work: 50, last enqueued NCCL work: 52, last completed NCCL work: 49."
    lines = [
        line
        for rank in range(4)
        for line in (timed_out(rank, 50, *GATHER), f"{head(rank, 1182)} [PG 0 Rank {rank}] {said}")
    ]
    found = analyze_hang(write(tmp_path, *lines))
    assert found.verdict[0].startswith("All of ranks 0, 1, 2, 3 issued all-gather 50 (group 0")


def test_a_log_with_only_the_line_after_the_timeout(tmp_path: Path) -> None:
    """A log that is cut, or filtered by rank."""
    said = "Timeout at NCCL work: 50, last enqueued NCCL work: 52, last completed NCCL work: 49."
    found = analyze_hang(write(tmp_path, f"{head(4, 1709)} [PG 0 (default_pg) Rank 4] {said}"))
    assert (found.cause, found.culprits, found.standings[0].call.seq) == ("no_dump", [0, 1, 2, 3], 50)


def test_a_log_of_one_rank_asks_for_the_others(tmp_path: Path) -> None:
    found = analyze_hang(write(tmp_path, timed_out(2, 35)))
    assert (found.cause, found.culprits) == ("not_come", [])
    assert "no other rank left a dump" in found.verdict[0]
    assert "logs or dumps of all ranks" in found.verdict[-1]


def test_a_watchdog_that_stopped_itself_names_no_collective(tmp_path: Path) -> None:
    said = "Heartbeat monitor timed out! Process will be terminated after dumping debug info."
    log = write(tmp_path, *(f"{head(rank, 1316)} [PG 0 Rank {rank}] {said}" for rank in (0, 3)))
    with pytest.raises(FlightRecorderError, match="the watchdog itself stopped on ranks 0 and 3"):
        analyze_hang(log)
    log.write_text(log.read_text() + timed_out(1, 35))
    assert analyze_hang(log).standings[0].call.seq == 35


def test_a_timeout_that_a_logger_broke_into_lines(tmp_path: Path) -> None:
    lines = [timed_out(rank, 35).replace("timeout: ", "timeout:\n    ") for rank in range(2)]
    found = analyze_hang(write(tmp_path, *lines))
    assert (found.standings[0].came, found.standings[0].call.seq) == ([0, 1], 35)


def fingerprint(rank: int, op: str, size: int) -> str:
    options = "TensorOptions(dtype=float (default), device=cpu)"
    shape = f"TensorShape=[{size}], TensorDtypes=Float, TensorDeviceTypes={options}"
    return f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=5, OpType={op}, {shape})"


@pytest.mark.parametrize(
    ("op", "size", "kind"), [("BROADCAST", 8, "op"), ("ALLREDUCE", 9, "size"), ("ALLREDUCE", 8, None)]
)
def test_fingerprints_of_ranks_that_differ(tmp_path: Path, op: str, size: int, kind: str | None) -> None:
    """``TORCH_DISTRIBUTED_DEBUG=DETAIL`` on gloo, as torch 2.13 writes it."""
    told = [fingerprint(0, "ALLREDUCE", 8), fingerprint(1, op, size)]
    error = "RuntimeError: Detected mismatch between collectives on ranks."
    lines = [f"[rank{i}]: {error} {told[i]}, but {told[1 - i]}.Collectives differ" for i in range(2)]
    found = analyze_hang(write(tmp_path, *lines))
    assert [one.kind for one in found.mismatches] == ([kind] if kind else [])
    assert [(one.call.op, one.call.seq) for one in found.standings] == [("all_reduce", 5)]


def test_fingerprints_in_a_log_without_ranks(tmp_path: Path) -> None:
    """Also without the comma that torch leaves out where the other rank's tensors are unknown."""
    other = "Rank 3 is running collective: CollectiveFingerPrint(SequenceNumber=0OpType=GATHER)"
    found = analyze_hang(write(tmp_path, f"RuntimeError: {fingerprint(2, 'ALLREDUCE', 8)}, but {other}.Coll"))
    assert [(one.rank, one.standing_in and one.standing_in.op) for one in found.ranks] == [
        (2, "all_reduce"), (3, "gather"),
    ]  # fmt: skip
    assert found.cause == "mismatch"


@pytest.mark.parametrize("late", [[1], [1, 3]])
def test_ranks_that_miss_a_monitored_barrier(tmp_path: Path, late: list[int]) -> None:
    names = f"Rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
    lines = [f"[rank0]: RuntimeError: [Rank 0]: {names} failed to pass monitoredBarrier in 3000 ms"]
    found = analyze_hang(write(tmp_path, *lines))
    assert (found.cause, found.culprits) == ("not_come", late)
    assert found.standings[0].call.op == "barrier"


def test_a_timeout_of_gloo_names_the_ranks_that_say_nothing(tmp_path: Path) -> None:
    gloo = (
        "RuntimeError: [/gloo/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"
    )
    found = analyze_hang(write(tmp_path, f"[rank0]: {gloo}", "[rank1]: ValueError: no such file"))
    assert (found.cause, found.culprits) == ("no_dump", [1])


GLOO_TIMEOUT = (
    "RuntimeError: [/gloo/unbound_buffer.cc:78] Timed out waiting 4000ms for {} operation to complete"
)
GLOO_GONE = "RuntimeError: [/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:2413"
GLOO_RESET = (
    "RuntimeError: [/gloo/transport/tcp/pair.cc:469] Read error [10.0.0.1]:2413: Connection reset by peer"
)


@pytest.mark.parametrize("operation", ["recv", "send"])
def test_ranks_of_gloo_whose_peer_has_gone_have_waited_too(tmp_path: Path, operation: str) -> None:
    """Rank 0 times out and exits, which ranks 1 and 2 notice; rank 3 sleeps."""
    lines = [f"[rank0]: {GLOO_TIMEOUT.format(operation)}", f"[rank1]: {GLOO_GONE}", f"[rank2]: {GLOO_RESET}"]
    found = analyze_hang(write(tmp_path, *lines, "[rank3]: INFO saving a sample"))
    assert (found.cause, found.culprits) == ("no_dump", [3])
    assert found.standings[0].came == [0, 1, 2]


def test_a_rank_whose_peer_has_gone_may_have_come_late(tmp_path: Path) -> None:
    """No rank is silent: one of them was late, and which is not known."""
    lines = [f"[rank0]: {GLOO_TIMEOUT.format('recv')}", f"[rank1]: {GLOO_TIMEOUT.format('recv')}"]
    found = analyze_hang(write(tmp_path, *lines, f"[rank2]: {GLOO_GONE}", f"[rank3]: {GLOO_GONE}"))
    assert found.culprits == []
    assert (found.standings[0].came, found.standings[0].ranks_known) == ([0, 1], False)


def test_a_closed_connection_that_is_not_gloos_excuses_no_rank(tmp_path: Path) -> None:
    lines = [f"[rank0]: {GLOO_TIMEOUT.format('recv')}", f"[rank1]: {GLOO_GONE}"]
    lines.append("[rank2]: ConnectionResetError: [Errno 104] Connection reset by peer")
    assert analyze_hang(write(tmp_path, *lines)).culprits == [2]


MISSED = "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms"


@pytest.mark.parametrize(
    "lines",
    [
        [f"[rank4]: {MISSED}"],
        [f"[rank0]: {MISSED}", f"[rank4]: {MISSED}"],
        [f"[rank0]: {MISSED}", "[rank2]: RuntimeError: Rank 1 successfully reached monitoredBarrier, but"],
    ],
)
def test_a_barrier_of_some_ranks_accuses_no_rank_of_the_job(tmp_path: Path, lines: list[str]) -> None:
    """Ranks in it are those of its process group: the speaker has another rank in the job."""
    found = analyze_hang(write(tmp_path, *lines, "[rank1]: INFO saving a sample"))
    assert found.culprits == []
    assert 1 not in {one.rank for one in found.ranks}
    assert "without its rank 1" in found.standings[0].call.group


def test_ranks_that_no_job_has_do_not_miss_a_barrier(tmp_path: Path) -> None:
    found = analyze_hang(write(tmp_path, f"[rank0]: {MISSED.replace('Rank 1 ', 'Ranks 1, 99999999 ')}"))
    assert found.culprits == [1]


@pytest.mark.parametrize("speakers", [[4], [4, 5]])
def test_fingerprints_of_some_ranks_are_those_of_who_speaks(tmp_path: Path, speakers: list[int]) -> None:
    """Job's ranks 4 and 5 are ranks 0 and 1 of the process group."""
    told = [fingerprint(0, "ALLREDUCE", 8), fingerprint(1, "ALLREDUCE", 9)]
    said = [
        f"[rank{rank}]: RuntimeError: {told[rank - 4]}, but {told[5 - rank]}.Collectives" for rank in speakers
    ]
    found = analyze_hang(write(tmp_path, *said))
    assert [one.rank for one in found.ranks] == speakers
    assert found.culprits == ([5] if len(speakers) == 2 else [])


def test_a_file_of_one_rank_needs_no_prefix_in_its_lines(tmp_path: Path) -> None:
    for rank in range(2):
        text = f"epoch 1\n{GLOO_TIMEOUT.format('recv')}\n" if rank else f"epoch 1\n{MISSED}\n"
        (tmp_path / f"rank_{rank}.log").write_text(text)
    found = analyze_hang(tmp_path)
    assert sorted(one.call.op for one in found.standings) == ["barrier", "collective"]
