"""prime-rl: TOML files of SFT and of RL, whose trainer's part may stand under ``[trainer]``."""

from __future__ import annotations

from fsdp2prof.estimators.config.lora import peft_targets
from fsdp2prof.estimators.config.trainers.hugging_face import ALL_LAYERS, read_attention
from fsdp2prof.estimators.config.trainers.reading import Reading, Value, is_on

_GPUS_PER_NODE = 8
"""As ``rl.py`` counts a node's."""
_HEAD_PIECES = ("trainer.model.fused_lm_head_chunk_size", "model.fused_lm_head_chunk_size")
"""Entries of the vocabulary at a time, until 93cd1fa37 (March 2026) cut the sequence instead."""
_RECOMPUTES = ("trainer.recompute_logprobs", "recompute_logprobs")
"""Keys until b15fa63e1 (October 2025), when RL made all logits (rl/train.py 261 of 2d49e45c4); its head works
in pieces since 5ad6f62fc (January 2026)."""
_OLDER = (
    "trainer_gpu_ids",
    "inference_gpu_ids",
    *_RECOMPUTES,
    *_HEAD_PIECES,
)
"""Keys until early 2026, when nothing was compiled, checkpointed or offloaded unless a file said so."""
_SFT_OF_JANUARY = "prime-rl-2026-01-sft"
_OFF = "src/prime_rl/trainer/config.py of February 2026: off unless a file has it"
_OFF_BEFORE = ("model.ac", "model.ac_offloading", "model.compile", "model.optim_cpu_offload")
_OF_AN_ORCHESTRATOR = ("rollouts_per_example", "sampling", "environment")


def read_prime_rl(run: Reading) -> None:
    """Read a configuration of the trainer. Raises ``ModelError`` for settings that are not modelled."""
    is_sft = run.has("data.batch_size", "data.seq_len", "data.source", "data.name") and not run.has(
        "orchestrator"
    )

    def key(name: str) -> Value:
        return run.get(f"trainer.{name}", name)

    generates = [one for one in run.values if one.partition(".")[0] in _OF_AN_ORCHESTRATOR]
    alone = {run.places[one] for one in run.values} == {run.places[one] for one in generates}
    if alone and not run.has("trainer", "orchestrator"):
        run.refuse(
            run.get(generates[0]),
            "this is the orchestrator's file; the trainer has a separate one: give both",
        )
    _world(run)
    ep = key("model.ep")
    if ep.word() == "auto" or ep.is_absent:
        ep = Value(ep.key, None, ep.source, ep.given)
        run.open.append(
            "model.ep is auto: 8 for a mixture of experts on 8 ranks and more; add --mesh ...,ep=8 then"
        )
    run.read_declared(ep=ep)
    layers = key("model.debug.num_layers")
    if run.model is not None:
        run.layers = layers.value
    run.set_dispatch(key("model.ep_comm_backend"))
    if key("model.cp_style").word() == "ulysses" and run.mesh.get("cp", 1) > 1:
        run.notes.append(
            "cp_style = ulysses: estimated as ring attention, whose exchanges are larger and overlapped"
        )
    _batch(run, is_sft)
    _memory(run)
    attention = key("model.attn")
    read_attention(run, attention)
    if attention.word() == "auto":
        kernels = "flash3 on Hopper, cudnn (for FlashAttention-4) on B200, flash elsewhere"
        run.ask("attention", f"model.attn is auto, which depends on the GPU: {kernels}", " KERNEL")
    _loss(run, is_sft)
    again = run.get(*_RECOMPUTES)
    if is_on(again):
        run.set("extra_model", "self", again)
    rank = key("model.lora.rank")
    if rank.value is not None:
        targets = key("model.lora.target_modules")
        names = peft_targets(targets.value or (*ALL_LAYERS, "experts"))
        runs = run.get("trainer.max_concurrent_runs", "max_concurrent_runs")
        several = f",runs={runs.number(1)}" if runs.given else ""
        run.set("lora", f"r={rank.number(1)},targets={names}{several}", rank, targets, runs)
    kind = key("optim.type")
    if kind.word() not in ("adamw", "sgd", ""):
        run.refuse(kind, "adamw and sgd are modelled")
    run.set("optimizer", kind.word() or "adamw", kind)


def _is_older(run: Reading) -> bool:
    """Whether the files have keys of before early 2026."""
    return run.has(*_OLDER)


