"""Train models of several configurations one after another, and count what every rank holds and sends.

Run: torchrun --nproc-per-node 2 families.py FOLDER, which has configurations NAME.json and gets
NAME-RANK.json beside them. A batch stands in NAME.pt; without one it is random tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.interception import Interception
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

BATCH, LENGTH = 2, 32


def sharded(config: Any) -> Any:
    """The class that transformers trains, its layers and the root given to FSDP, weights at random."""
    texts = AutoModelForCausalLM._model_mapping
    made: Any = (texts if type(config) in texts else AutoModelForImageTextToText._model_mapping)[type(config)]
    with torch.device("meta"):
        model = made._from_config(config)
    config.use_cache = config.get_text_config().use_cache = False
    layers = set(model._no_split_modules)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in reversed(list(model.modules())):
        if type(part).__name__ in layers or part is model:
            fully_shard(part, mp_policy=precision)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point():
            torch.nn.init.normal_(local, std=0.02)
        else:
            local.zero_()
    return model.train()


def step(model: Any, batch: dict[str, Any], mode: Interception) -> None:
    """Forward, backward, clipping."""
    mode.phase = "forward"
    logits = model(**batch).logits
    targets = torch.randint(90, logits.shape[:2])
    loss: Any = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    mode.phase = "backward"
    loss.backward()
    mode.phase = "optimizer"
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm.full_tensor()
    model.zero_grad()


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for path in sorted(folder.glob("*.json")):
        if path.stem[-2:] in ("-0", "-1"):
            continue
        model = sharded(AutoConfig.for_model(**json.loads(path.read_text())))
        given = path.with_suffix(".pt")
        batch = torch.load(given) if given.exists() else {"input_ids": torch.randint(90, (BATCH, LENGTH))}
        mode = Interception()
        for _ in range(2):
            mode.counts.clear()
            with mode:
                step(model, batch, mode)
        held = {name: parameter.to_local().nbytes for name, parameter in model.named_parameters()}
        rows = [[*key, count] for key, count in mode.counts.items()]
        made = folder / f"{path.stem}-{dist.get_rank()}.json"
        made.write_text(json.dumps({"held": held, "rows": rows}))
        dist.barrier()
    dist.destroy_process_group()


main()
