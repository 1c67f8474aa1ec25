"""Common settings of trainers built on Hugging Face, and the Trainer itself: TrainingArguments, TRL,
accelerate."""

from __future__ import annotations

import re
from typing import Any

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.lora import EVERY_LAYER, peft_targets
from fsdp2prof.estimators.config.trainers.reading import Reading, Value, is_on, is_set

_OPTIMIZERS = {
    "adamw_torch": ("adamw", "foreach"),
    "adamw_torch_fused": ("adamw", "fused"),
    "adamw_hf": ("adamw", "foreach"),
    "adamw": ("adamw", "foreach"),
    "adam": ("adam", "foreach"),
    "sgd": ("sgd", "foreach"),
    "adagrad": ("adagrad", "foreach"),
    "rmsprop": ("rmsprop", "foreach"),
    "adamw_torch_8bit": ("adamw8bit", "foreach"),
    "adamw_torch_4bit": ("adamw4bit", "foreach"),
    "adamw_8bit": ("adamw8bit", "foreach"),
    "adamw_bnb_8bit": ("adamw8bit", "foreach"),
    "paged_adamw_8bit": ("adamw8bit", "foreach"),
}
_ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LAYERS = (*_ATTENTION_LAYERS, "gate_proj", "up_proj", "down_proj")
_EVERY_LAYER = ("all-linear", "all", "linear")
_GRPO = ("num_generations", "max_completion_length", "reward_funcs")
"""Keys of TRL's trainers that generate."""
_OF_PAIRS = (
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "apo_zero",
    "apo_down",
    "discopop",
)
"""Losses of TRL's DPO."""


def read_transformers_plan(run: Reading) -> None:
    """Tensor parallelism by transformers' own plan: sequences and logits stay whole."""
    if run.mesh.get("tp", 1) > 1:
        plan = Value("tp_plan", "auto", "transformers' plans of its models", given=False)
        run.set("sequence_parallel", False, plan)
        run.set("loss_parallel", False, plan)


def read_optimizer(run: Reading, *keys: str) -> None:
    """The optimizer by transformers' name for it."""
    found = run.get(*keys)
    if found.value is None:
        return
    known = _OPTIMIZERS.get(found.word())
    if known is None:
        run.refuse(found, f"this optimizer is not modelled; {', '.join(_OPTIMIZERS)} are")
    run.set("optimizer", known[0], found)
    if known[1] != "foreach":
        run.set("optimizer_impl", known[1], found)


def read_lora(
    run: Reading, rank: Value, targets: Value, *, quantized: str | None, base: Value | None = None
) -> None:
    """Adapters of PEFT, beside weights in 4 bits or of a dtype of their own."""
    names: Any = targets.value
    if isinstance(names, str):
        names = (EVERY_LAYER,) if names in _EVERY_LAYER else re.split(r"[,+ ]+", names)
    if not names:
        names = ("q_proj", "v_proj")
        run.notes.append(
            "no target modules of LoRA are given: q_proj and v_proj, PEFT's choice for these models"
        )
    if rank.value is None:
        raise ModelError(
            f"{rank.key} is in no file, and the trainer has no default for it: add --override {rank.key}=R"
        )
    held = f",base={quantized}" if quantized else ""
    text = f"r={rank.number(1)},targets={peft_targets(names)}{held}"
    run.set("lora", text, rank, *([targets] if targets.given else []), *([base] if base is not None else []))


def read_preference(run: Reading, *read: Value, reference: bool = True) -> None:
    """Pairs of answers, and the reference: a second model, or where adapters train itself without them."""
    run.set("loss", "dpo", *read)
    if reference and run.model is not None:
        run.set("extra_model", "self" if "lora" in run.policy else run.model, *read)


def refuse_if_given(run: Reading, why: str, *keys: str) -> None:
    """Raises ``ModelError`` for the first of ``keys`` that a file switches on."""
    for key in keys:
        if is_set(found := run.get(key)):
            run.refuse(found, why)


def read_checkpointing(run: Reading, *keys: str) -> None:
    """Checkpointing of every block, on or off."""
    found = run.get(*keys)
    if found.value is not None:
        on_host = found.word() in ("offload", "unsloth")
        run.set("ac", "full" if is_on(found) or on_host else "none", found)
        if on_host:
            run.set("offload_activations", True, found)


