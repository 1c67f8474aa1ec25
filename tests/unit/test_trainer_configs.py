"""``--from-config``: each trainer's file becomes the options that its code trains with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fsdp2prof.errors import InputError, ModelError
from fsdp2prof.estimators.config.catalog import builtin_config
from fsdp2prof.estimators.config.inputs import make_spec
from fsdp2prof.estimators.config.stacks import with_stack
from fsdp2prof.estimators.config.trainers import TrainerRun, read_trainer_files
from fsdp2prof.workflows.description import describe

TITAN = """
[job]
description = "an 8B on one node"
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
[activation_checkpoint]
mode = "selective"
"""
REGISTRY = """
from torchtitan.trainer import Trainer
from . import model_registry

def small():
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=4 * 8192, max_context_length=8192),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
    )

def float8():
    config = small()
    config.training.max_context_length = 4096
    config.compile = CompileConfig(enable=True, components=["model"])
    config.model_converters = ModelConvertersContainer.Config(
        converters=[Float8LinearConverter.Config(enable_fsdp_float8_all_gather=True)],
    )
    return config

def converted():
    config = small()
    config.compile = CompileConfig(enable=True, enable_async_tensor_parallel=True)
    config.model_spec = model_registry(
        "16B", attn_backend="varlen", moe_comm_backend="hybridep",
        converters=[
            Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=True),
            Float8GroupedExpertsConverter.Config(),
        ],
    )
    return config

def predicts_more():
    return Trainer.Config(model_spec=model_registry("671B", num_mtp_layers=1))
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
"""
TRL = """
model_name_or_path: Qwen/Qwen3-8B
dataset_name: trl-lib/Capybara
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
max_length: 4096
packing: true
learning_rate: 2.0e-5
"""


def test_primus_overrides_torchtitan(tmp_path: Path) -> None:
    """The model is named by Primus' file of it."""
    (tmp_path / "pretrain.yaml").write_text("""
modules:
  pre_trainer:
    framework: torchtitan
    model: llama3.1_8B.yaml
    overrides:
      training: {local_batch_size: 4, seq_len: 8192}
      activation_checkpoint: {mode: none}
      primus_turbo: {enable_primus_turbo: true}
""")
    run = read_trainer_files([tmp_path / "pretrain.yaml"], world_size=8)
    got = made(run)
    assert (got["model"], got["batch_size"], got["seq_len"], got["ac"]) == ("llama3-8b", 4, 8192, "none")
    assert run.read.not_known == ["primus_turbo.enable_primus_turbo"]


AXOLOTL = """
base_model: meta-llama/Llama-3.2-3B
datasets: [{path: a/b, type: alpaca}]
sequence_len: 2048
sample_packing: true
micro_batch_size: 4
gradient_accumulation_steps: 2
optimizer: adamw_torch_fused
bf16: auto
gradient_checkpointing: true
fsdp_version: 2
fsdp_config:
  offload_params: false
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
"""
FACTORY = """
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: sft
finetuning_type: lora
lora_target: q_proj,v_proj
lora_rank: 16
template: qwen
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""
FACTORY_V1 = """
model: Qwen/Qwen3-0.6B
model_class: llm
dist_config: {name: fsdp2}
micro_batch_size: 2
global_batch_size: 32
cutoff_len: 4096
"""
TORCHTUNE = """
model:
  _component_: torchtune.models.llama3_1.llama3_1_8b
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 8192
dataset:
  _component_: torchtune.datasets.alpaca_dataset
  packed: true
batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
  fused: true
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
dtype: bf16
enable_activation_checkpointing: true
custom_sharded_layers: [tok_embeddings, output]
"""
PRIME = """
max_steps = 10
[model]
name = "Qwen/Qwen3-4B"
[data]
seq_len = 16384
batch_size = 16
[deployment]
num_train_gpus = 8
"""
AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 4}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.1-8B
distributed: {strategy: fsdp2, dp_size: none, tp_size: 2, cp_size: 1}
packed_sequence: {packed_sequence_size: 4096}
optimizer: {_target_: torch.optim.Adam, lr: 1.0e-5}
"""
VEOMNI = """
model: {model_path: Qwen/Qwen3-8B}
data: {train_path: fineweb, max_seq_len: 8192}
train:
  micro_batch_size: 1
  global_batch_size: 16
  accelerator:
    ulysses_size: 1
    fsdp_config: {fsdp_mode: fsdp2}
  dyn_bsz: false
"""

EXPECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "titan.toml": (
        TITAN,
        {
            "model": "llama3-8b", "dp_shard": 8, "batch_size": 2, "grad_accum": 4,
            "seq_len": 8192, "ac": "every:2",
            "optimizer_impl": "fused", "param_dtype": "bfloat16", "reduce_dtype": "float32", "loss": "full",
        },
    ),
    "axolotl.yaml": (
        AXOLOTL,
        {
            "model": "llama3.2-3b", "dp_shard": 8, "batch_size": 4, "grad_accum": 2,
            "seq_len": 2048, "ac": "full",
            "orig_dtype": "bfloat16", "reduce_dtype": "bfloat16", "output_dtype": "bfloat16",
            "reshard_root": True,
        },
    ),
    "factory_v1.yaml": (
        FACTORY_V1,
        {
            "model": "qwen3-0.6b", "dp_shard": 8, "batch_size": 2, "grad_accum": 2, "ac": "full",
            "reduce_dtype": "float32", "orig_dtype": "float32", "optimizer_impl": "foreach",
        },
    ),
    "tune.yaml": (
        TORCHTUNE,
        {
            "model": "llama3.1-8b", "dp_shard": 8, "batch_size": 2, "orig_dtype": "bfloat16",
            "param_dtype": None,
            "wrap": ("block", "tok_embeddings", "output"), "clip_grad": False, "optimizer_impl": "fused",
        },
    ),
    "prime.toml": (
        PRIME,
        {
            "model": "qwen3-4b", "dp_shard": 8, "batch_size": 1, "grad_accum": 2,
            "seq_len": 16384, "ac": "full",
            "compile": True, "orig_dtype": "float32", "reshard_root": True,
            "loss": "chunked-blocks:8192", "optimizer_impl": "for-loop", "offload_optimizer": True,
        },
    ),
    "nemo.yaml": (
        AUTOMODEL,
        {
            "model": "llama3.1-8b", "tp": 2, "dp_shard": 4, "batch_size": 4, "grad_accum": 4,
            "sync": "last",
            "orig_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "bfloat16", "ac": "none",
        },
    ),
    "veomni.yaml": (
        VEOMNI,
        {
            "model": "qwen3-8b", "dp_shard": 8, "grad_accum": 2, "seq_len": 8192, "ac": "full",
            "loss": "fused",
            "orig_dtype": "float32", "reduce_dtype": "float32",
        },
    ),
}  # fmt: skip


