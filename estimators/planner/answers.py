"""The largest batch, the longest sequence, the fewest GPUs: one number varied until nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import lcm
from typing import Literal

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.planner.plan import Planning
from fsdp2prof.estimators.planner.request import Engine, PlanRequest, in_this_process
from fsdp2prof.estimators.planner.search import Scored, ranked
from fsdp2prof.results.plan import Plan, PlanAnswer

Question = Literal["max batch-size", "max seq-len", "min gpus"]

_MAX = 1 << 24
_SEQ_STEP = 1024
_ROUNDS = 5
"""Times that the engine may correct the answer."""


def answer(
    request: PlanRequest,
    question: Question,
    *,
    engine: Engine = in_this_process,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Vary one number of a request to find the largest, or the smallest, that fits; the engine confirms
    it.

    Raises ``ModelError`` for a request that cannot be planned.
    """
    if question == "max seq-len":
        request = _buildable(request)
    planning = Planning(request=request, engine=engine, progress=progress)
    planning.profile()
    asked = _Asked(planning, question)
    value: int | None = None
    for _ in range(_ROUNDS):
        value = asked.best()
        if value is None or not asked.needs_engine(value):
            break
        progress(f"confirming {question} {value:,}")
        planning.confirm()
    asked.at(value if value is not None else asked.easiest)
    planning.confirm()
    planning.prefetch()
    planning.other_precisions()
    planning.simplify()
    planning.complete = True
    plan = planning.plan()
    sentence = _sentence(question, value, plan, asked)
    if plan.answer is not None:  # what the training takes, or a budget trains
        sentence = f"{sentence} {plan.answer.sentence}"
    return replace(plan, answer=PlanAnswer(question=question, value=value, sentence=sentence))


def _buildable(request: PlanRequest) -> PlanRequest:
    """Start from a sequence length that the model accepts, since the longest one is the question."""
    policy = request.policy
    try:
        build_model(request.model, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
    except ModelError:
        return replace(request, policy=replace(policy, seq_len=min(policy.seq_len, _SEQ_STEP)))
    return request


class _Asked:
    """One question about a request."""

    def __init__(self, planning: Planning, question: Question) -> None:
        self._planning = planning
        self._question = question
        self._request = planning.request
        self._refused: dict[int, str] = {}
        fixed = self._request.fixed_mesh
        self._step = lcm(_SEQ_STEP, 2 * fixed.get("cp", 1) * fixed.get("tp", 1))

    @property
    def easiest(self) -> int:
        """The value that fits if any does."""
        if self._question == "min gpus":
            return self._request.gpus
        return 1 if self._question == "max batch-size" else self._step

    def best(self) -> int | None:
        """Return the value as far as known; None if nothing fits."""
        if self._question == "min gpus":
            return next((gpus for gpus in self._sizes() if self.winner(gpus) is not None), None)
        step = self.easiest
        if self.winner(step) is None:
            return None
        low, high = 1, 2
        while high * step <= _MAX and self.winner(high * step) is not None:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.winner(middle * step) is None else (middle, high)
        return low * step

    def needs_engine(self, value: int) -> bool:
        """Whether the result at a value comes only from the search."""
        winner = self.winner(value)
        return winner is not None and not winner.confirmed

    def winner(self, value: int) -> Scored | None:
        """Return the best configuration at a value that fits."""
        try:
            self.at(value)
        except ModelError as error:
            self._refused[value] = str(error)
            return None
        return self._planning.winner(ranked(self._planning.request, self._planning.all()))

    def at(self, value: int) -> None:
        """Search at a value. Raises ``ModelError`` if no configuration has it."""
        self._planning.request = self._with(value)
        self._planning.find()

    def limit(self, value: int) -> str:
        """Report the limit of the search above a value, or the limit that the value exceeds, if memory is
        not the only one."""
        if self._question == "min gpus":
            return ""
        refused = self._refused.get(value + self.easiest)
        if refused is not None:
            return f" Memory is not the limit: {refused.removeprefix('plan: ')}."
        config = self._planning.model().config
        if self._question == "max seq-len" and config is not None and value > config.context:
            return f" {config.name} supports at most {config.context:,}."
        return ""

    def _with(self, value: int) -> PlanRequest:
        request = self._request
        if self._question == "min gpus":
            return replace(request, gpus=value)
        if self._question == "max seq-len":
            return replace(request, policy=replace(request.policy, seq_len=value))
        fixed = {**request.fixed_policy, "batch_size": value}
        return replace(request, global_batch=value * request.gpus, fixed_policy=fixed)

    def _sizes(self) -> list[int]:
        """Numbers of GPUs: parts of a node, then whole nodes, by powers of two and three times one."""
        most, node = self._request.gpus, self._request.cluster.gpus_per_node
        parts = [size for size in range(1, node) if node % size == 0]
        whole = [node * times * 2**power for times in (1, 3) for power in range(24)]
        return sorted({size for size in (*parts, *whole, most) if size <= most})


def _sentence(question: Question, value: int | None, plan: Plan, asked: _Asked) -> str:
    if value is None or plan.winner is None:
        return f"{question}: nothing fits, not even at {asked.easiest:,}."
    what = {
        "max batch-size": f"the largest micro-batch that fits is {value:,} sequences",
        "max seq-len": f"the longest sequence that fits is {value:,} tokens",
        "min gpus": f"the fewest GPUs are {value:,}",
    }[question]
    by = "confirmed by the engine" if plan.winner.confirmed else "by the search alone"
    return f"{what[0].upper()}{what[1:]}, with {plan.winner.name} ({by}).{asked.limit(value)}"
