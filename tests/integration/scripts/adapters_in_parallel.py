"""Adapters divided among two tensor-parallel ranks give the loss and the gradients of whole ones."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from _common import process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2prof.estimators.config.catalog import TransformerConfig
from fsdp2prof.estimators.config.lora import Lora
from fsdp2prof.estimators.models.builtin import build_builtin
from fsdp2prof.estimators.models.builtin_plan import BuiltinPlan
from fsdp2prof.estimators.techniques.adapters import with_adapters

CONFIG = TransformerConfig(
    name="tiny",
    family="qwen",
    dim=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_dim=64,
    vocab_size=64,
    context=32,
)


def main() -> None:
    with process_group() as device:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        targets = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
        lora = Lora(r=4, alpha=8, targets=targets)
        model = with_adapters(build_builtin(CONFIG, 16, "float32"), lora, "float32", "float32")
        whole = model.module.to_empty(device=device)
        torch.manual_seed(0)
        for name, parameter in whole.named_parameters():
            torch.nn.init.normal_(parameter, std=0.2)
            parameter.requires_grad_("lora_" in name)
        for buffer in whole.buffers():
            torch.nn.init.normal_(buffer)
        divided = copy.deepcopy(whole)
        BuiltinPlan(CONFIG, adapted=True).apply(divided, mesh, False, True)
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
        outs = [part(tokens) for part in (whole, divided)]
        outs = [one.full_tensor() if isinstance(one, DTensor) else one for one in outs]
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-4)
        for one in outs:
            one.square().mean().backward()
        found = dict(divided.named_parameters())
        for name, parameter in whole.named_parameters():
            if parameter.requires_grad:
                gradient = found[name].grad
                gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-5, msg=name)
        if dist.get_rank() == 0:
            print("equal")


if __name__ == "__main__":
    main()
