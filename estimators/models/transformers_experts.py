"""Expert parallelism of a Hugging Face model: the modules its class's own plan names, reached by all-to-all.

transformers' training exchange: every (token, expert) pair goes to the rank that holds the expert, and its
result comes back to be weighted and summed there. Tensor-parallel ranks, which share their tokens, exchange a
slice each and gather the sums. Which pairs go where is data, so here every rank gets the same number, or
``imbalance`` times it. Shapes: T tokens, K experts a token, D model dim, R rows that arrive.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2prof.estimators.models.experts import ExpertExchange

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["expert_modules", "reach_experts"]

_EXCHANGED = "ep_dispatch_experts"
_DEALT_OUT = "grouped_gemm"


def expert_modules(module: nn.Module, stacked: tuple[str, ...]) -> tuple[str, ...] | str:
    """Those of the ``stacked`` experts that the class's plan deals out whole, or why there are none.

    The reason is the end of a sentence that begins with the model's name.
    """
    kind, version = type(module).__name__, importlib.import_module("transformers").__version__
    if not stacked:
        return "has no experts"
    try:
        names = importlib.import_module("transformers.distributed.parallel_utils")
        wildcards: Callable[[str], str] = names.replace_layer_number_by_wildcard
    except (ImportError, AttributeError):
        return f"has no expert-parallel plan: transformers {version} knows none; 5.23 does"
    plan = dict(getattr(module, "ep_plan", None) or {})
    unknown = set(plan.values()) - {_EXCHANGED, _DEALT_OUT}
    if unknown:
        return f"deals experts out in a style that is not modelled: {min(unknown)} (in the plan of {kind})"
    found = tuple(fqn for fqn in stacked if plan.get(wildcards(fqn)) == _EXCHANGED)
    if found != stacked:
        return f"has no expert-parallel plan: transformers {version} gives {kind} none"
    return found


def reach_experts(
    module: nn.Module,
    exchange: ExpertExchange,
    tensor_parallel: DeviceMesh | None,
    *,
    experts: tuple[str, ...],
) -> None:
    """Let the modules named ``experts``, which hold this rank's, work for all ranks of the exchange."""
    here = dict(module.named_modules())
    for fqn in experts:
        if fqn not in here:  # another pipeline stage's
            continue
        part: Any = here[fqn]
        part.num_experts = next(part.parameters(recurse=False)).shape[0]
        part._is_expert_parallel = True  # transformers' own mark: experts of other ranks are masked
        part.exchange = exchange
        part.forward = partial(_exchanged, part.forward, part.num_experts, exchange, tensor_parallel)


def _exchanged(
    run: Callable[..., Tensor],
    local: int,
    exchange: ExpertExchange,
    tensor_parallel: DeviceMesh | None,
    x_td: Tensor,
    chosen_tk: Tensor,
    weights_tk: Tensor,
) -> Tensor:
    """The experts' weighted sums (T, D) for this rank's tokens."""
    tokens, dim = x_td.shape[0], x_td.shape[1]
    if tensor_parallel is not None:
        x_td, chosen_tk, weights_tk = (_slice(one, tensor_parallel) for one in (x_td, chosen_tk, weights_tk))
    flat = chosen_tk.reshape(-1)
    order = torch.argsort(flat)
    rows = x_td[order // chosen_tk.shape[1]]
    sent, received = exchange.sent(len(rows)), exchange.received(len(rows))
    of_expert = _counts_there(flat, local, exchange)
    arrived = wait_tensor(all_to_all_single_autograd(rows, received, sent, exchange.group))  # type: ignore[no-untyped-call]
    ids = torch.arange(local, device=rows.device).repeat(exchange.ranks)
    ids = ids.repeat_interleave(of_expert, output_size=sum(received)).unsqueeze(-1)
    done = run(arrived, ids, torch.ones_like(ids, dtype=arrived.dtype))
    back = all_to_all_single_autograd(done, sent, received, exchange.group)
    by_token = torch.empty_like(back)
    by_token[order] = back
    summed = (by_token.view(*weights_tk.shape, dim) * weights_tk.unsqueeze(-1)).sum(dim=1)
    if tensor_parallel is not None:
        shape, stride = torch.Size((tokens, dim)), (dim, 1)
        apart = DTensor.from_local(
            summed.contiguous(), tensor_parallel, [Shard(0)], shape=shape, stride=stride
        )
        summed = apart.full_tensor()
    return summed.to(x_td.dtype)


def _slice(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's tokens of those that all ranks of a mesh have."""
    whole = tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [Replicate()])
    return whole.redistribute(mesh, [Shard(0)]).to_local()


def _counts_there(flat: Tensor, local: int, exchange: ExpertExchange) -> Tensor:
    """How many rows each of this rank's experts gets from each rank, (ranks x local) int64."""
    counts = torch.zeros(local * exchange.ranks, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))
    there = torch.empty_like(counts)
    dist.all_to_all_single(there, counts, group=exchange.group)
    return there
