"""Fixtures every test may use."""

from __future__ import annotations

import compileall
import gc
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings
from support.shared import FOLDER

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

REPOSITORY = Path(__file__).resolve().parents[1]


class _NoTorch(MetaPathFinder):
    """Refuses to import torch."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise for torch and what it holds, pass everything else on."""
        if fullname == "torch" or fullname.startswith("torch."):
            raise ModuleNotFoundError("this test imports torch: move it to tests/executed", name=fullname)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-torch", action="store_true", help="Refuse to import torch in the process of the tests."
    )


def pytest_configure(config: pytest.Config) -> None:
    # The product is a plugin's package, whose assertions pytest rewrites: seconds in every worker.
    config.pluginmanager.rewrite_hook._must_rewrite.discard("fsdp2prof")  # type: ignore[attr-defined]
    if not hasattr(config, "workerinput"):
        results = tempfile.TemporaryDirectory(prefix="fsdp2prof-tests-")
        os.environ[FOLDER] = results.name
        config.add_cleanup(results.cleanup)
        # Workers and the processes of tests read what is compiled once, also if told to write none of it.
        for folder in ("fsdp2prof", "analyzers", "estimators"):
            compileall.compile_dir(REPOSITORY / folder, quiet=2)
    if config.getoption("--without-torch"):
        sys.meta_path.insert(0, _NoTorch())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all cases of a test marked ``sampled(n)`` slow but ``n``, spread evenly over them.

    Integration tests come first: no worker is left alone with one of their long files at the end.
    """
    items.sort(key=lambda item: "integration" not in item.path.parts)
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for each in cases.values():
        mark = each[0].get_closest_marker("sampled")
        assert mark is not None
        chosen = {len(each) * n // mark.args[0] for n in range(mark.args[0])}
        for number, item in enumerate(each):
            if number not in chosen:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _recorder_is_on() -> Iterator[None]:
    """Switch on again what a test broke in the recorder of this process."""
    yield
    if (module := sys.modules.get("fsdp2prof.recorder.guard")) is not None:
        module.guard.reset()


@pytest.fixture
def forks() -> Iterator[None]:
    """For a test that forks: nothing that other tests left is freed in its child.

    A gloo process group is such garbage: its destructor joins a thread that the child does not have.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real traces and snapshots that this repository does not hold; skips where it is absent."""
    beside = REPOSITORY.parent / "shared" / "data"
    root = Path(os.environ.get("FSDP2PROF_REAL_DATA", beside))
    if not root.is_dir():
        pytest.skip("no real data: set FSDP2PROF_REAL_DATA to the folder that holds it")
    return root


@pytest.fixture(autouse=True)
def compiled_by_no_other_test() -> Iterator[None]:
    """Whether torch.compile compiled anything in the process decides what the recorder records."""
    yield
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()
