"""Why a command that was run on tensors without data ended before it was recorded."""

from __future__ import annotations

import pytest

from fsdp2prof.workflows.rehearsed import _why_it_ended

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 8, in <module>
    raise {error}
{printed}
"""


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (
            "ModuleNotFoundError: No module named 'peft'",
            "recorded: ModuleNotFoundError: No module named 'peft'",
        ),
        ("[rank0]: ValueError: no such file", "recorded: ValueError: no such file"),
        (
            "[rank0]: torch._subclasses.fake_tensor.DynamicOutputShapeException: aten.nonzero.default",
            "the script looks at values (aten.nonzero.default)",
        ),
        ("python: can't open file 'train.py'", "recorded: python: can't open file 'train.py'"),
    ],
)
def test_the_last_exception_says_why(printed: str, said: str) -> None:
    why = _why_it_ended(TRACEBACK.format(error="it", printed=printed), 1)
    assert said in why
    assert "\n" not in why


def test_a_command_that_printed_nothing_can_be_rehearsed() -> None:
    assert _why_it_ended("", 1).endswith("`fsdp2prof rehearse --meta` shows its output")
