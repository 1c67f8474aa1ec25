"""Options that would do nothing are refused, not ignored."""

from __future__ import annotations

import click
import pytest

from fsdp2prof.commands.options import refuse_given
from fsdp2prof.errors import ModelError, UsageError
from fsdp2prof.workflows.description import describe


@click.command()
@click.option("--window", default="steps")
@click.option("--cache/--no-cache", default=True)
@click.option("-v", "--verbose", is_flag=True)
def command(**_: object) -> None:
    refuse_given("--window", "--cache", "--verbose", because="there is no trace")


def test_what_was_not_given_is_not_refused() -> None:
    command.main([], standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--window", "steps"], "--window"),
        (["-v"], "--verbose"),
        (["-v", "--window", "trace"], "--window, --verbose"),
    ],
)
def test_what_was_given_is_named_even_if_it_is_the_default(arguments: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=f"^{named} would have no effect: there is no trace$"):
        command.main(arguments, standalone_mode=False)


@pytest.mark.parametrize("flag", ["--cache", "--no-cache"])
def test_a_switch_is_refused_either_way(flag: str) -> None:
    with pytest.raises(UsageError, match=r"^--cache/--no-cache would"):
        command.main([flag], standalone_mode=False)


@pytest.mark.parametrize(
    ("mesh", "policy", "message"),
    [
        ("dp_shard=4,tp=3", {}, "tp=3 does not divide the 32 heads"),
        ("dp_shard=4,pp=64", {}, "pp=64 stages for 32 layers"),
        ("dp_shard=4,cp=3", {"seq_len": 4096}, "not a multiple of 6"),
        ("dp_shard=4,ep=2", {}, "which has no experts"),
        ("dp_shard=4", {"pp_schedule": "zbv"}, "no pipeline"),
        ("dp_shard=4,pp=4", {"pp_schedule": "interleaved:9"}, "pp=4 x 9 stages for 32 layers"),
        (
            "dp_shard=8",
            {"float8": "tensorwise", "fp8_all_gather": True, "reshard": 4},
            "is not supported by FSDP2 with float8 all-gather",
        ),
        ("dp_shard=4,tp=2", {"float8": "mxfp8"}, "mxfp8 under tensor parallelism is not modelled"),
    ],
)
def test_what_options_alone_decide_is_refused_before_torch_is_loaded(mesh, policy, message):
    """These tests run without torch: an import of it would fail in another way."""
    described = describe(given={"model": "llama3-8b", "mesh": mesh}, policy=policy)
    with pytest.raises(ModelError, match=message):
        described.spec()


def test_a_pasted_pipeline_mesh_works_by_its_defaults():
    spec = describe(given={"model": "llama3-8b", "mesh": "dp_shard=4,pp=4"}, policy={}).spec()
    assert spec.policy.reshard == "never"
    assert any("reshard=never" in note for note in spec.notes)
