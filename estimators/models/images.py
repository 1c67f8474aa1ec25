"""Images in the batches of a Hugging Face model, as its processor would produce them.

The arguments follow from the class's forward and the vision configuration: patches of a grid, whole images
of any size, or tiles of the one size that the tower takes. The number of tokens per image comes from the
tower itself, which is run once on fake tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.extra_models import ImageSize
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.losses import one_line
from fsdp2prof.estimators.models.model import Batch, LayerPattern, Model
from fsdp2prof.fake_tensors import copy_without, fake_tensors, materialize_fake

_KINDS = ("token_type_ids", "mm_token_type_ids")
"""Arguments that mark image tokens (1) and text tokens (0)."""
_HARMLESS = frozenset(
    {
        "pixel_values",
        "pixel_attention_mask",
        "image_grid_thw",
        "image_sizes",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "vision_aspect_ratio",
        "batch_num_images",
        *_KINDS,
    }
)
"""Arguments about images that are given, or that the configuration has a default for."""
_OTHER_MEDIA = ("video", "audio", "input_features", "num_frames", "second_per_grid")
_OF_IMAGES = ("pixel", "image", "vision", "aspect_ratio", "cross_attention", "spatial_shapes", "token_type")
_TOKEN_IDS = ("image_token_id", "image_token_index")
_IMAGE = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Image:
    """One image as a model takes it."""

    width: int
    height: int
    arguments: Callable[[int, int, torch.device], dict[str, Tensor]]
    """(sequences, images in each, device) -> arguments of the tower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """The result of running the tower."""

    tokens: int
    """That one image becomes."""
    idle: tuple[str, ...]
    """Modules that no image passes through either."""


_seen: dict[tuple[str, ...], _Seen] = {}
"""By class, configuration and size: several models of a class are built for one estimate."""


def with_images(model: Model, policy: PolicySpec) -> Model:
    """A model whose batches contain the policy's images; the model itself if there are none.

    Raises ``ModelError`` for a model that takes no images, or takes them in a way that is not modelled,
    and for images that do not fit the sequence.
    """
    if not policy.images:
        return model
    image = _image_of(model, policy.image_size)
    seen = _run_tower(model, image)
    config: Any = model.module.config
    wanted = policy.images * (seen.tokens + 1)
    if wanted > policy.seq_len:
        raise ModelError(
            f"images: {policy.images} of {seen.tokens} tokens each and a token before each need a seq_len of "
            f"{wanted}, not {policy.seq_len}"
        )
    kinds = [name for name in _KINDS if name in _parameters(model.module)]
    image_id = next((one for name in _TOKEN_IDS if isinstance(one := getattr(config, name, None), int)), None)
    if image_id is None:
        raise ModelError(f"images: the configuration of {model.name} has no {' or '.join(_TOKEN_IDS)}")
    batch = partial(_batch, config, image_id, policy.images, seen.tokens, image.arguments, kinds)
    before = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
    pattern = model.pattern
    return replace(
        model,
        idle=seen.idle,
        make_batch=batch,
        pattern=LayerPattern(max(pattern.start, before), pattern.period),
        inputs="tokens and images",
        absent="such input",
        notes=(
            *model.notes,
            f"{policy.images} images of {image.width}x{image.height} pixels in each sequence, "
            f"{seen.tokens} of its {policy.seq_len} tokens each",
        ),
    )


def _image_of(model: Model, size: ImageSize | None) -> _Image:
    """How a class takes images. Raises ``ModelError`` if it takes none, or in another way."""
    name = type(model.module).__name__
    vision = getattr(getattr(model.module, "config", None), "vision_config", None)
    names = _parameters(model.module)
    if vision is None or "pixel_values" not in names:
        raise ModelError(f"images: {model.name} ({name}) takes no images with its text")
    strange = [
        one
        for one, parameter in names.items()
        if one not in _HARMLESS
        and any(word in one for word in _OF_IMAGES)
        and not any(word in one for word in _OTHER_MEDIA)
    ]
    if strange:
        raise ModelError(
            f"images: {name} also takes {', '.join(strange)}, which is not modelled: write a factory that "
            "returns (module, loss, batch)"
        )
    if not hasattr(model.module, "get_image_features"):
        raise ModelError(f"images: {name} does not say what an image becomes (get_image_features)")
    if "image_grid_thw" in names:
        return _patches(name, vision, size)
    if "image_sizes" in names and getattr(model.module.config, "image_grid_pinpoints", None):
        return _cut_by_pinpoints(model.module, vision, size)
    if "image_sizes" in names and vision.model_type == "pixtral":
        return _whole(model.module.config, vision, size)
    return _tile(name, vision, size, in_rows="pixel_attention_mask" in names)


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(module).forward).parameters


