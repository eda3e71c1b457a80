"""Which files a path means, and what is refused."""

from __future__ import annotations

import os

import pytest

from trainer.data.sources.files import find_files, is_hub_id, passed_over
from trainer.errors import DataError


def found(path, split=None) -> list[tuple[str, str, str | None]]:
    return [(file.name, file.kind, file.compression) for file in find_files(str(path), "data.path", split)]


def test_a_folder_of_shards_in_the_order_of_names(tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz", "sub/c.parquet", "README.md", ".hidden.json", "dataset_info.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert found(tmp_path) == [
        (f"{tmp_path}/a.jsonl.gz", "jsonl", ".gz"),
        (f"{tmp_path}/b.jsonl", "jsonl", None),
        (f"{tmp_path}/sub/c.parquet", "parquet", None),
    ]


def test_a_split_is_a_folder_or_the_beginning_of_a_name(tmp_path):
    for name in ("train-0.jsonl", "test-0.jsonl", "training.jsonl", "test/1.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert [name for name, _, _ in found(tmp_path, "train")] == [f"{tmp_path}/train-0.jsonl"]
    assert [name for name, _, _ in found(tmp_path, "test")] == [f"{tmp_path}/test-0.jsonl", f"{tmp_path}/test/1.jsonl"]
    with pytest.raises(DataError, match="no data file of the split valid"):
        found(tmp_path, "valid")


def test_a_folder_with_splits_means_its_train(tmp_path):
    for name in ("train.jsonl", "test.jsonl", "validation.jsonl.zst", "notes.docx", ".hidden.jsonl", "extra.csv"):
        (tmp_path / name).write_bytes(b"x")
    assert [name for name, _, _ in found(tmp_path)] == [f"{tmp_path}/train.jsonl"]
    assert passed_over(str(tmp_path), "data.path", None) == [
        "extra.csv (not of the split train)",
        "notes.docx (no kind of data file)",
        "test.jsonl (not of the split train)",
        "validation.jsonl.zst (not of the split train)",
    ]
    for split in ("validation", "valid", "dev"):
        assert found(tmp_path, split) == [(f"{tmp_path}/validation.jsonl.zst", "jsonl", ".zst")]
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(DataError, match=r"has the splits validation, test and no train: choose data\.split=validation"):
        found(tmp_path)


def test_a_pipe_is_refused_at_once_alone_and_in_a_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", tmp_path):
        with pytest.raises(DataError, match="is not a regular file"):
            found(path)


def test_a_device_is_refused():
    with pytest.raises(DataError, match="is not a regular file"):
        found("/dev/zero")


def test_links_out_of_a_folder_and_loops_are_refused(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.jsonl").write_text("{}")
    (folder / "a.jsonl").write_text("{}")
    (folder / "b.jsonl").symlink_to(folder / "a.jsonl")
    assert len(found(folder)) == 2  # a link inside is a file like any other
    (folder / "out.jsonl").symlink_to(tmp_path / "secret.jsonl")
    with pytest.raises(DataError, match="a link that leaves the folder"):
        found(folder)
    (folder / "out.jsonl").unlink()
    (folder / "loop").symlink_to(folder)
    with pytest.raises(DataError, match="could loop"):
        found(folder)


def test_a_missing_or_unknown_file(tmp_path):
    with pytest.raises(DataError, match=r"data\.path=rows\.jsonl: there is no such file"):
        found("rows.jsonl")
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(DataError, match=r"unknown kind of file \.docx"):
        found(tmp_path / "a.docx")
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="cannot be read"):
        found(tmp_path / "dangling.jsonl")


def test_a_hub_id_is_owner_and_name_that_are_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("tatsu-lab/alpaca")
    (tmp_path / "tatsu-lab/alpaca").mkdir(parents=True)
    assert not is_hub_id("tatsu-lab/alpaca")
    assert not any(is_hub_id(path) for path in ("data/a.jsonl", "a.jsonl", "./a/b", "a/b/c", "/a/b", "squad"))
