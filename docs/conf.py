"""Sphinx configuration."""

project = "gdn-qualify"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
napoleon_use_ivar = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
html_theme = "alabaster"
html_title = "gdn-qualify"
