"""Models of a Hugging Face ``config.json``: the class it names, built by transformers on the meta device.

Text models run as they are. Of a model of text and images the text part runs where the batches bring no
image, so that the vision tower and its projector are held and sharded, and get no gradient;
:mod:`~fsdp2prof.estimators.models.images` brings images.

Expert parallelism of a Hugging Face model: the modules its class's own plan names, reached by all-to-all.

transformers' training exchange: every (token, expert) pair goes to the rank that holds the expert, and its
result comes back to be weighted and summed there. Tensor-parallel ranks, which share their tokens, exchange a
slice each and gather the sums. Which pairs go where is data, so here every rank gets the same number, or
``imbalance`` times it. Shapes: T tokens, K experts a token, D model dim, R rows that arrive.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2prof.by_key import grouped
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.model import MOST_LAYERS, ModelSpec
from fsdp2prof.estimators.models.builtin import meta_construction, token_batch
from fsdp2prof.estimators.models.builtin_plan import ring_width_of
from fsdp2prof.estimators.models.decoder import decoder_of, per_layer
from fsdp2prof.estimators.models.documents import EAGER
from fsdp2prof.estimators.models.experts import ExpertExchange
from fsdp2prof.estimators.models.factory import no_split_blocks, repeated_blocks
from fsdp2prof.estimators.models.losses import head_of, loss_of_model, one_line
from fsdp2prof.estimators.models.model import LayerPattern, Model
from fsdp2prof.estimators.models.transformers_plan import plan_of
from fsdp2prof.fake_tensors import appear_real

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_EXCHANGED = "ep_dispatch_experts"
_DEALT_OUT = "grouped_gemm"


def expert_modules(module: nn.Module, stacked: tuple[str, ...]) -> tuple[str, ...] | str:
    """Those of the ``stacked`` experts that the class's plan deals out whole, or why there are none.

    The reason is the end of a sentence that begins with the model's name.
    """
    kind, version = type(module).__name__, importlib.import_module("transformers").__version__
    if not stacked:
        return "has no experts"
    try:
        names = importlib.import_module("transformers.distributed.parallel_utils")
        wildcards: Callable[[str], str] = names.replace_layer_number_by_wildcard
    except (ImportError, AttributeError):
        return f"has no expert-parallel plan: transformers {version} knows none; 5.23 does"
    plan = dict(getattr(module, "ep_plan", None) or {})
    unknown = set(plan.values()) - {_EXCHANGED, _DEALT_OUT}
    if unknown:
        return f"deals experts out in a style that is not modelled: {min(unknown)} (in the plan of {kind})"
    found = tuple(fqn for fqn in stacked if plan.get(wildcards(fqn)) == _EXCHANGED)
    if found != stacked:
        return f"has no expert-parallel plan: transformers {version} gives {kind} none"
    return found


def reach_experts(
    module: nn.Module,
    experts: Sequence[str],
    exchange: ExpertExchange,
    tensor_parallel: DeviceMesh | None,
) -> None:
    """Let the modules named ``experts``, which hold this rank's, work for all ranks of the exchange.

    They may lie in checkpointed blocks, which look like the blocks that they wrap.
    """
    for fqn in experts:
        part: Any = module.get_submodule(fqn)
        part.num_experts = next(part.parameters(recurse=False)).shape[0]
        part._is_expert_parallel = True  # transformers' own mark: experts of other ranks are masked
        part.exchange = exchange
        part.forward = partial(_exchanged, part.forward, part.num_experts, exchange, tensor_parallel)


def _exchanged(
    run: Callable[..., Tensor],
    local: int,
    exchange: ExpertExchange,
    tensor_parallel: DeviceMesh | None,
    x_td: Tensor,
    chosen_tk: Tensor,
    weights_tk: Tensor,
) -> Tensor:
    """The experts' weighted sums (T, D) for this rank's tokens."""
    tokens, dim = x_td.shape[0], x_td.shape[1]
    if tensor_parallel is not None:
        x_td, chosen_tk, weights_tk = (_slice(one, tensor_parallel) for one in (x_td, chosen_tk, weights_tk))
    flat = chosen_tk.reshape(-1)
    order = torch.argsort(flat)
    rows = x_td[order // chosen_tk.shape[1]]
    sent, received = exchange.sent(len(rows)), exchange.received(len(rows))
    of_expert = _counts_there(flat, local, exchange)
    arrived = wait_tensor(all_to_all_single_autograd(rows, received, sent, exchange.group))  # type: ignore[no-untyped-call]
    ids = torch.arange(local, device=rows.device).repeat(exchange.ranks)
    ids = ids.repeat_interleave(of_expert, output_size=sum(received)).unsqueeze(-1)
    done = run(arrived, ids, torch.ones_like(ids, dtype=arrived.dtype))
    back = all_to_all_single_autograd(done, sent, received, exchange.group)
    by_token = torch.empty_like(back)
    by_token[order] = back
    summed = (by_token.view(*weights_tk.shape, dim) * weights_tk.unsqueeze(-1)).sum(dim=1)
    if tensor_parallel is not None:
        shape, stride = torch.Size((tokens, dim)), (dim, 1)
        apart = DTensor.from_local(
            summed.contiguous(), tensor_parallel, [Shard(0)], shape=shape, stride=stride
        )
        summed = apart.full_tensor()
    return summed.to(x_td.dtype)


def _slice(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's tokens, of those of all ranks of a mesh."""
    whole = tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [Replicate()])
    return whole.redistribute(mesh, [Shard(0)]).to_local()