def read(folder: Path, *files: tuple[str, str], **options: Any) -> TrainerRun:
    paths = []
    for name, text in files:
        (folder / name).write_text(text)
        paths.append(folder / name)
    return read_trainer_files(paths, **options)


def made(run: TrainerRun) -> dict[str, Any]:
    """Model, mesh and policy of a run that was read, by the names of options."""
    spec = make_spec(run.values)
    policy = {
        key: None if value == "none" and key != "ac" else value
        for key, value in spec.policy.to_mapping().items()
    }
    sizes = {**spec.mesh.sizes(), "ep": spec.mesh.ep}
    return {"model": builtin_config(spec.model.source).name, **sizes, **policy}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_trainers_file_becomes_its_options(name: str, tmp_path: Path) -> None:
    text, expected = EXPECTED[name]
    run = read(tmp_path, (name, text), world_size=8)
    got = made(run)
    assert {key: got[key] for key in expected} == expected
    assert not run.read.not_known


def test_trl_and_accelerate_are_read_together(tmp_path: Path) -> None:
    got = made(read(tmp_path, ("sft.yaml", TRL), ("fsdp.yaml", ACCELERATE)))
    expected = {
        "model": "qwen3-8b", "dp_shard": 8, "batch_size": 2, "grad_accum": 4, "seq_len": 4096, "ac": "full",
        "orig_dtype": "float32", "reduce_dtype": "bfloat16", "loss": "chunked-tokens:256",
        "optimizer_impl": "fused",
    }  # fmt: skip
    assert {key: got[key] for key in expected} == expected


def test_llama_factory_with_accelerate_is_lora(tmp_path: Path) -> None:
    run = read(tmp_path, ("sft.yaml", FACTORY), ("fsdp.yaml", ACCELERATE))
    got = made(run)
    assert (got["model"], got["lora"], got["ac"]) == ("qwen2.5-7b", "r=16,targets=q_proj?+v_proj?", "full")
    with pytest.raises(ModelError, match="FSDP1"):
        read(tmp_path, ("sft.yaml", FACTORY), ("fsdp.yaml", ACCELERATE.replace("version: 2", "version: 1")))


def test_a_registry_is_read_and_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "llama3"
    folder.mkdir()
    (folder / "config_registry.py").write_text(REGISTRY + "\nraise SystemExit('ran')\n")
    small, float8 = (
        made(read_trainer_files([folder / f"config_registry.py:{name}"], world_size=8))
        for name in ("small", "float8")
    )
    assert (small["model"], small["tp"], small["dp_shard"], small["batch_size"]) == ("llama3-8b", 2, 4, 4)
    assert (small["ac"], small["float8"]) == ("full", None)
    assert (float8["batch_size"], float8["seq_len"], float8["compile"]) == (8, 4096, True)
    assert (float8["float8"], float8["fp8_all_gather"], float8["loss"]) == (
        "tensorwise",
        True,
        "chunked-backward:8",
    )
    older = REGISTRY.replace("num_tokens_per_microbatch_per_dp_rank=4 * 8192, max_context", "max_context")
    older = older.replace("max_context_length", "seq_len").replace(
        "model_spec=", "optimizer=default_adamw(), model_spec="
    )
    (folder / "config_registry.py").write_text(older)
    got = read_trainer_files([folder / "config_registry.py:small"], world_size=8)
    assert (made(got)["batch_size"], made(got)["seq_len"], made(got)["optimizer"]) == (8, 8192, "adamw")
    assert got.values["stack"] == "torchtitan-2026-02"  # those with a loss name it
    with pytest.raises(InputError, match="one of small, float8"):
        read_trainer_files([folder / "config_registry.py"], world_size=8)


def test_a_registrys_helpers_are_given_their_arguments(tmp_path: Path) -> None:
    """The family is of the folder, of the function, or of where the model comes from."""
    (tmp_path / "recipes.py").write_text("""
def _base(model_spec, sequences, *, length=4096, compiled):
    config = Trainer.Config(model_spec=model_spec, compile=CompileConfig(enable=compiled))
    config.training = TrainingConfig(local_batch_size=sequences, seq_len=length)
    return config

def mine():
    from torchtitan.models.llama3 import model_registry
    return _base(model_registry("8B"), 2 * 3, compiled=True)

def gpt_oss_20b():
    return _base(model_registry("20b"), 1, compiled=False)
""")
    other = made(read_trainer_files([tmp_path / "recipes.py:gpt_oss_20b"], world_size=8))
    assert (other["model"], other["batch_size"]) == ("gpt-oss-20b", 1)
    got = made(read_trainer_files([tmp_path / "recipes.py:mine"], world_size=8))
    assert (got["model"], got["batch_size"], got["seq_len"], got["compile"]) == ("llama3-8b", 6, 4096, True)


def test_what_a_registry_tells_its_model_is_read(tmp_path: Path) -> None:
    (folder := tmp_path / "deepseek_v3").mkdir()
    (folder / "config_registry.py").write_text(REGISTRY)
    run = read_trainer_files([folder / "config_registry.py:converted"], world_size=8)
    got = made(run)
    # Float8LinearConverter's recipe is rowwise there unless it is named
    assert (got["model"], got["float8"], got["fp8_all_gather"], got["async_tp"]) == (
        "deepseek-v3-16b",
        "rowwise",
        False,
        True,
    )
    assert not run.read.not_known
    assert [one for one in run.read.open if "--documents varlen:K" in one]
    said = " ".join(run.read.notes)
    assert "converter Float8GroupedExpertsConverter is not" in said
    with pytest.raises(ModelError, match="num_mtp_layers = 1"):
        read_trainer_files([folder / "config_registry.py:predicts_more"], world_size=8)
    (another := tmp_path / "qwen3_5").mkdir()
    (another / "config_registry.py").write_text(REGISTRY.replace("small", "qwen35_8b"))
    run = read_trainer_files([another / "config_registry.py:qwen35_8b"], world_size=8)
    assert run.values.get("model") is None


