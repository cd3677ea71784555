"""Iris's device functions and kernels, from its wheel and from a checkout, without its host half.

`import iris` needs torch and a runtime library of AMD or NVIDIA. Kernels need `iris.mem` alone, so its modules are
loaded under a package that is empty but for them, and are taken out of `sys.modules` again.
"""

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
import types
from collections.abc import Generator
from typing import Any

import pytest

from tests.helpers import stages

_FUNCTIONS = "load store copy get put " + " ".join(
    f"atomic_{name}" for name in ("add", "cas", "xchg", "xor", "or", "and", "min", "max")
)
_modules: dict[str, types.ModuleType] = {}  # all that were loaded, while nobody loads


class _Anything(types.ModuleType):
    """A module of which kernels use nothing, though the host's functions beside them do."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self


def _home() -> pathlib.Path:
    """The folder of the installed package. Skips the test if there is none."""
    spec = importlib.machinery.PathFinder.find_spec("iris")  # whatever was imported by that name
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs Iris's device functions: pip install --no-deps tokenspeed-iris")
    return pathlib.Path(spec.submodule_search_locations[0])


def _package(name: str, path: pathlib.Path) -> types.ModuleType:
    module: Any = types.ModuleType(name)
    module.__path__ = [str(path)]
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


@contextlib.contextmanager
def _iris() -> Generator[None]:
    """While this lasts, `import iris` finds the modules that kernels need."""
    home = _home()
    stubs = ("torch", "torch.distributed", "torch.multiprocessing", "tritonblas", "tritonblas.kernels")
    names = ("iris", *stubs)
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("iris", *stubs)}
    for name in before:
        del sys.modules[name]
    sys.modules.update(_modules)
    try:
        if not _modules:
            for name in stubs:
                module: Any = _Anything(name)
                module.__path__ = []
                sys.modules[name] = module
            sys.modules["tritonblas.kernels.stages"] = stages
            iris: Any = _package("iris", home)
            for name in ("device", "ccl", "ccl.triton", "ops", "host", "host.tracing", "host.distributed"):
                _package(f"iris.{name}", home.joinpath(*name.split(".")))
            for name in ("host.tracing.kernel_artifacts", "host.distributed.helpers"):
                sys.modules[f"iris.{name}"] = _Anything(f"iris.{name}")
            context = importlib.import_module("iris.mem.triton.context")
            operations = importlib.import_module("iris.mem.triton.ops")
            views = importlib.import_module("iris.mem.triton.types")
            iris.Context = iris.DeviceContext = context.Context
            for name in ("Tile", "TileView", "TensorView", "AllReduceConfig", "make_tensor_view"):
                setattr(iris, name, getattr(views, name))
            for name in _FUNCTIONS.split():
                setattr(iris, name, getattr(operations, name))
            iris.TraceEvent = importlib.import_module("iris.host.tracing.events").TraceEvent
        yield
    finally:
        ours = [name for name in sys.modules if name.split(".")[0] in names]
        _modules.update({name: sys.modules.pop(name) for name in ours})
        sys.modules.update(before)


@functools.cache
def module(name: str = "iris") -> Any:
    """A module of the wheel."""
    with _iris():
        return importlib.import_module(name)


def planted(name: str, text: str, instead: str, folder: pathlib.Path) -> Any:
    """A module of the wheel with a fault: `instead` in place of `text`, which occurs once."""
    file = _home().joinpath(*name.split(".")[1:]).with_suffix(".py")
    source = file.read_text()
    assert source.count(text) == 1, f"{text!r} occurs {source.count(text)} times in {file}"
    faulty = folder / file.name
    faulty.write_text(source.replace(text, instead))
    module(name)
    with _iris():
        spec = importlib.util.spec_from_file_location(name, faulty)
        assert spec is not None and spec.loader is not None, faulty
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return loaded


@functools.cache
def example(path: str) -> Any:
    """A file of the checkout's folder `examples`. Skips the test if there is no checkout."""
    checkout = os.environ.get("JAXTAXFREE_IRIS_EXAMPLES")
    if not checkout:
        pytest.skip("needs Iris's examples: set JAXTAXFREE_IRIS_EXAMPLES to a checkout of Iris, or its folder examples")
    root = pathlib.Path(checkout)
    file = (root / "examples" if (root / "examples").is_dir() else root) / path
    with _iris():
        sys.path.insert(0, str(file.parent))
        try:
            spec = importlib.util.spec_from_file_location(f"iris_example_{file.stem}", file)
            assert spec is not None and spec.loader is not None, file
            loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
        finally:
            sys.path.remove(str(file.parent))
    return loaded
