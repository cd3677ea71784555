"""The doctor on this machine, and on planted ones."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from jaxtaxfree import doctor
from jaxtaxfree.__main__ import main
from jaxtaxfree.heap import fabric

CPU_ONLY = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}


def test_healthy_cpu_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jaxtaxfree", "doctor"], env=CPU_ONLY, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing to mend." in done.stdout
    names = ["Python", "jax", "jaxlib", "jax-triton", "triton", "environment variables"]
    names += ["CUDA plugin", "cuda-bindings", "driver", "devices", "kernels timed on such GPUs"]
    names += ["memory for the heap", "peer access", "virtual memory management", "memory handles as file descriptors"]
    names += [
        "NVLink domain",
        "heap addresses",
        "Triton compile",
        "reference on two CPU devices",
        "fused kernel on two GPUs",
    ]
    rows = [line.split("│")[1].strip() for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row for row in rows if row] == names


@pytest.mark.gpu(2)
def test_healthy_gpu_machine() -> None:
    # A pool smaller than the default leaves room beside this process's own.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxtaxfree", "doctor"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "doctor" in capsys.readouterr().out


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A healthy machine of two GPUs; call it with other facts to plant a failure."""
    versions = {
        "jax": "0.12.0.1",
        "jaxlib": "0.12.0.1",
        "jax-triton": "0.4.1",
        "triton": "3.9.0",
        "jax-cuda13-plugin": "0.12.0.1",
        "jax-cuda13-pjrt": "0.12.0.1",
        "cuda-bindings": "13.0.3",
    }
    pool = [{"ordinal": ordinal, "pool_bytes": 60 * doctor.GIB} for ordinal in range(2)]

    def plant(**facts: Any) -> None:
        for name, value in facts.items():
            if name == "versions":
                value = {**versions, **value}.get
                name = "installed_version"
            assert hasattr(doctor, name)
            monkeypatch.setattr(doctor, name, value if callable(value) else lambda *_, value=value: value)

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    plant(
        versions={},
        gpu_count=2,
        driver_version="580.65.06",
        cuda_version=(13, 0),
        device_attribute=1,
        device_name="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        device_memory=80 * doctor.GIB,
        can_access_peer=True,
        can_add_at_peer=True,
        nvlink_domain=("NVLink ends in this host (NVML tells of no fabric)", ""),
        reserved_address=lambda size, hint: hint,
        jax_view={"platform": "gpu", "cuda": pool},
        compiled_stage=("cubin", ""),
        round_trip=doctor.Child(answer="1e-5"),
    )
    return plant


