"""Models on the hub: what is there, whether it fits the disk, and into the hub's own cache.

The hub is asked once a process about a model and its revision; everything after that reads the local snapshot. Its
own cache and its own settings (HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE, HF_TOKEN) are honoured.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from trainer.errors import ModelError, StorageError
from trainer.model.loading.folder import CONFIG, PICKLED, WEIGHTS, weight_files
from trainer.redact import address
from trainer.units import GIB

COMMIT = re.compile(r"[0-9a-f]{40}")
SMALL = (".json", ".jinja", ".txt", ".model")
"""Endings of a model's configuration and tokenizer files."""
HTTP_ERROR = HfHubHTTPError.__mro__[1]
"""What the hub's client raises where there is no answer: httpx's HTTPError, or httpx2's in later releases."""
SPARE = 1 << 28
"""Bytes that a download leaves free on the disk."""


def other_hub() -> str | None:
    """The address that models come from, where HF_ENDPOINT says another than the hub's own."""
    return None if constants.ENDPOINT == constants._HF_DEFAULT_ENDPOINT else address(constants.ENDPOINT)


@dataclass(frozen=True)
class HubSnapshot:
    """One commit of one model, as it lies in the hub's cache."""

    path: str
    """hub id"""
    commit: str
    folder: Path
    sizes: dict[str, int] | None
    """bytes of each file on the hub; None where the cache had to do"""


@cache
def snapshot(path: str, revision: str | None) -> HubSnapshot:
    """Finds the commit and brings its configuration and tokenizer files; no weights yet. Raises ModelError."""
    asked = f"model.path={path}" + (f", model.revision={revision}" if revision is not None else "")
    offline = constants.is_offline_mode()
    cached = _cached(path, revision)
    if cached is not None and (offline or COMMIT.fullmatch(revision or "")) and _complete(cached):
        return cached
    if offline:
        if cached is None:
            raise ModelError(
                f"{asked}: is not in the hub's cache, and HF_HUB_OFFLINE is set. Fetch it once with a connection, or "
                "give a local folder."
            )
        return cached
    try:
        with _hub_errors(asked):
            info = HfApi().model_info(
                path, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
    except Unreachable:
        if cached is None:
            raise
        return cached
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    _check_listing(asked, sizes)
    small = [name for name in sizes if name.endswith(SMALL) and "/" not in name and name != CONFIG]
    with _hub_errors(asked):
        folder = Path(hf_hub_download(path, CONFIG, revision=info.sha)).parent
        for name in small:
            hf_hub_download(path, name, revision=info.sha)
        _remember(path, revision, info.sha)
    return HubSnapshot(path, info.sha, folder, sizes)


def download_weights(found: HubSnapshot, names: list[str]) -> None:
    """Brings the named weight files that are not in the cache yet. Raises ModelError, StorageError for no space."""
    missing = [name for name in names if not (found.folder / name).is_file()]
    if not missing:
        return
    asked = f"model.path={found.path}"
    if constants.is_offline_mode() or found.sizes is None:
        raise ModelError(
            f"{asked}: the hub's cache holds only a part of it ({len(missing)} of {len(names)} weight files are "
            f"missing: {missing[0]}), and the hub cannot be reached. Connect once and start again: the download goes "
            "on where it stopped."
        )
    check_space(found, missing)
    with _hub_errors(asked):
        for name in missing:
            hf_hub_download(found.path, name, revision=found.commit)


def check_space(found: HubSnapshot, names: list[str]) -> None:
    """Raises StorageError where these files would not fit the cache's disk."""
    needed = sum((found.sizes or {}).get(name, 0) for name in names if not (found.folder / name).is_file())
    free = shutil.disk_usage(found.folder).free
    if needed and needed + SPARE > free:
        raise StorageError(
            f"model.path={found.path}: {needed / GIB:.1f} GiB are to be downloaded, and {free / GIB:.1f} GiB are free "
            "where the hub's cache lies. Make room, or set HF_HOME to a folder on a larger disk."
        )


class Unreachable(ModelError):
    """The hub gave no answer."""


@contextmanager
def _hub_errors(asked: str) -> Iterator[None]:
    """The hub's refusals as one line each, in own words: the library's may hold addresses and tokens."""
    try:
        yield
    except HFValidationError:
        raise ModelError(f"{asked}: is neither a folder here nor a hub id (OWNER/NAME). Check the spelling.") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, HTTP_ERROR) as error:
        raise _in_one_line(asked, error) from None
    except OSError as error:
        raise StorageError(f"{asked}: could not be stored in the hub's cache: {error.strerror or error}.") from None


