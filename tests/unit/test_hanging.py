"""A rank that stands still keeps its state once a hang, and only where it was asked to watch."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from fsdp2prof.manifest import STACKS_FILE
from fsdp2prof.recorder.hanging import HangWatch, buffer_variables, keep_state


def test_a_buffer_that_the_user_has_sized_stays_so() -> None:
    assert set(buffer_variables({}).values()) == {"2000"}
    assert buffer_variables({"TORCH_FR_BUFFER_SIZE": "0"}) == {}
    assert buffer_variables({"TORCH_NCCL_TRACE_BUFFER_SIZE": "50"}) == {}


def test_each_hang_is_told_once_and_only_after_a_step_began() -> None:
    told: list[float] = []
    heard = threading.Event()

    def hung(waited_s: float) -> None:
        told.append(waited_s)
        heard.set()

    watch = HangWatch(1, hung)
    time.sleep(1.3)
    assert told == []
    for hangs in (1, 2):
        watch.step()
        assert heard.wait(30)
        heard.clear()
        time.sleep(0.6)
        assert len(told) == hangs
        assert told[-1] >= 1
    watch.close()


def test_stacks_name_where_every_thread_is(tmp_path: Path) -> None:
    leave = threading.Event()

    def stand_still() -> None:
        leave.wait()

    thread = threading.Thread(target=stand_still)
    thread.start()
    try:
        assert STACKS_FILE in keep_state(tmp_path)
    finally:
        leave.set()
        thread.join()
    stacks = (tmp_path / STACKS_FILE).read_text()
    assert "in stand_still" in stacks
    assert "test_stacks_name_where_every_thread_is" in stacks
