"""Answers of a run that has learned its eight chats by heart: alone, in batches, in a chat, piece by piece."""

from __future__ import annotations

import io
import json
import shutil
import sys

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.program import here
from tests.support import CHATS, train_here, write_jsonl
from trainer.commands import generate
from trainer.config.compose import compose
from trainer.config.saved import load_run, save_run
from trainer.errors import ConfigError, DataError
from trainer.export.dialogue import Conversation
from trainer.export.reload import load_trained
from trainer.model.loading import base as load


@pytest.fixture(scope="module")
def learned(tmp_path_factory, tiny, chats):
    """A run whose training rows are answered word for word; the template ends turns with <|eot|>."""
    run_dir = tmp_path_factory.mktemp("learned") / "run"
    words = [*tiny.overrides(), "data=file", f"data.path={chats}", "data.max_length=128", "data.eval_fraction=0"]
    words += ["quant=none", "precision=fp32", "optim=adamw", "optim.learning_rate=2e-2", "device=cpu", "adapter.r=32"]
    words += ["train.micro_batch_tokens=512", "train.accumulation_steps=1", "train.epochs=60", "train.save_every=0"]
    train_here([*words, "train.log_every=60", "schedule.warmup_ratio=0"], run_dir)
    return run_dir


@pytest.fixture(scope="module")
def trained(learned):
    return load_trained(load_run(learned), learned)


def ask(question: str) -> list[dict]:
    return [{"role": "user", "content": question}]


def test_it_answers_as_trained_and_stops_at_the_trained_end(trained):
    for question, expected in CHATS:
        assert trained.answer(ask(question), 60) == expected  # 60 tokens would be more, had it not stopped


def test_the_answer_is_the_plain_loop_of_forward_passes(trained):
    """Oracle: one token at a time without a cache, until the end token."""
    ids = trained.encoder.prompt(ask("What is blue, and who says so?"))
    new = []
    with torch.no_grad():
        while len(new) < 20:
            logits = trained.model.eval()(input_ids=torch.tensor([ids + new]), use_cache=False).logits
            new.append(int(logits[0, -1].argmax()))
            if new[-1] in trained.end_tokens:
                break
    expected = trained.encoder.tokenizer.decode(new, skip_special_tokens=True).strip()
    assert trained.answer(ask("What is blue, and who says so?"), 20) == expected


def test_exactly_one_begin_token(trained):
    ids = trained.encoder.prompt(ask(CHATS[0][0]))
    bos = trained.encoder.tokenizer.bos_token_id
    assert ids[0] == bos and ids.count(bos) == 1


def test_the_prompt_is_what_was_trained_on(trained):
    """The tokens before an answer in training are those that generation asks with."""
    from trainer.data.chat.messages import Dialogue

    messages = [*ask("Say hi"), {"role": "assistant", "content": "Hi!"}]
    ids, is_target = trained.encoder.encode(Dialogue(messages, [False, True], None))
    assert ids[: is_target.index(True)] == trained.encoder.prompt(ask("Say hi"))


def test_a_batch_of_unequal_prompts_gives_what_each_gives_alone(trained):
    dialogues = [ask(question) for question, _ in CHATS] + [ask("Unknown?"), ask("What is red? " * 5)]
    alone = [trained.answer(messages, 30) for messages in dialogues]
    assert trained.answer_many(dialogues, 30) == alone


def test_the_pieces_make_the_answer(trained):
    pieces = []
    text = trained.answer(ask(CHATS[4][0]), 60, pieces.append)
    assert "".join(pieces).strip() == text == CHATS[4][1]
    assert len(pieces) > 3


def test_a_conversation_keeps_its_history(trained):
    conversation = Conversation(trained, 30, system="Be brief.")
    first = conversation.ask("Say hi")
    second = conversation.ask("2 + 3?")
    whole = [
        {"role": "system", "content": "Be brief."},
        *ask("Say hi"),
        {"role": "assistant", "content": first},
        *ask("2 + 3?"),
    ]
    assert second == trained.answer(whole, 30)
    conversation.forget()
    assert conversation.ask("Say hi") == first


def test_a_conversation_that_is_too_long_forgets_its_oldest_turns(trained):
    limit = 30
    conversation = Conversation(trained, limit)
    for _ in range(16):
        conversation.ask("Which animal says moo, and which says woof?")
    assert conversation.forgotten > 0
    assert len(trained.prompt(conversation.turns[:-1])) + limit <= 512  # the model's positions
    with pytest.raises(DataError, match="more than the model's 512 positions"):
        conversation.ask("many words " * 400)


def test_the_command_prints_the_answer(learned, capsys):
    assert generate.run([f"run={learned}", f"prompt={CHATS[0][0]}"]) == 0
    assert capsys.readouterr().out == CHATS[0][1] + "\n"