def _in_one_line(asked: str, error: BaseException) -> ModelError:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and len(causes) < 10:
        causes.append(cause)
    answers = [c.response for c in causes if isinstance(c, HfHubHTTPError) and c.response is not None]
    if not answers:
        slow = any("Timeout" in type(c).__name__ for c in causes)
        why = f"did not answer within {constants.HF_HUB_ETAG_TIMEOUT} s (time-out)" if slow else "cannot be reached"
        return Unreachable(
            f"{asked}: the hub {why}. Check the connection, or give a local folder; what is in the hub's cache is used "
            "without one."
        )
    status, code = answers[0].status_code, answers[0].headers.get("X-Error-Code", "")
    if status == 403:
        return ModelError(
            f"{asked}: the hub knows you but does not let you in (403): the model is gated. Accept its licence on its "
            "page on the hub, and check that your token may read gated models."
        )
    if status == 401:
        return ModelError(
            f"{asked}: the hub wants to know who you are (401): the model is gated or private, or there is none of "
            "this name. Log in with `hf auth login` or set HF_TOKEN, and check the spelling."
        )
    if status == 404:
        if code == "RevisionNotFound":
            return ModelError(f"{asked}: the model has no such revision (404). Give a commit, a tag or a branch of it.")
        return ModelError(f"{asked}: there is no such model on the hub (404). Check the spelling: OWNER/NAME.")
    if status >= 500:
        return Unreachable(f"{asked}: the hub is in trouble ({status}). Try again later, or give a local folder.")
    return ModelError(f"{asked}: the hub refuses the request ({status}).")


def _check_listing(asked: str, sizes: dict[str, int]) -> None:
    """Raises ModelError for a repository that cannot be loaded, before any of it is fetched."""
    if CONFIG not in sizes:
        raise ModelError(f"{asked}: the repository holds no config.json, so it is no model.")
    if not any(name.endswith(WEIGHTS) for name in sizes):
        pickled = any(name.endswith(PICKLED) for name in sizes)
        why = "only pickled weights, which can run code and are not loaded" if pickled else "no weights"
        raise ModelError(f"{asked}: the repository holds {why}. It needs *.safetensors files.")


def _cached(path: str, revision: str | None) -> HubSnapshot | None:
    """What the cache holds of this revision, or None."""
    try:
        config = try_to_load_from_cache(path, CONFIG, revision=revision)
    except HFValidationError:
        return None
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return HubSnapshot(path, folder.name, folder, None)


def _complete(found: HubSnapshot) -> bool:
    """Whether the cache can do without the hub: there are weights, all that the index names, and a tokenizer."""
    names = weight_files(found.folder, f"model.path={found.path}")
    tokenizer = any(found.folder.glob("tokenizer*"))
    return bool(names) and tokenizer and all((found.folder / name).is_file() for name in names)


def _remember(path: str, revision: str | None, commit: str) -> None:
    """Which commit a branch or tag stood for, so that the cache answers for it when the hub does not."""
    name = revision or constants.DEFAULT_REVISION
    if COMMIT.fullmatch(name):
        return
    store = Path(constants.HF_HUB_CACHE) / ("models--" + path.replace("/", "--"))
    ref = store / "refs" / name
    if store.resolve() in ref.resolve().parents and not (ref.is_file() and ref.read_text() == commit):
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
