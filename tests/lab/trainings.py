"""Cases that train on gloo ranks: a healthy training, and one switch of it each."""

from __future__ import annotations

from typing import Any

from lab.case import Case, Training

__all__ = ["PACKAGES", "TRAININGS"]


def _fault(
    name: str,
    fault: str,
    causes: str,
    remedy: str,
    much: dict[str, Any],
    little: dict[str, Any] | None,
    *,
    mended: dict[str, Any] | None = None,
    ranks: int = 2,
    place: str = "",
    excused: str = "",
    common: dict[str, Any] | None = None,
) -> list[Case]:
    """One planted fault at its two sizes; the mended training has none of its switches, unless given."""
    always = common or {}
    return [
        Case(
            name=f"cpu/{name}/{size}",
            fault=fault,
            size="much" if size == "much" else "little",
            causes=frozenset(causes.split()),
            remedy=remedy,
            place=place,
            excused=frozenset(excused.split()),
            training=Training(ranks=ranks, switches=always | switches, mended=always | (mended or {})),
        )
        for size, switches in (("much", much), ("little", little))
        if switches is not None
    ]


def _habit(
    name: str,
    fault: str,
    causes: str,
    remedy: str,
    much: int,
    little: int | None,
    *,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> list[Case]:
    """A habit of ``habits.py``, of two sizes."""

    def switches(size: int) -> dict[str, Any]:
        return {"habit": name, "habit_size": size, **(more or {})}

    return _fault(
        name, fault, causes, remedy, switches(much), None if little is None else switches(little), **options
    )


def _healthy(name: str, kind: str, *, ranks: int = 2, excused: str = "", **switches: Any) -> Case:
    return Case(
        name=f"cpu/healthy/{name}",
        fault=kind,
        size="healthy",
        excused=frozenset(excused.split()),
        training=Training(ranks=ranks, switches=switches),
    )


PACKAGES = {
    "accelerate": "accelerate",
    "trainer": "accelerate",
    "peft": "peft",
    "lightning": "lightning",
    "sft": "trl",
    "vision": "transformers",
    "encoder_decoder": "transformers",
    "torch_transformer": "torch",
    "mixture": "transformers",
    "diffusion": "diffusers",
    "torch_test": "expecttest",
    "distillation": "transformers",
}
"""Programs of ``programs.py`` and the package that each needs."""


def _program(name: str) -> Case:
    return Case(name=f"program/{name}", fault="real program", size="healthy", training=Training(program=name))


# LBFGS concatenates the gradients, which DTensor gathers: that is its price, and true.
TRAININGS: list[Case] = [
    *_fault(
        "loader-all",
        "slow data loader on all ranks",
        "data_loader",
        "worker|prefetch|loader",
        {"loader": "slow", "loader_ms": 400},
        {"loader": "slow", "loader_ms": 1},
        mended={"loader": "slow"},
    ),
    *_fault(
        "loader-one",
        "slow data loader on one rank",
        "data_loader",
        "worker|prefetch|loader",
        {"loader": "slow", "loader_ms": 400, "loader_rank": 1},
        {"loader": "slow", "loader_ms": 1, "loader_rank": 1},
        mended={"loader": "slow"},
        place="rank 1",
    ),
    *_fault(
        "prepare",
        "batches made by the training's own loop",
        "host_pause data_loader",
        "loader|worker|prefetch|input|batch|out of the step",
        {"prepare_ms": 400},
        {"prepare_ms": 1},
    ),
    *_fault(
        "straggler",
        "straggler",
        "straggler",
        "rank 1|clock|input|work",
        {"slow_rank": 1, "slow_products": 12},
        None,
        place="rank 1",
    ),
    *_fault(
        "sleeping-host",
        "the host of one rank pauses",
        "straggler host_pause",
        "rank 1|host|out of the step",
        {"sleep_rank": 1, "sleep_ms": 300},
        {"sleep_rank": 1, "sleep_ms": 1},
        place="rank 1",
    ),
    *_fault(
        "threads",
        "Python threads that hold the lock",
        "starved_host host_bound host_pause",
        "thread|host|core",
        {"spinning_threads": 2},
        None,
    ),
    *_fault(
        "sync",
        "gradients reduced every micro-batch",
        "reduced_every_micro_batch",
        "set_requires_gradient_sync",
        {"no_sync": False},
        None,
        common={"micro_batches": 6, "dim": 256, "batch": 1},
    ),
    *_fault(
        "whole",
        "whole model in one unit",
        "wrapping_too_coarse all_in_one_group",
        "wrap|fully_shard",
        {"wrap": "whole", "layers": 8},
        None,
        mended={"layers": 8},
    ),
    *_fault(
        "tiny",
        "tiny units",
        "wrapping_too_fine",
        "larger|together|coarser",
        {"wrap": "leaves", "layers": 10},
        None,
        mended={"layers": 10},
        common={"dim": 64},
    ),
    *_fault(
        "root",
        "embedding and head in the root",
        "root_holds_most wrapping_too_coarse root_not_resharded root_kept_unsharded",
        "embedding|head",
        {"vocab": 32000},
        None,
        mended={"vocab": 32000, "wrap": "parts"},
        common={"layers": 2, "batch": 1, "length": 32},
    ),
    *_fault(
        "full-tensor",
        "full_tensor() every step",
        "all_gather_outside_fsdp",
        "full_tensor|state_dict",
        {"full_tensors": 64},
        {"full_tensors": 1},
    ),
    *_fault(
        "state-dict",
        "full state_dict every step",
        "all_gather_outside_fsdp checkpoint_in_step",
        "full_tensor|state_dict|less often",
        {"state_dict": True},
        None,
        common={"layers": 8, "dim": 192},
    ),
    *_fault(
        "barrier",
        "barriers every step",
        "barrier_outside_fsdp all_reduce_outside_fsdp",
        "barrier",
        {"barriers": 60},
        {"barriers": 1},
    ),
    *_fault(
        "metric",
        "metric all-reduces every step",
        "all_reduce_outside_fsdp",
        "metric|less often|all_reduce|all-reduce",
        {"metric_reduces": 40, "metric_elements": 20000},
        {"metric_reduces": 1},
    ),
    *_fault(
        "evaluation",
        "evaluation every step",
        "forward_without_backward",
        "evaluat|less often|backward",
        {"evaluations": 3},
        None,
    ),
    *_fault(
        "garbage",
        "garbage collection in the step",
        "garbage_collection host_pause",
        "collect|gc",
        {"garbage": 1_000_000},
        None,
    ),
    *_fault(
        "clip",
        "gradient norm from full tensors",
        "all_gather_outside_fsdp",
        "clip_grad_norm_|full_tensor",
        {"clip_by_full_tensors": True},
        None,
        mended={"clip": True},
        common={"layers": 12, "dim": 64},
    ),
    *_fault(
        "logging",
        "a slow logger in the step",
        "host_pause",
        "log|less often|print|host|out of the step",
        {"log_ms": 400},
        {"log_ms": 1},
    ),
    *_fault(
        "foreach",
        "optimizer per tensor",
        "optimizer_per_tensor host_bound",
        "foreach|fused",
        {"foreach": False},
        None,
        common={"layers": 40, "dim": 16, "heads": 2, "batch": 1, "length": 16, "wrap": "whole"},
        excused="root_only wrapping_too_coarse",  # it is wrapped so
    ),
    *_fault(
        "recompile",
        "recompilation",
        "recompilation",
        "dynamic|compile|shape",
        {"recompiles": True},
        None,
        mended={"compiled": True},
    ),
    *_fault(
        "lengths",
        "lengths of the inputs differ among ranks",
        "ranks_take_turns",
        "length|even|input",
        {"lengths": "uneven", "length": 512},
        None,
        mended={"length": 256},
        common={"batch": 2},
    ),
    *_fault(
        "save",
        "checkpoint saved in the step",
        "checkpoint_in_step all_gather_outside_fsdp straggler",
        "async|less often|save|full_tensor|state_dict",
        {"saves": 1, "save_mib": 200},
        None,
    ),
    *_fault(
        "leak",
        "tensors kept in a list",
        "leak",
        "leak|line|free|keep",
        {"leak_kib": 20000},
        None,
    ),
    *_fault(
        "unbalanced",
        "unbalanced layers",
        "wrapping_too_coarse",
        "layers.2|wrap|split",
        {"wide_layer": 40},
        None,
        place=r"layers\.2",
        common={"batch": 1, "length": 16},
    ),
    *_habit(
        "reduce-gradients",
        "gradients all-reduced by the script, too",
        "all_reduce_outside_fsdp",
        "all_reduce|all-reduce|less often",
        999,
        1,
        more={"dim": 256},
    ),
    *_habit(
        "gradient-norms",
        "the norm of every gradient logged",
        "all_reduce_outside_fsdp all_gather_outside_fsdp host_pause",
        "less often|all_reduce|all-reduce|full_tensor|out of the step",
        999,
        None,
        more={"layers": 8},
        common={"layers": 8},
    ),
    *_habit(
        "gradient-hooks",
        "the norm of every gradient watched from hooks",
        "all_reduce_outside_fsdp",
        "less often|full_tensor|hundred steps",
        999,
        None,
        more={"layers": 8},
        common={"layers": 8},
    ),
    *_habit(
        "new-iterator",
        "an iterator of the data loader made in every step",
        "data_loader",
        "iterator once",
        2,
        None,
    ),
    *_fault(
        "own-optimizer",
        "an optimizer that updates tensors in turn",
        "optimizer_per_tensor",
        "foreach|fused",
        {"optimizer": "own"},
        None,
        common={"layers": 30, "dim": 16, "heads": 2, "batch": 1, "length": 16, "wrap": "whole"},
        excused="root_only wrapping_too_coarse",  # it is wrapped so
    ),
    *_habit(
        "gather-objects",
        "metrics gathered as Python objects",
        "all_gather_outside_fsdp all_reduce_outside_fsdp",
        "less often|object|gather|metric",
        40,
        1,
    ),
    *_habit(
        "average-weights",
        "an average of weights, one parameter at a time",
        "work_outside_training",
        "_foreach",
        12,
        None,
    ),
    *_habit(
        "snapshot",
        "the model's state copied in every step",
        "work_outside_training",
        "copy",
        20,
        None,
    ),
    *_habit(
        "anomalies",
        "anomaly detection left on",
        "anomaly_detection",
        "set_detect_anomaly",
        1,
        None,
    ),
    *_habit(
        "tokenize",
        "text split in the loop",
        "host_pause data_loader",
        "worker|loader|batch|input|out of the step",
        800,
        2,
    ),
    *_habit(
        "to-lists",
        "large outputs written as text",
        "host_pause host_sync",
        "less often|out of the step|tolist|log|host",
        1_500_000,
        3_000,
    ),
    *_habit(
        "log-on-rank-0",
        "a slow logger on the first rank alone",
        "host_pause straggler",
        "rank 0|out of the step|host|log",
        400,
        1,
        place="rank 0",
    ),
    *_habit(
        "save-shards",
        "a sharded checkpoint saved in every step",
        "checkpoint_in_step all_gather_outside_fsdp all_reduce_outside_fsdp host_pause straggler",
        "async|less often|save|state_dict",
        6,
        None,
        more={"dim": 256},
        common={"dim": 256},
    ),
    *_habit(
        "discarded-forward",
        "forwards for a metric of the training batch",
        "forward_without_backward",
        "evaluat|less often|backward",
        3,
        None,
    ),
    *_fault(
        "one-core",
        "every rank bound to the same processor",
        "starved_host",
        "core|processor|affinity|thread",
        {"habit": "one-core"},
        None,
    ),
    *_habit(
        "many-threads",
        "more threads than processors",
        "starved_host host_bound",
        "thread|OMP_NUM_THREADS",
        64,
        None,
    ),
    *_fault(
        "longer-rank",
        "one rank has longer sequences",
        "straggler ranks_take_turns",
        "rank 1|length|even|input|work",
        {"longer_rank": 1, "length": 192},
        None,
        mended={"length": 384},
        common={"batch": 4},
        place="rank 1",
    ),
    *_fault(
        "optimizer-first",
        "optimizer made before fully_shard",
        "optimizer_before_fully_shard",
        "after",
        {"optimizer_first": True},
        None,
    ),
    _healthy("keep-gradients", "zero_grad(set_to_none=False)", keep_gradients=True),
    _healthy("varying-lengths", "lengths that vary from step to step", lengths="together", length=128),
    _healthy(
        "deep-checkpoint", "activation checkpointing of twelve blocks", checkpoint=True, layers=12, dim=64
    ),
    _healthy("clip-accumulation", "accumulation with clipping", micro_batches=3, clip=True),
    _healthy(
        "hsdp-accumulation",
        "HSDP 2 x 2 with accumulation",
        ranks=4,
        excused="starved_host",
        replicas=2,
        micro_batches=2,
    ),
    _healthy("plain", "transformer"),
    _healthy("bf16", "bf16", precision="bf16"),
    _healthy("mixed", "mixed precision", precision="mixed"),
    _healthy("loader", "DataLoader with workers", loader="workers"),
    _healthy("accumulation", "4 micro-batches, one reduction", micro_batches=4),
    _healthy("clip", "clip_grad_norm_ and .item()", clip=True, items=1),
    _healthy("checkpoint", "activation checkpointing", checkpoint=True, layers=6),
    _healthy("parts", "embedding and head wrapped", wrap="parts", vocab=4096),
    _healthy("sgd", "SGD", optimizer="sgd"),
    _healthy("lbfgs", "LBFGS closures", excused="all_gather_outside_fsdp", optimizer="lbfgs"),
    _healthy("mlp", "MLP", model="mlp"),
    _healthy("conv", "convolutions", model="conv"),
    _healthy("lstm", "LSTM", model="lstm"),
    _healthy("hsdp", "HSDP", ranks=4, excused="starved_host", replicas=2),
    _healthy("never-reshard", "ZeRO-2", never_reshard=True),
    _healthy("one-rank", "one rank", ranks=1),
    _healthy("compiled", "compiled blocks", compiled=True),
    *map(_program, PACKAGES),
]
"""Every training case."""
