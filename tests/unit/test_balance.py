"""``check balance``: numbers derived by hand from lines and lengths that were written down here."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.cli import call

from fsdp2prof.analyzers.balance import RankStep, check_balance, tokens_of_steps
from fsdp2prof.errors import InputError
from fsdp2prof.manifest import RankManifest, RunInfo, WatchedStep
from fsdp2prof.results.check import BalanceCheck
from fsdp2prof.run_directory import rank_folder

MS = 10**6


def measured(busy_ms: dict[int, list[int]]) -> dict[int, dict[int, RankStep]]:
    return {
        rank: {step: RankStep(duration_ns=100 * MS, busy_ns=busy * MS) for step, busy in enumerate(times)}
        for rank, times in busy_ms.items()
    }


def balance(busy_ms: dict[int, list[int]]) -> BalanceCheck:
    return check_balance(measured(busy_ms), path="run", measured_on="watched")


def test_one_rank_is_always_behind() -> None:
    """90 and 60, 60, 60: mean 67.5, lost 22.5 ms of 100, all of it rank 1's."""
    check = balance({0: [60] * 4, 1: [90] * 4, 2: [60] * 4, 3: [60] * 4})
    assert (check.lost_ns, check.constant_ns, check.varying_ns) == (22.5 * MS, 22.5 * MS, 0)
    assert check.lost_frac == 0.225
    assert [(one.id, one.severity, one.evidence["rank"]) for one in check.findings] == [
        ("rank_always_behind", "high", 1)
    ]
    assert (check.ranks[0].rank, check.ranks[0].slowest_steps, check.passed) == (1, 4, False)


def test_three_steps_of_two_ranks_may_be_chance() -> None:
    """Of two equal ranks either is the slower one in three steps of three in 25 % of runs, in five in 6 %."""
    assert [one.id for one in balance({0: [90] * 3, 1: [60] * 3}).findings] == ["work_varies"]
    assert [one.id for one in balance({0: [90] * 5, 1: [60] * 5}).findings] == ["rank_always_behind"]


def test_inputs_are_not_blamed_where_all_ranks_compute_the_same() -> None:
    times = measured({0: [90] * 5, 1: [60] * 5})
    for flops, change in (([7] * 10, "the inputs are not the reason"), ([], "its share of the data")):
        (found,) = check_balance(times, path="run", measured_on="traced", flops=flops).findings
        assert (found.id, change in found.change) == ("rank_always_behind", True)


def test_the_slowest_rank_changes() -> None:
    """80 on one rank of two, by turns, 60 on the other: 10 ms lost, in the mean nobody's."""
    check = balance({0: [80, 60], 1: [60, 80]})
    assert (check.lost_ns, check.constant_ns, check.varying_ns) == (10 * MS, 0, 10 * MS)
    assert [(one.id, one.severity) for one in check.findings] == [("work_varies", "medium")]
    assert [one.slowest_rank for one in check.steps] == [0, 1]
    assert "the other 10.0 ms come from" in check.verdict[1]


@pytest.mark.parametrize(
    ("flops", "name", "words"),
    [
        ([7, 7, 7, 7], "time_varies", "the inputs are not the reason"),
        ([7, 7, 8, 7], "work_varies", "--lengths"),
        ([7, None, 7, 7], "work_varies", "--lengths"),
        ([], "work_varies", "--lengths"),
    ],
)
def test_a_varying_time_fails_no_check_unless_tokens_explain_it(
    flops: list[int | None], name: str, words: str
) -> None:
    """By turns 90 and 30 ms of 100: 30 ms lost, of fixed batches or of batches that nobody described."""
    times = {0: [90, 30], 1: [30, 90]}
    check = check_balance(measured(times), path="run", measured_on="traced", flops=flops)
    assert [(one.id, one.severity) for one in check.findings] == [(name, "medium")]
    assert words in check.findings[0].change
    assert check.passed


def test_even_work_has_no_finding_and_only_common_steps_count() -> None:
    check = balance({0: [70, 70, 70], 1: [70, 70]})
    assert (check.lost_ns, check.findings, check.passed, len(check.steps)) == (0, [], True, 2)
    with pytest.raises(InputError, match="one rank"):
        balance({0: [70]})
    with pytest.raises(InputError, match="no step that all ranks have"):
        check_balance({0: {1: RankStep(duration_ns=1, busy_ns=1)}, 1: {}}, path="run", measured_on="traced")


