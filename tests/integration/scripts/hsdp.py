"""HSDP on four ranks: sharded in pairs, replicated over two pairs."""

from __future__ import annotations

import torch
from _common import Tower, arguments, batch, process_group, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    args = arguments()
    with process_group() as device:
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = Tower().to(device)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(optimizer, args.steps, lambda: model(batch()).float().pow(2).mean())


if __name__ == "__main__":
    main()
