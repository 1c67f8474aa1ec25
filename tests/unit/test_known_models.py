"""Which model a name stands for: built in, built by transformers, or a file of Hugging Face's cache."""

from __future__ import annotations

import json

import pytest

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.catalog import (
    BUILTIN_MODELS,
    builtin_config,
    configuration_of,
    published_models,
)
from fsdp2prof.estimators.config.model import ModelSpec


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3.1-70b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("HuggingFaceTB/SmolLM-360M", "smollm2-360m"),
        ("codellama/CodeLlama-34b-Python-hf", "codellama-34b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2.5-7b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3-671b"),
        ("Qwen/QwQ-32B-Preview", "qwen2.5-32b"),
        ("axolotl-ai-co/gpt-oss-120b-dequantized", "gpt-oss-120b"),
    ],
)
def test_ids_of_variants_name_the_built_in_model_of_their_shape(name: str, shape: str) -> None:
    assert ModelSpec(source=name).kind == "builtin"
    assert builtin_config(name).name == shape


@pytest.mark.parametrize(
    ("name", "layers"),
    [("google/gemma-2-9b-it", 42), ("microsoft/Phi-3.5-mini-instruct", 32), ("allenai/Olmo-3-1025-7B", 32)],
)
def test_ids_of_other_architectures_have_their_configuration(name: str, layers: int) -> None:
    model = ModelSpec(source=name)
    known = model.configuration()
    assert model.kind == "huggingface"
    assert isinstance(known, dict)
    assert known["num_hidden_layers"] == layers


def test_no_name_is_known_twice() -> None:
    assert not BUILTIN_MODELS.keys() & set(published_models())


def test_any_other_id_is_read_from_the_cache_if_it_was_downloaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    name = "someone/new-model"
    assert ModelSpec(source=name).kind == "builtin"
    with pytest.raises(ModelError, match="Hugging Face cache"):
        builtin_config(name)
    file = tmp_path / "models--someone--new-model" / "snapshots" / "0a1b" / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"model_type": "llama"}))
    assert ModelSpec(source=name).kind == "huggingface"
    assert ModelSpec(source=name).configuration() == file
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert configuration_of(name) is None