def _world(run: Reading) -> None:
    nodes = run.get("deployment.num_train_nodes", "deployment.num_nodes")
    gpus = run.get("deployment.num_train_gpus", "deployment.num_gpus")
    if nodes.value is not None:
        each = run.get("deployment.gpus_per_node")
        run.set_world(nodes, _GPUS_PER_NODE if each.value is None else each.number(1))
        return
    listed = run.get("trainer_gpu_ids")
    if isinstance(listed.value, list):
        gpus = Value(listed.key, len(listed.value), listed.source)
    run.set_world(gpus)


def _batch(run: Reading, is_sft: bool) -> None:
    if not is_sft:
        length = run.get("trainer.model.seq_len", "model.seq_len", "trainer.seq_len", "seq_len")
        run.set("seq_len", length.number(1), length)
        packed = run.get("orchestrator.micro_batch_size", "micro_batch_size")
        if not packed.given:
            packed = Value("packing", "one packed sequence a micro-batch", "prime-rl", given=False)
        run.set("batch_size", packed.number(1) if packed.given else 1, packed)
        fake = run.get("trainer.data.fake.batch_size", "data.fake.batch_size")
        if fake.given:
            run.accumulate(fake, 1, run.data_ranks)
        else:
            run.ask("grad_accum", "how many micro-batches a step has depends on the rollouts' lengths")
        return
    length = run.get("data.seq_len")
    run.set("seq_len", length.number(1), length)
    micro = run.get("data.micro_batch_size")
    run.set("batch_size", micro.number(1), micro)
    run.accumulate(run.get("data.batch_size"), micro.number(1), run.data_ranks)


def _memory(run: Reading) -> None:
    older = _is_older(run)

    def get(name: str) -> Value:
        found = run.get(f"trainer.{name}", name)
        off = name in _OFF_BEFORE and older and not run.has(f"trainer.{name}", name)
        return Value(name, "none", _OFF) if off else found

    ac = get("model.ac")
    mode, every = get("model.ac.mode"), get("model.ac.freq")
    if ac.given and ac.word() == "none":
        run.set("ac", "none", ac)
    elif mode.word() == "selective":
        run.refuse(mode, "selective checkpointing by targets is not modelled; full is")
    else:
        run.set("ac", "full" if every.number(1) == 1 else f"every:{every.number(1)}", every)
    offload = get("model.ac_offloading")
    get("model.ac_offloading.max_inflight_activations")
    run.set("offload_activations", offload.word() not in ("none", "false"), offload)
    state = get("model.optim_cpu_offload")
    run.set("offload_optimizer", is_on(state) and not run.policy.get("offload"), state)
    if not older:  # optim/__init__.py 56 and 107: fused=False makes torch go from parameter to parameter
        run.set("optimizer_impl", "for-loop" if is_on(state) else "fused", state)
    allocator = get("env_vars.PYTORCH_CUDA_ALLOC_CONF")
    if allocator.given:
        segments = "expandable" if "expandable_segments:true" in allocator.word() else "classic"
        run.set("allocator", segments, allocator)
    reshard = get("model.reshard_after_forward")
    if is_on(reshard):
        run.says("reshard", "always", reshard)
    else:
        run.set("reshard", "never", reshard)
    run.set("reshard_root", is_on(reshard), reshard)
    compiled = get("model.compile")
    if not older and not compiled.given and not ac.given:
        run.open.append(
            "compile, checkpointing and offload are on by default since 2026; prime-rl of February 2026 and "
            "before has them off: add --no-compile --ac none then"
        )
    if compiled.word() not in ("none", "false"):
        run.set("compile", True, compiled)
        get("model.compile.fullgraph")


def _loss(run: Reading, is_sft: bool) -> None:
    if run.has(*_HEAD_PIECES):
        pieces, way = run.get(*_HEAD_PIECES), "chunked-vocab"
    else:
        key = "model.fused_lm_head_token_chunk_size"
        pieces, way = run.get(f"trainer.{key}", key), "chunked-blocks"
    if run.has(*_RECOMPUTES) and way == "chunked-blocks" and not is_sft:
        run.set("loss", "logprobs", run.get(*_RECOMPUTES))
        return
    if is_sft and (way == "chunked-vocab" or _is_older(run) or run.stack == _SFT_OF_JANUARY):
        if pieces.given:
            run.notes.append(f"{pieces.key} does nothing in SFT before July 2026: it makes all logits")
        return
    if pieces.word() in ("none", "disabled", "auto"):
        run.set("loss", "full" if is_sft else "logprobs", pieces)
        return
    run.set("loss", f"{way}:{pieces.number(1)}", pieces)
