"""Configurations of the families in use: each is built as published, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.communication import estimate_comm
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.model import LayerPattern

transformers = pytest.importorskip("transformers", minversion="5.0")

CONFIGS = Path(__file__).parents[1] / "data" / "configs"

REFUSED = {
    "deepseek-moe-16b": "no model_type 'deepseek': it comes with its own code",
    "rwkv-4-169m": "RwkvForCausalLM goes through a sequence token by token",
    "vit-large-patch16-224": "ViTForImageClassification takes pixel_values, not tokens: write a factory",
    "whisper-large-v3": "WhisperForConditionalGeneration takes input_features, not tokens: write a factory",
}
PUBLISHED = {
    "bloom-7b1": 7_069_016_064,
    "command-r-35b": 34_980_831_232,
    "command-r7b": 8_028_033_024,
    "dbrx": 131_596_523_520,
    "deepseek-r1-distill-qwen-32b": 32_763_876_352,
    "ernie-4.5-21b-a3b": 21_825_437_888,
    "exaone-4.0-32b": 32_003_216_384,
    "falcon-7b": 6_921_720_704,
    "glm-4.1v-9b": 10_292_777_472,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "granite-3.1-8b": 8_170_848_256,
    "granite-4.0-h-tiny": 6_939_037_248,
    "internvl3-8b": 7_944_373_760,
    "jamba-v0.1": 51_570_323_328,
    "kimi-k2": 1_026_408_232_448 - 60 * 384,  # without the 60 routers' correction biases
    "lfm2-1.2b": 1_170_340_608,
    "llama-3.2-11b-vision": 10_670_220_835,
    "llava-v1.6-mistral-7b": 7_566_747_648,
    "mamba-2.8b": 2_768_345_600,
    "mpt-7b": 6_649_286_656,
    "olmo3-7b": 7_298_011_136,
    "olmoe-1b-7b": 6_919_161_856,
    "opt-6.7b": 6_658_473_984,
    "paligemma-3b-224": 2_923_466_480,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "pixtral-12b": 12_682_739_712,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "seed-oss-36b": 36_151_104_512,
    "stablelm-2-1.6b": 1_644_515_328,
    "starcoder2-15b": 15_957_889_024,
    "starcoder2-3b": 3_030_371_328,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # without the 58 routers' correction biases, buffers here
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gemma-3-27b": 27_432_406_640,
    "gemma-3-4b": 4_300_079_472,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.3-70b": 70_553_706_496,
    "llama-4-maverick-17b-128e": 401_583_781_376,
    "llama-4-scout-17b-16e": 108_641_793_536,
    "llava-1.5-7b": 7_063_427_072,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-3.1-24b": 24_011_361_280,
    "mixtral-8x22b": 140_630_071_296,
    "mixtral-8x7b": 46_702_792_704,
    "phi-3.5-moe": 41_873_153_344,
    "phi-4": 14_659_507_200,
    "qwen2-vl-7b": 8_291_375_616,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "qwen3-vl-8b": 8_767_123_696,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
}
"""Parameters as the model cards or their safetensors headers count them."""
BUILT = sorted({path.stem for path in CONFIGS.glob("*.json")} - set(REFUSED))


def source(name: str, layers: int | None = None) -> ModelSpec:
    return ModelSpec(source=str(CONFIGS / f"{name}.json"), layers=layers)


def test_there_are_seventy():
    assert len(BUILT) >= 70
    assert set(PUBLISHED) <= set(BUILT)


@pytest.mark.parametrize("model_type", ["bart", "t5", "marian"])
def test_an_encoder_with_a_decoder_is_not_read_as_its_decoder(model_type: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type, "architectures": None}))
    with pytest.raises(ModelError, match=r"an encoder with a decoder|no class of transformers generates"):
        build_model(ModelSpec(source=str(path)), seq_len=16)


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.sampled(8)
def test_each_is_built_as_published(name):
    model = build_model(source(name), seq_len=128)
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    text = values.get("text_config", values)
    named = ("num_hidden_layers", "n_layers", "n_layer")
    layers = next((text[name] for name in named if name in text), 32)  # LLaVA 1.5 leaves it to Llama's
    assert len(model.blocks) == layers
    parameters = sum(parameter.numel() for parameter in model.module.parameters())
    assert parameters == PUBLISHED.get(name, parameters)
    assert ("vision_config" in values) == bool(model.idle)
    kept = build_model(source(name, 2), seq_len=128)
    assert len(kept.blocks) == 2
    assert kept.blocks == model.blocks[:2]


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_what_cannot_be_built_says_why_in_one_line(name, reason):
    with pytest.raises(ModelError, match=reason) as error:
        build_model(source(name), seq_len=128)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_the_class_that_is_missing_is_named(tmp_path):
    values = {"model_type": "llama", "architectures": ["LlamaForTomorrow"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match="has no class LlamaForTomorrow"):
        build_model(ModelSpec(source=str(tmp_path)), seq_len=16)


@pytest.mark.parametrize(
    ("kinds", "pattern"),
    [
        ("aaaaaa", LayerPattern(0, 1)),
        ("dddaaaaaa", LayerPattern(3, 1)),  # DeepSeek-V3: three dense blocks first
        ("lllllglllllgllll", LayerPattern(0, 6)),  # Gemma 3: five local, one global
        ("a", LayerPattern(0, 1)),
    ],
)
def test_the_pattern_of_layers(kinds, pattern):
    assert LayerPattern.of(kinds) == pattern


def test_layers_of_two_kinds_are_found():
    assert build_model(source("gpt-oss-20b"), seq_len=16).pattern == LayerPattern(0, 2)
    assert build_model(source("deepseek-v3"), seq_len=16).pattern == LayerPattern(3, 1)
    assert build_model(source("gemma-3-27b"), seq_len=16).pattern == LayerPattern(0, 6)


def small_vision_language(tmp_path: Path) -> ModelSpec:
    """LLaVA with a Llama of two layers and a CLIP of two."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    values = {
        "model_type": "llava",
        "image_token_index": 90,
        "text_config": {"model_type": "llama", "vocab_size": 96, **sizes},
        "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **sizes},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    return ModelSpec(source=str(tmp_path))


