"""What a trial's blocks say: paired gains, their intervals, and when more steps would tell nothing new."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results import run_summary

from fsdp2prof.analyzers.run_summary import with_trial
from fsdp2prof.analyzers.trial import LEAST_ROUNDS, Prediction, analyze_trial
from fsdp2prof.errors import UsageError
from fsdp2prof.results.ledger import NOTHING
from fsdp2prof.results.run import RunAnalysis
from fsdp2prof.trial import (
    Trial,
    TriedBlock,
    block_differences,
    is_decided,
    paired_interval,
    parse_candidate,
    script_lines,
    why_never_tried,
)

MS = 1_000_000


def blocks(rounds, *, gain_ns, noise_ns=0, drift_ns=0, seed=0, candidates=2):
    """Steps of 100 ms; candidate 1 is ``gain_ns`` shorter; a round is ``drift_ns`` longer than the last."""
    random = Random(seed)
    made = []
    for number in range(rounds):
        for candidate in range(candidates):
            base = 100 * MS + number * drift_ns - (gain_ns if candidate == 1 else 0)
            durations = [base + random.randint(-noise_ns, noise_ns) for _ in range(3)]
            made.append(
                TriedBlock(candidate=candidate, round=number, first_step=number, durations_ns=durations)
            )
    return made


def trial(made, *, rank=0, ended="over", candidates=("", "reshard=never")):
    return Trial(
        rank=rank, seed=0, clock="host", candidates=list(candidates), blocks=made, ended=ended, restored=True
    )


def analyzed(*trials, predicted=None, peaks=None):
    return analyze_trial("run", trials, predicted=predicted or {}, peaks=peaks or {})


class TestGains:
    def test_a_drift_of_the_machine_cancels(self):
        result = analyzed(trial(blocks(8, gain_ns=5 * MS, drift_ns=20 * MS)))
        (change,) = result.tried
        assert (change.gained_ns, change.low_ns, change.high_ns) == (5 * MS, 5 * MS, 5 * MS)
        assert (change.outcome, change.rounds, result.rounds) == ("faster", 8, 8)

    def test_a_candidate_that_loses(self):
        (change,) = analyzed(trial(blocks(8, gain_ns=-5 * MS))).tried
        assert (change.outcome, change.gained_ns) == ("slower", -5 * MS)

    def test_noise_is_not_distinguished(self):
        result = analyzed(trial(blocks(12, gain_ns=0, noise_ns=30 * MS)))
        (change,) = result.tried
        assert change.low_ns <= 0 <= change.high_ns
        assert change.outcome == "not_distinguishable"
        assert len(result.verdict) == 1

    def test_few_rounds_tell_nothing(self):
        (change,) = analyzed(trial(blocks(LEAST_ROUNDS - 1, gain_ns=50 * MS))).tried
        assert (change.outcome, change.gained_ns) == ("not_distinguishable", 50 * MS)

    def test_a_step_is_the_mean_of_the_ranks(self):
        fast, slow = blocks(6, gain_ns=10 * MS), blocks(6, gain_ns=30 * MS)
        result = analyzed(trial(fast), trial(slow, rank=1))
        assert result.ranks == [0, 1]
        assert result.tried[0].gained_ns == 20 * MS

    def test_memory_and_prediction_stand_beside_the_gain(self):
        predicted = {"reshard=never": Prediction(gained_ns=7.0 * MS, reason=None)}
        result = analyzed(
            trial(blocks(6, gain_ns=5 * MS)), predicted=predicted, peaks={"": 100, "reshard=never": 130}
        )
        (change,) = result.tried
        assert (change.predicted_ns, change.peak_bytes, change.added_bytes) == (7.0 * MS, 130, 30)

    def test_a_measured_gain_leads_the_verdict_of_a_run(self):
        bare = RunAnalysis(
            verdict=[f"{NOTHING}.", "The peak."], run=run_summary(), trace=None, memory=None, warnings=[]
        )
        faster = with_trial(bare, analyzed(trial(blocks(8, gain_ns=5 * MS)))).verdict
        assert "reshard=never" in faster[0]
        assert faster[1:] == ["The peak."]
        slower = analyzed(trial(blocks(8, gain_ns=-5 * MS)))
        assert with_trial(bare, slower).verdict == with_trial(bare, None).verdict == bare.verdict

    def test_a_trial_without_a_block(self):
        result = analyzed(trial([], ended=None))
        assert (result.step_ns, result.rounds, result.tried[0].gained_ns) == (None, 0, None)


class TestIntervals:
    @given(st.lists(st.integers(-(10**9), 10**9), min_size=1, max_size=30))
    def test_the_median_lies_in_its_interval(self, differences):
        low, middle, high = paired_interval(differences)
        assert min(differences) <= low <= high <= max(differences)
        assert middle == median(differences)

    def test_a_wider_level_is_no_narrower(self):
        differences = [Random(1).gauss(0, 1) for _ in range(20)]
        narrow, wide = paired_interval(differences), paired_interval(differences, level=0.99)
        assert wide[0] <= narrow[0]
        assert narrow[2] <= wide[2]

    def test_a_round_without_both_is_left_out(self):
        made = blocks(3, gain_ns=MS)
        assert block_differences(made[:-1], 1) == [MS, MS]

    def test_coverage(self):
        """The interval of 95 % holds the true median in at least nine of ten experiments of 12 rounds."""
        random, held = Random(7), 0
        for _ in range(200):
            low, _, high = paired_interval([random.gauss(3, 10) for _ in range(12)], resamples=400)
            held += low <= 3 <= high
        assert held >= 180


class TestEarlyEnd:
    def test_a_clear_gain_is_decided(self):
        assert is_decided(blocks(8, gain_ns=20 * MS, noise_ns=MS), 2)

    def test_no_difference_at_all_is_decided(self):
        assert is_decided(blocks(8, gain_ns=0), 2)

    def test_noise_is_not_decided(self):
        assert not is_decided(blocks(8, gain_ns=0, noise_ns=40 * MS, seed=3), 2)

    def test_nothing_measured_is_not_decided(self):
        assert not is_decided([], 2)


class TestCandidates:
    @pytest.mark.parametrize("text", ["reshard=never", "forward_prefetch=2", "sync=last"])
    def test_known(self, text):
        name, value = parse_candidate(text)
        assert f"{name}={value}" == text
        assert script_lines(name, value)[0].count("model") + script_lines(name, value)[0].count("layers")

    @pytest.mark.parametrize(
        "text", ["reshard", "reshard=2", "forward_prefetch=0", "bandwidth=2x", "mesh=dp_shard=2", "x=1"]
    )
    def test_unknown(self, text):
        with pytest.raises(UsageError, match=text.split("=")[0]):
            parse_candidate(text)

    def test_results_change_only_on_demand(self):
        assert why_never_tried("sync=last", changes_results=False) is not None
        assert why_never_tried("sync=last", changes_results=True) is None