AXOLOTL = """
base_model: Qwen/Qwen3-8B
dp_shard_size: 8
fsdp_version: 2
fsdp_config: {reshard_after_forward: true}
"""
TUNE = """
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
optimizer: {_component_: torch.optim.AdamW, foreach: false}
"""
TRAINER = """
model_name_or_path: Qwen/Qwen3-8B
per_device_train_batch_size: 1
"""
ADAPTED_V1 = """
model: Qwen/Qwen3-8B
dist_config: {name: fsdp2}
peft_config: {name: lora, r: 4, target_modules: q_proj}
"""
NEMO = """
step_scheduler: {local_batch_size: 1}
model: {pretrained_model_name_or_path: Qwen/Qwen3-8B}
peft: {dim: 4, target_modules: [q_proj]}
"""
QLORA = "r=4,targets=q_proj?,base=bnb-nf4"
MIXTURE = NEMO + "distributed: "
PREFERENCES = FACTORY.replace("stage: sft", "stage: dpo").replace("lora\nlora_target", "full\nlora_target")
PREFERENCES += "fsdp_config: {fsdp_version: 2}\n"
OLDER_MIXTURE = (
    MIXTURE + "{ep_size: 8}\nparallelizer: {activation_checkpointing: true, reshard_after_forward: false}"
)
STAGED = """
step_scheduler: {local_batch_size: 4}
model: {pretrained_model_name_or_path: Qwen/Qwen3-8B}
distributed: {pp_size: 2}
autopipeline: {pp_schedule: gpipe, pp_microbatch_size: 2}
"""
EMBEDDINGS = r"^(?:model\.embed_tokens|lm_head$)"
GENERATES = (
    TRAINER
    + """fsdp_config: {fsdp_version: 2}
num_generations: 8
max_prompt_length: 512
max_completion_length: 1024
"""
)
KEPT = "model.backend.enable_fsdp_optimizations: true"


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        (
            AXOLOTL + "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]",
            "loss",
            "fused",
        ),
        (AXOLOTL + "plugins: [a.CutCrossEntropyPlugin]\ncut_cross_entropy: false", "loss", None),
        (AXOLOTL + "plugins: [axolotl.integrations.liger.LigerPlugin]", "loss", None),
        (AXOLOTL + "attn_implementation: eager", "attention", "math"),
        (AXOLOTL + "attn_implementation: sdpa", "attention", "flash"),
        (TUNE + "loss: {_component_: torch.nn.CrossEntropyLoss}", "loss", "full"),
        (TUNE + "loss: {_component_: torch.nn.CrossEntropyLoss}\ncompile: true", "loss", "compiled"),
        (TUNE, "optimizer_impl", "for-loop"),
        (TUNE + "enable_activation_offloading: true", "offload_activations", True),
        (AXOLOTL + "activation_offloading: true", "offload_activations", True),
        (AXOLOTL + "gradient_checkpointing: offload", "offload_activations", True),
        (AXOLOTL + "gradient_checkpointing: offload", "ac", "full"),
        (VEOMNI + "train: {enable_activation_offload: true}", "offload_activations", True),
        (TRAINER + "fsdp_config: {fsdp_version: 2}\nattn_implementation: eager", "attention", "math"),
        (
            ADAPTED_V1 + "quant_config: {name: bnb, quantization_bit: 4}",
            "lora",
            QLORA,
        ),
        (ADAPTED_V1 + "quant_config: null", "lora", "r=4,targets=q_proj?"),
        (ADAPTED_V1 + "kernel_config: {name: liger_kernel}", "norm", "fused"),
        (NEMO + "fp8: {enabled: true, enable_fsdp_float8_all_gather: true}", "fp8_all_gather", True),
        (NEMO + "fp8: {enabled: true, recipe_name: rowwise}", "float8", "rowwise"),
        (NEMO + "fp8: {enabled: false, recipe_name: rowwise}", "float8", None),
        (NEMO + "quantization: {load_in_4bit: true}", "lora", QLORA),
        (NEMO.replace("dim: 4, ", ""), "lora", "r=8,targets=q_proj?"),
        (NEMO + "fp8: null\ndistributed: {moe: null, pipeline: null}", "float8", None),
        (NEMO, "sync", "last"),
        (MIXTURE + "{moe: {wrap_outer_model: false}, ep_size: 8}", "sync", "each"),
        (MIXTURE + "{ep_size: 8}", "sync", "last"),
        (MIXTURE + "{moe: {wrap_outer_model: false}, ep_size: 8}\n" + KEPT, "sync", "last"),
        (AXOLOTL + "attn_implementation: flash_attention_3", "attention", "flash3"),
        (AXOLOTL + "attn_implementation: flash_attention_4", "attention", "cudnn"),
        (AXOLOTL + "rl: dpo", "loss", "dpo"),
        (AXOLOTL + "rl: dpo", "extra_model", "Qwen/Qwen3-8B"),
        (AXOLOTL + "rl: dpo\nadapter: lora\nlora_r: 8", "extra_model", "self"),
        (AXOLOTL + "rl: simpo", "extra_model", None),
        (AXOLOTL + "liger_cross_entropy: true", "loss", "in-place"),
        (AXOLOTL + "unfrozen_parameters: [model.embed_tokens, lm_head$]", "trainable", EMBEDDINGS),
        (AXOLOTL + "adapter: lora\nlora_r: 8\nlora_target_linear: true", "lora", "r=8,targets=all-linear?"),
        (AXOLOTL.replace(": 8", ": 4") + "tensor_parallel_size: 2", "sequence_parallel", False),
        (AXOLOTL.replace(": 8", ": 4") + "tensor_parallel_size: 2", "loss_parallel", False),
        (AXOLOTL, "sequence_parallel", None),
        (NEMO + "distributed: {tp_size: 2}", "sequence_parallel", False),
        (NEMO + "distributed: {tp_size: 2, sequence_parallel: true}", "sequence_parallel", None),
        (NEMO + "loss_fn: {_target_: a.te_parallel_ce.TEParallelCrossEntropy}", "loss", "in-place"),
        (GENERATES, "loss", "logprobs"),
        (GENERATES, "seq_len", 1536),
        (GENERATES, "extra_model", None),
        (GENERATES + "beta: 0.04", "extra_model", "Qwen/Qwen3-8B"),
        (TUNE + "loss: {_component_: torchtune.rlhf.loss.DPOLoss}", "extra_model", "llama3.1-8b"),
        (TRAINER + "beta: 0.01\nfsdp_config: {fsdp_version: 2}", "loss", "dpo"),
        (TRAINER + "loss_type: ipo\nfsdp_config: {fsdp_version: 2}", "extra_model", "Qwen/Qwen3-8B"),
        (PREFERENCES, "extra_model", "Qwen/Qwen2.5-7B-Instruct"),
        (PREFERENCES + "pref_loss: orpo", "extra_model", None),
        (PREFERENCES + "pure_bf16: true", "orig_dtype", "bf16"),
        (VEOMNI + "dpo_config: {beta: 0.1, reference_free: false}", "extra_model", "Qwen/Qwen3-8B"),
        (VEOMNI + "dpo_config: {reference_free: true}", "loss", "dpo"),
        (OLDER_MIXTURE, "reshard", "never"),
        (OLDER_MIXTURE, "ac", "full"),
        (MIXTURE + "{activation_checkpointing: selective}", "ac", "op"),
        (MIXTURE + "{activation_checkpointing: full}", "ac", "full"),
        (AXOLOTL + "kd_trainer: false\ntiled_mlp: false", "ac", "none"),
        (VEOMNI.replace("train:", "train:\n  torch_compile: {enable: true}", 1), "compile", True),
        (STAGED, "pp_schedule", "gpipe"),
        (STAGED, "batch_size", 2),
    ],
)
def test_kernels_and_losses_follow_the_file(
    text: str, option: str, value: str | bool | None, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    run = read_trainer_files([tmp_path / "c.yaml"], world_size=8)
    assert run.values["policy"].get(option) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (AXOLOTL + "adapter: lora\nload_in_8bit: true", "load_in_8bit = True: weights in 8 bits"),
        (
            AXOLOTL + "adapter: lora\nlora_target_parameters: [experts.down_proj]",
            "lora_target_parameters",
        ),
        (AXOLOTL + "expert_parallel_size: 2", "expert_parallel_size = 2"),
        (ADAPTED_V1 + "quant_config: {name: bnb, quantization_bit: 8}", "quantization_bit = 8"),
        (FACTORY_V1 + "quant_config: {quantization_bit: 4}", r"c\.yaml: quant_config\.quantization_bit = 4"),
        (AUTOMODEL + "quantization: {load_in_4bit: true}", "load_in_4bit = True"),
        (TUNE + "loss: {_component_: torchtune.rlhf.loss.PPOLoss}", r"loss\._component_ = .*PPOLoss"),
        ("model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\ntop_k: 3", "not a training recipe"),
        (AXOLOTL + "rl: kto", "rl = 'kto'"),
        (AXOLOTL + "kd_trainer: true", "kd_trainer = True: distillation .* --override kd_trainer=none"),
        (AXOLOTL + "unfrozen_parameters: ['lm_head.weight[:32]']", "unfrozen_parameters .* some rows"),
        (NEMO + "recipe: TrainBiEncoderRecipe", "recipe = 'TrainBiEncoderRecipe': of Automodel's recipes"),
        (NEMO + "teacher_model: {pretrained_model_name_or_path: a/b}", "teacher_model.*distillation"),
        (TUNE + "teacher_model: {_component_: torchtune.models.llama3_1.llama3_1_8b}", "distillation"),
        (TUNE + "quantizer: {_component_: torchtune.training.QATQuantizer}", "fake quantization"),
        ("tokenizer: {_component_: a.b}\nbatch_size: 8\ntasks: [mmlu]", "not a training recipe"),
        (VEOMNI + "model.condition_model_path: Qwen/Qwen-Image", "diffusion models"),
        (AXOLOTL + "qat: {weight_dtype: int8}", "qat.weight_dtype = 'int8': fake quantization"),
        (PREFERENCES + "use_galore: true", "use_galore = True: this optimizer"),
        (PREFERENCES + "pipeline_model_parallel_size: 4", "pipeline_model_parallel_size = 4: Megatron"),
        (PREFERENCES + "export_dir: merged", "export_dir = 'merged': do_train is not set"),
        (NEMO + "optimizer: {_target_: te.FusedAdam, exp_avg_dtype: bfloat16}", "beside master weights"),
    ],
)
def test_what_a_file_asks_for_and_is_not_modelled_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ModelError, match=said):
        read_trainer_files([tmp_path / "c.yaml"], world_size=8)