def read_attention(run: Reading, found: Value) -> None:
    """The attention by transformers' name for it; without a name, as in the stack."""
    word = found.word()
    if "flash" in word or word in ("sdpa", "fa2", "fa3", "fa4"):
        kernel = "flash3" if "3" in word else "cudnn" if "4" in word else "flash"
        run.set("attention", kernel, found)
        if kernel == "cudnn":
            run.notes.append(f"{found.key} = {found.value}: FlashAttention-4 is estimated at cuDNN's rate")
    elif word in ("eager", "disabled"):
        run.set("attention", "math", found)
    elif found.given and word not in ("", "auto", "none"):
        run.notes.append(f"{found.key} = {found.value} is not modelled: flash attention is estimated")


def refuse_eight_bits(run: Reading) -> None:
    """Raises ``ModelError`` for base weights in 8 bits."""
    found = run.get("load_in_8bit")
    if is_on(found):
        run.refuse(found, "weights in 8 bits are not modelled; load_in_4bit is")


def mixed_precision(run: Reading) -> Value:
    """accelerate's mixed precision, or the flag of the trainer that sets it."""
    found = run.get("accelerate.mixed_precision")
    for name in ("bf16", "fp16"):
        if (flag := run.get(name)).given and is_on(flag):
            found = Value(flag.key, name, flag.source)
    return found


def read_precision(run: Reading, mixed: Value) -> None:
    """accelerate's mixed precision: one dtype for parameters, reduction and outputs."""
    word = {"bf16": "bf16", "fp16": "fp16"}.get(mixed.word())
    if mixed.word() == "fp8":
        run.refuse(mixed, "accelerate's fp8 backends are not modelled; --mixed-precision bf16 is")
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        run.set(name, word, mixed)
    if word == "fp16":
        run.notes.append("fp16: the gradient scaler's work is not counted")


def read_accelerate_fsdp(run: Reading, *sections: str) -> None:
    """The ``fsdp_config`` of accelerate, with or without the prefix ``fsdp_`` of its keys."""

    def key(name: str) -> Value:
        places = [f"{section}.{prefix}{name}" for section in sections for prefix in ("fsdp_", "")]
        return run.get(*places, f"fsdp_{name}" if name == "version" else places[0])

    version, asked = key("version"), run.get("fsdp")
    deepspeed = run.get("deepspeed", "accelerate.deepspeed_config", "accelerate.deepspeed_config.zero_stage")
    if deepspeed.value:
        run.refuse(deepspeed, "DeepSpeed is not FSDP2; an estimate is of fsdp_version: 2")
    if not version.given and not asked.value and not run.has(*sections):
        raise ModelError(
            "no file configures FSDP (fsdp_config): add the file that does as another --from-config, or "
            f"--override {sections[0]}.fsdp_version=2 for FSDP2"
        )
    if version.value is None and asked.value:
        version = Value("fsdp_config.version", 2, "transformers/training_args.py:2826", given=False)
    if version.value is None or version.number(1) < 2:
        said = "an absent version" if version.value is None else str(version.value)
        run.refuse(
            Value("fsdp_version", version.value, version.source or "fsdp_config"),
            f"{said} is FSDP1, which is not modelled; for FSDP2 add --override {sections[0]}.fsdp_version=2",
        )
    run.get(f"{sections[0]}.fsdp_version")
    run.says("FSDP", "fully_shard", version)
    reshard = key("reshard_after_forward")
    if reshard.value is not None:
        if is_on(reshard) or reshard.word() in ("full_shard", "1"):
            run.says("reshard", "always", reshard)
        else:
            run.set("reshard", "never", reshard)
    _read_sharding_words(run, asked, is_decided=reshard.given)
    for name in ("offload_params", "cpu_offload"):
        if (offload := key(name)).value is not None:
            run.set("offload", is_on(offload), offload)
    policy = key("auto_wrap_policy")
    if policy.word() == "no_wrap":
        run.set("wrap", ("root",), policy)
    elif policy.word() == "size_based_wrap":
        run.refuse(policy, "wrapping by size is not modelled; TRANSFORMER_BASED_WRAP is")
    elif policy.value is not None:
        run.says("wrap", "block", policy)
    classes = key("transformer_layer_cls_to_wrap")
    if classes.value:
        run.says("wrap", "block", classes)
    checkpointing = key("activation_checkpointing")
    if is_on(checkpointing):
        unit = run.get("activation_checkpointing_unit")
        run.set("ac", "children" if unit.word() == "child" else "full", checkpointing, unit)
    on_host = key("activation_checkpointing_offload")
    if is_on(on_host):
        run.set("offload_activations", True, on_host)
    for name in ("cpu_ram_efficient_loading", "state_dict_type", "sync_module_states", "use_orig_params"):
        key(name)
    for name in ("backward_prefetch", "forward_prefetch", "sharding_strategy"):
        if (found := key(name)).given:
            run.notes.append(f"{found.key} = {found.value} does nothing: it is a setting of FSDP1")


