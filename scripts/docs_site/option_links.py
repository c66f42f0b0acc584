"""Links from each code span that begins with a flag to the reference of that option. An extension of Sphinx."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-resolved", link_options)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def link_options(app: Sphinx, document: nodes.document, name: str) -> None:
    """Put a link around every code span that names an option, outside of titles and other links."""
    options = app.env.domains.standard_domain.progoptions
    for span in list(document.findall(nodes.literal)):
        words = span.astext().split()
        if not words or isinstance(span.parent, nodes.reference | nodes.title):
            continue
        page, anchor = options.get((None, words[0]), ("", ""))
        if page and page != name:
            span.replace_self(make_refnode(app.builder, name, page, anchor, span.deepcopy()))
