"""D4: tokens are made anew whenever what they depend on changes, and found again when nothing did."""

from __future__ import annotations

import multiprocessing
import os
import shutil

import numpy as np
import pytest

from tests.support import CHATML_TEMPLATE, chat_rows, make_tokenizer, write_jsonl
from trainer.config.compose import compose
from trainer.data.tokens import store
from trainer.data.tokens.cache import ROOM
from trainer.data.tokens.store import TOKENS
from trainer.data.tokens.tokenize import load_tokens


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    return write_jsonl(tmp_path / "a.jsonl", chat_rows())


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def load(file, cache, *words: str, tokenizer=None):
    words = ["data=file", f"data.path={file}", f"data.cache_dir={cache}", "data.max_length=128", *words]
    data = compose(words).config.data
    return load_tokens(data, data.path, "data.path", tokenizer or make_tokenizer())


def test_the_second_time_is_a_hit_and_says_so(file, cache):
    made, counts = load(file, cache)
    found, again = load(file, cache)
    assert counts.cache.startswith("tokens cached in ") and again.cache.startswith("token cache hit: ")
    assert again.cache in again.sentence(128)
    assert found.content_hash() == made.content_hash()
    assert [found.source(i) for i in range(8)] == [made.source(i) for i in range(8)]
    counts.cache = again.cache
    assert counts == again


def test_the_samples_are_mapped_not_read(file, cache):
    tokens, _ = load(file, cache)
    (stored,) = cache.glob(f"tokens/*/{TOKENS}")
    with open("/proc/self/maps") as maps:
        assert str(stored) in maps.read()
    assert not tokens.input_ids.flags.owndata


@pytest.mark.parametrize(
    "words", [["data.max_length=64"], ["data.train_on=all"], ["data.over_length=truncate"], ["data.format=messages"]]
)
def test_a_setting_that_shapes_samples_is_a_miss(file, cache, words):
    load(file, cache)
    assert "tokens cached" in load(file, cache, *words)[1].cache
    assert "hit" in load(file, cache)[1].cache


def test_the_mask_and_the_length_change_the_tokens(file, cache):
    hashes = {
        load(file, cache, *words)[0].content_hash() for words in ([], ["data.train_on=all"], ["data.max_length=30"])
    }
    assert len(hashes) == 3


def test_another_row_template_or_tokenizer_is_a_miss(file, cache):
    before, _ = load(file, cache)
    other, counts = load(file, cache, tokenizer=make_tokenizer(CHATML_TEMPLATE))
    assert "hit" not in counts.cache and other.content_hash() != before.content_hash()
    grown = make_tokenizer()
    grown.add_tokens(["moo"])
    assert "hit" not in load(file, cache, tokenizer=grown)[1].cache
    rows = chat_rows()
    rows[3]["messages"][1]["content"] = "Sunday"
    stamp = file.stat()
    write_jsonl(file, rows)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    after, counts = load(file, cache)
    assert "hit" not in counts.cache and after.content_hash() != before.content_hash()


def test_settings_that_shape_nothing_are_hits(file, cache):
    load(file, cache)
    assert "hit" in load(file, cache, "data.eval_fraction=0.5", "data.workers=2", "data.max_dropped_share=0.5")[1].cache


