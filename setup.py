"""The C++ extension; everything declarative is in pyproject.toml.

The extension is optional. A build whose environment has no torch (pip's isolated build) or no C++ compiler, or with
SKIP_EXTENSION=1, makes the pure-Python package and says so. Whoever asks for the extension (`python setup.py
build_ext`) gets it or an error.
"""

import glob
import os
import shutil
import sys

from setuptools import Extension, setup
from setuptools.command.build_py import build_py


class BuildPython(build_py):
    """Puts the emulator's C++ sources beside its package: it compiles them where it runs, for that machine."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_tree("csrc/emulator", os.path.join(self.build_lib, "cute_emulator", "csrc"))


def why_not() -> str | None:
    """Why the extension is not built, or None if it is."""
    if os.environ.get("SKIP_EXTENSION") == "1":
        return "SKIP_EXTENSION=1"
    try:
        import torch  # noqa: F401
    except ImportError:
        return "torch is not installed in the build environment (pip install --no-build-isolation uses yours)"
    compiler = os.environ.get("CXX", "c++").split()[0]
    if not any(shutil.which(name) for name in (compiler, "g++", "clang++")):
        return f"no C++ compiler found ({compiler})"
    return None


def extension() -> dict:
    """The keyword arguments of setup() that build cudnn_dsa/_C.so, a library for torch.ops.load_library()."""
    from torch.utils import cpp_extension

    library = Extension(
        "cudnn_dsa._C",
        sorted(glob.glob("csrc/cpu/*.cpp")),
        depends=sorted(glob.glob("csrc/cpu/*.h")),
        language="c++",
        include_dirs=cpp_extension.include_paths(),
        library_dirs=cpp_extension.library_paths(),
        libraries=["c10", "torch", "torch_cpu"],
        # Without -fopenmp at::parallel_for, which is inline, would run on one thread. Each isa_*.cpp chooses its
        # instruction set itself; -Wno-psabi: vectors are passed between inline functions only.
        extra_compile_args=["-O3", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wno-psabi", "-g0"],
        extra_link_args=["-fopenmp"],
    )
    # A library without a Python module in it needs no ABI suffix: the name is the same for every interpreter.
    build_ext = cpp_extension.BuildExtension.with_options(no_python_abi_suffix=True)
    return {"ext_modules": [library], "cmdclass": {"build_ext": build_ext}}


reason = why_not()
if reason is not None:
    if "build_ext" in sys.argv:
        sys.exit(f"cudnn_dsa: cannot build the C++ extension: {reason}")
    print(f"cudnn_dsa: building without the C++ extension: {reason}", file=sys.stderr)
arguments: dict = {} if reason else extension()
setup(**arguments | {"cmdclass": {"build_py": BuildPython, **arguments.get("cmdclass", {})}})
