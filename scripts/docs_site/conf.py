"""Settings of Sphinx for the site. Warnings are errors (`make_docs.py`)."""

from __future__ import annotations

from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.highlighting import lexers

import eagleray

project = "eagleray"
version = release = eagleray.__version__
extensions = ["myst_parser", "sphinx_copybutton", "docs_site.option_links"]
include_patterns = ["**.md"]
default_role = "code"
highlight_language = "text"
lexers["hex"] = TextLexer()

myst_heading_anchors = 5
"""Levels of headings that links reach, by the anchors that code hosts give them."""

html_theme = "furo"
html_title = f"eagleray {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options: dict[str, Any] = {"top_of_page_buttons": []}
html_permalinks_icon = "#"

copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"
