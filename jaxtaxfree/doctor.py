"""What works on this machine, and how to mend what does not: `python -m jaxtaxfree doctor`.

Checks are small functions that return `Finding`s; they get their facts from the functions above them, which tests
replace. JAX starts in subprocesses only: there its GPU memory pool, a crash or a hang cannot disturb the other checks.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Status = Literal["OK", "note", "FAIL"]

OLDEST = {"Python": "3.12", "jax": "0.11.2", "jaxlib": "0.11.2", "jax-triton": "0.4.1", "triton": "3.9"}
OLDEST_CUDA_BINDINGS = "13"
OLDEST_CUDA = (13, 0)

GIB = 1 << 30
NO_CUDA_DEVICE = "no CUDA device"
INSTALL_CUDA = 'Install the CUDA packages that go with this JAX: pip install -U "jax[cuda13]" "cuda-bindings>=13".'


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the table. `mend` says in one sentence what to do about a failure."""

    name: str
    status: Status
    found: str
    mend: str = ""


# Facts


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def python_version() -> str:
    return platform.python_version()


@functools.cache
def gpu_count() -> int:
    """How many GPUs the NVIDIA driver shows this process. Needs no Python package, to tell which are missing."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if libcuda.cuInit(0) != 0 or libcuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def driver_call(name: str, *arguments: Any) -> Any:
    """Calls a function of the CUDA driver and returns its value, or raises with the driver's error name."""
    from cuda.bindings import driver

    for function, values in (("cuInit", (0,)), (name, arguments)):
        error, *results = getattr(driver, function)(*values)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function} returned {error.name}")
    return results[0] if len(results) == 1 else tuple(results)


def driver_version() -> str:
    """The display driver's version, as its kernel module gives it."""
    with contextlib.suppress(OSError):
        if found := re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", pathlib.Path("/proc/driver/nvidia/version").read_text()):
            return found[0]
    return "of unknown version"


def cuda_version() -> tuple[int, int]:
    """The newest CUDA that the driver supports."""
    version = driver_call("cuDriverGetVersion")
    return version // 1000, version % 1000 // 10


def device_attribute(attribute: str, ordinal: int) -> int:
    from cuda.bindings import driver

    return driver_call("cuDeviceGetAttribute", getattr(driver.CUdevice_attribute, attribute), ordinal)


def device_name(ordinal: int) -> str:
    return driver_call("cuDeviceGetName", 256, ordinal).split(b"\0")[0].decode()


def compute_capability(ordinal: int) -> tuple[int, int]:
    major = device_attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", ordinal)
    return major, device_attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR", ordinal)


def device_memory(ordinal: int) -> int:
    return driver_call("cuDeviceTotalMem", ordinal)


def can_access_peer(ordinal: int, peer: int) -> bool:
    return bool(driver_call("cuDeviceCanAccessPeer", ordinal, peer))


def can_add_at_peer(ordinal: int, peer: int) -> bool:
    from cuda.bindings import driver

    attribute = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return bool(driver_call("cuDeviceGetP2PAttribute", attribute, ordinal, peer))


def heap_range() -> tuple[tuple[int, ...], int]:
    """Where the symmetric heap asks for its addresses, in order of preference, and for how many."""
    from jaxtaxfree.heap import cuda

    return cuda.wanted_bases(), cuda.RANGE_BYTES


def reserved_address(size: int, hint: int) -> int:
    """The address at which the driver reserves `size` bytes of address space when asked for `hint`; freed again."""
    # In a context, as in a JAX process: making one takes address space of its own.
    driver_call("cuCtxSetCurrent", driver_call("cuDevicePrimaryCtxRetain", 0))
    try:
        pointer = driver_call("cuMemAddressReserve", size, 0, hint, 0)
        driver_call("cuMemAddressFree", pointer, size)
        return int(pointer)
    finally:
        driver_call("cuDevicePrimaryCtxRelease", 0)


def jax_view() -> dict[str, Any]:
    """What JAX sees: `platform` (its default one) and `cuda`, a list of ordinal and pool_bytes (None: no pool)."""
    child = _view()
    if child.trouble:
        raise RuntimeError(f"JAX does not start: {child.trouble}")
    return json.loads(child.answer)


@functools.cache
def _view() -> Child:
    return _child("view", timeout=120)


