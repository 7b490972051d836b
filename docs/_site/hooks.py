"""Links of the pages to files of the repository lead somewhere on the site, too.

A page links to `../rust/kvtier-core/src/lib.rs`, as a reader of the repository needs it. Here each
such file becomes a page below `source/`, and the link leads there. Pages among them (`*.md`) are
shown as pages, and what they link to comes along; code is shown as code.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
_LANGUAGES = {".py": "python", ".pyi": "python", ".rs": "rust", ".toml": "toml", ".sh": "sh"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds a page for every file that is linked to, directly or through another one."""
    root = Path(config.config_file_path).parent
    pages = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    waiting = [path for name, text in pages.items() for path in _outside(name, text)]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            text = (root / path).read_text()
        except OSError as error:
            raise PluginError(f"a page links to {path}: {error.strerror}") from error
        if path.endswith(".md"):
            waiting += _outside(path, text)
            content = _rebased(text, path, _uri(path))
        else:
            language = _LANGUAGES.get(Path(path).suffix, "text")
            content = f"# {path}\n\n````{language}\n{text}\n````\n"
        content = f"---\nsearch:\n  exclude: true\n---\n{content}"
        files.append(File.generated(config, _uri(path), content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Has the links of our own pages lead to the added ones."""
    uri = page.file.src_uri
    return markdown if uri.startswith("source/") else _rebased(markdown, f"docs/{uri}", uri)


def _target(page: str, link: str) -> str:
    """The path in the repository that a link of a page means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _outside(page: str, text: str) -> list[str]:
    """Files outside of the documentation that a page links to."""
    targets = [_target(page, link) for link in _LINK.findall(text)]
    return [target for target in targets if not target.startswith("docs/")]


def _uri(path: str) -> str:
    """Where on the site a file of the repository is."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def _rebased(text: str, page: str, uri: str) -> str:
    """The text of a page of the repository with its links as they are from `uri` of the site."""
    folder = posixpath.dirname(uri) or "."
    return _LINK.sub(lambda link: posixpath.relpath(_uri(_target(page, link[1])), folder), text)
