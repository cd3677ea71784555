"""What becomes of result files: the comparison of two runs, the plots, and the page of a folder."""

import datetime
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare, plots, report, summary, table
from benchmarks.operations import OPERATIONS
from benchmarks.rows import make_row, write_rows

COMMON = {"gpu": "NVIDIA G", "jax": "0", "triton": "0", "commit": "abc", "date": "2000-01-01"}
MATMUL = OPERATIONS["all_gather_matmul"]
COMMITTED = sorted(path for path in report.RESULTS.glob("[0-9]*") if path.is_dir())


def row(name: str, us: float | None, *, mode: str = "sustained", apart: float = 0.0, shape: int = 0) -> dict[str, Any]:
    """One measurement whose samples lie `apart` as a share; none without microseconds."""
    samples = [] if us is None else [us * (1 + apart * share) for share in (-0.5, -0.5, 0, 0.5, 0.5)]
    return make_row(
        MATMUL, MATMUL.shapes[shape], MATMUL.implementations([{"a": 1}])[name], world=4, mode=mode,
        checked="ok" if samples else "failed: it broke", samples=samples, floor=10.0, common=COMMON,
    )  # fmt: skip


@pytest.mark.parametrize(
    "old, new, verdict",
    [
        (row("fused", 100), row("fused", 101), "same"),
        (row("fused", 100), row("fused", 103), "slower"),
        (row("fused", 100), row("fused", 97), "faster"),
        (row("fused", 100, apart=0.08), row("fused", 107), "same"),
        (row("fused", 100), row("fused", 107, apart=0.08), "same"),
        (row("fused", 100, apart=0.08), row("fused", 110), "slower"),
        (row("fused", 100), row("fused", None), "lost"),
        (row("fused", None), row("fused", 100), "new"),
    ],
)
def test_verdicts(old: dict[str, Any], new: dict[str, Any], verdict: str) -> None:
    (change,) = compare.compare([old], [new], 0.02)
    assert change.verdict == verdict
    assert compare.is_worse(change) == (verdict in ("slower", "lost"))


def test_only_ours_can_be_worse_and_only_where_new_measured() -> None:
    old = [row("xla/default", 100), row("fused", 100), row("fused", 50, mode="burst"), row("fused", 20, shape=1)]
    changes = compare.compare(old, [row("xla/default", 200), row("fused", 100)], 0.02)
    assert [(change.key[-1], change.verdict) for change in changes] == [("xla/default", "slower"), ("fused", "same")]
    assert not any(map(compare.is_worse, changes))


def test_comparison_of_files_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    old, new = tmp_path / "old" / "deep", tmp_path / "new.json"
    old.mkdir(parents=True)
    write_rows(old / "a.json", [row("fused", 100), row("xla/default", 150)])
    write_rows(old / "b.json", [row("fused[a=1]", 50)])
    write_rows(new, [row("fused", 120), row("xla/default", 100), row("fused[a=1]", None)])
    assert compare.main([str(old.parent), str(new)]) == 1
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert [line.split()[1] for line in lines[2:]] == ["lost", "slower", "faster"]
    assert "1.200" in lines[3] and "fused[a=1]" in lines[2] and "0.667" in lines[4]
    assert "1 slower, 1 lost, 1 faster, 0 same, 0 new; of ours 2 worse" in out
    assert compare.main([str(new), str(new)]) == 0
    assert compare.main([str(old.parent), str(new), "--tolerance", "0.3"]) == 1
    write_rows(new, [row("fused", 120), row("fused[a=1]", 49)])
    assert compare.main([str(old.parent), str(new), "--tolerance", "0.3"]) == 0


def test_a_time_of_samples_far_apart_is_marked() -> None:
    calm, wild = row("fused", 100, apart=0.02), row("fused", 100, apart=0.04)
    assert (calm["noisy"], wild["noisy"], row("fused", None)["noisy"]) == (False, True, False)
    assert (summary.time_or_word(calm), summary.time_or_word(wild)) == ("100.0", "100.0~")
    rows = [wild, row("xla/default", 200, apart=0.02)]
    assert "| 200 | 100~ | 2.00 / – | 10 |" in MATMUL.table(rows)[2]


