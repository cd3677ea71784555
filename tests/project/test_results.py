"""The figures in the documentation are those of result files in the repository, and its links lead somewhere."""

import functools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import iris, table
from benchmarks.operations import OPERATIONS
from benchmarks.rows import make_row, write_rows

TEXT = "".join((table.ROOT / document).read_text() for document in table.DOCUMENTS)


def results() -> list:
    """Those of benchmarks, in folders that begin with their date."""
    return sorted((table.ROOT / "benchmarks" / "results").glob("[0-9]*/*.json"))


def operation_of(path):
    return OPERATIONS[json.loads(path.read_text())[0]["op"]]


@pytest.mark.parametrize("op", sorted({operation_of(path).name for path in results()}))
def test_a_committed_file_of_each_operation_is_shown(op):
    begin, end = table.marks(op)
    assert TEXT.count(begin) == TEXT.count(end) == 1, f"there is not one table of {op}"
    shown = re.search(r"\[`[^`]*?(benchmarks/results/[^`]+)`\]", TEXT.partition(begin)[2].partition(end)[0])
    assert shown is not None
    path = table.ROOT / shown[1]
    assert path in results() and operation_of(path).name == op
    document, text = table.with_table(path)
    assert text == document.read_text()


def test_no_table_without_a_file():
    shown = set(re.findall(r"<!-- results of (\w+): begin -->", TEXT))
    assert shown == {operation_of(path).name for path in results()}


def test_the_table_of_iris_kernels():
    text = iris.DOCUMENT.read_text()
    shown = text.partition(iris.MARKS[0])[2].partition(iris.MARKS[1])[0]
    (folder,) = re.findall(r"\[`(benchmarks/results/[^`]+)`\]", shown)
    assert iris.with_table(table.ROOT / folder) == text
    assert (table.ROOT / folder / "README.md").read_text() == iris.page(table.ROOT / folder)


def shown_in(document):
    return re.findall(r"```python\n(.*?)\n```", (table.ROOT / document).read_text(), re.DOTALL)


def run_code(code, **variables):
    """Runs a program on CPU devices, without the flag by which pytest may have got its own."""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env | variables, capture_output=True, text=True, timeout=120)


def test_the_examples_of_the_readme_run():
    blocks = shown_in("README.md")
    program, initialize, *others = blocks
    (account,) = (block for block in others if "taxes" in block)
    others.remove(account)
    assert "jax.distributed.initialize(" in initialize
    code = "\n".join(["import jax; jax.config.update('jax_num_cpu_devices', 4)", program, *others])
    assert len(others) == 5 and "attend(q, k, v" in code
    done = run_code(code)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.soak
def test_the_first_example_of_the_readme_runs_in_processes(tmp_path):
    program, initialize, *_ = shown_in("README.md")
    program = program.replace("(4,)", "(2,)") + "\nprint(f'sum {float(y.sum())}')\njax.distributed.shutdown()"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        initialize = initialize.replace("9876", str(probe.getsockname()[1]))
    (tmp_path / "program.py").write_text(f"{initialize}\n{program}")
    (loop,) = re.findall(r"^for i in .*$", (table.ROOT / "README.md").read_text(), re.MULTILINE)
    loop = loop.replace("0 1 2 3", "0 1").replace("program.py 4", "program.py 2").replace("python", sys.executable)
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env)
    done = run(["bash", "-c", loop])
    assert done.stdout.count(f"sum {1024 * 2048 * 512:.1f}") == 2, done.stdout + done.stderr


def test_the_page_of_processes_shows_the_example():
    example = (table.ROOT / "examples" / "processes.py").read_text()
    page = (table.ROOT / "docs" / "processes.md").read_text()
    (begin,) = shown_in("docs/processes.md")
    start, _, last = begin.rpartition("\n\n")
    assert f"\n{start}\n" in example and f"\n{last}\n" in example
    for line in re.findall(r"```bash\n(.*?)\n```", page):
        assert f"    {line}\n" in example, line


def test_the_kernel_of_the_documentation_is_the_example_and_its_program_runs():
    example = (table.ROOT / "examples" / "custom_kernel.py").read_text()
    kernel, call, program = shown_in("docs/kernels.md")
    assert f"\n{kernel}\n" in example and f"\n{call}\n" in example
    done = run_code(program, PYTHONPATH=str(table.ROOT / "examples"))
    assert done.returncode == 0, done.stderr[-2000:]


