"""The hand-made analyses that outputs are tested with are what the analyzers make of their parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.results import HOSTILE, memory_analysis, memory_comparison, run_summary

from fsdp2prof.analyzers.memory.peak import category_shares, fold_layers, layer_rows
from fsdp2prof.analyzers.memory.wording import comparison_verdict, memory_advice, memory_verdict
from fsdp2prof.analyzers.run_summary import shard_families


@pytest.mark.parametrize("name", [None, HOSTILE])
def test_memory_by_hand(name: str | None) -> None:
    analysis = memory_analysis(name)
    for rank in analysis.ranks:
        peak = rank.peak
        assert category_shares(peak.categories.items()) == peak.by_category
        assert layer_rows(peak.by_layer) == peak.layers
        assert fold_layers(peak.layers) == peak.layers_folded
    assert analysis.key_figures is not None
    assert memory_verdict(analysis.ranks, analysis.key_figures) == analysis.verdict
    assert memory_advice(analysis.ranks) == analysis.advice


def test_what_changed_by_hand() -> None:
    comparison = memory_comparison()
    assert comparison_verdict(replace(comparison, verdict=[])) == comparison.verdict


@pytest.mark.parametrize("name", [None, HOSTILE])
def test_groups_of_a_run_by_hand(name: str | None) -> None:
    summary = run_summary(name)
    assert shard_families(summary.shard_groups) == summary.shard_families
