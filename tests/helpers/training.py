"""Trains the examples' transformer with data and tensor parallelism: fused kernels beside XLA's own collectives.

    python -m tests.helpers.training                 # every arrangement of processes that this machine can have
    python -m tests.helpers.training --steps 10000 --seconds 600 --only "one process, 1 x 2"

Each step's gradients are summed over "data" by XLA, layer by layer, while the fused kernels of the layers before go on
over "model". XLA's latency-hiding scheduler sees to that, and CUDA graphs, in which XLA runs one thing at a time, are
off. Fused steps and XLA's take turns, ten at a time, and both begin with the same parameters; what is compared is the
loss of each step. Training magnifies differences of rounding, and at some steps a lot. So XLA takes the same ten steps
once more from parameters of which an eighth is moved by a rounding error: how far those losses go apart says what the
kernels' may differ. Where they differ more, other eighths are moved, up to `MOVINGS` times, and the farthest counts: at
steps that magnify a lot, one eighth says little. A step that does not end is named, with what each process was at.

Processes may share a GPU, which is slow: each has it for some milliseconds.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import mmap
import os
import pathlib
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any, Self

ROOT = pathlib.Path(__file__).parents[2]
CHUNK = 10  # steps of one implementation before it is the other's turn
BATCHES = 8  # which the steps take in turns
AHEAD = 2  # steps that are under way
RATE = 1e-3
TOLERANCE = {"bfloat16": 0.05, "float32": 1e-3}  # bits per byte, of steps that begin with the same parameters
MAGNIFIED = 4.0  # later losses may differ by this many times the difference that moved parameters make, and TOLERANCE
MOVINGS = 16  # of parameters, at most, for the same steps
START = 300.0  # seconds in which processes get ready
XLA, FUSED = 0, 1  # whose turn it is

SIZES: dict[str, dict[str, int]] = {
    # Kernels for many rows on Hopper, which fill a GPU.
    "large": {"d_model": 1024, "n_layers": 3, "n_heads": 16, "n_kv_heads": 4, "head_dim": 64, "d_mlp": 4096},
    # For processes that share a GPU: what NCCL has to take over sockets is little.
    "small": {"d_model": 256, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32, "d_mlp": 1024},
    "tiny": {"d_model": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_mlp": 48},
}


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Who trains.

    Attributes:
      processes: how many.
      shape: of the mesh ("data", "model"), in the order of the processes.
      gpus: how many there are for them: fewer than devices in the mesh are shared.
      size: of the model, a key of SIZES.
      rows, length: of each part of the batch, along "data".
      dtype: of the parameters.
      platform: "cuda" or "cpu".
    """

    processes: int
    shape: tuple[int, int]
    gpus: int
    size: str = "large"
    rows: int = 8
    length: int = 256
    dtype: str = "bfloat16"
    platform: str = "cuda"

    @property
    def each(self) -> int:
        return self.shape[0] * self.shape[1] // self.processes

    @property
    def shared(self) -> bool:
        return self.gpus < self.shape[0] * self.shape[1]

    @property
    def name(self) -> str:
        processes = "one process" if self.processes == 1 else f"{self.processes} processes"
        place = f" on {self.gpus} GPU{'s' if self.gpus > 1 else ''}" if self.shared else ""
        return f"{processes}{place}, {self.shape[0]} x {self.shape[1]}"


