"""Updates its parameters by hand."""

from __future__ import annotations

from typing import Any

import torch
from _common import Tower, batch, process_group, shard_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    with process_group() as device:
        model: Any = fully_shard(Tower().to(device), mesh=shard_mesh())
        for _ in range(4):
            model(batch()).pow(2).mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None


if __name__ == "__main__":
    main()