def test_documents_are_dealt_out_as_the_sampler_does() -> None:
    """Two ranks, batches of two: rank 0 has documents 0 and 2, rank 1 has 1 and 3; step 2 is out of reach."""
    lengths = [10, 1, 4, 3, 8, 8, 8, 8]
    dealt = tokens_of_steps(lengths, [0, 1, 2], ranks=2, batch_size=2, micro_batches=1, seq_len=None)
    assert {step: [(one.tokens, one.computed) for one in ranks] for step, ranks in dealt.items()} == {
        0: [(14, 20), (4, 6)],
        1: [(16, 16), (16, 16)],
    }
    (fixed,) = tokens_of_steps(lengths, [0], ranks=2, batch_size=2, micro_batches=1, seq_len=8).values()
    assert [(one.tokens, one.computed) for one in fixed] == [(12, 16), (4, 16)]
    pairs = tokens_of_steps(lengths, [0], ranks=2, batch_size=1, micro_batches=2, seq_len=None)
    assert [one.computed for one in pairs[0]] == [14, 4]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks of four watched steps; busy 5 ms a token computed, the first step is recorded."""
    root = tmp_path / "run"
    root.mkdir()
    (root / "run.json").write_bytes(msgspec.json.encode(RunInfo(state="complete", world_size=2)))
    busy = {0: [99, 20, 50, 40], 1: [1, 60, 30, 40]}
    for rank, times in busy.items():
        folder = root / rank_folder(rank)
        folder.mkdir()
        manifest = RankManifest(state="complete", rank=rank, world_size=2)
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        lines = [
            WatchedStep(
                step=step,
                duration_ns=100 * MS,
                exposed_ns=(100 - one) * MS,
                kind="traced" if step == 0 else "plain",
            )
            for step, one in enumerate(times)
        ]
        (folder / "steps.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    (tmp_path / "lengths.txt").write_text("9 9  4 12  10 6  8 8")
    return root


def test_command(capfd: pytest.CaptureFixture[str], run: Path) -> None:
    """Steps 1 to 3: max less mean is 20, 10 and 0 ms: 10 of 100. Ranks' means: 36.7 and 43.3, so 3.3 stay."""
    ended = call(capfd, "check", "balance", run, "--format", "json", "--lengths", run.parent / "lengths.txt")
    assert ended.code == 0, ended.err
    found = msgspec.json.decode(ended.out)
    assert [step["step"] for step in found["steps"]] == [1, 2, 3]
    assert found["lost_ns"] == 10 * MS
    assert found["constant_ns"] == pytest.approx(10 / 3 * MS)
    assert found["tokens"] == {
        "documents": 8,
        "steps": 3,
        "tokens": 48,
        "computed_tokens": 48,
        "padding_frac": 0,
        "padding_ns": 0,
        "imbalance_frac": pytest.approx((12 / 8 + 10 / 8 + 1) / 3 - 1),
        "explained_frac": pytest.approx(1),
    }
    text = call(capfd, "check", "balance", run, "--fail-at", "medium")
    assert text.code == 3
    assert "from a different rank" in " ".join(text.out.split())


def test_what_is_refused(capfd: pytest.CaptureFixture[str], run: Path) -> None:
    call(capfd, "check", "balance", run, "--batch-size", "2").refused("would have no effect", code=2)
    lengths = run.parent / "few.txt"
    lengths.write_text("1 2")
    call(capfd, "check", "balance", run, "--lengths", lengths).refused("do not reach step 1: a step takes 2")
    for file in run.rglob("steps.jsonl"):
        file.unlink()
    call(capfd, "check", "balance", run).refused("no traces, and no steps of `record --watch`")


def test_traced_steps_count_where_none_were_watched(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A rank with 5 ms more of compute in a layer is behind by half of it: the mean has the other half."""
    from dataclasses import replace

    from synthetic import Schedule, record, transformer, write

    even = Schedule(roots=(transformer(2),), shard=2)
    layers = transformer(2)
    late = replace(even, roots=((layers[0], replace(layers[1], forward_ns=5_300_017), *layers[2:]),))
    for recording in record(even, late):
        write(recording, tmp_path / f"rank{recording.rank}_trace.json")
    ended = call(capfd, "check", "balance", tmp_path, "--format", "json", "--fail-at", "never")
    assert ended.code == 0, ended.err
    found = msgspec.json.decode(ended.out)
    assert (found["measured_on"], found["ranks"][0]["rank"]) == ("traced", 1)
    assert found["ranks"][0]["behind_ns"] == pytest.approx(2.5 * MS, rel=0.05)
