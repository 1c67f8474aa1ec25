"""The simulation of streams: cases computed by hand, and what must hold for every program."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec, NetworkSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.simulate.program import (
    Collective,
    Command,
    HostWait,
    Kernel,
    Program,
    Record,
    Wait,
    Work,
)
from fsdp2prof.estimators.simulate.streams import Timeline, _Simulation, simulate
from fsdp2prof.estimators.timeline.costs import ClusterCosts

COMPUTE, GATHER, REDUCE = 0, 1, 2


@dataclass
class FlatCosts:
    """Kernels take their bytes in nanoseconds, collectives their payload over a bandwidth."""

    bandwidth: int = 1
    launch_latency_ns: int = 0
    slow: float = 0.0
    issue_ns: int = 0
    links: dict[str, str] = field(default_factory=dict)

    def kernel_ns(self, kernel: Kernel) -> int:
        return kernel.work.bytes if kernel.work else 0

    def collective_ns(self, collective: Collective) -> int:
        return -(-collective.payload_bytes // self.bandwidth)

    def link(self, collective: Collective) -> str:
        return self.links.get(collective.group, collective.group)

    def disturbs(self, collective: Collective) -> bool:
        return collective.group != "copy engines"

    def slowdown(self, kernel: Kernel) -> float:
        return self.slow

    def host_ns(self, command: Command) -> int:
        return self.issue_ns


def kernel(ns: int, stream: int = COMPUTE) -> Kernel:
    return Kernel(stream, "aten::mm", Work("pointwise", "float32", ns))


def collective(
    size: int, stream: int = GATHER, group: str = "0", op: str = "all_gather", event: int = -1
) -> Collective:
    return Collective(stream, op, group, "dp_shard", 8, "bfloat16", size, size, size, event)


def program(*commands: Command) -> Program:
    return Program(commands=list(commands), streams=3, parameters=0, tokens=0, model_flops=0)


def spans(timeline: Timeline) -> list[tuple[int, int]]:
    return list(zip(timeline.start_ns.tolist(), timeline.end_ns.tolist(), strict=True))


def run(*commands: Command, **costs: Any) -> list[tuple[int, int]]:
    return spans(simulate(program(*commands), FlatCosts(**costs), repeats=1))


def test_a_stream_runs_in_order_and_streams_run_beside_each_other() -> None:
    assert run(kernel(10), kernel(5), collective(12)) == [(0, 10), (10, 15), (0, 12)]


def test_three_layers_whose_gathers_hide_but_the_first() -> None:
    """Gather i+1 is issued before layer i computes; only the first gather is waited for."""
    commands: list[Command] = []
    for layer in range(3):
        commands += [collective(100), Record(GATHER, layer), Wait(COMPUTE, layer), kernel(150)]
    found = run(*commands)
    gathers, layers = found[0::4], found[3::4]
    assert gathers == [(0, 100), (100, 200), (200, 300)]
    assert layers == [(100, 250), (250, 400), (400, 550)]


def test_a_gather_that_waits_for_the_copy_out_before_it() -> None:
    """As FSDP2 does without prefetch: the next gather may start when the layer before has copied out."""
    found = run(
        collective(100),
        Record(GATHER, 0),
        Wait(COMPUTE, 0),
        kernel(10),  # copy-out
        Record(COMPUTE, 1),
        Wait(GATHER, 1),
        kernel(50),
        collective(100),
    )
    assert found[3] == (100, 110)
    assert found[6] == (110, 160)
    assert found[7] == (110, 210)


def test_one_communicator_runs_its_collectives_in_the_order_of_issue() -> None:
    """The second one's stream is free, but the first one of the communicator still waits for compute."""
    found = run(
        kernel(40),
        Record(COMPUTE, 0),
        Wait(REDUCE, 0),
        collective(30, REDUCE, op="reduce_scatter"),
        collective(10, GATHER),
    )
    assert found[3] == (40, 70)
    assert found[4] == (70, 80)
    apart = run(
        kernel(40),
        Record(COMPUTE, 0),
        Wait(REDUCE, 0),
        collective(30, REDUCE, op="reduce_scatter"),
        collective(10, GATHER, group="1"),
    )
    assert apart[4] == (0, 10)


