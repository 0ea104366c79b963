"""Links within the documentation lead to existing files and headings."""

import re

from support.docs.pages import ROOT, anchors, name_of, pages, prose

LINK = re.compile(r"\]\(([^)\s]+)\)")
MADE = {"docs/reference/api.md", "docs/reference/commands.md", "docs/reference/configuration.md"}
"""Pages that the build makes: docs/site/reference.py."""


def test_no_link_is_broken() -> None:
    """Files and headings that links name exist; links out of the repository use HTTPS."""
    broken, num_links = [], 0
    for page in pages():
        for target in LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page))):
            num_links += 1
            if "://" in target:
                if not target.startswith("https://"):
                    broken.append(f"{name_of(page)}: {target} is not https")
                continue
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            if str(found.relative_to(ROOT)) in MADE:
                continue
            if not found.exists():
                broken.append(f"{name_of(page)}: no {target}")
            elif anchor and anchor not in anchors(found):
                broken.append(f"{name_of(page)}: {path or 'it'} has no heading #{anchor}")
    assert num_links > 150
    assert broken == []
