"""A backend of one small kernel, as the real ones are: ``kernel.py`` needs the CuTe DSL, ``backend.py`` does not."""
