"""RESULTS.md, which lies beside the folder of the pages, as one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parents[1] / "RESULTS.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(
        File.generated(config, "RESULTS.md", content=RESULTS.read_text("utf-8").replace("(docs/", "("))
    )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace("(../RESULTS.md", "(RESULTS.md")
