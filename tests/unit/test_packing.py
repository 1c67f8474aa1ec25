"""Padding by hand, and best-fit packing against what any packing must fulfil."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cli import call

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.packing import best_fit, estimate_packing
from fsdp2prof.readers.run.documents import read_lengths


def test_by_hand():
    # 9 is cut to 8. Padded: 4 x 8 = 32 for 18 tokens. Batches of 2: 5 + 5 and 8 + 8. Packed: [8], [5 3], [2].
    # Concatenated: 19 tokens in 3 sequences: 3 5 | 2 6 | 3.
    estimate = estimate_packing([3, 5, 2, 9], seq_len=8, batch_size=2)
    assert (estimate.tokens, estimate.truncated_documents, estimate.truncated_tokens) == (18, 1, 1)
    rows = {method.name: method for method in estimate.methods}
    counted = {name: (row.sequences, row.tokens, row.padding_tokens) for name, row in rows.items()}
    assert counted == {
        "padded": (4, 32, 14),
        "longest_in_batch": (4, 26, 8),
        "packed": (3, 24, 6),
        "concatenated": (3, 24, 5),
    }
    assert rows["concatenated"].cut_documents == 1
    # Pairs within documents 6 + 15 + 3 + 36, of 3 x 36.
    assert rows["packed"].useful_pairs_frac == pytest.approx(60 / 108)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_packing_loses_nothing_and_needs_few_bins(lengths):
    bins = best_fit(lengths, 50)
    assert sum(bins) == sum(lengths)
    assert max(bins) <= 50
    fewest = -(-sum(lengths) // 50)
    # Two bins that are both at most half full would have been one.
    assert fewest <= len(bins) <= max(2 * fewest, 1)


@pytest.mark.parametrize("text", ["3\n5\n2\n9\n", "[3, 5, 2, 9]", "3 5,2\t9"])
def test_files_of_lengths(tmp_path: Path, text: str):
    (tmp_path / "lengths").write_text(text)
    assert read_lengths(tmp_path / "lengths") == [3, 5, 2, 9]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("3\nfive\n", "'five' is not a whole number"),
        ("-3", "'-3' is no"),
        ("9" * 20, "no document has more"),
    ],
)
def test_a_file_of_something_else_is_told(tmp_path: Path, text: str, reason: str):
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(ModelError, match=reason):
        read_lengths(tmp_path / "lengths")


def test_no_documents():
    with pytest.raises(ModelError, match="no documents"):
        estimate_packing([], seq_len=8, batch_size=1)


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "lengths").write_text("3\n5\n2\n9\n")
    ended = call(capfd, "estimate", "packing", "--lengths", tmp_path / "lengths", "--seq-len", "8")
    assert ended.code == 0
    assert "to the longest in a batch" in ended.out
