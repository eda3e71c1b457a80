"""Where streamed blocks lie: in host memory (pinned for a GPU), or in safetensors files.

Files are read, not mapped: a mapped page that cannot be read kills the process by a signal, a read that fails is an
error with a reason. The page cache keeps what fits either way, and neither counts as the process's own memory.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from trainer.errors import StorageError
from trainer.model.offload.block_stream import BlockPlace, StreamedBlock
from trainer.units import GIB


class HostSource:
    """Blocks in host memory, one after the other, laid out as in a slot.

    In slabs of a power of two: torch's allocator of pinned memory rounds up to one, a third of a 70B's blocks.
    """

    reads = False
    PINNED_SLAB, SLAB = 2**25, 2**20
    """bytes"""

    def __init__(self, device: torch.device):
        self._pinned = device.type == "cuda"
        self._slab = self.PINNED_SLAB if self._pinned else self.SLAB
        self._slabs: list[torch.Tensor] = []
        self._used = 0
        self._places: dict[int, tuple[int, int]] = {}

    def put(self, block: StreamedBlock) -> None:
        whole = torch.empty(block.size, dtype=torch.uint8)
        for place, tensor in zip(block.places, block.tensors().values(), strict=True):
            place.view(whole).copy_(tensor)
        self._places[block.index] = self._used, block.size
        self._used += block.size
        while len(self._slabs) * self._slab < self._used:
            self._slabs.append(torch.empty(self._slab, dtype=torch.uint8, pin_memory=self._pinned))
        for mine, theirs in self._pieces(block.index, whole):
            mine.copy_(theirs)

    def read(self, index: int, buffer: torch.Tensor) -> None:
        for mine, theirs in self._pieces(index, buffer):
            theirs.copy_(mine, non_blocking=True)

    def close(self) -> None:
        self._slabs.clear()

    def _pieces(self, index: int, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A block's parts of slabs, each with the part of a buffer that holds the same."""
        begin, size = self._places[index]
        done = 0
        while done < size:
            slab, offset = divmod(begin + done, self._slab)
            length = min(size - done, self._slab - offset)
            yield self._slabs[slab][offset : offset + length], buffer[done : done + length]
            done += length


class FileSource:
    """Blocks in safetensors files, one a block, that are read again and again through open descriptors.

    The files have no name once they are open: nothing can take them away, and nothing is left when the process ends.
    """

    reads = True
    STAGES = 2

    def __init__(self, folder: Path, device: torch.device, needed: int):
        """Raises StorageError where `folder` cannot take `needed` bytes."""
        self.folder = folder
        self._files: dict[int, int] = {}
        self._places: dict[int, list[tuple[int, BlockPlace]]] = {}
        self._stages: list[tuple[torch.Tensor, torch.cuda.Event]] | None = [] if device.type == "cuda" else None
        self._turn = 0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            free = shutil.disk_usage(folder).free
        except OSError as error:
            raise StorageError(f"offload.folder={folder}: cannot be made: {error.strerror}.") from None
        if free < needed:
            raise StorageError(
                f"offload=base_disk: the base's blocks take {needed / GIB:.2f} GiB, and {folder} has {free / GIB:.2f} "
                "GiB free. Set offload.folder to a disk that has room."
            )

    def put(self, block: StreamedBlock) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in block.tensors().items()}
        handle, name = tempfile.mkstemp(prefix=f".block-{block.index:05d}-", suffix=".safetensors", dir=self.folder)
        os.close(handle)
        try:
            save_file(tensors, name)
            self._open(block, name)
        except Exception as error:  # safetensors has its own error for a full disk
            raise StorageError(f"offload=base_disk: {self.folder} cannot be written: {error}.") from error
        finally:
            os.unlink(name)

    def _open(self, block: StreamedBlock, name: str) -> None:
        file = os.open(name, os.O_RDONLY)
        self._files[block.index] = file
        os.fsync(file)
        (length,) = struct.unpack("<Q", os.pread(file, 8, 0))
        header = _header(os.pread(file, length, 8))
        begin = 8 + length
        self._places[block.index] = [(begin + header[place.name][0], place) for place in block.places]

    def read(self, index: int, buffer: torch.Tensor) -> None:
        if self._stages is None:
            self._fill(index, buffer)
            return
        if len(self._stages) < self.STAGES:
            self._stages.append((torch.empty(len(buffer), dtype=torch.uint8, pin_memory=True), torch.cuda.Event()))
        stage, copied = self._stages[self._turn % len(self._stages)]
        self._turn += 1
        copied.synchronize()  # the copy out of this stage, two reads ago
        self._fill(index, stage)
        buffer.copy_(stage, non_blocking=True)
        copied.record()

    def _fill(self, index: int, buffer: torch.Tensor) -> None:
        target = memoryview(buffer.numpy())
        for begin, place in self._places[index]:
            part = target[place.offset : place.offset + place.size]
            try:
                _read_whole(self._files[index], part, begin)
            except OSError as error:
                raise StorageError(
                    f"offload=base_disk: block {index} of the base cannot be read back from {self.folder}: "
                    f"{error.strerror or error}. The last checkpoint is kept: see to the disk, or set offload.folder "
                    "to another one, and start the same command again."
                ) from error

    def bytes_per_second(self) -> float:
        """How fast the disk gives a block that is not in the page cache."""
        index = next(iter(self._files))
        self.drop_from_page_cache()
        size = sum(place.size for _, place in self._places[index])
        buffer = torch.empty(max(place.offset + place.size for _, place in self._places[index]), dtype=torch.uint8)
        began = time.perf_counter()
        self._fill(index, buffer)
        return size / (time.perf_counter() - began)

    def drop_from_page_cache(self) -> None:
        """The next reads go to the disk."""
        for file in self._files.values():
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def _read_whole(file: int, target: memoryview, begin: int) -> None:
    done = 0
    while done < len(target):
        got = os.preadv(file, [target[done:]], begin + done)
        if got == 0:
            raise OSError(0, f"the file ends {len(target) - done} bytes early")
        done += got


def _header(text: bytes) -> dict[str, tuple[int, int]]:
    """Name -> (begin, end) in the data of a safetensors file."""
    return {name: tuple(entry["data_offsets"]) for name, entry in json.loads(text).items() if name != "__metadata__"}