def _counts_there(flat: Tensor, local: int, exchange: ExpertExchange) -> Tensor:
    """How many rows each of this rank's experts gets from each rank, (ranks x local) int64."""
    counts = torch.zeros(local * exchange.ranks, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))
    there = torch.empty_like(counts)
    dist.all_to_all_single(there, counts, group=exchange.group)
    return there


_MOST_BYTES = 16 << 20
"""Of a configuration."""
_COUNTED = re.compile(r"(?:layers?|blocks?|heads?|experts?|depth)s?$")
_DTYPE_KEYS = ("torch_dtype", "dtype")
"""They would win over the default dtype."""


def build_huggingface(spec: ModelSpec, orig_dtype: str) -> Model:
    """Build the model of a ``config.json`` on meta.

    Attention is SDPA where the class supports it, experts are grouped matrix products. Raises ``ModelError``,
    which names the class or the value at fault, without transformers, for an unreadable file, for a class
    that transformers does not have, and for a model that tokens cannot be fed to.
    """
    path, notes = Path(spec.source), []
    known = spec.configuration()
    if isinstance(known, dict):
        values = dict(known)
    else:
        values = _read(known)
        if not known.is_relative_to(path):
            values["_name_or_path"] = spec.source
            notes.append(f"the configuration is that of Hugging Face's cache: {known}")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise ModelError(f"model {path} needs transformers: pip install 'fsdp2prof[hf]'") from None
    appear_real(importlib.import_module("transformers.utils.import_utils"))
    if values.pop("quantization_config", None) is not None:
        notes.append("the quantization of the configuration is left out: weights are held in orig_dtype")
    with _without_advice(transformers):
        return _build(transformers, path, values, orig_dtype, spec.layers, notes)


