"""train.samples: prompts answered at every evaluation, which change no weight; and the model card."""

from __future__ import annotations

import pytest
import yaml

from tests.support import metrics, train_here
from trainer.config.saved import load_run
from trainer.errors import DataError
from trainer.export.reload import load_trained

PROMPTS = ["What is red?", "2 + 3?"]


@pytest.fixture
def words(base_overrides):
    return [*base_overrides, "train.max_steps=4", "train.eval_every=2", "adapter.dropout=0.1", "train.save_every=2"]


def test_prompts_are_answered_at_evaluations_and_change_no_weight(words, chats, tmp_path, capsys):
    asked = [*words, f"train.samples={PROMPTS}", "train.model_card=true", "track=wandb", "track.log_samples=true"]
    train_here(asked, tmp_path / "asked")
    screen = capsys.readouterr().out
    rows = metrics(tmp_path / "asked", "samples")
    assert [row["step"] for row in rows] == [0, 2, 4], "also where nothing is held out"
    assert [[found["prompt"] for found in row["answers"]] for row in rows] == [PROMPTS] * 3
    trained = load_trained(load_run(tmp_path / "asked"), tmp_path / "asked")
    expected = trained.answer_many([[{"role": "user", "content": prompt}] for prompt in PROMPTS], 64)
    assert [found["answer"] for found in rows[-1]["answers"]] == expected
    assert f"step 0: {PROMPTS[0]} → " in screen

    train_here(words, tmp_path / "silent")
    adapters = [(tmp_path / name / "adapter/adapter_model.safetensors").read_bytes() for name in ("asked", "silent")]
    assert adapters[0] == adapters[1]
    assert not (tmp_path / "silent/adapter/README.md").exists() and not (tmp_path / "silent/report.html").exists()

    tables = list((tmp_path / "asked").glob("wandb/*/files/media/table/*.json"))
    assert any(PROMPTS[0] in file.read_text() for file in tables)

    card = (tmp_path / "asked/adapter/README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head == {"library_name": "peft", "tags": ["trainer", "lora", "none"]}, "its base is no hub id"
    final = metrics(tmp_path / "asked")[-1]["loss"]
    assert (
        f"| training loss | {final:.6g} |" in card
        and "| optimizer steps | 4 |" in card
        and "| trained parameters | " in card
    )
    assert chats.name in card and str(chats.parent) not in card and str(tmp_path) not in card


def test_a_prompt_that_the_template_refuses_is_named(words, monkeypatch, tmp_path):
    refusing = "{% for m in messages %}{% if 'no' in m.content %}{{ raise_exception('not that') }}{% endif %}"
    refusing += "{{ '<|start|>' + m.content + '<|eot|>' }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(refusing)
    asked = [*words, "train.samples=[yes,'no']", f"data.chat_template={tmp_path / 'own.jinja'}"]
    with pytest.raises(DataError, match=r"train\.samples\[1\]='no': .*not that"):
        train_here(asked, tmp_path / "run")
