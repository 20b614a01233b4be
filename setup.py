"""The metadata that depends on where the repository is published: REPOSITORY_URL, in the environment of the build.

A package index shows the README, whose links are relative. They lead to the tag of the release there; without an
address they are left out, since they would lead nowhere.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!\w+:|#)([^)\s]+)\)")
PAGES = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}


def linked(text: str, repository: str, tag: str) -> str:
    """Markdown whose relative links and pictures lead to a tag of the repository; without one, their words."""

    def absolute(match: re.Match[str]) -> str:
        mark, words, path = match.groups()
        kind = "raw" if mark else "blob"
        return f"{mark}[{words}]({repository}/{kind}/{tag}/{path})" if repository else words

    return LINK.sub(absolute, text)


def urls(repository: str, tag: str) -> dict[str, str]:
    """The project's addresses; none without a repository."""
    if not repository:
        return {}
    issues = {"Repository": repository, "Issues": f"{repository}/issues"}
    return issues | {name: f"{repository}/blob/{tag}/{path}" for name, path in PAGES.items()}


if __name__ == "__main__":
    address = os.environ.get("REPOSITORY_URL", "").rstrip("/")
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    release = f"v{version[1]}"
    setup(
        long_description=linked((ROOT / "README.md").read_text(encoding="utf-8"), address, release),
        long_description_content_type="text/markdown",
        project_urls=urls(address, release),
    )
