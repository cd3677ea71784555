"""Kernel files that say `import iris`, read where Iris's host half cannot be: it needs torch and a GPU's libraries."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from jaxtaxfree import language
from jaxtaxfree.kernels import iris as device

_lock = threading.RLock()
_WORDS = (
    *("load", "store", "copy", "get", "put", "quiet"),
    *(f"atomic_{name}" for name in ("add", "sub", "cas", "xchg", "xor", "or", "and", "min", "max")),
    *("Context", "DeviceContext", "Tile", "TileView", "TensorView", "AllReduceConfig", "make_tensor_view"),
)
# Of Iris's host half, for which placeholders stand.
_HOST = (
    *("Iris", "iris", "TraceEvent", "hip", "experimental", "tensor_creation", "bench", "do_bench", "logger"),
    *("set_logger_level", "get_device_id_for_rank", "CUDAArrayInterface", "tensor_from_ptr", "is_simulation_env"),
)
_WITHOUT = ("torch", "tritonblas")  # what kernel files import for their host half


class _Missing(types.ModuleType):
    """A module that is not there. What is taken from it can be passed on, but is nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:  # a decorator
            return args[0]
        return self

    def __or__(self, other: Any) -> Any:  # in annotations
        return self

    __ror__ = __or__

    def __getitem__(self, key: Any) -> Any:
        return self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:  # of a class that inherits from it
        return (object,)


class _Given(importlib.abc.Loader):
    """Loads a module that is there already."""

    def __init__(self, module: types.ModuleType):
        self._module = module

    def create_module(self, spec: Any) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of Iris without the `__init__` of any of its packages, and others in the place of some."""

    def __init__(self, home: Path | None, given: dict[str, types.ModuleType], without: Sequence[str]):
        self._home, self._given, self._without = home, given, without

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if name in self._given:
            return _spec(name, self._given[name])
        if top in self._without:
            return _spec(name, _Missing(name))
        if top != "iris" or self._home is None:
            return None
        place = self._home.joinpath(*name.split(".")[1:])
        if place.is_dir():
            return _spec(name, types.ModuleType(name), [str(place)])
        file = place.with_suffix(".py")
        return importlib.util.spec_from_file_location(name, file) if file.is_file() else None


def _spec(name: str, module: types.ModuleType, path: Sequence[str] = ()) -> importlib.machinery.ModuleSpec:
    spec = importlib.machinery.ModuleSpec(name, _Given(module), is_package=True)
    spec.submodule_search_locations = [*path]
    return spec


def home_of_iris() -> Path | None:
    """The folder of the installed Iris, which is not imported; None if there is none."""
    for entry in sys.path:  # other packages and files have that name as well
        place = Path(entry) / "iris"
        if (place / "mem" / "triton" / "ops.py").is_file():
            return place
    return None


@contextlib.contextmanager
def as_iris(*, own: bool = True, home: str | os.PathLike | None = None) -> Generator[types.ModuleType]:
    """While this lasts `import iris` gives device functions alone: those of `jaxtaxfree.iris`, or Iris's own.

    Iris's other modules, such as `iris.ccl.triton.all_gather`, are found where Iris is installed; no `__init__` of its
    packages runs, which would import torch. Where torch and tritonblas are not installed, placeholders stand for them,
    so that the host half of a kernel file can be read and not be run. All this is undone at the end; functions that
    were loaded go on working. Meanwhile no other thread lowers a program with a Triton kernel.

    Args:
      own: device functions of `jaxtaxfree.iris`, whose accesses are 16 bytes wide and whose atomics are of the system.
        False: those of the installed Iris.
      home: the folder of the package `iris`; None: where it is installed.

    Yields: the module `iris`.

    Raises:
      ModuleNotFoundError: if Iris's own functions are asked for and it is not installed.
    """
    with language.rebound(), _lock:  # Triton looks at torch, of which others may see a half or a placeholder
        place = Path(home) if home is not None else home_of_iris()
        if not own and place is None:
            raise ModuleNotFoundError("Iris is not installed, and home= names no folder of it.")
        missing = [name for name in _WITHOUT if name not in sys.modules and importlib.util.find_spec(name) is None]
        iris = types.ModuleType("iris")
        vars(iris).update({name: _Missing(f"iris.{name}") for name in _HOST})
        given = {"iris.host.tracing.kernel_artifacts": _artifacts()}
        if own:
            vars(iris).update({name: getattr(device, name) for name in _WORDS})
            given |= {f"iris.mem.triton.{name}": device for name in ("ops", "context", "types")}
            given |= dict.fromkeys(("iris.mem.triton", "iris.mem.utils", "iris.device.utils"), device)
            for part in ("device", "mem", "host"):
                if place is None or not (place / part).is_dir():
                    given[f"iris.{part}"] = types.ModuleType(f"iris.{part}")
        before = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_of_iris(name)}
        finder = _Finder(place, given, missing)
        sys.meta_path.insert(0, finder)
        try:
            iris.__path__ = [str(place)] if place else []
            sys.modules["iris"] = iris
            if not own:
                for module in map(
                    importlib.import_module, (f"iris.mem.triton.{x}" for x in ("context", "types", "ops"))
                ):
                    vars(iris).update({name: getattr(module, name) for name in _WORDS if hasattr(module, name)})
            yield iris
        finally:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if _is_of_iris(name) or name.partition(".")[0] in missing]:
                del sys.modules[name]
            sys.modules.update(before)


def _artifacts() -> types.ModuleType:
    module = types.ModuleType("iris.host.tracing.kernel_artifacts")
    vars(module)["iris_launch"] = None
    return module


def _is_of_iris(name: str) -> bool:
    return name.partition(".")[0] == "iris"


def kernels_of(what: str | os.PathLike, *, own: bool = True, home: str | os.PathLike | None = None) -> Any:
    """A file with Iris kernels, read under `as_iris`: a namespace whose attributes are what the file defines.

    Args:
      what: the path of a Python file, or a module of the installed Iris such as "iris.ccl.triton.all_gather".
      own, home: as in `as_iris`.
    """
    with as_iris(own=own, home=home):
        if not str(what).endswith(".py"):
            return importlib.import_module(str(what))
        path = Path(what).resolve()
        spec = importlib.util.spec_from_file_location(f"iris_kernels_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent))  # files import what lies beside them
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.parent))
        return module