def _read_sharding_words(run: Reading, asked: Value, *, is_decided: bool) -> None:
    """``fsdp: full_shard auto_wrap offload`` of TrainingArguments; ``fsdp_config`` overrides it."""
    words = asked.value if isinstance(asked.value, list) else asked.word().split()
    for word in words:
        if word == "offload":
            run.set("offload", True, asked)
        elif word == "full_shard" and not is_decided:
            run.says("reshard", "always", asked)
        elif word == "shard_grad_op" and not is_decided:
            run.set("reshard", "never", asked)
        elif word in ("hybrid_shard", "hybrid_shard_zero2", "no_shard"):
            run.refuse(asked, f"{word} is only there with FSDP1; HSDP is dp_replicate of accelerate's mesh")


def read_hugging_face(run: Reading) -> None:
    """Read TrainingArguments, TRL's configurations and accelerate's. Raises ``ModelError``."""
    trl = run.has(
        "max_length", "max_seq_length", "packing", "dataset_name", "use_peft", "loss_type", "beta", *_GRPO
    )
    run.take_stack("trl-2026" if trl else "transformers-2026-09")
    read_attention(run, run.get("attn_implementation"))
    run.set_world(run.get("accelerate.num_processes"))
    ulysses = run.get("accelerate.parallelism_config.parallelism_config_sp_size")
    if not ulysses.is_absent and ulysses.number(1) > 1:
        run.read_declared(cp=ulysses)
        run.notes.append(
            f"{ulysses.key}: estimated as ring attention, whose exchanges are larger and overlapped"
        )
    else:
        run.read_declared()
    read_transformers_plan(run)
    read_accelerate_fsdp(run, "accelerate.fsdp_config", "fsdp_config")
    mixed = mixed_precision(run)
    if not mixed.given and trl:
        mixed = Value("bf16", "bf16", "trl/trainer/base_config.py:105: bf16 unless fp16 is set", given=False)
    read_precision(run, mixed)
    _held_dtype(run)
    generates = any(run.has(key) for key in _GRPO)
    if not generates:
        _length(run, trl)
    checkpointing = run.get("activation_checkpointing", "gradient_checkpointing")
    if "ac" not in run.policy:
        if trl and not checkpointing.given:
            checkpointing = Value(
                "gradient_checkpointing", True, "trl/trainer/base_config.py:61", given=False
            )
        run.set("ac", "full" if is_on(checkpointing) else "none", checkpointing)
    read_optimizer(run, "optim")
    compiled = run.get("torch_compile")
    dynamo = run.get("accelerate.dynamo_config.dynamo_backend")
    if is_on(compiled) or dynamo.word() not in ("", "no"):
        run.set("compile", True, compiled if is_on(compiled) else dynamo)
    refuse_eight_bits(run)
    if is_on(run.get("use_peft")):
        _adapters(run)
    if generates:
        _generation(run)
    else:
        _loss(run)