def test_healthy_planted_machine(machine: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() == 0
    assert {finding.status for finding in doctor.run_checks()} == {"OK"}
    assert "Nothing to mend." in capsys.readouterr().out


def raising(error: Exception) -> Callable[..., Any]:
    def fact(*_: Any) -> Any:
        raise error

    return fact


def small_pool(ordinal_bytes: int) -> dict[str, Any]:
    return {"platform": "gpu", "cuda": [{"ordinal": n, "pool_bytes": ordinal_bytes} for n in range(2)]}


@pytest.mark.parametrize(
    ("facts", "name", "found", "mend"),
    [
        ({"python_version": "3.11.9"}, "Python", "3.11.9, older than 3.12", "Make an environment with Python 3.12"),
        ({"versions": {"triton": "3.6.0"}}, "triton", "3.6.0, older", 'pip install -U "triton>=3.9"'),
        ({"versions": {"jax": "0.9.2"}}, "jax", "0.9.2, older", 'pip install -U "jax>=0.11.2"'),
        ({"versions": {"jax-triton": None}}, "jax-triton", "not installed", 'pip install "jax-triton>=0.4.1"'),
        ({"versions": {"jax-cuda13-plugin": None}}, "CUDA plugin", "plugin not installed", "jax[cuda13]"),
        ({"versions": {"jax-cuda13-pjrt": None}}, "CUDA plugin", "pjrt not installed", "jax[cuda13]"),
        ({"versions": {"jax-cuda13-plugin": "0.11.2"}}, "CUDA plugin", "beside jaxlib 0.12", "jax[cuda13]"),
        ({"versions": {"cuda-bindings": None}}, "cuda-bindings", "not installed", "cuda-bindings>=13"),
        ({"cuda_version": (12, 8)}, "driver", "CUDA 12.8, older than 13.0", "driver of version 580"),
        ({"jax_view": {"platform": "cpu", "cuda": []}}, "devices in JAX", "0 of 2", "jax[cuda13]"),
        ({"jax_view": small_pool(79 * doctor.GIB + 1)}, "memory for the heap", "GiB outside", "MEM_FRACTION=0.75"),
        ({"can_access_peer": False}, "peer access", "0: - NO\n1: NO -", "CUDA_VISIBLE_DEVICES"),
        ({"device_attribute": 0}, "virtual memory management", "missing on device 0, 1", "vGPUs"),
        ({"device_attribute": 0}, "memory handles as file descriptors", "missing on device 0, 1", "Linux"),
        ({"reserved_address": 0x7F00_0000_0000}, "heap addresses", "other addresses than", "JAXTAXFREE_HEAP_BASE"),
        ({"reserved_address": raising(RuntimeError("out of memory"))}, "heap addresses", "out of memory", "ulimit -v"),
        ({"compiled_stage": ("ptx", "ptxas fatal")}, "Triton compile", "ptxas fatal", "TRITON_PTXAS_PATH"),
        ({"compiled_stage": raising(ImportError("no triton"))}, "Triton compile", "no triton", "Reinstall Triton"),
        ({"round_trip": doctor.Child(trouble="it hangs")}, "fused kernel on two GPUs", "it hangs", "report this line"),
        ({"round_trip": doctor.Child(trouble="crash")}, "reference on two CPU devices", "crash", "Reinstall jax"),
    ],
)
def test_planted_failure(
    facts: dict[str, Any],
    name: str,
    found: str,
    mend: str,
    machine: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine(**facts)
    (finding,) = [finding for finding in doctor.run_checks() if finding.name == name]
    assert finding.status == "FAIL"
    assert found in finding.found
    assert mend in finding.mend

    assert doctor.main() == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed
    assert " ".join(finding.mend.split()[:2]) in printed


def test_every_failure_says_how_to_mend_it(machine: Callable[..., None]) -> None:
    facts = [name for name in vars(doctor) if name in {"gpu_count", "jax_view", "round_trip", "installed_version"}]
    machine(**dict.fromkeys(facts, raising(OSError("planted"))))
    findings = doctor.run_checks()
    assert len(findings) >= len(doctor.CHECKS)
    assert all(finding.mend for finding in findings if finding.status == "FAIL")


def test_hidden_gpus_are_no_failure(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    machine(jax_view={"platform": "cpu", "cuda": []})
    assert not [finding for finding in doctor.run_checks() if finding.status == "FAIL"]


def test_heap_addresses_are_the_heaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXTAXFREE_HEAP_BASE", raising=False)
    bases, size = doctor.heap_range()
    assert 0x6000_0000_0000 in bases
    assert size == 1 << 40
    monkeypatch.setenv("JAXTAXFREE_HEAP_BASE", "0x600000000000")
    assert doctor.heap_range() == ((0x6000_0000_0000,), size)


def test_peers_whose_memory_takes_stores_alone(machine: Callable[..., None]) -> None:
    machine(can_add_at_peer=False)
    finding = doctor.check_peer_access()[0]
    assert finding.status == "note" and finding.found == "0: - stores\n1: stores -" and "NVLink" in finding.mend


def test_nvlink_domain_of_several_hosts(machine: Callable[..., None]) -> None:
    gpu = fabric.Fabric("0a" * 16, 1, 3, 0)
    machine(nvlink_domain=fabric.report(gpu, gpu.domain))
    (finding,) = doctor.check_nvlink_domain()
    assert finding.status == "note" and f"cluster {'0a' * 16}, clique 1, state completed" in finding.found
    machine(nvlink_domain=fabric.report(gpu, None))
    (finding,) = doctor.check_nvlink_domain()
    assert finding.status == "note" and "IMEX channel" in finding.mend
    assert doctor.main() == 0


def test_one_range_of_addresses_is_enough(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def reserved_address(size: int, hint: int) -> int:
        if hint == bases[0]:
            raise RuntimeError("cuMemAddressReserve returned CUDA_ERROR_INVALID_VALUE")
        return hint

    monkeypatch.delenv("JAXTAXFREE_HEAP_BASE", raising=False)
    bases, _ = doctor.heap_range()
    machine(reserved_address=reserved_address)
    (finding,) = doctor.check_heap_addresses()
    assert finding.status == "OK" and f"{bases[1]:#x}" in finding.found


def test_environment_variables(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setenv("JAXTAXFREE_TIMEOUT", "5")
    assert doctor.check_environment() == [
        doctor.Finding("environment variables", "OK", "JAXTAXFREE_TIMEOUT=5"),
    ]
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "9.0")
    monkeypatch.setenv("JAXTAXFREE_HEAP_BASE", "abc")
    findings = {finding.name: finding for finding in doctor.run_checks() if finding.status == "FAIL"}
    for variable in ("JAXTAXFREE_HEAP_BASE is", "JAXTAXFREE_COMPUTE_CAPABILITY is a whole number such as 90"):
        assert variable in findings["environment variables"].found
    assert "unset" in findings["environment variables"].mend
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT")
    (finding,) = [finding for finding in doctor.run_checks() if finding.name == "environment variables"]
    assert "No kernel of this library runs: with --xla_gpu_command_buffer_scheduling_mode=CONCURRENT" in finding.found
    assert "JAXTAXFREE_HEAP_BASE" in findings["heap addresses"].mend


def test_gpus_on_which_nothing_was_timed(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(compute_capability=lambda ordinal: ((9, 0), (10, 0))[ordinal])
    finding = doctor.check_measured()[0]
    assert (finding.status, finding.found) == ("note", "none of compute capability 10.0")
    assert "implementation=None takes XLA" in finding.mend and "JAXTAXFREE_UNMEASURED=fused" in finding.mend
    assert doctor.main() == 0
    monkeypatch.setenv("JAXTAXFREE_UNMEASURED", "fused")
    finding = doctor.check_measured()[0]
    assert finding.status == "note" and "takes kernels all the same" in finding.found and not finding.mend
    monkeypatch.setenv("JAXTAXFREE_UNMEASURED", "yes")
    failed = {finding.name: finding for finding in doctor.run_checks() if finding.status == "FAIL"}
    assert "JAXTAXFREE_UNMEASURED is 'xla' or 'fused', not 'yes'." in failed["environment variables"].found
    assert "xla or fused" in failed["kernels timed on such GPUs"].mend


def test_triton_compiles_here() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert doctor.compiled_stage(90)[0] in ("cubin", "ptx")


def test_broken_ptxas_leaves_ptx(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ptxas = tmp_path / "ptxas"
    ptxas.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'release 13.0, V13.0.1' && exit\nexit 1\n")
    ptxas.chmod(0o755)
    for variable in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):  # Triton's version decides which counts
        monkeypatch.setenv(variable, str(ptxas))
    stage, why = doctor.compiled_stage(90)
    assert stage == "ptx"
    assert "ptxas" in why


def test_children_that_hang_or_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def child(code: str, timeout: float = 60) -> doctor.Child:
        run = subprocess.run
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "run", lambda _, **options: run([sys.executable, "-c", code], **options))
            return doctor._child("ignored", timeout=timeout)

    assert child("print('noise'); print(42)") == doctor.Child(answer="42")
    assert "hangs" in child("import time; time.sleep(60)", timeout=0.5).trouble
    assert child("import os; os.abort()").trouble.startswith("killed by SIGABRT")
    assert child("raise ValueError('planted')").trouble == "ValueError: planted"
    assert child("raise SystemExit(3)").trouble == "exit code 3"
