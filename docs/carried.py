"""Files of the repository that pages link to go into the site too, under `repository/`: results, examples, cards.

MkDocs knows only what lies in docs/, where a link to `../benchmarks/results/x.txt` leads outside.
"""

import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File

LINK = re.compile(r"(?<=\]\()((?:\.\./)+)([^)#\s]+)")
FOLDER = "repository"


def linked(page: Path, root: Path) -> set[str]:
    """Files outside docs/ that a page links to, as paths from the root of the repository."""
    text = page.read_text(encoding="utf-8")
    found = {(page.parent / dots / path).resolve() for dots, path in LINK.findall(text)}
    return {path.relative_to(root).as_posix() for path in found if path.is_relative_to(root) and path.is_file()}


def on_files(files, config):
    docs = Path(config.docs_dir).resolve()
    root = docs.parent
    for path in sorted(set().union(*(linked(page, root) for page in docs.glob("*.md")))):
        files.append(File.generated(config, f"{FOLDER}/{path}", abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """`../x` leads to where x is carried, where it is."""
    depth = len(PurePosixPath(page.file.src_uri).parent.parts)

    def carried(match: re.Match) -> str:
        target = f"{FOLDER}/{match[2]}"
        known = depth == 0 and files.get_file_from_path(target) is not None
        return target if known else match[0]

    return LINK.sub(carried, markdown)
