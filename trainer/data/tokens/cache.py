"""The token cache: tokens are made anew whenever anything that they depend on has changed, and never otherwise.

A cache is a folder named by a hash over the rows' content, the settings that shape a sample, the tokenizer with its
chat template, and the code and libraries that made it. It appears whole or not at all, and holds a hash of its own
content, which is compared before anything else of it is read (1.5 GB a second): one flipped bit, and it is made anew.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data.data_settings import Data
from trainer.data.sources.files import DataFile
from trainer.data.tokens.counts import Counts
from trainer.data.tokens.store import TOKENS, open_tokens
from trainer.data.tokens.token_sets import TokenSet
from trainer.errors import StorageError
from trainer.registry import to_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COUNTS, DIGESTS = "counts.json", "SHA256SUMS"

ROOM = Path(__file__).resolve().parent.parent
"""The code that turns rows into tokens, whole: a list kept by hand would go stale."""

SHAPING = (
    *("format", "columns", "roles", "max_length", "over_length", "train_on", "train_part", "empty_answers"),
    "on_bad_row",
)
"""Settings that decide what a row's tokens are."""

BLOCK = 1 << 20


def cache_key(data: Data, content: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The name of the tokens that these settings make of rows with this content hash."""
    import jinja2
    import tokenizers
    import transformers

    chat_template = json.dumps(tokenizer.chat_template)
    return _hash_of(
        shape_hash(data, content, tokenizer),
        (data.today or date.today().isoformat()) if "strftime_now" in chat_template else "",
        transformers.__version__,
        tokenizers.__version__,
        jinja2.__version__,
        code_hash(ROOM),
    )


def shape_hash(data: Data, content: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Over everything that a user sets and that decides what tokens the rows of this content become."""
    template = Path(data.row_template).read_bytes() if data.row_template is not None else b""
    return _hash_of(
        content,
        json.dumps({name: to_plain(getattr(data, name)) for name in SHAPING}, sort_keys=True),
        hashlib.sha256(template).hexdigest(),
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(tokenizer.get_vocab()),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        json.dumps(tokenizer.chat_template),
    )


def _hash_of(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest())
    return digest.hexdigest()[:32]


def files_hash(files: Iterable[DataFile]) -> str:
    """sha256 over the names and contents of files."""
    digest = hashlib.sha256()
    for file in files:
        inside = hashlib.sha256(file.name.encode())
        with file.path.open("rb") as stream:
            while block := stream.read(BLOCK):
                inside.update(block)
        digest.update(inside.digest())
    return digest.hexdigest()


def cached(cache_dir: str | None, key: str, name: str, make: Callable[[Path], Counts]) -> tuple[TokenSet, Counts]:
    """The tokens under this key, or those that `make` writes into a folder."""
    if cache_dir is None:
        return _made(Path(tempfile.mkdtemp(prefix="trainer-tokens-")), name, make, "no token cache")
    root = Path(os.path.expanduser(cache_dir)) / "tokens"
    folder = root / key
    found = _open(folder, name)
    if found is not None:
        return found
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=root))
    except OSError as error:
        said = f"no token cache: {cache_dir} cannot be written ({error.strerror})"
        return _made(Path(tempfile.mkdtemp(prefix="trainer-tokens-")), name, make, said)
    damaged = folder.exists()
    try:
        with _disk_errors(root):
            counts = make(building)
            (building / COUNTS).write_text(json.dumps(counts.to_json(), ensure_ascii=False), encoding="utf-8")
            (building / DIGESTS).write_text(_digests(building))
            tokens = open_tokens(building, name)  # mapped, they outlast a renaming
            if _open(folder, name) is None:  # no other process has made them meanwhile
                _forget(folder)
                try:
                    building.rename(folder)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # now it has
                        raise
    finally:
        _forget(building)
    counts.cache = f"tokens cached in {folder}" + damaged * ", anew: what lay there was damaged"
    return tokens, counts


def _open(folder: Path, name: str) -> tuple[TokenSet, Counts] | None:
    """A cache that is byte for byte what was stored, else None."""
    try:
        if (folder / DIGESTS).read_bytes() != _digests(folder).encode():
            return None
    except OSError:
        return None
    counts = Counts.from_json(json.loads((folder / COUNTS).read_text(encoding="utf-8")))
    counts.cache = f"token cache hit: {folder}"
    return open_tokens(folder, name), counts


def _digests(folder: Path) -> str:
    """The sha256 of what is stored, as sha256sum writes and checks it. Raises OSError."""
    lines = []
    for name in (COUNTS, TOKENS):
        with (folder / name).open("rb") as stream:
            lines.append(f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {name}\n")
    return "".join(lines)


def _made(folder: Path, name: str, make: Callable[[Path], Counts], said: str) -> tuple[TokenSet, Counts]:
    """Tokens in a folder whose name is removed at once: they are there as long as they are mapped."""
    try:
        with _disk_errors(folder):
            counts = make(folder)
            tokens = open_tokens(folder, name)
    finally:
        _forget(folder)
    counts.cache = said
    return tokens, counts


def _forget(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


class _disk_errors:
    """Turns a full disk into an error that says where it was full."""

    def __init__(self, place: Path):
        self.place = place

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if kind is not None and issubclass(kind, OSError):
            raise StorageError(
                f"{self.place}: the tokens cannot be written: {error.strerror or error}. Free some space, or set "
                "data.cache_dir= to a folder on another disk."
            ) from error
        return False


@cache
def code_hash(room: Path) -> str:
    """Over every Python file of a folder: a newer trainer does not take an older one's tokens."""
    digest = hashlib.sha256()
    for file in sorted(room.rglob("*.py")):
        digest.update(hashlib.sha256(file.relative_to(room).as_posix().encode()).digest())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
