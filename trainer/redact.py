"""Secrets: told by their shape, or because the environment holds them under a secret's name.

`redacted` is the one filter over all that leaves a run: the screen and its log (through `errors.visible`), errors and
tracebacks, the files of the run folder, tracking services. Settings that hold a secret are refused before that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

HIDDEN = "***"
_NAME = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS)$")
"""What variables of the environment that hold secrets are called."""
_SHORTEST = 12
"""Characters: what is shorter could be any word."""
_SHAPE = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}"
    r"|\bwandb_v\d+_\w{20,}"
    r"|(?<=://)[^/\s@'\"]+(?=@)"  # user:password@ of an address
    r"|(?i:(?<=key)|(?<=token)|(?<=wandb)|(?<=secret)|(?<=password))(?i:[\s\"'=:]{1,4})[0-9a-f]{40}\b"
)


def redacted(text: str) -> str:
    """The text with every secret as ***."""
    for secret in _of_environment():
        text = text.replace(secret, HIDDEN)
    return _SHAPE.sub(HIDDEN, text)


def address(url: str) -> str:
    """Where it leads, without the name, password and query that it may carry."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an odd address"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc else "an odd address"


def holds_secret(text: str) -> bool:
    """Whether there is anything to hide."""
    return redacted(text) != text


def secrets_in(values: Any, prefix: str = "") -> Iterator[str]:
    """Full keys of plain nested values that hold a secret, or whose own name does."""
    if isinstance(values, str):
        if holds_secret(values) or holds_secret(f"{prefix.rpartition('.')[2]}={values}"):
            yield redacted(prefix)
        return
    entries = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for name, value in entries:
        key = f"{prefix}.{name}" if prefix else str(name)
        if holds_secret(str(name)):
            yield redacted(key)
        yield from secrets_in(value, key)


def refusal(key: str) -> str:
    """What is said of a setting that holds a secret, without it."""
    return (
        f"{key}: looks like a secret (an access token, a key, or a password in an address), and settings are saved and "
        "sent. Leave it out: log in with `hf auth login` or `wandb login`, or set HF_TOKEN or WANDB_API_KEY"
    )


def _of_environment() -> list[str]:
    """Values of the environment's secrets, longest first; a path is no secret."""
    found = {value for name, value in os.environ.items() if _NAME.search(name.upper())}
    return sorted((v for v in found if len(v) >= _SHORTEST and not v.startswith(("/", "~"))), key=len, reverse=True)
