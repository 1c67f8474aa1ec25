"""The computation on the logits: every loss of a policy, for every source of models.

``full`` keeps the logits in fp32 for backward, as the eager cross-entropy does, ``native`` in their own
dtype. ``in-place``, ``compiled`` and ``fused`` stand for kernels on tensors without data, and hold the same
memory; on real tensors they compute the same result by separate operators.

Shapes: N tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import (
    ChunkedBackward,
    ChunkedBlocks,
    ChunkedKept,
    ChunkedTokens,
    ChunkedVocabulary,
    InPieces,
    Loss,
)
from fsdp2prof.estimators.models.model import Batch

_After = Callable[[Tensor], Tensor]
"""The model's result from its head's logits."""
_LONGEST = 300
"""Characters of another library's message that are shown."""


class CompiledCrossEntropy(torch.autograd.Function):
    """The memory of the compiled cross-entropy: logits as they are, one fp32 number per token, the
    gradient.

    With the vocabulary divided among ranks: neither their sums nor the targets written into a gradient
    (``index_put``) are recomputed, so the unscaled gradient is made in forward and saved, in fp32.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Any) -> Tensor:
        """Stand for the kernels: read ``logits`` (N, V), write the logarithm of their sum.

        Ranks that have a part of the vocabulary each reduce the largest logit, the sum and the target's.
        """
        normaliser = logits[:, 0].float()
        ctx.dtype = logits.dtype
        if group is None:
            ctx.save_for_backward(logits, targets, normaliser)
            return normaliser.mean()
        for operation in ("max", "sum", "sum"):
            normaliser = wait_tensor(all_reduce(normaliser, operation, group))  # type: ignore[no-untyped-call]
        of_targets = torch.zeros_like(logits, dtype=torch.float32)
        ctx.save_for_backward(of_targets + 0)
        return normaliser.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Stand for the kernel that writes the gradient of the logits."""
        return torch.empty_like(ctx.saved_tensors[0], dtype=ctx.dtype), None, None


class _InPlaceCrossEntropy(torch.autograd.Function):
    """A kernel that writes the gradient of the logits over them, as Liger's and Transformer Engine's do."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Any) -> Tensor:
        """Stand for the kernel that reads and overwrites ``logits`` (N, V).

        Ranks that have a part of the vocabulary each gather three numbers of every token.
        """
        losses = logits[:, 0].float()
        if group is not None:
            gather = torch.ops._c10d_functional.all_gather_into_tensor.default
            losses = wait_tensor(gather(losses.repeat(3), group.size(), group.group_name))[: len(losses)]  # type: ignore[no-untyped-call]
        ctx.save_for_backward(logits.detach())
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Give what forward wrote."""
        return ctx.saved_tensors[0], None, None


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy chunk by chunk, with both gradients computed in forward: no logits are kept.

    As in Liger's kernel: ``ceil(V / D)`` chunks or fewer, since the number of tokens in a chunk is a power
    of two.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Stand for the kernel over ``hidden`` (N, D) and ``weight`` (V, D)."""
        tokens, wanted = hidden.shape[0], -(-weight.shape[0] // hidden.shape[1])
        size = 1 << (-(-tokens // wanted) - 1).bit_length()
        losses = hidden.new_empty(tokens, dtype=torch.float32)
        weight_gradient, gradients = torch.zeros_like(weight), torch.zeros_like(hidden)
        for start in range(0, tokens, size):
            piece = hidden[start : start + size]
            logits = piece @ weight.t()  # its own gradient, in place, once the kernel has run
            gradients[start : start + size] = logits @ weight
            weight_gradient += logits.t() @ piece
        ctx.save_for_backward(gradients, weight_gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients that forward computed."""
        hidden, weight = ctx.saved_tensors
        return hidden, weight, None


def logits_loss(
    logits: Tensor, targets: Tensor, how: Loss = "full", reference: Tensor | None = None
) -> Tensor:
    """Loss over logits (B, S, V) of the targets (B, S): mean cross-entropy, or one of log-probabilities.

    ``reference`` are those of a reference model (B, S).
    """
    if how in ("logprobs", "dpo"):
        taken = log_probabilities(logits, targets)
        return _preference(taken, reference) if how == "dpo" else _surrogate(taken, reference)
    logits, targets = logits.flatten(0, 1), targets.flatten()
    if how in ("compiled", "in-place") and is_fake(logits):
        local, group = logits, None
        if isinstance(logits, DTensor):  # divided by vocabulary
            local, group = logits.to_local(), logits.device_mesh.get_group()
        kernel = CompiledCrossEntropy if how == "compiled" else _InPlaceCrossEntropy
        loss: Tensor = kernel.apply(local, targets, group)  # type: ignore[no-untyped-call]
        return loss
    return F.cross_entropy(logits if how == "native" else logits.float(), targets)


