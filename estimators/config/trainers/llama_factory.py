"""LLaMA-Factory: v0 on transformers' Trainer with accelerate, and v1 with its own loop."""

from __future__ import annotations

from fsdp2prof.estimators.config.trainers.hugging_face import (
    mixed_precision,
    read_accelerate_fsdp,
    read_attention,
    read_liger,
    read_lora,
    read_optimizer,
    read_precision,
    read_preference,
    refuse_if_given,
)
from fsdp2prof.estimators.config.trainers.reading import Reading, is_on

_NO_TRAINING = ("export_dir", "task", "infer_backend", "do_predict")
_NO_REFERENCE = ("orpo", "simpo")
"""Losses over pairs without a reference (src/llamafactory/hparams/finetuning_args.py: use_ref_model)."""


def read_llama_factory(run: Reading) -> None:
    """Read v0, together with the accelerate file. Raises ``ModelError`` for settings that are not
    modelled."""
    if not is_on(run.get("do_train")):
        refuse_if_given(
            run, "do_train is not set: this is not the configuration of a training", *_NO_TRAINING
        )
    deepspeed = run.get("deepspeed")
    if deepspeed.value:
        run.refuse(deepspeed, "DeepSpeed is not FSDP2; an estimate is of accelerate with fsdp_version: 2")
    run.set_world(run.get("accelerate.num_processes"))
    run.read_declared()
    read_accelerate_fsdp(run, "accelerate.fsdp_config", "fsdp_config")
    read_precision(run, mixed_precision(run))
    if is_on(pure := run.get("pure_bf16")):
        run.set("orig_dtype", "bf16", pure)
    packed = run.get("packing", "neat_packing")
    if is_on(packed):
        run.opens_documents(packed)
    else:
        run.open.append("without packing a batch is as long as its longest example: cutoff_len is the most")
    off = run.get("disable_gradient_checkpointing")
    if not is_on(off) or "ac" not in run.policy:
        run.set("ac", "none" if is_on(off) else "full", off)
    read_optimizer(run, "optim")
    if is_on(liger := run.get("enable_liger_kernel")):
        read_liger(run, liger)
    read_attention(run, run.get("flash_attn"))
    kind = run.get("finetuning_type")
    if kind.word() == "lora":
        bits = run.get("quantization_bit")
        targets, rank = run.get("lora_target"), run.get("lora_rank")
        read_lora(run, rank, targets, quantized="bnb-nf4" if bits.value == 4 else None, base=kind)
    elif kind.word() not in ("full", ""):
        run.refuse(kind, "full and lora are modelled")
    pixels = run.get("image_max_pixels", "image_max_resolution", "image_resolution")
    if pixels.given:
        run.ask("images", f"{pixels.key}: how many images a sequence has is in no file", " K")
    stage = run.get("stage")
    if stage.word() == "dpo":
        read_preference(run, stage, reference=run.get("pref_loss").word() not in _NO_REFERENCE)
    elif stage.word() not in ("sft", "pt", ""):
        run.refuse(stage, "pt, sft and dpo are modelled")


def read_llama_factory_v1(run: Reading) -> None:
    """Read v1. Raises ``ModelError`` for settings that are not modelled."""
    kind = run.get("dist_config.name")
    if kind.word() not in ("fsdp2", ""):
        run.refuse(kind, "fsdp2 is modelled")
    run.read_declared()
    if run.get("cp_mode").word() == "ulysses" and run.mesh.get("cp", 1) > 1:
        run.notes.append(
            "cp_mode = ulysses: estimated as ring attention, whose exchanges are larger and overlapped"
        )
    run.accumulate(run.get("global_batch_size"), run.policy["batch_size"], run.data_ranks)
    batching = run.get("batching_strategy")
    if batching.word() in ("", "normal"):
        run.open.append("a batch is as long as its longest example: cutoff_len is the most")
    bf16 = run.get("bf16")
    run.set("param_dtype", "bf16" if is_on(bf16) else "none", bf16)
    if run.get("optim_config.name").value not in (None, "adamw"):
        run.refuse(run.get("optim_config.name"), "AdamW is modelled")
    which, kernels = run.get("kernel_config.name"), run.get("kernel_config.include_kernels")
    if which.word() == "liger_kernel":
        run.set("norm", "fused", which)
    elif "auto" in (which.word(), kernels.word()) or kernels.word() == "true" or "liger" in kernels.word():
        run.ask(
            "norm", "kernel_config: which kernels replace the model's own depends on the machine", " fused"
        )
    run.ask("loss", "the command (sft, dpo) is in no file; sft is estimated", " dpo --extra-model MODEL")
    peft = run.get("peft_config.name")
    kind, bits = run.get("quant_config.name", "quant_config"), run.get("quant_config.quantization_bit")
    four = bits.value == 4 or (kind.word() == "bnb" and bits.value is None)
    if bits.value is not None and not four:
        run.refuse(bits, "4 bits are modelled")
    if four and peft.word() != "lora":
        run.refuse(bits if bits.given else kind, "weights in 4 bits are modelled under LoRA")
    double = run.get("quant_config.double_quantization")
    if four and double.given and not is_on(double):
        run.notes.append(
            f"{double.key} = {double.value}: the scales of 4-bit weights are estimated in 8 bits"
        )
    if peft.word() == "lora":
        rank, targets = run.get("peft_config.r"), run.get("peft_config.target_modules")
        read_lora(run, rank, targets, quantized="bnb-nf4" if four else None, base=bits if four else peft)
    elif peft.value:
        run.refuse(peft, "lora is modelled")
