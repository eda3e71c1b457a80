"""`trainer data`: the audit against counts made by hand, on the screen and as JSON."""

from __future__ import annotations

import json

import pytest

from tests.support import CHATS, chat_rows, write_jsonl
from trainer.commands.data import run
from trainer.errors import ConfigError, DataError

KEYS = {
    *("version", "settings", "sources", "evaluation_file", "train", "held_out", "first_epoch", "first_window"),
    *("length_histogram", "warnings", "stops", "shown"),
}
SOURCE_KEYS = {
    *("name", "weight", "path", "format", "rows", "used", "dropped", "dropped_share", "samples", "tokens", "targets"),
    *("target_share", "lengths", "truncated", "truncated_share", "split", "duplicates", "duplicate_share", "ended"),
    *("ended_share", "cache", "passed_over", "remarks", "overlap"),
}


@pytest.fixture
def rows(tmp_path):
    """Eight good rows, one of them again, one bad and one far too long."""
    long = {"messages": [{"role": "user", "content": "x" * 500}, {"role": "assistant", "content": "y"}]}
    return write_jsonl(tmp_path / "rows.jsonl", [*chat_rows(), *chat_rows()[:1], {"question": "?"}, long])


def words(tiny, file, *more):
    base = ["data=file", f"data.path={file}", "data.max_length=128", "data.eval_fraction=0", "data.on_bad_row=skip"]
    return [*tiny.overrides(), *base, "train.micro_batch_tokens=128", *more]


def test_the_report_counts_what_there_is(tiny, tokenizer, rows, tmp_path, capsys):
    assert run(words(tiny, rows, f"output_dir={tmp_path / 'out'}", "show=2")) == 0
    report = json.loads((tmp_path / "out" / "data_report.json").read_text())
    assert set(report) == KEYS and set(report["sources"][0]) == SOURCE_KEYS
    source = report["sources"][0]
    assert (source["rows"], source["used"], source["samples"], source["duplicates"]) == (11, 9, 9, 1)
    assert source["dropped"]["bad row"]["rows"] == 1 and source["dropped"]["over max_length"]["share"] == 1 / 11
    assert source["dropped"]["bad row"]["first"][0].startswith(f"{rows}:10: unknown format")
    assert source["dropped"]["over max_length"]["first"] == [f"{rows}:11"]
    targets = [tokenizer(answer + "<|eot|>", add_special_tokens=False).input_ids for _, answer in [*CHATS, CHATS[0]]]
    assert source["targets"] == sum(map(len, targets)) == report["train"]["targets"]
    assert source["ended"] == 9 and report["held_out"] is None and report["stops"] == []
    assert sum(report["length_histogram"]["samples"]) == 9
    assert report["first_epoch"]["samples"] == 9 and report["first_epoch"]["tokens"] == source["tokens"]
    assert any("18.2% dropped" in warning for warning in report["warnings"])
    question, answer = CHATS[0]
    first = report["shown"][0]
    assert first["place"] == f"{rows}:1" and [run["trained"] for run in first["runs"]] == [False, True]
    assert first["runs"][1]["text"] == answer + "<|eot|>" and question in first["runs"][0]["text"]
    screen = capsys.readouterr().out
    unbroken = "".join(screen.split())  # a long path is broken anywhere
    assert f"⟦{answer}<|eot|>⟧" in screen and f"{rows}:10:unknownformat" in unbroken