def compiled_stage(capability: int) -> tuple[str, str]:
    """Compiles a kernel with Triton: the last stage reached ("cubin" or "ptx") and why not further."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    @triton.jit
    def increment(source, target, size: tl.constexpr):
        offsets = tl.arange(0, size)
        tl.store(target + offsets, tl.load(source + offsets) + 1)

    signature = {"source": "*fp32", "target": "*fp32", "size": "constexpr"}
    kernel = ASTSource(increment, signature=signature, constexprs={"size": 128})
    with warnings.catch_warnings(), triton.knobs.compilation.scope():
        warnings.simplefilter("ignore")
        triton.knobs.compilation.always_compile = True  # a cached kernel proves nothing
        try:
            compiled = triton.compile(kernel, target=GPUTarget("cuda", capability, 32))
        except Exception as error:
            if "ptxas" not in str(error):
                raise
            return "ptx", " ".join(str(error).split())[
                :200
            ]  # ptxas is what turns PTX into a cubin: everything before it worked
    return ("cubin" if compiled.asm.get("cubin") else "ptx"), ""


def round_trip(platform_name: Literal["cpu", "cuda"]) -> Child:
    """Runs `all_gather_matmul` over two devices in a subprocess; the answer is the largest error."""
    environment = {"JAX_PLATFORMS": "cpu"} if platform_name == "cpu" else {}
    return _child("round-trip", platform_name, environment=environment, timeout=120)


# Checks

type Check = Callable[[], list[Finding]]

CHECKS: list[Check] = []


def check(name: str, mend: str) -> Callable[[Callable[[], Finding | list[Finding]]], Check]:
    """Adds a check. What it raises becomes a failure called `name`, to be mended as `mend` says."""

    def decorate(function: Callable[[], Finding | list[Finding]]) -> Check:
        @functools.wraps(function)
        def checked() -> list[Finding]:
            try:
                findings = function()
            except Exception as error:
                findings = Finding(name, "FAIL", f"{type(error).__name__}: {_last_line(str(error))}", mend)
            return [findings] if isinstance(findings, Finding) else findings

        CHECKS.append(checked)
        return checked

    return decorate


@check("versions", "Reinstall the library from its repository: pip install -e .")
def check_versions() -> list[Finding]:
    findings = []
    for name, oldest in OLDEST.items():
        version = python_version() if name == "Python" else installed_version(name)
        if version is None:
            finding = Finding(name, "FAIL", "not installed", f'Install it: pip install "{name}>={oldest}".')
        elif _numbers(version) < _numbers(oldest):
            mend = f'Upgrade it: pip install -U "{name}>={oldest}".'
            if name == "Python":
                mend = f"Make an environment with Python {oldest} or newer."
            finding = Finding(name, "FAIL", f"{version}, older than {oldest}", mend)
        else:
            finding = Finding(name, "OK", f"{version} (at least {oldest})")
        findings.append(finding)
    return findings


@check("environment variables", "Reinstall the library from its repository: pip install -e .")
def check_environment() -> Finding:
    from jaxtaxfree import environment

    name, errors = "environment variables", []
    for read in environment.VARIABLES.values():
        try:
            read()
        except ValueError as error:
            errors.append(str(error))
    if concurrent := environment.concurrent_calls():
        errors.append(f"No kernel of this library runs: {concurrent}.")
    if errors:
        return Finding(name, "FAIL", "\n".join(errors), "Correct what is named here, or unset it.")
    given = [f"{variable}={os.environ[variable]}" for variable in environment.VARIABLES if variable in os.environ]
    return Finding(name, "OK", "\n".join(given) or "none of this library's is set")


@check("CUDA plugin", INSTALL_CUDA)
def check_cuda_plugin() -> Finding:
    name, needed = "CUDA plugin", gpu_count() > 0
    plugin, pjrt, jaxlib = (installed_version(p) for p in ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jaxlib"))
    missing = [p for p, v in (("jax-cuda13-plugin", plugin), ("jax-cuda13-pjrt", pjrt)) if v is None]
    if plugin is None or (needed and missing):
        found = f"{' and '.join(missing)} not installed"
        return Finding(name, "FAIL", found, INSTALL_CUDA) if needed else Finding(name, "note", found)
    if plugin != jaxlib:
        return Finding(name, "FAIL", f"jax-cuda13-plugin {plugin} beside jaxlib {jaxlib}", INSTALL_CUDA)
    return Finding(name, "OK", f"jax-cuda13-plugin {plugin}" + (", to compile only" if missing else ""))


@check("cuda-bindings", INSTALL_CUDA)
def check_cuda_bindings() -> Finding:
    name, version, oldest = "cuda-bindings", installed_version("cuda-bindings"), OLDEST_CUDA_BINDINGS
    if version is not None and _numbers(version) >= _numbers(oldest):
        return Finding(name, "OK", f"{version} (at least {oldest})")
    found = "not installed" if version is None else f"{version}, older than {oldest}"
    if gpu_count() == 0:
        return Finding(name, "note", f"{found}; needed where there is a GPU")
    return Finding(name, "FAIL", found, f'Install it: pip install -U "cuda-bindings>={oldest}".')


@check("driver", INSTALL_CUDA)
def check_driver() -> Finding:
    if gpu_count() == 0:
        return Finding("driver", "note", NO_CUDA_DEVICE)
    version = cuda_version()
    found = f"{driver_version()}, CUDA {version[0]}.{version[1]}"
    if version < OLDEST_CUDA:
        mend = "Install an NVIDIA driver of version 580 or newer, the first with CUDA 13."
        return Finding("driver", "FAIL", f"{found}, older than {OLDEST_CUDA[0]}.{OLDEST_CUDA[1]}", mend)
    return Finding("driver", "OK", found)


@check("devices", INSTALL_CUDA)
def check_devices() -> list[Finding]:
    count = gpu_count()
    if count == 0:
        return [Finding("devices", "note", f"{NO_CUDA_DEVICE}; JAX runs on {jax_view()['platform']}")]
    lines = []
    for ordinal in range(count):
        major, minor = compute_capability(ordinal)
        memory = f"{device_memory(ordinal) / GIB:.1f} GiB"
        lines.append(f"{ordinal}: {device_name(ordinal)}, compute capability {major}.{minor}, {memory}")
    findings = [Finding("devices", "OK", "\n".join(lines))]
    seen, platforms = len(jax_view()["cuda"]), os.environ.get("JAX_PLATFORMS", "")
    if seen == count:
        findings.append(Finding("devices in JAX", "OK", f"{seen} of {count}"))
    elif platforms and "cuda" not in platforms and "gpu" not in platforms:
        findings.append(Finding("devices in JAX", "note", f"{seen} of {count}: JAX_PLATFORMS={platforms} hides GPUs"))
    else:
        findings.append(Finding("devices in JAX", "FAIL", f"{seen} of {count}", INSTALL_CUDA))
    return findings


@check("kernels timed on such GPUs", "Set JAXTAXFREE_UNMEASURED to xla or fused, or unset it.")
def check_measured() -> Finding:
    from jaxtaxfree import dispatch

    name = "kernels timed on such GPUs"
    if gpu_count() == 0:
        return Finding(name, "note", NO_CUDA_DEVICE)
    found = sorted({compute_capability(ordinal) for ordinal in range(gpu_count())})
    others = [(major, minor) for major, minor in found if 10 * major + minor not in dispatch.MEASURED]
    if not others:
        return Finding(name, "OK", "yes")
    listed = f"none of compute capability {' and '.join(f'{major}.{minor}' for major, minor in others)}"
    if all(dispatch.unmeasured(10 * major + minor) is None for major, minor in others):
        return Finding(name, "note", f"{listed}; JAXTAXFREE_UNMEASURED=fused takes kernels all the same")
    mend = (
        "There implementation=None takes XLA. Time your program with implementation='fused', and set "
        "JAXTAXFREE_UNMEASURED=fused if that is faster."
    )
    return Finding(name, "note", listed, mend)


@check("memory for the heap", INSTALL_CUDA)
def check_heap_memory() -> Finding:
    name = "memory for the heap"
    if gpu_count() == 0:
        return Finding(name, "note", NO_CUDA_DEVICE)
    devices = jax_view()["cuda"]
    if not devices:
        return Finding(name, "note", "JAX sees no GPU")
    left = min(device_memory(d["ordinal"]) - (d["pool_bytes"] or 0) for d in devices)
    fraction = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "unset, 0.75")
    found = f"{left / GIB:.1f} GiB outside XLA's pool (XLA_PYTHON_CLIENT_MEM_FRACTION {fraction})"
    if left < GIB:
        mend = "Leave the heap more than 1 GiB: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.75 or lower."
        return Finding(name, "FAIL", found, mend)
    return Finding(name, "OK", found)


@check("peer access", INSTALL_CUDA)
def check_peer_access() -> Finding:
    count = gpu_count()
    if count < 2:
        return Finding("peer access", "note", NO_CUDA_DEVICE if count == 0 else "one CUDA device")
    peers = [(a, b) for a in range(count) for b in range(count) if a != b]
    words = {pair: "yes" if can_access_peer(*pair) else "NO" for pair in peers}
    words |= {pair: "stores" for pair in peers if words[pair] == "yes" and not can_add_at_peer(*pair)}
    rows = "\n".join(f"{a}: " + " ".join(words.get((a, b), "-") for b in range(count)) for a in range(count))
    if "NO" in words.values():
        mend = "Choose GPUs that reach each other (nvidia-smi topo -p2p r) with CUDA_VISIBLE_DEVICES."
        return Finding("peer access", "FAIL", rows, mend)
    if "stores" in words.values():
        mend = (
            "Signals add up in a peer's memory. CUDA promises that for GPUs with NVLink; here some may be lost, which "
            "ends in PeerTimeoutError. Then use implementation='xla'."
        )
        return Finding("peer access", "note", rows, mend)
    return Finding("peer access", "OK", rows)


@check("virtual memory", INSTALL_CUDA)
def check_virtual_memory() -> list[Finding]:
    mends = {
        "virtual memory management": "Use GPUs and a driver with virtual memory management; vGPUs often have none.",
        "memory handles as file descriptors": "Use Linux on the machine itself: the driver cannot share memory here.",
    }
    attributes = {
        "virtual memory management": "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
        "memory handles as file descriptors": "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    }
    count, findings = gpu_count(), []
    for name, attribute in attributes.items():
        lacking = [str(ordinal) for ordinal in range(count) if not device_attribute(attribute, ordinal)]
        if count == 0:
            findings.append(Finding(name, "note", NO_CUDA_DEVICE))
        elif lacking:
            findings.append(Finding(name, "FAIL", f"missing on device {', '.join(lacking)}", mends[name]))
        else:
            findings.append(Finding(name, "OK", f"on all {count}" if count > 1 else "supported"))
    return findings


@check("heap addresses", "Lift the limit on address space (ulimit -v unlimited): the heap reserves up to 3 TiB of it.")
def check_heap_addresses() -> Finding:
    name = "heap addresses"
    if gpu_count() == 0:
        return Finding(name, "note", NO_CUDA_DEVICE)
    mend = "Set JAXTAXFREE_HEAP_BASE to a free address, the same in every process and a multiple of 2 MiB."
    try:
        bases, size = heap_range()
    except ValueError as error:
        return Finding(name, "FAIL", str(error), mend)
    refused = []
    for base in bases:  # as the heap does, which takes what it gets
        try:
            if reserved_address(size, base) == base:
                return Finding(name, "OK", f"{size // GIB} GiB at {base:#x}")
        except RuntimeError as error:
            refused.append(error)
    if len(refused) == len(bases):
        raise refused[0]
    found = f"the driver gives other addresses than {' or '.join(map(hex, bases))}"
    return Finding(name, "FAIL", found, mend)


@check("Triton compile", "Reinstall Triton: pip install --force-reinstall triton.")
def check_triton_compile() -> Finding:
    gpus = gpu_count()
    major, minor = compute_capability(0) if gpus else (9, 0)
    stage, why = compiled_stage(10 * major + minor)
    if stage == "cubin":
        return Finding("Triton compile", "OK", f"to machine code for sm_{major}{minor}")
    found = f"to PTX for sm_{major}{minor}, not further: {why}"
    if gpus == 0:
        return Finding("Triton compile", "note", found)
    mend = "Name a ptxas that knows this GPU in TRITON_PTXAS_PATH and TRITON_PTXAS_BLACKWELL_PATH."
    return Finding("Triton compile", "FAIL", found, mend)


@check("reference on two CPU devices", "Reinstall jax and jaxlib in the same version.")
def check_reference() -> Finding:
    name = "reference on two CPU devices"
    child = round_trip("cpu")
    if child.trouble:
        return Finding(name, "FAIL", child.trouble, "Reinstall jax and jaxlib in the same version.")
    return Finding(name, "OK", f"largest error {child.answer}")


@check("fused kernel on two GPUs", 'Use implementation="xla" until this line is OK.')
def check_fused() -> Finding:
    name = "fused kernel on two GPUs"
    if gpu_count() == 0:
        return Finding(name, "note", NO_CUDA_DEVICE)
    if (seen := len(jax_view()["cuda"])) < 2:
        return Finding(name, "note", f"needs two; JAX sees {seen}")
    child = round_trip("cuda")
    if child.trouble:
        mend = 'Mend the other failures first; if none is left, use implementation="xla" and report this line.'
        return Finding(name, "FAIL", child.trouble, mend)
    return Finding(name, "OK", f"agrees with XLA, largest difference {child.answer}")


def run_checks() -> list[Finding]:
    return [finding for run in CHECKS for finding in run()]


def main() -> int:
    """Prints the table. Returns the exit code: 1 where a check failed."""
    return report(run_checks, "jaxtaxfree doctor")


def report(examine: Callable[[], list[Finding]], title: str) -> int:
    """Prints a table of what is found. Returns the exit code: 1 where a check failed."""
    console = Console()
    with console.status("examining this machine"):
        findings = examine()
    styles = {"OK": "green", "note": "yellow", "FAIL": "bold red"}
    table = Table("check", "status", "found", title=title)
    for column in table.columns[:2]:
        column.no_wrap = True
    for finding in findings:
        found = Text(finding.found)
        if finding.mend:
            found.append(f"\n{finding.mend}", style="bold")
        table.add_row(finding.name, Text(finding.status, style=styles[finding.status]), found)
    console.print(table)
    failures = sum(finding.status == "FAIL" for finding in findings)
    console.print(f"{failures} of {len(findings)} checks failed." if failures else "Nothing to mend.")
    return 1 if failures else 0


# Subprocesses


@dataclasses.dataclass(frozen=True)
class Child:
    """How a subprocess ended: its answer, or what went wrong."""

    answer: str = ""
    trouble: str = ""


def _child(*arguments: str, timeout: float, environment: Mapping[str, str] | None = None) -> Child:
    command = [sys.executable, "-m", "jaxtaxfree.doctor", *arguments]
    try:
        done = subprocess.run(
            command, env={**os.environ, **(environment or {})}, timeout=timeout, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return Child(trouble=f"no answer in {timeout:.0f} s: it hangs")
    if done.returncode < 0:
        return Child(trouble=f"killed by {signal.Signals(-done.returncode).name}: {_last_line(done.stderr)}")
    if done.returncode:
        return Child(trouble=_last_line(done.stderr) or f"exit code {done.returncode}")
    return Child(answer=_last_line(done.stdout))


def _print_view() -> None:
    import jax

    try:
        gpus: Sequence[Any] = jax.devices("cuda")
    except RuntimeError:
        gpus = ()
    cuda = [
        {"ordinal": gpu.local_hardware_id, "pool_bytes": (gpu.memory_stats() or {}).get("bytes_limit")} for gpu in gpus
    ]
    print(json.dumps({"platform": jax.default_backend(), "cuda": cuda}))


def _print_round_trip(platform_name: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxtaxfree

    if platform_name == "cpu":
        jax.config.update("jax_num_cpu_devices", 2)
    mesh = Mesh(np.array(jax.devices(platform_name)[:2]), ("x",))
    numbers = np.random.default_rng(0)

    def operand(shape: tuple[int, int], spec: P) -> jax.Array:
        values = numbers.standard_normal(shape, dtype=np.float32)
        return jax.device_put(jnp.asarray(values, jnp.bfloat16), NamedSharding(mesh, spec))

    lhs, rhs = operand((512, 512), P("x", None)), operand((512, 512), P(None, "x"))

    def product(implementation: Literal["fused", "xla"]) -> np.ndarray:
        body = functools.partial(
            jaxtaxfree.all_gather_matmul,
            axis_name="x",
            implementation=implementation,
            preferred_element_type=jnp.float32,
        )
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(P("x"), P(None, "x")), out_specs=P(None, "x"), check_vma=False
        )
        return np.asarray(jax.jit(mapped)(lhs, rhs))

    actual = product("xla" if platform_name == "cpu" else "fused")
    exact = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32)
    expected = exact if platform_name == "cpu" else product("xla")
    error = float(np.max(np.abs(actual - expected)))
    # Products of bfloat16 numbers are exact in float32: only the order of 512 additions differs.
    if not error < 1e-2:
        raise SystemExit(f"wrong result: largest error {error:.3g}")
    print(f"{error:.2g}")


def _last_line(text: str) -> str:
    lines: Iterator[str] = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line), "")


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, enough to compare releases: (0, 11, 2) for 0.11.2.dev1+git."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["view"]:
            _print_view()
        case ["round-trip", ("cpu" | "cuda") as requested]:
            _print_round_trip(requested)
        case _:
            sys.exit("usage: python -m jaxtaxfree doctor")
