"""The wheel holds every package under ``fsdp2prof`` and nothing beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[2]
OUTSIDE = {"analyzers": "fsdp2prof/analyzers", "estimators": "fsdp2prof/estimators"}


def source_files() -> set[str]:
    """Path inside the wheel of every Python source of the product."""
    inside = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "fsdp2prof").rglob("*.py")
        if path.parent.resolve().is_relative_to(REPOSITORY / "fsdp2prof")
    }
    outside = {
        f"{target}/{path.relative_to(REPOSITORY / folder)}"
        for folder, target in OUTSIDE.items()
        for path in (REPOSITORY / folder).rglob("*.py")
    }
    return inside | outside


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist from a clean copy of the tracked files, and the wheel from that sdist."""
    target = tmp_path_factory.mktemp("dist")
    clone = tmp_path_factory.mktemp("source") / "fsdp2prof"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    for name in filter(None, listed):
        source = REPOSITORY / os.fsdecode(name)
        copy = clone / os.fsdecode(name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.symlink_to(source.readlink())
        elif source.is_file():
            copy.write_bytes(source.read_bytes())
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(clone)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = target.glob("*.whl")
    return built


def test_wheel_holds_every_source_once(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    sources = [name for name in names if name.endswith(".py")]
    assert sorted(sources) == sorted(source_files())
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"fsdp2prof"}


def test_wheel_holds_the_data_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "fsdp2prof/py.typed" in names
    assets = {
        f"fsdp2prof/reporters/assets/{p.name}" for p in (REPOSITORY / "fsdp2prof/reporters/assets").iterdir()
    }
    assert assets <= names
    pages = {f"fsdp2prof/agents/{name}.md" for name in ("SKILL", "units", "join-keys")}
    assert pages <= names


def test_wheel_registers_the_pytest_plugin(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [points] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "[pytest11]\nfsdp2prof = fsdp2prof.pytest_plugin\n" in archive.read(points).decode()


def test_installed_wheel_starts(wheel, tmp_path):
    site = tmp_path / "site"
    install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run([sys.executable, *install], check=True, timeout=120)
    code = (
        "import fsdp2prof, fsdp2prof.analyzers, fsdp2prof.estimators, pathlib;"
        "print(pathlib.Path(fsdp2prof.__file__).parent.parent);"
        "print(pathlib.Path(fsdp2prof.analyzers.__file__).parent.parent.parent)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(site), str(site)]


def test_every_package_is_listed():
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == {str(Path(name).parent).replace("/", ".") for name in source_files()}