def test_nothing_is_written_without_output_dir(tiny, chats, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(words(tiny, chats)) == 0
    assert list(tmp_path.iterdir()) == [] and "8 samples" in capsys.readouterr().out


def test_a_threshold_ends_the_audit_with_its_report_and_an_error(tiny, rows, tmp_path, capsys):
    with pytest.raises(DataError, match=r"over data\.max_dropped_share=0\.1"):
        run(words(tiny, rows, "data.max_dropped_share=0.1", f"output_dir={tmp_path}"))
    assert len(json.loads((tmp_path / "data_report.json").read_text())["stops"]) == 1
    assert "11 read, 9 used" in capsys.readouterr().out


def test_a_mixture_has_a_row_a_source(tiny, chats, rows, tmp_path, capsys):
    sources = f"data.sources=[{{path: {chats}, name: a, weight: 3}}, {{path: {rows}, name: b}}]"
    base = [word for word in words(tiny, chats) if not word.startswith("data.path")]
    assert run([*base, sources, f"output_dir={tmp_path}"]) == 0
    report = json.loads((tmp_path / "data_report.json").read_text())
    assert [(s["name"], s["weight"], s["samples"]) for s in report["sources"]] == [("a", 3.0, 8), ("b", 1.0, 9)]
    assert report["train"]["samples"] == 17 and report["first_epoch"]["samples"] == 8 + 3


def test_show_must_be_a_number(tiny, chats):
    with pytest.raises(ConfigError, match="show=few: must be a whole number"):
        run(words(tiny, chats, "show=few"))


def test_of_a_stream_the_first_window_is_audited_and_the_rest_is_unknown(tiny, rows, tmp_path, capsys):
    """Without train.max_steps, and with data.eval_fraction: what training would need, an audit does not."""
    stream = ["data.streaming=true", "data.streaming_window=5", "data.eval_fraction=0.1", "show=1"]
    assert run(words(tiny, rows, *stream, f"output_dir={tmp_path}")) == 0
    report = json.loads((tmp_path / "data_report.json").read_text())
    assert set(report) == KEYS and report["train"] is None and report["first_epoch"] is None
    assert report["first_window"]["samples"] == 5 and report["shown"][0]["place"] == f"{rows}:1"
    assert report["sources"][0]["dropped"]["bad row"]["first"][0].startswith(f"{rows}:10: unknown format")
    assert "not known before it is read" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(DataError, match=r"over data\.max_dropped_share=0\.1"):
        run(words(tiny, rows, *stream, "data.max_dropped_share=0.1"))
    assert "stops" in capsys.readouterr().out


def test_remarks_and_files_passed_over_are_said_with_the_way_out(tiny, tmp_path, capsys):
    folder = tmp_path / "rows"
    folder.mkdir()
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]
    write_jsonl(folder / "train.jsonl", [*chat_rows(), {"messages": chat}])
    write_jsonl(folder / "test.jsonl", chat_rows()[:2])
    assert run(words(tiny, folder, f"data.eval_path={folder / 'test.jsonl'}", f"output_dir={tmp_path}")) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "passed over test.jsonl (not of the split train)" in screen
    assert (
        "1 rows have an empty answer, of which the end token alone is trained on: data.empty_answers=bad_row" in screen
    )
    assert f"({folder}/train.jsonl:9)" in screen
    assert "2 of the 2 held-out samples are trained on too" in screen
    report = json.loads((tmp_path / "data_report.json").read_text())
    assert report["sources"][0]["remarks"] == {"empty answers": {"rows": 1, "first": [f"{folder}/train.jsonl:9"]}}
    assert report["evaluation_file"]["overlap"] == 2


def test_tools_on_a_template_without_them_are_one_line_and_the_shipped_one_writes_them(tiny, tmp_path, capsys):
    turns = [
        {"from": "human", "value": "Weather in Ulm?"},
        {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Ulm"}})},
        {"from": "observation", "value": "blue"},
        {"from": "gpt", "value": "Blue."},
    ]
    tools = json.dumps([{"name": "weather", "parameters": {"type": "object"}}])
    file = write_jsonl(tmp_path / "rows.jsonl", [{"conversations": turns, "tools": tools}] * 12)
    given = [*words(tiny, file), "data.max_length=512", "train.micro_batch_tokens=512", "data.on_bad_row=error"]
    with pytest.raises(DataError) as refused:
        run(given)
    said = str(refused.value)
    assert said.count("data.chat_template=plain_tools") == 1 and "the same in 11 more rows" in said
    assert len(said.splitlines()) == 3 and "Fix these rows" not in said
    assert run([*given, "data.chat_template=plain_tools", "show=1"]) == 0
    screen = capsys.readouterr().out
    assert '\u27e6 Call: {"name": "weather", "arguments": {"city": "Ulm"}}<|eot|>\u27e7\nTool: blue' in screen
    assert "\u27e6 Blue.<|eot|>\u27e7" in screen
