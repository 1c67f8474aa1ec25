"""Updates its parameters by hand: in place, or through ``.data``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from _common import Tower, batch, process_group, shard_mesh
from torch.distributed.fsdp import fully_shard


def main(way: str) -> None:
    with process_group() as device:
        model: Any = fully_shard(Tower().to(device), mesh=shard_mesh())
        for _ in range(12):
            for _ in range(2):
                model(batch()).pow(2).mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    updated = parameter.data if way == "data" else parameter.to_local()
                    updated.sub_(parameter.grad if way == "data" else parameter.grad.to_local(), alpha=0.1)
                    parameter.grad.zero_() if way == "data" else setattr(parameter, "grad", None)


if __name__ == "__main__":
    main(sys.argv[1])
