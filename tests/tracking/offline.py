"""W&B's offline files, read back."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

BLOCK = 32768


def records(file: Path) -> Iterator:
    """The records of a .wandb file: W&B's own messages, in its framing (LevelDB's log format after 7 bytes)."""
    from wandb.proto import wandb_internal_pb2

    content = file.read_bytes()
    assert content[:4] == b":W&B"
    position, parts = 7, b""
    while position + 7 <= len(content):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        if kind == 0:
            break
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record
