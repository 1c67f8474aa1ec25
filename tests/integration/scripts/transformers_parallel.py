"""Train a model that transformers divides by its own plan, and count what every rank holds and sends.

Run: torchrun --nproc-per-node 4 transformers_parallel.py CONFIG FOLDER [loss_parallel]. The mesh: dp_shard 2
x tp 2. With loss_parallel torch divides the head, whose logits stay divided by vocabulary.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.interception import Interception
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.initialization import no_tie_weights

BATCH, LENGTH = 2, 16
IN_PARALLEL = sys.argv[3:] == ["loss_parallel"]


def clip(model: Any) -> None:
    """One norm for each mesh, as transformers' Trainer has it where parameters lie on several."""
    by_mesh = defaultdict(list)
    for parameter in model.parameters():
        by_mesh[parameter.device_mesh].append(parameter)
    totals: list[Any] = [get_total_norm([p.grad for p in part]) for part in by_mesh.values()]
    norms = [total.full_tensor() for total in totals]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for part in by_mesh.values():
        clip_grads_with_norm_(part, 1.0, total)


def distributed(config: Any) -> Any:
    """The class's plan through transformers, its blocks through torch, weights at random."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    made: Any = AutoModelForCausalLM._model_mapping[type(config)]
    with torch.device("meta"), no_tie_weights():
        model = made(config)
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=2, fsdp_size=2))
    if IN_PARALLEL:
        plan = {name: style for name, style in plan.items() if not name.startswith("lm_head")}
        head = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh["tp"], {"lm_head": head})
    apply_tensor_parallelism(model, mesh["tp"], plan)
    model.tie_weights()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in [*model.model.layers, model]:
        fully_shard(part, mesh=mesh["dp_shard"], mp_policy=precision)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        torch.nn.init.normal_(tensor.to_local() if isinstance(tensor, DTensor) else tensor, std=0.02)
    return model.train()


def main() -> None:
    values, counts = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    dist.init_process_group("gloo")
    model = distributed(AutoConfig.for_model(**values))
    held = {
        name: parameter.to_local().nbytes if isinstance(parameter, DTensor) else parameter.nbytes
        for name, parameter in model.named_parameters()
    }
    mode = Interception()
    for _ in range(2):
        mode.counts.clear()
        tokens = torch.randint(90, (BATCH, LENGTH))
        with mode, loss_parallel() if IN_PARALLEL else nullcontext():
            mode.phase = "forward"
            logits = model(tokens).logits
            loss: Any = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
            mode.phase = "backward"
            loss.backward()
            mode.phase = "optimizer"
            clip(model)
        model.zero_grad()
    rows = [[*key, count] for key, count in mode.counts.items()]
    (counts / f"{dist.get_rank()}.json").write_text(json.dumps({"held": held, "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


main()
