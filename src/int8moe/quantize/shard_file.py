"""A safetensors file that is written in place, piece by piece, in any order and from several threads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from int8moe.quantize.plan import SIZES, Output


class ShardFile:
    """Header first, from what is known before; then each tensor where it belongs. Holds no tensor in memory."""

    def __init__(self, path: Path, outputs: Iterable[Output]) -> None:
        # Wide dtypes first, so that each tensor is aligned to its elements without gaps, which the format forbids.
        ordered = sorted(outputs, key=lambda o: (-SIZES[o.dtype], o.name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        end = 0
        for out in ordered:
            self._offsets[out.name] = end
            header[out.name] = {
                "dtype": out.dtype, "shape": list(out.shape), "data_offsets": [end, end + out.nbytes]
            }  # fmt: skip
            end += out.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._base = 8 + len(text)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _write(self._file, memoryview(len(text).to_bytes(8, "little") + text), 0)
            os.ftruncate(self._file, self._base + end)
        except OSError:
            os.close(self._file)
            raise

    def put(self, name: str, at: int, part: torch.Tensor) -> None:
        """`part` of the tensor `name`, whose elements start at element `at`."""
        flat = part.contiguous().reshape(-1)
        if flat.numel():
            position = self._base + self._offsets[name] + at * flat.element_size()
            _write(self._file, memoryview(flat.view(torch.uint8).numpy()), position)

    def close(self) -> None:
        os.close(self._file)


def _write(file: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(file, data, position)
        data, position = data[written:], position + written
