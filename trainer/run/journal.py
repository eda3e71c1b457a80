"""What a run tells, and where that is kept: the screen and train.log, metrics.jsonl, its tracker, summary.json."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from trainer.atomic import write_atomically
from trainer.config.saved import Run, public_config
from trainer.config.shelf import all_options
from trainer.device.measure import Memory, pinned_peak, rss_peak
from trainer.errors import Interrupted, TrainerError
from trainer.libraries import loading
from trainer.memory.advice.out_of_memory import Situation
from trainer.memory.advice.timeline import timeline
from trainer.run.beginning import Beginning, take_folder
from trainer.run.clock import Clock
from trainer.run.disk import disk_trouble_ignored
from trainer.run.prepare import Prepared
from trainer.tracking.console import Screen
from trainer.tracking.metrics import Metrics
from trainer.tracking.run_folder import RunFolder
from trainer.tracking.trackers import Tracker
from trainer.training.state import State
from trainer.training.throughput import matmul_flops
from trainer.units import GIB


@dataclass
class Journal:
    """What is known of a run that goes on, and everyone who is told."""

    folder: RunFolder
    screen: Screen
    clock: Clock
    prepared: Prepared
    state: State
    metrics: Metrics
    tracker: Tracker | None
    memory: Memory
    matmul_flops: float
    """operations a second that the device reaches in matrix products"""
    reports: bool
    """whether report.html is wanted"""
    doing: str = "loading"
    """in words, for an error"""
    facts: dict[str, Any] = field(default_factory=dict)
    """of the summary, as they become known"""

    @property
    def where(self) -> str:
        """Where the run can be seen besides the screen."""
        return self.tracker.where if self.tracker is not None else "this folder only"

    def row(self, event: str, **values: Any) -> dict[str, Any]:
        """One row of metrics, for the file and the tracker."""
        row = self.metrics.write(event, **values)
        if self.tracker is not None:
            self.tracker.log(row)
        return row

    def finish(self, summary: dict[str, Any]) -> None:
        """The run's end, however it ended."""
        self.folder.write("summary.json", summary)
        self._draw()
        self._report()
        if self.tracker is not None:
            self.tracker.finish(summary)

    def _draw(self) -> None:
        """memory.svg: what was measured beside what was planned."""
        if self.memory.stages:
            plan, peak = self.prepared.plan.prediction, self.state.peak_memory
            planned = None if plan is None else plan.peak
            picture = timeline(self.memory.stages, peak, planned, f"{self.folder.path.name}: memory by stage")
            write_atomically(self.folder.file("memory.svg"), picture)

    def _report(self) -> None:
        """report.html, of a run that has come to a step; what goes wrong with it is not the run's."""
        if not self.reports or not self.state.step:
            return
        try:
            with loading():  # a third of a second, which only a run's end may cost
                from trainer.export.report.page import write_report

                self.facts["report"] = write_report(self.folder.path).name
        except Exception as error:
            told = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.screen.say(f"no report.html: {told}", style="yellow")

    def summary(self, status: str) -> dict[str, Any]:
        """What came out so far."""
        state, memory, clock = self.state, self.memory, self.clock
        predicted = self.prepared.plan.prediction
        state.peak_memory = max(state.peak_memory, memory.read().peak)  # what came after the last row of metrics
        return {
            "status": status,
            "steps": state.step,
            "num_tokens": state.num_tokens,
            "num_targets": state.num_targets,
            "skipped_steps": state.skipped_steps,
            "outlier_steps": state.outlier_steps,
            "stopped_early": state.stopped,
            "final_loss": state.last_loss,
            "first_eval_loss": state.first_eval_loss,
            "eval_loss": state.eval_loss,
            "best_eval_loss": state.best_eval_loss,
            "best_step": state.best_step,
            "tokens_per_second": state.num_tokens / state.seconds if state.seconds else None,
            "peak_memory_gib": state.peak_memory / GIB,
            "library_workspace_gib": memory.libraries() / GIB,
            "host_memory_gib": pinned_peak() / GIB,
            "predicted_peak_memory_gib": predicted.peak / GIB if predicted is not None else None,
            "predicted_library_workspace_gib": predicted.static.libraries / GIB if predicted is not None else None,
            "predicted_host_memory_gib": predicted.host / GIB if predicted is not None else None,
            "predicted_peak_at": predicted.highest.name if predicted is not None else None,
            "memory_baseline_gib": memory.baseline / GIB,
            "memory_stages_gib": {name: stage.as_gib() for name, stage in memory.stages.items()},
            "rss_peak_gib": rss_peak() / GIB,
            "trainable_parameters": None,
            "total_parameters": None,
            "wall_seconds": clock.total,
            "compiled_graphs": None,
            "stages": clock.seconds,
            "seconds_to_first_step": sum(clock.start_up.values()) if clock.start_up else None,
            "stages_to_first_step": clock.start_up,
            "adapter": None,
            **self.facts,
        }

    def situation(self, last_checkpoint: str | None) -> Situation:
        """What is to be said where memory runs out now."""
        longest = int(self.prepared.steps.fullest()[0].lengths.max())
        device, plan = self.prepared.device, self.prepared.plan
        return Situation(device, self.doing, plan, longest, last_checkpoint, self.state.peak_memory, all_options())


@contextmanager
def keeping_journal(
    run: Run, folder: RunFolder, beginning: Beginning, prepared: Prepared, screen: Screen, clock: Clock
) -> Iterator[Journal]:
    """Opens the files that every run has, and its tracker; an end that is not the run's own goes into summary.json."""
    with closing(screen):
        screen.keep_log(folder.file("train.log"))
        if beginning.checkpoint is None:
            take_folder(run, folder)
        with closing(Metrics(folder.file("metrics.jsonl"))) as metrics:
            with clock.stage("tracking"):
                tracker = run.config.track.build(folder.path, beginning.run_id, public_config(run))
            # Before memory is watched: its matrices, 384 MiB on a GPU, would be the peak of a small run.
            roof = matmul_flops(prepared.device, prepared.dtypes.compute)
            with Memory(prepared.device, prepared.plan.libraries_held) as memory:
                facts = folder, screen, clock, prepared, beginning.state, metrics, tracker, memory, roof
                journal = Journal(*facts, run.config.train.report)
                try:
                    yield journal
                except BaseException as error:
                    status = "interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed"
                    message = str(error) if isinstance(error, TrainerError) else f"{type(error).__name__}: {error}"
                    with disk_trouble_ignored():
                        journal.finish({**journal.summary(status), "error": message})
                    raise
