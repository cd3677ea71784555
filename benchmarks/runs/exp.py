"""Forms of decode_step that no GPU has run: are they right, and how fast beside the form that has run, in one run.

python benchmarks/runs/exp.py SET [--seconds 240] [--only "LABEL;..."] [--tiny | --lower]

From the project's root, on two GPUs. SET is many, eight or eightmany. Each problem has a process of its own: it makes
its weights, compiles all its forms at once, waits until all others have compiled too (or until half of the time is
over), and then takes its turn with the GPUs. A form is right if its logits and its new keys and values are XLA's, and
the same bits six times. A line comes as soon as it is known, a table and what it decides at the end.

--tiny runs the same on the CPU, with tiny sizes, in the simulator. --lower compiles each form for Hopper, and says what
the assembler does.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

START = float(os.environ.get("EXP_START", time.time()))
WORLD = int(os.environ.get("EXP_WORLD", 2))
MESSAGES, VECTORS = {"exchanged": True}, {"vectors": 8}
CORES = {"tensor_cores": True}
BOTH = MESSAGES | VECTORS
REGISTERS = {"tensor_cores": False}
GEMMA = {
    "post_norms": True, "norm_plus_one": True, "activation": "gelu_tanh", "logit_soft_cap": 30.0,
    "score_soft_cap": 50.0, "windows": (1024, None), "tied": True,
}  # fmt: skip
LENGTHS = [0, 200, 255, 1, 63, 64, 65, 127, 128, 129, 31, 5, 250, 17, 90, 3]
SMALL = "{b},256,2,512,8,2,128,1024,1024"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A problem, and the forms that take it, the first one that which has run.

    Attributes:
      shape: of two ranks, as `one_launch.py` has it.
      lengths: of each sequence, if not as many as the context has room for. Then nothing is timed.
    """

    label: str
    shape: str
    forms: list
    weights: str = "bfloat16"
    changes: dict = dataclasses.field(default_factory=dict)
    lengths: list | None = None


def small(label, b, forms, weights="bfloat16", **changes):
    return Case(
        label=label, shape=SMALL.format(b=b), forms=forms, weights=weights, changes=changes, lengths=LENGTHS[:b]
    )