def _patches(name: str, vision: Any, size: ImageSize | None) -> _Image:
    """Flattened patches (all patches, C x T x P x P) and each image's grid, as Qwen-VL's processor makes.

    Height and width are rounded to whole merged patches, as its ``smart_resize`` does.
    """
    if size is None:
        raise ModelError(f"images: {name} takes images of any size: say which with image_size=WIDTHxHEIGHT")
    patch, merge = int(vision.patch_size), _merge_of(vision)
    width, height = (max(1, round(side / (patch * merge))) * merge for side in (size.width, size.height))
    channels = next(
        int(getattr(vision, key))
        for key in ("in_channels", "in_chans", "num_channels")
        if hasattr(vision, key)
    )
    frames = getattr(vision, "temporal_patch_size", None)
    row = (channels * int(frames) * patch * patch,) if frames else (channels, patch, patch)

    def arguments(sequences: int, images: int, device: torch.device) -> dict[str, Tensor]:
        count = sequences * images
        return {
            "pixel_values": torch.rand(count * height * width, *row, device=device),
            "image_grid_thw": torch.tensor([[1, height, width]] * count, device=device),
        }

    return _Image(width=width * patch, height=height * patch, arguments=arguments)


def _merge_of(vision: Any) -> int:
    """Patches of a side that become one token."""
    merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_kernel_size", None) or 1
    return int(merge[0] if isinstance(merge, (list, tuple)) else merge)


