"""Micro-batches: what one forward pass gets, made on the host so that the device is never asked for a count.

B: rows. T: tokens in a row. N: targets. S: samples.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from trainer.data.tokens.token_sets import Tokens

IGNORED = -100
"""Label of a position whose next token is not a target."""


@dataclass(frozen=True)
class MicroBatch:
    """One packed row of whole samples (B = 1), or one padded row a sample."""

    input_ids: torch.Tensor
    """(B, T) int64"""
    labels: torch.Tensor
    """(B, T) int64, already shifted: the token after this position, or IGNORED"""
    target_index: torch.Tensor
    """(N,) int64: positions in the flattened row(s) whose label counts"""
    position_ids: torch.Tensor
    """(B, T) int64, restarting at 0 with each sample"""
    attention_mask: torch.Tensor | None
    """(B, T) int64 of a padded batch; a packed row has none"""
    cu_seqlens: torch.Tensor | None
    """(S + 1,) int32: where the samples of a packed row begin and end"""
    max_length: int
    """longest sample, tokens"""
    num_tokens: int
    """real tokens, without padding"""
    num_targets: int
    num_samples: int
    samples: tuple[int, ...]
    """their numbers in the set that they were taken from"""
    source: str = ""
    """name of the source that all samples are from, where one mixture has several"""

    def to(self, device: torch.device) -> MicroBatch:
        """The batch on a device; asynchronous where the host memory is pinned."""
        moved = {
            f.name: value.to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        return replace(self, **moved)

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of a transformers forward.

        Never a cache: with one, transformers' packed detection is off and samples see each other. The boundaries
        carry the names that transformers gives them.
        """
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
            "use_cache": False,
        }
        if self.cu_seqlens is not None:
            inputs |= {
                "cu_seq_lens_q": self.cu_seqlens,
                "cu_seq_lens_k": self.cu_seqlens,
                "max_length_q": self.max_length,
                "max_length_k": self.max_length,
            }
        return inputs

    def halves(self) -> list[MicroBatch]:
        """The same samples, in their order, in two micro-batches of about as many computed tokens each; a sample is
        never cut, so one alone stays. A padded half is as long as its own longest sample."""
        if self.num_samples == 1:
            return [self]
        if self.cu_seqlens is not None:
            ends = self.cu_seqlens.tolist()
            sample = min(range(1, self.num_samples), key=lambda i: abs(2 * ends[i] - ends[-1]))
            cut = ends[sample]
            return [self._packed_part(0, sample, 0, cut), self._packed_part(sample, None, cut, None)]
        middle = -(-self.num_samples // 2)
        return [self._padded_part(slice(middle)), self._padded_part(slice(middle, None))]

    def _packed_part(self, first: int, last: int | None, start: int, end: int | None) -> MicroBatch:
        """Samples `first` to `last` of a packed row, which are its tokens from `start` to `end`."""
        bounds = self.cu_seqlens[first : None if last is None else last + 1] - start
        columns = slice(start, end)
        mine, longest = self.samples[first:last], int(bounds.diff().max())
        return self._part(columns=columns, cu_seqlens=bounds, max_length=longest, samples=mine)

    def _padded_part(self, rows: slice) -> MicroBatch:
        mask = self.attention_mask[rows]
        longest = int(mask.sum(dim=1).max())
        mask = mask[:, :longest].contiguous()
        return self._part(rows, slice(longest), attention_mask=mask, max_length=longest, samples=self.samples[rows])

    def _part(self, rows: slice = slice(None), columns: slice = slice(None), **changes: Any) -> MicroBatch:
        names = ("input_ids", "labels", "position_ids")
        cut = {name: getattr(self, name)[rows, columns].contiguous() for name in names}
        index = (cut["labels"].reshape(-1) != IGNORED).nonzero().flatten()
        made = replace(self, **cut, target_index=index, num_targets=len(index), **changes)
        packed = made.attention_mask is None
        return replace(
            made,
            num_tokens=made.input_ids.numel() if packed else int(made.attention_mask.sum()),
            num_samples=len(made.cu_seqlens) - 1 if packed else len(made.input_ids),
        )


def divided(batch: MicroBatch, halvings: int) -> list[MicroBatch]:
    """The parts of a micro-batch that is cut in two so many times."""
    parts = [batch]
    for _ in range(halvings):
        parts = [half for part in parts for half in part.halves()]
    return parts


def collate(tokens: Tokens, indices: np.ndarray, packed: bool, source: str = "") -> MicroBatch:
    """The micro-batch of these samples."""
    samples = [tokens.sample(i) for i in indices]
    labelled = [(ids, _labels(ids, is_target)) for ids, is_target in samples]
    lengths = [len(ids) for ids, _ in samples]
    if packed:
        input_ids = np.concatenate([ids for ids, _ in labelled])[None]
        labels = np.concatenate([y for _, y in labelled])[None]
        position_ids = np.concatenate([np.arange(n) for n in lengths])[None]
        attention_mask = None
        cu_seqlens = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))
    else:
        shape = (len(samples), max(lengths))
        input_ids, labels = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED)
        attention_mask = np.zeros(shape, dtype=np.int64)
        for row, (ids, y) in enumerate(labelled):
            input_ids[row, : len(ids)], labels[row, : len(ids)] = ids, y
            attention_mask[row, : len(ids)] = 1
        position_ids = np.broadcast_to(np.arange(shape[1]), shape)
        cu_seqlens = None
    target_index = np.flatnonzero(labels.reshape(-1) != IGNORED)
    return MicroBatch(
        input_ids=_int64(input_ids),
        labels=_int64(labels),
        target_index=_int64(target_index),
        position_ids=_int64(position_ids),
        attention_mask=None if attention_mask is None else _int64(attention_mask),
        cu_seqlens=cu_seqlens,
        max_length=max(lengths),
        num_tokens=sum(lengths),
        num_targets=len(target_index),
        num_samples=len(samples),
        samples=tuple(map(int, indices)),
        source=source,
    )


def _labels(ids: np.ndarray, is_target: np.ndarray) -> np.ndarray:
    """The next token where it is a target. A sample's last position has none: the next sample is not its future."""
    labels = np.full(len(ids), IGNORED, dtype=np.int64)
    labels[:-1] = np.where(is_target[1:], ids[1:], IGNORED)
    return labels


def _int64(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array, dtype=np.int64))