def test_contradictions_and_plugins_are_said(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(AXOLOTL + "plugins: [my.Plugin]\nnew_key: 3\nuse_sonicmoe: true")
    read = read_trainer_files([tmp_path / "a.yaml"]).read
    assert read.notes == [
        "use_sonicmoe = True is not modelled: torch's grouped products are estimated",
        "plugins: my.Plugin is not known; what it changes is not in the estimate",
    ]
    assert read.not_known == ["new_key"]
    (tmp_path / "t.yaml").write_text(TRAINER + "use_unsloth_gc: true")
    (tmp_path / "acc.yaml").write_text(ACCELERATE)
    notes = read_trainer_files([tmp_path / "t.yaml", tmp_path / "acc.yaml"], world_size=16).read.notes
    assert "accelerate.num_processes = 8 makes a world of 8: --world-size 16 is taken" in notes
    assert any("use_unsloth_gc = True is not modelled" in note for note in notes)


def test_what_a_file_does_not_say_is_asked_or_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--world-size"):
        read(tmp_path, ("titan.toml", TITAN))
    forked = TITAN + '[parallelism.mine]\nthing = 3\n[float8]\nrecipe_name = "rowwise"\n'
    run = read(tmp_path, ("titan.toml", forked), world_size=8, overrides=["activation_checkpoint.mode=full"])
    assert run.read.not_known == ["parallelism.mine.thing"]
    assert any("[float8] does nothing" in note for note in run.read.notes)
    assert run.values["policy"]["ac"] == "full"
    assert any(row.source == "--override" and row.became == "full" for row in run.read.rows)
    assert any(row.source.endswith("job_config.py:151") and not row.given for row in run.read.rows)


ARGUMENTS = "model_name_or_path: Qwen/Qwen3-8B\nbf16: true\nper_device_train_batch_size: 1\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fsdp: true", {"reshard": "always", "offload": False}),
        ("fsdp: full_shard auto_wrap offload", {"reshard": "always", "offload": True}),
        ("fsdp: [shard_grad_op, auto_wrap]", {"reshard": "never", "offload": False}),
        ("fsdp: true\nfsdp_config: {cpu_offload: true}", {"offload": True}),
        (
            "fsdp: shard_grad_op\nfsdp_config: {version: 2, reshard_after_forward: true}",
            {"reshard": "always"},
        ),
    ],
)
def test_words_of_training_arguments_are_read(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    run = read(tmp_path, ("args.yaml", ARGUMENTS + text), world_size=8)
    got = made(run)
    got["reshard"] = got["reshard"].partition(",")[0]
    assert {key: got[key] for key in expected} == expected
    assert not run.read.not_known


def test_sharding_that_is_only_there_with_fsdp1_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="hybrid_shard is only there with FSDP1"):
        read(tmp_path, ("args.yaml", ARGUMENTS + "fsdp: hybrid_shard auto_wrap"), world_size=8)


def test_what_is_stated_beside_the_files_is_not_asked(tmp_path: Path) -> None:
    files = ("args.yaml", ARGUMENTS + "fsdp: true")
    assert any("--seq-len" in one for one in read(tmp_path, files, world_size=8).read.open)
    stated = read(tmp_path, files, world_size=8, stated={"seq_len"})
    assert not any("--seq-len" in one for one in stated.read.open)


def test_a_stacks_norm_is_of_models_that_have_none_of_their_own(tmp_path: Path) -> None:
    values = read(tmp_path, ("args.yaml", ARGUMENTS + "fsdp: true"), world_size=8).values
    assert make_spec(values).policy.norm == "composed"
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    described = describe(
        trainer_files=[tmp_path / "args.yaml"],
        given={"world_size": 8, "model": str(config)},
        policy={"seq_len": 64},
    )
    assert described.spec().policy.norm is None
    assert not any("RMSNorm" in note for note in described.spec().notes)