def test_collectives_of_two_groups_share_a_link() -> None:
    """Both at half the speed until the shorter one is done: 20 + 20 units take 40 until 10 are left."""
    found = run(collective(20, GATHER), collective(30, REDUCE, group="1"), links={"0": "net", "1": "net"})
    assert found == [(0, 40), (0, 50)]


def test_a_kernel_goes_slower_only_while_a_collective_is_in_flight() -> None:
    """Half the speed for 20 ns does 10 ns of work; the other 30 run at full speed."""
    assert run(collective(20), kernel(40), slow=1.0) == [(0, 20), (0, 50)]


def test_copy_engines_slow_no_kernel() -> None:
    """The gather of 20 ns leaves the kernel its 40; a usual one of 10 ns beside it takes half its speed."""
    engines = collective(20, group="copy engines")
    assert run(engines, kernel(40), slow=1.0) == [(0, 20), (0, 40)]
    both = run(engines, collective(10, stream=REDUCE, group="1"), kernel(40), slow=1.0)
    assert both == [(0, 20), (0, 10), (0, 45)]


def test_copy_engines_gather_within_a_node_over_nvlink() -> None:
    network = NetworkSpec.parse("400gb-ib")
    h100 = Cluster(hardware=HardwareSpec.parse("h100"), network=network, copy_engine_gathers=True)
    costs = ClusterCosts(cluster=h100, mesh=MeshSpec(dp_shard=8))
    assert [costs.disturbs(collective(1, op=op)) for op in ("all_gather", "reduce_scatter")] == [False, True]
    h100.check_copy_engines(MeshSpec(dp_shard=8))
    with pytest.raises(ModelError, match="spans several"):
        h100.check_copy_engines(MeshSpec(dp_shard=16))
    with pytest.raises(ModelError, match="gathers no parameters"):
        h100.check_copy_engines(MeshSpec(tp=8))
    with pytest.raises(ModelError, match="NVLink"):
        replace(h100, hardware=HardwareSpec.parse("l40s")).check_copy_engines(MeshSpec(dp_shard=8))


def test_a_collective_on_the_communicators_own_stream_is_waited_for_by_its_event() -> None:
    found = run(kernel(10), collective(25, COMPUTE, event=7), kernel(5), Wait(COMPUTE, 7), kernel(1))
    assert found[1] == (10, 35)  # behind what its stream held when it was issued
    assert found[2] == (10, 15)
    assert found[4] == (35, 36)


def test_the_host_is_late_and_waits() -> None:
    """Commands are issued every 10 ns and start 3 ns after that; the host waits for the first kernel."""
    timeline = simulate(
        program(kernel(100), Record(COMPUTE, 0), HostWait(COMPUTE, 0), kernel(5)),
        FlatCosts(issue_ns=10, launch_latency_ns=3),
        repeats=1,
    )
    assert spans(timeline)[0] == (13, 113)
    assert timeline.host_ns.tolist() == [0, 10, 20, 123]
    assert spans(timeline)[3] == (136, 141)


def test_a_repeated_step_waits_for_its_own_events() -> None:
    """The second run's wait is for the second run's gather, not for the first one's."""
    step = program(collective(100), Record(GATHER, 0), Wait(COMPUTE, 0), kernel(10))
    once, twice = (simulate(step, FlatCosts(), repeats=count) for count in (1, 2))
    assert spans(once)[3] == (100, 110)
    assert np.diff([twice.start_ns[0], twice.start_ns[3]]).tolist() == [100]


COMMANDS = st.one_of(
    st.builds(kernel, st.integers(1, 50), st.sampled_from([COMPUTE, GATHER, REDUCE])),
    st.builds(collective, st.integers(1, 50), st.sampled_from([GATHER, REDUCE]), st.sampled_from("01")),
    st.builds(Record, st.sampled_from([COMPUTE, GATHER, REDUCE]), st.integers(0, 5)),
    st.builds(Wait, st.sampled_from([COMPUTE, GATHER, REDUCE]), st.integers(0, 5)),
)


