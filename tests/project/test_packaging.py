"""The package list, the wheel, the versions, which module may import which, and how long modules and functions are."""

from __future__ import annotations

import ast
import importlib
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping

import pytest

import jaxtaxfree
from jaxtaxfree import private

ROOT = pathlib.Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def sources() -> list[pathlib.Path]:
    """Every module of the package, relative to the repository."""
    return sorted(
        path.relative_to(ROOT) for folder in ("jaxtaxfree", "kernels") for path in (ROOT / folder).rglob("*.py")
    )


def installed(path: pathlib.Path) -> pathlib.Path:
    """Where a module lies once installed: kernels/ becomes jaxtaxfree/kernels/."""
    return pathlib.Path("jaxtaxfree") / path if path.parts[0] == "kernels" else path


def test_package_list_is_complete() -> None:
    folders = {installed(path).parent for path in sources()}
    with_init = {installed(path).parent for path in sources() if path.name == "__init__.py"}
    assert folders == with_init, "a folder of modules has no __init__.py"
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(".".join(f.parts) for f in with_init)


def test_wheel_holds_every_module(tmp_path: pathlib.Path) -> None:
    # Built from a copy: setuptools leaves build/ behind, and would pack what an earlier build left there.
    tree = tmp_path / "tree"
    for folder in ("jaxtaxfree", "kernels"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    built = subprocess.run([*command, "--wheel-dir", tmp_path, tree], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr

    (wheel,) = tmp_path.glob("*.whl")
    names = {pathlib.Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    packed = {name for name in names if ".dist-info" not in name.parts[0]}
    tables = {path.relative_to(ROOT) for path in (ROOT / "jaxtaxfree" / "tuned").glob("*/*.json")}
    expected = {installed(path) for path in sources()} | {pathlib.Path("jaxtaxfree/py.typed")} | tables
    assert pathlib.Path("jaxtaxfree/kernels/__init__.py") in expected
    assert packed == expected


def test_kernels_is_no_top_level_package() -> None:
    with pytest.raises(ImportError, match=r"import `jaxtaxfree\.kernels` instead"):
        importlib.import_module("kernels")


def test_versions_agree() -> None:
    changelog = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert jaxtaxfree.__version__ == PYPROJECT["project"]["version"] == changelog[0]


def imports(path: pathlib.Path, tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports: `from a import b` gives a.b, whether b is a module or not."""
    package = installed(path).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def mentions(tree: ast.AST, word: str) -> bool:
    """Whether a name in the code (not in its comments or strings) contains the word."""
    return any(
        word in name
        for node in ast.walk(tree)
        for name in (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None))
        if isinstance(name, str)
    )


WATCHED = ("triton", "typing", "__future__", "jax_triton", "cuda.bindings") + tuple(
    f"jaxtaxfree.{name}" for name in ("heap", "kernels", "shmem")
)


def violations(path: pathlib.Path, source: str) -> list[str]:
    """Imports run one way: ops, then shmem, then kernels; the heap and the simulator beside them, reached by shmem."""
    tree, found = ast.parse(source), []
    in_kernels, in_heap, in_ops = map(path.is_relative_to, ("kernels", "jaxtaxfree/heap", "jaxtaxfree/ops"))
    in_simulator = path.is_relative_to("jaxtaxfree/simulator")
    for name in imports(path, tree):
        module = next((module for module in WATCHED if f"{name}.".startswith(f"{module}.")), None)
        # typing: Triton takes a group of arguments as a NamedTuple.
        if in_kernels and module not in ("triton", "jaxtaxfree.kernels", "typing", "__future__"):
            found.append(f"{path} imports {name}: kernels import Triton and each other only")
        elif module == "jax_triton" and path != pathlib.Path("jaxtaxfree/shmem.py"):
            found.append(f"{path} imports {name}: only jaxtaxfree/shmem.py may")
        elif module == "cuda.bindings" and not in_heap and path != pathlib.Path("jaxtaxfree/doctor.py"):
            found.append(f"{path} imports {name}: only jaxtaxfree/heap/ and the doctor may")
        elif module == "jaxtaxfree.heap" and in_ops:
            found.append(f"{path} imports {name}: ops reach the heap through jaxtaxfree.shmem")
        elif module == "jaxtaxfree.shmem" and in_simulator:
            found.append(
                f"{path} imports {name}: jaxtaxfree.shmem imports the simulator, and jaxtaxfree.call is for both"
            )
    # The simulator says what assembly means, and holds none.
    holds = "kernels/shmem.py", "kernels/blocks/widen.py"
    if mentions(tree, "inline_asm") and str(path) not in (*holds, "jaxtaxfree/simulator/gluon.py"):
        found.append(f"{path} holds inline assembly: only {' and '.join(holds)} may")
    return found


@pytest.mark.parametrize("path", sources(), ids=str)
def test_no_error_is_its_own_cause(path: pathlib.Path) -> None:
    # JAX follows the causes of an error to their end, for ever if they go round.
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.cause, ast.Name) and not isinstance(node.exc, ast.Call):
            names = {name.id for name in ast.walk(node.exc) if isinstance(name, ast.Name)}
            assert node.cause.id not in names, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", sources(), ids=str)
def test_imports_run_one_way(path: pathlib.Path) -> None:
    assert not violations(path, (ROOT / path).read_text())


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/tiles.py", "import numpy"),
        ("kernels/tiles.py", "from jaxtaxfree import heap"),
        ("kernels/tiles.py", "from .. import shmem"),
        ("kernels/tiles.py", "tl.inline_asm_elementwise('', '', [], 0, False, 1)"),
        ("jaxtaxfree/ops/all_gather_matmul.py", "import jax_triton as jt"),
        ("jaxtaxfree/ops/all_gather_matmul.py", "from jaxtaxfree import heap"),
        ("jaxtaxfree/ops/all_gather_matmul.py", "from ..heap import symmetric"),
        ("jaxtaxfree/ops/all_gather_matmul.py", "def f():\n    from cuda.bindings import driver"),
        ("jaxtaxfree/shmem.py", "from cuda import bindings"),
        ("jaxtaxfree/simulator/session.py", "from jaxtaxfree.shmem import check_call"),
    ],
)
def test_wrong_imports_are_found(path: str, source: str) -> None:
    assert len(violations(pathlib.Path(path), source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/tiles.py", "import triton.language as tl\nfrom . import shmem\nfrom .shmem import put"),
        ("kernels/shmem.py", "tl.inline_asm_elementwise('', '', [], 0, False, 1)"),
        ("jaxtaxfree/shmem.py", "import jax_triton\nfrom jaxtaxfree import heap, kernels"),
        ("jaxtaxfree/heap/memory.py", "from cuda.bindings import driver"),
        ("jaxtaxfree/ops/all_gather_matmul.py", "from jaxtaxfree.shmem import shmem_call\n# no inline_asm"),
    ],
)
def test_right_imports_pass(path: str, source: str) -> None:
    assert not violations(pathlib.Path(path), source)


def module_of(path: pathlib.Path) -> str:
    """The name by which a module is imported."""
    return ".".join(installed(path).with_suffix("").parts).removesuffix(".__init__")


def circles(modules: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """The largest sets of modules that import each other, directly or through others.

    Args:
      modules: by name, all that a module imports; see `imports`. An import of a name out of a module is one of it.
    """

    def known(name: str) -> str | None:
        return name if name in modules else known(name.rpartition(".")[0]) if "." in name else None

    reached = {name: {other for each in found if (other := known(each))} - {name} for name, found in modules.items()}
    while True:
        further = {name: found.union(*(reached[other] for other in found)) for name, found in reached.items()}
        if further == reached:
            break
        reached = further
    found = {
        frozenset(other for other in reached if other in reached[name] and name in reached[other]) for name in reached
    }
    return [set(circle) for circle in found if circle]


# Where modules import each other so far.


def test_no_modules_import_each_other() -> None:
    """Imports inside functions and for type checkers count: who reads the code follows them, too."""
    modules = {module_of(path): set(imports(path, ast.parse((ROOT / path).read_text()))) for path in sources()}
    assert circles(modules) == []


def test_circles_are_found() -> None:
    modules = {"a": ["a.b.name"], "a.b": ["os", "a.c"], "a.c": ["a.b.other"], "a.d": ["a.b", "a.e"], "a.e": []}
    assert circles(modules) == [{"a.b", "a.c"}]
    modules["a.c"] = ["a.e.name"]
    assert circles(modules) == []
    modules["a.e"] = ["a.d.name"]
    assert circles(modules) == [{"a.b", "a.c", "a.d", "a.e"}]


LONGEST_MODULE = 600
LONGEST_FUNCTION = 80


def too_long(source: str) -> Iterator[str]:
    """What is longer than a reader takes in: a module, or a function without its docstring."""
    if (lines := len(source.splitlines())) > LONGEST_MODULE:
        yield f"the module has {lines} lines: split it into several with one purpose each, of {LONGEST_MODULE} at most"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if lines > LONGEST_FUNCTION:
                yield f"{node.name} has {lines} lines: split it into several of {LONGEST_FUNCTION} at most"


# kernels/ apart: a kernel is one function, and the device API one list of words.
@pytest.mark.parametrize("path", [path for path in sources() if path.parts[0] == "jaxtaxfree"], ids=str)
def test_modules_and_functions_are_short(path: pathlib.Path) -> None:
    assert list(too_long((ROOT / path).read_text())) == []


def test_what_is_long_is_found() -> None:
    function = 'def f():\n    """Does\n    nothing.\n    """\n' + "    x = 1\n" * 79
    assert list(too_long(function)) == []
    assert list(too_long(function + "    x = 1\n")) == ["f has 81 lines: split it into several of 80 at most"]
    assert list(too_long("x = 1\n" * 600)) == []
    assert [each.partition(":")[0] for each in too_long("x = 1\n" * 601)] == ["the module has 601 lines"]


def test_what_is_private_in_jax_is_listed() -> None:
    """All that modules import from `jax._src` at their top, and nothing else; a name that is gone is one sentence."""
    found: dict[str, set[str]] = {}
    for path in sources():
        for node in ast.parse((ROOT / path).read_text()).body:
            names = [alias.name for alias in getattr(node, "names", ())]
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax._src"):
                found.setdefault(node.module or "", set()).update(names)
            assert not (isinstance(node, ast.Import) and any(name.startswith("jax._src") for name in names)), path
    assert found == {module: set(names) for module, names in private.NAMES.items()}
    program = (
        "import jax._src.core as c, jax._src.util as u; del c.get_axis_env, u.weakref_lru_cache; import jaxtaxfree"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: jaxtaxfree does not know JAX ") and "install an older one" in last
    assert "has no jax._src.core.get_axis_env, jax._src.util.weakref_lru_cache: " in last
