"""Where a training step ends, seen from the optimizers of an unmodified script."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal
from weakref import ReferenceType, WeakSet, ref

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from fsdp2prof.recorder.guard import guard


class TrainingSteps:
    """Counts training steps.

    A **training step** ends when the first optimizer that steps after a root module's forward returns from
    its ``step()``. Only a forward with gradients enabled counts, so evaluation and frozen teachers belong to
    the step around them. It follows that

    - several optimizers that step after the same forwards make one training step: the first ends it, the
      others find no forward since (their work is timed at the start of the next step);
    - micro-batches whose gradients accumulate make one training step, because no optimizer steps in between;
    - a step that a ``GradScaler`` skips is one too: what counts is the return of ``scaler.step(optimizer)``;
    - optimizers that step inside the backward pass, one per parameter, make one training step per backward
      after a forward. It ends where the next forward begins, since the pass goes on after the first of them;
    - where no optimizer of torch's ever steps, a step ends at the first forward after the script has updated
      the parameters itself;
    - models updated in turns (forward, backward, step for one, then for the other) make a training step each;
    - an optimizer that calls its forward itself (a closure) makes one training step.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._state: Literal["idle", "forward", "stepped_in_backward"] = "idle"

    def forward(self) -> None:
        """A root forward with gradients enabled begins."""
        self.finish()
        self._state = "forward"

    def optimizer_stepped(self, *, in_backward: bool) -> None:
        """An optimizer's ``step()`` returned, or a grad scaler decided to skip it."""
        if self._state == "idle":
            return
        if in_backward:
            self._state = "stepped_in_backward"
        else:
            self._state = "idle"
            self._on_end()

    def finish(self) -> None:
        """End the step whose optimizers stepped in backward, if there is one."""
        if self._state == "stepped_in_backward":
            self._state = "idle"
            self._on_end()


class UnseenUpdates:
    """Tells, where no optimizer of torch's steps, that the script has updated the parameters itself.

    Updates in place count, of the parameter or of its local shard. Through ``.data``, or while operators are
    counted, they leave no mark but gradients that are gone.
    """

    def __init__(self) -> None:
        self._before: tuple[ReferenceType[torch.Tensor], int, bool] | None = None

    def since_last_forward(self, parameter: torch.Tensor, *, reduced: bool) -> bool:
        """Whether a trained sharded parameter was updated between the forward that begins and the last.

        ``reduced`` says that a backward of this step is known to have reduced its gradient.
        """
        local = getattr(parameter, "_local_tensor", parameter)
        version, has_gradient = parameter._version + local._version, parameter.grad is not None
        before, self._before = self._before, (ref(parameter), version, has_gradient)
        if before is None or before[0]() is not parameter:
            return False
        return version != before[1] or ((before[2] or reduced) and not has_gradient)


class OptimizerWatch:
    """Tells when an optimizer's ``step()`` has returned.

    torch's own step hooks run inside the ``Optimizer.step#...`` range, where a trace can neither be ended nor
    exported without cutting that range; so the ``step`` of every optimizer class is wrapped instead, around
    what ``Optimizer.profile_hook_step`` makes of it, and so is ``GradScaler.step``. Calls nest (an optimizer
    inside a scaler, ``super().step()``): only the outermost counts.
    """

    def __init__(self, on_step: Callable[[bool], None]) -> None:
        self._on_step = on_step
        self._depth = 0
        self._restore: list[tuple[type, str, Any]] = []
        self._installed = False
        self.optimizers: WeakSet[Optimizer] = WeakSet()
        """Optimizers that stepped."""

    def install(self) -> None:
        """Wrap the ``step`` of the optimizer classes in use, and of those to come."""
        self._installed = True
        make: Any = Optimizer.profile_hook_step
        hooked = guard.around_made("recording", make, self._enter)
        self._replace(Optimizer, "profile_hook_step", staticmethod(hooked))
        self._replace(GradScaler, "step", guard.around("recording", GradScaler.step, self._enter))
        for owner in _subclasses(Optimizer):
            step = owner.__dict__.get("step")
            if step is not None and getattr(step, "hooked", False):
                self._replace(owner, "step", guard.around("recording", step, self._enter))
        for optimizer in _with_own_step():
            enter = partial(self._enter_own, ref(optimizer))
            optimizer.step = guard.around("recording", optimizer.step, enter)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Put back what was wrapped; wrappers that live on (in a learning rate scheduler) do nothing."""
        self._installed = False
        for owner, name, original in reversed(self._restore):
            setattr(owner, name, original)
        self._restore.clear()

    def _replace(self, owner: type, name: str, replacement: Any) -> None:
        self._restore.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, replacement)

    def _enter(self, owner: Any, *_: Any, **__: Any) -> Callable[[bool, Any], None] | None:
        if not self._installed:
            return None
        if isinstance(owner, Optimizer):
            self.optimizers.add(owner)
        self._depth += 1
        return self._leave

    def _enter_own(
        self, owner: ReferenceType[Optimizer], *_: Any, **__: Any
    ) -> Callable[[bool, Any], None] | None:
        return self._enter(owner())

    def _leave(self, returned: bool, _: Any) -> None:
        self._depth -= 1
        if returned and not self._depth:
            self._on_step(torch._C._current_graph_task_id() != -1)


def _with_own_step() -> list[Optimizer]:
    """Return the optimizers whose ``step`` was replaced on the instance.

    A learning rate scheduler does that: it keeps the class's function, so wrapping the class afterwards
    does not reach it. The type is asked because ``__class__`` of a proxy may run the training's code.
    """
    return [one for one in gc.get_objects() if issubclass(type(one), Optimizer) and "step" in vars(one)]


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