def distinct_events(commands: Sequence[Command]) -> list[Command]:
    """Give every record an event of its own and let each wait mean the latest record before it."""
    latest: dict[int, int] = {}
    made: list[Command] = []
    for position, command in enumerate(commands):
        if isinstance(command, Record):
            latest[command.event] = position
            made.append(replace(command, event=position))
        elif isinstance(command, Wait):
            if command.event in latest:
                made.append(replace(command, event=latest[command.event]))
        else:
            made.append(command)
    return made


@settings(max_examples=150, deadline=None)
@given(st.lists(COMMANDS, min_size=1, max_size=40).map(distinct_events), st.integers(0, 9), st.integers(0, 9))
def test_nothing_starts_before_its_cause(commands: list[Command], issue: int, latency: int) -> None:
    timeline = simulate(program(*commands), FlatCosts(issue_ns=issue, launch_latency_ns=latency), repeats=1)
    ready = [0, 0, 0]
    events: dict[int, int] = {}
    groups: dict[str, int] = {}
    work = 0
    for position, command in enumerate(commands):
        if isinstance(command, Record):
            events[command.event] = ready[command.stream]
        elif isinstance(command, Wait):
            ready[command.stream] = max(ready[command.stream], events[command.event])
        elif isinstance(command, (Kernel, Collective)):
            start, end = int(timeline.start_ns[position]), int(timeline.end_ns[position])
            assert start >= ready[command.stream]
            assert start >= timeline.host_end_ns[position] + latency
            if isinstance(command, Collective):
                assert start >= groups.get(command.group, 0)
                groups[command.group] = end
            assert end - start >= 1
            ready[command.stream] = end
            work += end - start
    if work:
        assert timeline.end_ns.max() <= work + len(commands) * issue + latency  # something always runs


@settings(max_examples=100, deadline=None)
@given(st.lists(COMMANDS, min_size=1, max_size=40).map(distinct_events))
def test_the_step_is_the_longest_chain_of_causes(commands: list[Command]) -> None:
    """Lengths added along streams, events and communicators: no sooner, and without sharing no later."""
    streams, events, groups = [0, 0, 0], dict[int, int](), dict[str, int]()
    for command in commands:
        if isinstance(command, Record):
            events[command.event] = streams[command.stream]
        elif isinstance(command, Wait):
            streams[command.stream] = max(streams[command.stream], events[command.event])
        elif isinstance(command, Kernel):
            streams[command.stream] += FlatCosts().kernel_ns(command)
        elif isinstance(command, Collective):
            begins = max(streams[command.stream], groups.get(command.group, 0))
            streams[command.stream] = groups[command.group] = begins + FlatCosts().collective_ns(command)
    longest = max([*streams, *groups.values()])
    assert int(simulate(program(*commands), FlatCosts(), repeats=1).end_ns.max(initial=0)) == longest


@settings(max_examples=100, deadline=None)
@given(st.lists(COMMANDS, min_size=1, max_size=30).map(distinct_events).filter(bool))
def test_more_bandwidth_is_never_slower_without_contention(commands: list[Command]) -> None:
    """One link a group, no slow-down: every end is monotonic in every length."""
    ends = [
        int(simulate(program(*commands), FlatCosts(bandwidth=bandwidth), repeats=1).end_ns.max())
        for bandwidth in (1, 2, 5, 1000)
    ]
    assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize("layers", [1, 4])
def test_with_infinite_bandwidth_the_step_is_its_compute(layers: int) -> None:
    commands: list[Command] = []
    for layer in range(layers):
        commands += [collective(10**6), Record(GATHER, layer), Wait(COMPUTE, layer), kernel(1000)]
    end = int(simulate(program(*commands), FlatCosts(bandwidth=10**9), repeats=1).end_ns.max())
    assert end == 1000 * layers + 1  # the first gather takes the shortest time there is


@settings(max_examples=150, deadline=None)
@given(
    st.lists(COMMANDS, min_size=1, max_size=40).map(distinct_events),
    st.integers(0, 9),
    st.sampled_from([0.0, 0.37]),
)
def test_kernels_run_on_as_they_do_step_by_step(commands: list[Command], issue: int, slow: float) -> None:
    costs = FlatCosts(issue_ns=issue, launch_latency_ns=2, slow=slow, links={"0": "net", "1": "net"})
    fast = simulate(program(*commands), costs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Simulation, "_run_on", lambda self: None)
        assert spans(simulate(program(*commands), costs)) == spans(fast)
