"""Pages that mkdocs builds beside those in this folder: the references, and files that pages link
to."""

import re
import sys
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# mkdocs loads a hook by its path, not as part of a package.
sys.path.insert(0, str(Path(__file__).parent))

import reference  # noqa: E402

RELATIVE = re.compile(r"\[([^\]\n]+)\]\((?!https?:)[^)\s]+\)")
OUTSIDE = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the references, and the files of the repository that a page links to."""
    for name, text in reference.pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    for path in sorted(linked_files()):
        content = (ROOT / path).read_text(encoding="utf-8")
        # Links within the file are relative to its own folder in the repository: only their text is
        # kept.
        content = RELATIVE.sub(r"\1", content) if path.endswith(".md") else content
        files.append(File.generated(config, f"source/{path}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **more: Any) -> str:
    """Rewrite links that leave this folder so that they lead to the copies in the site."""
    folder = Path(page.file.src_uri).parent.as_posix()

    def turned(link: re.Match[str]) -> str:
        start, target, anchor, end = link.groups()
        path = outside(folder, target)
        if path is None:
            return link.group(0)
        return f"{start}{relpath(f'source/{path}', folder)}{anchor or ''}{end}"

    return OUTSIDE.sub(turned, markdown)


def linked_files() -> set[str]:
    """Files outside this folder that pages link to, relative to the repository."""
    found = set()
    for page in DOCS.rglob("*.md"):
        folder = page.parent.relative_to(DOCS).as_posix()
        for link in OUTSIDE.finditer(page.read_text(encoding="utf-8")):
            path = outside(folder, link.group(2))
            if path is not None:
                found.add(path)
    return found


def outside(folder: str, target: str) -> str | None:
    """The target of a link of a page in `folder`, relative to the repository; None if it is not a
    file outside docs/."""
    path = normpath(f"docs/{folder}/{target}")
    return None if path.startswith("docs/") or not (ROOT / path).is_file() else path
