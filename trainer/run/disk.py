"""Disks that refuse: what a run does where its folder cannot be written."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from trainer.errors import StorageError
from trainer.tracking.run_folder import RunFolder

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@contextmanager
def leaving_nothing(folder: RunFolder) -> Iterator[None]:
    """A run that fails before it begins leaves no folder behind."""
    try:
        yield
    except BaseException:
        folder.remove_if_unused()
        raise


@contextmanager
def storage_errors(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise StorageError(
            f"{run_dir}: the result could not be written: {reason}. The last checkpoint is kept; free some "
            "space and start the same command again."
        ) from error


@contextmanager
def full_disk(run_dir: Path) -> Iterator[None]:
    """A row of metrics or a line of train.log that the disk refuses ends the run in one line too."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise StorageError(
            f"{run_dir}: cannot be written to any more: {error.strerror}. Free some space and start the same command "
            "again; it goes on from the last checkpoint."
        ) from error


@contextmanager
def disk_trouble_ignored() -> Iterator[None]:
    """While a failure is being recorded, a second one must not hide it."""
    try:
        yield
    except OSError:
        return