def _whole(config: Any, vision: Any, size: ImageSize | None) -> _Image:
    """Whole images (count, C, H, W) of any size and their sizes, as Pixtral's processor makes them.

    Sides longer than the tower's own are scaled down, and rounded up to whole patches.
    """
    longest, unit = (
        int(vision.image_size),
        int(vision.patch_size) * int(getattr(config, "spatial_merge_size", 1)),
    )
    size = size or ImageSize(longest, longest)
    scale = max(size.width / longest, size.height / longest, 1.0)
    width, height = (-(-int(side / scale) // unit) * unit for side in (size.width, size.height))

    def arguments(sequences: int, images: int, device: torch.device) -> dict[str, Tensor]:
        count = sequences * images
        return {
            "pixel_values": torch.rand(count, int(vision.num_channels), height, width, device=device),
            "image_sizes": torch.tensor([[height, width]] * count, device=device),
        }

    return _Image(width=width, height=height, arguments=arguments)


def _cut_by_pinpoints(module: nn.Module, vision: Any, size: ImageSize | None) -> _Image:
    """Tiles and an overview of each image (count, tiles, C, H, W), cut as the configuration's grid says."""
    if size is None:
        raise ModelError(
            f"images: {type(module).__name__} cuts images of any size into tiles: say which with "
            "image_size=WIDTHxHEIGHT"
        )
    config: Any = module.config
    side, wanted = int(vision.image_size), (size.height, size.width)
    count_of = import_module(type(module).__module__).image_size_to_num_patches
    tiles = int(count_of(list(wanted), config.image_grid_pinpoints, side))

    def arguments(sequences: int, images: int, device: torch.device) -> dict[str, Tensor]:
        count, channels = sequences * images, int(getattr(vision, "num_channels", 3))
        return {
            "pixel_values": torch.rand(count, tiles, channels, side, side, device=device),
            "image_sizes": torch.tensor([wanted] * count, device=device),
        }

    return _Image(width=size.width, height=size.height, arguments=arguments)


def _tile(name: str, vision: Any, size: ImageSize | None, *, in_rows: bool) -> _Image:
    """Images of the one size that a tower takes (count, C, H, W), or (sequences, images, C, H, W)."""
    own = getattr(vision, "image_size", None)
    sides = tuple(own) if isinstance(own, (list, tuple)) else (own, own)
    if not all(isinstance(side, int) for side in sides) or len(sides) != 2:
        raise ModelError(f"images: the vision configuration of {name} states no image_size")
    height, width = sides
    if size is not None and (size.width, size.height) != (width, height):
        raise ModelError(
            f"image_size: the tower of {name} takes {width}x{height}; count each tile that its processor "
            "produces as one image"
        )

    def arguments(sequences: int, images: int, device: torch.device) -> dict[str, Tensor]:
        count = (sequences, images) if in_rows else (sequences * images,)
        channels = int(getattr(vision, "num_channels", 3))
        # Images without a pixel that is 0: Idefics leaves out those that are padding.
        return {"pixel_values": torch.ones(*count, channels, height, width, device=device)}

    return _Image(width=width, height=height, arguments=arguments)


def _run_tower(model: Model, image: _Image) -> _Seen:
    """Run the tower on one image: how many tokens it becomes, and through which modules it goes.

    Raises ``ModelError`` if the tower fails on it.
    """
    config: Any = model.module.config
    parts = {name: value for name, value in config.to_dict().items() if name != "text_config"}
    key = (type(model.module).__name__, repr(parts), f"{image.width}x{image.height}", *model.idle)
    if key in _seen:
        return _seen[key]
    blocks = [model.module.get_submodule(fqn) for fqn in model.blocks]
    module: Any = copy_without(model.module, blocks)
    reached: set[str] = set()
    for fqn in model.idle:
        for part in module.get_submodule(fqn).modules():
            part.register_forward_hook(lambda *_, fqn=fqn: reached.add(fqn))
    with unset_fake_temporarily(), fake_tensors(follow_values=True), torch.no_grad():
        materialize_fake(module, blocks)
        try:
            found = module.get_image_features(**image.arguments(1, 1, torch.device("cpu")))
        except Exception as error:  # a model that is not ours may raise anything
            raise ModelError(
                f"images: {type(module).__name__} cannot be given an image of {image.width}x{image.height}: "
                f"{one_line(error)}"
            ) from error
    features = [leaf for leaf in tree_leaves(_features(found)) if isinstance(leaf, Tensor)]
    tokens = sum(leaf.numel() // leaf.shape[-1] for leaf in features)
    idle = tuple(fqn for fqn in model.idle if fqn not in reached and not _is_called(module, fqn))
    return _seen.setdefault(key, _Seen(tokens=tokens, idle=idle))


def _is_called(module: nn.Module, fqn: str) -> bool:
    """Whether a module's owner runs it in its own forward (Llama 4's projector), by its source."""
    owner, _, name = fqn.rpartition(".")
    try:
        source = inspect.getsource(type(module.get_submodule(owner)).forward)
    except (OSError, TypeError):  # made without a file
        return False
    return f"self.{name}(" in source


def _features(found: Any) -> Any:
    """The features that replace tokens; of several results the first or the pooled one."""
    pooled = getattr(found, "pooler_output", None)
    if pooled is not None:
        return pooled
    last = getattr(found, "last_hidden_state", None)
    if last is not None:
        return last
    return found[0] if isinstance(found, tuple) and found else found


def _batch(
    config: Any,
    image_id: int,
    images: int,
    tokens: int,
    arguments: Callable[[int, int, torch.device], dict[str, Tensor]],
    kinds: list[str],
    batch_size: int,
    seq_len: int,
    device: torch.device,
) -> Batch:
    """Sequences (B, S) of one text token and an image, as often as there are images, and text after them."""
    text = config.get_text_config()
    rows = torch.full((batch_size, seq_len), _plain_token(config, text), device=device)
    types = torch.zeros((batch_size, seq_len), dtype=torch.int64, device=device)
    for index in range(images):
        start = 1 + index * (tokens + 1)
        rows[:, start : start + tokens] = image_id
        types[:, start : start + tokens] = _IMAGE
    return Batch(
        args=(rows,),
        named={**arguments(batch_size, images, device), **dict.fromkeys(kinds, types)},
        targets=torch.randint(int(text.vocab_size), (batch_size, seq_len), device=device),
    )


def _plain_token(config: Any, text: Any) -> int:
    """The first token that no configuration gives a meaning to."""
    special = {
        value
        for part in (config, text)
        for name, value in vars(part).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    return next(token for token in range(int(text.vocab_size)) if token not in special)
