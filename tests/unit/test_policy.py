"""Policies: names people use, contradictions that are refused, configuration files."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp2prof.commands.estimate import estimate
from fsdp2prof.errors import InputError, ModelError
from fsdp2prof.estimators.config.choices import Chunked, Every
from fsdp2prof.estimators.config.cluster import attention_on
from fsdp2prof.estimators.config.hardware import HardwareSpec, known_hardware
from fsdp2prof.estimators.config.inputs import load_config, make_spec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.option import options_of
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.verdict.step_range import speed_class


def test_dtypes_have_short_names():
    policy = PolicySpec(param_dtype="bf16", reduce_dtype="torch.float32", orig_dtype="FP32")
    assert (policy.param_dtype, policy.reduce_dtype, policy.orig_dtype) == ("bfloat16", "float32", "float32")
    plain = PolicySpec(param_dtype=None, reduce_dtype=None)
    assert (plain.compute_dtype, plain.gradient_dtype) == ("float32", "float32")
    assert PolicySpec(reduce_dtype=None).gradient_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("values", "is_open"),
    [
        ({}, True),
        ({"stack": "transformers-2026"}, True),
        ({"stack": "torchtitan-2026-02"}, False),  # cudnn
        ({"stack": "torchtitan-2026-08"}, True),  # flex
        ({"policy": {"attention": "flash"}}, False),
        ({"policy": {"attention": "math"}}, False),
        ({"policy": {"torch": "2.9"}}, False),
    ],
)
def test_attention_is_open_where_nobody_states_it(values, is_open):
    assert make_spec({"model": "llama3-8b", **values}).policy.leaves_attention_open is is_open


def test_counted_options():
    policy = PolicySpec(ac=Every(2), loss=Chunked(8))
    assert (policy.ac, policy.loss) == (Every(2), Chunked(8))
    assert PolicySpec(ac=Every(2), loss=Chunked(8)) == policy
    assert (policy.ac_every, policy.loss_in_pieces) == (2, True)
    assert (PolicySpec(ac="op").ac_every, PolicySpec().loss_in_pieces) == (None, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: 0 must be an integer of at least 1"),
        ({"seq_len": -1}, "seq_len"),
        ({"grad_accum": 0}, "grad_accum"),
        ({"param_dtype": "int8"}, "param_dtype: unknown dtype 'int8'"),
        ({"orig_dtype": None}, "orig_dtype: unknown dtype None"),
        ({"reshard": "sometimes"}, "one of default, torchtitan, always, never or a number of ranks"),
        ({"reshard": 0}, "reshard: unknown value 0"),
        ({"reshard": True}, "reshard: unknown value True"),
        ({"ac": "every:0"}, "every:K with K >= 1"),
        ({"ac": "blocks"}, "unknown value 'blocks'; one of none, full, children, op or every:K"),
        ({"loss": "chunked"}, "chunked:K"),
        ({"optimizer": "lion"}, "optimizer: unknown value 'lion'"),
        ({"trainable": "("}, "not a regular expression"),
        ({"fp8_all_gather": True}, "needs float8=tensorwise"),
        ({"wrap": ()}, "wrap: empty"),
        ({"wrap": 3}, "wrap: 3 is not a list of names"),
        ({"sync": "never"}, "sync: unknown value"),
        ({"sync": ["last"]}, "sync: unknown value"),
        ({"offload": "yes"}, "offload: 'yes' must be true or false"),
        ({"extra_model": 3}, "extra_model: 3 must be text"),
        ({"extra_model": "critic=gpt2"}, "a model is for reference or reward, not 'critic'"),
        ({"extra_model": "reward="}, "'reward=' names no model"),
        ({"extra_model": "self,self"}, "self may appear once, and only for a reference"),
        ({"extra_model": "reward=self"}, "self may appear once, and only for a reference"),
        ({"extra_model": ",".join(["gpt2"] * 9)}, "9 models are more than 8"),
        ({"batch_size": 1 << 16, "seq_len": 4096, "loss": "dpo"}, "131072 sequences of 4096 tokens are more"),
        ({"optimizer": "adafactor"}, "optimizer: unknown value"),
        ({"optimizer": "rmsprop", "optimizer_impl": "fused"}, "RMSprop has no fused implementation"),
        (
            {"optimizer": "sgd", "optimizer_impl": "fused"},
            r"torch cannot run SGD \(fused\) on sharded parameters",
        ),
    ],
)
def test_bad_policies(options, message):
    with pytest.raises(ModelError, match=message) as error:
        PolicySpec(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "declared"), options_of(PolicySpec).items())
def test_every_option_is_declared_whole_and_offered_by_the_commands(name, declared):
    assert declared.help.endswith(".")
    assert "\n" not in declared.help
    assert declared.kind.values
    assert declared.group
    assert declared.kind.read(declared.default) == declared.default
    for verb in ("memory", "comm", "step", "checkpoint"):
        command = estimate.commands[verb]
        flags = {flag for parameter in command.params for flag in parameter.opts if parameter.help}
        assert f"--{name.replace('_', '-')}" in flags


def test_plain_values_build_an_equal_policy():
    plain: dict[str, Any] = {"ac": "every:2", "loss": "chunked:4", "reshard": "4", "wrap": "block, a+b"}
    policy = PolicySpec(**plain, param_dtype="none")
    values = policy.to_mapping()
    assert (values["ac"], values["loss"], values["reshard"]) == ("every:2", "chunked:4", 4)
    assert (values["param_dtype"], values["wrap"]) == (None, ("block", "a+b"))
    assert PolicySpec.from_mapping(values) == policy


def test_unknown_option_of_a_mapping():
    with pytest.raises(ModelError, match="unknown option 'batch'; there are"):
        PolicySpec.from_mapping({"batch": 2})


YAML = """
model: llama3-8b
layers: 4
mesh: {dp_replicate: 2, dp_shard: 8}
hardware: h100-sxm
policy:
  batch_size: 2
  reshard: 4
  wrap: block, norm+output