def test_kernels_of_a_file_are_left_out_where_the_model_has_its_own_modules(tmp_path: Path) -> None:
    """Liger replaces modules of transformers, which an estimate runs as they are."""
    liger = AXOLOTL + "\nliger_rms_norm: true\nliger_glu_activation: true\n"
    run = read(tmp_path, ("axolotl.yaml", liger), world_size=8)
    assert (made(run)["norm"], made(run)["mlp"]) == ("fused", "fused")
    trained = made(read(tmp_path, ("sft.yaml", TRL + "\nuse_liger_kernel: true"), ("fsdp.yaml", ACCELERATE)))
    assert [trained[option] for option in ("loss", "norm", "mlp")] == ["fused"] * 3
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    given = {"world_size": 8, "model": str(config)}
    spec = describe(trainer_files=[tmp_path / "axolotl.yaml"], given=given, policy={}).spec()
    assert (spec.policy.norm, spec.policy.mlp) == (None, None)
    assert "mlp and norm of the files are those of the model's own modules here" in spec.notes
    stated = describe(trainer_files=[tmp_path / "axolotl.yaml"], given=given, policy={"norm": "fused"})
    assert stated.spec().policy.norm == "fused"  # and is refused when the model is built


@pytest.mark.parametrize(
    ("text", "key", "option"),
    [
        (TORCHTUNE.replace("dtype: bf16\n", ""), "dtype", "--orig-dtype"),
        (TORCHTUNE.replace("batch_size: 2\n", ""), "batch_size", "--batch-size"),
        (AUTOMODEL, "loss_fn._target_", "--loss"),
    ],
)
def test_a_key_without_a_default_is_still_unknown(text: str, key: str, option: str, tmp_path: Path) -> None:
    run = read(tmp_path, ("run.yaml", text), world_size=8)
    assert [one for one in run.read.open if one.startswith(f"{key} is in no file") and option in one]


PIPELINED = """
step_scheduler: {global_batch_size: 64, local_batch_size: 8}
model:
  pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B
  backend: {attn: te, linear: te, dispatcher: deepep}
distributed:
  strategy: fsdp2
  pp_size: 2
  ep_size: 4
  offload_policy: {_target_: torch.distributed.fsdp.CPUOffloadPolicy}
  enable_fsdp2_prefetch: true
  pipeline: {pp_schedule: interleaved_1f1b, pp_microbatch_size: 2}
optimizer: {_target_: torch.optim.AdamW, foreach: false}
peft: {dim: 8, target_modules: "*_proj"}
"""


def test_pipelines_experts_and_patterns_of_automodel(tmp_path: Path) -> None:
    run = read(tmp_path, ("nemo.yaml", PIPELINED), world_size=8)
    policy = run.values["policy"]
    # 64 samples over 4 data-parallel ranks are two local batches of 8, each in four micro-batches of 2
    expected = {
        "pp_schedule": "interleaved:2", "batch_size": 2, "grad_accum": 8, "reshard": "never", "offload": True,
        "forward_prefetch": 1, "backward_prefetch": 2, "attention": "cudnn", "optimizer_impl": "for-loop",
        "lora": "r=8,targets=*_proj?",
    }  # fmt: skip
    assert {key: policy[key] for key in expected} == expected
    assert policy["expert_dispatch"] == "once"
    assert any("model.backend.dispatcher = deepep: its own buffers" in note for note in run.read.notes)
    other = read(tmp_path, ("nemo.yaml", PIPELINED), world_size=8, overrides=["model.backend.dispatcher=own"])
    assert "expert_dispatch" not in other.values["policy"]
    assert any("model.backend.dispatcher = own is not modelled" in note for note in other.read.notes)
    assert any(note.startswith("model.backend.linear = te: torch") for note in run.read.notes)
    assert policy["pp_runs"] == 2
    short = PIPELINED.replace("pp_microbatch_size: 2", "pp_microbatch_size: 2, layers_per_stage: 4")
    stages = read(tmp_path, ("nemo.yaml", short), world_size=8).values["stages"]
    assert stages.schedule(48, 0) == "interleaved:6"
    with pytest.raises(ModelError, match="13 stages are not a multiple of pp=2"):
        stages.schedule(48, 1)
    assert structs.replace(stages, rounding="down").schedule(48, 1) == "interleaved:6"
    assert structs.replace(stages, rounding="up").schedule(48, 1) == "interleaved:7"
    with pytest.raises(ModelError, match="add --pp-schedule interleaved:K"):
        stages.schedule(None, 0)
    with pytest.raises(ModelError, match="needs two stages a rank"):
        stages.schedule(8, 0)
    masters = "{_target_: transformer_engine.pytorch.optimizers.fused_adam.FusedAdam, master_weights: true"
    for more, name in (("}", "adamw-master"), (", store_param_remainders: true}", "adamw-remainders")):
        text = PIPELINED.replace("{_target_: torch.optim.AdamW, foreach: false}", masters + more)
        assert read(tmp_path, ("nemo.yaml", text), world_size=8).values["policy"]["optimizer"] == name
    alone = PIPELINED.replace("pp_size: 2", "pp_size: 1")
    run = read(tmp_path, ("nemo.yaml", alone), world_size=8)
    assert "pp_schedule" not in run.values["policy"]
    assert "distributed.pipeline does nothing: pipeline parallelism is 1" in run.read.notes
    whole = PIPELINED.replace('"*_proj"', '["*"]')
    run = read(tmp_path, ("nemo.yaml", whole), world_size=8)
    assert run.values["policy"]["lora"] == "r=8,targets=*?+experts?"
    assert "peft.target_modules: the adapter of lm_head is not in the estimate" in run.read.notes


def test_bare_keys_are_read_and_kept_parameters_are_said(tmp_path: Path) -> None:
    bare = NEMO + "fp8: false\ndistributed: {moe: null, pipeline: null}\n"
    run = read(tmp_path, ("nemo.yaml", bare), world_size=8, overrides=["model.backend.linear=null"])
    assert not run.read.not_known
    assert not any("model.backend.linear" in note or "does nothing" in note for note in run.read.notes)
    kept = ["model.backend.enable_fsdp_optimizations=true", "step_scheduler.global_batch_size=16"]
    said = [
        any(
            "enable_fsdp_optimizations" in note
            for note in read(tmp_path, ("nemo.yaml", NEMO), **options).read.notes
        )
        for options in ({"world_size": 8, "overrides": kept}, {"world_size": 16, "overrides": kept})
    ]
    assert said == [True, False]  # two micro-batches, and one
    held = (
        ADAPTED_V1
        + "quant_config: {quantization_bit: 4, compute_dtype: bfloat16, double_quantization: false}"
    )
    run = read(tmp_path, ("factory.yaml", held), world_size=8)
    assert not run.read.not_known
    assert any("quant_config.double_quantization = False" in note for note in run.read.notes)


def test_sections_of_torchtitan_follow_their_converter(tmp_path: Path) -> None:
    text = TITAN.replace('flavor = "8B"', 'flavor = "8B"\nconverters = ["float8", "quantize.grouped_mm.mx"]')
    text += "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n"
    text = text.replace("[parallelism]", "[parallelism]\nenable_async_tensor_parallel = true")
    run = read(tmp_path, ("titan.toml", text), world_size=8)
    assert run.values["policy"]["fp8_all_gather"] is True
    assert not run.read.not_known
    said = " ".join(run.read.notes)
    assert "converter quantize.grouped_mm.mx is not modelled" in said
    assert "enable_async_tensor_parallel does nothing: compile.enable is false" in said


