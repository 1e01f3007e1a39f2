"""cudnn_dsa: the backward pass of DeepSeek sparse attention."""

from cudnn_dsa._version import __version__

__all__ = ["__version__"]
