"""What a micro-batch holds, against samples taken one at a time."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories import random_tokens
from trainer.data.batches.batch import IGNORED, MicroBatch, collate, divided

LENGTHS = st.lists(st.integers(2, 12), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS)
def test_positions_restart_and_borders_are_no_targets(lengths):
    """P3, P4"""
    tokens = random_tokens(lengths)
    batch = collate(tokens, np.arange(len(lengths)), packed=True)
    place = 0
    for i, length in enumerate(lengths):
        ids, is_target = tokens.sample(i)
        part = slice(place, place + length)
        assert batch.input_ids[0, part].tolist() == ids.tolist()
        assert batch.position_ids[0, part].tolist() == list(range(length))
        expected = [int(ids[j + 1]) if is_target[j + 1] else IGNORED for j in range(length - 1)] + [IGNORED]
        assert batch.labels[0, part].tolist() == expected
        place += length
    assert batch.cu_seqlens.tolist() == np.cumsum([0, *lengths]).tolist() and batch.cu_seqlens.dtype == torch.int32
    assert (batch.attention_mask, batch.inputs()["use_cache"]) == (None, False)
    assert (batch.num_tokens, batch.num_samples, batch.max_length) == (sum(lengths), len(lengths), max(lengths))


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS)
def test_a_padded_batch_holds_the_same_targets(lengths):
    tokens = random_tokens(lengths)
    packed, padded = (collate(tokens, np.arange(len(lengths)), packed=p) for p in (True, False))
    assert packed.num_targets == padded.num_targets == int((padded.labels != IGNORED).sum())
    flat = [batch.labels.flatten()[batch.target_index] for batch in (packed, padded)]
    assert torch.equal(*flat)
    assert padded.attention_mask.sum(1).tolist() == lengths and padded.num_tokens == sum(lengths)
    assert (padded.labels[padded.attention_mask == 0] == IGNORED).all()


def test_moving_keeps_everything():
    batch = collate(random_tokens([3, 4]), np.array([1, 0]), packed=True)
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.labels, batch.labels) and moved.num_targets == batch.num_targets


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, packed=st.booleans())
def test_halves_are_the_micro_batches_of_their_samples(lengths, packed):
    """Each half, and each quarter, is what collating its samples alone gives; the cut is the evenest there is."""
    tokens, everything = random_tokens(lengths), np.arange(len(lengths))
    batch = collate(tokens, everything, packed)
    for halvings in (0, 1, 2, 3):
        parts, first = divided(batch, halvings), 0
        for part in parts:
            samples = everything[first : first + part.num_samples]
            first += part.num_samples
            expected = collate(tokens, samples, packed)
            for field in fields(MicroBatch):
                got, wanted = getattr(part, field.name), getattr(expected, field.name)
                if isinstance(wanted, torch.Tensor):
                    assert torch.equal(got, wanted) and got.dtype == wanted.dtype, field.name
                else:
                    assert got == wanted, field.name
        assert first == len(lengths)
        assert len(parts) == 1 if halvings == 0 else len(parts) <= 2**halvings
    assert max(part.num_samples for part in divided(batch, len(lengths))) == 1
    if packed and len(lengths) > 1:
        larger = max(part.num_tokens for part in batch.halves())
        assert larger == min(max(sum(lengths[:i]), sum(lengths[i:])) for i in range(1, len(lengths)))
