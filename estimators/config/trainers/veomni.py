"""VeOmni: one YAML file; its training keys were flat until 2026 and lie under ``train.accelerator`` since."""

from __future__ import annotations

from fsdp2prof.estimators.config.trainers.hugging_face import read_lora, read_preference
from fsdp2prof.estimators.config.trainers.reading import Reading, is_on


def read_veomni(run: Reading) -> None:
    """Read a configuration of VeOmni. Raises ``ModelError`` for settings that are not modelled."""
    mode = run.get("train.accelerator.fsdp_config.fsdp_mode", "train.data_parallel_mode")
    if mode.word() not in ("fsdp2", ""):
        run.refuse(mode, "fsdp2 is modelled")
    run.read_declared()
    if run.mesh.get("cp", 1) > 1:
        run.notes.append(
            "Ulysses is estimated as ring attention: the same memory, larger and overlapped exchanges"
        )
    run.accumulate(run.get("train.global_batch_size"), run.policy["batch_size"], run.data_ranks)
    if run.has("data.mm_configs"):
        run.ask("images", "data.mm_configs: how many images a sequence has is in no file", " K")
    dynamic = run.get("train.dyn_bsz")
    if is_on(dynamic):
        run.ask(
            "documents",
            "dyn_bsz packs micro_batch_size x max_seq_len tokens into a micro-batch; no file says into how "
            "many documents",
            " varlen:K",
        )
    mixed = run.get("train.accelerator.fsdp_config.mixed_precision.enable", "train.enable_mixed_precision")
    for option in ("param_dtype", "reduce_dtype", "output_dtype"):
        found = run.get(f"train.accelerator.fsdp_config.mixed_precision.{option}")
        run.set(option, found.value if is_on(mixed) else None, mixed, found)
    run.set("orig_dtype", "fp32" if is_on(mixed) else "bf16", mixed)
    optimizer = run.get("train.optimizer.type", "train.optimizer")
    if optimizer.word() not in ("adamw", "adam", "sgd", "adamw_torch"):
        run.refuse(optimizer, "adamw, adam and sgd are modelled")
    run.set("optimizer", optimizer.word().removesuffix("_torch"), optimizer)
    rank = run.get("model.lora_config.rank", "model.lora_rank")
    if rank.value is not None:
        targets = run.get("model.lora_config.lora_modules", "model.lora_target_modules")
        read_lora(run, rank, targets, quantized=None)
        if (experts := run.get("model.lora_config.target_parameters")).value:
            run.notes.append(f"{experts.key}: adapters of experts are not modelled")
    if run.has("dpo_config"):
        kind, free = run.get("dpo_config.loss_type"), run.get("dpo_config.reference_free")
        read_preference(run, kind, free, reference=not is_on(free))
    if saved := run.get("train.ops_to_save").value:
        run.notes.append(f"train.ops_to_save: what {len(saved)} operators save is not counted: a lower bound")
    kept = run.get("train.accelerator.fsdp_config.reshard_after_backward")
    if kept.given and not is_on(kept):
        run.notes.append(f"{kept.key} = {kept.value} is not modelled: parameters are freed after backward")
