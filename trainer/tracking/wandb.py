"""Weights & Biases: the rows of metrics.jsonl on axes of steps and tokens. Its trouble is never the run's.

What is sent is named: the configuration's own keys, the identity in IDENTITY, metrics, the summary in SUMMARY. Not
the command line, the environment, the code or the git remote.
"""

from __future__ import annotations

import contextlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.tracking.axes import Axes
from trainer.tracking.trackers import IDENTITY, SUMMARY, Mode

if TYPE_CHECKING:
    from trainer.tracking.trackers import WandB

REACH_SECONDS = 5
INIT_SECONDS = 20
FINISH_SECONDS = 20
"""What a host that does not answer can cost, one after the other: under a minute in all."""
FORMER_HOST = "api.wandb.ai"
"""W&B's own service under the name that logins of earlier releases carry; W&B still takes them."""
UPLOAD_SECONDS = 600
"""How long an adapter may take to be sent to a host that answers."""


def host() -> str:
    """Address of the tracking service."""
    import wandb

    return os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url


def has_key() -> bool:
    """Whether W&B would find an API key without asking."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    with contextlib.suppress(OSError, netrc.NetrcParseError):
        names = [host().split("//")[-1].split("/")[0].split(":")[0]]
        if not os.environ.get("WANDB_BASE_URL"):
            names.append(FORMER_HOST)
        known = netrc.netrc(os.environ.get("NETRC"))
        return any(known.authenticators(name) is not None for name in names)
    return False


def resolve_mode(mode: Mode) -> Mode:
    """auto becomes online with a key, offline without: decided before any weight is read, never a prompt."""
    if mode is not Mode.auto:
        return mode
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return Mode.offline
    return Mode.online if has_key() else Mode.offline


def reachable() -> bool:
    """Whether the host answers at all, through the machine's proxy if it has one."""
    try:
        urllib.request.urlopen(host(), timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


class WandBTracker:
    """One W&B run that keeps its id over every resume."""

    def __init__(self, options: WandB, run_dir: Path, run_id: str, config: dict[str, Any]):
        self._options, self._run_dir, self._axes = options, run_dir, Axes()
        self.trouble: str | None = None
        """why nothing more is sent; said where the tracking is said"""
        self.run = None
        self.offline = resolve_mode(options.mode) is Mode.offline
        why = "no API key, or offline is asked for"
        if not self.offline and not has_key():
            self.offline, why = True, "track.mode=online, but there is no API key: log in with `wandb login`"
        if not self.offline and not reachable():
            self.offline, why = True, f"{host()} cannot be reached"
        self._why_offline = why
        self._safely(lambda: self._start(run_id, config))
        if self.run is None and not self.offline:
            self.offline, self._why_offline, self.trouble = True, self.trouble or "", None
            self._safely(lambda: self._start(run_id, config))

    @property
    def where(self) -> str:
        """One line for the screen."""
        if self.run is None:
            return f"W&B failed: {self.trouble}"
        send = f"send it later with: wandb sync {self._folder}"
        if self.trouble is not None:
            return f"W&B failed ({self.trouble}); {send}"
        return f"W&B offline ({self._why_offline}); {send}" if self.offline else f"W&B {self.run.url}"

    def identify(self, manifest: dict[str, Any]) -> None:
        identity = {key: manifest[key] for key in IDENTITY if manifest.get(key) is not None}
        self._safely(lambda: self.run.config.update({"identity": identity}, allow_val_change=True))

    def log(self, row: dict[str, Any]) -> None:
        values = self._axes.by_step(row)
        if values:
            values |= self._axes.by_tokens(row)
            self._safely(
                lambda: self.run.log({**values, "step": row["step"], "num_tokens": self._axes.num_tokens}),
            )

    def finish(self, summary: dict[str, Any]) -> None:
        values = {key: summary[key] for key in SUMMARY if summary.get(key) is not None}
        self._safely(lambda: self.run.summary.update(values))
        if self._options.log_adapter and summary.get("adapter"):
            self._safely(lambda: self._send_result(summary["adapter"]))
        if self.run is not None:
            code = 0 if summary["status"] == "completed" else 1
            try:
                self.run.finish(exit_code=code)
            except TimeoutError:
                self.trouble = self.trouble or f"not everything was sent within {FINISH_SECONDS} s"
            except Exception as error:
                self.trouble = self.trouble or _in_short(error)

    def _start(self, run_id: str, config: dict[str, Any]) -> None:
        import wandb

        options, trial = self._options, self._run_dir.name.isdigit()
        sweep = self._run_dir.absolute().parent.name
        run = wandb.init(
            project=options.project,
            group=options.group or (sweep if trial else None),
            name=options.name or (f"{sweep}-{self._run_dir.name}" if trial else self._run_dir.name),
            tags=options.tags or None,
            notes=options.notes,
            id=run_id,
            resume=None if self.offline else "allow",
            dir=str(self._run_dir),
            config=config,
            mode="offline" if self.offline else "online",
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
                finish_timeout_raises=True,
                host="",  # the machine's name
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )
        self.run, self._folder = run, Path(run.dir).parent
        run.define_metric("step", hidden=True)
        run.define_metric("num_tokens", hidden=True)
        run.define_metric("train/*", step_metric="step")
        run.define_metric("eval/*", step_metric="step")
        run.define_metric("tokens/*", step_metric="num_tokens")
        run.define_metric("train/loss", step_metric="step", summary="min,last")
        run.define_metric("eval/eval_loss", step_metric="step", summary="min,last")
        run.define_metric("train/tokens_per_second", step_metric="step", summary="max,mean")

    def _send_result(self, name: str) -> None:
        import wandb

        artifact = wandb.Artifact(
            f"{name}-{self.run.id}", type=name, metadata={"base": self.run.config["model"]["path"]}
        )
        artifact.add_dir(str(self._run_dir / name))
        logged = self.run.log_artifact(artifact)
        if not self.offline and reachable():
            logged.wait(timeout=UPLOAD_SECONDS)

    def _safely(self, act: Callable[[], Any]) -> None:
        """Does something with the service; after the first failure nothing more."""
        if self.trouble is not None:
            return
        try:
            act()
        except Exception as error:
            self.trouble = _in_short(error)


def _in_short(error: BaseException) -> str:
    first = (str(error).strip() or type(error).__name__).split("\n")[0]
    key = os.environ.get("WANDB_API_KEY")
    return first.replace(key, "***") if key else first