def test_a_registry_that_starts_from_another_is_refused(tmp_path: Path) -> None:
    text = """
from elsewhere import changed
def mine():
    return changed(Trainer.Config())
def groups():
    return Trainer.Config(optimizer=OptimizersContainer.Config(param_groups=make_groups()))
"""
    (tmp_path / "config_registry.py").write_text(text)
    with pytest.raises(InputError, match="starts from changed"):
        read_trainer_files([tmp_path / "config_registry.py:mine"], world_size=8)
    read_trainer_files([tmp_path / "config_registry.py:groups"], world_size=8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TRL, "no file configures FSDP"),
        (AXOLOTL.partition("fsdp_version")[0] + "deepspeed: zero3.json\n", "DeepSpeed is not FSDP2"),
    ],
)
def test_without_fsdp_the_reason_is_named(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        read(tmp_path, ("run.yaml", text), world_size=8)


def test_sizes_of_accelerates_mesh_are_read(tmp_path: Path) -> None:
    mesh = "parallelism_config: {parallelism_config_dp_shard_size: 4, parallelism_config_cp_size: 2}\n"
    got = made(read(tmp_path, ("sft.yaml", TRL), ("fsdp.yaml", ACCELERATE + mesh)))
    assert (got["dp_shard"], got["cp"]) == (4, 2)
    with pytest.raises(ModelError, match="a mesh of 4 ranks, and the world has 8"):
        read(tmp_path, ("sft.yaml", TRL), ("fsdp.yaml", ACCELERATE + mesh.replace("4", "2")))


def test_ulysses_of_accelerate_is_a_ring(tmp_path: Path) -> None:
    mesh = "parallelism_config: {parallelism_config_dp_shard_size: 2, parallelism_config_sp_size: 4}\n"
    run = read(tmp_path, ("sft.yaml", TRL), ("fsdp.yaml", ACCELERATE + mesh))
    assert (made(run)["dp_shard"], made(run)["cp"]) == (2, 4)
    assert any("sp_size: estimated as ring attention" in note for note in run.read.notes)


def test_lora_of_veomni_is_read(tmp_path: Path) -> None:
    text = VEOMNI.replace(
        "{model_path", "{lora_config: {rank: 16, lora_modules: [q_proj, o_proj]}, model_path"
    )
    assert made(read(tmp_path, ("veomni.yaml", text), world_size=8))["lora"] == "r=16,targets=q_proj?+o_proj?"


def test_a_rank_that_no_file_says_is_asked(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="lora_r is in no file"):
        read(tmp_path, ("run.yaml", AXOLOTL + "adapter: lora\n"), world_size=8)


def test_an_allocator_that_a_file_sets_replaces_the_stacks(tmp_path: Path) -> None:
    assert made(read(tmp_path, ("sft.toml", PRIME)))["allocator"] == "expandable"
    said = PRIME + '[env_vars]\nPYTORCH_CUDA_ALLOC_CONF = "expandable_segments:False"\n'
    assert made(read(tmp_path, ("sft.toml", said)))["allocator"] == "classic"


@pytest.mark.parametrize(
    ("given", "kernel", "asked"),
    [
        ("flash_attention_2", "flash", False),
        ("flash_attention_3", "flash3", False),
        ("flash_attention_4", "cudnn", False),
        ("auto", None, True),
    ],
)
def test_the_attention_of_prime_rl_is_its_kernel_or_asked(
    tmp_path: Path, given: str, kernel: str | None, asked: bool
) -> None:
    run = read(tmp_path, ("sft.toml", PRIME.replace("[model]", f'[model]\nattn = "{given}"')))
    assert run.values["policy"].get("attention") == kernel
    assert any("--attention KERNEL" in one for one in run.read.open) is asked


def test_older_files_of_torchtitan_name_their_time(tmp_path: Path) -> None:
    older = """
    [model]
    name = "llama3"
    flavor = "70B"
    [training]
    batch_size = 8
    seq_len = 8192
    tensor_parallel_degree = 8
    data_parallel_shard_degree = -1
    compile = true
    [experimental]
    context_parallel_degree = 1
    [activation_checkpoint]
    mode = "full"
    """
    run = read(tmp_path, ("old.toml", older), world_size=64)
    assert run.values["stack"] == "torchtitan-2025-01"
    got = made(run)
    assert (got["model"], got["tp"], got["dp_shard"], got["batch_size"]) == ("llama3-70b", 8, 8, 8)
    # then torchtitan compiled no loss, and its AdamW was foreach
    assert (got["compile"], got["loss"], got["optimizer_impl"]) == (True, "full", "foreach")
    eldest = older.replace("data_parallel_shard_degree", "data_parallel_degree")
    eldest = eldest.replace('flavor = "70B"', 'flavor = "70B"\n    norm_type = "fused_rmsnorm"')
    run = read(tmp_path, ("old.toml", eldest), world_size=64)
    assert run.values["stack"] == "torchtitan-2024-07"
    assert made(run)["norm"] == "fused"
    assert not run.read.not_known
    between = older.replace("data_parallel_shard_degree = -1", "").replace("batch_size", "local_batch_size")
    run = read(tmp_path, ("old.toml", between + "[float8]\n"), world_size=64)
    assert (run.values["stack"], run.stack_before) == ("torchtitan-2025-06", None)
    later = between.replace("compile = true", "") + "[float8]\n[compile]\nenable = true\n"
    run = read(tmp_path, ("old.toml", later), world_size=64)
    assert run.values["stack"] == "torchtitan-2025-08"
    assert made(run)["loss"] == "compiled"


@pytest.mark.parametrize(("components", "loss"), [('["model"]', "full"), ('["model", "loss"]', "compiled")])
def test_a_loss_that_is_not_among_the_compiled_components_is_eager(
    components: str, loss: str, tmp_path: Path
) -> None:
    text = TITAN + f"\n[compile]\nenable = true\ncomponents = {components}\n"
    run = read(tmp_path, ("titan.toml", text), world_size=8, stack="torchtitan-2025-12")
    assert made(run)["loss"] == loss


def test_a_stated_stack_decides_what_keys_of_another_date_do_not(tmp_path: Path) -> None:
    """torchtitan compiled no loss before 2 April 2025; ``parallelism`` is a section since 18 March."""
    text = TITAN.replace("local_batch_size = 2\nglobal_batch_size = 64", "batch_size = 1\ncompile = true")
    run = read(tmp_path, ("titan.toml", text), world_size=8)
    assert (run.values["stack"], run.stack_before) == ("torchtitan-2025-06", "torchtitan-2025-03")
    assert made(run)["loss"] == "compiled"
    assert any("--stack torchtitan-2025-03" in one for one in run.read.open)
    for stack, loss, optimizer in (
        ("torchtitan-2025-02", "full", "foreach"),
        ("torchtitan-2025-03", "full", "fused"),
        ("torchtitan-2025-06", "compiled", "fused"),
    ):
        run = read(tmp_path, ("titan.toml", text), world_size=8, stack=stack)
        got = made(run)
        assert (got["loss"], got["optimizer_impl"], run.stack_before) == (loss, optimizer, None)
        said = any("parallelism is of 2025-03 (785c34c99) and later" in one for one in run.read.notes)
        assert said == (stack == "torchtitan-2025-02")
    run = read(tmp_path, ("titan.toml", text), world_size=8, stack="torchtitan-2025-12")
    assert any("training.batch_size is of before 2025-06" in one for one in run.read.notes)


def test_libraries_that_changed_are_stacks_of_their_time(tmp_path: Path) -> None:
    """TRL's loss is in pieces since 1.7; accelerate reduces at the last micro-batch alone since 1.11."""
    files = ("sft.yaml", TRL), ("fsdp.yaml", ACCELERATE)
    run = read(tmp_path, *files)
    assert (run.values["stack"], run.stack_before) == ("trl-2026", "trl-2026-04")
    expected = {
        "trl-2026": ("chunked-tokens:256", "last"),
        "trl-2026-04": ("full", "last"),
        "trl-2025-08": ("full", "each"),
    }
    for stack, found in expected.items():
        got = made(read(tmp_path, *files, stack=stack))
        assert (got["loss"], got["sync"]) == found
    said = "\nloss_type: chunked_nll"
    run = read(tmp_path, ("sft.yaml", TRL + said), ("fsdp.yaml", ACCELERATE))
    assert run.stack_before is None
    got = made(read(tmp_path, ("sft.yaml", TRL + said), ("fsdp.yaml", ACCELERATE), stack="trl-2026-04"))
    assert got["loss"] == "chunked-tokens:256"
    run = read(tmp_path, ("axolotl.yaml", AXOLOTL), world_size=8)
    assert (made(run)["sync"], run.stack_before) == ("last", "axolotl-2025-08")
    older = read(tmp_path, ("axolotl.yaml", AXOLOTL), world_size=8, stack="axolotl-2025-08")
    assert made(older)["sync"] == "each"
    assert read(tmp_path, ("tune.yaml", TORCHTUNE), world_size=8).stack_before is None
    tune = TORCHTUNE.replace("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss")
    assert read(tmp_path, ("tune.yaml", tune), world_size=8).stack_before == "torchtune-2024-09"


@pytest.mark.parametrize("of_transformers", ["", "\ngradient_checkpointing: false"])
def test_accelerates_checkpointing_is_of_a_blocks_children_before_1_15(
    of_transformers: str, tmp_path: Path
) -> None:
    training = (
        "model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 1\nbf16: true" + of_transformers
    )
    fsdp = ACCELERATE + "  fsdp_activation_checkpointing: true\n"
    files = ("args.yaml", training), ("fsdp.yaml", fsdp)
    run = read(tmp_path, *files)
    assert (run.values["stack"], run.stack_before) == ("transformers-2026-09", "transformers-2026")
    assert made(run)["ac"] == "full"
    for stack in ("transformers-2026", "trl-2026-04"):
        assert made(read(tmp_path, *files, stack=stack))["ac"] == "children"
    whole = read(tmp_path, ("factory.yaml", FACTORY), ("fsdp.yaml", fsdp))
    assert made(whole)["ac"] == "full"  # its own checkpoints are around the blocks
    off = FACTORY + "\ndisable_gradient_checkpointing: true\n"
    assert made(read(tmp_path, ("factory.yaml", off), ("fsdp.yaml", fsdp)))["ac"] == "children"


@pytest.mark.parametrize(
    ("stack", "dtype", "held"),
    [
        ("trl-2026", "bfloat16", ",base=bfloat16"),
        ("trl-2026", "auto", ""),
        ("transformers-2026-09", "bfloat16", ",base=bfloat16"),
        ("trl-2026-04", "bfloat16", ""),  # accelerate upcast the whole model before 1.13
        ("trl-2025-08", "bfloat16", ""),
    ],
)
def test_frozen_parameters_keep_their_dtype_beside_adapters(
    stack: str, dtype: str, held: str, tmp_path: Path
) -> None:
    training = f"model_name_or_path: Qwen/Qwen3-8B\nuse_peft: true\nbf16: true\ndtype: {dtype}\nlora_r: 8\n"
    policy = made(read(tmp_path, ("args.yaml", training), ("fsdp.yaml", ACCELERATE), stack=stack))
    assert policy["lora"] == f"r=8,targets=q_proj?+v_proj?{held}"


@pytest.mark.parametrize(("mixed", "held"), [("bf16", None), ("no", "bfloat16")])
def test_a_model_keeps_the_dtype_it_is_loaded_in_without_mixed_precision(
    mixed: str, held: str | None, tmp_path: Path
) -> None:
    training = (
        f"model_name_or_path: Qwen/Qwen3-8B\ntorch_dtype: bfloat16\nbf16: {str(mixed == 'bf16').lower()}\n"
    )
    accelerate = ACCELERATE.replace("mixed_precision: bf16", f"mixed_precision: '{mixed}'")
    run = read(tmp_path, ("args.yaml", training + "max_steps: 10\n"), ("fsdp.yaml", accelerate))
    assert run.values["policy"].get("orig_dtype") == held


def test_pipelines_keep_their_parameters_by_default(tmp_path: Path) -> None:
    text = TITAN.replace("[parallelism]", "[parallelism]\npipeline_parallel_degree = 2")
    text = text.replace("global_batch_size = 64", "global_batch_size = -1")
    got = made(read(tmp_path, ("titan.toml", text), world_size=8))
    assert (got["pp"], got["reshard"], got["batch_size"], got["grad_accum"]) == (2, "never", 1, 2)


@pytest.mark.parametrize("text", ["a: 1\n", "- 1\n", "model: [\n"])
def test_a_file_of_no_known_trainer_is_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, ("x.yaml", text))
    assert "\n" not in str(caught.value).strip() or "YAML" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("meta-llama/Meta-Llama-3-70B", "llama3-70b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2-0.5b"),
        ("unsloth/Llama-3.2-3B", "llama3.2-3b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3-671b"),
        ("openai-community/gpt2", "gpt2"),
    ],
)
def test_names_of_hugging_face_are_known(name: str, known: str) -> None:
    assert builtin_config(name).name == known


