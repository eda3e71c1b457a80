"""Rows that went through a table are the rows that went through JSON lines."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest

from trainer.data.chat.formats import RowReader
from trainer.data.data_settings import Format
from trainer.data.sources.files import find_files
from trainer.data.sources.row import Row
from trainer.data.sources.rows import read_pieces

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "type": "object",
                "properties": {
                    "room": {"type": ["string", "null"]},
                    "guest": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]},
                    "note": {"type": "string"},
                },
                "required": ["room"],
            },
        },
    },
    {"type": "function", "function": {"name": "cancel", "parameters": {"type": "object", "required": ["booking"]}}},
]


def row(name: str, arguments: dict, tools) -> dict:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    asked = {"role": "user", "content": "?"}
    return {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": tools}


@pytest.mark.parametrize("as_text", [True, False])
def test_a_required_null_is_a_value_and_padding_is_none(tmp_path, as_text):
    tools = json.dumps(TOOLS) if as_text else TOOLS
    rows = [
        row("book", {"room": None, "guest": {"age": None, "name": "Ben"}}, tools),
        row("book", {"room": "3", "note": "late"}, tools),
        row("cancel", {"booking": 7}, tools),
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (file,) = find_files(str(tmp_path / "a.parquet"), "data.path", None)
    reader = RowReader(Format.messages)
    got = [reader.sample(r)[0] for piece in read_pieces(file) for r in piece.rows()]
    assert [s.messages for s in got] == [reader.sample(Row("f:1", r))[0].messages for r in rows]  # oracle: no table