SHARE, WIDE = "{b},{slots},8,4096,8,2,128,3584,32064", "{b},{slots},8,4096,32,8,128,14336,32064"
ATT = {"attention_cores": True}
KEEP = {"keep_stream": True}
TELL = {"tell_queries": True}
MEET = {"tell_queries": False}
ROWS_OFF = {"row_cores": False}
PARTS, SUMS = {"tell_parts": True}, {"tell_sums": True}
PS = PARTS | SUMS
PA = PS | {"new_apart": True}
MM, QM = {"tell_queries": False, "tell_parts": False}, {"tell_queries": True, "tell_parts": False}
MP, QP = {"tell_queries": False, "tell_parts": True}, {"tell_queries": True, "tell_parts": True}
SETS = {
    "tiled2": [Case(label="8B/8, 4", shape=SHARE.format(b=4, slots=8192), forms=[QP | {"pace": p} for p in (0, 700, 850, 1000)] + [QP | {"in_flight": 3}, QP | {"in_flight": 3, "pace": 850}]),
        Case(label="8B/8, 8", shape=SHARE.format(b=8, slots=4096), forms=[QP | {"pace": p} for p in (0, 850)]),
        Case(label="8B/8, 16", shape=SHARE.format(b=16, slots=2048), forms=[QP | {"pace": p} for p in (0, 850)]),
        Case(label="8B/4, 4", shape=WIDE.format(b=4, slots=8192), forms=[QP | {"pace": p} for p in (0, 700)]),
        Case(label="70B/8, 4", shape="4,8192,8,8192,16,2,128,7168,32064", forms=[QP | {"pace": p} for p in (0, 700)])],
    "tiled": [Case(label="8B/8, 3", shape=SHARE.format(b=3, slots=8192), forms=[MM, QM, QP]),
        Case(label="8B/8, 4", shape=SHARE.format(b=4, slots=8192), forms=[MM, QM, MP, QP, QP | {"splits": 32}]),
        Case(label="8B/8, 8", shape=SHARE.format(b=8, slots=4096), forms=[MM, QM, MP, QP]),
        Case(label="8B/8, 16", shape=SHARE.format(b=16, slots=2048), forms=[MM, QM, MP, QP]),
        Case(label="8B/4, 16", shape=WIDE.format(b=16, slots=2048), forms=[MM, QM, MP, QP]),
        Case(label="8B/4, 4", shape=WIDE.format(b=4, slots=8192), forms=[MM, QM, QP]),
        Case(label="70B/8, 4", shape="4,8192,8,8192,16,2,128,7168,32064", forms=[MM, QM, QP]),
        Case(label="70B/10, 16", shape="16,4096,8,8192,64,8,128,28672,12800", forms=[MM, QM]),
        Case(label="8B/8, 4, int8", shape=SHARE.format(b=4, slots=8192), weights="int8", forms=[MM, QM, QP]),
        Case(label="Qwen3 32B/4, 1", shape="1,8192,8,5120,32,4,128,12800,75968", forms=[MM, QM, QP, REGISTERS])],
    "several": [Case(label="8B/8, 3", shape=SHARE.format(b=3, slots=8192), forms=[{}, REGISTERS, REGISTERS | SUMS]),
        Case(label="8B/8, 2", shape=SHARE.format(b=2, slots=8192), forms=[{}, CORES]),
        Case(label="8B/8, 4", shape=SHARE.format(b=4, slots=8192), forms=[{}, REGISTERS]),
        Case(label="70B/8, 3", shape="3,8192,8,8192,16,2,128,7168,32064", forms=[{}, REGISTERS]),
        Case(label="8B/8, 3, int8", shape=SHARE.format(b=3, slots=8192), weights="int8", forms=[{}, REGISTERS]),
        Case(label="Qwen3 32B/4, 1", shape="1,8192,8,5120,32,4,128,12800,75968", forms=[{}, REGISTERS, REGISTERS | {"in_flight": 3}]),
        Case(label="Gemma 2 9B/4, 3", shape="3,2048,8,3584,8,4,256,7168,128000", changes=GEMMA, forms=[{}, REGISTERS]),
        Case(label="Gemma 2 9B/4, 2", shape="2,2048,8,3584,8,4,256,7168,128000", changes=GEMMA, forms=[{}, CORES])],
    "patience": [Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{"pace": 850, "patience": p} for p in (0, 800, 1000, 1200)]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[{"in_flight": 3}, {"in_flight": 3, "patience": 800}, {"in_flight": 3, "patience": 1200}]),
        Case(label="70B/8, 1", shape="1,8192,8,8192,16,2,128,7168,32064", forms=[{"in_flight": 3}, {"in_flight": 3, "patience": 800}, {"in_flight": 3, "patience": 1200}]),
        Case(label="8B/8, 1, int8", shape=SHARE.format(b=1, slots=8192), weights="int8", forms=[{"pace": 850}, {"pace": 850, "patience": 1000}]),
        Case(label="8B/8, 2", shape=SHARE.format(b=2, slots=8192), forms=[{}, {"patience": 500}, {"patience": 800}])],
    "one850": [Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{"pace": 850}])],
    "pace": [Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{}, {"pace": 1000}, {"pace": 1100}] + [PS | {"pace": p} for p in (0, 900, 1000, 1100, 1200, 1300)] + [PS | {"pace": p, "in_flight": 3} for p in (1000, 1100, 1200)]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[{"in_flight": 3}] + [PS | {"in_flight": 3, "pace": p} for p in (0, 700, 850)]),
        Case(label="8B/8, 1, int8", shape=SHARE.format(b=1, slots=8192), weights="int8", forms=[{}] + [PS | {"pace": p} for p in (0, 1000, 1200, 1400)]),
        Case(label="8B/8, 2", shape=SHARE.format(b=2, slots=8192), forms=[PARTS, PARTS | {"pace": 1100}, PS | {"pace": 1100}]),
        Case(label="Gemma 2 9B/4, 1", shape="1,2048,8,3584,8,4,256,7168,128000", changes=GEMMA, forms=[SUMS, SUMS | {"pace": 1000}, SUMS | {"pace": 1100}]),
        Case(label="1B/2, 1", shape="1,8192,16,2048,32,8,64,8192,128256", forms=[PS, PS | {"pace": 900}, PS | {"pace": 1000}, PS | {"pace": 1100}])],
    "pairs": [Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{}] + [PS | {"pace": p} for p in (0, 900, 1000, 1100)] + [PS | {"pace": 1000, "in_flight": 3}]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[PS | {"in_flight": 3}, PS | {"in_flight": 2}, PS | {"in_flight": 4}]),
        Case(label="70B/8, 1", shape="1,8192,8,8192,16,2,128,7168,32064", forms=[{"in_flight": 3}, PARTS | {"in_flight": 3}]),
        Case(label="8B/8, 1, int8", shape=SHARE.format(b=1, slots=8192), weights="int8", forms=[{}] + [PS | {"pace": p} for p in (0, 1000)]),
        Case(label="Gemma 2 9B/4, 1", shape="1,2048,8,3584,8,4,256,7168,128000", changes=GEMMA, forms=[SUMS]),
        Case(label="1B/2, 1", shape="1,8192,16,2048,32,8,64,8192,128256", forms=[PS])],
    "packed": [Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{}, PARTS] + [PS | {"pace": p} for p in (0, 800, 900, 1000)] + [PS | {"pace": 900, "in_flight": 3}]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[{"in_flight": 3}, PS | {"in_flight": 3}, SUMS | {"in_flight": 3}]),
        Case(label="70B/8, 1", shape="1,8192,8,8192,16,2,128,7168,32064", forms=[{"in_flight": 3}, SUMS | {"in_flight": 3}, PS | {"in_flight": 3}]),
        Case(label="8B/8, 1, int8", shape=SHARE.format(b=1, slots=8192), weights="int8", forms=[{}] + [PS | {"pace": p} for p in (0, 900)]),
        Case(label="8B/8, 2", shape=SHARE.format(b=2, slots=8192), forms=[{}, PARTS, PS]),
        Case(label="Gemma 2 9B/4, 1", shape="1,2048,8,3584,8,4,256,7168,128000", changes=GEMMA, forms=[{}, SUMS]),
        Case(label="1B/2, 1", shape="1,8192,16,2048,32,8,64,8192,128256", forms=[{}, PS])],
    "apart": [Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{}, PS | {"pace": 850}, PA | {"splits": 129, "pace": 850}, PA | {"splits": 129}, PA | {"splits": 129, "pace": 750}, PA | {"splits": 129, "pace": 850, "in_flight": 3}]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[PS | {"in_flight": 3}, PA | {"in_flight": 3}]),
        Case(label="70B/8, 1", shape="1,8192,8,8192,16,2,128,7168,32064", forms=[{"in_flight": 3}, PS | {"in_flight": 3}, PA | {"in_flight": 3, "splits": 129}]),
        Case(label="8B/8, 1, int8", shape=SHARE.format(b=1, slots=8192), weights="int8", forms=[PS | {"pace": 850}, PA | {"splits": 129, "pace": 850}]),
        Case(label="8B/8, 2", shape=SHARE.format(b=2, slots=8192), forms=[PS, PA])],
    "w4": [Case(label="8B on four", shape="1,8192,8,4096,32,8,128,14336,128256", forms=[{}, {"tell_sums": False}, {"tell_parts": False}, {"tell_sums": False, "tell_parts": False}]),
        Case(label="Qwen3 32B-like on four, 4096 wide", shape="1,8192,8,4096,16,4,128,14336,32064", forms=[{}, {"tell_sums": False}]),
        Case(label="70B's eighths on four", shape="1,8192,8,8192,32,4,128,14336,64128", forms=[{}, {"tell_sums": True}])],
    "told2": [Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{}, PARTS, SUMS, PS, PS | {"in_flight": 3}]),
        Case(label="70B/8, 1", shape="1,8192,8,8192,16,2,128,7168,32064", forms=[{"in_flight": 3}, PARTS | {"in_flight": 3}, PS | {"in_flight": 3}]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[{"in_flight": 3}, PS | {"in_flight": 3}]),
        Case(label="8B/8, 1, int8", shape=SHARE.format(b=1, slots=8192), weights="int8", forms=[{}, PS]),
        Case(label="8B/8, 2", shape=SHARE.format(b=2, slots=8192), forms=[{}, PARTS, PS]),
        Case(label="Gemma 2 9B/4, 1", shape="1,2048,8,3584,8,4,256,7168,128000", changes=GEMMA, forms=[{}, SUMS]),
        Case(label="1B/2, 1", shape="1,8192,16,2048,32,8,64,8192,128256", forms=[{}, PS])],
    "times": [Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{"times": True}])],
    "flight2": [Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{}] + [{"in_flight": 23}, {"in_flight": 24}, {"in_flight": 26}, {"in_flight": 12}, {"in_flight": 13}, {"in_flight": 32}, {"in_flight": 33}] + [{"merged": 16}, {"merged": 64}]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[{}] + [{"in_flight": 3}, {"in_flight": 23}, {"in_flight": 24}, {"in_flight": 34}]),
        Case(label="70B/8, 1", shape="1,8192,8,8192,16,2,128,7168,32064", forms=[{}] + [{"in_flight": 3}, {"in_flight": 23}, {"in_flight": 24}, {"in_flight": 34}])],
    "fast": [Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{}, {"in_flight": 3}]),
        Case(label="8B/8, 1, int8", shape=SHARE.format(b=1, slots=8192), weights="int8", forms=[{}])],
    "last": [Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{}, {"in_flight": 1}, {"in_flight": 3}]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[{"in_flight": 3}]),
        Case(label="70B/8, 1", shape="1,8192,8,8192,16,2,128,7168,32064", forms=[{"in_flight": 3}, {"in_flight": 4}]),
        Case(label="8B/8, 1, int8", shape=SHARE.format(b=1, slots=8192), weights="int8", forms=[{}]),
        Case(label="8B/8, 1, e4m3", shape=SHARE.format(b=1, slots=8192), weights="float8_e4m3fn", forms=[{}]),
        Case(label="8B/8, 2", shape=SHARE.format(b=2, slots=8192), forms=[{}]),
        Case(label="Gemma 2 9B/4, 1", shape="1,2048,8,3584,8,4,256,7168,128000", changes=GEMMA, forms=[{}]),
        Case(label="1B/2, 1", shape="1,8192,16,2048,32,8,64,8192,128256", forms=[{}])],
    "before": [Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{}]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[{"in_flight": 3}]),
        Case(label="70B/8, 1", shape="1,8192,8,8192,16,2,128,7168,32064", forms=[{"in_flight": 3}]),
        Case(label="8B/8, 1, int8", shape=SHARE.format(b=1, slots=8192), weights="int8", forms=[{}]),
        Case(label="8B/8, 1, e4m3", shape=SHARE.format(b=1, slots=8192), weights="float8_e4m3fn", forms=[{}]),
        Case(label="8B/8, 2", shape=SHARE.format(b=2, slots=8192), forms=[{}])],

    "rows": [
        Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[ROWS_OFF, {}, {"in_flight": 3}]),
        Case(label="70B/8, 1", shape="1,8192,8,8192,16,2,128,7168,32064", forms=[ROWS_OFF, {}, {"in_flight": 3}, ROWS_OFF | {"in_flight": 3}]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[ROWS_OFF, {}, {"in_flight": 3}, ROWS_OFF | {"in_flight": 3}]),
        Case(label="70B/10, 1", shape="1,32768,8,8192,64,8,128,28672,12800", forms=[ROWS_OFF, {}]),
        Case(label="8B/8, 1, int8", shape=SHARE.format(b=1, slots=8192), weights="int8", forms=[ROWS_OFF, {}, {"in_flight": 3}]),
        Case(label="8B/8, 1, e4m3", shape=SHARE.format(b=1, slots=8192), weights="float8_e4m3fn", forms=[ROWS_OFF, {}]),
        Case(label="70B/8, 1, int8", shape="1,8192,8,8192,16,2,128,7168,32064", weights="int8", forms=[ROWS_OFF, {}]),
        Case(label="8B/8, 2", shape=SHARE.format(b=2, slots=8192), forms=[ROWS_OFF, {}]),
        Case(label="8B/8, 4", shape=SHARE.format(b=4, slots=8192), forms=[{}, REGISTERS]),
        Case(label="8B/8, 2, int8", shape=SHARE.format(b=2, slots=8192), weights="int8", forms=[ROWS_OFF, {}]),
        Case(label="1B/2, 1", shape="1,8192,16,2048,32,8,64,8192,128256", forms=[ROWS_OFF, {}]),
        Case(label="Gemma 2 9B/4, 1", shape="1,2048,8,3584,8,4,256,7168,128000", changes=GEMMA, forms=[ROWS_OFF, {}]),
        Case(label="Qwen3 32B/4, 1", shape="1,8192,8,5120,32,4,128,12800,75968", forms=[{}, REGISTERS, REGISTERS | ROWS_OFF]),
        small("small qwen 2, heads of 64", 2, [{}], qkv_bias=True, head_dim=64, heads=4),
        small("small qwen 3", 2, [{}], qk_norm=True),
        small("small qwen 2, heads of 64, int8", 2, [{}], "int8", qkv_bias=True, head_dim=64, heads=4),
    ],
    "words": [
        Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{}, {"in_flight": 3}, MEET]),
        Case(label="70B/8, 1", shape="1,8192,8,8192,16,2,128,7168,32064", forms=[{}, {"in_flight": 3}, MEET]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[{}, {"in_flight": 3}, MEET]),
        Case(label="70B/10, 1", shape="1,32768,8,8192,64,8,128,28672,12800", forms=[{}, {"in_flight": 2}]),
        Case(label="8B/8, 2", shape=SHARE.format(b=2, slots=8192), forms=[{}]),
        Case(label="1B/2, 1", shape="1,8192,16,2048,32,8,64,8192,128256", forms=[{}, {"in_flight": 3}]),
        Case(label="8B on four, 1", shape="1,8192,8,4096,16,4,128,7168,32064", forms=[{}, {"in_flight": 3}]),
    ],
    "attention": [
        Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{}, ATT]),
        Case(label="70B/10, 1", shape="1,32768,8,8192,64,8,128,28672,12800", forms=[{}, ATT, CORES]),
        Case(label="70B/8, 1", shape="1,8192,8,8192,16,2,128,7168,32064", forms=[{}, ATT]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[{}, ATT]),
        Case(label="8B/8, 1, int8", shape=SHARE.format(b=1, slots=8192), weights="int8", forms=[{}, ATT, ATT | {"stage": 8192}]),
        Case(label="8B/8, 1, e4m3", shape=SHARE.format(b=1, slots=8192), weights="float8_e4m3fn", forms=[{}, ATT]),
        Case(label="Qwen3 32B/4, 1", shape="1,8192,8,5120,32,4,128,12800,75968", forms=[{}, REGISTERS, ATT | REGISTERS]),
        Case(label="8B/8, 2", shape=SHARE.format(b=2, slots=8192), forms=[{}, ATT | REGISTERS]),
        Case(label="Gemma 2 9B/4, 1", shape="1,2048,8,3584,8,4,256,7168,128000", changes=GEMMA, forms=[{}, ATT]),
        small("small qwen 2, heads of 64", 2, [ATT | REGISTERS], qkv_bias=True, head_dim=64, heads=4),
    ],
    "kept4": [  # EXP_WORLD=4
        Case(label="8B, 1, 8 layers", shape="1,8192,8,4096,32,8,128,14336,128256", forms=[{}, TELL, KEEP | TELL]),
        Case(label="Qwen3 32B/2", shape="1,8192,8,5120,32,4,128,12800,75968", forms=[{}]),
    ],
    "sixteen": [
        Case(label="70B/10, 16", shape="16,4096,8,8192,64,8,128,28672,12800", forms=[{}, {"in_flight": 3}, {"in_flight": 4}]),
        Case(label="8B/4, 16", shape=WIDE.format(b=16, slots=2048), forms=[{}, {"in_flight": 3}]),
    ],
    "told": [
        Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[MEET, {}, {"in_flight": 3}, {"merged": 16}]),
        Case(label="70B/8, 1", shape="1,8192,8,8192,16,2,128,7168,32064", forms=[MEET, {}]),
        Case(label="70B/10, 1", shape="1,32768,8,8192,64,8,128,28672,12800", forms=[MEET, {}, {"in_flight": 3}, {"in_flight": 4}, MEET | {"in_flight": 3}]),
        Case(label="70B/10, 1 of 4096", shape="1,4096,8,8192,64,8,128,28672,12800", forms=[MEET, {}]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[MEET, {}]),
        Case(label="8B/8, 1, int8", shape=SHARE.format(b=1, slots=8192), weights="int8", forms=[MEET, {}]),
        Case(label="8B/8, 1, e4m3", shape=SHARE.format(b=1, slots=8192), weights="float8_e4m3fn", forms=[MEET, {}]),
        Case(label="8B/8, 2, int8", shape=SHARE.format(b=2, slots=8192), weights="int8", forms=[MEET, {}]),
        Case(label="8B/8, 2", shape=SHARE.format(b=2, slots=8192), forms=[MEET, {}]),
        Case(label="1B/2, 1", shape="1,8192,16,2048,32,8,64,8192,128256", forms=[MEET, {}]),
        small("small qwen 2, heads of 64", 2, [{}], qkv_bias=True, head_dim=64, heads=4),
        small("small qwen 3", 2, [{}], qk_norm=True),
    ],
    "next": [
        Case(label="70B/8, 1", shape="1,8192,8,8192,16,2,128,7168,32064", forms=[{}, {"in_flight": 3}, {"merged": 16}]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[{}, {"in_flight": 3}, {"merged": 16}]),
        Case(label="70B/10, 1", shape="1,32768,8,8192,64,8,128,28672,12800", forms=[{}, {"in_flight": 2}, {"merged": 16}]),
        Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{}, {"merged": 16}, MEET]),
        Case(label="70B/10, 16", shape="16,4096,8,8192,64,8,128,28672,12800", forms=[{}, {"in_flight": 2}]),
    ],
    "flight": [
        Case(label="70B/10, 16", shape="16,4096,8,8192,64,8,128,28672,12800", forms=[{}, {"in_flight": 4}, {"in_flight": 6}]),
        Case(label="8B/4, 16", shape=WIDE.format(b=16, slots=2048), forms=[{}, {"in_flight": 4}]),
        Case(label="8B/8, 8", shape=SHARE.format(b=8, slots=2048), forms=[{}, {"in_flight": 4}]),
        Case(label="70B/8, 16", shape="16,4096,8,8192,16,2,128,7168,32064", forms=[{}, {"in_flight": 4}]),
        Case(label="8B/8, 8, int8", shape=SHARE.format(b=8, slots=2048), weights="int8", forms=[{}, {"in_flight": 8}]),
        Case(label="8B/4, 4", shape=WIDE.format(b=4, slots=8192), forms=[{}, {"in_flight": 4}]),
        Case(label="70B/10, 4", shape="4,4096,8,8192,64,8,128,28672,12800", forms=[{}, {"in_flight": 4}]),
    ],
    "kept": [
        Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{}, KEEP, TELL, KEEP | TELL]),
        Case(label="70B/8, 1", shape="1,8192,8,8192,16,2,128,7168,32064", forms=[{}, TELL, KEEP | TELL]),
        Case(label="70B/10, 1", shape="1,32768,8,8192,64,8,128,28672,12800", forms=[{}, TELL]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[{}, TELL, KEEP | TELL]),
        Case(label="8B/8, 1, int8", shape=SHARE.format(b=1, slots=8192), weights="int8", forms=[{}, KEEP | TELL]),
        Case(label="8B/8, 2", shape=SHARE.format(b=2, slots=8192), forms=[ATT | REGISTERS, ATT | REGISTERS | TELL, ATT | REGISTERS | KEEP | TELL]),
        small("small qwen 2, heads of 64", 2, [ATT | REGISTERS | KEEP | TELL], qkv_bias=True, head_dim=64, heads=4),
        small("small qwen 3", 2, [ATT | REGISTERS | KEEP | TELL], qk_norm=True),
    ],
    "tune": [
        Case(label="8B/8, 1", shape=SHARE.format(b=1, slots=8192), forms=[{}, {"merged": 16}, {"merged": 32}, {"merged": 16, "splits": 66}, {"merged": 32, "splits": 66}, {"merged": 32, "splits": 44}]),
        Case(label="70B/10, 1", shape="1,32768,8,8192,64,8,128,28672,12800", forms=[{}, {"in_flight": 3}, {"in_flight": 3, "merged": 32}, {"in_flight": 4, "merged": 32}]),
        Case(label="70B/8, 1", shape="1,8192,8,8192,16,2,128,7168,32064", forms=[{}, {"merged": 16}, {"merged": 16, "splits": 66}, {"in_flight": 3}]),
        Case(label="8B/4, 1", shape="1,8192,8,4096,32,8,128,14336,32064", forms=[{}, {"merged": 16}, {"merged": 32}, {"in_flight": 3, "merged": 16}]),
        Case(label="8B/8, 3, int8", shape=SHARE.format(b=3, slots=8192), weights="int8", forms=[{}, ATT | REGISTERS]),
        Case(label="8B/8, 2, e4m3", shape=SHARE.format(b=2, slots=8192), weights="float8_e4m3fn", forms=[{}, ATT | REGISTERS]),
        Case(label="70B/8, 2, int8", shape="2,8192,8,8192,16,2,128,7168,32064", weights="int8", forms=[{}, ATT | REGISTERS]),
        Case(label="70B/8, 2", shape="2,8192,8,8192,16,2,128,7168,32064", forms=[{}, ATT | REGISTERS]),
    ],
    "two": [
        *(
            Case(label=f"{b} sequences, {weights}", shape=SHARE.format(b=b, slots=8192), weights=weights, forms=forms)
            for weights, b, forms in (
                ("int8", 1, [{}, CORES]), ("int8", 2, [REGISTERS, CORES]), ("int8", 3, [REGISTERS, CORES]),
                ("float8_e4m3fn", 2, [REGISTERS, CORES]), ("bfloat16", 2, [REGISTERS, CORES]),
                ("bfloat16", 8, [{}]), ("int8", 8, [{}]), ("bfloat16", 1, [{}]),
            )
        ),
        Case(label="8 sequences of 2048, 8B's eighth", shape=SHARE.format(b=8, slots=2048), forms=[{}]),
        Case(
            label="4 sequences, Gemma 2 9B's quarter", shape="4,2048,8,3584,8,4,256,7168,128000", changes=GEMMA,
            forms=[REGISTERS, CORES],
        ),
        small("small gemma 2", 16, [{}], **{**GEMMA, "head_dim": 256, "heads": 4, "windows": (64, None)}),
        small("small gemma 2, two", 2, [CORES], **{**GEMMA, "head_dim": 256, "heads": 4, "windows": (64, None)}),
    ],
    "many": [
        Case(label="16 sequences, 8B on four", shape=WIDE.format(b=16, slots=2048), forms=[{}, MESSAGES]),
        Case(
            label="8 sequences of 8192, 8B's eighth", shape=SHARE.format(b=8, slots=8192),
            forms=[{}, MESSAGES, VECTORS, BOTH],
        ),
        Case(label="8 sequences of 2048, 8B's eighth", shape=SHARE.format(b=8, slots=2048), forms=[{}, MESSAGES, BOTH]),
        Case(label="2 sequences of 8192, 8B's eighth", shape=SHARE.format(b=2, slots=8192), forms=[{}, MESSAGES, BOTH]),
        Case(
            label="8 sequences, Gemma 2 9B's quarter", shape="8,2048,8,3584,8,4,256,7168,128000", changes=GEMMA,
            forms=[{"kernel": "operations"}, CORES, CORES | BOTH],
        ),
        small("small gemma 2", 16, [CORES, CORES | MESSAGES], **{**GEMMA, "head_dim": 256, "heads": 4,
                                                                "windows": (64, None)}),
        small("small qwen 3", 5, [MESSAGES, BOTH], qk_norm=True),
        small("small qwen 2, heads of 64", 9, [MESSAGES], qkv_bias=True, head_dim=64, tied=True, heads=4),
        small("8 queries a key", 16, [MESSAGES], heads=16),
    ],
    "eight": [
        *(
            Case(label=f"1 sequence, {weights}", shape=SHARE.format(b=1, slots=8192), weights=weights, forms=forms)
            for weights, forms in (
                ("bfloat16", [{}]), ("int8", [{}, {"in_flight": 8}, {"stage": 8192, "num_stages": 12, "in_flight": 2}]),
                ("float8_e4m3fn", [{}]),
            )
        ),
        *(
            Case(label=f"4 sequences, {weights}", shape=SHARE.format(b=4, slots=8192), weights=weights, forms=forms)
            for weights, forms in (
                ("bfloat16", [{}]), ("int8", [{}, CORES, CORES | BOTH]), ("float8_e4m3fn", [{}]),
            )
        ),
        small("small qwen 2, heads of 64, int8", 2, [{}], "int8", qkv_bias=True, head_dim=64, heads=4),
        small("small gemma 2, e4m3", 2, [{}], "float8_e4m3fn", **{**GEMMA, "head_dim": 256, "heads": 4, "tied": False}),
    ],
    "eightmany": [
        *(
            Case(
                label=f"{b} sequences, {weights}", shape=SHARE.format(b=b, slots=8192), weights=weights,
                forms=[{}, BOTH if b <= 8 else MESSAGES],
            )
            for b in (8, 16) for weights in ("bfloat16", "int8", "float8_e4m3fn")
        ),
        Case(
            label="16 sequences, 8B on four, int8", shape=WIDE.format(b=16, slots=2048), weights="int8",
            forms=[{}, {"in_flight": 8}],
        ),
        Case(label="16 sequences, 8B on four, bfloat16", shape=WIDE.format(b=16, slots=2048), forms=[{}]),
        small("small qwen 3, int8", 5, [{}, BOTH], "int8", qk_norm=True),
        small("small llama, e4m3", 16, [{}, MESSAGES], "float8_e4m3fn"),
    ],
}  # fmt: skip