def test_a_misspelt_key_is_named_beside_the_key_that_is_read(tmp_path: Path) -> None:
    text = TITAN.replace("seq_len", "seq_lenght").replace("local_batch_size", "local_batchsize")
    run = read(tmp_path, ("t.toml", text), world_size=8)
    assert run.read.misspelt == {
        "training.seq_lenght": "training.seq_len",
        "training.local_batchsize": "training.local_batch_size",
    }


def test_a_section_that_no_converter_names_and_a_file_of_deepspeed_are_said(tmp_path: Path) -> None:
    run = read(
        tmp_path, ("t.toml", TITAN + '[quantize.grouped_mm.float8]\nfqns = ["experts"]\n'), world_size=8
    )
    assert "[quantize.grouped_mm.float8] does nothing: model.converters does not name it" in run.read.notes
    assert not run.read.not_known
    with pytest.raises(InputError, match="DeepSpeed's configuration"):
        read(tmp_path, ("ds.json", '{"zero_optimization": {}, "gradient_accumulation_steps": 1}'))


def test_prime_rl_of_february_cuts_the_vocabulary_and_adapts_experts_for_several_runs(tmp_path: Path) -> None:
    text = """
max_concurrent_runs = 4
[model]
name = "Qwen/Qwen3-30B-A3B"
fused_lm_head_chunk_size = 2048
[model.compile]
[model.lora]
rank = 16
[data.fake]
batch_size = 16
"""
    run = read(tmp_path, ("rl.toml", text), world_size=8)
    policy = run.values["policy"]
    assert (policy["loss"], policy["ac"], policy["compile"]) == ("chunked-vocab:2048", "none", True)
    assert policy["grad_accum"] == 2  # 16 sequences on 8 ranks
    assert policy["lora"].startswith("r=16,targets=q_proj?+")
    assert policy["lora"].endswith("+experts?,runs=4")
    assert not run.read.not_known
    run = read(tmp_path, ("rl.toml", text.replace("fused_lm_head", "fused_lm_head_token")), world_size=8)
    assert run.values["policy"]["loss"] == "chunked-blocks:2048"


