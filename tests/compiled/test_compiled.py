"""What the compiler makes of every registered kernel, read from the PTX: no GPU needed.

The criteria return what is wrong. Each of them has a test that it reports code without what it looks for.
"""

import dataclasses
import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxtaxfree.kernels import shmem
from jaxtaxfree.kernels.blocks import matmul
from jaxtaxfree.ops.shapes import MatmulShape
from tests.helpers import amd
from tests.helpers.compiling import once
from tests.helpers.support import KERNELS, Compiled, Kernel, compile_for_amd, compile_for_cuda, transposed_kernels

KIB = 1024
SHARED_MEMORY = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB}  # that a block may have
DTYPES = ("bfloat16", "float16", "float32")

each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


@dataclasses.dataclass(frozen=True)
class Statement:
    """A label or an instruction.

    Attributes:
      text: of the instruction without its predicate, or the label with its colon.
      guarded: whether it has a predicate.
      scope: the braces around it, outermost first: pieces of inline assembly repeat labels in different ones.
      place: the line of the source from which it was made, such as "shmem.py:155".
    """

    text: str
    guarded: bool
    scope: tuple[int, ...]
    place: str

    @property
    def words(self) -> tuple[str, ...]:
        """The instruction and its qualifiers: ("ld", "acquire", "sys", "global", "b32")."""
        return tuple(self.text.split(None, 1)[0].split("."))

    def starts(self, *names: str) -> bool:
        return self.text.startswith(names)

    def has(self, *qualifiers: str) -> bool:
        return set(qualifiers) <= set(self.words)


def parse(ptx: str) -> list[Statement]:
    statements, scope, place, scopes = [], [], "", 0
    for line in ptx.splitlines():
        if found := re.search(r"^\s*\.loc\s.*// (\S+:\d+):\d+", line):
            place = found[1]
        code = line.split("//")[0].strip()
        if code == "{":
            scopes += 1
            scope.append(scopes)
        elif code == "}":
            scope.pop()
        elif re.fullmatch(r"[\w$]+:", code):
            statements.append(Statement(code, False, tuple(scope), place))
        elif not code.startswith("."):
            for text in code.removeprefix("{").split(";"):
                guard, text = re.fullmatch(r"\s*(@!?%?\w+)?\s*(.*?)\s*", text).groups()
                if re.match(r"[a-z]\w*[.\s]", text + " "):
                    statements.append(Statement(text, guard is not None, tuple(scope), place))
    return statements


def loops(program: list[Statement]) -> list[range]:
    """From a label to a branch back to it; inner loops before outer ones."""
    found, labels = [], {}
    for i, statement in enumerate(program):
        if statement.text.endswith(":"):
            labels[statement.scope, statement.text[:-1]] = i
        elif statement.starts("bra"):
            target = statement.text.split()[-1]
            visible = [(statement.scope[:depth], target) for depth in range(len(statement.scope), -1, -1)]
            start = next((labels[key] for key in visible if key in labels), None)
            if start is not None:
                found.append(range(start, i + 1))
    return sorted(found, key=len)


def is_barrier(statement: Statement) -> bool:
    return statement.starts("bar.sync", "barrier.sync", "barrier.red", "bar.red", "barrier.cta")


def is_label_of_code(statement: Statement) -> bool:
    """Not one that only debuggers use."""
    return statement.text.endswith(":") and not statement.starts("$L__tmp", "$L__func")


def touches_global_memory(statement: Statement) -> bool:
    return statement.starts("ld", "st", "atom", "red", "cp.async.c") and statement.has("global")


def polls_in(program: list[Statement], loop: range) -> bool:
    """Whether a loop does nothing but poll until a condition holds; one around it holds the barrier, too."""
    body = program[loop.start : loop.stop]
    return body[-1].guarded and any(s.starts("ld.acquire") for s in body) and not any(map(is_barrier, body))


