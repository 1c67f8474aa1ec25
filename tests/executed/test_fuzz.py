"""Whatever is spoiled in whatever file: a result or one line; in bounded time and memory; nothing escapes.

300 inputs here, 10,000 with ``-m slow``; the same ones every time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fuzz_kinds import KINDS
from support.fuzzing import good, limited, spoil

from fsdp2prof.errors import Fsdp2ProfError
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions

FEW, MANY = 300, 10_000
_LIVE = {
    "text": re.compile(r"\x1b|\x07"),
    "html": re.compile(r"<script>alert\(1\)|<img src=x onerror|\x1b|\x07"),
}
"""What was put into names to be executed, where it would be; renderers write it as text."""

Found = Counter[str]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A folder of each kind with what belongs to its good document, and the document."""

    @cache
    def make(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(name.replace(" ", "-")) / "inside"
        folder.mkdir()
        return folder, good(KINDS[name], folder)

    return make


def use(name: str, folder: Path, document: Any, seed: int) -> str:
    """Spoil, store and use a document; says how it ended, and fails for anything but a result or a line."""
    kind = KINDS[name]
    content = spoil(kind, document, seed)
    (folder / kind.file).write_bytes(content)
    around = sorted(folder.parent.rglob("*"))
    try:
        with limited():
            made = kind.use(folder)
    except Fsdp2ProfError as error:
        refusal = str(error)
        assert "\n" not in refusal
        assert len(refusal) < 5000
        return "refused"
    finally:
        assert sorted(folder.parent.rglob("*")) == around, "a file was written, or removed"
    for result in made if isinstance(made, list) else [made]:
        if result is not None and seed % 8 == 0:
            for form, live in _LIVE.items():
                page = RENDERERS[form].render(build(result), RenderOptions(source="it", verbose=True))
                assert not live.search(str(page)), f"{form} holds markup or escapes of the input"
    return "used"


def check(documents: Callable[[str], tuple[Path, Any]], kinds: list[str], examples: int) -> Found:
    found: Found = Counter()

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.sampled_from(kinds), st.integers(0, 2**48))
    def fuzz(name: str, seed: int) -> None:
        found[f"{name} {use(name, *documents(name), seed)}"] += 1

    fuzz()
    return found


def test_few(documents: Callable[[str], tuple[Path, Any]]) -> None:
    found = check(documents, sorted(KINDS), FEW)
    assert {key.rpartition(" ")[0] for key in found} == set(KINDS)
    assert {key.rpartition(" ")[2] for key in found} == {"used", "refused"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", KINDS)
def test_many(documents: Callable[[str], tuple[Path, Any]], name: str) -> None:
    found = check(documents, [name], -(-MANY // len(KINDS)))
    assert found[f"{name} refused"], "nothing was spoiled"
    assert found[f"{name} used"] or name == "gzip", "its checksum finds whatever is spoiled in a gzip file"


@pytest.mark.parametrize("name", KINDS)
def test_the_document_that_is_spoiled_is_good(
    documents: Callable[[str], tuple[Path, Any]], name: str
) -> None:
    folder, document = documents(name)
    kind = KINDS[name]
    (folder / kind.file).write_bytes(kind.encode(document))
    kind.use(folder)
