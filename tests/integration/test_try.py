"""Settings tried in trainings of gloo ranks: what is measured, and that results stay the same."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

from fsdp2prof.recorder.rank.trials import predict_command
from fsdp2prof.workflows.analyze import analyze_memory, analyze_trace
from fsdp2prof.workflows.job.job_files import open_job

from .conftest import script_path, torchrun, training_environment


def run(command):
    return subprocess.run(
        command, env=training_environment(), capture_output=True, text=True, timeout=280, check=False
    )


@cache
def run_alone(ranks, *script):
    return run(torchrun(script_path("trying"), ranks, *script))


@pytest.fixture
def tried(tmp_path):
    """Runs a script alone and under ``try``; asserts that nothing changed; returns the result as JSON.

    ``failing`` are words for the script that break the trial.
    """

    def alone_and_tried(*options, ranks=2, script=(), failing=(), settings):
        command = torchrun(script_path("trying"), ranks, *script, *failing)
        fsdp2prof = [sys.executable, "-m", "fsdp2prof"]
        given = [word for text in settings for word in ("--set", text)]
        trying = run([*fsdp2prof, "try", *given, *options, "-o", str(tmp_path / "run"), "--", *command])
        alone = run_alone(ranks, *script)
        assert (alone.returncode, trying.returncode) == (0, 0), trying.stderr
        assert sorted(trying.stdout.splitlines()) == sorted(alone.stdout.splitlines())
        shown = run([*fsdp2prof, "analyze", "try", str(tmp_path / "run"), "--format", "json"])
        assert shown.returncode == 0, shown.stderr
        return json.loads(shown.stdout)

    return alone_and_tried


def all_gathers(path, recording):
    trace = analyze_trace(open_job(path, iteration=recording))
    return {
        phase: sum(row.count for row in trace.by_layer if row.op == "all_gather" and row.phase == phase)
        for phase in ("forward", "backward")
    }


def gathered(path, recording):
    """The highest peak of a recording, and the most bytes of parameters that a rank held gathered at once."""
    ranks = analyze_memory(open_job(path, iteration=recording)).ranks
    [most] = {max(rank.timeline["unsharded_parameter"]) for rank in ranks}
    return max(rank.peak.allocated_bytes for rank in ranks), most


def test_settings_are_in_force_and_the_results_are_the_scripts_own(tried, tmp_path):
    settings = ["reshard=never", "forward_prefetch=2", "reduce_scatter_max_input_buffers=2"]
    script = ("--steps", "60")
    result = tried("--steps", "32", "--seed", "3", settings=settings, script=script)
    assert {one["change"] for one in result["tried"]} == set(settings)
    assert (result["ranks"], result["rounds"], result["restored"], result["left_out"]) == (
        [0, 1],
        2,
        True,
        [],
    )
    changes = {one["change"]: one for one in result["tried"]}
    assert all(one["rounds"] == 2 and one["outcome"] == "not_distinguishable" for one in changes.values())
    layers, root = 3, 1
    own = all_gathers(tmp_path / "run", 1)
    assert own == {"forward": layers + root, "backward": layers}
    never = changes["reshard=never"]
    assert all_gathers(tmp_path / "run", never["recording"]) == {"forward": layers + root, "backward": 0}
    # Each layer's 2 x 32 x 64 + 96 parameters stay gathered in fp32 until backward, all at once.
    layer = (2 * 32 * 64 + 96) * 4
    (one_peak, one), (all_peak, every) = (gathered(tmp_path / "run", at) for at in (1, never["recording"]))
    assert every - one == (layers - 1) * layer
    assert (never["peak_bytes"], never["added_bytes"]) == (all_peak, all_peak - one_peak)
    assert never["added_bytes"] <= layers * layer
    assert never["least_predicted_ns"] <= never["predicted_ns"] <= never["most_predicted_ns"]
    chosen = run(predict_command(tmp_path / "run"))  # of which try makes its candidates without --set
    assert chosen.returncode == 0, chosen.stderr
    assert "reshard=never" in {one["change"] for one in json.loads(chosen.stdout)["tried"]}


@pytest.mark.slow
def test_the_order_is_the_seeds_on_every_rank(tried, tmp_path):
    tried("--steps", "16", "--seed", "5", ranks=2, settings=["reshard=never"], script=("--steps", "36"))
    ranks = [json.loads(file.read_text()) for file in sorted((tmp_path / "run").glob("rank-*/trial.json"))]
    places = [[(b["round"], b["candidate"], b["first_step"]) for b in one["blocks"]] for one in ranks]
    assert len(ranks) == 2
    assert places[0] == places[1]
    assert sorted(candidate for number, candidate, _ in places[0] if number == 0) == [0, 1]


@pytest.mark.slow
def test_replicas_shard_and_replicate_together(tried):
    result = tried(
        "--steps", "16", ranks=4, settings=["reshard=never"], script=("--steps", "36", "--replicas", "2")
    )
    assert (result["ranks"], result["rounds"], result["restored"]) == ([0, 1, 2, 3], 2, True)


@pytest.mark.slow
def test_what_changes_results_is_tried_only_on_demand(tmp_path):
    command = ["--", "true"]
    refused = run([sys.executable, "-m", "fsdp2prof", "try", "--set", "sync=last", *command])
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "allow it with --changes-results" in refused.stderr
    script = torchrun(script_path("trying"), 2, "--steps", "36", "--micro-batches", "2")
    allowed = ["--set", "sync=last", "--changes-results", "--steps", "16", "-o", str(tmp_path / "run")]
    done = run([sys.executable, "-m", "fsdp2prof", "try", *allowed, "--", *script])
    assert done.returncode == 0, done.stderr
    trial = json.loads((tmp_path / "run/rank-00000/trial.json").read_text())
    assert (trial["candidates"], trial["restored"]) == (["", "sync=last"], True)
    trace = analyze_trace(open_job(tmp_path / "run", iteration=trial["recordings"]["sync=last"]))
    reductions = sum(row.count for row in trace.by_layer if row.op == "reduce_scatter")
    assert reductions == 4  # of three layers and the root, once for two micro-batches


@pytest.mark.slow
def test_a_setting_that_the_script_changes_stays_the_scripts(tried):
    result = tried(
        "--steps", "64", settings=["forward_prefetch=1"], script=("--steps", "40", "--own-change-at", "12")
    )
    assert result["ended"] == "the script changes FSDP2's settings itself"
    assert result["restored"]


@pytest.mark.parametrize("method", ["_assign", pytest.param("_save", marks=pytest.mark.slow)])
def test_a_failure_on_one_rank_restores_and_goes_on(tried, tmp_path, method):
    failing = ("--fail-on-rank", "1", "--fail-in", method, "--fail-at", "3")
    settings = ["reshard=never"]
    result = tried("--steps", "64", settings=settings, script=("--steps", "60"), failing=failing)
    assert result["restored"]
    ends = {
        file.parent.name: json.loads(file.read_text())["ended"]
        for file in (tmp_path / "run").glob("rank-*/trial.json")
    }
    assert ends["rank-00000"] is not None
    assert any("made to fail" in str(end) for end in ends.values())


@pytest.mark.slow
def test_whatif_chooses_the_candidates(tried):
    """A recording of resharding layers: never resharding is predicted to gain, and so is tried."""
    script = ("--steps", "300", "--dim", "256", "--layers", "6")
    result = tried("--steps", "16", "--best", "1", settings=[], script=script)
    (one,) = result["tried"]
    assert one["predicted_ns"] > 0
    assert (one["rounds"], result["restored"]) == (2, True)