def waits_that_do_not_wait(program: list[Statement], waits: int, *, of_a_warp: bool = False) -> list[str]:
    """A wait polls at system scope in a loop that may end, and lets the block go on through a barrier.

    Args:
      of_a_warp: a partition of one warp waits, which is a barrier of its own.
    """
    acquires = [i for i, statement in enumerate(program) if statement.starts("ld.acquire")]
    wrong = [f"not at system scope: {program[i].text}" for i in acquires if not program[i].has("sys")]
    polls = [loop for loop in loops(program) if polls_in(program, loop)]
    looped = {program[i].scope for i in acquires if any(i in poll for poll in polls)}
    wrong += [f"polls once: {program[i].text}" for i in acquires if program[i].scope not in looped]
    if len(polls) < waits:
        wrong.append(f"{len(polls)} polling loops for {waits} waits")

    def lets_go(statement: Statement) -> bool:
        return is_barrier(statement) or (of_a_warp and statement.starts("bar.warp.sync"))

    for poll in polls:
        rest = program[poll.stop :]
        after = next((statement for statement in rest if lets_go(statement) or touches_global_memory(statement)), None)
        if after is None or not lets_go(after):
            wrong.append("no barrier behind a wait")
    return wrong


def publishes_out_of_order(program: list[Statement]) -> list[str]:
    """A publish is a release at system scope right behind a block barrier; no atomic has a smaller scope."""
    wrong = []
    atomics = [
        i for i, statement in enumerate(program) if statement.starts("red.", "atom.") and statement.has("global")
    ]
    releases = [i for i in atomics if program[i].has("release") or program[i].has("acq_rel")]
    if not any(program[i].has("release") for i in releases):
        wrong.append("nothing is published")
    wrong += [f"not at system scope: {program[i].text}" for i in atomics if not program[i].has("sys")]
    wrong += [f"orders nothing: {program[i].text}" for i in atomics if i not in releases]
    for i in releases:
        before = next(
            (s for s in reversed(program[:i]) if is_barrier(s) or is_label_of_code(s) or touches_global_memory(s)), None
        )
        if before is None or not is_barrier(before):
            wrong.append(f"no barrier between {before and before.text!r} and {program[i].text!r}")
    return wrong


def bytes_of(access: Statement) -> int:
    """What one thread moves with a load or store."""
    lanes = next((int(word[1:]) for word in access.words if re.fullmatch(r"v\d", word)), 1)
    bits = next(int(word[1:]) for word in access.words if re.fullmatch(r"[bsuf]\d+", word))
    return lanes * bits // 8


def places_of(function: Any, text: str) -> list[str]:
    """Where the source of a function in Triton's language has lines that begin with a text."""
    lines, first = inspect.getsourcelines(function.fn)
    file = Path(inspect.getsourcefile(function.fn) or "").name
    return [f"{file}:{first + i}" for i, line in enumerate(lines) if line.lstrip().startswith(text)]


def narrow_remote_stores(program: list[Statement]) -> list[str]:
    """Data go to peers in stores of whole 128-byte lines by a warp: NVLink carries others at a fraction of its speed.

    What a program stores after its product goes in 16 bytes a thread, so that few instructions do it.
    """
    stores = [s for s in program if s.starts("st.") and s.has("global")]
    (place,) = places_of(shmem.store, "tl.store(")
    stored = [store for store in stores if store.place == place]
    copied = [store for store in stores if store.place in places_of(matmul.multiply, "tl.store(")]
    wrong = [] if stored else ["no remote store"]
    wrong += [f"{bytes_of(store)} bytes: {store.text}" for store in stored if bytes_of(store) != 16]
    return wrong + [f"{bytes_of(store)} bytes: {store.text}" for store in copied if bytes_of(store) < 4]


def main_loop(program: list[Statement], dot: str) -> list[Statement]:
    """The innermost loop that holds the products."""
    for loop in loops(program):
        body = program[loop.start : loop.stop]
        if any(statement.starts(dot) for statement in body):
            return body
    return []


def copies_not_in_flight(program: list[Statement], dot: str) -> list[str]:
    """Operands come in asynchronous copies of 16 bytes, of later steps while a step is multiplied."""
    body = main_loop(program, dot)
    copies = [statement for statement in body if statement.starts("cp.async.cg", "cp.async.ca")]
    waits = [statement for statement in body if statement.starts("cp.async.wait_group")]
    wrong = [f"not 16 bytes: {copy.text}" for copy in copies if "0x10" not in copy.text.replace(",", " ").split()]
    if len(copies) < 2:
        wrong.append(f"{len(copies)} asynchronous copies in the loop of {dot}, which needs one of each operand")
    if not waits:
        wrong.append("no wait for copies")
    wrong += [f"waits for the newest copy: {wait.text}" for wait in waits if int(wait.text.split()[-1]) < 1]
    return wrong


