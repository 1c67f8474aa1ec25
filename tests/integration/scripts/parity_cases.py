"""Every way to shard the parity models, one after the other; prints what the check says of each as JSON.

One process imports torch, and every training is a fork of it: a command for each would import it each time.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import msgspec

from fsdp2prof.analyzers.sharding.parity import judge_parity
from fsdp2prof.errors import ModelError
from fsdp2prof.workflows.probes.parity_processes import train_both
from fsdp2prof.workflows.probes.parity_rank import ParitySettings

SUPPORT = "support.parity_models"
TWO = {"dp_shard": 2}
EXPERTS: dict[str, Any] = {"mesh": {"dp_shard": 4, "ep": 2}, "model": f"{SUPPORT}:sparse_model"}
SQUARE = {"dp_replicate": 2, "dp_shard": 2}

CASES: dict[str, dict[str, Any]] = {
    "hsdp": {"mesh": SQUARE, "shard": None, "micro_batches": 2, "steps": 2},
    "tensor_parallel": {"mesh": {"dp_shard": 2, "tp": 2}, "steps": 2},
    "in_bf16": {"mesh": {"dp_shard": 3}, "steps": 2},
    "parameter_left_out": {"mesh": TWO},
    "wrong_divide_factor": {"mesh": TWO},
    "missing_sync": {"mesh": TWO},
    "wrong_dimension": {"mesh": SQUARE},
    "other_batch_on_rank_1": {"mesh": TWO, "shard": None, "batch": f"{SUPPORT}:other_batch_on_rank_1"},
    "other_weights_on_rank_1": {"mesh": TWO, "shard": None, "model": f"{SUPPORT}:other_weights_on_rank_1"},
    "that_fails": {"mesh": TWO},
    "expert_parallel": EXPERTS | {"steps": 2},
    "experts_of_too_few": EXPERTS,
}


def judge(name: str, case: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "model": f"{SUPPORT}:model",
            "batch": f"{SUPPORT}:batch",
            "shard": f"{SUPPORT}:{name}",
            "steps": 1,
            "micro_batches": 1,
        }
        settings = ParitySettings(**{**given, **case}, seed=0, device="cpu", timeout_s=120.0, folder=folder)
        try:
            return msgspec.to_builtins(judge_parity(train_both(settings)))
        except ModelError as error:
            return str(error)


if __name__ == "__main__":
    wanted = sys.argv[1:] or list(CASES)
    json.dump({name: judge(name, CASES[name]) for name in wanted}, sys.stdout)
