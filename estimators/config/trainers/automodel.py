"""NeMo Automodel: one YAML file, components by ``_target_``."""

from __future__ import annotations

from fnmatch import fnmatchcase

from fsdp2prof.estimators.config.lora import peft_targets
from fsdp2prof.estimators.config.trainers.reading import Reading, Value, is_on

_RECIPES = (
    "TrainFinetuneRecipeForNextTokenPrediction",
    "BenchmarkingRecipeForNextTokenPrediction",
    "FinetuneRecipeForVLM",
)
"""Recipes that train one model to predict the next token."""
_LENGTHS = (
    "dataset.seq_length",
    "dataset.seq_len",
    "dataset.max_seq_length",
    "dataloader.collate_fn.max_length",  # pads to it
)
_TARGETS = "*_proj"
"""Of adapters if a file has none (nemo_automodel/components/_peft/module_matcher.py:108)."""


def read_automodel(run: Reading) -> None:
    """Read a recipe's configuration. Raises ``ModelError`` for settings that are not modelled."""
    recipe = run.get("recipe", "recipe._target_")
    if isinstance(recipe.value, str) and recipe.value.rpartition(".")[2] not in _RECIPES:
        run.refuse(recipe, f"of Automodel's recipes {', '.join(_RECIPES)} are modelled")
    if recipe.word().endswith("vlm"):
        run.ask("images", f"{recipe.key}: how many images a sequence has is in no file", " K")
    strategy = run.get("distributed.strategy", "distributed._target_")
    if strategy.value is not None and "fsdp2" not in strategy.word():
        run.refuse(strategy, "fsdp2 is modelled")
    run.read_declared(dp_shard=_shard(run))
    if recipe.word().startswith("benchmarking"):  # recipes/llm/benchmark.py steps without clipping
        run.set("clip_grad", False, recipe)
    if run.world_size == 1:
        run.notes.append(
            "one GPU: the trainer does not call fully_shard there, and the estimate does; FSDP's copies and "
            "its cast to --param-dtype are too many"
        )
    _batch(run)
    checkpointing = run.get(
        "distributed.activation_checkpointing",
        "activation_checkpointing",
        "parallelizer.activation_checkpointing",
    )
    selective = checkpointing.word() == "selective"
    whole = is_on(checkpointing) or checkpointing.word() == "full"
    run.set("ac", "op" if selective else "full" if whole else "none", checkpointing)
    if whole:
        run.notes.append(
            "attention, MLP and norms are checkpointed separately there, whole blocks in the estimate, which "
            "holds one input a block where the trainer holds three or four"
        )
    _sync(run)
    _sharding(run)
    dtype = run.get("model.torch_dtype", "model.dtype")
    if dtype.word() not in ("auto", ""):
        run.set("orig_dtype", dtype.word().removeprefix("torch."), dtype)
    for option in ("param_dtype", "reduce_dtype", "output_dtype"):
        found = run.get(f"distributed.mp_policy.{option}", f"distributed.{option}")
        if found.value is not None:
            run.set(option, found.word().removeprefix("torch."), found)
    offload = run.get(
        "distributed.offload_policy._target_", "distributed.offload_policy", "distributed.cpu_offload"
    )
    if is_on(offload) or offload.word().endswith("cpuoffloadpolicy"):
        run.set("offload", True, offload)
    compiled, layers = run.get("compile.enabled"), run.get("distributed.enable_compile")
    if is_on(compiled) or is_on(layers):
        run.set("compile", True, compiled if is_on(compiled) else layers)
    tower = run.get("freeze_config.freeze_vision_tower")
    if tower.given and not is_on(tower):
        run.notes.append(f"{tower.key} = {tower.value}: the tower trains there and is frozen in the estimate")
    _optimizer_and_loss(run)
    _low_precision(run)
    rank = _rank(run)
    if rank.value is not None:
        everywhere, targets = run.get("peft.match_all_linear"), run.get("peft.target_modules")
        wanted = targets.value or _TARGETS
        names = (
            ["*"] if is_on(everywhere) else [wanted] if isinstance(wanted, str) else list(map(str, wanted))
        )
        if any(fnmatchcase("lm_head", one) for one in names):
            run.notes.append(f"{targets.key}: the adapter of lm_head is not in the estimate")
        if any(fnmatchcase("mlp.experts", one) for one in names):
            names.append("experts")
        four = run.get("quantization.load_in_4bit")
        held = ",base=bnb-nf4" if is_on(four) else ""
        read = (rank, targets, four) if held else (rank, targets)
        run.set("lora", f"r={rank.number(1)},targets={peft_targets(names)}{held}", *read)


