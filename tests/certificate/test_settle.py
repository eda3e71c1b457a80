"""packing=auto packs where a row of several samples is proven, pads elsewhere; best_fit refuses there by name."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from tests.factories import option
from tests.support import train_here
from trainer.certificate import settle as room
from trainer.certificate.settle import settle
from trainer.config.saved import load_run
from trainer.errors import ModelError
from trainer.run.prepare import settle as asked_by_a_run

AUTO, BEST_FIT, NONE = (option("packing", name) for name in ("auto", "best_fit", "none"))


@pytest.fixture(autouse=True)
def nothing_certified(monkeypatch):
    monkeypatch.setattr(room, "certified", dict)


def test_a_decoder_of_attention_is_packed():
    for packing in (AUTO, BEST_FIT, NONE):
        found = settle(packing, AutoConfig.for_model("gemma2"))
        assert found == (NONE if packing is NONE else BEST_FIT if packing is AUTO else packing)


def test_a_recurrent_one_is_padded_or_refused():
    mamba = AutoConfig.for_model("mamba2")
    assert settle(AUTO, mamba) == NONE == settle(NONE, mamba)
    with pytest.raises(
        ModelError, match=r"packing=best_fit: samples of one row of a mamba2 model would see each other"
    ):
        settle(BEST_FIT, mamba)


def test_what_padded_rows_train_wrongly_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(room.attention, "choose_padded", lambda config: ("sdpa", "a fault"))
    with pytest.raises(ModelError, match="gemma2 cannot be trained here: on a tiny twin of it padded rows"):
        settle(NONE, AutoConfig.for_model("gemma2"))


def test_a_run_says_what_auto_came_to(base_overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("trainer.run.prepare.settle", lambda packing, config: packing.settled(lambda: "a test"))
    assert asked_by_a_run is settle
    words = [*base_overrides, "packing=auto", "train.max_steps=1"]
    train_here(words, tmp_path / "run")
    assert "auto: " in capsys.readouterr().out and "padded micro-batches" in (tmp_path / "run/train.log").read_text()
    assert type(load_run(tmp_path / "run").config.packing) is type(AUTO)
