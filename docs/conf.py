"""Sphinx configuration: `make docs`."""

import os
import sys

sys.path.insert(0, os.path.abspath(".."))

from cudnn_dsa import __version__

project = "cudnn_dsa"
copyright = "2026, the cudnn_dsa developers"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
suppress_warnings = ["myst.xref_missing"]