def _build(
    transformers: Any,
    path: Path,
    values: dict[str, Any],
    orig_dtype: str,
    layers: int | None,
    notes: list[str],
) -> Model:
    config = _configuration(transformers, path, values)
    text = config.get_text_config()
    if layers is not None:
        _cut(text, layers)
    for part in (config, text):
        part.use_cache = False
    made = _class_of(transformers, path, values, config)
    is_both = getattr(text, "is_encoder_decoder", False)  # a class of the decoder alone sets it to False
    is_both &= not (values.get("architectures") and made.__name__.endswith("ForCausalLM"))
    references: list[str] = []
    if "linear_attention" in (getattr(text, "layer_types", None) or ()):
        references.append(
            "linear attention runs as transformers' reference in plain torch, which holds more and takes "
            "longer than the kernels of flash-linear-attention: an upper bound"
        )
    try:
        with meta_construction(orig_dtype):
            module = made._from_config(config, attn_implementation=_attention(made, notes))
    except Exception as error:  # a wrong value fails wherever transformers first uses it
        raise ModelError(f"model {path}: {made.__name__} cannot be built: {one_line(error)}") from None
    _refuse_other_inputs(path, module, text)
    if is_both:
        raise ModelError(
            f"model {path}: {text.model_type} is an encoder with a decoder, which a batch of tokens does not "
            "describe: write a factory that returns (module, loss, batch)"
        )
    if any("mamba" in type(part).__name__.lower() for part in module.modules()):
        references.append(
            "state-space scans run as transformers' reference in plain torch, which holds more and takes "
            "longer than the kernels of mamba-ssm, also to estimate long sequences: an upper bound"
        )
    module.train()
    blocks, towers = _decoder_and_towers(module, text)
    idle = _idle_modules(module, text) if text is not config else ()
    name = str(values.get("_name_or_path") or _name_of(path, values))
    plan = plan_of(name, module, blocks, text)
    stacked = _stacked_experts(module)
    dealt = expert_modules(module, stacked)
    decoder = decoder_of(module, blocks, towers, text)
    ring = ring_width_of(text, eager=not getattr(made, "_supports_sdpa", True))
    return Model(
        name=name,
        module=module,
        blocks=blocks,
        towers=towers,
        idle=idle,
        experts=stacked,
        reach_experts=None if isinstance(dealt, str) else reach_experts,
        no_expert_parallel=dealt if isinstance(dealt, str) else "",
        pattern=_pattern(module, blocks, text),
        config=None,
        make_batch=partial(token_batch, int(text.vocab_size)),
        loss=partial(loss_of_model, head_of(module)),
        tensor_parallel=None if isinstance(plan, str) else plan,
        no_tensor_parallel=plan if isinstance(plan, str) else "",
        decoder=None if isinstance(decoder, str) else decoder,
        no_pipeline=decoder if isinstance(decoder, str) else "",
        ring_width=0 if isinstance(ring, str) else ring,
        no_ring=ring if isinstance(ring, str) else "",
        notes=tuple(notes),
        references=tuple(references),
    )


@contextmanager
def _without_advice(transformers: Any) -> Iterator[None]:
    """Suppress warnings for users who run the model."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ModelError(f"model {path}: more than {_MOST_BYTES >> 20} MiB; give a config.json")
        values = json.loads(content)
    except OSError as error:
        raise ModelError(f"model {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"model {path} is not JSON: {error}") from None
    _check_sizes(path, values)
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ModelError(f"model {path}: no architecture: a Hugging Face config.json has a model_type")
    return _without_dtypes(values)


def _check_sizes(path: Path, values: Any) -> None:
    """Refuse more layers, heads or experts than any model has, in whatever part: each is built."""
    for key, value in values.items() if isinstance(values, dict) else ():
        _check_sizes(path, value)
        if _COUNTED.search(str(key)) and isinstance(value, int) and value > MOST_LAYERS:
            raise ModelError(f"model {path}: {key} {value} is more than {MOST_LAYERS}")


def _without_dtypes(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_dtypes(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in _DTYPE_KEYS
    }


def _name_of(path: Path, values: dict[str, Any]) -> str:
    return str(values["model_type"]) if path.name == "config.json" else path.stem


def _configuration(transformers: Any, path: Path, values: dict[str, Any]) -> Any:
    model_type = values["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        own = ": it comes with its own code, which is not run" if "auto_map" in values else ""
        raise ModelError(
            f"model {path}: transformers {transformers.__version__} has no model_type {model_type!r}{own}; "
            "use a newer one, or package.module:factory"
        )
    try:
        return transformers.AutoConfig.for_model(**values)
    except Exception as error:
        raise ModelError(
            f"model {path}: transformers cannot build it: its {model_type} configuration is refused: "
            f"{one_line(error)}"
        ) from None


def _class_of(transformers: Any, path: Path, values: dict[str, Any], config: Any) -> Any:
    """The model class: the first of ``architectures``, otherwise the class with which transformers
    generates text."""
    named = values.get("architectures")
    if isinstance(named, list) and named:
        made = getattr(transformers, str(named[0]), None)
        if made is None:
            raise ModelError(
                f"model {path}: transformers {transformers.__version__} has no class {named[0]}; "
                "use a newer one, or package.module:factory"
            )
        return made
    for auto in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        mapping = getattr(getattr(transformers, auto, None), "_model_mapping", {})
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ModelError(f"model {path}: no class of transformers generates text from a {type(config).__name__}")


def _attention(made: Any, notes: list[str]) -> str:
    """SDPA, or the implementation the class has instead, which is reported."""
    if getattr(made, "_supports_sdpa", True):
        return "sdpa"
    notes.append(
        f"{made.__name__} does not support SDPA: {EAGER}, which keeps the scores of every pair of tokens; "
        "state the kernel (attention) if the trainer runs another"
    )
    return "eager"


def _refuse_other_inputs(path: Path, module: nn.Module, text: Any) -> None:
    name, wanted = type(module).__name__, getattr(module, "main_input_name", "input_ids")
    if wanted != "input_ids":
        raise ModelError(
            f"model {path}: {name} takes {wanted}, not tokens: write a factory that returns "
            "(module, loss, batch)"
        )
    if text.model_type == "rwkv":
        raise ModelError(
            f"model {path}: {name} goes through a sequence token by token in Python where its CUDA kernel "
            "is not there: nothing here executes that kernel"
        )


def _cut(text: Any, layers: int) -> None:
    """Leave the first ``layers`` layers, and their entries in the configuration."""
    before = text.num_hidden_layers
    for name, value in per_layer(text, before).items():
        setattr(text, name, [*value, *value][:layers] if layers <= 2 * before else value)
    shared = getattr(text, "num_kv_shared_layers", None)  # the last ones, which take keys of those before
    if isinstance(shared, int):
        text.num_kv_shared_layers = max(0, shared + layers - before)
    text.num_hidden_layers = layers


def _decoder_and_towers(module: nn.Module, text: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Blocks of the text model, and those of everything beside it."""
    found = _without_shared(module, no_split_blocks(module) or repeated_blocks(module))
    families = grouped((fqn.rstrip("0123456789"), fqn) for fqn in found)
    of_text = [family for family in families.values() if len(family) == text.num_hidden_layers]
    if not of_text:
        return tuple(found), ()
    blocks = max(of_text, key=lambda family: sum(_size(module.get_submodule(fqn)) for fqn in family))
    return tuple(blocks), tuple(fqn for fqn in found if fqn not in blocks)


