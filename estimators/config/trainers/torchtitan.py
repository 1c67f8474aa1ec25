"""torchtitan: TOML files of 2024 to early 2026, and the Python registries that followed them."""

from __future__ import annotations

from fsdp2prof.estimators.config.stacks import month_of
from fsdp2prof.estimators.config.trainers.reading import Reading, Value

_MODELS = ("llama2", "llama3", "llama4", "deepseek_v3", "qwen3", "gpt_oss")
_FLAVORS = {"17bx16e": "scout", "17bx128e": "maverick"}
_FLOAT8 = ("float8", "quantize.linear.float8")
_MX = ("mx", "quantize.linear.mx")
_GROUPED = ("quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
_NOT_FLOAT8 = ("output", "lm_head", "router.gate", "auto_filter_small_kn")
"""Layers that an estimate leaves out of float8, too, by their names there."""
_UNTIL = (
    ("training.data_parallel_degree", "2024-09", "db6b39acd", "torchtitan-2024-07"),
    ("training.data_parallel_shard_degree", "2025-03", "785c34c99", "torchtitan-2025-01"),
    ("training.batch_size", "2025-06", "8570415c3", "torchtitan-2025-06"),
    ("checkpoint.last_save_model_weights_only", "2025-07", "beb29a1c7", "torchtitan-2025-06"),
    ("training.compile", "2025-08", "08b8b244f", "torchtitan-2025-06"),
    ("float8", "2025-09", "8a2686c4a", "torchtitan-2025-08"),
)
"""Keys and sections that files had until a month and a commit, oldest first; the software of that time."""
_SINCE = (
    ("parallelism", "2025-03", "785c34c99"),
    ("training.local_batch_size", "2025-06", "8570415c3"),
    ("compile", "2025-08", "08b8b244f"),
    ("quantize", "2025-09", "8a2686c4a"),
)
"""Keys and sections that files have since a month and a commit."""
_WITH_LOSSES, _BEFORE_LOSSES = "torchtitan-2026-08", "torchtitan-2026-02"
"""Stack of the registries whose functions all name their loss (b5bcd76c6), and of those that name none."""
_TOKENS = "training.num_tokens_per_microbatch_per_dp_rank"
"""A key that registries have since then."""
_REGISTRY_BATCH = (8, "torchtitan/config/configs.py:37, before 73aed7f6c (August 2026)")
"""Of a registry that gives ``seq_len``, a name of before batches were counted in tokens."""


def read_torchtitan(run: Reading) -> None:
    """Read a configuration of torchtitan of any date. Raises ``ModelError`` for settings that are not
    modelled."""
    _date(run)
    _model(run)
    run.read_declared()
    _mesh(run)
    _batch(run)
    _precision(run)
    _checkpointing(run)
    _loss_in_pieces(run)
    _compilation(run)
    _converters(run)
    _optimizer(run)


def _date(run: Reading) -> None:
    """Use the software that the keys belong to; if another is given, report what contradicts it."""
    until = next((row for row in _UNTIL if run.has(row[0])), None)
    if until is not None:
        run.take_stack(until[3])
        run.is_recent |= run.has("training.local_batch_size")  # newer than what that stack may be instead
    elif run.stack == _WITH_LOSSES and not run.has("loss", _TOKENS):
        run.take_stack(_BEFORE_LOSSES)
    stated = month_of(run.stack) if run.stack_is_stated else None
    if stated is None:
        return
    said = [
        f"{key} is of {month} ({at}) and later"
        for key, month, at in _SINCE
        if run.has(key) and stated < month
    ]
    if until is not None and stated > until[1]:
        said.append(f"{until[0]} is of before {until[1]} ({until[2]})")
    if said:
        run.notes.append(f"{'; '.join(said)}: --stack {run.stack} is taken nevertheless")


def _model(run: Reading) -> None:
    name, flavor = run.get("model.name"), run.get("model.flavor")
    if name.value is None or flavor.value is None:
        if flavor.value is not None:
            run.no_model = (
                f"{flavor.source}: the family of {flavor.value}, which the registry's folder, function or "
                "import says, is not known: add --model"
            )
        return
    size, _, kernel = flavor.word().partition("_flex_" if "_flex_" in flavor.word() else "_varlen_")
    size = _FLAVORS.get(size, size).replace("_", "-")
    family = f"{name.word().replace('_', '-')}-" if name.word() in _MODELS else ""
    run.set_model(f"{family}{size}", name, flavor)
    norm = run.get("model.norm_type")
    if norm.value is not None and "rmsnorm" not in norm.word():
        run.refuse(norm, "RMSNorm is modelled")
    if norm.value is not None:
        run.set("norm", "composed" if norm.word() == "rmsnorm" else "fused", norm)
    attention = run.get("model.use_flex_attn", "model.attn_type", "model.attn_backend").word()
    if kernel:
        attention = "flex" if "_flex_" in flavor.word() else "varlen"
    if attention in ("true", "flex", "varlen"):
        kind = "flex" if attention == "true" else attention
        run.ask("documents", f"{kind} attention: documents in a sequence are not in the file", f" {kind}:K")
    products = run.get("model.tp_gemm_backend")
    if products.word() not in ("", "default"):
        run.notes.append(f"{products.key} = {products.value} is not modelled: torch's products are estimated")


def _mesh(run: Reading) -> None:
    run.set_dispatch(run.get("model.moe_comm_backend", "parallelism.expert_parallel_comm_backend"))
    etp = run.get("parallelism.expert_tensor_parallel_degree", "parallelism.expert_tensor_parallel")
    if etp.value not in (None, 1) and run.mesh.get("ep", 1) > 1:
        run.notes.append(f"{etp.key} = {etp.value}: experts that tensor parallelism divides are not modelled")
    schedule = run.get("parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule")
    if run.mesh.get("pp", 1) == 1:
        if schedule.given:
            run.notes.append(f"{schedule.key} = {schedule.value} does nothing: pipeline parallelism is 1")
        return
    per_stage = (
        f"{section}.pipeline_parallel_layers_per_stage" for section in ("parallelism", "experimental")
    )
    run.set_schedule(schedule, run.get(*per_stage))
    first, last = (
        run.get(f"parallelism.pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last")
    )
    if (1 if first.value is None else first.number()) != (1 if last.value is None else last.number()):
        run.refuse(last, "embedding and head that count as differently many layers are not modelled")
    if first.value is not None:
        run.set("pp_end_layers", first.number(), first, last)
    for name in (
        "module_fqns_per_model_part",
        "pipeline_parallel_split_points",
        "pipeline_parallel_schedule_csv",
    ):
        if (own := run.get(f"parallelism.{name}", f"experimental.{name}")).value:
            run.refuse(own, "stages of one's own choice are not modelled")


def _batch(run: Reading) -> None:
    seq_len = run.get("training.seq_len", "training.max_context_length")
    tokens = run.get(_TOKENS)
    local = run.get("training.local_batch_size", "training.batch_size")
    folded = tokens.given or (tokens.value is not None and not local.given and seq_len.key.endswith("length"))
    read = tokens if folded else local
    if folded:
        if tokens.number(1) % seq_len.number(1):
            run.refuse(tokens, f"it is not a multiple of seq_len {seq_len.value}")
        local = Value(tokens.key, tokens.number(1) // seq_len.number(1), tokens.source, tokens.given)
    elif local.value is None:
        local = Value("training.local_batch_size", *_REGISTRY_BATCH, given=False)
    size, steps = local.number(1), 1
    if folded and run.mesh.get("pp", 1) > 1:
        steps = run.get("parallelism.num_pp_microbatches").number(1)
        run.set("batch_size", size, read)
    elif run.mesh.get("pp", 1) > 1:
        micro = run.get("parallelism.pipeline_parallel_microbatch_size")
        size, steps = micro.number(1), local.number(1) // micro.number(1)
        run.set("batch_size", size, micro)
    else:
        run.set("batch_size", size, read)
    whole = run.get("training.global_batch_size")
    if whole.value is not None and whole.number(-1) > 0:
        run.accumulate(whole, size, run.data_ranks)
    elif steps > 1:
        run.set("grad_accum", steps, run.get("parallelism.num_pp_microbatches") if folded else local)
    per_step = run.get("training.num_tokens_per_train_step")
    if per_step.value is not None and per_step.number(-1) > 0:
        run.accumulate(per_step, size * seq_len.number(1), run.data_ranks)
    if run.mesh.get("pp", 1) > 1:
        run.run_schedule(steps, local)


def _precision(run: Reading) -> None:
    reshard = run.get("parallelism.fsdp_reshard_after_forward")
    if reshard.word() in ("always", "never"):
        run.set("reshard", reshard.word(), reshard)
    if run.mesh.get("tp", 1) > 1:
        sequence = run.get("parallelism.enable_sequence_parallel")
        if sequence.given and not sequence.value:
            run.set("sequence_parallel", False, sequence)
        off = run.get("parallelism.disable_loss_parallel", "training.disable_loss_parallel")
        if off.value is not None:
            run.set("loss_parallel", not off.value, off)


def _checkpointing(run: Reading) -> None:
    mode, which = run.get("activation_checkpoint.mode"), run.get("activation_checkpoint.selective_ac_option")
    word = mode.word()
    if word in ("none", "full"):
        run.set("ac", word, mode)
        if which.given:
            run.notes.append(f"{which.key} = {which.value} does nothing: the mode is {word}")
    elif word == "selective" and which.word() == "op":
        run.set("ac", "op", mode, which)
    elif word == "selective":
        every = which.number(1)
        run.set("ac", "full" if every == 1 else f"every:{every}", mode, which)
    else:
        run.refuse(mode, "this checkpointing is not modelled; none, full and selective are")


def _loss_in_pieces(run: Reading) -> None:
    """The chunked loss of the registries of August 2026; older ones name it, or have none."""
    chunks = run.get("loss.num_chunks")
    if chunks.value and (chunks.given or run.stack == _WITH_LOSSES):
        run.set("loss", f"chunked-backward:{chunks.number(1)}", chunks)


def _compilation(run: Reading) -> None:
    enable = run.get("compile.enable", "training.compile")
    async_tp = run.get(
        "parallelism.enable_async_tensor_parallel",
        "experimental.enable_async_tensor_parallel",
        "compile.enable_async_tensor_parallel",
    )
    parts = run.get("compile.components")
    if not enable:
        for key in (parts, async_tp):
            if key.given and key:
                run.notes.append(f"{key.key} does nothing: compile.enable is false")
        return
    named = ["model", "loss"] if parts.value is None else parts.names()
    if "model" in named:
        run.set("compile", True, enable, parts)
    if "loss" not in run.policy and ("loss" in named or parts.given):
        run.set("loss", "compiled" if "loss" in named else "full", parts)
    if async_tp and run.mesh.get("tp", 1) > 1:
        run.set("async_tp", True, async_tp)
    elif async_tp:
        run.notes.append(f"{async_tp.key} does nothing: tensor parallelism is 1")


def _converters(run: Reading) -> None:
    converters = run.get("model.converters")
    named = converters.value if isinstance(converters.value, list) else []
    enabled = run.get("float8.enable_float8_linear", "training.fp8_linear")
    if enabled:
        named = [*named, "float8"]
    for one in named:
        if "lora" in str(one).lower():
            run.refuse(converters, "a converter's LoRA is not read; leave it out and add --lora")
        if one not in (*_FLOAT8, *_MX):
            run.notes.append(f"converter {one} is not modelled: its layers are estimated without it")
    for section in _GROUPED:
        keys = [f"{section}.{key}" for key in run.section(section)]
        run.get(section, *keys)
        if keys and section not in named:
            run.notes.append(f"[{section}] does nothing: model.converters does not name it")
    for sections, recipe in ((_FLOAT8, None), (_MX, "mxfp8")):
        used = next((one for one in sections if one in named), None)
        there = next((one for one in sections if run.has(one)), None)
        if used is None:
            if there is not None and not enabled.given:
                run.notes.append(f"[{there}] does nothing: model.converters does not name it")
                for key in run.section(there):
                    run.get(f"{there}.{key}")
            continue
        table = there or used
        word = recipe or run.get(f"{table}.recipe_name").word() or "tensorwise"
        run.set("float8", word, converters if converters.given else enabled)
        gather = run.get(f"{table}.enable_fsdp_float8_all_gather")
        if gather and word == "tensorwise":
            run.set("fp8_all_gather", True, gather)
        for name in ("precompute_float8_dynamic_scale_for_fsdp", "model_compile_enabled"):
            run.get(f"{table}.{name}")
        left = run.get(f"{table}.filter_fqns")
        extra = [one for one in left.names() if one not in _NOT_FLOAT8]
        if extra:
            run.notes.append(
                f"{left.key}: {', '.join(extra)} stays out of float8 there, and not in the estimate"
            )


def _optimizer(run: Reading) -> None:
    name, implementation = run.get("optimizer.name"), run.get("optimizer.implementation")
    early = run.get("optimizer.early_step_in_backward")
    if early or name.word().endswith("inbackward"):
        run.refuse(early if early else name, "an optimizer that steps in backward is not modelled")
    if "+" in name.word():
        run.refuse(name, "several optimizers in one run are not modelled")
    if name.value is None:
        run.missing("optimizer", name)
    else:
        run.set("optimizer", name.word(), name)
    word = implementation.word()
    if (fused := run.get("optimizer.fused")).given:
        run.set("optimizer_impl", "fused" if fused else "foreach", fused)
    elif word in ("fused", "foreach", "for-loop"):
        run.set("optimizer_impl", word, implementation)
    elif word:
        run.refuse(implementation, "fused, foreach and for-loop are modelled")
