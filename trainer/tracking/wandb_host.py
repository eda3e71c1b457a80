"""W&B's service: its address, the key for it, and whether it takes a run now."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPException
from urllib.parse import urlsplit

REACH_SECONDS = 5
"""What a host that does not answer can cost a question."""
FORMER_HOST = "api.wandb.ai"
"""W&B's own service under the name that logins of earlier releases carry; W&B still takes them."""


def host() -> str:
    """Address of the tracking service."""
    import wandb

    return os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url


def api_key() -> str | None:
    """The API key that W&B would find without asking."""
    if os.environ.get("WANDB_API_KEY"):
        return os.environ["WANDB_API_KEY"]
    import netrc

    with contextlib.suppress(OSError, netrc.NetrcParseError):
        names = [host().split("//")[-1].split("/")[0].split(":")[0]]
        if not os.environ.get("WANDB_BASE_URL"):
            names.append(FORMER_HOST)
        known = netrc.netrc(os.environ.get("NETRC"))
        found = [login for name in names if (login := known.authenticators(name)) is not None]
        return found[0][2] if found else None
    return None


def has_key() -> bool:
    """Whether there is one."""
    return api_key() is not None


def malformed_host() -> str | None:
    """What is wrong with the address in WANDB_BASE_URL, or None."""
    try:
        parts = urlsplit(host())
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port):
            return None
    except ValueError:
        pass
    return f"WANDB_BASE_URL={host()} is no address: it is written http://HOST or https://HOST"


def refusal() -> str | None:
    """Why the service takes no run now, or None: one question to it, with the key, through the machine's proxy.

    wandb itself asks in the background, and says of every failure that the run's id is in use.
    """
    login = base64.b64encode(f"api:{api_key()}".encode()).decode()
    request = urllib.request.Request(
        host().rstrip("/") + "/graphql",
        json.dumps({"query": "query Viewer { viewer { id } }"}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Basic {login}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=REACH_SECONDS) as answer:
            json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.TOO_MANY_REQUESTS:
            return None
        if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return f"{host()} refuses the API key ({error.code}): log in with `wandb login`"
        return f"{host()} answers {error.code} ({error.reason})"
    except (OSError, HTTPException):
        return f"{host()} cannot be reached"
    except ValueError:
        return f"{host()} answers with something that is not W&B's: a page of a proxy or a login?"
    return None


@contextlib.contextmanager
def usable_address() -> Iterator[None]:
    """wandb starts with no malformed address, not even offline: it is out of its sight meanwhile."""
    malformed = os.environ.pop("WANDB_BASE_URL", None) if malformed_host() is not None else None
    try:
        yield
    finally:
        if malformed is not None:
            os.environ["WANDB_BASE_URL"] = malformed
