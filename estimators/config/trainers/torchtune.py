"""torchtune: one YAML file, components by their Python names."""

from __future__ import annotations

import re

from fsdp2prof.estimators.config.trainers.hugging_face import read_preference
from fsdp2prof.estimators.config.trainers.reading import Reading, is_on

_MODEL = re.compile(
    r"(?:q?lora_)?(llama2|llama3(?:_[123])?|qwen2(?:_5)?|qwen3)_(\d+(?:_\d+)?b)(?:_(?:base|instruct))?$"
)
_NAMED = (("llama4_scout_17b_16e", "llama4-scout"), ("llama4_maverick_17b_128e", "llama4-maverick"))
_MLP = ("gate_proj", "up_proj", "down_proj")


def read_torchtune(run: Reading) -> None:
    """Read a configuration of a distributed recipe. Raises ``ModelError`` for settings that are not
    modelled."""
    if not any(run.get(key).given for key in ("optimizer._component_", "loss._component_")):
        component = run.get("model._component_", "tokenizer._component_")
        run.refuse(component, "without optimizer and loss this is not a training recipe's file")
    _model(run)
    run.read_declared()
    length = run.get("tokenizer.max_seq_len")
    if length.value is not None:
        run.set("seq_len", length.number(1), length)
    if not is_on(run.get("dataset.packed")):
        varies = "without dataset.packed the data decide how long a sequence is"
        if length.value is None:
            run.ask("seq_len", varies)
        else:
            run.open.append(f"{varies}: {length.value} tokens is the most")
    dtype = run.get("dtype")
    if dtype.value is None:
        run.missing("orig_dtype", dtype)
    else:
        run.set("orig_dtype", dtype.value, dtype)
    for name in ("param_dtype", "reduce_dtype"):
        run.set(name, "none", dtype)
    checkpointing = run.get("enable_activation_checkpointing")
    mode = run.get("ac_mode")
    if mode.word() not in ("", "none", "full"):
        run.refuse(mode, "enable_activation_checkpointing is modelled")
    run.set("ac", "full" if is_on(checkpointing) or mode.word() == "full" else "none", checkpointing)
    layers = run.get("custom_sharded_layers")
    if layers.value:
        run.set("wrap", ("block", *layers.names()), layers)
    _optimizer(run)
    loss, compiles = run.get("loss._component_"), "compile" in run.policy
    run.is_recent |= "linearcrossentropy" in loss.word()  # since 9c06c8bda (#2531, April 2025)
    if loss.value is None:
        run.missing("loss", loss)
    if "chunked" in loss.word() or "linearcrossentropy" in loss.word():
        pieces = run.get("loss.num_output_chunks")
        count = pieces.number(1) if pieces.value else 8  # torchtune/modules/loss/cross_entropy_loss.py:36
        run.set("loss", "compiled" if compiles else f"chunked-kept:{count}", loss, pieces)
    elif loss.word().endswith("nn.crossentropyloss"):
        run.set("loss", "compiled" if compiles else "full", loss)
    elif loss.word().endswith("dpoloss"):
        read_preference(run, loss)
    elif loss.value is not None:
        run.refuse(
            loss,
            "torch.nn.CrossEntropyLoss, CEWithChunkedOutputLoss, LinearCrossEntropyLoss and DPOLoss are "
            "modelled",
        )


def _model(run: Reading) -> None:
    component = run.get("model._component_")
    name = component.word().rpartition(".")[2]
    match = _MODEL.fullmatch(name)
    named = next((model for start, model in _NAMED if start in name), None)
    if named is not None:
        run.set_model(named, component)
    elif match is not None:
        family = match[1].replace("_", ".")
        run.set_model(f"{family}-{match[2].replace('_', '.')}", component)
    elif name:
        run.no_model = f"{component.source}: {component.key} = {component.value} is not built in: add --model"
    rank = run.get("model.lora_rank")
    if rank.value is None:
        return
    chosen = run.get("model.lora_attn_modules")
    names = [one.replace("output_proj", "o_proj") for one in chosen.names() or ("q_proj", "v_proj")]
    if is_on(mlp := run.get("model.apply_lora_to_mlp")):
        names += _MLP
    if is_on(head := run.get("model.apply_lora_to_output")):
        run.notes.append(f"{head.key}: the adapter of the output layer is not modelled")
    held = ",base=nf4" if name.startswith("qlora") else ""
    run.set("lora", f"r={rank.number(1)},targets={'+'.join(names)}{held}", rank, chosen, mlp)


def _optimizer(run: Reading) -> None:
    backward = run.get("optimizer_in_bwd")
    if is_on(backward):
        run.refuse(backward, "an optimizer that steps in backward is not modelled")
    component, fused = run.get("optimizer._component_"), run.get("optimizer.fused")
    foreach = run.get("optimizer.foreach")
    name = component.word().rpartition(".")[2].removeprefix("paged")
    known = ("adamw8bit", "adamw", "adam", "sgd")
    if component.value is None:
        run.missing("optimizer", component)
    elif name not in known:
        run.refuse(component, f"this optimizer is not modelled; {', '.join(known)} are")
    else:
        run.set("optimizer", name, component)
    if is_on(fused):
        run.set("optimizer_impl", "fused", fused)
    elif foreach.word() == "false":
        run.set("optimizer_impl", "for-loop", foreach)
    norm = run.get("clip_grad_norm")
    run.set("clip_grad", norm.value is not None, norm)
