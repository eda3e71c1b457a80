"""From files to tokens: every row is used or counted, whatever the number of processes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support import CHATML_TEMPLATE, CHATS, chat_rows, make_tokenizer, write_jsonl
from trainer.config.compose import compose
from trainer.data.chat.encoder import Encoder
from trainer.data.chat.formats import RowReader
from trainer.data.data_settings import Format, TrainOn
from trainer.data.sources.files import find_files
from trainer.data.sources.row import Row
from trainer.data.sources.rows import read_pieces
from trainer.data.tokens.gather import load_data
from trainer.data.tokens.tokenize import load_tokens, openings
from trainer.errors import DataError


def settings_of(*words: str):
    return compose(["data=file", "data.eval_fraction=0", "data.max_length=128", *words]).config.data


def load(path, *words: str, tokenizer=None):
    data = settings_of(f"data.path={path}", *words)
    return load_tokens(data, data.path, "data.path", tokenizer or make_tokenizer())


def refused(path, *words: str) -> str:
    with pytest.raises(DataError) as error:
        load(path, *words)
    return str(error.value)


def test_tokens_are_the_encoders_in_the_order_of_the_rows(chats, tokenizer):
    tokens, counts = load(chats)
    encoder = Encoder(tokenizer, TrainOn.assistant)
    (file,) = find_files(str(chats), "data.path", None)
    for i, row in enumerate(row for piece in read_pieces(file) for row in piece.rows()):
        sample, _ = RowReader(Format.auto).sample(row)
        ids, is_target = encoder.encode(sample)
        assert tokens.sample(i)[0].tolist() == ids and tokens.sample(i)[1].tolist() == is_target
        assert tokens.source(i) == sample and tokens.place(i) == row.where == f"{chats}:{i + 1}"
    assert (counts.rows, counts.used, counts.samples) == (8, 8, 8)
    assert counts.tokens == tokens.num_tokens == sum(len(tokens.sample(i)[0]) for i in range(8))
    assert counts.targets == tokens.num_targets == sum(int(tokens.sample(i)[1].sum()) for i in range(8))
    assert counts.ended == 8 and counts.format == "messages"


def test_several_processes_make_the_same_tokens(tmp_path):
    """Pieces of a megabyte: this file has several."""
    rows = [{"prompt": f"{i} ", "completion": "word " * (i % 50)} for i in range(20_000)]
    rows[7777] = {"prompt": 1, "completion": ""}
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    one, counted = load(file, "data.workers=1", "data.on_bad_row=skip", "data.cache_dir=null")
    two, counted_again = load(file, "data.workers=2", "data.on_bad_row=skip", "data.cache_dir=null")
    assert one.content_hash() == two.content_hash() and len(one) == len(two) > 10_000
    assert counted == counted_again
    assert counted.problems() == [f"{file}:7778: prompt must be a string, not 1"]


def test_an_error_in_a_process_is_the_same_error(tmp_path):
    rows = [{"text": "word " * 100} for _ in range(10_000)]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    with file.open("a") as end:
        end.write("[\n")
    for workers in (1, 2):
        assert f"{file}:10001: not JSON" in refused(file, f"data.workers={workers}", "data.cache_dir=null")


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_targets_of_three_turns(tmp_path, tokenizer, train_on):
    """M2"""
    messages = [m for row in chat_rows(CHATS[:3]) for m in row["messages"]]
    tokens, _ = load(write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}]), f"data.train_on={train_on}")
    ids, is_target = tokens.sample(0)
    said = tokenizer.decode(ids[is_target])
    answers = [answer + "<|eot|>" for _, answer in CHATS[:3]]
    assert said == {"assistant": "".join(answers), "last": answers[-1], "all": tokenizer.decode(ids)}[train_on]


def test_truncation_keeps_the_beginning_and_makes_no_end_token(tmp_path, tokenizer):
    """M3"""
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "Q: ", "completion": "x" * 300}])
    tokens, counts = load(file, "data.over_length=truncate", "data.max_length=50")
    ids, is_target = tokens.sample(0)
    assert len(ids) == 50 and is_target[-1] and tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids[is_target]) == "x" * int(is_target.sum())
    assert (counts.truncated, counts.ended) == (1, 0) and counts.truncated_share == 1.0
    assert "1 truncated (100.0%)" in counts.sentence(50)


def test_split_text_loses_nothing(tmp_path, tokenizer):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "y" * 120}])
    tokens, counts = load(file, "data.over_length=split", "data.max_length=50")
    whole = np.concatenate([tokens.sample(i)[0] for i in range(len(tokens))])
    assert whole.tolist() == Encoder(tokenizer, TrainOn.assistant).encode(_sample({"text": "y" * 120}))[0]
    assert (counts.used, counts.samples, counts.split) == (1, 3, 3)


def _sample(fields):
    return RowReader(Format.auto).sample(Row("f:1", fields))[0]


def test_too_long_is_dropped_counted_and_said(tmp_path):
    """D2"""
    rows = [{"prompt": "a ", "completion": "b" * (400 if i < 3 else 4)} for i in range(8)]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    tokens, counts = load(file)
    assert len(tokens) == 5 and counts.dropped == {"over max_length": 3}
    assert counts.examples["over max_length"] == [f"{file}:{n}" for n in (1, 2, 3)]
    assert "3 dropped (37.5%): over max_length" in counts.sentence(128) and "limit 128 tokens" in counts.sentence(128)
    assert counts.lengths["100"] > 400 and counts.lengths["0"] < 10
    for words in (["data.over_length=error"], ["data.over_length=error", "data.on_bad_row=skip"]):
        said = refused(file, *words)
        assert f"{file}:2: " in said and "over data.max_length=128" in said
    assert "only format text can be split" in refused(file, "data.over_length=split")


def test_prompts_that_leave_no_target(tmp_path):
    """L3"""
    rows = [{"prompt": "a" * 400, "completion": "b"}] * 2
    short = {"prompt": "a", "completion": "b"}
    said = refused(write_jsonl(tmp_path / "a.jsonl", rows), "data.over_length=truncate")
    assert "no usable sample. 2 rows, 0 used; 2 dropped (100.0%): no targets left after the cut" in said
    tokens, counts = load(write_jsonl(tmp_path / "b.jsonl", [*rows, short]), "data.over_length=truncate")
    assert len(tokens) == 1 and counts.dropped == {"no targets left after the cut": 2}


@pytest.mark.parametrize(
    "content, said",
    [("", "the file is empty"), ("\n\n  \n", "the file is empty: 0 rows, 0 usable samples"), ("[]", "a JSON array")],
)
def test_nothing_usable(tmp_path, content, said):
    """D3"""
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    assert said in refused(file)


def test_bad_rows_are_all_listed_or_skipped_and_counted(tmp_path):
    """M5, D1"""
    bad = [{"messages": [{"role": r, "content": "x"} for r in roles]} for roles in (["usr"], ["user", "tool"])]
    rows = [json.dumps(row) for row in chat_rows()[:2]]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join([rows[0], json.dumps(bad[0]), '{"cut', json.dumps(bad[1]), rows[1], '{"text": NaN}']))
    said = refused(file)
    assert f"{file}:2: messages[0].role is 'usr'" in said and f"{file}:3: not JSON" in said
    assert f"{file}:4: the chat template refuses the roles user, tool" in said and f"{file}:6: not JSON: NaN" in said
    tokens, counts = load(file, "data.on_bad_row=skip")
    assert len(tokens) == 2 and counts.dropped == {"bad row": 4} and len(counts.problems()) == 4
    many = write_jsonl(tmp_path / "b.jsonl", [{"question": "?"}] * 25)
    assert refused(many).count("unknown format") == 1 and "the same in 24 more rows" in refused(many)


def test_shards_of_different_formats_are_refused(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", chat_rows()[:2])
    write_jsonl(tmp_path / "b.jsonl", [{"text": "once upon a time"}])
    said = refused(tmp_path)
    assert f"{tmp_path}/b.jsonl:1: this row is of format text, but {tmp_path}/a.jsonl:1 is messages" in said
    tokens, _ = load(
        write_jsonl(tmp_path / "c.jsonl", [*chat_rows()[:1], {"messages": chat_rows()[1]["messages"], "x": 1}])
    )
    assert len(tokens) == 2


def test_one_sample_fifty_times_longer_is_capped(tmp_path):
    """D5"""
    rows = [
        *chat_rows(),
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a" * 3000}]},
    ]
    tokens, _ = load(write_jsonl(tmp_path / "a.jsonl", rows), "data.over_length=truncate")
    assert tokens.lengths.max() == 128 and len(tokens) == 9


def test_repeated_samples_are_counted(tmp_path):
    _, counts = load(write_jsonl(tmp_path / "a.jsonl", chat_rows() + chat_rows()[:2]))
    assert counts.duplicates == 2 and counts.duplicate_share == 0.2
    turns = [m for row in chat_rows()[:2] for m in row["messages"]]
    flagged = [{"messages": [{**m, "train": m is turns[k]} for m in turns]} for k in (1, 3, 3)]
    _, counts = load(write_jsonl(tmp_path / "b.jsonl", flagged))
    assert counts.duplicates == 1  # the same words with other targets are another sample


@pytest.mark.parametrize(
    "setting, rows, words",
    [
        ("max_dropped_share", [*chat_rows(), {"prompt": "x"}], ["data.on_bad_row=skip"]),
        ("max_truncated_share", [*chat_rows()], ["data.over_length=truncate", "data.max_length=30"]),
        ("max_duplicate_share", chat_rows() + chat_rows()[:1], []),
    ],
)
def test_thresholds_stop_a_run(tmp_path, tokenizer, setting, rows, words):
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    words = [f"data.path={file}", *words]
    load_data(settings_of(*words, f"data.{setting}=1"), 0, tokenizer)
    with pytest.raises(DataError, match=rf"over data\.{setting}=0\.05"):
        load_data(settings_of(*words, f"data.{setting}=0.05"), 0, tokenizer)


def test_openings_are_spread_over_the_dialogues(chats):
    tokens, _ = load(chats)
    assert [opening.answer for opening in openings(tokens, 2)] == [CHATS[0][1], CHATS[-1][1]]
    assert len(openings(tokens, 99)) == 8


def test_an_evaluation_file_is_not_split(chats, tokenizer):
    loaded = load_data(
        settings_of(f"data.path={chats}", f"data.eval_path={chats}", "data.eval_fraction=0.5"), 0, tokenizer
    )
    assert len(loaded.train_set) == len(loaded.held_out) == 8 and len(loaded.counts) == 2


def test_equal_causes_are_said_once_with_their_rows_and_what_to_type(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("question,answer\n" + "".join(f"q{i},a{i}\n" for i in range(12)))
    said = refused(file)
    line = "data.columns={instruction: question, output: answer}"
    assert said.count("unknown format") == 1 and f"type '{line}'" in said and "Fix these rows" not in said
    assert f"{file}:2: " in said and f"the same in 11 more rows: {file}:3, {file}:4," in said
    tokens, counts = load(file, line)
    assert len(tokens) == 12 and counts.format == "alpaca"
    assert tokens.source(3).messages[0]["content"] == "q3"


def test_problems_that_differ_in_the_number_of_a_message_alone_are_one(tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"messages": [*chat[:n], {"role": "usr", "content": "?"}]} for n in (0, 1, 2)]
    said = refused(write_jsonl(tmp_path / "a.jsonl", [*rows, {"prompt": 1, "completion": ""}]))
    assert "a.jsonl:1: messages[0].role is 'usr'" in said and said.count("'usr'") == 1
    assert "the same in 2 more rows" in said and "a.jsonl:4: prompt must be a string" in said


def test_empty_answers_are_counted_or_bad_rows(tmp_path, tokenizer):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]
    calling = [chat[0], {"role": "assistant", "content": "", "reasoning_content": "hm"}]
    rows = [{"messages": chat}, {"messages": [chat[0], {**chat[1], "content": " x"}]}, {"messages": [*chat, *calling]}]
    template = tokenizer.chat_template.replace("m.content | trim", "(m.reasoning_content or '') + m.content | trim")
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    _, counts = load(file, tokenizer=make_tokenizer(template))
    assert counts.remarks == {"empty answers": 2} and counts.examples["empty answers"] == [f"{file}:1", f"{file}:3"]
    _, last = load(file, "data.train_on=last", tokenizer=make_tokenizer(template))
    assert last.remarks == {"empty answers": 1}  # the thoughts of the third are words
    _, skipped = load(file, "data.empty_answers=bad_row", "data.on_bad_row=skip", tokenizer=make_tokenizer(template))
    assert skipped.used == 1 and skipped.dropped == {"bad row": 2}
    assert "messages[1]: the answer is empty" in refused(file, "data.empty_answers=bad_row")
    alpaca = write_jsonl(
        tmp_path / "b.jsonl", [{"instruction": "x", "output": ""}, {"instruction": "y", "output": "z"}]
    )
    assert load(alpaca)[1].remarks == {"empty answers": 1}
    assert "output: the answer is empty" in refused(alpaca, "data.empty_answers=bad_row")


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_a_sample_ends_where_the_templates_newline_stands_behind_the_end_token(chats, train_on):
    tokenizer = make_tokenizer(CHATML_TEMPLATE)
    tokens, counts = load(chats, f"data.train_on={train_on}", tokenizer=tokenizer)
    assert counts.ended == counts.samples == 8
    assert tokenizer.eos_token_id in tokens.ends()


def test_rendered_text_is_the_tokenizers_own_and_counted(tmp_path):
    tokenizer = make_tokenizer(CHATML_TEMPLATE)
    chat = [{"role": "user", "content": "Q 0"}, {"role": "assistant", "content": "A 0"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": text}, {"text": "plain"}])
    tokens, counts = load(file, tokenizer=tokenizer)
    assert tokens.sample(0)[0].tolist() == tokenizer(text).input_ids  # oracle
    assert counts.remarks == {"control tokens in the text": 1} and counts.plain == counts.ended == 2
    quoted = write_jsonl(tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": text}, chat[1]]}])
    (sample,) = load(quoted, tokenizer=tokenizer)[0].sample(0)[:1]
    assert sample.tolist().count(tokenizer.eos_token_id) == 2  # the template's two, none of the quoted


def test_files_that_are_passed_over_are_told_also_from_the_cache(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", chat_rows())
    write_jsonl(tmp_path / "test.jsonl", chat_rows())
    (tmp_path / "notes.docx").write_text("x")
    for _ in range(2):
        tokens, counts = load(tmp_path)
        assert len(tokens) == 8
        assert counts.passed_over == ["notes.docx (no kind of data file)", "test.jsonl (not of the split train)"]
