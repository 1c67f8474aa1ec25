"""Counts and payload bytes per step and layer equal an interception made inside the training, exactly."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache

import msgspec
import pytest
from support.recordings import RECORDED, STEPS

from fsdp2prof import analyze_trace


@cache
def analyzed(run):
    """What ``analyze trace --format json`` prints of a run."""
    return json.loads(msgspec.json.encode(analyze_trace(run)))


@pytest.mark.parametrize(("script", "nproc"), RECORDED)
def test_collectives_of_every_layer_and_step(recorded, script, nproc):
    recording = recorded(script, nproc)
    analysis = analyzed(recording.run)
    assert [rank["rank"] for rank in analysis["ranks"]] == list(range(nproc))
    for rank, counted in enumerate(recording.counts):
        expected: Counter[tuple[object, ...]] = Counter()
        several_roots = len({row["root"] for row in counted if row["fqn"] is not None}) > 1
        for row in counted:
            if row["fqn"] is None:
                continue
            fqn = f"root{row['root']}:{row['fqn']}" if several_roots else row["fqn"]
            key = (fqn, row["op"], row["dtype"], len(row["ranks"]))
            assert row["count"] % STEPS == 0
            expected.update(
                {
                    (*key, "count"): row["count"] // STEPS,
                    (*key, "payload_bytes"): row["payload_bytes"] // STEPS,
                }
            )
        assert expected
        steps = [step["step"] for step in analysis["ranks"][rank]["steps"]]
        assert len(steps) == 3
        for step in steps:
            measured: Counter[tuple[object, ...]] = Counter()
            for row in analysis["groups"]:
                if row["rank"] == rank and row["step"] == step:
                    key = (row["fqn"], row["op"], row["dtype"], row["group_size"])
                    measured.update(
                        {(*key, "count"): row["count"], (*key, "payload_bytes"): row["payload_bytes"]}
                    )
            assert measured == expected


@pytest.mark.parametrize(("script", "nproc"), RECORDED)
def test_every_nanosecond_is_accounted_for(recorded, script, nproc):
    analysis = analyzed(recorded(script, nproc).run)
    exposed_keys = [f"exposed_{op}" for op in ("all_gather", "reduce_scatter", "all_reduce", "other_comm")]
    for rank in analysis["ranks"]:
        for step in rank["steps"]:
            assert sum(step["breakdown_ns"].values()) == step["duration_ns"]
            charged = sum(
                row["exposed_ns"]
                for row in analysis["groups"]
                if row["rank"] == rank["rank"] and row["step"] == step["step"]
            )
            assert charged == sum(step["breakdown_ns"][key] for key in exposed_keys)
    attribution = analysis["attribution"]
    assert attribution["attributed"] == attribution["collectives"] > 0
    assert attribution["attributed_ns"] == attribution["comm_ns"]