def local_memory(ptx: str) -> list[str]:
    return re.findall(r"^.*(?:\.local\b|\b(?:ld|st)\.local\b).*$", ptx, re.MULTILINE)


def ptxas_report(compiled: Compiled, architecture: str = "sm_90a") -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        ptxas = get_ptxas(90)
    except RuntimeError as error:
        pytest.skip(f"no ptxas: {error}")
    command = [ptxas.path, "-v", f"--gpu-name={architecture}", "/dev/stdin", "-o", "/dev/null"]

    def report() -> str:
        done = subprocess.run(command, input=compiled.ptx, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return once(report, command, ptxas.version, compiled.ptx)


def spilled_bytes(report: str) -> int:
    """Of the registers that ptxas found no place for; PTX itself does not show them."""
    counts = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", report)
    assert len(counts) == 3, report
    return sum(map(int, counts))


@each_kernel
def test_sm_90(kernel: Kernel) -> None:
    compiled = compile_for_cuda(kernel, kernel.aligned)
    program = parse(compiled.ptx)
    assert ".target sm_90a" in compiled.ptx
    assert waits_that_do_not_wait(program, kernel.waits) == []
    assert publishes_out_of_order(program) == []
    assert narrow_remote_stores(program) == []
    assert copies_not_in_flight(program, kernel.dot) == []
    assert local_memory(compiled.ptx) == []


@pytest.mark.covers(1)
@pytest.mark.parametrize("kernel", transposed_kernels(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_transposed_operands(kernel: Kernel, dtype: str) -> None:
    """As the gradients take them: nothing is slower for it."""
    compiled = compile_for_cuda(kernel, kernel.aligned, dtype)
    program = parse(compiled.ptx)
    assert compiled.constants["RHS_TRANSPOSED"]
    assert narrow_remote_stores(program) == []
    # Of f32 operands the tensor cores want K next to each other, as it lies here.
    assert copies_not_in_flight(program, kernel.dot) == []
    assert compiled.shared <= SHARED_MEMORY[90]
    assert spilled_bytes(ptxas_report(compiled)) == 0


@each_kernel
def test_odd_sizes_wait_and_publish_alike(kernel: Kernel) -> None:
    program = parse(compile_for_cuda(kernel, kernel.odd).ptx)
    assert waits_that_do_not_wait(program, kernel.waits) == []
    assert publishes_out_of_order(program) == []


@each_kernel
@pytest.mark.parametrize("world", (2, pytest.param(8, marks=pytest.mark.soak)))
def test_other_worlds(kernel: Kernel, world: int) -> None:
    program = parse(compile_for_cuda(kernel, kernel.aligned, world=world).ptx)
    assert waits_that_do_not_wait(program, 1) == []  # of two ranks none waits for its turn
    assert publishes_out_of_order(program) == []
    assert narrow_remote_stores(program) == []
    assert copies_not_in_flight(program, kernel.dot) == []


# That of sm_80 is read with an epilogue (test_compiled_epilogue.py), and compiled for every kernel below.
@each_kernel
@pytest.mark.parametrize("compute_capability", (pytest.param(80, marks=pytest.mark.soak), 100))
def test_other_nvidia_gpus(kernel: Kernel, compute_capability: int) -> None:
    compiled = compile_for_cuda(kernel, kernel.aligned, compute_capability=compute_capability)
    program = parse(compiled.ptx)
    assert f".target sm_{compute_capability}" in compiled.ptx
    assert waits_that_do_not_wait(program, kernel.waits) == []
    assert publishes_out_of_order(program) == []
    assert narrow_remote_stores(program) == []
    assert compiled.shared <= SHARED_MEMORY[compute_capability]


@each_kernel
@pytest.mark.parametrize("compute_capability", (80, 89))
def test_default_config_follows_the_gpu(kernel: Kernel, compute_capability: int) -> None:
    compiled = compile_for_cuda(kernel, kernel.aligned, compute_capability=compute_capability)
    assert compiled.shared <= SHARED_MEMORY[compute_capability]
    wanted = kernel.default_config(kernel.aligned, 4, "bfloat16", compute_capability)
    chosen = {name: compiled.constants[name.upper()] for name in ("block_m", "block_n", "block_k")}
    assert chosen == {name: getattr(wanted, name) for name in chosen}


def default_cases() -> Iterator[tuple[Kernel, MatmulShape, int, str]]:
    """One call for every configuration that the benchmarks' shapes lead to."""
    for kernel in KERNELS:
        seen = set()
        for shape in kernel.benchmarks:
            for world in (2, 4, 8):
                for dtype in DTYPES:
                    config = kernel.default_config(shape, world, dtype)
                    if (config, dtype) not in seen:
                        seen.add((config, dtype))
                        yield kernel, shape, world, dtype


CASES = tuple(default_cases())
FIRST = tuple({(case[0].name, case[3]): case for case in reversed(CASES)}.values())


@pytest.mark.parametrize(
    ("kernel", "shape", "world", "dtype"),
    # f16 is bf16 but for the name of the products. After the first configuration the others are compiled with an
    # epilogue, which takes more (test_compiled_epilogue.py).
    [
        pytest.param(*case, marks=[pytest.mark.soak] if case[3] == "float16" or case not in FIRST else [])
        for case in CASES
    ],
    ids=[f"{c[1].name}-{c[2]}-{c[3]}".replace("/", "-") for c in CASES],
)
def test_default_configs_fit_sm_90(kernel: Kernel, shape: MatmulShape, world: int, dtype: str) -> None:
    compiled = compile_for_cuda(kernel, shape, dtype, world=world)
    assert 0 < compiled.shared <= SHARED_MEMORY[90]
    assert local_memory(compiled.ptx) == []
    assert spilled_bytes(ptxas_report(compiled)) == 0


@each_kernel
def test_f32_takes_half_the_steps_depth(kernel: Kernel) -> None:
    # Bytes in flight stay what they are for 2-byte operands.
    for shape in kernel.benchmarks:
        depth = {dtype: kernel.default_config(shape, 4, dtype).block_k for dtype in DTYPES}
        assert depth["float16"] == depth["bfloat16"] == 2 * depth["float32"]


@pytest.mark.parametrize(
    "kernel",
    # Products of f32 on no tensor cores are much code, of one function for all kernels.
    [kernel if kernel in KERNELS[1:3] else pytest.param(kernel, marks=pytest.mark.soak) for kernel in KERNELS],
    ids=lambda kernel: kernel.name,
)
def test_precision_of_f32(kernel: Kernel) -> None:
    ptx = {p: compile_for_cuda(kernel, kernel.aligned, "float32", precision=p).ptx for p in (None, "highest")}
    assert ".tf32" in ptx[None]
    assert ".tf32" not in ptx["highest"]
    assert "fma.rn.f32" in ptx["highest"] or "fma.rn.f32x2" in ptx["highest"]


@each_kernel
@pytest.mark.parametrize("architecture", amd.EACH)
def test_amd(kernel: Kernel, architecture: str) -> None:
    code = compile_for_amd(compile_for_cuda(kernel, kernel.aligned, amd=True), architecture).asm["amdgcn"]
    assert "mfma" in code
    assert re.findall(r"\.(?:sgpr|vgpr)_spill_count:\s*(\d+)", code) == ["0", "0"]
    assert amd.publishes_out_of_order(code) == []
    assert amd.polls_that_do_not_acquire(code) == []
    assert amd.polling_loops(code) >= kernel.waits
    assert amd.store_widths(code)["dwordx4"] > 0
    assert amd.leaves_and_traps(code)


def tampered(ptx: str, pattern: str, replacement: str) -> list[Statement]:
    text, count = re.subn(pattern, replacement, ptx, flags=re.MULTILINE)
    assert count, f"nothing to tamper with: {pattern}"
    return parse(text)


@each_kernel
@pytest.mark.parametrize(
    ("pattern", "replacement", "report"),
    (
        (r"ld\.acquire\.sys", "ld.acquire.gpu", "not at system scope"),
        (r"ld\.acquire\.sys", "ld.volatile", "0 polling loops"),
        (r"@q bra AGAIN;", "", "polls once"),
        (r"@q bra AGAIN;", "bra AGAIN;", "0 polling loops"),
        (r"barrier\.red\.and\.pred q, 0, p;", "mov.pred q, p;", "no barrier behind a wait"),
    ),
)
def test_a_lost_wait_is_reported(kernel: Kernel, pattern: str, replacement: str, report: str) -> None:
    program = tampered(compile_for_cuda(kernel, kernel.aligned).ptx, pattern, replacement)
    assert any(report in line for line in waits_that_do_not_wait(program, kernel.waits))


@each_kernel
@pytest.mark.parametrize(
    ("pattern", "replacement", "report"),
    (
        (r"red\.global\.sys\.", "red.global.gpu.", "not at system scope"),
        (r"red\.global\.sys\.release", "red.global.sys.relaxed", "orders nothing"),
        (r"\.release\b", ".relaxed", "nothing is published"),
        (r"^\s*bar\.sync\s+0;", "", "no barrier between"),
        (
            r"^(.*red\.global\.sys\.release)",
            r"st.global.b32 [ %rd1 + 0 ], { %r1 };\n\1",
            "no barrier between 'st.global",
        ),
        (r"^(.*red\.global\.sys\.release)", r"$L__BB0_99:\n\1", "no barrier between '$L__BB0_99"),
    ),
)
def test_a_lost_publish_is_reported(kernel: Kernel, pattern: str, replacement: str, report: str) -> None:
    program = tampered(compile_for_cuda(kernel, kernel.aligned).ptx, pattern, replacement)
    assert any(report in line for line in publishes_out_of_order(program))


@each_kernel
def test_narrow_stores_are_reported(kernel: Kernel) -> None:
    ptx = compile_for_cuda(kernel, kernel.aligned).ptx
    assert "8 bytes" in narrow_remote_stores(tampered(ptx, r"st\.global\.v4\.b32", "st.global.v2.b32"))[0]
    assert narrow_remote_stores(tampered(ptx, r"shmem\.py:", "other.py:")) == ["no remote store"]


def test_narrow_stores_of_odd_sizes_are_reported() -> None:
    # Not only what was changed by hand: rows of 129 elements do not begin at multiples of 16 bytes.
    kernel = KERNELS[0]
    assert narrow_remote_stores(parse(compile_for_cuda(kernel, kernel.odd).ptx)) != []


@each_kernel
def test_late_copies_are_reported(kernel: Kernel) -> None:
    ptx = compile_for_cuda(kernel, kernel.aligned).ptx
    assert "not 16 bytes" in copies_not_in_flight(tampered(ptx, r"\b0x10\b", "0x4"), kernel.dot)[0]
    reports = copies_not_in_flight(tampered(ptx, r"(cp\.async\.wait_group\s+)\d+", r"\g<1>0"), kernel.dot)
    assert "waits for the newest copy" in reports[0]
    reports = copies_not_in_flight(tampered(ptx, r"cp\.async\.c[ag]\.shared", "ld"), kernel.dot)
    assert "0 asynchronous copies" in reports[0]
    assert copies_not_in_flight(parse(ptx), "tcgen05.mma") != []
    assert copies_not_in_flight(parse(compile_for_cuda(kernel, kernel.odd).ptx), kernel.dot) != []


@each_kernel
def test_local_memory_is_reported(kernel: Kernel) -> None:
    compiled = compile_for_cuda(kernel, kernel.aligned)
    depot = ".local .align 16 .b8 depot[16];"
    assert local_memory(compiled.ptx.replace("\n{", f"\n{{\n{depot}", 1)) == [depot]


def test_spills_are_reported() -> None:
    report = "Function properties for k\n    {} bytes stack frame, {} bytes spill stores, {} bytes spill loads"
    assert spilled_bytes(report.format(0, 0, 0)) == 0
    assert spilled_bytes(report.format(88, 88, 96)) == 272


def test_loops_are_found_by_scope() -> None:
    # The second piece of inline assembly has the first one's labels and jumps forward to its own.
    piece = "{{\n{0}: add.s32 v, v, 1;\n@p bra {1};\nDONE:\n}}\n"
    program = parse(
        piece.format("AGAIN", "AGAIN").replace(": ", ":\n") + piece.format("OTHER", "DONE").replace(": ", ":\n")
    )
    (loop,) = loops(program)
    assert [statement.text for statement in program[loop.start : loop.stop]] == [
        "AGAIN:",
        "add.s32 v, v, 1",
        "bra AGAIN",
    ]