"""
TOML = """
model = "llama3-8b"
layers = 4
mesh = "dp_replicate=2,dp_shard=8"
hardware = "h100-sxm"
[policy]
batch_size = 2
reshard = 4
wrap = ["block", "norm+output"]
"""


@pytest.mark.parametrize(("name", "text"), [("run.yaml", YAML), ("run.toml", TOML)])
def test_configuration_files_say_the_same(name, text, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    spec = make_spec(load_config(path))
    assert spec.model == ModelSpec(source="llama3-8b", layers=4)
    assert spec.mesh == MeshSpec(dp_replicate=2, dp_shard=8)
    assert spec.policy == PolicySpec(batch_size=2, reshard=4, wrap=("block", "norm+output"))
    assert spec.hardware == known_hardware()["h100-sxm"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "model: [", "not YAML"),
        ("a.toml", "model =", "not TOML"),
        ("a.yaml", "- 1", "not a table"),
        ("a.yaml", "modle: x", "unknown key 'modle'"),
        ("a.yaml", "policy: 3", "policy is not a table"),
    ],
)
def test_bad_configuration_files(name, text, message, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        load_config(path)
    assert "\n" not in str(error.value)


def test_hardware_is_known_or_refused():
    assert HardwareSpec.parse("H100-SXM").flops["bfloat16"] == 989_400_000_000_000
    assert HardwareSpec.parse("80GiB").memory_bytes == 80 << 30
    assert HardwareSpec.parse("80GiB").flops == {}
    with pytest.raises(ModelError, match="unknown hardware 'h1000': did you mean"):
        HardwareSpec.parse("h1000")


def test_a_mesh_table_has_known_dimensions():
    with pytest.raises(ModelError, match="no dimension 'vp'"):
        make_spec({"model": "gpt2", "mesh": {"vp": 8}})


def test_a_model_is_asked_for():
    with pytest.raises(ModelError, match="no model"):
        make_spec({"mesh": "dp_shard=2"})


def test_extra_models_are_read_with_their_roles_and_written_as_read():
    policy = PolicySpec.from_mapping({"extra_model": "gpt2, reward=a/config.json,self", "loss": "dpo"})
    assert [(one.source, one.role) for one in policy.other_models] == [
        ("gpt2", "reference"),
        ("a/config.json", "reward"),
    ]
    assert (policy.runs_itself_before, policy.roots, policy.sequences) == (True, 3, 2)
    assert policy.to_mapping()["extra_model"] == "gpt2,reward=a/config.json,self"
    assert PolicySpec.from_mapping(policy.to_mapping()) == policy


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("float8", "nvfp4", "use mxfp8"),
        ("pp_schedule", "DualPipeV", "use zbv"),
        ("ac", "memory_budget:0.5", "use op, or full and none"),
        ("attention", "te", "use cudnn"),
        ("attention", "transformer_engine", "use cudnn"),
        ("optimizer_impl", "in_backward", "use fused with clip_grad=false"),
        ("optimizer_impl", "cpu-offload", "use offload"),
    ],
)
def test_a_technique_that_is_not_modelled_is_refused_by_its_name(
    option: str, value: str, instead: str
) -> None:
    with pytest.raises(ModelError, match=f"is not modelled: {instead}"):
        PolicySpec.from_mapping({option: value})


@pytest.mark.parametrize(
    ("name", "memory_gib", "bf16"),
    [
        ("gh200", 95.6, 989.4),
        ("gb300", 277.5, 2500),
        ("b300", 268.2, 2250),
        ("mi325x", 256, 1307.4),
        ("mi355x", 288, 2516.6),
    ],
)
def test_newer_parts_are_known_with_their_sources(name: str, memory_gib: float, bf16: float) -> None:
    part = HardwareSpec.parse(name)
    assert part.memory_bytes / 2**30 == pytest.approx(memory_gib, abs=0.1)
    assert part.flops["bfloat16"] == bf16 * 1e12
    assert "data sheet" in part.source


def test_flash_attention_3_is_between_its_predecessor_and_cudnn_on_an_h100() -> None:
    h100 = HardwareSpec.parse("h100")
    rates = [
        h100.with_attention(kernel).attention_flops("bfloat16", 128, 8192)
        for kernel in ("flash", "flash3", "cudnn")
    ]
    assert rates == sorted(rates)
    assert rates[0] * 1.5 < rates[1] < rates[0] * 2


@pytest.mark.parametrize(("name", "kernel", "told"), [("a100", "cudnn", True), ("h100", "cudnn", False)])
def test_a_kernel_without_a_stated_rate_is_named(name: str, kernel: str, told: bool) -> None:
    source = HardwareSpec.parse(name).with_attention(kernel).source
    assert ("attention at the rate of flash: none is stated for cudnn" in source) is told


@pytest.mark.parametrize("name", ["h100", "h100-sxm-96gb", "h200", "gh200"])
def test_parts_with_the_die_of_the_h100_run_flash_attention_3(name: str) -> None:
    assert HardwareSpec.parse(name).with_attention("flash3").attention_tflops == 586


@pytest.mark.parametrize(
    ("name", "others"), [("a100", "flash"), ("mi300x", "flash"), ("b200", "flash, cudnn")]
)
def test_flash_attention_3_is_refused_in_one_line_where_its_rate_is_not_stated(
    name: str, others: str
) -> None:
    with pytest.raises(ModelError, match=f"no rate of FlashAttention-3: .* \\({others}\\)") as error:
        HardwareSpec.parse(name).with_attention("flash3")
    assert "\n" not in str(error.value)


def test_what_published_steps_took_is_said_of_the_part_that_they_ran_on() -> None:
    of = {name: HardwareSpec.parse(name).published_median for name in ("b200", "b300", "gb200", "b200-750w")}
    assert of == {"b200": 1.9, "b300": None, "gb200": None, "b200-750w": None}


def test_a_gb300_has_the_multiprocessors_that_its_driver_reports() -> None:
    assert HardwareSpec.parse("gb300").units == 152


@pytest.mark.parametrize(
    ("options", "hardware", "kernel"),
    [
        ({"torch": "2.11"}, "h100-sxm", "cudnn"),
        ({"torch": "2.10"}, "h100-sxm", "flash"),
        ({}, "h100-sxm", "flash"),
        ({"torch": "2.11", "attention": "flash"}, "h100-sxm", "flash"),
        ({"torch": "2.11"}, "a100-80gb", "flash"),
        ({"torch": "2.11", "attention": "math"}, "h100-sxm", "math"),
    ],
)
def test_torch_chooses_cudnns_attention_from_2_11_on(
    options: dict[str, Any], hardware: str, kernel: str
) -> None:
    stated = HardwareSpec.parse(hardware).attention_tflops
    policy = PolicySpec.from_mapping(options)
    assert attention_on(stated if isinstance(stated, dict) else (), policy) == kernel


def test_a_part_that_one_source_alone_judges_has_the_margin_of_untried_parts() -> None:
    """Every published A100 step is of one cluster; H100's are of several."""
    mesh, policy = MeshSpec(dp_shard=8), PolicySpec(torch="2.7")
    classes = {
        name: speed_class(mesh, policy, HardwareSpec.parse(name)) for name in ("a100", "h100", "h200", "b200")
    }
    assert classes == {
        "a100": "speed_on_untried_parts",
        "h100": "speed_of_sharded_models",
        "h200": "speed_of_sharded_models",
        "b200": "speed_on_untried_parts",
    }