def log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probability (B, S) of each target under logits (B, S, V), in fp32."""
    wide = logits.flatten(0, 1).float()
    taken = wide.gather(1, targets.flatten().unsqueeze(1)).squeeze(1)
    return (taken - torch.logsumexp(wide, dim=1)).view(targets.shape)


def _surrogate(taken: Tensor, reference: Tensor | None) -> Tensor:
    """Mean negative log-probability, plus GRPO's estimate of the divergence from a reference."""
    if reference is None:
        return -taken.mean()
    ratio = reference - taken
    return (ratio.exp() - ratio - 1 - taken).mean()


def _preference(taken: Tensor, reference: Tensor | None, beta: float = 0.1) -> Tensor:
    """DPO's loss of log-probabilities (2B, S), the chosen sequences before the rejected ones."""
    score = taken.sum(1) if reference is None else (taken - reference).sum(1)
    chosen, rejected = score.chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


def _in_pieces(
    head: Callable[[Tensor], Tensor], hidden_bsd: Tensor, targets_bs: Tensor, how: InPieces
) -> Tensor:
    """Mean cross-entropy over chunks of the sequence or of the tokens, with logits recomputed or kept.

    Logits that are kept stay on the device where the forward around them offloads what it saves: they are its
    result, and torchtune computes the loss after it (``recipes/full_finetune_distributed.py``).
    """

    def piece_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden).flatten(0, 1).float(), targets.flatten(), reduction="sum")

    if isinstance(how, ChunkedTokens):
        hidden_bsd, targets = hidden_bsd.flatten(0, 1).unsqueeze(0), targets_bs.view(1, -1)
        parts = [(hidden_bsd[:, some], targets[:, some]) for some in _slices(hidden_bsd.shape[1], how.count)]
    else:
        parts = list(zip(hidden_bsd.chunk(how.count, dim=1), targets_bs.chunk(how.count, dim=1), strict=True))
    if isinstance(how, ChunkedKept):
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            losses = [piece_loss(hidden, targets) for hidden, targets in parts]
    else:
        losses = [checkpoint(piece_loss, hidden, targets, use_reentrant=False) for hidden, targets in parts]
    return torch.stack(losses).sum() / targets_bs.numel()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _ByVocabulary(torch.autograd.Function):
    """Cross-entropy over blocks of tokens by entries of the vocabulary; the weight's gradient is one whole.

    Source: prime-rl ``trainer/models/layers/lm_head.py``, ``_SequenceChunkedLogProbEntropyFn`` (559b44772)
    and, for all tokens at once, ``_ChunkedLogProbEntropyFn`` (2486860eb).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, tokens: int, entries: int, after: _After
    ) -> Tensor:
        """Return the sum over ``hidden`` (N, D) and ``weight`` (V, D), its logits capped by ``after``."""
        normaliser, chosen = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(2))
        for some in _slices(len(hidden), tokens):
            largest = hidden.new_full((some.stop - some.start,), float("-inf"), dtype=torch.float32)
            total, target = torch.zeros_like(largest), torch.zeros_like(largest)
            for part in _slices(len(weight), entries):
                logits = after((hidden[some] @ weight[part].t()).float())
                higher = torch.maximum(largest, logits.amax(-1))
                total = total * torch.exp(largest - higher) + torch.exp(logits - higher.unsqueeze(-1)).sum(-1)
                largest = higher
                inside, index = _within(targets[some], part)
                target = torch.where(inside, logits.gather(1, index).squeeze(1), target)
            normaliser[some] = largest + torch.log(total)
            chosen[some] = target
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.how = tokens, entries, after
        return (normaliser - chosen).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute each block's logits again."""
        hidden, weight, targets, normaliser = ctx.saved_tensors
        tokens, entries, after = ctx.how
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for some in _slices(len(hidden), tokens):
            for part in _slices(len(weight), entries):
                narrow = hidden[some] @ weight[part].t()  # lives till the next block's, as in prime-rl's loop
                plain = narrow.float()
                with torch.enable_grad():
                    logits = after(plain.requires_grad_())
                probabilities = torch.exp(logits.detach() - normaliser[some].unsqueeze(-1))
                of_logits = gradients[0] * probabilities
                inside, index = _within(targets[some], part)
                of_logits.scatter_add_(1, index, -(gradients[0] * inside).unsqueeze(1))
                if logits is not plain:
                    (of_logits,) = torch.autograd.grad(logits, plain, of_logits)
                of_hidden[some] += of_logits.to(hidden.dtype) @ weight[part]
                of_weight[part] += of_logits.to(weight.dtype).t() @ hidden[some]
        return of_hidden, of_weight, None, None, None, None


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _within(targets: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in a part of the vocabulary, and the place (N, 1) of each there."""
    inside = (targets >= part.start) & (targets < part.stop)
    return inside, (targets - part.start).clamp(0, part.stop - part.start - 1).unsqueeze(1)


class _WithGradient(torch.autograd.Function):
    """A loss whose gradient by the hidden states is known already."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        """Return the loss."""
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient; backward starts from the loss."""
        (gradient,) = ctx.saved_tensors
        return gradient, None, None


def _with_backward_at_once(module: nn.Module, fqn: str, batch: Batch, pieces: int) -> Tensor:
    """Run a model without its head, then head, cross-entropy and their backward chunk by chunk.

    The head's parameters stay gathered in between, and its gradients are reduced with the last chunk.
    Source: torchtitan ``components/loss.py``, ``ChunkedLossWrapper`` (b5bcd76c6).
    """
    parent, _, name = fqn.rpartition(".")
    owner, head, targets = module.get_submodule(parent), module.get_submodule(fqn), batch.targets
    assert targets is not None
    if isinstance(module, FSDPModule):
        if not isinstance(head, FSDPModule):
            raise ModelError(
                f"loss=chunked-backward gathers {fqn} outside the forward, as a separate unit or "
                f"with the last norm: add {fqn} or norm+{fqn} to wrap"
            )
        module._get_fsdp_state()._lazy_init()  # before a unit is out of its sight
    with _taken_over(module) as after:
        owner.register_module(name, nn.Identity())
        try:
            hidden = logits_of(module(*batch.args, **batch.named))
        finally:
            owner.register_module(name, head)
        mesh = None
        if isinstance(hidden, DTensor):  # divided by sequence: torchtitan's last norm gathers it
            mesh = hidden.device_mesh
            hidden = hidden.redistribute(mesh, [Replicate()]).to_local()
        leaf = hidden.detach().flatten(0, 1).unsqueeze(0)
        gradient, total = torch.zeros_like(leaf, dtype=torch.float32), leaf.new_zeros((), dtype=torch.float32)
        parts = [part.contiguous().requires_grad_() for part in leaf.chunk(pieces, dim=1)]
        unit: Any = head if isinstance(head, FSDPModule) else None
        if unit is not None:
            unit.set_reshard_after_forward(False)
            unit.set_reshard_after_backward(False)
            syncs = _syncs(unit)
            unit.set_requires_gradient_sync(False, recurse=False)
            unit.unshard()
        start = 0
        for part, labels in zip(parts, targets.flatten().chunk(len(parts)), strict=True):
            if unit is not None and part is parts[-1]:
                unit.set_requires_gradient_sync(syncs, recurse=False)
            given = part if mesh is None else DTensor.from_local(part, mesh, [Replicate()])
            logits = after(head(given)).flatten(0, 1).float()
            loss = F.cross_entropy(logits, labels, reduction="sum") / targets.numel()
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
            assert part.grad is not None
            gradient[:, start : start + part.shape[1]] = part.grad
            part.grad, start = None, start + part.shape[1]
            del logits, loss
        if unit is not None:
            unit.set_reshard_after_forward(True)
            unit.set_reshard_after_backward(True)
            unit.reshard()
    known = gradient.to(hidden.dtype).view(hidden.shape)
    whole: Tensor = _WithGradient.apply(hidden, known, total)  # type: ignore[no-untyped-call]
    return whole


def _syncs(unit: FSDPModule) -> bool:
    """Whether a unit reduces its gradients in this micro-batch."""
    group = unit._get_fsdp_state()._fsdp_param_group
    return group is None or bool(group.reduce_grads)


def loss_of_model(head: str | None, module: nn.Module, batch: Batch, how: Loss) -> Tensor:
    """Run a model and its loss; a loss that computes the logits itself runs in the place of ``head``.

    Raises ``ModelError`` if there is no head to replace.
    """
    targets = batch.targets
    assert targets is not None
    if how != "fused" and not isinstance(how, InPieces):
        logits = logits_of(module(*batch.args, **batch.named))
        if batch.keeps_logits == "fp32":
            logits = logits.float()
        if batch.keeps_logits is not None:
            batch.kept[:] = [logits]
        return logits_loss(logits, targets, how, batch.reference)
    if head is None:
        raise ModelError(f"loss={how}: the model names no head: compute this loss in your own function")
    if isinstance(how, ChunkedBackward):
        return _with_backward_at_once(module, head, batch, how.count)
    with _taken_over(module) as after, _in_place_of(module.get_submodule(head), after, targets, how):
        return logits_of(module(*batch.args, **batch.named)).sum()


def score_of_model(module: nn.Module, batch: Batch, how: Loss) -> Tensor | None:
    """Log-probabilities (B, S) of the targets by a model that runs forward only, where a loss uses them."""
    if how not in ("logprobs", "dpo"):
        return None
    assert batch.targets is not None
    return log_probabilities(logits_of(module(*batch.args, **batch.named)), batch.targets)


def head_of(module: nn.Module) -> str | None:
    """FQN of the linear layer that makes the logits, where the model says which it is."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    named = (fqn for fqn, part in module.named_modules() if part is head)
    return next(named, None) if isinstance(head, nn.Linear) else None


def logits_of(output: Any) -> Tensor:
    """The tensor that a model returns, or that its result calls its logits."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


_MOST_PIECES = 10_000
"""Far above any trainer's value; beyond it, the number of chunks was given in place of their size."""


@contextmanager
def _in_place_of(head: nn.Module, after: _After, targets: Tensor, how: Loss) -> Iterator[None]:
    """Let a head return the loss, (1, 1, 1), for as long as it is asked."""
    own = vars(head).get("forward")  # tensor parallelism puts its collectives around a forward of its own
    apart = partial(type(head).forward, head) if own is None else own

    def with_loss(hidden_bsd: Tensor) -> Tensor:
        hidden, labels = hidden_bsd.flatten(0, 1), targets.flatten()
        if isinstance(how, (ChunkedVocabulary, ChunkedBlocks)):
            if head.bias is not None:
                raise ModelError(f"loss={how}: prime-rl's fused head takes no bias: use chunked:8")
            tokens = how.count if isinstance(how, ChunkedBlocks) else len(hidden)
            pieces = -(-len(hidden) // tokens) * -(-len(head.weight) // how.count)
            if pieces > _MOST_PIECES:
                raise ModelError(
                    f"loss={how} makes {pieces:,} pieces: the number is of vocabulary entries in a piece"
                )
            loss = _ByVocabulary.apply(hidden, head.weight, labels, tokens, how.count, after)
            loss = loss / len(labels)
        elif isinstance(how, InPieces):
            loss = _in_pieces(lambda piece: after(apart(piece)), hidden_bsd, targets, how)
        elif is_fake(hidden_bsd):
            loss = _FusedLinearCrossEntropy.apply(hidden, head.weight, labels)  # type: ignore[no-untyped-call]
        else:
            loss = logits_loss(after(apart(hidden_bsd)), targets)
        return loss.view(1, 1, 1)

    head.forward = with_loss
    try:
        yield
    finally:
        del head.forward
        if own is not None:
            head.forward = own


_CAP, _DIVISOR, _FACTOR = "final_logit_softcapping", "logits_scaling", "logit_scale"
"""Options of transformers' models by which they cap (Gemma 2) or scale (Granite, Cohere) their logits."""


@contextmanager
def _taken_over(module: nn.Module) -> Iterator[_After]:
    """Have a model return its head's logits unchanged, and yield the cap or scale that it would have applied.

    A chunked loss runs in the head's place, so that the model would cap or scale the loss.
    """
    config: Any = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    cap, divisor = getattr(config, _CAP, None), getattr(config, _DIVISOR, None)
    factor = getattr(module, _FACTOR, None)
    factor = factor if isinstance(factor, int | float) else None
    replaced: list[tuple[Any, str, Any, Any]] = [
        (config, _CAP, cap, None),
        (config, _DIVISOR, divisor, 1.0),
        (module, _FACTOR, factor, 1.0),
    ]
    replaced = [(owner, name, own, neutral) for owner, name, own, neutral in replaced if own is not None]
    for owner, name, _, neutral in replaced:
        setattr(owner, name, neutral)

    def after(logits: Tensor) -> Tensor:
        if divisor is not None:
            logits = logits / divisor
        if factor is not None:
            logits = logits * factor
        return logits if cap is None else torch.tanh(logits / cap) * cap

    try:
        yield after
    finally:
        for owner, name, own, _ in replaced:
            setattr(owner, name, own)


def one_line(error: BaseException) -> str:
    """An error of another library in one line of bounded length."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
