"""flight.record: which samples every optimizer step had, and its gradient norm.

Little-endian records, one a step: step (uint32), number of micro-batches (uint32), gradient norm (float64), how many
samples each micro-batch has, then their numbers in the training set (uint32 each; of a stream, in their window). Four
bytes a sample: a million samples are 4 MB. Steps that are made again after a resume or a retreat are appended again;
the later record counts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FLIGHT = "flight.record"
_HEAD = struct.Struct("<IId")


@dataclass(frozen=True)
class Flight:
    """What one step had."""

    step: int
    grad_norm: float
    samples: list[np.ndarray]
    """numbers of each micro-batch's samples"""


class Flights(dict[int, Flight]):
    """The steps of a run, by number."""

    def norms(self) -> dict[int, float]:
        """The gradient norm of every step."""
        return {step: flight.grad_norm for step, flight in sorted(self.items())}


class FlightRecord:
    """Appends steps to a run's flight.record."""

    def __init__(self, file: Path, last: int):
        """`last`: the step that the run goes on from; what is kept of later ones, or half, is dropped."""
        content = file.read_bytes() if file.is_file() else b""
        kept = b"".join(content[begin:end] for flight, begin, end in _records(content) if flight.step <= last)
        if len(kept) < len(content):
            file.write_bytes(kept)
        self._file = file.open("ab")

    def write(self, step: int, grad_norm: float, samples: Sequence[Sequence[int]]) -> None:
        sizes = np.array([len(numbers) for numbers in samples], dtype="<u4")
        numbers = np.concatenate(samples).astype("<u4")
        self._file.write(_HEAD.pack(step, len(sizes), grad_norm) + sizes.tobytes() + numbers.tobytes())
        self._file.flush()

    def close(self) -> None:
        with suppress(OSError):  # as in Metrics.close
            self._file.close()


def read_flight(run_dir: Path) -> Flights:
    """All whole records of a run folder; of several for a step the last."""
    file = run_dir / FLIGHT
    content = file.read_bytes() if file.is_file() else b""
    return Flights({flight.step: flight for flight, _, _ in _records(content)})


def _records(content: bytes) -> Iterator[tuple[Flight, int, int]]:
    """Each whole record, and where it begins and ends."""
    at = 0
    while at + _HEAD.size <= len(content):
        step, count, norm = _HEAD.unpack_from(content, at)
        body = at + _HEAD.size
        if body + 4 * count > len(content):
            return
        sizes = np.frombuffer(content, "<u4", count, body)
        total, first = int(sizes.sum()), body + 4 * count
        end = first + 4 * total
        if end > len(content):
            return
        numbers = np.frombuffer(content, "<u4", total, first)
        yield Flight(step, norm, np.split(numbers, np.cumsum(sizes)[:-1])), at, end
        at = end
