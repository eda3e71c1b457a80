"""Marks of files: what tells them apart, and what does not."""

from __future__ import annotations

import hashlib
import os
import shutil

import pytest

from trainer.data.sources.file_marks import END_BYTES, FileMark, changes
from trainer.errors import DataError


@pytest.fixture
def file(tmp_path):
    place = tmp_path / "rows.jsonl"
    place.write_bytes(bytes(range(256)) * 1024)
    os.utime(place, ns=(0, 1_700_000_000_123_456_789))
    return place


def test_a_mark_is_the_size_the_time_and_both_ends(file):
    content = file.read_bytes()
    ends = hashlib.sha256(content[:END_BYTES] + content[-END_BYTES:]).hexdigest()
    assert FileMark.of(file) == FileMark(256 * 1024, 1_700_000_000_123_456_789, ends)
    assert FileMark.of(file).modified == "2023-11-14 22:13:20.123456789 UTC"
    assert FileMark(**FileMark.of(file).to_json()) == FileMark.of(file)


def test_a_copy_that_keeps_the_time_has_the_same_mark(file, tmp_path):
    assert FileMark.of(shutil.copy2(file, tmp_path / "copy")) == FileMark.of(file)


@pytest.mark.parametrize("change, words", [("middle", "written again"), ("end", "other bytes"), ("size", "262,145")])
def test_a_change_is_said_with_what_is_different(change, words, file):
    before = FileMark.of(file)
    content = bytearray(file.read_bytes())
    if change == "size":
        content.append(0)
    else:
        content[len(content) // 2 if change == "middle" else -1] ^= 1
    file.write_bytes(content)
    (said,) = changes({"a": before, "b": before}, {"a": before, "b": FileMark.of(file)})
    assert said.startswith("b ") and words in said


def test_files_that_come_and_go_are_changes(file):
    mark = FileMark.of(file)
    assert changes({"a": mark, "b": mark}, {"b": mark, "c": mark}) == ["a is gone", "c is new"]


def test_a_file_that_cannot_be_read_is_said(tmp_path):
    with pytest.raises(DataError, match=r"rows.jsonl: cannot be read: No such file"):
        FileMark.of(tmp_path / "rows.jsonl")