def arrangements(gpus: int) -> Iterator[Arrangement]:
    """Those that so many GPUs can have; on a CPU one, whose kernels are XLA's."""
    if gpus == 0:
        yield Arrangement(2, (2, 2), 4, "tiny", 2, 8, "float32", "cpu")
    for shape in ((2, 1), (1, 2), (2, 2), (4, 2), (2, 4)):
        if (devices := shape[0] * shape[1]) <= gpus:
            for processes in (1, devices):
                yield Arrangement(processes, shape, devices)
    if 2 <= gpus < 4:
        yield Arrangement(4, (2, 2), 2, "small", 8, 128)
    if gpus:
        yield Arrangement(4, (2, 2), 1, "small", 8, 128)


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of an arrangement.

    Attributes:
      steps: of the fused program; XLA took as many.
      fused_ms, xla_ms: of a step, the median of all chunks.
      difference: the largest of two losses of a step, in bits per byte.
      moved: the largest difference that moved parameters make to a loss of XLA's.
      movings: the most that ten steps needed.
      beside: fused kernels that the program runs while a sum over "data" is under way.
      error: what went wrong, if anything did.
    """

    steps: int = 0
    fused_ms: float = 0.0
    xla_ms: float = 0.0
    difference: float = 0.0
    moved: float = 0.0
    movings: int = 0
    beside: int = 0
    error: str = ""


class Progress:
    """The steps that a process has done, in a file, so that they can be read while it hangs."""

    _FORM = struct.Struct("iid")  # step, whose turn, when

    def __init__(self, path: pathlib.Path):
        if not path.exists():
            path.write_bytes(self._FORM.pack(-1, XLA, time.time()))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self._FORM.size)

    def write(self, step: int, turn: int) -> None:
        self._map[:] = self._FORM.pack(step, turn, time.time())

    def read(self) -> tuple[int, int, float]:
        return self._FORM.unpack(self._map[:])


class Training:
    """Processes that get ready, which takes longest, and train when they are told to.

    Args:
      steps: to take with each implementation, at most.
      seconds: after which no new chunk of steps begins.
      hang_at: a step at which the last process hangs, for the test of this.
    """

    def __init__(self, given: Arrangement, steps: int, seconds: float, hang_at: int = -1):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.given = given
        self._folder = tempfile.TemporaryDirectory()
        self._path = pathlib.Path(self._folder.name)
        self._progress = [Progress(self._path / f"progress{rank}") for rank in range(given.processes)]
        self._running = []
        for rank in range(given.processes):
            work = {"rank": rank, "port": port, "steps": steps, "seconds": seconds, "folder": str(self._path)}
            work |= {"hang_at": hang_at if rank == given.processes - 1 else -1, "given": dataclasses.asdict(given)}
            with self._log(rank).open("w") as log:
                self._running.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.helpers.training", "--work", json.dumps(work)],
                        env=_environment(given, rank, port),
                        cwd=ROOT,
                        stdout=log,
                        stderr=log,
                    )
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def run(self, patience: float = 60.0) -> Result:
        """Trains; a process that gets no further for so many seconds hangs."""
        error = self._until_ready() or self._until_done(patience)
        if error:
            return Result(steps=max(0, self._progress[0].read()[0]), error=error)
        return Result(**json.loads((self._path / "result").read_text()))

    def wrote(self) -> list[str]:
        """What each process wrote."""
        return [self._log(rank).read_text() for rank in range(self.given.processes)]

    def _log(self, rank: int) -> pathlib.Path:
        return self._path / f"log{rank}"

    def _until_ready(self) -> str:
        end = time.monotonic() + START
        while waiting := [rank for rank in range(self.given.processes) if not (self._path / f"ready{rank}").exists()]:
            if error := self._failure():
                return error
            if time.monotonic() > end:
                return f"process {', '.join(map(str, waiting))} did not get ready in {START:.0f} s"
            time.sleep(0.1)
        for progress in self._progress:
            progress.write(-1, XLA)  # from here on it counts
        (self._path / "go").touch()
        return ""

    def _until_done(self, patience: float) -> str:
        while any(process.poll() is None for process in self._running):
            if error := self._failure():
                return error
            late = [each.read()[2] for process, each in zip(self._running, self._progress) if process.poll() is None]
            if late and time.time() - max(late) > patience:
                return f"hangs: {self._said()}"
            time.sleep(0.1)
        return self._failure()

    def _failure(self) -> str:
        failed = [rank for rank, process in enumerate(self._running) if process.poll()]
        if not failed:
            return ""
        time.sleep(2.0)  # for the others to write why
        return f"process {', '.join(map(str, failed))} failed: {self._said()}"

    def _said(self) -> str:
        turns = {XLA: "XLA's", FUSED: "fused"}
        words = [
            f"process {rank} has done {turns[turn]} step {step}" if step >= 0 else f"process {rank} has not begun"
            for rank, (step, turn, _) in enumerate(each.read() for each in self._progress)
        ]
        return "; ".join(words)


def _environment(given: Arrangement, rank: int, port: int) -> dict[str, str]:
    found = {**os.environ, "JAX_PLATFORMS": given.platform, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.08"}
    found.setdefault("JAXTAXFREE_TIMEOUT", "30")
    if given.shared:
        found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        found["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
        # NCCL refuses two ranks on one GPU, unless it takes them for those of two hosts.
        found |= {"NCCL_HOSTID": f"rank {rank} of {port}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return found


# In the processes


def work(rank: int, port: int, steps: int, seconds: float, folder: str, hang_at: int, given: dict[str, Any]) -> None:
    """Trains, as one of the processes."""
    arrangement = Arrangement(**{**given, "shape": tuple(given["shape"])})
    progress = Progress(pathlib.Path(folder, f"progress{rank}"))
    import jax

    if arrangement.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", arrangement.each)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if arrangement.processes > 1:
        first = rank * arrangement.each
        own = [i % arrangement.gpus for i in range(first, first + arrangement.each)]
        local = own if arrangement.platform == "cuda" else None
        jax.distributed.initialize(f"127.0.0.1:{port}", arrangement.processes, rank, local_device_ids=local)
    trainer = Trainer(arrangement)
    pathlib.Path(folder, f"ready{rank}").touch()
    while not pathlib.Path(folder, "go").exists():
        time.sleep(0.05)
    result = trainer.run(progress, steps, seconds, hang_at)
    if rank == 0:
        pathlib.Path(folder, "result").write_text(json.dumps(dataclasses.asdict(result)))
    pathlib.Path(folder, f"done{rank}").touch()
    # The first process has the store, in which the others may still look.
    while rank == 0 and not all(pathlib.Path(folder, f"done{i}").exists() for i in range(arrangement.processes)):
        time.sleep(0.05)
    os._exit(0)


class Trainer:
    """Parameters, batches and programs of an arrangement."""

    def __init__(self, given: Arrangement):
        sys.path.insert(0, str(ROOT / "examples"))
        import jax
        import jax.numpy as jnp
        import numpy as np
        import train as example
        import transformer
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as P

        devices = jax.devices()[: given.shape[0] * given.shape[1]]
        self.given = given
        self.mesh = Mesh(np.array(devices).reshape(given.shape), ("data", "model"))
        self.cfg = transformer.Config(**SIZES[given.size])
        specs = transformer.param_specs(self.cfg, "model")

        def put(x: Any, spec: P) -> jax.Array:
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, NamedSharding(self.mesh, spec), lambda part: x[part])

        params = jax.device_get(transformer.init(jax.random.key(0), self.cfg))
        moment = jax.tree.map(lambda p, spec: put(np.zeros(p.shape, np.float32), spec), params, specs)
        self.state = (
            jax.tree.map(lambda p, spec: put(p.astype(jnp.dtype(given.dtype)), spec), params, specs),
            (moment, jax.tree.map(jnp.copy, moment)),
        )
        text, _ = example.corpus()
        draw, batch = np.random.default_rng(0), given.rows * given.shape[0]
        self.batches = [put(example.sample(text, batch, given.length, draw), P("data")) for _ in range(BATCHES)]
        # On a CPU the kernels' place is taken by their references.
        self.programs = {XLA: self._compile("xla"), FUSED: self._compile("fused" if given.platform == "cuda" else None)}
        self._moved = self._mover()

    def _compile(self, implementation: str | None) -> Any:
        import jax
        import transformer
        from jax.sharding import PartitionSpec as P

        specs = transformer.param_specs(self.cfg, "model")
        state = (specs, (specs, specs))
        step = functools.partial(train_step, cfg=self.cfg, implementation=implementation)
        program = jax.shard_map(step, mesh=self.mesh, in_specs=(state, P("data"), P()), out_specs=(state, P()))
        options = {
            "xla_gpu_enable_latency_hiding_scheduler": True,
            "xla_gpu_graph_min_graph_size": 1 << 20,
            "xla_gpu_all_reduce_combine_threshold_bytes": 1,  # one sum for each parameter, as soon as it can begin
        }
        lowered = jax.jit(program).lower(self.state, self.batches[0], 0)
        return lowered.compile(compiler_options=options if self.given.platform == "cuda" else None)

    def run(self, progress: Progress, steps: int, seconds: float, hang_at: int) -> Result:
        import numpy as np

        beside = kernels_beside_collectives(self.programs[FUSED].as_text())
        # In one process with two GPUs XLA put nothing but its own fusions beside its sums.
        if self.given.platform == "cuda" and self.given.shape[0] > 1 and self.given.processes > 1 and not beside:
            raise AssertionError("no fused kernel runs beside a sum over the data")
        state, first, worst, moved, most, took = self.state, 0, 0.0, 0.0, 0, {XLA: [], FUSED: []}
        tolerance, start = TOLERANCE[self.given.dtype], time.monotonic()
        while self._goes_on(first, first < steps and time.monotonic() - start < seconds):
            losses, after = {}, state
            for turn in (XLA, FUSED):
                begin = time.monotonic()
                after, losses[turn] = self._chunk(state, first, turn, progress, hang_at)
                took[turn].append((time.monotonic() - begin) / CHUNK)
            apart = 0.0
            for movings in range(1, MOVINGS + 1):
                moving = self._moved(state, first * MOVINGS + movings - 1)
                _, other = self._chunk(moving, first, XLA, progress, hang_at)
                apart = max(apart, *(abs(x - y) for x, y in zip(other, losses[XLA], strict=True)))
                beyond = first_beyond(losses[FUSED], losses[XLA], apart, tolerance)
                if beyond is None:
                    break
            else:
                _, again = self._chunk(state, first, FUSED, progress, hang_at)
                raise AssertionError(
                    f"the loss of step {first + beyond} is {losses[FUSED][beyond]} with the fused kernels, "
                    f"{losses[XLA][beyond]} with XLA; moved parameters make {apart}. Of steps {first} and on: fused "
                    f"{losses[FUSED]}, once more {again}, XLA {losses[XLA]}"
                )
            different = [abs(ours - wanted) for ours, wanted in zip(losses[FUSED], losses[XLA], strict=True)]
            worst, moved, most = max(worst, *different), max(moved, apart), max(most, movings)
            state, first = after, first + CHUNK
        fused, xla = (1000 * float(np.median(took[turn] or [0.0])) for turn in (FUSED, XLA))
        return Result(first, fused, xla, worst, moved, most, beside)

    def _chunk(self, state: Any, first: int, turn: int, progress: Progress, hang_at: int) -> tuple[Any, list[float]]:
        """So many steps from a state: the new state, and the losses."""
        import jax
        import numpy as np

        import jaxtaxfree as jtf

        uneven = np.random.default_rng(1000 * jax.process_index() + first)
        program, under_way, losses = self.programs[turn], [], []
        for step in range(first, first + CHUNK):
            if step == hang_at and turn == FUSED:
                time.sleep(10_000)
            time.sleep(uneven.choice((0.0, 1e-3)))  # so that ranks come in any order
            state, loss = program(state, self.batches[step % BATCHES], step)
            under_way.append((step, loss))
            while len(under_way) > AHEAD or (under_way and step == first + CHUNK - 1):
                done, loss = under_way.pop(0)
                losses.append(float(jtf.block_until_ready(loss)))
                progress.write(done, turn)
        return state, losses

    def _mover(self) -> Any:
        """(state, number) -> the state, with an eighth of the parameters moved by a rounding error."""
        import jax
        import jax.numpy as jnp

        def moved(state: Any, number: Any) -> Any:
            leaves, tree = jax.tree.flatten(state[0])
            keys = jax.random.split(jax.random.key(number), len(leaves))
            leaves = [
                jnp.where(jax.random.bernoulli(key, 0.125, p.shape), p * (1 + jnp.finfo(p.dtype).eps), p)
                for key, p in zip(keys, leaves, strict=True)
            ]
            return jax.tree.unflatten(tree, leaves), state[1]

        shardings = jax.tree.map(lambda x: x.sharding, self.state)
        return jax.jit(moved, out_shardings=shardings).lower(self.state, 0).compile()

    def _goes_on(self, first: int, mine: bool) -> bool:
        """Whether process 0 goes on, so that all decide alike."""
        import jax
        from jax._src import distributed

        if self.given.processes == 1:
            return mine
        store, key = distributed.global_state.client, f"training/{first}"
        if jax.process_index() == 0:
            store.key_value_set(key, str(mine))
        return store.blocking_key_value_get(key, 600_000) == "True"


def first_beyond(ours: list[float], wanted: list[float], apart: float, tolerance: float) -> int | None:
    """The first step whose losses differ by more than rounding explains, or None.

    Args:
      ours, wanted: losses of steps that begin with the same parameters. Only the first has no difference to magnify.
      apart: how far rounding errors of the parameters drive losses apart.
      tolerance: of a step alone.
    """
    for i, (x, y) in enumerate(zip(ours, wanted, strict=True)):
        if not abs(x - y) <= tolerance + (MAGNIFIED * apart if i else 0.0):
            return i
    return None


def train_step(state: Any, rows: Any, step: Any, *, cfg: Any, implementation: str | None) -> tuple[Any, Any]:
    """One step of training, inside `shard_map` over ("data", "model"): the new state, and the loss.

    Args:
      state: this rank's parameters, and their moments in f32.
      rows: sequences [B / data, T + 1].
      step: its number.
    """
    import jax
    import jax.numpy as jnp
    import train as example
    import train_step as one_step
    from jax import lax

    params, moments = state
    own = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
    loss, grads = one_step.loss_and_gradients(own, rows, cfg, "model", implementation)
    loss, grads = lax.pmean(loss, "data"), jax.tree.map(lambda g: lax.pmean(g, "data"), grads)
    new, moments = example.adam(params, moments, grads, jnp.float32(step), jnp.float32(RATE))
    return (jax.tree.map(lambda n, p: n.astype(p.dtype), new, params), moments), loss


def kernels_beside_collectives(text: str) -> int:
    """How many kernels of this library a compiled program starts while a collective of XLA's is under way."""
    under_way, found = 0, 0
    for line in text.splitlines():
        if re.search(r"= .*(all-reduce|all-gather|reduce-scatter|async)-start\(", line):
            under_way += 1
        elif re.search(r"= .*(all-reduce|all-gather|reduce-scatter|async)-done\(", line):
            under_way -= 1
        elif under_way and "custom-call(" in line and "triton_kernel_call" in line:
            found += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="of each arrangement, at most (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=30, help="for the steps of an arrangement (default: %(default)s)"
    )
    parser.add_argument("--only", help="part of the names of the arrangements to run")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        try:
            work(**json.loads(options.work))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # at its end JAX would wait for the others
    from jaxtaxfree import doctor

    failed = False
    chosen = [given for given in arrangements(doctor.gpu_count()) if (options.only or "") in given.name]
    with contextlib.ExitStack() as stack:
        # All get ready side by side, and train one after the other.
        trainings = [stack.enter_context(Training(given, options.steps, options.seconds)) for given in chosen]
        for training in trainings:
            start = time.monotonic()
            result = training.run()
            text = (
                f"{result.steps} steps, fused {result.fused_ms:.2f} ms, XLA {result.xla_ms:.2f} ms, largest difference "
                f"of two losses {result.difference:.2g} bits per byte (moved parameters: {result.moved:.2g}, at most "
                f"{result.movings} times), {result.beside} kernels beside collectives"
            )
            print(f"{training.given.name}: {result.error or text} ({time.monotonic() - start:.0f} s)", flush=True)
            if result.error:
                failed = True
                for rank, each in enumerate(training.wrote()):
                    print(f"  process {rank} wrote:\n{each[-1500:]}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