def test_a_file_of_prompts(learned, tmp_path, capsys):
    lines = [json.dumps(CHATS[0][0]), json.dumps({"prompt": CHATS[1][0]}), ""]
    lines += [json.dumps({"messages": [*ask(CHATS[2][0]), {"role": "assistant", "content": "expected"}]})]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    (tmp_path / "prompts.txt").write_text("\n".join(question for question, _ in CHATS[:3]) + "\n")
    for name in ("prompts.jsonl", "prompts.txt"):
        out = tmp_path / f"{name}.out"
        assert generate.run([f"run={learned}", f"prompts={tmp_path / name}", f"to={out}", "batch_size=2"]) == 0
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [(row["messages"][-1]["content"], row["answer"]) for row in rows] == CHATS[:3]
    capsys.readouterr()
    generate.run([f"run={learned}", f"prompts={tmp_path / 'prompts.txt'}"])
    assert [json.loads(line)["answer"] for line in capsys.readouterr().out.splitlines()] == [a for _, a in CHATS[:3]]


def test_drawn_answers_are_the_seed_s_and_no_draw_is_greedy(learned, capsys):
    def said(*words):
        assert generate.run([f"run={learned}", "prompt=What is up?", "max_new_tokens=24", *words]) == 0
        return capsys.readouterr().out

    greedy, drawn = said(), said("temperature=3.0", "seed=1")
    assert drawn == said("temperature=3.0", "seed=1") and drawn != said("temperature=3.0", "seed=2")
    assert drawn != greedy == said("temperature=0") == said("top_k=1", "seed=5") == said("top_p=1e-6", "seed=5")
    with pytest.raises(ConfigError, match=r"top_p=1\.5: must be above 0 and at most 1"):
        said("top_p=1.5")
    with pytest.raises(ConfigError, match="temperature=-1: must be a number, 0 or more"):
        said("temperature=-1")


def test_a_chat_from_a_pipe(learned, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{CHATS[2][0]}\n\n/new\n{CHATS[5][0]}\n/exit\nnever\n"))
    assert generate.run([f"run={learned}"]) == 0
    assert capsys.readouterr().out.splitlines() == [CHATS[2][1], CHATS[5][1]]


def test_an_interrupted_answer_leaves_the_history(trained, monkeypatch, capsys):
    conversation = Conversation(trained, 30)
    conversation.ask("Say hi")
    before = list(conversation.turns)
    monkeypatch.setattr(generate, "_show", lambda piece: (_ for _ in ()).throw(KeyboardInterrupt))
    generate._reply(conversation, "2 + 3?")
    assert "(stopped)" in capsys.readouterr().out
    assert conversation.turns == before


def test_bad_lines_are_all_listed_before_any_weight(learned, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "load_base", None)
    file = tmp_path / "bad.jsonl"
    file.write_text('"good"\n{"prompt": 7}\n{"messages": []}\n{broken\n')
    with pytest.raises(DataError) as caught:
        generate.run([f"run={learned}", f"prompts={file}"])
    assert all(f"bad.jsonl:{line}:" in str(caught.value) for line in (2, 3, 4))
    with pytest.raises(DataError, match=r"cannot be read: No such file"):
        generate.run([f"run={learned}", f"prompts={tmp_path / 'absent.txt'}"])


def test_arguments_that_exclude_each_other(learned, tmp_path):
    (tmp_path / "there").write_text("")
    with pytest.raises(ConfigError) as caught:
        generate.run([f"run={learned}", "prompt= ", "prompts=x", f"to={tmp_path / 'there'}"])
    assert all(words in str(caught.value) for words in ("exclude each other", "is empty", "is there already"))
    with pytest.raises(ConfigError, match="max_new_tokens=0: must be a whole number"):
        generate.run([f"run={learned}", "max_new_tokens=0"])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["prompt=hi"], 2, "run=DIR is missing"),
        (["run={run}", "promt=hi"], 2, "promt=hi: unknown argument (did you mean prompt?)"),
        (["run={run}", "prompt=hi", "max_new_tokens=1.5"], 2, "max_new_tokens=1.5: must be a whole number above 0"),
        (["run={run}", "prompt=hi", "max_new_tokens=-1"], 2, "max_new_tokens=-1: must be a whole number above 0"),
        (["run={run}/nowhere", "prompt=hi"], 5, "there is no such folder"),
        (
            ["run={run}", "prompt=hi"],
            4,
            "has no result yet (no adapter/ or model/). Finish it first: trainer resume run=",
        ),
    ],
)
def test_mistakes_are_one_block_with_their_code(words, code, said, tmp_path, capsys):
    save_run(compose(["device=cpu", "precision=fp32"]), tmp_path)
    assert here("generate", *(word.format(run=tmp_path) for word in words)) == code
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.startswith("trainer: ") and "Traceback" not in err


def test_argument_errors_come_before_torch(tmp_path, monkeypatch):
    """The seconds that importing it takes are not spent on a misspelt word."""
    monkeypatch.setitem(sys.modules, "trainer.export.reload", None)
    assert here("generate", f"run={tmp_path}", "promt=hi") == 2


ITEMS = [(f"Item {i} code:", f" {colour}{i} bag") for i, colour in enumerate(("red", "blue", "green", "pink"))]


