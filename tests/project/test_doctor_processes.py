"""The doctor of several processes: on this machine, and with planted processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxtaxfree import doctor, doctor_processes
from jaxtaxfree.__main__ import main
from jaxtaxfree.doctor import Finding

NAMES = ["Python", "jax", "jaxlib", "jax-triton", "triton", "environment variables", "CUDA plugin", "cuda-bindings"]
NAMES += ["driver", "kernels timed on such GPUs", "peer access", "virtual memory management"]
NAMES += [
    "memory handles as file descriptors",
    "NVLink domain",
    "heap addresses",
    "Triton compile",
    "processes",
    "memory for the heap",
]
NAMES += ["memory of other processes", "XLA's collective between processes", "fused kernel between processes"]


def examine(**variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxtaxfree", "doctor", "--processes", "2"]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_healthy_cpu_machine() -> None:
    done = examine(CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu", COLUMNS="150")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing to mend." in done.stdout
    rows = [line.split("│")[1].strip() for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row for row in rows if row] == NAMES
    assert "2, which see 2 CPU devices, one each" in done.stdout
    assert "file descriptors pass between the processes" in done.stdout
    assert "no CUDA device; its reference has a largest error of" in done.stdout


@pytest.mark.slow
@pytest.mark.gpu(2)
def test_healthy_gpu_machine() -> None:
    done = examine(XLA_PYTHON_CLIENT_MEM_FRACTION="0.1", COLUMNS="150")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2, which see 2 GPUs, one each" in done.stdout and "agrees with XLA, largest difference" in done.stdout


@pytest.mark.parametrize(
    "count, found, mend",
    (("3", "3 processes of one GPU each need 3, found 2", "Ask for at most 2"), ("1", "1 of them", "--processes 2")),
)
def test_a_count_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: str, found: str, mend: str
) -> None:
    monkeypatch.setattr(doctor, "gpu_count", lambda: 2)
    monkeypatch.setenv("COLUMNS", "150")
    assert main(["doctor", "--processes", count]) == 1
    printed = capsys.readouterr().out
    assert found in printed and mend in printed and "1 of 1 checks failed." in printed


OK = 'print(\'{"finding": {"name": "heap", "status": "OK", "found": "yes", "mend": ""}}\', flush=True)\n'
DOING = 'print("noise"); print(\'{"doing": "run a fused kernel"}\', flush=True)\n'


def planted(*codes: str, timeout: float = 60.0, grace: float = 60.0) -> list[list[Finding]]:
    prologue = "import os, signal, sys, time\n" + DOING + OK
    return doctor_processes.run([[sys.executable, "-c", prologue + code] for code in codes], timeout, grace)


def test_processes_that_end_and_hang() -> None:
    heap = Finding("heap", "OK", "yes")
    # The first one is told when the others are done.
    assert planted("sys.stdin.read()", "") == [[heap], [heap]]

    killed = planted("time.sleep(600)", "os.kill(os.getpid(), signal.SIGKILL)", grace=0.5)
    others = "process 0 was stopped after another one had failed; it was to run a fused kernel"
    assert killed[0] == [heap, Finding("process 0", "note", others)]
    assert killed[1][0] == heap and killed[1][1].status == "FAIL" and killed[1][1].mend
    assert killed[1][1].found == "process 1 was killed by SIGKILL; it was to run a fused kernel"

    hung = planted("sys.stdin.read()", "time.sleep(600)", timeout=1)
    assert [each[1].found for each in hung] == [
        f"process {rank} did not end within 1 s; it was to run a fused kernel" for rank in (0, 1)
    ]
    assert {each[1].status for each in hung} == {"FAIL"}

    raised = planted("raise ValueError('planted')", "")
    wanted = "process 0 ended with exit code 1; it was to run a fused kernel. ValueError: planted"
    assert raised[0][1].found == wanted

    failure = f'print(\'{{"doing": "{doctor_processes._STOP}"}}\', flush=True)\nsys.stdin.read()'
    stopped = planted(failure, "time.sleep(600)", grace=0.5)
    assert stopped[0] == [heap]  # whose own line says what failed
    assert stopped[1][1].found == others.replace("process 0", "process 1")


def test_lines_that_differ_are_there_for_each_process() -> None:
    same, ours, theirs = Finding("jax", "OK", "1"), Finding("heap", "OK", "2 GiB"), Finding("heap", "FAIL", "0", "Mend")
    alone = Finding("process 1", "FAIL", "process 1 was killed by SIGKILL", "Mend")
    found = doctor_processes.merged([[same, ours], [same, theirs, alone]])
    assert [(each.name, each.status) for each in found] == [
        ("jax", "OK"),
        ("heap, process 0", "OK"),
        ("heap, process 1", "FAIL"),
        ("process 1", "FAIL"),
    ]
    only_one = doctor_processes.merged([[same, ours], [same]])
    assert [each.name for each in only_one] == ["jax", "heap, process 0"]