def _without_shared(module: nn.Module, found: Iterable[str]) -> tuple[str, ...]:
    """Remove modules that share a parameter with the rest (embeddings with a tied head): the root has it."""
    names = grouped((parameter, name) for name, parameter in module.named_parameters(remove_duplicate=False))
    shared = [own for own in names.values() if len(own) > 1]
    return tuple(
        fqn
        for fqn in found
        if not any(0 < sum(name.startswith(f"{fqn}.") for name in own) < len(own) for own in shared)
    )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _idle_modules(module: nn.Module, text: Any) -> tuple[str, ...]:
    """Modules other than the text model and the head: a batch of tokens does not run through them."""
    texts = {part for part in module.modules() if getattr(part, "config", None) is text}
    head = getattr(module, "get_output_embeddings", lambda: None)()
    idle: list[str] = []

    def search(fqn: str, part: nn.Module) -> None:
        for name, child in part.named_children():
            path, inside = f"{fqn}.{name}".lstrip("."), set(child.modules())
            if child in texts or child is head:
                continue
            if inside & texts:
                search(path, child)
            elif next(child.parameters(), None) is not None and head not in inside:
                idle.append(path)

    if module not in texts:
        search("", module)
    return tuple(idle)


def _stacked_experts(module: nn.Module) -> tuple[str, ...]:
    """Modules of several experts that hold their weights in parameters of three dimensions."""
    return tuple(
        fqn
        for fqn, part in module.named_modules()
        if fqn.endswith("experts") and any(p.ndim == 3 for p in part.parameters(recurse=False))
    )


def _pattern(module: nn.Module, blocks: tuple[str, ...], text: Any) -> LayerPattern:
    """The period of the layers, from their parameters and from each one's entries in the configuration."""
    entries = per_layer(text, len(blocks)).values()
    kinds = [
        (
            tuple((name, p.shape) for name, p in module.get_submodule(fqn).named_parameters()),
            tuple(repr(entry[index]) for entry in entries),
        )
        for index, fqn in enumerate(blocks)
    ]
    return LayerPattern.of(kinds)
