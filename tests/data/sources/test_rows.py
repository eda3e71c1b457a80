"""Rows with their true place, for every kind of file, and what is said of broken ones."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import time
import zipfile

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.sources import rows as rows_module
from trainer.data.sources.files import find_files
from trainer.data.sources.rows import read_pieces
from trainer.errors import DataError


def read(path):
    return [
        row for file in find_files(str(path), "data.path", None) for piece in read_pieces(file) for row in piece.rows()
    ]


def write(path, content: bytes | str):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


VALUES = st.dictionaries(
    st.text(max_size=5), st.one_of(st.text(max_size=30), st.integers(), st.lists(st.text(max_size=5), max_size=3))
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(VALUES, min_size=1, max_size=20), gaps=st.lists(st.integers(0, 2), min_size=20, max_size=20))
@pytest.mark.parametrize("block", [7, 1 << 20])
def test_json_lines_come_back_with_their_lines(tmp_path_factory, block, rows, gaps):
    lines, expected = [], []
    for row, gap in zip(rows, gaps, strict=False):
        lines += [""] * gap
        lines.append(json.dumps(row, ensure_ascii=False))
        expected.append((len(lines), row))
    file = write(tmp_path_factory.mktemp("rows") / "a.jsonl", "\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "PIECE_BYTES", block)
        assert [(row.where, row.fields) for row in read(file)] == [(f"{file}:{n}", row) for n, row in expected]


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(VALUES, max_size=20), indent=st.sampled_from([None, 1]))
@pytest.mark.parametrize("block", [7, 1 << 20])
def test_json_arrays_come_back_with_their_lines(tmp_path_factory, block, rows, indent):
    text = json.dumps(rows, ensure_ascii=False, indent=indent)
    file = write(tmp_path_factory.mktemp("rows") / "a.json", "\ufeff" + text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "PIECE_BYTES", block)
        got = read(file)
    assert [row.fields for row in got] == rows
    starts, position = [], text.find("[") + 1  # each row's line, by the standard decoder over the whole text
    for _ in rows:
        position += len(text[position:]) - len(text[position:].lstrip(" \n,"))
        starts.append(text.count("\n", 0, position) + 1)
        position = json.JSONDecoder().raw_decode(text, position)[1]
    assert [row.where for row in got] == [f"{file}:{n}" for n in starts]


@pytest.mark.parametrize(
    "line, said",
    [
        (b'{"text": "cut', "not JSON: Unterminated string starting at (column 10)"),
        (b'{"text": "a",}', "not JSON"),
        (b'{"text": "a\x01b"}', "not JSON: Invalid control character at"),
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff at byte 11"),
        (b'{"text": NaN}', "not JSON: NaN is no JSON value"),
        (b'{"text": "x \\ud800 y"}', "not text: \\ud800 is half of a character"),
        (b'{"text": "x", "n": ' + b"9" * 5000 + b"}", "not JSON: an integer of over 4,300 digits"),
        (b"7", "a row must be an object with named fields, not int"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[", "not JSON"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path, line, said):
    """D1"""
    file = write(tmp_path / "a.jsonl", b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\n')
    first, bad, last = read(file)
    assert (first.fields, last.fields) == ({"text": "one"}, {"text": "two"})
    assert bad.fields is None and bad.where == f"{file}:3" and said in bad.problem
    assert last.where == f"{file}:4"


@pytest.mark.parametrize(
    "content, said",
    [
        (b'[\n{"a": 1},\n{"a": ', ":3: not JSON"),
        (b'[\n{"a": 1},\n]', ":3: not JSON"),
        (b'[\n{"a": 1}\n{"a": 2}]', ":3: not JSON: expected ',' or ']' after a row"),
        (b'[\n{"a": "\xff"}]', ":2: not UTF-8: byte 0xff"),
        (b'[{"a": NaN}]', ":1: not JSON: NaN is no JSON value"),
        (b'[{"a": "\\udc00"}]', ":1: not text: \\udc00 is half of a character"),
        (b'[{"a": ' + b"9" * 5000 + b"}]", ":1: not JSON: an integer of over 4,300 digits"),
        (b'{\n "a": 1\n}', ":1: an object over several lines, not one a line. Wrap it in [ ]"),
        (b'[{"a": 1}]\nmore', ":1: text after the end of the JSON array, beginning with 'm'"),
    ],
)
def test_a_broken_array_says_its_line(tmp_path, content, said):
    file = write(tmp_path / "a.json", content)
    with pytest.raises(DataError) as error:
        read(file)
    assert f"{file}{said}" in str(error.value)


@pytest.mark.parametrize("content", [b'[{"text": "a"}]', b'[\n{"text": "a"}\n]'])
def test_an_array_named_jsonl(tmp_path, content):
    with pytest.raises(DataError, match="a JSON array, not JSON lines"):
        read(write(tmp_path / "a.jsonl", content))


def test_json_lines_named_json(tmp_path):
    assert [r.fields for r in read(write(tmp_path / "a.json", '{"a": 1}\n{"a": 2}\n'))] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("name, wrap", [("a.jsonl", "{}"), ("a.json", "[{}]")])
def test_a_line_of_ten_megabytes_takes_bounded_time(tmp_path, name, wrap):
    row = json.dumps({"text": "ab\\n" * 2_500_000})
    file = write(tmp_path / name, wrap.replace("{}", row))
    started = time.process_time()
    assert len(read(file)[0].fields["text"]) == 10_000_000
    assert time.process_time() - started < 3


def test_text_is_a_row_a_line(tmp_path):
    file = write(tmp_path / "a.txt", "one\r\n\n  two\n")
    assert [(r.where, r.fields) for r in read(file)] == [
        (f"{file}:1", {"text": "one"}),
        (f"{file}:3", {"text": "  two"}),
    ]


TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"), max_size=20)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(TEXT, TEXT).filter(any), min_size=1, max_size=10))
@pytest.mark.parametrize("name, delimiter", [("a.csv", ","), ("a.tsv", "\t")])
def test_csv_values_and_lines(tmp_path_factory, name, delimiter, rows):
    written, starts = io.StringIO(), []
    writer = csv.writer(written, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(["prompt", "completion"])
    for row in rows:
        text = written.getvalue()
        starts.append(len(text.replace("\r\n", "\n").replace("\r", "\n").split("\n")))
        writer.writerow(row)
    file = write(tmp_path_factory.mktemp("csv") / name, written.getvalue())
    got = read(file)
    assert [r.fields for r in got] == [{"prompt": p, "completion": c} for p, c in rows]
    assert [r.where for r in got] == [f"{file}:{n}" for n in starts]


def test_broken_csv(tmp_path):
    file = write(tmp_path / "a.csv", b"text,label\na,b\nc\nd\xff,e\n")
    assert [r.problem for r in read(file)] == [None, "1 values for 2 columns (text, label)", "not UTF-8"]
    for content, said in ((b"text,text\na,b\n", ":1: the first line must name"), (b'text\n"a\n', ":2: not csv")):
        with pytest.raises(DataError) as error:
            read(write(tmp_path / "b.csv", content))
        assert said in str(error.value)


MESSAGES = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    {"messages": [{"role": "user", "content": "Bye", "name": "Ann"}]},
]


@pytest.mark.parametrize("layout", ["parquet", "file", "stream"])
def test_tables_give_rows_without_their_nulls(tmp_path, layout):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(MESSAGES)
    file = tmp_path / ("a.parquet" if layout == "parquet" else "a.arrow")
    if layout == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        new = pyarrow.ipc.new_file if layout == "file" else pyarrow.ipc.new_stream
        with file.open("wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
    got = read(file)
    assert [r.fields for r in got] == MESSAGES
    assert [r.where for r in got] == [f"{file}:row 1", f"{file}:row 2"]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_broken_table(tmp_path, name):
    with pytest.raises(DataError, match=r"not (parquet|arrow)"):
        read(write(tmp_path / name, b"PAR1 no such thing"))


def test_compressed_files(tmp_path):
    import bz2
    import lzma

    for name, compress in (("a.jsonl.gz", gzip.compress), ("a.jsonl.bz2", bz2.compress), ("a.jsonl.xz", lzma.compress)):
        file = write(tmp_path / name, compress(b'{"a": 1}\n{"a": 2}\n'))
        assert [(r.where, r.fields) for r in read(file)] == [(f"{file}:1", {"a": 1}), (f"{file}:2", {"a": 2})]
    cut = write(tmp_path / "b.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000)[:-20])
    with pytest.raises(DataError, match="cannot be read"):
        read(cut)
    with pytest.raises(DataError, match="cannot be read"):
        read(write(tmp_path / "c.jsonl.gz", b"no archive"))


def test_whole_characters_in_escapes_are_text(tmp_path):
    file = write(tmp_path / "a.jsonl", json.dumps({"text": "\U0001f642"}) + "\n" + '{"text": "\\\\ud800"}')
    assert [row.fields["text"] for row in read(file)] == ["\U0001f642", "\\ud800"]


def compressed(folder, ending: str, content: bytes):
    """As other tools write it: zstd through pyarrow, the others through the standard library."""
    file = folder / f"a.jsonl{ending}"
    if ending == ".zip":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.jsonl", content)
    elif ending == ".zst":
        with pyarrow.CompressedOutputStream(str(file), "zstd") as stream:
            stream.write(content)
    else:
        compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[ending]
        file.write_bytes(compress(content))
    return file


ENDINGS = [".gz", ".bz2", ".xz", ".zst", ".zip"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_compressed_rows_are_the_rows(tmp_path, ending):
    texts = [{"text": f"row {i}"} for i in range(3000)]
    content = "".join(json.dumps(row) + "\n" for row in texts).encode()
    got = read(compressed(tmp_path, ending, content))
    assert [row.fields for row in got] == texts and got[-1].where.endswith(f"a.jsonl{ending}:3000")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_damaged_archive_is_a_data_error_wherever_the_byte(tmp_path, ending, record_property):
    rng = random.Random(0)
    content = "".join(json.dumps({"text": rng.random()}) + "\n" for _ in range(300)).encode()
    whole = compressed(tmp_path, ending, content).read_bytes()
    file, refused = tmp_path / f"b.jsonl{ending}", 0
    for place in range(0, len(whole), 101):
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        file.write_bytes(damaged)
        try:
            read(file)
        except DataError as error:
            refused += 1
            assert str(error).startswith(str(file))
    assert refused > 0
    record_property("attacks", 1 + len(range(0, len(whole), 101)))
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError):
        read(file)


def test_tables_in_archives_and_archives_of_several_files(tmp_path):
    table = pyarrow.table({"text": ["a", "b"]})
    pyarrow.parquet.write_table(table, tmp_path / "plain.parquet")
    content = (tmp_path / "plain.parquet").read_bytes()
    (tmp_path / "a.parquet.zst").write_bytes(pyarrow.compress(content, "zstd", asbytes=True))
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("inside.csv", "text\na\nb\n")
        archive.writestr("__MACOSX/._inside.csv", "x")
    for name in ("a.parquet.zst", "b.zip"):
        assert [row.fields for row in read(tmp_path / name)] == [{"text": "a"}, {"text": "b"}]
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("a.csv", "text\na\n")
        archive.writestr("b.csv", "text\na\n")
    with pytest.raises(DataError, match=r"c\.zip: holds 2 files\. Unpack it"):
        read(tmp_path / "c.zip")


LINES = st.one_of(
    st.binary(max_size=40),
    VALUES.map(lambda row: json.dumps(row, ensure_ascii=False).encode()),
    st.tuples(VALUES, st.integers(0, 200), st.binary(max_size=3)).map(
        lambda cut: json.dumps(cut[0]).encode()[: cut[1]] + cut[2]
    ),
)


def as_json_says(line: bytes) -> dict | None:
    """The row by Python's own reader, or None for what RFC 8259 or UTF-8 does not allow."""

    def refuse(constant: str):
        raise ValueError(constant)

    try:
        value = json.loads(line.decode(), parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_bytes_as_json_lines(tmp_path_factory, examples, record_property):
    """Each line by itself is the row that json makes of it, or a problem at its place; nothing else is raised."""
    file = tmp_path_factory.mktemp("fuzz") / "a.jsonl"

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(lines=st.lists(LINES, max_size=8), block=st.sampled_from([7, 1 << 20]))
    def fuzz(lines, block):
        content = b"\n".join(lines)
        file.write_bytes(content)
        unmarked = content.removeprefix(b"\xef\xbb\xbf")  # what some editors put before UTF-8
        expected = [(n, line) for n, line in enumerate(unmarked.split(b"\n"), 1) if line.strip()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows_module, "PIECE_BYTES", block)
            try:
                got = read(file)
            except DataError as error:
                said = ("a JSON array", "an object over several lines")
                assert any(text in str(error) for text in said) and expected[0][1].lstrip()[:1] in (b"[", b"{")
                return
        assert [(row.where, row.fields) for row in got] == [(f"{file}:{n}", as_json_says(line)) for n, line in expected]
        assert all(row.problem for row in got if row.fields is None)

    fuzz()
    record_property("attacks", examples)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet", "a.arrow", "a.jsonl.gz"])
def test_a_file_that_is_cut_while_it_is_read(name, tmp_path, monkeypatch):
    """What is told is a row of it, a broken row or an error with its name: neither a crash nor a row of nobody's."""
    texts = [f"text {n}" for n in range(4000)]
    file, table = tmp_path / name, pyarrow.table({"text": texts})
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    if name == "a.parquet":
        pyarrow.parquet.write_table(table, file, row_group_size=100)
    elif name == "a.arrow":
        with pyarrow.ipc.new_stream(file, table.schema) as sink:
            sink.write_table(table, max_chunksize=100)
    else:
        contents = {"a.json": json.dumps([{"text": t} for t in texts]), "a.jsonl": lines, "a.jsonl.gz": lines}
        contents |= {"a.csv": "text\n" + "\n".join(texts), "a.txt": "\n".join(texts)}
        content = contents[name].encode()
        file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    monkeypatch.setattr(rows_module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(rows_module, "PIECE_ROWS", 100)
    (found,) = find_files(str(file), "data.path", None)
    got = []
    try:
        for number, piece in enumerate(read_pieces(found)):
            got += piece.rows()
            if number == 0:
                with file.open("r+b") as handle:
                    handle.truncate(file.stat().st_size // 2)
    except DataError as error:
        assert str(file) in str(error)
    whole = [row.fields["text"] for row in got if row.problem is None]
    assert whole and (whole[:-1] == texts[: len(whole) - 1]) and texts[len(whole) - 1].startswith(whole[-1])
