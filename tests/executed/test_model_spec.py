"""Built-in models against published parameter counts, and what other model sources must refuse."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from support.present import present
from support.rotary import fill_rotary

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.catalog import (
    BUILTIN_MODELS,
    TransformerConfig,
    configuration_of,
    published_models,
)
from fsdp2prof.estimators.config.choices import Chunked
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.builtin import build_builtin

# As the model cards and papers publish them; Qwen's tied models without the duplicate head.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen1.5-0.5b": 463_987_712,
    "qwen1.5-1.8b": 1_836_828_672,
    "qwen1.5-4b": 3_950_369_280,
    "qwen1.5-7b": 7_721_324_544,
    "qwen1.5-14b": 14_167_290_880,
    "qwen1.5-32b": 32_512_218_112,
    "qwen1.5-72b": 72_287_920_128,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "ministral-8b": 8_019_808_256,
    "mistral-nemo": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large": 122_610_069_504,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "falcon3-1b": 1_669_408_768,
    "falcon3-3b": 3_227_655_168,
    "falcon3-7b": 7_455_550_464,
    "falcon3-10b": 10_305_653_760,
    "yi-6b": 6_061_035_520,
    "yi-9b": 8_829_407_232,
    "yi-34b": 34_388_917_248,
    "deepseek-llm-7b": 6_910_365_696,
    "deepseek-coder-1.3b": 1_346_471_936,
    "deepseek-coder-6.7b": 6_740_512_768,
    "deepseek-coder-33b": 33_342_991_360,
    "seed-oss-36b": 36_151_104_512,
    "codellama-7b": 6_738_546_688,
    "codellama-34b": 33_743_970_304,
    "internlm2_5-7b": 7_737_708_544,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}

BUILT_BY_TRANSFORMERS = {
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "olmo-2-0425-1b": 1_484_916_736,
    "olmo-2-1124-7b": 7_298_617_344,
    "olmo-2-1124-13b": 13_716_198_400,
    "olmo-2-0325-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "granite-3.1-2b": 2_533_531_648,
    "granite-3.1-8b": 8_170_848_256,
    "smollm3-3b": 3_075_098_624,
    "glm-4.5-air": 106_852_245_504,
    "pythia-1b": 1_011_781_632,
    "pythia-6.9b": 6_857_302_016,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-vl-8b": 8_767_123_696,
    "c4ai-command-r": 34_980_831_232,
}
"""Of their safetensors files, text and images."""


@pytest.mark.parametrize("name", sorted(published_models()))
def test_models_of_transformers_have_the_published_parameters(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    known = configuration_of(name)
    assert isinstance(known, dict)
    if known["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {known['model_type']}")
    model = build_model(ModelSpec(source=name), seq_len=128)
    counted = sum(parameter.numel() for parameter in model.module.parameters())
    assert counted == BUILT_BY_TRANSFORMERS.get(name, counted)
    text = known.get("text_config", known)
    assert (model.name, len(model.blocks)) == (name, text["num_hidden_layers"])


@pytest.mark.parametrize("name", sorted(BUILTIN_MODELS))
def test_parameters_are_counted_the_same_by_module_and_formula(name):
    model = build_model(ModelSpec(source=name), seq_len=128)
    counted = sum(parameter.numel() for parameter in model.module.parameters())
    assert counted == present(model.config).parameters == PUBLISHED.get(name, counted)
    assert all(parameter.device.type == "meta" for parameter in model.module.parameters())


def test_gpt3_175b_is_near_its_paper():
    # 96 layers x 12 d^2 with d = 12288, plus embeddings: 174.6 B, published as 175.0 B.
    assert BUILTIN_MODELS["gpt3-175b"].parameters == pytest.approx(175e9, rel=0.005)


def test_llama3_8b_by_hand():
    # attention 4096*4096*2 + 4096*1024*2 = 41,943,040; ffn 3*4096*14336 = 176,160,768; two norms 8,192.
    # 32 * 218,112,000 + 2 * 128256*4096 (1,050,673,152) + 4,096.
    assert PUBLISHED["llama3-8b"] == 32 * 218_112_000 + 1_050_673_152 + 4_096
    model = build_model(ModelSpec(source="llama3-8b"), seq_len=8192)
    block = model.module.get_submodule(model.blocks[0])
    assert sum(parameter.numel() for parameter in block.parameters()) == 218_112_000
    assert len(model.blocks) == 32


def tiny(family: str, **changes: Any) -> TransformerConfig:
    options: dict[str, Any] = {
        "name": "tiny",
        "family": family,
        "dim": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 4 if family == "gpt" else 2,
        "head_dim": 8,
        "ffn_dim": 64,
        "vocab_size": 96,
        "context": 64,
        "tied": family == "gpt",
    }
    return TransformerConfig(**{**options, **changes})


def materialise(model):
    torch.manual_seed(0)
    model.module.to_empty(device="cpu")
    model.module.tie_weights()
    for parameter in model.module.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    if model.config.family != "gpt":
        fill_rotary(model.module)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen", "gpt"])
def test_chunked_loss_equals_the_full_loss_and_its_gradients(family):
    config = tiny(family, qk_norm=family == "qwen", qkv_bias=family == "qwen")
    model = materialise(build_builtin(config, 16, "float32"))
    batch = model.make_batch(2, 16, torch.device("cpu"))
    gradients = []
    for how in ("full", Chunked(4)):
        model.module.zero_grad()
        loss = model.loss(model.module, batch, how)
        loss.backward()
        gradients.append((loss, [parameter.grad.clone() for parameter in model.module.parameters()]))
    (full, full_gradients), (chunked, chunked_gradients) = gradients
    torch.testing.assert_close(full, chunked)
    torch.testing.assert_close(full_gradients, chunked_gradients)


@pytest.mark.parametrize("family", ["llama", "qwen", "gpt"])
def test_attention_is_causal(family):
    model = materialise(build_builtin(tiny(family), 16, "float32"))
    tokens = torch.randint(96, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 96
    with torch.no_grad():
        difference = (model.module(tokens) - model.module(changed)).abs().amax(-1)[0]
    assert torch.all(difference[:9] == 0)
    assert torch.all(difference[9:] > 0)


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_rotary_attention_sees_relative_positions_only(family):
    # The same query and key, three tokens apart, score the same wherever they stand.
    model = materialise(build_builtin(tiny(family), 32, "float32"))
    attention = model.module.layers[0].attention
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    turned_q = attention.rotate(query.expand(1, 32, 1, 8), model.module.rotary)
    turned_k = attention.rotate(key.expand(1, 32, 1, 8), model.module.rotary)
    scores = (turned_q[:, 3:] * turned_k[:, :-3]).sum(-1)
    torch.testing.assert_close(scores, scores[:, :1].expand_as(scores))


def test_original_dtype_is_the_parameters_and_not_the_rotary_table():
    module = build_model(ModelSpec(source="llama3-8b", layers=1), seq_len=64, orig_dtype="bfloat16").module
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert module.rotary.dtype == torch.complex64
    assert torch.get_default_dtype() == torch.float32


def test_layers_can_be_changed():
    spec = ModelSpec(source="llama3-8b").with_layers(3)
    assert build_model(spec, seq_len=64).blocks == ("layers.0", "layers.1", "layers.2")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("llama3-8", "did you mean .*llama3-8b"),
        ("zzz", "unknown model 'zzz': fsdp2prof inspect models lists"),
        ("", "empty"),
        ("no_such_module:factory", "No module named"),
        ("json:no_such_factory", "no attribute"),
        ("factories:fails", "the factory failed: ValueError: no weights here"),
        ("factories:real", "weight has real memory"),
        ("factories:text", "returned str, not a module"),
        ("broken:factory", "cannot be imported: ZeroDivisionError"),
        (":factory", "cannot be imported: ValueError: Empty module name"),
        ("/no/such/config.json", "No such file"),
    ],
)
def test_bad_sources_are_one_clear_line(source, message, tmp_path, monkeypatch):
    (tmp_path / "factories.py").write_text(
        "from torch import nn\n"
        "def fails():\n    raise ValueError('no weights\\nhere')\n"
        "def real():\n    return nn.Linear(2, 2, device='cpu')\n"
        "def text():\n    return 'module'\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    with pytest.raises(ModelError, match=message) as error:
        build_model(ModelSpec(source=source), seq_len=16)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"), [("{}", "no architecture"), ("[1", "not JSON"), ("[1]", "no architecture")]
)
def test_a_configuration_without_an_architecture_is_refused(content, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=message):
        build_model(ModelSpec(source=str(path)), seq_len=16)


def test_gpt_has_no_more_positions_than_learned():
    with pytest.raises(ModelError, match="gpt2 has 1024 learned positions: seq_len 2048 is too long"):
        build_model(ModelSpec(source="gpt2"), seq_len=2048)


def test_factory_blocks_are_the_lists_of_one_class_with_the_parameters(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class M(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.stem = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))\n"
        "        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))\n"
        "        self.pairs = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))\n"
        "        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))\n"
        "def factory():\n    return M()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    model = build_model(ModelSpec(source="mine:factory"), seq_len=16)
    assert model.blocks == ("body.0", "body.1", "body.2", "pairs.0", "pairs.1")
    with pytest.raises(ModelError, match="no token embedding to feed"):
        model.make_batch(1, 4, torch.device("cpu"))


@pytest.mark.parametrize(
    "values", [{"model_type": "no-such-type"}, {"model_type": "llama", "hidden_size": "x"}]
)
def test_a_configuration_that_transformers_refuses(values, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"transformers .*(cannot build it|has no model_type)") as error:
        build_model(ModelSpec(source=str(tmp_path)), seq_len=16)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_hugging_face_configuration(tmp_path):
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build_model(ModelSpec(source=str(tmp_path)), seq_len=16)
    assert model.blocks == ("model.layers.0", "model.layers.1", "model.layers.2")
    # attention 64*64*2 + 64*32*2, ffn 3*64*128, two norms; embedding, head, norm.
    assert sum(p.numel() for p in model.module.parameters()) == 3 * (12_288 + 24_576 + 128) + 2 * 6_400 + 64
