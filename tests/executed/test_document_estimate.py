"""Estimates laid out: folded rows add up, advice says what trying gives, pages show what the JSON holds."""

from __future__ import annotations

import csv
import html
import io
import re
from dataclasses import replace

import msgspec
import pytest

from fsdp2prof.estimators.checkpoint import estimate_checkpoint
from fsdp2prof.estimators.communication import estimate_comm
from fsdp2prof.estimators.communication_summary import fold_layers
from fsdp2prof.estimators.config.choices import Every
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.option import options_of
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.results.estimate import CommEstimate, decoding_hook
from fsdp2prof.units import format_bytes

MODEL = ModelSpec(source="gpt2", layers=5)
MESH = MeshSpec(dp_replicate=2, dp_shard=4)
POLICY = PolicySpec(seq_len=64, grad_accum=3, sync="each")


def rendered(result: object, form: str, **options: object) -> str:
    text = RENDERERS[form].render(build(result), RenderOptions(**options))  # type: ignore[arg-type]
    assert isinstance(text, str)
    return text


def wire(estimate: CommEstimate) -> int:
    return estimate.total.wire_bytes


def test_every_option_of_a_policy_is_said() -> None:
    said = estimate_comm(MODEL, MESH, replace(POLICY, ac=Every(2))).policy
    assert list(said) == list(options_of(PolicySpec))
    assert (said.ac, said.wrap, said.grad_accum) == ("every:2", ("block",), 3)


def test_folded_rows_are_the_sums_of_their_layers() -> None:
    estimate = estimate_comm(MODEL, MESH, POLICY)
    blocks = [row for row in estimate.groups_folded if row.fqn == "layers.0-4"]
    assert {row.layers for row in blocks} == {5}
    assert [row.op for row in blocks] == ["all_gather", "all_gather", "reduce_scatter", "all_reduce"]
    for row in blocks:
        own = [one for one in estimate.groups if (one.op, one.phase) == (row.op, row.phase)]
        own = [one for one in own if (one.fqn or "").startswith("layers.")]
        assert row.count == sum(one.count for one in own)
        assert row.payload_bytes == 5 * own[0].payload_bytes
    for measure in ("count", "payload_bytes", "wire_bytes"):
        rows = sum(getattr(row, measure) for row in estimate.groups)
        assert sum(getattr(row, measure) for row in estimate.groups_folded) == rows
        assert getattr(estimate.total, measure) == rows


def test_a_layer_that_sends_more_is_not_folded() -> None:
    rows = estimate_comm(MODEL, MESH, POLICY).groups
    wider = [replace(row, payload_bytes=1) if row.fqn == "layers.2" else row for row in rows]
    assert {row.fqn for row in fold_layers(wider)} == {"layers.0-1,3-4", "layers.2", "", None}
    two = fold_layers([*rows, *(replace(row, root=1) for row in rows if row.fqn is not None)])
    assert [(row.root, row.fqn) for row in two if row.phase == "forward"] == [
        (0, ""),
        (0, "layers.0-4"),
        (1, ""),
        (1, "layers.0-4"),
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sync": "last"}, "after the last of 3 micro-batches (sync=last)"),
        ({"reshard": "never"}, "(reshard=never)"),
        ({"reduce_dtype": "bfloat16"}, "in bfloat16 (reduce_dtype)"),
    ],
)
def test_advice_says_what_trying_it_gives(change: dict[str, str], words: str) -> None:
    before = estimate_comm(MODEL, MESH, POLICY)
    after = estimate_comm(MODEL, MESH, replace(POLICY, **change))  # type: ignore[arg-type]
    [line] = [line for line in before.advice if words in line]
    assert f"saves {format_bytes(wire(before) - wire(after))}" in line
    assert not [line for line in after.advice if words in line]


def test_advice_begins_with_what_saves_most() -> None:
    """Reducing once instead of three times saves two thirds of it, half the bytes saves a half."""
    estimate = estimate_comm(MODEL, MESH, POLICY)
    assert [re.findall(r"\(([a-z_]+)", line)[0] for line in estimate.advice] == [
        "sync",
        "reduce_dtype",
        "reshard",
    ]
    assert estimate.verdict[2] == estimate.advice[0]


def test_one_rank_sends_nothing() -> None:
    estimate = estimate_comm(MODEL, MeshSpec(), POLICY)
    assert (estimate.groups, estimate.advice, wire(estimate)) == ([], [], 0)
    assert estimate.verdict == ["There is no communication: every group has one rank."]
    assert "There is no communication" in rendered(estimate, "text")


def test_a_checkpoint_as_a_table() -> None:
    estimate = estimate_checkpoint(MODEL, MESH, POLICY, bandwidth_bytes_per_s=10**9)
    rows = {row["what"].strip(): row for row in csv.DictReader(io.StringIO(rendered(estimate, "csv")))}
    assert int(rows["sharded checkpoint"]["bytes"]) == estimate.parameter_bytes + estimate.optimizer_bytes
    assert int(rows["sharded checkpoint"]["files"]) == 8 + 1
    assert float(rows["full state dict"]["seconds"]) == estimate.full_bytes / 1e9
    assert "Time at 1.00 GB/s for each rank that writes." in rendered(estimate, "text")


@pytest.mark.parametrize("form", ["text", "html"])
@pytest.mark.parametrize("kind", ["comm", "checkpoint"])
def test_what_people_see_stands_in_the_json(kind: str, form: str) -> None:
    estimate = (estimate_comm if kind == "comm" else estimate_checkpoint)(MODEL, MESH, POLICY)
    document = msgspec.json.decode(rendered(estimate, "json"))
    text = rendered(estimate, form, width=200)
    shown = " ".join(html.unescape(re.sub(r"</?code>", "`", text)).split())
    for line in (*document["verdict"], *document["assumptions"], *document.get("advice", [])):
        assert line in shown
    for given in (
        "gpt2, 5 blocks",
        "dp_replicate=2, dp_shard=4",
        "batch 1 x 64 tokens",
        "grad_accum=3, sync=each",
    ):
        assert given in shown


def test_an_estimate_kept_before_there_were_sums_and_sentences_is_read() -> None:
    """A document of an older version has fewer keys, and its mesh whatever names the run gave."""
    estimate = estimate_comm(MODEL, MESH, POLICY)
    document = msgspec.json.decode(rendered(estimate, "json"))
    older = {key: document[key] for key in ("schema", "model", "policy", "groups", "per_step", "assumptions")}
    for row in older["groups"]:
        del row["layers"]
    older["mesh"] = {"dp": 8, "world_size": 8}
    read = msgspec.convert(older, CommEstimate, dec_hook=decoding_hook)
    assert (read.groups, read.mesh.world_size, read.verdict) == (estimate.groups, 8, [])
