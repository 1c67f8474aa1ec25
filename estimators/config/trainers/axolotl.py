"""axolotl: one YAML file, the keys of ``fsdp_config`` with and without their prefix."""

from __future__ import annotations

import re

from fsdp2prof.estimators.config.trainers.hugging_face import (
    read_accelerate_fsdp,
    read_attention,
    read_checkpointing,
    read_lora,
    read_optimizer,
    read_precision,
    read_preference,
    read_transformers_plan,
    refuse_eight_bits,
)
from fsdp2prof.estimators.config.trainers.reading import Reading, Value, is_on

_KNOWN_PLUGINS = ("CutCrossEntropyPlugin", "LigerPlugin")
"""Plugins whose effect depends on their keys."""


def read_axolotl(run: Reading) -> None:
    """Read a configuration of axolotl. Raises ``ModelError`` for settings that are not modelled."""
    experts = run.get("expert_parallel_size")
    if not experts.is_absent and experts.number(1) > 1:
        run.refuse(experts, "its ranks lie beside dp_shard and hold all other weights again: not modelled")
    run.read_declared()
    read_transformers_plan(run)
    packed, padded = run.get("sample_packing"), run.get("pad_to_sequence_len")
    if is_on(packed):
        run.opens_documents(packed)
    elif not is_on(padded):
        run.open.append(
            "without sample_packing a batch is as long as its longest example: sequence_len is the most"
        )
    read_checkpointing(run, "gradient_checkpointing")
    read_accelerate_fsdp(run, "fsdp_config")
    mixed = run.get("bf16")
    word = "bf16" if is_on(mixed) or mixed.word() in ("auto", "full") else "no"
    read_precision(run, Value(mixed.key, word, mixed.source, mixed.given))
    run.set("orig_dtype", "bf16" if word == "bf16" else "fp32", mixed)
    read_optimizer(run, "optimizer")
    refuse_eight_bits(run)
    _attention_and_loss(run)
    processor = run.get("processor_type")
    if processor.value:
        run.ask("images", f"{processor.key}: how many images a sequence has is in no file", " K")
    _trained(run)
    adapter = run.get("adapter")
    if adapter.word() in ("lora", "qlora"):
        everywhere = run.get("lora_target_linear")
        targets = run.get("lora_target_modules")
        if is_on(everywhere):
            targets = Value(everywhere.key, "all-linear", everywhere.source)
        bits = "bnb-nf4" if adapter.word() == "qlora" else None
        read_lora(run, run.get("lora_r"), targets, quantized=bits, base=adapter)
    elif adapter.value:
        run.refuse(adapter, "lora and qlora are modelled")
    kind = run.get("rl")
    if kind.word() in ("dpo", "ipo", "orpo", "simpo"):
        read_preference(run, kind, reference=kind.word() in ("dpo", "ipo"))
    elif kind.value:
        run.refuse(kind, "dpo, ipo, orpo and simpo are modelled")


def _trained(run: Reading) -> None:
    """Parameters that train, by regular expressions of the beginning of a name."""
    patterns = run.get("unfrozen_parameters")
    names = patterns.names()
    if any(re.search(r"\[[\d:]+\]$", one) for one in names):  # src/axolotl/utils/freeze.py:250
        run.refuse(patterns, "parameters of which some rows train are not modelled")
    if names:
        dotted = (re.sub(r"\.(?!\+)", r"\\.", one) for one in names)  # as freeze.py:225 reads them
        run.set("trainable", f"^(?:{'|'.join(dotted)})", patterns)


def _attention_and_loss(run: Reading) -> None:
    for key in ("flash_attention", "sdp_attention"):
        if is_on(found := run.get(key)):
            run.set("attention", "flash", found)
    if is_on(eager := run.get("eager_attention")):
        run.set("attention", "math", eager)
    read_attention(run, run.get("attn_implementation"))
    liger, cut = run.get("liger_fused_linear_cross_entropy"), _cut_cross_entropy(run)
    in_place = run.get("liger_cross_entropy")
    chunked = run.get("chunked_cross_entropy")
    if is_on(liger):
        run.set("loss", "fused", liger)
    elif is_on(cut) or cut.key == "plugins":
        run.set("loss", "fused", cut)
        run.notes.append(
            "cut cross-entropy is estimated as Liger's fused one, which holds pieces of the logits"
        )
    elif is_on(in_place):
        run.set("loss", "in-place", in_place)
    elif is_on(chunked):
        run.notes.append(
            "chunked_cross_entropy divides the logits that are there already: all of them are counted"
        )
    fp8 = run.get("fp8")
    if is_on(fp8):
        run.set("float8", "tensorwise", fp8)
        gather = run.get("fp8_enable_fsdp_float8_all_gather")
        if is_on(gather):
            run.set("fp8_all_gather", True, gather)


def _cut_cross_entropy(run: Reading) -> Value:
    """The key that a plugin switches on by default; other plugins are reported by name."""
    plugins, said = run.get("plugins"), run.get("cut_cross_entropy")
    for name in plugins.value if isinstance(plugins.value, list) else ():
        if str(name).endswith("CutCrossEntropyPlugin") and not said.given:
            said = Value(plugins.key, name, plugins.source)  # integrations/cut_cross_entropy/args.py: on
        elif not str(name).endswith(_KNOWN_PLUGINS):
            run.notes.append(f"plugins: {name} is not known; what it changes is not in the estimate")
    return said