# Forms that are not in the tree any more.
SETS = {
    name: [
        dataclasses.replace(case, forms=[form for form in case.forms if not form.keys() & {"exchanged", "vectors"}] or [{}])
        for case in cases
    ]
    for name, cases in SETS.items()
}


def say(*words):
    print(f"[{time.time() - START:.0f} s]", *words, flush=True)


def model_of(case, world, tiny):
    from benchmarks import one_launch

    sizes = list(map(int, case.shape.split(",")))
    if tiny:
        b, (n, k) = sizes[0], sizes[4:6]
        sizes = [b, 64, 1, 256, n // k * 2, 2, case.changes.get("head_dim", 64), 256, 32]
        sizes[6] = min(sizes[6], 64)
    model = one_launch.model_of(sizes, world)
    changes = {name: value for name, value in case.changes.items() if not tiny or name not in ("heads", "head_dim")}
    return dataclasses.replace(model, **changes), sizes


def problem_of(case, world=WORLD, tiny=False):
    from benchmarks import one_launch

    model, sizes = model_of(case, world, tiny)
    b, slots = sizes[:2]
    steps = 2 if tiny else one_launch.STEPS
    lengths = [slots - steps - 1] * b if case.lengths is None else [each % (slots - steps) for each in case.lengths]
    return one_launch.Problem(model, world, b, slots, lengths, weights=case.weights), steps


def config_of(case, form, tiny):
    """The settings of a form; in the simulator also those that make it small."""
    if not tiny or form.get("kernel") == "operations":
        return form
    least = {"programs": 3, "num_warps": 4, "stage": 2048, "num_stages": 4, "splits": 2}
    return least | {name: value for name, value in form.items() if name not in ("stage", "num_stages")}


def function_of(problem, steps, implementation, config):
    """So many steps in one program: the sum of the logits, the last ones, and the new keys and values."""
    import jax.numpy as jnp
    from jax import lax

    import jaxtaxfree as jtf
    from benchmarks.one_launch import AXIS

    config = None if implementation == "xla" else {"kernel": "hopper"} | config

    def run(params, x, cache, lengths, tables):
        def one(i, carry):
            cache, total, last = carry
            new, _ = lax.optimization_barrier((x + (i % 7).astype(x.dtype), last))
            logits, cache = jtf.decode_step(
                params, new, cache, lengths + i, AXIS, model=problem.model, cos=tables[0], sin=tables[1],
                implementation=implementation, config=config,
            )  # fmt: skip
            return cache, total + logits, logits

        zero = jnp.zeros((problem.b, problem.model.vocab // problem.world), jnp.float32)
        cache, total, last = lax.fori_loop(0, steps, one, (cache, zero, zero))
        at = (lengths[:, None] + jnp.arange(steps))[None, :, None, :, None]
        new = [jnp.take_along_axis(part, at, axis=3).astype(jnp.float32) for part in cache]
        return total, last, *new

    return run


def program_of(problem, steps, implementation, config):
    from benchmarks.one_launch import CACHE, OUT

    return problem.program(function_of(problem, steps, implementation, config), (OUT, OUT, CACHE, CACHE))


@contextlib.contextmanager
def turn(folder):
    """While this lasts no other process of the run uses the GPUs."""
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wait_for_all(folder, count, until):
    while len(list(folder.glob("*.compiled"))) < count and time.time() < until:
        time.sleep(0.2)


def run_case(name, index, folder, seconds, tiny, count):
    """Compiles the forms of a case, and then checks and times them."""
    case = SETS[name][index]
    if tiny:
        os.environ["JAX_PLATFORMS"] = "cpu"
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import numpy as np

    if tiny:
        jax.config.update("jax_num_cpu_devices", WORLD)
    import jaxtaxfree as jtf
    from benchmarks.one_launch import error_of, seconds_of

    problem, steps = problem_of(case, tiny=tiny)
    jax.block_until_ready(problem.operands)
    ours = "simulate" if tiny else "fused"
    with concurrent.futures.ThreadPoolExecutor(1 + len(case.forms)) as pool:
        wanted = pool.submit(program_of, problem, steps, "xla", {})
        runs = [pool.submit(program_of, problem, steps, ours, config_of(case, form, tiny)) for form in case.forms]
        for form, run in zip(case.forms, runs):
            if run.exception():
                say(case.label, form, f"{type(run.exception()).__name__}: {str(run.exception())[:600]}")
        wanted = wanted.result()
    say(case.label, "compiled")
    (folder / f"{index}.compiled").touch()
    wait_for_all(folder, count, START + seconds / 2)
    found = {}
    plain = wanted
    with turn(folder):
        wanted = jtf.block_until_ready(plain(*problem.operands))
        for form, run in zip(case.forms, runs):
            if run.exception():
                continue
            run = run.result()
            try:
                first = jtf.block_until_ready(run(*problem.operands))
                errors = [float(error_of(*pair)) for pair in zip(first, wanted)]
                again = [jtf.block_until_ready(run(*problem.operands)) for _ in range(1 if tiny else 5)]
                same = all(np.array_equal(a, b) for each in again for a, b in zip(each, first))
                # `not <` and not `>=`, because an error may be NaN
                right = same and max(errors[:2]) < 0.03 and max(errors[2:]) < 0.02
                found[json.dumps(form)] = row = {
                    "right": bool(right), "errors": errors, "same": bool(same), "us": [], "run": run,
                }  # fmt: skip
                say(case.label, form, "right" if right else "WRONG", *(f"{e:.1e}" for e in errors), "same bits", same)
            except Exception as error:
                say(case.label, form, f"{type(error).__name__}: {str(error)[-int(os.environ.get("CHARS","600")):]}")
    found["xla"] = {"right": True, "us": [], "run": plain}
    keep_rows(folder, index, found)
    rounds = 0 if case.lengths is not None else 1 if tiny else 3
    for _ in range(rounds):  # all processes in turn, and all forms of one next to each other
        with turn(folder):
            for form, row in found.items():
                if tiny:
                    row["us"].append(float("nan"))
                    continue
                row["us"].append(1e6 * seconds_of(lambda: row["run"](*problem.operands), 0.2) / steps)  # noqa: B023
                say(case.label, form, f"{row['us'][-1]:.1f} us a step")
        keep_rows(folder, index, found)
    os._exit(0)


def keep_rows(folder, index, found):
    """For the table at the end, even if the time is over before."""
    rows = {form: {key: value for key, value in row.items() if key != "run"} for form, row in found.items()}
    (folder / f"{index}.new").write_text(json.dumps(rows))
    (folder / f"{index}.new").rename(folder / f"{index}.json")


def lower(name, only):
    """Compiles each form for Hopper on the CPU, and says what the assembler does."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_num_cpu_devices", 8)
    import jax.numpy as jnp

    from benchmarks import one_launch
    from tests.compiled.test_compiled import ptxas_report, spilled_bytes
    from tests.compiled.test_gluon import PTX, SHARED_MEMORY, launch_of
    from tests.helpers.support import Compiled, lower_for_cuda, mesh_of, sharded

    for case in SETS[name]:
        if only and case.label not in only:
            continue
        model, sizes = model_of(case, WORLD, False)
        b, slots = sizes[:2]
        mesh = mesh_of(WORLD, one_launch.AXIS)
        specs, shapes = model.partition_specs(one_launch.AXIS), model.param_shapes()
        dtypes = dict.fromkeys(shapes, "bfloat16")
        if case.weights != "bfloat16":
            dtypes |= dict.fromkeys(model.matrices, case.weights) | dict.fromkeys(model.scale_shapes(), "float32")
            specs, shapes = specs | model.scale_specs(one_launch.AXIS), shapes | model.scale_shapes()
        params = {each: sharded(mesh, spec, shapes[each], dtypes[each]) for each, spec in specs.items()}
        cache = (
            sharded(mesh, one_launch.CACHE, (model.layers, b, model.kv_heads, slots, model.head_dim), "bfloat16"),
        ) * 2
        table = sharded(mesh, P(), (slots, model.rotated // 2), "float32")
        operands = params, sharded(mesh, P(), (b, model.d_model), "bfloat16"), cache
        operands += sharded(mesh, P(), (b,), jnp.int32), (table, table)
        problem = argparse.Namespace(model=model, b=b, world=WORLD)
        outs = one_launch.OUT, one_launch.OUT, one_launch.CACHE, one_launch.CACHE
        in_specs = specs, P(), (one_launch.CACHE,) * 2, P(), (P(), P())
        for form in case.forms:
            function = function_of(problem, one_launch.STEPS, "fused", form)
            try:
                text = lower_for_cuda(
                    jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=outs, check_vma=False), *operands
                )
                if form.get("kernel") == "operations":
                    say(case.label, form, "lowered")
                    continue
                kernel = launch_of(text)
                report = ptxas_report(Compiled(kernel[PTX].decode(), kernel[SHARED_MEMORY], (), {}))
                say(case.label, form, f"{spilled_bytes(report)} bytes spilled, {kernel[SHARED_MEMORY]} shared")
            except Exception as error:
                say(case.label, form, f"{type(error).__name__}: {str(error)[-int(os.environ.get("CHARS","600")):]}")


def decide(folder, cases):
    """Prints a table. Returns how many forms are wrong, or have not run."""
    wrong = 0
    say("of each form: right, median us a step, times the first form of its case")
    for index, case in cases:
        path = folder / f"{index}.json"
        rows = json.loads(path.read_text()) if path.exists() else {}
        least = next((statistics.median(row["us"]) for row in rows.values() if row["us"]), 0)
        for form in ["xla", *map(json.dumps, case.forms)]:
            row = rows.get(form)
            wrong += row is None or not row["right"]
            if row is None:
                print(f"  {case.label:38s} {form:60s} NOTHING", flush=True)
                continue
            us = f"{statistics.median(row['us']):8.1f} {least / statistics.median(row['us']):6.3f}" if row["us"] else ""
            print(f"  {case.label:38s} {form:60s} {'right' if row['right'] else 'WRONG'} {us}", flush=True)
    return wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--only", type=lambda text: text.split(";"), help="labels, with semicolons between them")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--lower", action="store_true")
    parser.add_argument("--case", nargs=3, help="number of the case, folder, how many there are: a process of the run")
    options = parser.parse_args()
    if options.lower:
        return lower(options.set, options.only)
    if options.case:
        index, folder, count = options.case
        return run_case(options.set, int(index), Path(folder), options.seconds, options.tiny, int(count))
    cases = [(i, case) for i, case in enumerate(SETS[options.set]) if not options.only or case.label in options.only]
    folder = Path(tempfile.mkdtemp())
    command = [sys.executable, "-u", __file__, options.set, "--seconds", str(options.seconds)]
    command += ["--tiny"] if options.tiny else []
    environment = os.environ | {"EXP_START": str(START)}
    at_once = min(2, len(cases)) if options.tiny else len(cases)
    waiting, running = list(cases), []
    while waiting or running:
        while waiting and len(running) < at_once:
            index, _ = waiting.pop(0)
            extra = ["--case", str(index), str(folder), str(at_once)]
            running.append((index, subprocess.Popen([*command, *extra], env=environment, cwd=ROOT)))
        for index, process in list(running):
            if process.poll() is not None:
                running.remove((index, process))
                if process.returncode:
                    (folder / f"{index}.compiled").touch()  # so that nobody waits for it
                    say(SETS[options.set][index].label, "ended with", process.returncode)
        if not options.tiny and time.time() - START > options.seconds - 8:
            say("out of time")
            for _, process in running:
                process.kill()
            break
        time.sleep(0.2)
    return decide(folder, cases)


if __name__ == "__main__":
    sys.exit(bool(main()))