def _low_precision(run: Reading) -> None:
    """torchao's float8, and weights in fewer bits."""
    if is_on(enabled := run.get("fp8.enabled")):
        recipe, gather = run.get("fp8.recipe_name"), run.get("fp8.enable_fsdp_float8_all_gather")
        run.set("float8", recipe.word() or "tensorwise", enabled, recipe)
        if is_on(gather) and run.policy["float8"] == "tensorwise":
            run.set("fp8_all_gather", True, gather)
        outside = run.get("fp8.filter_fqns")
        extra = [one for one in outside.names() if one != "lm_head"]
        if extra:
            run.notes.append(f"{outside.key}: {', '.join(map(str, extra))} is in float8 in the estimate")
        run.get("fp8.precompute_float8_dynamic_scale_for_fsdp", "fp8.force_recompute_fp8_weight_in_bwd")
        run.get("fp8.emulate")
    else:
        _idle(run, "fp8")
    if is_on(eight := run.get("quantization.load_in_8bit")):
        run.refuse(eight, "weights in 8 bits are not modelled; load_in_4bit is")
    four = run.get("quantization.load_in_4bit")
    if is_on(four):
        run.get(*(f"quantization.{name}" for name in run.section("quantization")))
        if _rank(run).value is None:
            run.refuse(four, "weights in 4 bits are modelled under LoRA")


def _sharding(run: Reading) -> None:
    """Which units reshard, prefetch by name, pipelines, and the kernels that a recipe names."""
    experts = run.mesh.get("ep", 1) > 1
    reshard = run.get(
        *(
            ("distributed.moe.reshard_after_forward", "parallelizer.reshard_after_forward")
            if experts
            else ("distributed.reshard_after_forward",)
        )
    )
    if reshard.value is not None:
        run.set("reshard", "always" if is_on(reshard) else "never", reshard)
    if not experts:
        for section in ("distributed.moe", "parallelizer"):
            _idle(run, section, "expert parallelism is 1")
    if is_on(prefetch := run.get("distributed.enable_fsdp2_prefetch")):
        for way in ("forward", "backward"):
            depth = run.get(f"distributed.fsdp2_{way}_prefetch_depth")
            run.set(f"{way}_prefetch", depth.number(1), prefetch, depth)
    overlapped, divided = (
        run.get("distributed.enable_async_tensor_parallel"),
        run.get("distributed.sequence_parallel"),
    )
    if run.mesh.get("tp", 1) > 1:
        if is_on(overlapped):
            run.set("async_tp", True, overlapped)
        elif not is_on(divided):
            run.set("sequence_parallel", False, divided)
    if run.mesh.get("pp", 1) > 1:
        schedule, per_stage, rounding = (
            run.get(f"distributed.pipeline.{name}", f"autopipeline.{name}")
            for name in ("pp_schedule", "layers_per_stage", "round_virtual_stages_to_pp_multiple")
        )
        run.set_schedule(schedule, per_stage, rounding.word() or None)
        local, micro = (
            run.get("step_scheduler.local_batch_size"),
            run.get("distributed.pipeline.pp_microbatch_size", "autopipeline.pp_microbatch_size"),
        )
        run.set("batch_size", micro.number(1), micro)
        steps = local.number(1) // micro.number(1)
        run.set("grad_accum", run.policy.get("grad_accum", 1) * steps, local, micro)
        run.run_schedule(steps, local, micro)
    else:
        for section in ("distributed.pipeline", "autopipeline"):
            _idle(run, section, "pipeline parallelism is 1")
    run.set_dispatch(run.get("model.backend.dispatcher", "model.backend.enable_deepep"))
    attention = run.get("model.backend.attn", "model.attn_implementation")
    kernel = {"te": "cudnn", "flex": "flash", "flash_attention_2": "flash", "flash_attention_3": "flash3"}
    if attention.word() == "flex":
        run.notes.append(f"{attention.key} = flex: estimated as flash attention, which is faster")
    if kernel.get(attention.word()) is not None:
        run.set("attention", kernel[attention.word()], attention)
    kernels = [run.get(f"model.backend.{name}") for name in ("linear", "rms_norm", "experts")]
    others = [f"{one.key} = {one.value}" for one in kernels if one.word() and "torch" not in one.word()]
    if others:
        run.set("fused_kernels", True, *(one for one in kernels if one.word() and "torch" not in one.word()))
        run.notes.append(f"{', '.join(others)}: torch's kernels are estimated instead")
    liger = run.get("model.use_liger_kernel")
    if liger.given and not is_on(liger):
        for option in ("norm", "mlp"):
            run.set(option, "composed", liger)
    precision = run.get("model.backend.te_fp8.recipe")
    if precision.value is not None:
        run.notes.append(
            f"{precision.key} = {precision.value} is not modelled: matrix products are estimated in bf16"
        )