def test_sft_of_prime_rl_has_the_chunked_head_since_july(tmp_path: Path) -> None:
    policy = made(read(tmp_path, ("sft.toml", PRIME)))
    assert (policy["loss"], policy["optimizer_impl"]) == ("chunked-blocks:8192", "for-loop")
    added = 'optim_cpu_offload = false\nfused_lm_head_token_chunk_size = "disabled"\n'
    whole = PRIME.replace("[model]\n", f"[model]\n{added}").replace("num_train_gpus", "num_gpus")
    run = read(tmp_path, ("sft.toml", whole))
    policy = made(run)
    assert (policy["loss"], policy["optimizer_impl"]) == ("full", "fused")
    assert (run.values["mesh"], run.read.not_known) == ({"dp_shard": 8}, [])
    (tmp_path / "sft.toml").write_text(PRIME)
    old = read_trainer_files([tmp_path / "sft.toml"], stack="prime-rl-2026-01-sft")
    assert old.values["policy"].get("loss") is None, "the stack says it"


def test_a_flavor_of_torchtitan_may_name_its_attention(tmp_path: Path) -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B_flex_attn"\n[training]\nseq_len = 4096\n'
    run = read(tmp_path, ("titan.toml", text), world_size=8)
    assert run.values["model"] == "llama3-8b"
    assert any("flex attention" in one for one in run.read.open)


def test_what_prime_rl_offloads_is_on_unless_its_file_says_otherwise(tmp_path: Path) -> None:
    names = ("offload_activations", "offload_optimizer", "offload")
    for added, expected in (
        ("", [True, True, False]),
        ('optim_cpu_offload = false\nac_offloading = "none"\n', [False, False, False]),
        ("fsdp_cpu_offload = true\n", [True, False, True]),
    ):
        policy = made(read(tmp_path, ("sft.toml", PRIME.replace("[model]\n", f"[model]\n{added}"))))
        assert [policy[name] for name in names] == expected


def test_an_older_prime_rl_compiles_and_checkpoints_what_its_file_says(tmp_path: Path) -> None:
    older = """
trainer_gpu_ids = [4, 5, 6, 7]
inference_gpu_ids = [0, 1, 2, 3]
[model]
name = "Qwen/Qwen3-4B"
[trainer]
recompute_logprobs = true
[orchestrator]
batch_size = 512
"""
    run = read(tmp_path, ("rl.toml", older))
    policy = run.values["policy"]
    assert (run.values["mesh"], policy["ac"], policy.get("compile")) == ({"dp_shard": 4}, "none", None)
    assert (policy["extra_model"], policy["loss"]) == ("self", "logprobs")  # of before its head in pieces
    assert not run.read.not_known
    run = read(tmp_path, ("rl.toml", older + "[trainer.model.ac]\nfreq = 2\n"))
    assert run.values["policy"]["ac"] == "every:2"
    assert any("before has them off" in one for one in read(tmp_path, ("prime.toml", PRIME)).read.open)
    with pytest.raises(ModelError, match="rollouts_per_example = 8: this is the orchestrator's file"):
        read(
            tmp_path,
            (
                "orch.toml",
                '[model]\nname = "Qwen/Qwen3-4B"\n[data]\n'.join(("rollouts_per_example = 8\n", "")),
            ),
        )
    trains = '[model]\nname = "Qwen/Qwen3-4B"\n[model.ac]\n[optim]\nlr = 1e-6\n'
    generates = "rollouts_per_example = 8\nmicro_batch_size = 2\nseq_len = 4096\n[sampling]\nmax_tokens = 9\n"
    run = read(tmp_path, ("train.toml", trains), ("orch.toml", generates), world_size=4)
    assert (run.values["policy"]["seq_len"], run.values["policy"]["batch_size"]) == (4096, 2)
    assert not run.read.not_known
    with pytest.raises(InputError, match="not the configuration of a known trainer"):
        read(tmp_path, ("lora.yaml", "model: {name: m}\ndata: {seq_length: 4096}"))


def test_a_loss_without_upcast_and_foreign_kernels_of_automodel(tmp_path: Path) -> None:
    """As Automodel's own benchmarks set them."""
    text = AUTOMODEL.replace("model:\n", "model:\n  backend: {linear: te, rms_norm: te, experts: gmm}\n")
    target = "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"
    text += f"loss_fn: {{_target_: {target}, fp32_upcast: false}}\n"
    policy = read(tmp_path, ("run.yaml", text), world_size=8).values["policy"]
    assert (policy["loss"], policy["fused_kernels"]) == ("native", True)
    assert policy["clip_grad"] is True
    text += "recipe: BenchmarkingRecipeForNextTokenPrediction\n"
    assert read(tmp_path, ("run.yaml", text), world_size=8).values["policy"]["clip_grad"] is False


@pytest.mark.parametrize(
    "stack", ["torchtitan-2024-07", "torchtitan-2026-08", "torchtune-0.6", "prime-rl-2026", "veomni-2026"]
)
def test_loops_that_leave_fsdp2_alone_reduce_every_micro_batch(stack: str) -> None:
    """Except in a pipeline, whose schedule reduces after its last backward."""
    assert with_stack(stack, {})["sync"] == "each"
    assert "sync" not in with_stack(stack, {}, pipelined=True)
    assert with_stack(stack, {"sync": "last"})["sync"] == "last"
