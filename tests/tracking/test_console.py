"""What a screen shows of rows, names and answers: never what a terminal would obey."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from tests.program import here
from trainer.errors import in_json, visible
from trainer.tracking.console import Screen

HOSTILE = "a\x1b[2J\x9b1m\u202eb"
SHOWN = r"a\x1b[2J\x9b1m\u202eb"


def test_every_way_to_the_screen_and_the_log_shows_escapes(tmp_path, capsys):
    screen = Screen()
    screen.keep_log(tmp_path / "train.log")
    screen.say(HOSTILE)
    screen.runs([(HOSTILE, "green")])
    screen.table(HOSTILE, [(HOSTILE, HOSTILE)])
    screen.columns(HOSTILE, (HOSTILE,), [(HOSTILE,)])
    screen.close()
    for text in (capsys.readouterr().out, (tmp_path / "train.log").read_text()):
        assert text.count(SHOWN) == 8
        assert not any(character in text for character in "\x1b\x9b\u202e")


def test_lines_tabs_and_letters_stay_and_json_means_the_same():
    text = "ß\t日本\n\u00a0🙂"
    assert visible(text) == text and in_json(text) == text
    dumped = in_json(json.dumps(HOSTILE, ensure_ascii=False))
    assert json.loads(dumped) == HOSTILE and visible(dumped) == dumped


@pytest.mark.parametrize("part", ["column", "file", "word"])
def test_errors_show_names_escaped(part, tmp_path, capsys):
    name = HOSTILE if part == "file" else "a"
    file = tmp_path / f"{name}.jsonl"
    file.write_text(json.dumps({HOSTILE: "x"} if part == "column" else {"no": "x"}) + "\n")
    key = HOSTILE if part == "word" else "data.path"
    assert here("data", "data=file", f'{key}="{file}"') in (2, 3)
    out, err = capsys.readouterr()
    assert r"\x1b" in err and not any(character in out + err for character in "\x1b\x9b\u202e")


LINE = "step  5/44  loss 1.1672  lr 2.97e-03  grad norm 1.746  3,892 tokens/s  mfu 8.0%  memory 0.06 GiB"
PATH = "/long" * 20 + "/offline-run"


def shown(width: int, terminal: bool) -> str:
    """What a step, two facts and a table look like."""
    screen, out = Screen(), io.StringIO()
    screen.terminal = Console(file=out, width=width, force_terminal=terminal, color_system=None, soft_wrap=True)
    screen.say(LINE)
    screen.table("done", [("tracking", f"send it with: wandb sync {PATH}"), ("model", "a b")])
    screen.columns("t", ("change", "cost"), [("x", "nothing"), ("longer", "y")])
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_a_terminal_breaks_between_words_and_never_in_a_path(width):
    lines = shown(width, terminal=True).splitlines()
    assert all(len(line) <= width for line in lines if PATH not in line)
    assert any(PATH in line for line in lines), "it can be copied whole"
    text = " ".join(" ".join(lines).split())
    assert " ".join(LINE.split()) in text and f"wandb sync {PATH}" in text


def test_a_file_has_a_line_a_step_and_no_trailing_blanks(tmp_path):
    assert shown(80, terminal=False).splitlines()[0] == LINE
    screen = Screen()
    screen.keep_log(tmp_path / "train.log")
    screen.say(LINE)
    screen.columns("t", ("change", "cost"), [("x", "nothing"), ("longer", "y")])
    screen.close()
    for text in (shown(80, terminal=False), (tmp_path / "train.log").read_text()):
        assert [line for line in text.splitlines() if line != line.rstrip()] == []
    assert (tmp_path / "train.log").read_text().splitlines()[0] == LINE
