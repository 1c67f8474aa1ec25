"""Frozen models that run forward only beside the trained one: references, and reward models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.profiler import record_function
from torch.distributed.tensor.parallel import loss_parallel

from fsdp2prof.errors import Fsdp2ProfError, ModelError
from fsdp2prof.estimators.config.choices import Loss
from fsdp2prof.estimators.config.extra_models import ExtraModel
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.losses import head_of, score_of_model
from fsdp2prof.estimators.models.model import Batch, Model
from fsdp2prof.estimators.simulate.program import WITHOUT_GRADIENTS
from fsdp2prof.estimators.techniques.adapters import without_adapters
from fsdp2prof.labels import root_label

MODEL_ROOT = 0
"""Index of the trained model's root if there are several; the others follow in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondModel:
    """A model that runs only forward, without gradients, and its output for the loss."""

    model: Model
    role: str
    """Of ``ExtraModel``; ``self`` for the trained model itself."""
    root: int | None
    """Index of its root; None if there is only one."""
    spec: ModelSpec

    @property
    def is_itself(self) -> bool:
        """Whether it is the trained model."""
        return self.role == "self"

    def score(self, batch: Batch, how: Loss, *, in_parallel: bool) -> Tensor | None:
        """Run it on a batch; log-probabilities (B, S) or rewards, where the loss uses them."""
        module = self.model.module
        with (
            torch.no_grad(),
            record_function(WITHOUT_GRADIENTS),
            nullcontext() if self.root is None else record_function(root_label(self.root)),
            without_adapters(module) if self.is_itself else nullcontext(),
            loss_parallel() if in_parallel else nullcontext(),
            naming_the_culprit(self.spec),
        ):
            if self.role == "reward":
                output = module(*batch.args, **batch.named)
                given: Tensor = output if isinstance(output, Tensor) else output.logits
                return given
            taken = score_of_model(module, batch, how)
            if taken is None:
                self.model.loss(module, batch, how)
            return taken


def policy_of_others(policy: PolicySpec) -> PolicySpec:
    """How the frozen models are sharded: as the trained one, whole, without checkpointing or float8."""
    return replace(
        policy.without_checkpointing(),
        keep_logits=None,
        trainable=None,
        lora=None,
        extra_model=None,
        float8=None,
        fp8_all_gather=False,
    )


def with_role(model: Model, extra: ExtraModel, tensor_parallel: int = 1) -> Model:
    """Give a reward model its head of one output, in place of one over a vocabulary.

    Raises ``ModelError`` for a reward model under tensor parallelism.
    """
    if extra.role != "reward":
        return model
    if tensor_parallel > 1:
        raise ModelError(f"extra_model: a reward model ({extra.source}) under tensor parallelism: leave tp=1")
    head = "output" if model.config is not None else head_of(model.module)
    if head is not None:
        before = model.module.get_submodule(head)
        assert isinstance(before, nn.Linear)
        made = nn.Linear(before.in_features, 1, False, device="meta", dtype=before.weight.dtype)
        model.module.set_submodule(head, made)
    return model


_OLDER = torch.__version__ < "2.13"  # a TorchVersion, which compares as one
"""Whether this torch lacks something that a built-in model may use."""


@contextmanager
def naming_the_culprit(spec: ModelSpec) -> Iterator[None]:
    """Turn errors of user models and missing features of this torch into one line that names the cause."""
    try:
        yield
    except Exception as error:
        lacking = _OLDER and isinstance(error, (AttributeError, RuntimeError))
        refused = str(error).startswith("FSDP expects") or (spec.kind == "builtin" and lacking)
        if (spec.kind == "builtin" and not refused) or isinstance(error, Fsdp2ProfError):
            raise
        reason = f"{_module_of(error)}{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            operator = str(error).partition(chr(10))[0]
            reason = f"{_module_of(error)}how much it computes depends on values of its tensors ({operator})"
        if refused:
            raise ModelError(
                f"model {spec.source}: torch {torch.__version__} cannot train it so: {reason}"
            ) from error
        raise ModelError(
            f"model {spec.source}: its training step failed on fake tensors: {reason}"
        ) from error


def _module_of(error: Exception) -> str:
    """The innermost module whose forward failed, as the beginning of a reason; empty in backward."""
    name, trace = "", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and trace.tb_frame.f_code.co_name == "forward":
            name = type(owner).__name__.removeprefix("FSDP")
        trace = trace.tb_next
    return f"in {name}: " if name else ""
