"""Build the C++ form once for each torch, Python and source, into the cache folder."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types

from comfy_multiproc.cache import cache_folder

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = ("vcard.cpp", "capacity.h", "build.py")
NAME = "comfy_virtual_card"
SECONDS = 600       # a build takes about 30 s; this bounds a machine that swaps, and the wait for another process's build


class BuildError(RuntimeError):
    """There is no compiler, or it failed; the message holds the end of its output."""


def compiler() -> str | None:
    """The C++ compiler: $CXX, else g++ or clang++; None if there is none. The form needs Linux."""
    if not sys.platform.startswith("linux"):
        return None
    return next((found for name in (os.environ.get("CXX"), "g++", "clang++") if name and (found := shutil.which(name))), None)


def library() -> pathlib.Path:
    """The built extension module, built now if need be. Any number of processes may call at once. Raises BuildError."""
    import filelock
    import torch
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    key = f"{torch.__version__}-{sys.implementation.cache_tag}-{digest.hexdigest()[:12]}"
    folder = cache_folder() / "virtual-card"
    target = folder / f"{NAME}-{key}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / f"{key}.lock", timeout=SECONDS):
            if not target.exists():
                _compile(target)
    except filelock.Timeout:
        raise BuildError(f"virtual card: another process has been building {target} for {SECONDS} s") from None
    return target


def load() -> types.ModuleType:
    """The extension module. Importing it registers the device. Raises BuildError."""
    path = library()
    spec = importlib.util.spec_from_file_location(NAME, path)
    if spec is None or spec.loader is None:
        raise BuildError(f"virtual card: {path} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(target: pathlib.Path) -> None:
    import torch
    from torch.utils import cpp_extension
    found = compiler()
    if found is None:
        raise BuildError("virtual card: the C++ form needs Linux and a C++ compiler (g++ or clang++, or $CXX)")
    libraries = cpp_extension.library_paths()
    handle, output = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    command = [found, "-O1", "-shared", "-fPIC", "-std=c++20", str(HERE / "vcard.cpp"), "-o", output,
               f"-DTORCH_EXTENSION_NAME={NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
               *(f"-isystem{p}" for p in (*cpp_extension.include_paths(), sysconfig.get_path("include"))),
               *(f"-L{p}" for p in libraries), *(f"-Wl,-rpath,{p}" for p in libraries), "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
        if done.returncode:
            raise BuildError(f"virtual card: {found} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        os.replace(output, target)
    except subprocess.TimeoutExpired:
        raise BuildError(f"virtual card: {found} has not finished in {SECONDS} s") from None
    finally:
        if os.path.exists(output):
            os.unlink(output)