def test_a_power_limit_is_part_of_the_name() -> None:
    """244 W leave an A100 half of what it has above idling, and so the root of the half of its clock."""
    whole, limited = HardwareSpec.parse("a100"), HardwareSpec.parse("a100@244W")
    assert (limited.name, whole.power_frac) == ("a100-80gb@244W", 1.0)
    assert limited.power_frac == pytest.approx(0.5**0.5)
    assert limited.achieved_flops("bfloat16") == pytest.approx(whole.achieved_flops("bfloat16") * 0.5**0.5)
    assert not HardwareSpec.parse("h100@500W").is_tried
    with pytest.raises(ModelError, match="write its power limit in watts"):
        HardwareSpec.parse("a100@fast")


@pytest.mark.parametrize(
    ("base", "param_dtype", "products"),
    [
        ("bf16", None, "bfloat16"),
        ("nf4", None, "float32"),
        ("bf16", "fp16", "float16"),
        (None, None, "float32"),
    ],
)
def test_products_with_frozen_weights_have_their_dtype(
    base: str | None, param_dtype: str | None, products: str
) -> None:
    lora = "r=8,targets=q_proj" + (f",base={base}" if base else "")
    assert PolicySpec.from_mapping({"lora": lora, "param_dtype": param_dtype}).product_dtype == products