def test_a_vision_tower_is_held_and_neither_gathered_nor_trained(tmp_path):
    spec, mesh = small_vision_language(tmp_path), MeshSpec(dp_shard=2)
    policy = PolicySpec(seq_len=16, optimizer="adamw")
    model = build_model(spec, seq_len=16)
    assert model.idle == ("model.vision_tower", "model.multi_modal_projector")
    assert model.towers[-2:] == tuple(f"model.vision_tower.encoder.layers.{index}" for index in range(2))
    comm = estimate_comm(spec, mesh, policy)
    assert not [row for row in comm.groups if row.fqn and "vision" in row.fqn]
    memory = estimate_memory(spec, mesh, policy)
    tower = [layer for layer in memory.peak.layers if "vision" in layer.name]
    assert tower
    assert {kind for layer in tower for kind, size in layer.categories.items() if size} == {
        "sharded_parameter"
    }
    assert any("no image passes" in note for note in memory.assumptions)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_memory_and_communication_of_each(name):
    spec, mesh, policy = source(name, 2), MeshSpec(dp_shard=8), PolicySpec(seq_len=256, ac="full")
    if name == "dbrx":  # its experts pick their rows one expert after the other
        with pytest.raises(ModelError, match=r"in DbrxExperts: how much it computes depends on values"):
            estimate_memory(spec, mesh, policy)
        return
    memory = estimate_memory(spec, mesh, policy)
    states = 12 * memory.model.parameters // 8
    assert memory.peak.reserved_bytes > states / 2  # frozen towers have no optimizer state
    assert estimate_comm(spec, mesh, policy).total.wire_bytes > 0
