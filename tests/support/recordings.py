"""Which scripts the integration tests record, and for how long."""

import pytest

RECORDED = [
    ("train_tiny_fsdp2", 2),
    ("two_models", 2),
    ("accumulation", 2),
    pytest.param("reused", 2, marks=pytest.mark.slow),
    pytest.param("nested", 2, marks=pytest.mark.slow),
    ("hsdp", 4),
    ("adapters", 2),
    pytest.param("uneven", 2, marks=pytest.mark.slow),
    pytest.param("checkpointing", 2, marks=pytest.mark.slow),
    pytest.param("never_reshard", 2, marks=pytest.mark.slow),
    ("int_reshard", 4),
    pytest.param("async_prefetch", 2, marks=pytest.mark.slow),
    pytest.param("closure", 2, marks=pytest.mark.slow),
]
"""Script and number of ranks; the `recorded` fixture records each once per test session."""

STEPS = 8
"""Training steps of every recording; each step does the same collectives."""

SHORT = ["--active", "3", "--memory-steps", "1"]
"""Options of `record` that capture less than its default, so that few steps are enough."""