@pytest.fixture(scope="module", params=["prompt_completion", "text"])
def from_text(request, tmp_path_factory, tiny):
    """A run on plain text, and the format of its rows."""
    folder = tmp_path_factory.mktemp(request.param)
    rows = [{"prompt": asked, "completion": said} for asked, said in ITEMS]
    if request.param == "text":
        rows = [{"text": asked + said} for asked, said in ITEMS]
    words = [*tiny.overrides(), "data=file", f"data.path={write_jsonl(folder / 'rows.jsonl', rows)}"]
    words += ["data.max_length=128", "data.eval_fraction=0.25", "quant=none", "precision=fp32", "optim=adamw"]
    words += ["optim.learning_rate=2e-2", "adapter.r=32", "device=cpu", "train.micro_batch_tokens=512"]
    words += [
        "train.accumulation_steps=1",
        "train.max_steps=80",
        "train.save_every=0",
        "train.log_every=80",
        "train.compare_prompts=4",
    ]
    summary = train_here([*words, "schedule.warmup_ratio=0"], folder / "run")
    return folder / "run", request.param, summary


def of_peft(run_dir, tiny, text: str) -> str:
    """Oracle: the README's way to load a result, and generation on the text itself."""
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny.path, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, run_dir / "adapter").eval()
    given = tokenizer(text, return_tensors="pt")
    output = model.generate(**given, max_new_tokens=24, do_sample=False)[0, given.input_ids.shape[1] :]
    return tokenizer.decode(output, skip_special_tokens=True)


def test_what_was_trained_on_text_is_asked_as_text(from_text, tiny, tmp_path, capsys):
    run_dir, format, summary = from_text
    expected = {asked: of_peft(run_dir, tiny, asked) for asked, _ in ITEMS}
    assert sum(expected[asked] == said for asked, said in ITEMS) >= 2  # it has learned what was not held out
    asked = ITEMS[3][0]
    assert generate.run([f"run={run_dir}", f"prompt={asked}", "max_new_tokens=24"]) == 0
    out, err = capsys.readouterr()
    assert out == expected[asked] + "\n" and "asked as plain text" in err
    file = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": asked} for asked in expected])
    generate.run([f"run={run_dir}", f"prompts={file}", f"to={tmp_path / 'out'}", "max_new_tokens=24"])
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert {row["prompt"]: row["answer"] for row in rows} == expected
    held_out = [] if format == "text" else [(a["prompt"], a["trained"], a["asked_as"]) for a in summary["answers"]]
    assert all(said == of_peft(run_dir, tiny, prompt) for prompt, said, _ in held_out)
    assert len(held_out) == (format != "text") and all(way == "text" for _, _, way in held_out)


def test_how_a_run_is_asked_can_be_said(from_text, learned, tmp_path, capsys):
    run_dir, _, _ = from_text
    with pytest.raises(ConfigError, match="system= belongs to a chat"):
        generate.run([f"run={run_dir}", "prompt=x", "system=Be brief."])
    with pytest.raises(ConfigError, match="as=cat: must be one of chat, text"):
        generate.run([f"run={run_dir}", "prompt=x", "as=cat"])
    file = write_jsonl(tmp_path / "chat.jsonl", [{"messages": ask("Hi")}])
    with pytest.raises(DataError, match=r"chat\.jsonl:1: messages are asked through the chat template"):
        generate.run([f"run={run_dir}", f"prompts={file}"])
    generate.run([f"run={learned}", f"prompt={CHATS[0][0]}"])
    assert "asked through the chat template" in capsys.readouterr().err


def test_prompts_are_read_as_rows_are(tmp_path):
    """A byte order mark, a line separator inside a string, and what no row may hold."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('\ufeff"one\u2028two"\n{"prompt": "three"}\r\n'.encode())
    assert [asked[0]["content"] for asked in generate.read_prompts(file, None)] == ["one\u2028two", "three"]
    (tmp_path / "prompts.txt").write_bytes("\ufeffone\u2028two\r\nthree".encode())
    assert generate.read_prompts(tmp_path / "prompts.txt", None, as_text=True) == ["one\u2028two", "three"]
    file.write_bytes(b'"\\ud800"\n' + b"9" * 5000 + b"\n\xff\n")
    with pytest.raises(DataError) as caught:
        generate.read_prompts(file, None)
    said = str(caught.value)
    assert "prompts.jsonl:1: not text" in said and ":2: not JSON: an integer" in said and ":3: not UTF-8" in said


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", "[]"),
        ("adapter_config.json", "{"),
        ("adapter_config.json", '{"peft_type": "EVIL"}'),
        ("adapter_config.json", '{"peft_type": "LORA", "r": "x", "target_modules": ["q_proj"]}'),
        ("adapter_model.safetensors", "nothing"),
        ("tokenizer.json", "{}"),
        ("generation_config.json", "[]"),
    ],
)
def test_a_result_that_no_run_wrote_is_one_line(name, content, learned, tmp_path, capsys):
    run = shutil.copytree(learned, tmp_path / "run")
    (run / "adapter" / name).write_text(content)
    assert here("generate", f"run={run}", "prompt=Say hi") == 4
    error = capsys.readouterr().err
    assert "adapter: cannot be loaded" in error and "Traceback" not in error