def test_links_lead_to_files_and_headings():
    for document in [table.ROOT / "README.md", *sorted((table.ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
            if target.startswith("http"):
                continue
            file, _, heading = target.partition("#")
            path = document.parent / file if file else document
            assert path.exists(), f"{document.name}: {target}"
            if heading:
                headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
                assert heading in {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}, target


@pytest.mark.parametrize("path", results(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_committed_files_are_whole(path):
    """Each shape has checked times of the fused kernel and of its peers, and says where they were taken.

    In the same modes all of them: a run that was cut short leaves whole shapes out.
    """
    rows, op = json.loads(path.read_text()), operation_of(path)
    modes = {row["mode"] for row in rows}
    assert "sustained" in modes
    for sizes in {op.sizes_of(row) for row in rows}:
        for mode in modes:
            of_shape = [row for row in rows if op.sizes_of(row) == sizes and row["mode"] == mode]
            timed = {row["implementation"] for row in of_shape if row["median_us"] and row["checked"] == "ok"}
            assert {"fused", *op.needed_for_floor()} < timed
            assert all(any(name.startswith(peer) for name in timed) for peer in op.peers)
    keys = ("world", "gpu", "jax", "triton", "commit", "date", "p20_us", "p80_us", "floor_us", "config", "dtype", "op")
    assert all(key in row for row in rows for key in keys)
    assert not any(row["commit"].endswith("-dirty") or row["commit"] == "unknown" for row in rows)


def test_table_of_every_operation(tmp_path, monkeypatch):
    """Made-up times: two shapes, of which the first is twice as fast as its peers."""
    monkeypatch.setattr(table, "ROOT", tmp_path)
    common = {"gpu": "G", "jax": "0", "triton": "0", "commit": "abc", "date": "2000-01-01"}
    for name, op in OPERATIONS.items():
        rows = [
            make_row(
                op, shape, each, world=4, mode=mode, checked="ok", floor=10.0, common=common,
                samples=[20.0 if each.name == "fused" else 40.0 / (1 + i)],
            )
            for i, shape in enumerate(op.shapes[:2])
            for mode in ("sustained", "burst")
            for each in op.implementations().values()
        ]  # fmt: skip
        path = tmp_path / f"{name}.json"
        write_rows(path, rows)
        lines = table.table(path).splitlines()
        assert len({line.count("|") for line in lines[:4]}) == 1
        assert "2.00" in lines[2] and "1.00" in lines[3] and "0.50" in lines[2]
        assert lines[-1] == f"4 x G, bfloat16, JAX 0, Triton 0, 2000-01-01, commit abc: [`{name}.json`]({name}.json)."


def test_documents_without_a_place_for_the_table(monkeypatch):
    monkeypatch.setattr(table, "DOCUMENTS", (Path("CHANGELOG.md"),))
    with pytest.raises(ValueError, match="no place for the table of decode_attention in CHANGELOG"):
        table.document_of("decode_attention")


def test_the_example_of_taxes_is_what_was_measured():
    page = (table.ROOT / "docs" / "taxes.md").read_text()
    table_lines = [line.strip("|").split("|") for line in page[page.index("| part | gather") :].splitlines()]
    names = ("all_gather_matmul-16x8192x28672", "all_gather_matmul-8192x8192x28672")
    names += ("decode_attention-1x8192", "decode_attention-8x32768")
    folder = table.ROOT / "benchmarks" / "results" / "taxes-2026-11-20-4xh200"
    accounts = [account for name in names for account in json.loads((folder / f"{name}.json").read_text())]
    parts = {"bulk-synchronous": "bulk_synchronous", "data-locality": "locality"}
    for part, *cells in table_lines[2:9]:
        part = parts.get(part.strip(), part.strip())
        assert [float(cell) for cell in cells] == [round(account[part] * 1e6, 1) + 0.0 for account in accounts]
    assert part == "step"


def medians(file: str, mode: str = "sustained", **of: object) -> dict[str, float]:
    """The times in µs of a result file's rows with these values, by implementation, and the floor."""
    rows = json.loads((table.ROOT / "benchmarks" / "results" / file).read_text())
    rows = [row for row in rows if of.items() <= row.items() and row.get("mode", "sustained") == mode]
    return {"floor": rows[0]["floor_us"]} | {row["implementation"]: row["median_us"] for row in rows}


def test_sentences_are_what_was_measured():
    """Those that no table shows."""
    text = " ".join((table.ROOT / "README.md").read_text().split())

    three = medians("2026-11-25-2xh100-80gb-hbm3-exchange/all_gather_matmul_qkv.json", m=16)
    assert (
        f"q, k and v took {three['fused']:.0f} µs, one after the other {three['fused_three']:.0f}, and by XLA "
        f"{min(time for name, time in three.items() if name.startswith('xla')):.0f}."
    ) in text

    def fastest(of: dict[str, float], name: str) -> float:
        return min(time for each, time in of.items() if each.startswith(name))

    step = medians("steps-2026-11-27-2xh100-80gb-hbm3/decode_step.json", b=1)
    assert [sum(name.startswith(peer) for name in step) for peer in ("xla", "torch")] == [3, 3]
    folder = "steps-2026-11-27-2xh100-80gb-hbm3-"
    now = medians("steps-2026-11-28-2xh100-80gb-hbm3/decode_step.json", b=1, d_model=4096, n=8)
    several = medians(f"{folder}rank-given/decode_step.json", b=16, d_model=4096)
    waited, again = (
        medians(f"{folder}{name}/decode_step.json", b=1, d_model=4096, n=8, mode="waited")
        for name in ("cache-inside", "rank-given")
    )
    told = medians("2026-11-28-2xh200-decode-step/decode_step.json", b=1, d_model=4096, n=8)
    saved = told["fused[tell_queries=False]"] - told["fused"]
    assert (
        f"of the first model took {now['fused']:.0f} µs before its queries were messages, which saves {saved:.0f} µs "
        f"on H200; by XLA's fastest program {fastest(now, 'xla'):.0f}, and the bytes take {now['floor']:.0f} "
    ) in text
    whole = medians("steps-2026-11-28-4xh200/whole.json", b=1)
    assert f"layers of Llama 3 8B take {whole['fused']:.0f}, by XLA {fastest(whole, 'xla'):.0f} " in text
    of_several = f"share of two take {several['fused']:.0f}, by XLA {fastest(several, 'xla'):.0f} "
    assert of_several in text
    assert (
        f"A call that is waited for took {waited['fused']:.0f} and {again['fused']:.0f} in two runs, by XLA "
        f"{fastest(waited, 'xla'):.0f} and {fastest(again, 'xla'):.0f} "
    ) in text
    assert (
        f"In an earlier run, in which the step took {step['fused']:.0f}, PyTorch's (CUDA graphs, `torch.compile`) took "
        f"{fastest(step, 'torch'):.0f}, the fastest of three XLA programs {fastest(step, 'xla'):.0f}, and our "
        f"operations one by one {step['fused/operations']:.0f} "
    ) in text

    made = medians("models-2026-11-25-2xh100-80gb-hbm3/llama-3-8b.json", b=1, prompt=1024, layers=8)
    rate = {name: 1e6 / time for name, time in made.items()}
    assert f"make {rate['auto']:.0f} tokens a second behind a prompt of 1024, by XLA {rate['xla']:.0f}" in text
    page = " ".join((table.ROOT / "docs" / "models.md").read_text().split())
    folder = "models-2026-11-25-2xh100-80gb-hbm3"
    mixture, int8 = (medians(f"{folder}/{name}.json") for name in ("qwen3-30b-a3b", "llama-3-8b-int8"))
    assert (
        f"took {made['xla'] / 1e3:.2f} ms by XLA and {made['auto'] / 1e3:.2f} by default, which is one launch" in page
    )
    assert f"it took {mixture['xla'] / 1e3:.2f} and {mixture['auto'] / 1e3:.2f}, and the prompt" in page
    assert f"In int8 by XLA a step of the first took {int8['xla'] / 1e3:.2f}." in page

    many, few = (medians("2026-11-25-2xh100-80gb-hbm3-moe/moe.json", tokens=tokens) for tokens in (4096, 64))
    assert (
        f"takes {many['fused']:.0f} µs for 4096 tokens a rank, where its products alone take {many['dense']:.0f} and "
        f"JAX's pieces {many['xla/default']:,.0f}; for 64 tokens {few['fused']:.0f}, {few['dense']:.0f} and "
        f"{few['xla/default']:.0f}"
    ) in text

    page = (table.ROOT / "docs" / "eight_bits.md").read_text()
    rows = re.findall(r"^\| `\w+` \| 8192, [^|]+\|([\d |]+)\|$", page, re.MULTILINE)
    times = [[int(cell) for cell in row.split("|")] for row in rows]  # bf16, e4m3 by rows, ..., XLA's e4m3
    over_ours, over_xla = ([row[i] / row[1] for row in times] for i in (0, 4))
    assert len(times) == 3
    assert (
        f"are {min(over_ours):.2f} to {max(over_ours):.2f} times as fast as ours in bf16, and {min(over_xla):.2f} to "
        f"{max(over_xla):.2f} times as fast as XLA's"
    ) in text
