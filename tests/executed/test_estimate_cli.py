"""``fsdp2prof estimate`` as people type it: outputs, precedence of options, and bad input in one line."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import pytest

from fsdp2prof.cli import main

SMALL = ["--model", "gpt2", "--layers", "2", "--seq-len", "64", "--mesh", "dp_shard=4"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command in this process: (exit code, stdout, stderr)."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fsdp2prof", "estimate", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return command


def test_json_is_the_contract(run):
    code, out, err = run("comm", *SMALL, "--format", "json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert set(document) >= {"schema", "model", "mesh", "policy", "groups", "per_step", "assumptions"}
    assert document["schema"] == "fsdp2prof.estimate.comm/1"
    measured_keys = {"fqn", "phase", "op", "process_group", "mesh_dim", "dtype", "count", "payload_bytes"}
    for row in document["groups"]:
        assert set(row) == measured_keys | {"root", "wire_bytes", "group_size", "layers"}
    for op, total in document["per_step"].items():
        rows = [row for row in document["groups"] if row["op"] == op]
        for key in ("count", "payload_bytes", "wire_bytes"):
            assert total[key] == sum(row[key] for row in rows)
            assert document["total"][key] == sum(one[key] for one in document["per_step"].values())
    assert sum(total["wire_frac"] for total in document["per_step"].values()) == pytest.approx(1)


def test_csv_has_the_same_rows(run, tmp_path):
    target = tmp_path / "comm.csv"
    assert run("comm", *SMALL, "-o", str(target))[0] == 0
    rows = list(csv.DictReader(io.StringIO(target.read_text())))
    document = json.loads(run("comm", *SMALL, "--format", "json")[1])
    assert [int(row["wire_bytes"]) for row in rows] == [row["wire_bytes"] for row in document["groups"]]


def test_text_shows_the_sums_and_the_assumptions(run):
    code, out, _ = run("comm", *SMALL, "--full")
    assert code == 0
    for expected in ("all-gather", "reduce-scatter", "(root)", "layers.0", "Assumptions", "dp_shard=4"):
        assert expected in out


@pytest.mark.parametrize(("model", "idle"), [("deepseek-v3-16b", True), ("llama3.2-1b", False)])
def test_an_option_for_another_attention_is_said_to_have_no_effect(run, model, idle):
    where = ("--layers", "2", "--seq-len", "64", "--mesh", "dp_shard=4", "--full")
    out = run("comm", "--model", model, *where, "--repeat-kv")[1]
    assert ("without effect on this estimate: --repeat-kv" in out) == idle


def test_alike_layers_are_folded(run):
    out = run("comm", "--model", "gpt2", "--seq-len", "64", "--mesh", "dp_shard=4")[1]
    assert "layers.0-11 " in out
    assert "layers.1 " not in out
    every = run("comm", "--model", "gpt2", "--seq-len", "64", "--mesh", "dp_shard=4", "-v")[1]
    assert all(f"layers.{layer} " in every for layer in range(12))


def test_checkpoint(run):
    code, out, _ = run("checkpoint", *SMALL, "--bandwidth", "1GB/s", "--format", "json")
    document = json.loads(out)
    assert (code, document["schema"]) == (0, "fsdp2prof.estimate.checkpoint/1")
    assert document["sharded_seconds"] == document["rank_bytes_max"] / 1e9
    assert "full state dict" in run("checkpoint", *SMALL)[1]


def test_memory_saved_as_a_run_is_analysed_like_one(run, tmp_path):
    folder = tmp_path / "estimated"
    code, out, _ = run("memory", *SMALL, "--hardware", "80GiB", "--save-run", str(folder), "--format", "json")
    estimate = json.loads(out)
    assert (code, estimate["schema"]) == (0, "fsdp2prof.estimate.memory/1")
    assert estimate["fits"] is True
    assert estimate["assumptions"]
    peak = estimate["peak"]
    assert sum(peak["categories"].values()) == sum(row["bytes"] for row in peak["by_layer"])
    assert sum(peak["categories"].values()) == peak["active_bytes"]
    command = [sys.executable, "-m", "fsdp2prof", "analyze", "memory", str(folder), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    analysed = json.loads(done.stdout)["ranks"][0]
    assert (analysed["source"], analysed["device"]) == ("estimate", "80GiB")
    assert analysed["device_total_bytes"] == 80 << 30
    assert analysed["peak"]["allocated_bytes"] == peak["active_bytes"]
    assert analysed["peak"]["reserved_bytes"] == peak["reserved_bytes"]
    assert analysed["peak"]["categories"] == peak["categories"]
    code, _, err = run("memory", *SMALL, "--save-run", str(folder))
    assert (code, err.count("\n")) == (1, 1)
    assert "exists already" in err


def test_memory_as_text(run):
    code, out, _ = run("memory", *SMALL)
    assert code == 0
    for expected in ("A rank reserves", "By kind", "optimizer state"):
        assert expected in out
    assert "outside the allocator" in run("memory", *SMALL, "--full")[1]


def test_the_command_line_wins_over_the_configuration_file(run, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'model = "gpt2"\nlayers = 2\nmesh = "dp_shard=2"\n'
        '[policy]\nseq_len = 64\nreduce_dtype = "bf16"\nclip_grad = true\noffload = true\n'
    )
    arguments = ["--config", str(path), "--mesh", "dp_shard=8", "--no-clip-grad", "--param-dtype", "none"]
    document = json.loads(run("comm", *arguments, "--format", "json")[1])
    assert document["mesh"]["dp_shard"] == 8
    policy = document["policy"]
    assert (policy["seq_len"], policy["reduce_dtype"], policy["param_dtype"]) == (64, "bfloat16", None)
    assert (policy["clip_grad"], policy["offload"]) == (False, True)


LLAMA = ["--model", "llama3-8b", "--seq-len", "64"]
BAD = {
    "unknown model": (["--model", "llama9"], "unknown model 'llama9': did you mean"),
    "no model": (["--mesh", "dp_shard=8"], "no model: name a built-in"),
    "unknown mesh dimension": ([*LLAMA, "--mesh", "xp=8"], "mesh: no dimension 'xp'"),
    "mesh that is no mesh": ([*LLAMA, "--mesh", "8"], "is not NAME=SIZE"),
    "reshard size that does not divide": (
        [*LLAMA, "--mesh", "dp_shard=8", "--reshard", "3"],
        "do not divide",
    ),
    "heads": ([*LLAMA, "--mesh", "dp_shard=2,tp=16"], "tp=16 does not divide the 8 kv_heads of llama3-8b"),
    "sequence": ([*LLAMA, "--mesh", "cp=3"], "seq_len 64 is not a multiple of 6"),
    "batch": ([*LLAMA, "--batch-size", "0"], "batch_size: 0 must be an integer of at least 1"),
    "factory that is missing": (["--model", "json:nothing"], "has no attribute 'nothing'"),
    "factory that fails": (["--model", "bad_models:fails"], "the factory failed: KeyError: 'weights'"),
    "factory with memory": (["--model", "bad_models:real"], "weight has real memory"),
    "configuration without architecture": (["--model", "config.json"], "no architecture"),
    "wrap": ([*LLAMA, "--wrap", "Nothing"], "no class or module 'Nothing' in llama3-8b"),
    "pipeline that reshards": (
        [*LLAMA, "--mesh", "pp=2", "--reshard", "always"],
        "with pp use reshard=never",
    ),
    "float8": ([*LLAMA, "--fp8-all-gather"], "fp8_all_gather needs float8=tensorwise"),
    "dtype": ([*LLAMA, "--param-dtype", "int4"], "param_dtype: unknown dtype 'int4'"),
    "run": (["--from-run", "missing"], "missing: no such run directory"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, run, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "bad_models.py").write_text(
        "from torch import nn\n"
        "def fails():\n    raise KeyError('weights')\n"
        "def real():\n    return nn.Linear(2, 2, device='cpu')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bad_models", raising=False)
    arguments, message = BAD[case]
    code, out, err = run("comm", *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["comm", *LLAMA, "--config", "missing.yaml"], 2, "missing.yaml"),
        (["comm", *LLAMA, "--batch-size", "two"], 2, "two"),
        (["comm", *LLAMA, "--format", "html"], 2, "html"),
        (["checkpoint", *LLAMA, "--bandwidth", "fast"], 2, "not a size: 'fast'"),
        (["memory", *LLAMA, "--hardware", "h9000"], 1, "unknown hardware 'h9000'"),
        (["memory"], 1, "no model"),
    ],
)
def test_usage_errors(run, arguments, code, message):
    ended, out, err = run(*arguments)
    assert (ended, out) == (code, "")
    assert message in err


def test_an_existing_file_is_not_overwritten(run, tmp_path):
    target = tmp_path / "comm.json"
    target.write_text("mine")
    code, _, err = run("comm", *SMALL, "-o", str(target))
    assert (code, target.read_text()) == (1, "mine")
    assert "exists already" in err
    assert run("comm", *SMALL, "-o", str(target), "-f")[0] == 0
    assert json.loads(target.read_text())["groups"]


def test_a_real_process_says_one_line_and_no_traceback():
    command = [sys.executable, "-m", "fsdp2prof", "estimate", "comm", "--model", "llama9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: unknown model 'llama9'")
    assert done.stderr.count("\n") == 1


def test_a_model_given_for_one_that_is_not_built_in_is_no_reference_of_its_own(run, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {_component_: my.models.mystery}\noptimizer: {_component_: torch.optim.AdamW}\n"
        "loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}\nbatch_size: 1\ndtype: bf16\n"
        "tokenizer: {max_seq_len: 64}\n"
    )
    given = ["--from-config", str(file), "--gpus", "4", "--model", "gpt2", "--format", "json"]
    code, out = run("comm", *given)[:2]
    assert code == 0, out
    assert json.loads(out)["policy"]["extra_model"] is None
