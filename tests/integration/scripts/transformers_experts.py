"""Train a mixture whose experts transformers deals out by its own plan, and count what every rank sends.

Run: torchrun --nproc-per-node 4 transformers_experts.py CONFIG FOLDER TP EP [HOW]. The mesh: dp_shard 4 / TP
x tp. HOW is ``offload``, ``checkpoint``, or a regular expression of what is trained.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.interception import Interception
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.initialization import no_tie_weights

BATCH, LENGTH = 2, 16
HOW = sys.argv[5] if len(sys.argv) > 5 else ""


def distributed(config: Any, tp: int, ep: int) -> Any:
    """The class's plans through transformers, its blocks through torch, weights at random."""
    ranks = dist.get_world_size()
    dense = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp_shard", "tp"))
    experts = init_device_mesh("cpu", (ranks // ep, ep), mesh_dim_names=("efsdp", "ep"))
    made: Any = AutoModelForCausalLM._model_mapping[type(config)]
    with torch.device("meta"), no_tie_weights():
        model = made._from_config(config, attn_implementation="sdpa", experts_implementation="grouped_mm")
    wanted = DistributedConfig(tp_size=tp, fsdp_size=ranks // tp, ep_size=ep)
    divided, dealt, _ = model._resolve_parallel_plans(wanted)
    if tp > 1:
        apply_tensor_parallelism(model, dense["tp"], divided)
    apply_expert_parallelism(model, experts["ep"], dense["tp"], dealt)
    info = FSDPMeshInfo(mesh=experts["efsdp"], shard_mesh_dim=0)

    def place(parameter: torch.nn.Parameter) -> ShardPlacementResult | None:
        names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
        return ShardPlacementResult(placement=Shard(0), mesh_info=info) if names == ("ep",) else None

    if HOW == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif HOW not in ("", "offload"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(re.search(HOW, name) is not None)
    offload = CPUOffloadPolicy(pin_memory=False) if HOW == "offload" else OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in [*model.model.layers, model]:
        fully_shard(
            part,
            mesh=dense["dp_shard"],
            mp_policy=precision,
            offload_policy=offload,
            shard_placement_fn=place,
        )
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        torch.nn.init.normal_(tensor.to_local() if isinstance(tensor, DTensor) else tensor, std=0.02)
    return model.train()


def main() -> None:
    values, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    tp, ep = int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank() // tp)  # ranks that share a sequence share its tokens
    model = distributed(AutoConfig.for_model(**values), tp, ep)
    held = {
        name: parameter.to_local().nbytes if isinstance(parameter, DTensor) else parameter.nbytes
        for name, parameter in model.named_parameters()
    }
    mode = Interception()
    for _ in range(2):
        mode.counts.clear()
        tokens = torch.randint(90, (BATCH, LENGTH))
        with mode:
            mode.phase = "forward"
            logits = model(tokens).logits
            loss: Any = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
            mode.phase = "backward"
            loss.backward()
        model.zero_grad()
    rows = [[*key, count] for key, count in mode.counts.items()]
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps({"held": held, "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


main()
