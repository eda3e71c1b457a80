"""Weights & Biases: the rows of metrics.jsonl on axes of steps and tokens. Its trouble is never the run's.

What is sent is named: the configuration's own keys, the identity in IDENTITY, metrics, the summary in SUMMARY; the
adapter and answers where that is asked for. Not the command line, the environment, the code or the git remote.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from trainer.redact import address, redacted
from trainer.registry import option
from trainer.tracking import wandb_host
from trainer.tracking.axes import Axes
from trainer.tracking.trackers import IDENTITY, SUMMARY, Track


class Mode(Enum):
    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@option("track", "wandb")
@dataclass
class WandB(Track):
    """Weights & Biases; its files lie in the run folder."""

    project: str
    """project in W&B"""
    entity: str | None
    """user or team in W&B; null: the key's own"""
    group: str | None
    """group of runs; null: none, and for the trials of a sweep the sweep's folder"""
    name: str | None
    """the run's name; null: the run folder's"""
    tags: list[str]
    """words to find the run by"""
    notes: str | None
    """free text about the run"""
    mode: Mode
    """auto: what WANDB_MODE says, else online with an API key, offline without one"""
    log_adapter: bool
    """send the finished adapter (or model) as an artifact"""
    log_samples: bool
    """send the answers to train.samples as a table"""

    def build(self, run_dir, run_id, config):
        if resolve_mode(self.mode) is Mode.disabled:
            return None
        return WandBTracker(self, run_dir, run_id, config)

    def other_host(self):
        import wandb

        found = wandb_host.host()
        return None if found == wandb.Settings.model_fields["base_url"].default else address(found)


INIT_SECONDS = 20
FINISH_SECONDS = 20
"""What a host that does not answer can cost, after wandb_host.REACH_SECONDS: under a minute in all."""
UPLOAD_SECONDS = 600
"""How long an adapter may take to be sent to a host that answers."""


def resolve_mode(mode: Mode) -> Mode:
    """auto is what WANDB_MODE says, else online with a key, offline without: decided before any weight is read, never
    a prompt."""
    if mode is not Mode.auto:
        return mode
    asked = os.environ.get("WANDB_MODE")
    if asked in (Mode.offline.value, Mode.disabled.value):
        return Mode(asked)
    return Mode.online if wandb_host.has_key() else Mode.offline


class WandBTracker:
    """One W&B run that keeps its id over every resume."""

    def __init__(self, options: WandB, run_dir: Path, run_id: str, config: dict[str, Any]):
        self._options, self._run_dir, self._axes = options, run_dir, Axes()
        self._answers: list[list[Any]] = []
        """step, prompt and answer"""
        self.trouble: str | None = None
        """why nothing more is sent; said where the tracking is said"""
        self.run = None
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it prints where its reports are refused
        self._why_offline = self._decide()
        self.offline = self._why_offline is not None
        self._safely(lambda: self._start(run_id, config))
        if self.run is None and not self.offline:
            self.offline, self._why_offline, self.trouble = True, self.trouble, None
            self._safely(_end_service)  # it holds the id of the stream that failed
            self._safely(lambda: self._start(run_id, config))
        self._safely(self._check_room)

    def _decide(self) -> str | None:
        """Why this run is tracked offline, or None."""
        if resolve_mode(self._options.mode) is Mode.offline:
            return wandb_host.malformed_host() or "no API key, or offline is asked for"
        if not wandb_host.has_key():
            return "track.mode=online, but there is no API key: log in with `wandb login`"
        return wandb_host.malformed_host() or wandb_host.refusal()

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
        if self._options.log_samples and row["event"] == "samples":
            self._safely(lambda: self._send_answers(row))
        values = self._axes.by_step(row)
        if values:
            self._safely(lambda: self._send({**values, **self._axes.by_tokens(row)}, row["step"]))

    def finish(self, summary: dict[str, Any]) -> None:
        values = {key: summary[key] for key in SUMMARY if summary.get(key) is not None}
        self._safely(lambda: self.run.summary.update(values))
        if self._options.log_adapter and summary.get("adapter"):
            self._safely(lambda: self._send_result(summary["adapter"]))
        self._safely(self._check_room)
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
        with wandb_host.usable_address():
            run = wandb.init(
                project=options.project,
                group=options.group or (sweep if trial else None),
                name=options.name or (f"{sweep}-{self._run_dir.name}" if trial else self._run_dir.name),
                tags=options.tags or None,
                notes=options.notes,
                id=_agents_id() or run_id,
                entity=options.entity,
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

    def _check_room(self) -> None:
        """Raises OSError where W&B's files cannot grow: its own process says nothing of it, and rows are lost."""
        if self.run is None:
            return
        room = self._folder / ".room"
        try:
            room.write_bytes(bytes(4096))
        except OSError as error:
            raise OSError(f"{self._folder}: {error.strerror}: it holds a part, metrics.jsonl every row") from None
        finally:
            room.unlink(missing_ok=True)

    def _send(self, values: dict[str, Any], step: int) -> None:
        """On the axes of steps, ours and that of transformers' Trainer, and of tokens."""
        self.run.log({**values, "step": step, "train/global_step": step, "num_tokens": self._axes.num_tokens})

    def _send_answers(self, row: dict[str, Any]) -> None:
        """All answers so far as one table: W&B shows the last."""
        import wandb

        self._answers += [[row["step"], found["prompt"], found["answer"]] for found in row["answers"]]
        table = wandb.Table(columns=["step", "prompt", "answer"], data=self._answers)
        self._send({"samples": table}, row["step"])

    def _send_result(self, name: str) -> None:
        import wandb

        artifact = wandb.Artifact(
            f"{name}-{self.run.id}", type=name, metadata={"base": self.run.config["model"]["path"]}
        )
        artifact.add_dir(str(self._run_dir / name))
        logged = self.run.log_artifact(artifact)
        if not self.offline and wandb_host.refusal() is None:
            logged.wait(timeout=UPLOAD_SECONDS)

    def _safely(self, act: Callable[[], Any]) -> None:
        """Does something with the service; after the first failure nothing more."""
        if self.trouble is not None:
            return
        try:
            act()
        except Exception as error:
            self.trouble = _in_short(error)


def _agents_id() -> str | None:
    """The id that a sweep's agent gave this run; by another one the sweep would never see it end."""
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None


def _in_short(error: BaseException) -> str:
    return redacted((str(error).strip() or type(error).__name__).split("\n")[0])


def _end_service() -> None:
    """Ends wandb's own process, with what it still holds."""
    import wandb

    wandb.teardown(exit_code=1)