def _held_dtype(run: Reading) -> None:
    """The dtype that a model is loaded in, which accelerate keeps without mixed precision."""
    dtype = run.get("dtype", "torch_dtype")
    if not dtype.given or dtype.word() in ("auto", "none"):
        return
    if run.policy.get("param_dtype") is not None:
        run.notes.append(
            f"{dtype.key} = {dtype.value}: accelerate holds trained parameters in fp32 under mixed precision"
        )
    elif not is_on(run.get("use_peft")):  # PEFT makes adapters in fp32
        run.set("orig_dtype", dtype.word(), dtype)


def _adapters(run: Reading) -> None:
    bits, dtype = run.get("load_in_4bit"), run.get("dtype", "torch_dtype")
    held, said = ("bnb-nf4", bits) if is_on(bits) else (None, None)
    upcast = is_on(run.get("upcast_of_frozen")) and run.policy.get("param_dtype") is not None
    if held is None and not upcast and dtype.word() in ("bfloat16", "float16"):
        held, said = dtype.word(), dtype
    read_lora(run, run.get("lora_r"), run.get("lora_target_modules"), quantized=held, base=said)


def _generation(run: Reading) -> None:
    """GRPO's training step on prompts with their completions; generation is left out."""
    prompt, completion = run.get("max_prompt_length"), run.get("max_completion_length")
    if completion.value is None:
        completion = Value(completion.key, 512, "trl/trainer/grpo_config.py:489", given=False)
    if prompt.value is None:
        run.ask("seq_len", f"the length of prompts, beside completions of {completion.value}, is in no file")
    else:
        run.set("seq_len", prompt.number(1) + completion.number(1), prompt, completion)
        run.open.append(
            "a batch is as long as its longest prompt and completion: "
            f"{prompt.value} and {completion.value} tokens are the most"
        )
    said = next(found for key in _GRPO if (found := run.get(key)).given)
    run.set("loss", "logprobs", said)
    run.notes.append(
        f"{said.key}: the training step of GRPO is estimated. Generation, rewards and old log-probabilities "
        "are not in its time, and vLLM's memory on the same device (vllm_gpu_memory_utilization) is not in "
        "its memory"
    )
    divergence = run.get("beta")
    if divergence.value is None:
        run.open.append(
            "beta is in no file: none is estimated, as TRL has it since 2025 (0.04 before, with a reference: "
            "--extra-model)"
        )
    elif float(divergence.value) and run.model is not None:
        run.set("extra_model", "self" if "lora" in run.policy else run.model, divergence)


def _length(run: Reading, trl: bool) -> None:
    length = run.get("max_length", "max_seq_length")
    if length.value is None and trl:
        length = Value("max_length", 1024, "trl/trainer/sft_config.py:205", given=False)
    if length.value is None:
        run.ask("seq_len", "the length of sequences is in no file")
        return
    run.set("seq_len", length.number(1), length)
    packed = run.get("packing")
    if is_on(packed):
        run.opens_documents(packed)
    else:
        run.open.append(
            f"without packing a batch is as long as its longest example: {length.value} tokens is the most"
        )


def read_liger(run: Reading, liger: Value) -> None:
    """Liger's kernels as transformers' Trainer applies them: its defaults are RMSNorm, SwiGLU, fused loss."""
    for option in ("loss", "norm", "mlp"):
        run.set(option, "fused", liger)


def _loss(run: Reading) -> None:
    liger, kind = run.get("use_liger_kernel", "use_liger"), run.get("loss_type")
    pairs = run.get("beta", "max_prompt_length")
    if kind.word() in _OF_PAIRS or pairs.given:
        said = kind if kind.word() in _OF_PAIRS else pairs
        read_preference(run, said)
        if said is pairs:
            run.open.append(
                f"{pairs.key}: no file says which trainer of preferences this is. DPO with a reference is "
                "estimated; ORPO and CPO have none (--extra-model none), KTO and others are not modelled"
            )
        return
    if is_on(liger):
        read_liger(run, liger)
        return
    if kind.word() == "chunked_nll":
        run.set("loss", "chunked-tokens:256", kind)
        run.is_recent |= kind.given  # trl/trainer/sft_config.py has it since 9bcf72943 (April 2026)
    elif kind.word() == "nll":
        run.set("loss", "full", kind)
    elif kind.given:
        run.notes.append(
            f"loss_type = {kind.value} is not modelled: cross-entropy over all logits is estimated"
        )
