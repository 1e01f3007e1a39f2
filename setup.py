"""The C++ extension; everything declarative is in pyproject.toml."""

from setuptools import setup

setup()