def test_table_names_the_peers_that_were_measured() -> None:
    rows = [row("fused", 100), row("xla/default", 150), row("pallas", 130), row("fused", 100, shape=1)]
    lines = MATMUL.table(rows)
    assert lines[0].startswith("| M, K, N | best XLA, µs | Pallas, µs | fused, µs |")
    assert "| 150 | 130 | 100 | 1.50 / – | 1.30 |" in lines[2]
    assert "| – | – | 100 | – / – | – |" in lines[3]


def test_panels() -> None:
    """Rows of shapes that differ in one size; those that differ from all others in two are in none."""
    rows = [row("fused", 100, shape=i) for i in range(len(MATMUL.shapes))]
    size, groups = plots.panels(MATMUL, rows)
    assert size == "m"
    assert [(title, [each["m"] for each in group]) for title, group in groups] == [
        ("k 8192, n 28672", [16, 128, 256, 512, 2048, 8192])
    ]
    assert plots.panels(MATMUL, rows[:1]) == ("", [("", rows[:1])])
    attention = OPERATIONS["decode_attention"]
    folder = next(path for path in COMMITTED if (path / "decode_attention.json").exists())
    size, groups = plots.panels(attention, table.read(folder / "decode_attention.json"))
    assert (size, len(groups)) == ("s", 2)


def is_picture(path: Path) -> bool:
    return path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize("op", OPERATIONS.values(), ids=lambda op: op.name)
def test_page_of_every_operation(op: Any, tmp_path: Path) -> None:
    rows = [
        make_row(
            op, shape, each, world=4, mode=mode, checked="ok", floor=10.0, common=COMMON, samples=[20.0 + i, 21.0 + i],
        )
        for i, shape in enumerate(op.shapes)
        for mode in ("sustained", "burst")
        for each in op.implementations([{"splits": 3}]).values()
    ]  # fmt: skip
    write_rows(tmp_path / f"{op.name}-some-day.json", rows)
    assert report.main(["--from", str(tmp_path)]) == 0
    page = (tmp_path / "README.md").read_text()
    assert page.startswith("# 4 x NVIDIA G, 2000-01-01\n") and f"## {op.name}-some-day\n" in page
    pictures = sorted(tmp_path.glob("*.png"))
    assert len(pictures) == 2
    assert all(map(is_picture, pictures))


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda path: path.name)
def test_committed_pages_are_those_of_their_files(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / folder.name)
    page = report.render(copy).read_text()
    assert page == (folder / "README.md").read_text()


def test_a_page_without_times_or_without_files(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no results"):
        report.render(tmp_path)
    write_rows(tmp_path / "all_gather_matmul.json", [row("fused", None), row("xla/default", None)])
    page = report.render(tmp_path).read_text()
    assert "fused failed: it broke" in page and report.draw(tmp_path) == []


def test_one_command_makes_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run.py is called for each operation; the one that fails leaves what it measured."""
    commands = []

    def measure(command: list[str], check: bool) -> Any:
        commands.append(command[2:])
        write_rows(Path(command[command.index("--json") + 1]), [row("fused", 100), row("xla/default", 120)])
        return subprocess.CompletedProcess(command, len(commands) - 1)

    monkeypatch.setattr(report, "machine", lambda: (4, "NVIDIA H200 NVL"))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report.subprocess, "run", measure)
    operations = ["all_gather_matmul", "decode_attention"]
    assert report.main(["--operations", *operations, "--world", "2", "--peers", "xla"]) == 1
    folder = tmp_path / f"{datetime.date.today()}-2xh200-nvl"
    assert [command[0] for command in commands] == operations
    assert commands[0][1:] == ["--json", str(folder / "all_gather_matmul.json"), "--world", "2", "--peers", "xla"]
    assert "1.20 / –" in (folder / "README.md").read_text()
    assert len(json.loads((folder / "decode_attention.json").read_text())) == 2


def test_a_machine_without_gpus_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit, match="no GPU"):
        report.main([])
