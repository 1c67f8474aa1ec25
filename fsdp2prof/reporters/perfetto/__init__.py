"""All ranks of a run as one trace for Perfetto, with tracks that a recorded trace does not have."""

from fsdp2prof.reporters.perfetto.clock import RankClock, rank_clocks
from fsdp2prof.reporters.perfetto.collective_flows import FlowPoint, collective_flows
from fsdp2prof.reporters.perfetto.finding_events import finding_events
from fsdp2prof.reporters.perfetto.memory_events import memory_events
from fsdp2prof.reporters.perfetto.rank_events import rank_events

__all__ = [
    "FlowPoint",
    "RankClock",
    "collective_flows",
    "finding_events",
    "memory_events",
    "rank_clocks",
    "rank_events",
]
