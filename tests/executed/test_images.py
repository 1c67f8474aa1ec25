"""Images in the batches of Hugging Face models: as many tokens as published, and refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_families import SEES, values_of

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.communication import estimate_comm
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.images import with_images

pytest.importorskip("transformers", minversion="5.0")

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
TOKENS: dict[str, tuple[str | None, int]] = {
    "gemma-3-4b": (None, 256),  # mm_tokens_per_image
    "glm-4.1v-9b": ("1024x768", 37 * 27),  # as Qwen2-VL
    "idefics3-8b": (None, 169),  # its processor's image_seq_len
    "internvl3-8b": (None, 256),  # a tile of 448
    "llama-4-scout-17b-16e": (None, 144),  # a tile of 336
    "llava-1.5-7b": (None, 576),
    "llava-v1.6-mistral-7b": ("672x672", 576 + 48 * 49),  # an overview, four tiles, and the rows' ends
    "mistral-small-3.1-24b": (None, 55 * 55),  # 1540 pixels in merged patches of 28
    "paligemma-3b-224": (None, 256),
    "pixtral-12b": ("512x512", 32 * 32),
    "qwen2-vl-7b": ("1024x768", 37 * 27),  # sides rounded to patches of 14, two by two
    "qwen2.5-vl-7b": ("1024x768", 37 * 27),
    "qwen3-vl-8b": ("1024x768", 32 * 24),  # patches of 16, two by two
    "qwen3.5-27b": ("1024x768", 32 * 24),
    "smolvlm-2.2b": (None, 81),
}
"""An image's tokens as processors and model cards count them."""
BY_DEFAULT = ("gemma-3-4b", "llava-v1.6-mistral-7b", "qwen2.5-vl-7b", "pixtral-12b")


def policy(**values: Any) -> PolicySpec:
    return PolicySpec.from_mapping({"seq_len": 4096, "images": 1, **values})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in TOKENS]
)
def test_an_image_becomes_as_many_tokens_as_published(name: str) -> None:
    size, tokens = TOKENS[name]
    model = build_model(ModelSpec(source=str(CONFIGS / f"{name}.json"), layers=2), seq_len=4096)
    seeing = with_images(model, policy(image_size=size))
    assert f", {tokens} of its 4096 tokens" in seeing.notes[-1]
    assert not seeing.idle
    assert seeing.running_towers == model.towers


def small(tmp_path: Path, family: str) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(values_of(family)))
    return ModelSpec(source=str(tmp_path))


@pytest.mark.parametrize(
    ("family", "values", "reason"),
    [
        ("llama", {}, r"LlamaForCausalLM\) takes no images"),
        ("llava", {"image_size": "56x56"}, "the tower of LlavaForConditionalGeneration takes 28x28; count"),
        ("llava", {"seq_len": 16}, "1 of 16 tokens each and a token before each need a seq_len of 17"),
        ("qwen2_5_vl", {}, "takes images of any size: say which with image_size=WIDTHxHEIGHT"),
        ("llava", {"mesh": MeshSpec(tp=2)}, "a vision tower under tensor parallelism is not modelled"),
    ],
)
def test_what_cannot_be_seen_is_refused_in_one_line(
    tmp_path: Path, family: str, values: dict[str, Any], reason: str
) -> None:
    mesh = values.pop("mesh", MeshSpec(dp_shard=2))
    for estimate in (estimate_memory, estimate_comm):
        with pytest.raises(ModelError, match=reason) as error:
            estimate(small(tmp_path, family), mesh, policy(**{"seq_len": 64, **values}))
        assert "\n" not in str(error.value)


def test_arguments_that_are_not_modelled_are_named() -> None:
    spec = ModelSpec(source=str(CONFIGS / "llama-3.2-11b-vision.json"), layers=4)
    with pytest.raises(ModelError, match="also takes aspect_ratio_mask, aspect_ratio_ids, cross_attention"):
        with_images(build_model(spec, seq_len=64), policy())


def test_a_tower_that_nothing_reaches_beside_gradients_that_accumulate_is_refused() -> None:
    spec, mesh = ModelSpec(source=str(CONFIGS / "qwen2.5-vl-7b.json"), layers=1), MeshSpec(dp_shard=8)
    how = {"images": 0, "seq_len": 64, "grad_accum": 2}
    with pytest.raises(
        ModelError, match=r"no batch reaches model\.visual\.blocks\.0.*add images=N, or sync=each"
    ):
        estimate_memory(spec, mesh, policy(**how))
    assert estimate_memory(spec, mesh, policy(**how, sync="each")).peak.active_bytes


def test_a_size_without_images_is_refused() -> None:
    with pytest.raises(ModelError, match="image_size: there is no image; add images=N"):
        PolicySpec.from_mapping({"image_size": "64x64"})
    for text in ("64", "0x64", "64x", "99999x99999", "a x b"):
        with pytest.raises(ModelError, match="is not WIDTHxHEIGHT"):
            PolicySpec.from_mapping({"images": 1, "image_size": text})


def reduced(result: Any) -> set[str]:
    return {row.fqn for row in result.groups if row.op == "reduce_scatter"}


def test_a_tower_trains_with_images_and_is_reduced_unless_frozen(tmp_path: Path) -> None:
    spec, mesh = small(tmp_path, "llava"), MeshSpec(dp_shard=2)
    layers = {f"model.vision_tower.encoder.layers.{index}" for index in range(3)}
    seen = estimate_comm(spec, mesh, policy(seq_len=32))
    # CLIP's last layer is run and not used: LLaVA takes the last but one (vision_feature_layer -2).
    unused = "model.vision_tower.encoder.layers.2"
    assert reduced(seen) & layers == layers - {unused}
    assert any(row.fqn == unused and row.phase == "forward" for row in seen.groups)
    frozen = estimate_comm(spec, mesh, policy(seq_len=32, trainable="language_model|lm_head|projector"))
    assert not reduced(frozen) & layers
    assert {row.fqn for row in frozen.groups if row.op == "all_gather"} >= layers


@pytest.mark.slow
def test_images_take_memory_with_their_number(tmp_path: Path) -> None:
    spec, mesh = small(tmp_path, "qwen2_5_vl"), MeshSpec(dp_shard=2)

    def held(images: int) -> int:
        made = estimate_memory(spec, mesh, policy(seq_len=256, images=images, image_size="112x112"))
        tower = [layer for layer in made.peak.layers if layer.name and "visual" in layer.name]
        return sum(layer.categories.get("activation", 0) for layer in tower)

    one, two, three = held(1), held(2), held(3)
    assert one > 0
    assert three - two == two - one


def test_every_tiny_family_is_seen(tmp_path: Path) -> None:
    for family in SEES:
        size = "56x56" if family.startswith("qwen") else None
        model = build_model(small(tmp_path, family), seq_len=64)
        assert not with_images(model, policy(seq_len=64, image_size=size)).idle
