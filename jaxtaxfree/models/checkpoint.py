"""Files of safetensors, read part by part.

The format (huggingface/safetensors): 8 bytes with the length of the header, a header of JSON with the dtype, shape and
place of each tensor, and their bytes. A file is mapped, so that a part of a tensor costs no more than its own bytes.
"""

import dataclasses
import json
import math
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxtaxfree.models.config import read_json
from jaxtaxfree.models.errors import ModelError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(bool),
}
LONGEST_HEADER = 100 << 20  # as in the library of the format
INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Attributes:
      name, dtype, shape: its own.
      start: of its bytes in the file.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    file: "File"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A copy of a part of it."""
        return np.array(self.file.view(self)[index])


class File:
    """A file of safetensors.

    Raises:
      ModelError: if it is none, or ends too early.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelError(f"{path} is missing: download the checkpoint again.") from None
        except ValueError:  # of a file without bytes
            raise ModelError(f"{path} is empty: download it again.") from None
        self.tensors = {tensor.name: tensor for tensor in self._read_header()}

    def _read_header(self) -> Iterator[Tensor]:
        length = int.from_bytes(self._map[:8], "little")
        if len(self._map) < 8 or not 2 <= length <= min(LONGEST_HEADER, len(self._map) - 8):
            raise ModelError(f"{self.path} is no file of safetensors, or cut off in its header: download it again.")
        try:
            header = json.loads(self._map[8 : 8 + length])
            header.pop("__metadata__", None)
            entries = [
                (name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]) for name, entry in header.items()
            ]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{self.path} has a broken header ({error!r}): download it again.") from None
        for name, dtype, shape, start, end in entries:
            if dtype not in DTYPES:
                raise ModelError(
                    f"{self.path} has {name} as {dtype}, which is not supported (one of {', '.join(DTYPES)})."
                )
            tensor = Tensor(name, DTYPES[dtype], shape, 8 + length + start, self)
            if end - start != tensor.nbytes or start < 0:
                raise ModelError(
                    f"{self.path} has {end - start} bytes of {name}, not {tensor.nbytes}: download it again."
                )
            if 8 + length + end > len(self._map):
                missing = 8 + length + end - len(self._map)
                raise ModelError(
                    f"{self.path} is cut off: {name} ends {missing} bytes behind its end; download it again."
                )
            yield tensor

    def view(self, tensor: Tensor) -> np.ndarray:
        """The tensor where it is mapped."""
        flat = np.frombuffer(self._map, tensor.dtype, math.prod(tensor.shape), tensor.start)
        return flat.reshape(tensor.shape)

    def forget(self) -> None:
        """Lets go of the pages that were read; they are in the file."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)


class Checkpoint:
    """The tensors of a folder: of `model.safetensors`, or of the files that `model.safetensors.index.json` names.

    Raises:
      ModelError: if there are none, a file is missing or cut off, or files and index disagree.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        index = read_json(self.folder / INDEX)
        if index is None:
            paths = self._alone()
        else:
            places = index.get("weight_map")
            if not isinstance(places, dict):
                raise ModelError(f"{self.folder / INDEX} has no weight_map: download it again.")
            paths = [self.folder / name for name in sorted(set(places.values()))]
        self.files = [File(path) for path in paths]
        self.tensors: dict[str, Tensor] = {}
        for file in self.files:
            if twice := [name for name in file.tensors if name in self.tensors]:
                raise ModelError(f"{file.path} has {twice[0]}, and so has another file of the checkpoint.")
            self.tensors |= file.tensors
        if index is not None:
            self._compare(index["weight_map"])

    def _alone(self) -> list[Path]:
        path = self.folder / "model.safetensors"
        if path.is_file():
            return [path]
        found = sorted(self.folder.glob("*.safetensors"))
        if len(found) == 1:
            return found
        others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in self.folder.glob(pattern))
        which = f"; {', '.join(others[:3])} is not read" if others else ""
        raise ModelError(f"{self.folder} has neither model.safetensors nor {INDEX}{which}: convert it to safetensors.")

    def _compare(self, places: dict[str, Any]) -> None:
        for name, file in places.items():
            if name not in self.tensors or self.tensors[name].file.path.name != file:
                raise ModelError(f"{self.folder / INDEX} has {name} in {file}, which has not: download both again.")

    def forget(self) -> None:
        """Lets go of the pages that were read."""
        for file in self.files:
            file.forget()


def first_of(tensors: Iterable[str], names: Iterable[str]) -> str | None:
    """The first of the names that is among the tensors."""
    have = set(tensors)
    return next((name for name in names if name in have), None)