@pytest.mark.parametrize("broken", ["cut", "gone", "counts"])
def test_a_broken_cache_is_made_again(file, cache, broken):
    made, _ = load(file, cache)
    expected = made.content_hash()
    (stored,) = cache.glob(f"tokens/*/{TOKENS}")
    counts = stored.with_name("counts.json")
    content = stored.read_bytes()
    if broken == "cut":
        stored.unlink()  # the mapped one stays whole
        stored.write_bytes(content[: len(content) // 2])
    elif broken == "gone":
        stored.unlink()
    else:
        counts.write_text("{")
    tokens, said = load(file, cache)
    assert "hit" not in said.cache and tokens.content_hash() == expected
    assert "hit" in load(file, cache)[1].cache


def test_one_flipped_bit_anywhere_is_found_before_arrow_sees_it(file, cache, tokenizer, monkeypatch, record_property):
    """Arrow ends the whole process on some of these: it is called for what was stored alone."""
    expected = load(file, cache, tokenizer=tokenizer)[0].content_hash()
    (folder,) = cache.glob("tokens/*")
    whole = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    opened, real = [], store.open_tokens

    def open_tokens(folder, name):
        opened.append((folder / TOKENS).read_bytes())
        return real(folder, name)

    monkeypatch.setattr("trainer.data.tokens.cache.open_tokens", open_tokens)
    draw = np.random.default_rng(17)
    record_property("attacks", 20)
    for number in range(20):
        path = list(whole)[number % len(whole)]
        damaged, bit = bytearray(whole[path]), int(draw.integers(8 * len(whole[path])))
        damaged[bit // 8] ^= 1 << bit % 8
        path.unlink()  # what is mapped stays as it is
        path.write_bytes(damaged)
        tokens, counts = load(file, cache, tokenizer=tokenizer)
        assert counts.cache == f"tokens cached in {folder}, anew: what lay there was damaged", (path.name, bit)
        assert tokens.content_hash() == expected
        assert {path: path.read_bytes() for path in sorted(folder.iterdir())} == whole
    assert set(opened) == {whole[folder / TOKENS]}


def test_processes_that_make_one_cache_at_once_all_have_it(file, cache):
    """Forked as one, so that all look before any has stored; half of them find a broken one there."""
    expected = load(file, cache)[0].content_hash()
    (folder,) = cache.glob("tokens/*")
    context, words = multiprocessing.get_context("fork"), ("data.workers=1",)
    for broken in (False, True):
        (folder / TOKENS).unlink() if broken else shutil.rmtree(folder)
        start, found = context.Barrier(4), context.Queue()

        def make(start=start, found=found):
            tokenizer = make_tokenizer()
            start.wait()
            try:
                tokens, counts = load(file, cache, *words, tokenizer=tokenizer)
                found.put((tokens.content_hash(), counts.tokens))
            except BaseException as error:
                found.put(repr(error))

        processes = [context.Process(target=make) for _ in range(4)]
        for process in processes:
            process.start()
        said = [found.get(timeout=60) for _ in processes]
        for process in processes:
            process.join()
        assert {text for text, *_ in said} == {expected}, said
        assert "hit" in load(file, cache)[1].cache and not list(cache.glob("tokens/.building-*"))


@pytest.mark.parametrize("changed", [path.relative_to(ROOM).as_posix() for path in sorted(ROOM.rglob("*.py"))])
def test_a_change_in_any_file_of_the_room_is_a_miss(file, cache, tokenizer, tmp_path, monkeypatch, changed):
    load(file, cache, tokenizer=tokenizer)
    room = shutil.copytree(ROOM, tmp_path / "room", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("trainer.data.tokens.cache.ROOM", room)
    assert "hit" in load(file, cache, tokenizer=tokenizer)[1].cache, "a copy is the same code"
    changed_room = shutil.copytree(room, tmp_path / "changed")
    with (changed_room / changed).open("a") as stream:
        stream.write("\n# changed\n")
    monkeypatch.setattr("trainer.data.tokens.cache.ROOM", changed_room)
    assert "tokens cached" in load(file, cache, tokenizer=tokenizer)[1].cache


def test_a_failure_leaves_nothing(tmp_path, cache):
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"x": 1}])
    with pytest.raises(Exception, match="unknown format"):
        load(bad, cache)
    assert list(cache.glob("tokens/*")) == list(cache.glob("tokens/.*")) == []


def test_a_cache_that_cannot_be_written_is_no_error(file, tmp_path):
    (tmp_path / "plain").write_text("a file where the folder should be")
    tokens, counts = load(file, tmp_path / "plain")
    assert len(tokens) == 8 and "no token cache" in counts.cache


def test_no_cache_at_all(file, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(tmp_path.iterdir())
    tokens, counts = load(file, "null")
    assert len(tokens) == 8 and counts.cache == "no token cache" and set(tmp_path.iterdir()) == before
