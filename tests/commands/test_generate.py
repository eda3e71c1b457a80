"""`trainer generate`: an answer from a finished run, and what it refuses before any weight is read."""

import sys

import pytest

from tests.program import here
from tests.support import CHATS, train_here
from trainer.config.compose import compose
from trainer.config.saved import save_run


@pytest.fixture(scope="module")
def trained(tiny, chats, tmp_path_factory):
    """The eight chats by heart."""
    run = tmp_path_factory.mktemp("generate") / "run"
    words = [*tiny.overrides(), "data=file", f"data.path={chats}", "data.max_length=128", "data.eval_fraction=0"]
    words += ["quant=none", "precision=fp32", "optim=adamw", "optim.learning_rate=1e-2", "schedule=constant"]
    words += ["device=cpu", "train.micro_batch_tokens=512", "train.accumulation_steps=1", "train.save_every=0"]
    train_here([*words, "train.max_steps=60", "adapter.alpha=64"], run)
    return run


@pytest.mark.parametrize("pair", [CHATS[0], CHATS[2], CHATS[5]], ids=lambda pair: pair[0])
def test_a_prompt_is_answered_as_trained(trained, pair, capsys):
    """Greedy, through the template, to the end token and no further."""
    prompt, answer = pair
    for _ in range(2):
        assert here("generate", f"run={trained}", f"prompt={prompt}") == 0
        assert capsys.readouterr().out == answer + "\n"


def test_the_answer_is_cut_at_the_limit(trained, tokenizer, capsys):
    prompt, answer = CHATS[1]
    assert here("generate", f"run={trained}", f"prompt={prompt}", "max_new_tokens=3") == 0
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(tokenizer(answer)["input_ids"][:3])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["prompt=hi"], 2, "run=DIR is missing"),
        (["run={run}", "promt=hi"], 2, "promt=hi: unknown argument (did you mean prompt?)"),
        (["run={run}", "prompt= "], 2, "prompt"),
        (["run={run}", "prompt=hi", "max_new_tokens=0"], 2, "max_new_tokens=0: must be a whole number above 0"),
        (["run={run}", "prompt=hi", "max_new_tokens=1.5"], 2, "max_new_tokens=1.5: must be a whole number above 0"),
        (["run={run}", "prompt=hi", "max_new_tokens=-1"], 2, "max_new_tokens=-1: must be a whole number above 0"),
        (["run={run}/nowhere", "prompt=hi"], 5, "there is no such folder"),
    ],
)
def test_wrong_arguments(words, code, said, tmp_path, capsys):
    save_run(compose([]), tmp_path)
    assert here("generate", *(word.format(run=tmp_path) for word in words)) == code
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.startswith("trainer: ") and "Traceback" not in err


def test_a_run_without_a_result_says_how_to_get_one(tmp_path, capsys):
    save_run(compose(["device=cpu", "precision=fp32"]), tmp_path)
    assert here("generate", f"run={tmp_path}", "prompt=hi") == 4
    err = capsys.readouterr().err
    assert "has no result yet" in err and f"trainer resume run={tmp_path}" in err


def test_argument_errors_come_before_torch(tmp_path, monkeypatch):
    """The seconds that importing it takes are not spent on a misspelt word."""
    monkeypatch.setitem(sys.modules, "trainer.export.reload", None)
    assert here("generate", f"run={tmp_path}", "promt=hi") == 2
