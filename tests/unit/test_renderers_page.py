"""A page: complete, offline, escaped; and the data formats beside it."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
from base64 import b64decode, b64encode
from typing import Any

import pytest
from support.documents import MIB, Said, document
from support.results import HOSTILE

from fsdp2prof.errors import UsageError
from fsdp2prof.reporters.document import Document
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions


def rendered(name: str, **options: Any) -> str:
    text = RENDERERS[name].render(document(), RenderOptions(**options))
    assert isinstance(text, str)
    return text


def page() -> str:
    return rendered("html", source=HOSTILE)


def without_scripts(text: str) -> str:
    return re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)


def unpacked(text: str) -> list[str]:
    """The scripts that a page unpacks, in order."""
    packed = re.findall(r"<script type=.application/gzip. data-script>(.*?)</script>", text)
    return [gzip.decompress(b64decode(script)).decode() for script in packed]


def test_hostile_text_is_escaped_everywhere() -> None:
    own = without_scripts(page())
    assert own.count("</script>") == 6  # of the figures, their colours, and four packed scripts
    assert "<img" not in own
    assert "\x1b" not in own
    assert own.count("&lt;/script&gt;&lt;img src=x") >= 7


def test_nothing_refers_outside() -> None:
    own = without_scripts(page())
    assert not re.search(r"<(img|iframe|link|object|embed|form|base)\b", own)
    assert not re.search(r"\s(src|on\w+)=", own.replace("src=x onerror=alert(1)", ""))
    assert set(re.findall(r'href="(.)', own)) == {"#"}


def test_scripts_are_allowed_by_their_hashes_alone() -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page())
    assert policy
    loader, packed = re.findall(r"<script>(.*?)</script>", page(), re.DOTALL), unpacked(page())
    hashes = [b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in (*loader, *packed)]
    assert re.findall("sha256-([^']+)", policy[1]) == hashes
    assert len(hashes) == 1 + 4, "what unpacks, tables' library and code, plotly and charts"
    assert "script-src 'unsafe" not in policy[1]


def test_numbers_carry_their_raw_value_and_names_their_whole() -> None:
    own = without_scripts(page())
    assert 'data-order="1234567">1.23</td>' in own
    long = "a.very.long.module.name." * 6
    assert f'title="{long}"' in own
    assert f"<span>{long[:60]}…{long[-59:]}</span>" in own.replace("<wbr>", "")
    assert 'title="void at::native::vectorized_elementwise_kernel&lt;4' in own


def test_every_heading_is_there_once_and_every_row_behind_a_fold() -> None:
    own = without_scripts(page())
    assert re.findall(r"<h2>(.*?)</h2>", own) == ["Warnings", "Findings", "Communication by layer"]
    assert [title.split(" <")[0] for title in re.findall(r"<h3>(.*?)</h3>", own)] == [
        "Memory over time",
        "Run",
        "Why",
        "Careful",
    ]
    assert "<summary>all 12 rows</summary>" in own


def test_names_in_sentences_are_set_as_code_and_escaped() -> None:
    own = without_scripts(page())
    assert "The worst is <code>layers.0</code>." in own
    assert "<code>&lt;b&gt;</code> is <code>text</code>." in own


def test_csv_is_raw_and_inert() -> None:
    groups = list(csv.reader(io.StringIO(rendered("csv"))))
    assert groups == [["fqn", "bytes"], ["'=HYPERLINK(1)", ""], ["a\\x1b]52;c;x\\x07", "5"]]
    by_layer = list(csv.DictReader(io.StringIO(rendered("csv", table="by_layer"))))
    assert len(by_layer) == 12
    assert int(by_layer[1]["payload_bytes"]) // MIB == 6
    assert by_layer[0]["exposed_ns"] == "1234567"
    assert [row["fqn"] for row in by_layer[:2]] == ["(root)", "(no layer)"]


def test_an_unknown_table_lists_the_tables() -> None:
    with pytest.raises(UsageError, match="--table nothing: the tables here are groups, by_layer"):
        rendered("csv", table="nothing")


def test_json_is_the_result_and_ascii_where_a_terminal_might_obey() -> None:
    text = rendered("json")
    assert json.loads(text) == {"schema": "test/1", "names": [HOSTILE, "\x9b31m"]}
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)


def test_a_file_name_that_is_not_utf_8_is_written_as_codes() -> None:
    said = Said(names=["runs/\udcff\x1b", "plain"])
    made = Document(title="t", result=said)
    text = RENDERERS["json"].render(made, RenderOptions())
    assert json.loads(text)["names"] == ["runs/\\xff\x1b", "plain"]