def _idle(run: Reading, section: str, why: str = "") -> None:
    """Accept a section that has no effect; ``why`` is reported if it has keys."""
    keys = [f"{section}.{name}" for name in run.section(section)]
    run.get(section, *keys)
    if keys and why:
        run.notes.append(f"{section} does nothing: {why}")


def _rank(run: Reading) -> Value:
    """The adapters' rank, with a default if there are adapters."""
    rank = run.get("peft.dim")
    if rank.given or not run.section("peft"):
        return rank
    return Value(rank.key, 8, "nemo_automodel/components/_peft/lora.py:49", given=False)


def _sync(run: Reading) -> None:
    """When gradients are reduced: by the outer model if FSDP wraps it, otherwise by the experts' own
    switch."""
    defer = run.get("distributed.defer_fsdp_grad_sync")
    kept, outer = (
        run.get("model.backend.enable_fsdp_optimizations"),
        run.get("distributed.moe.wrap_outer_model"),
    )
    decides = defer if is_on(outer) or run.mesh.get("ep", 1) == 1 else kept
    run.set("sync", "last" if is_on(decides) else "each", decides)
    if is_on(kept) and run.mesh.get("pp", 1) == 1 and run.policy.get("grad_accum", 1) > 1:
        run.notes.append(
            f"{kept.key}: a mixture of experts keeps its parameters gathered between micro-batches there, "
            "which is not in the estimate"
        )


def _shard(run: Reading) -> Value:
    """``dp_size`` holds replicas and shards together; none is the rest of the ranks."""
    found, replicas = run.get("distributed.dp_size"), run.get("distributed.dp_replicate_size")
    if found.is_absent:
        return Value("distributed.dp_size", -1, found.source or "the rest of the ranks", found.given)
    return Value(
        found.key,
        found.number(1) // (1 if replicas.is_absent else replicas.number(1)),
        found.source,
        found.given,
    )


def _batch(run: Reading) -> None:
    run.accumulate(run.get("step_scheduler.global_batch_size"), run.policy["batch_size"], run.data_ranks)
    packed = run.get("packed_sequence.packed_sequence_size", "packed_sequence.pack_size")
    run.get("packed_sequence.max_length")  # of a sample before it is packed
    length = run.get(*_LENGTHS)
    if packed.value:
        run.set("seq_len", packed.number(1), packed)
        run.opens_documents(packed)
    elif length.value is not None:
        run.set("seq_len", length.number(1), length)
    else:
        run.ask("seq_len", "the data decide how long a sequence is")


def _fused_adam(run: Reading) -> str | None:
    """Transformer Engine's, by the states it keeps itself; None for torch's."""
    masters, remainders = run.get("optimizer.master_weights"), run.get("optimizer.store_param_remainders")
    moments = run.get("optimizer.exp_avg_dtype"), run.get("optimizer.exp_avg_sq_dtype")
    run.get("optimizer.master_weight_dtype")
    dtypes = {one.word().removeprefix("torch.") for one in moments if one.given} or {"float32"}
    if len(dtypes) > 1 or not dtypes <= {"float32", "bfloat16"}:
        run.refuse(moments[0], "moments of one dtype, float32 or bfloat16, are modelled")
    if not is_on(masters):
        if "bfloat16" in dtypes:
            run.refuse(moments[0], "moments in bfloat16 are modelled beside master weights")
        return None
    narrow = "-bf16" if "bfloat16" in dtypes else ""
    return f"adamw-{'remainders' if is_on(remainders) else 'master'}{narrow}"


def _optimizer_and_loss(run: Reading) -> None:
    target = run.get("optimizer._target_")
    name = target.word().rpartition(".")[2]
    if name not in ("adam", "adamw", "sgd", "fusedadam", ""):
        run.refuse(target, "torch.optim's Adam, AdamW and SGD are modelled")
    if name:
        own = _fused_adam(run) if name == "fusedadam" else None
        run.set("optimizer", own or ("adamw" if name == "fusedadam" else name), target)
        fused, foreach = run.get("optimizer.fused"), run.get("optimizer.foreach")
        if own is None and (name == "fusedadam" or is_on(fused)):
            run.set("optimizer_impl", "fused", fused if is_on(fused) else target)
        elif foreach.given:
            run.set("optimizer_impl", "foreach" if is_on(foreach) else "for-loop", foreach)
    else:
        run.missing("optimizer", target)
    loss = run.get("loss_fn._target_")
    if "linear" in loss.word() or "cut" in loss.word():
        run.set("loss", "fused", loss)
    elif "teparallel" in loss.word():
        run.set("loss", "in-place", loss)
    elif loss.value is not None:
        wide = run.get("loss_fn.fp32_upcast")
        if wide.given and not is_on(wide):
            run.set("loss", "native", loss, wide)
        else:
            run.set("loss", "full", loss)
    else:
        run.missing("loss", loss)
