"""A mixture from its files to the loss of each source, and over a stop."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.support import CHATS, chat_rows, make_tokenizer, metrics, train_here, write_jsonl
from trainer.config.compose import compose
from trainer.data.tokens.gather import load_data
from trainer.data.tokens.token_sets import Mixture


@pytest.fixture
def sources(tmp_path) -> str:
    write_jsonl(tmp_path / "chat.jsonl", chat_rows())
    rows = [{"q": question, "a": answer.upper()} for question, answer in CHATS]
    write_jsonl(tmp_path / "loud.jsonl", rows)
    return (
        f"data.sources=[{{path: {tmp_path}/chat.jsonl, name: chat, weight: 2}}, "
        f"{{path: {tmp_path}/loud.jsonl, name: loud, columns: {{instruction: q, output: a}}}}]"
    )


def words(base_overrides, sources, *more):
    return [*(w for w in base_overrides if not w.startswith("data.path")), sources, *more]


def test_every_source_is_split_on_its_own(base_overrides, sources, tokenizer):
    data = compose(words(base_overrides, sources, "data.eval_fraction=0.25")).config.data
    loaded = load_data(data, 0, tokenizer)
    assert isinstance(loaded.train_set, Mixture) and isinstance(loaded.held_out, Mixture)
    assert [len(member) for member in loaded.train_set.members] == [6, 6]
    assert [(m.name, len(m)) for m in loaded.held_out.members] == [("chat", 2), ("loud", 2)]
    assert loaded.train_set.drawn == [6, 3] and [c.format for c in loaded.counts] == ["messages", "alpaca"]


def test_the_losses_of_the_sources_make_up_the_whole(base_overrides, sources, tokenizer, tmp_path):
    """Each is the mean over its own targets: weighted by them they are the loss of all held-out data."""
    mixed = words(base_overrides, sources, "data.eval_fraction=0.25", "train.max_steps=2")
    train_here(mixed, tmp_path / "run")
    members = load_data(compose(mixed).config.data, 0, tokenizer).held_out.members
    chat, loud = (member.num_targets for member in members)
    rows = metrics(tmp_path / "run", "eval")
    assert [row["step"] for row in rows] == [0, 2] and {row["num_targets"] for row in rows} == {chat + loud}
    for row in rows:
        whole = (row["eval_loss/chat"] * chat + row["eval_loss/loud"] * loud) / (chat + loud)
        assert row["eval_loss"] == pytest.approx(whole, rel=1e-12)
        assert row["eval_loss/chat"] != row["eval_loss/loud"]


def test_a_mixture_resumed_in_its_second_epoch_is_bit_equal(base_overrides, sources, tmp_path):
    """Each epoch draws other samples: the stop lies in the second of three."""
    more = ["train.epochs=3", "train.accumulation_steps=1", "train.save_every=1", "data.stop=all_exhausted"]
    mixed = words(base_overrides, sources, *more)
    steps = train_here(mixed, tmp_path / "whole")["steps"]
    stop = steps // 2 + 1
    train_here([*mixed, f"train.max_steps={stop}"], tmp_path / "parts")
    train_here([*mixed, "train.resume=force"], tmp_path / "parts")
    whole, parts = (load_file(tmp_path / n / "adapter" / "adapter_model.safetensors") for n in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    ours, theirs = ([(row["step"], row["loss"]) for row in metrics(tmp_path / n)] for n in ("whole", "parts"))
    assert ours == theirs


def test_every_run_begins_with_the_audit_in_short(base_overrides, chats, tmp_path, capsys):
    """Rows, what was dropped and why, targets, and what crosses a threshold; held-out rows of their own the same."""
    long = [("x" * 500, "y"), ("z" * 500, "y")]
    file = write_jsonl(tmp_path / "rows.jsonl", [*chat_rows(), *chat_rows(CHATS[:1]), *chat_rows(long), {"no": "row"}])
    run = words(base_overrides, f"data.path={file}", f"data.eval_path={chats}", "data.on_bad_row=skip")
    tokens = load_data(compose(run).config.data, 0, make_tokenizer()).train_set
    train_here([*run, "train.max_steps=1"], tmp_path / "run")
    screen = " ".join(capsys.readouterr().out.split())
    assert f"data {file} (messages): 12 rows, 9 used; 1 dropped (8.3%): bad row; 2 dropped (16.7%)" in screen
    share = tokens.num_targets / tokens.num_tokens
    assert f"{share:.1%} of the tokens trained on; 0.0% truncated, 11.1% repeated, 0 without targets" in screen
    assert f"held out {chats} (messages): 8 rows, 8 used" in screen
    assert f"warning {file}: 25.0% dropped" in screen
    assert f"warning {chats}: 8 of the 8 held-out samples are trained on too" in screen
    assert f"9 samples to train on, {tokens.num_tokens:,} tokens" in screen
