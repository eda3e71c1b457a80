"""flight.record: every step's samples, over a stop and a resume, in four bytes a sample."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from tests.processes import kill_after_step
from tests.support import metrics, train_here
from trainer.config.compose import compose
from trainer.data.batches.loader import TrainingSteps
from trainer.data.chat.templates import dress
from trainer.data.tokens.gather import load_data
from trainer.errors import Interrupted
from trainer.model.loading.base import load_tokenizer
from trainer.tracking.flight_record import FLIGHT, FlightRecord, read_flight
from trainer.training.watch import Watch


def test_a_million_samples_are_four_megabytes(tmp_path):
    record = FlightRecord(tmp_path / FLIGHT, 0)
    order = np.random.default_rng(0).permutation(1_000_000)
    for step, samples in enumerate(np.split(order, 10_000), start=1):
        record.write(step, step / 3, np.split(samples, 4))
    record.close()
    assert (tmp_path / FLIGHT).stat().st_size < 4_400_000
    flights = read_flight(tmp_path)
    assert np.array_equal(np.concatenate([np.concatenate(f.samples) for f in flights.values()]), order)
    assert flights[9_999].grad_norm == 9_999 / 3 and len(flights[1].samples) == 4


def test_half_a_record_and_steps_made_again(tmp_path):
    file = tmp_path / FLIGHT
    record = FlightRecord(file, 0)
    for step in (1, 2, 3):
        record.write(step, float(step), [np.arange(step)])
    record.close()
    file.write_bytes(file.read_bytes()[:-2])
    assert list(read_flight(tmp_path)) == [1, 2], "the half one is none"
    record = FlightRecord(file, 1)
    record.write(2, 7.0, [np.array([5]), np.array([6, 7])])
    record.write(2, float("inf"), [np.array([8])])
    record.close()
    flights = read_flight(tmp_path)
    assert list(flights) == [1, 2] and flights[2].grad_norm == float("inf"), "the later one counts"
    assert [found.tolist() for found in flights[2].samples] == [[8]]


def test_a_stopped_and_resumed_run_keeps_what_the_order_says(base_overrides, tmp_path, monkeypatch):
    words = [*base_overrides, "train.max_steps=6", "train.save_every=2"]
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Watch, "after_step", Watch.after_step)  # put back at the end
        kill_after_step(3, signal.SIGTERM)
        train_here(words, tmp_path / "run")
    train_here(words, tmp_path / "run")
    config = compose(words).config
    tokenizer = load_tokenizer(config.model)
    dress(tokenizer, config.data.chat_template, config.model.new_tokens)
    steps = TrainingSteps(
        load_data(config.data, config.seed, tokenizer).train_set, config.packing, config.train, config.seed
    )
    flights = read_flight(tmp_path / "run")
    assert list(flights) == [1, 2, 3, 4, 5, 6]
    for step, flight in flights.items():
        assert [s.tolist() for s in flight.samples] == [s.tolist() for s in steps.sample_indices(step)]
    assert flights.norms() == {row["step"]: row["grad_norm"] for row in metrics(tmp_path / "run")}
