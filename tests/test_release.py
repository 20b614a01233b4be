"""What a release is: a wheel and a source archive that twine accepts, and that work where nothing else is installed."""

import email
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from synthetic import random_trace

from lab.save import save_trace
from semmoe import __version__

ROOT = Path(__file__).parents[1]
IGNORED = ("__pycache__", "*.egg-info")
REPOSITORY = "https://git.example/semmoe"
LINK = re.compile(r"\]\(([^)\s]+)\)")
ENDS, BETWEEN = ("3.10", "3.13"), ("3.11", "3.12")  # the oldest and the newest, and the others


def run(*words, **more):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["cff-version"], cited["version"], cited["license"]) == ("1.2.0", __version__, "Apache-2.0")
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The folder with the wheel and the source archive."""
    folder = tmp_path_factory.mktemp("release")
    shutil.copytree(ROOT / "src", folder / "source" / "src", ignore=shutil.ignore_patterns(*IGNORED))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / "source" / name)
    published = os.environ | {"REPOSITORY_URL": f"{REPOSITORY}/"}
    run(sys.executable, "-m", "build", folder / "source", "--outdir", folder / "dist", env=published)
    return folder / "dist"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twine_accepts_a_wheel_of_the_package_and_a_source_archive(release):
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(release.iterdir()))
    (wheel,), (archive,) = release.glob("*.whl"), release.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {path.relative_to(ROOT / "src") for path in (ROOT / "src" / "semmoe").rglob("*") if path.is_file()}
    assert {str(path) for path in ours if "__pycache__" not in path.parts} <= names
    assert {name.split("/")[0] for name in names} == {"semmoe", f"semmoe-{__version__}.dist-info"}
    with tarfile.open(archive) as packed:
        assert {"pyproject.toml", "LICENSE", "README.md"} <= {Path(name).name for name in packed.getnames()}


@pytest.mark.slow
def test_links_on_a_package_index_lead_to_files_of_the_release(release):
    (wheel,) = release.glob("*.whl")
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(f"semmoe-{__version__}.dist-info/METADATA"))
    addresses = [line.split(", ")[1] for line in metadata.get_all("Project-URL")]
    assert REPOSITORY in addresses
    links = LINK.findall(metadata.get_payload())
    assert len(links) > 20
    own = [url for url in [*addresses, *links] if url.startswith(f"{REPOSITORY}/") and not url.endswith("/issues")]
    assert set(links) <= {*own, *(url for url in links if url.startswith("https://"))}
    for url in own:
        kind, tag, path = url.removeprefix(f"{REPOSITORY}/").split("#")[0].split("/", 2)
        assert (kind, tag) == ("raw" if path.endswith(".svg") else "blob", f"v{__version__}")
        assert (ROOT / path).is_file(), url


def test_without_an_address_the_page_has_no_link_that_leads_nowhere():
    metadata = runpy.run_path(str(ROOT / "setup.py"))
    text = metadata["linked"]((ROOT / "README.md").read_text(encoding="utf-8"), "", "v1")
    assert all(link.startswith("https://") for link in LINK.findall(text))
    assert "[the method and its rivals]" not in text
    assert "the method and its rivals" in text
    assert metadata["urls"]("", "v1") == {}


def interpreter(version):
    """A Python of this version: the one that runs this, one on the path, or pyenv's; None if there is none."""
    own = [sys.executable] if version == ".".join(map(str, sys.version_info[:2])) else []
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [*own, *sorted(pyenv.glob(f"{version}.*/bin/python")), shutil.which(f"python{version}")]
    runs = (path for path in found if path and not subprocess.run([path, "-c", ""], capture_output=True).returncode)
    return next(runs, None)


def works_alone(wheel, python, fresh, method):
    """Install the wheel into `fresh`, where nothing else is, then solve and replay the trace beside it."""
    folder = fresh.parent
    run(python, "-m", "venv", fresh)
    tools, environment = fresh / "bin", {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    run(tools / "pip", "install", "-q", "--disable-pip-version-check", "--no-compile", wheel, env=environment)
    assert run(tools / "semmoe", "--version", env=environment).strip() == __version__
    words = ["solve", "trace", "--ep-size", "4", "--attention", "dp", "--method", method, "--out", fresh / "plan"]
    run(tools / "semmoe", *words, cwd=folder, env=environment)
    run(tools / "semmoe", "replay", "trace", "--plan", fresh / "plan", cwd=folder, env=environment)
    lacking = subprocess.run([tools / "semmoe", "demo"], cwd=folder, env=environment, capture_output=True, text=True)
    assert lacking.returncode == 2
    assert f"{wheel}[transformers]" in lacking.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("versions", [ENDS, pytest.param(BETWEEN, marks=pytest.mark.costly)], ids=" ".join)
def test_the_wheel_works_without_extras_on_every_python(versions, release, tmp_path):
    """On the oldest and the newest all kernels of a solve are compiled, which takes most of the time."""
    (wheel,), method = release.glob("*.whl"), "semmoe" if versions == ENDS else "linear"
    save_trace(random_trace(0, requests=40), tmp_path / "trace")
    found = {version: python for version in versions if (python := interpreter(version))}
    with ThreadPoolExecutor(2) as two:
        list(two.map(lambda version: works_alone(wheel, found[version], tmp_path / version, method), found))
    if absent := [version for version in versions if version not in found]:
        warnings.warn(f"not tried on Python {', '.join(absent)}, which is not here", stacklevel=1)
