"""Tokens on disk: one Arrow file, written a piece at a time and mapped into memory, so that its size is no matter.

Columns, a row a sample: input_ids, is_target, where (file:line), source (the sample as JSON).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow

from trainer.data.chat.messages import Dialogue, PlainText, Sample
from trainer.data.tokens.token_sets import TokenSet

TOKENS = "tokens.arrow"


def dump_sample(sample: Sample) -> bytes:
    """A sample as JSON."""
    return json.dumps(vars(sample), ensure_ascii=False).encode("utf-8", "surrogatepass")


def load_sample(text: str) -> Sample:
    values = json.loads(text)
    return Dialogue(**values) if "messages" in values else PlainText(**values)


class Texts(Sequence):
    """A column of text, read where it is asked for."""

    def __init__(self, column: pyarrow.LargeBinaryArray, read=lambda text: text):
        self._column, self._read = column, read

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index):
        return self._read(self._column[int(index)].as_py().decode("utf-8", "surrogatepass"))


class _Column:
    """Values end to end in a file, and where each sample's begin."""

    def __init__(self, folder: Path, name: str):
        self.file = folder / f"{name}.part"
        self._stream: IO[bytes] = self.file.open("wb")
        self._ends: list[np.ndarray] = [np.zeros(1, dtype=np.int64)]
        self._total = 0

    def append(self, content: bytes, lengths: np.ndarray) -> None:
        """Values of some samples, and how many each has."""
        self._stream.write(content)
        ends = self._total + np.cumsum(lengths, dtype=np.int64)
        self._ends.append(ends)
        self._total = int(ends[-1])

    def close(self) -> tuple[pyarrow.Buffer, np.ndarray]:
        self._stream.close()
        content = pyarrow.memory_map(str(self.file)).read_buffer() if self._total else pyarrow.py_buffer(b"")
        return content, np.concatenate(self._ends)


class TokenWriter:
    """Takes tokenised pieces in order; `finish` makes the Arrow file of them."""

    NAMES = ("input_ids", "is_target", "where", "source")

    def __init__(self, folder: Path):
        self.folder = folder
        self._columns = {name: _Column(folder, name) for name in self.NAMES}

    def append(self, input_ids: np.ndarray, is_target: np.ndarray, lengths: np.ndarray, texts: dict) -> None:
        """Samples end to end; `texts` holds the encoded where and source of each."""
        if not len(lengths):
            return
        self._columns["input_ids"].append(input_ids.tobytes(), lengths)
        self._columns["is_target"].append(is_target.tobytes(), lengths)
        for name, items in texts.items():
            self._columns[name].append(b"".join(items), np.array([len(item) for item in items]))

    def finish(self) -> None:
        """Writes the Arrow file and removes the parts."""
        arrays = []
        for name, column in self._columns.items():
            content, ends = column.close()
            count, offsets = len(ends) - 1, pyarrow.py_buffer(ends)
            if name in ("where", "source"):
                arrays.append(
                    pyarrow.LargeBinaryArray.from_buffers(pyarrow.large_binary(), count, [None, offsets, content])
                )
                continue
            kind = pyarrow.int32() if name == "input_ids" else pyarrow.uint8()
            values = pyarrow.Array.from_buffers(kind, int(ends[-1]), [None, content])
            arrays.append(pyarrow.LargeListArray.from_arrays(pyarrow.array(ends), values))
        batch = pyarrow.record_batch(arrays, names=list(self.NAMES))
        with (
            pyarrow.OSFile(str(self.folder / TOKENS), "wb") as sink,
            pyarrow.ipc.new_file(sink, batch.schema) as writer,
        ):
            writer.write_batch(batch)
        for column in self._columns.values():
            column.file.unlink()


def open_tokens(folder: Path, name: str = "") -> TokenSet:
    """The tokens in a folder, mapped. Raises OSError or pyarrow.ArrowException where the file is broken."""
    batch = pyarrow.ipc.open_file(pyarrow.memory_map(str(folder / TOKENS))).get_batch(0)
    ids = batch.column("input_ids")
    return TokenSet(
        input_ids=ids.values.to_numpy(zero_copy_only=True),
        is_target=batch.column("is_target").values.to_numpy(zero_copy_only=True).view(bool),
        offsets=ids.offsets.to_numpy(),
        sources=Texts(batch.column("source"), load_sample),
        places=Texts(batch.column("where")),
        name=name,
    )
