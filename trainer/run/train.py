"""The train command's work: one run in its folder, from the first table to the last."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.config.saved import Run, public_config, save_run
from trainer.data.batches.streamed_steps import Index
from trainer.data.tokens.row_stream import RowStream
from trainer.data.tokens.tokenize import Tokens
from trainer.device.find import Device, unused_card
from trainer.device.measure import Memory
from trainer.errors import DataError, Interrupted, TrainerError
from trainer.export.result import export, stop_tokens
from trainer.memory.advice.out_of_memory import Situation, advising
from trainer.memory.advice.report import short_plan
from trainer.memory.memory_probe import probe_memory, wanted
from trainer.memory.snapshot import Snapshot, statistics
from trainer.run import moving as streaming
from trainer.run import session
from trainer.run.answers import held_out_answers
from trainer.run.beginning import Beginning, check_same_data, decide
from trainer.run.disk import disk_trouble_ignored, full_disk, leaving_nothing, storage_errors
from trainer.run.records import data_of, manifest, marks_of, summary_of
from trainer.run.screen_tables import answers_table, end_table, start_table
from trainer.run.session import Prepared, Ready, Stages
from trainer.tracking.console import Screen, quiet_libraries
from trainer.tracking.metrics import Metrics
from trainer.tracking.run_folder import RunFolder, new_run_id
from trainer.tracking.trackers import Tracker
from trainer.training.checkpoint import Checkpoints, load_checkpoint, load_state, write_atomically
from trainer.training.deterministic import deterministic_kernels
from trainer.training.evaluate import evaluate
from trainer.training.interrupts import Interrupts
from trainer.training.loop import train
from trainer.training.state import State, rng_state
from trainer.training.throughput import matmul_flops
from trainer.training.train_settings import Resume
from trainer.training.watch import Watch
from trainer.units import GIB


def run_training(run: Run, run_dir: Path, import_seconds: float = 0.0) -> dict[str, Any]:
    """Trains, or continues, the run in `run_dir`; returns its summary. Raises TrainerError.

    `import_seconds`: what importing this module took, where it was not imported before.
    """
    with ExitStack() as stack:
        training = TrainingRun(run, RunFolder(run_dir), stack)
        training.stages.seconds["imports"] = import_seconds
        training.started -= import_seconds
        stack.enter_context(deterministic_kernels(run.config.train.deterministic))
        with leaving_nothing(training.folder):
            beginning = training.look()
            if beginning.finished is not None:
                training.screen.say(f"{run_dir}: this run is completed; nothing to do.")
                return beginning.finished
            index, step = Index(run_dir / "stream.jsonl"), training.first_step(beginning)

            def check_data(train_set: Tokens | RowStream) -> None:
                data_hash, marks = train_set.content_hash(), marks_of(train_set)
                check_same_data(training.folder, beginning, data_hash, marks, run.config.train.resume)

            prepared = session.prepare(run, training.stages, index, step, check_data)
            training.stack.callback(prepared.steps.close)
            training.say_unused_card(prepared.device)
        with training.recording_failure(), full_disk(run_dir):
            return training.go(prepared, beginning)


@dataclass
class TrainingRun:
    """One process's work on a run folder."""

    run: Run
    folder: RunFolder
    stack: ExitStack
    """closes what was opened, in reverse order"""
    screen: Screen = field(default_factory=Screen)
    stages: Stages = field(default_factory=Stages)
    state: State = field(default_factory=State)
    started: float = field(default_factory=time.perf_counter)
    tracker: Tracker | None = None
    ready: Ready | None = None
    graphs: int | None = None
    """compiled so far; None: nothing is compiled"""
    start_up: dict[str, float] | None = None
    """seconds of each stage before the first step of this process"""
    peak_memory: int = 0
    memory: Memory | None = None

    def look(self) -> Beginning:
        """Takes the folder and decides how to begin."""
        quiet_libraries(self.screen)
        keep = self.run.config.train.keep_checkpoints
        self.checkpoints = Checkpoints(self.folder.path / "checkpoints", keep)
        self.interrupts = self.stack.enter_context(Interrupts())
        self.folder.open()
        self.stack.callback(self.folder.close)
        return decide(self.run, self.folder, self.checkpoints, self.screen.say)

    def say_unused_card(self, device: torch.device) -> None:
        """device=auto takes the CPU where torch cannot use the machine's card: not in silence."""
        if self.run.config.device is Device.auto and device.type == "cpu":
            sentence = unused_card(torch.version.cuda)
            if sentence is not None:
                self.screen.say(sentence, style="yellow")

    def first_step(self, beginning: Beginning) -> int:
        """The first step that is to be trained."""
        return 1 if beginning.checkpoint is None else load_state(beginning.checkpoint).step + 1

    def go(self, prepared: Prepared, beginning: Beginning) -> dict[str, Any]:
        """Weights, training and result."""
        run_id = self._open_records(beginning)
        plan = json.dumps(short_plan(prepared.plan), indent=1)
        write_atomically(self.folder.file("plan.json"), plan)
        self.situation = Situation(prepared.device, plan=prepared.plan)
        self.situation.longest_sample = int(prepared.steps.fullest()[0].lengths.max())
        prepared.steps.begin()
        with advising(self.situation, lambda: self.checkpoints.pointer("last")):
            return self._go(prepared, beginning, run_id)

    def _go(self, prepared: Prepared, beginning: Beginning, run_id: str) -> dict[str, Any]:
        config = self.run.config
        # Before memory is watched: its matrices, 384 MiB on a GPU, would be the peak of a small run.
        roof = matmul_flops(prepared.device, prepared.dtypes.compute)
        self.memory = memory = self.stack.enter_context(Memory(prepared.device))
        self.situation.where = "loading"
        if prepared.source is not None:
            self.stack.callback(prepared.source.close)
        self.ready = ready = session.build(self.run, prepared, memory, self.stages)
        if ready.stream is not None:
            self.stack.callback(ready.stream.close)
        if ready.mover is not None:
            self.stack.callback(ready.mover.copies.close)
        rng = self._begin_or_restore(ready, beginning, run_id)
        if self.tracker is not None and (manifest := self.folder.manifest()) is not None:
            self.tracker.identify(manifest)
        start_table(self.screen, self.run, ready, self.folder.path, memory, self._where())
        if ready.stream is not None:
            streaming.say_where(self.screen, ready.stream, prepared.plan)
        if prepared.plan.policy.moves_inputs:
            streaming.say_inputs(self.screen, prepared.plan, prepared.device.type)
        if beginning.checkpoint is not None:
            self.screen.say(f"resumed at step {self.state.step} from {beginning.checkpoint.name}", style="green")
            self.metrics.write("resumed", step=self.state.step)

        held_out = session.held_out_batches(prepared, self.run)
        if wanted(config.memory.probe, prepared.device):
            self.situation.where = "the probe of the largest micro-batch"
            with self.stages.stage("memory probe"):
                num_tokens = probe_memory(ready.loop, held_out)
            self.peak_memory = max(self.peak_memory, memory.read().peak)
            self.metrics.write("probe", num_tokens=num_tokens, memory_peak_gib=self.peak_memory / GIB)
            self.screen.say(f"probe: the largest micro-batch, {num_tokens:,} tokens, fits")
        self.snapshot = Snapshot(prepared.device, config.memory.snapshot, self.folder.path)

        with self.screen.bar("training", prepared.steps.num_steps, self.state.step) as bar:
            loop = ready.loop
            watch = Watch(
                train=config.train,
                loop=loop,
                screen=self.screen,
                bar=bar,
                metrics=self.metrics,
                tracker=self.tracker,
                matmul_flops=roof,
                held_out=held_out,
                evaluate=lambda batches: evaluate(loop.model, loop.loss, batches, loop.dtypes, self.interrupts.check),
                save=lambda state: self.checkpoints.save(ready.adapted, loop.optimizer, state, rng),
                saved_step=self.state.step,
                peak_memory=self.peak_memory,
            )

            begun_step, begun_seconds = self.state.step, self.state.seconds

            def after_step(state: State, grad_norm: float) -> None:
                self.situation.where = f"the evaluation or checkpoint after step {state.step}"
                self.situation.peak = watch.peak_memory
                self._record(state)
                began = time.perf_counter()
                watch.after_step(state, grad_norm)
                self._note_start_up(time.perf_counter() - began)
                self._note_graphs(state)
                moving = ready.stream or ready.mover
                if moving is not None and state.step in (begun_step + 1, prepared.steps.num_steps):
                    seconds = state.seconds - begun_seconds
                    streaming.report(self.screen, self.metrics, moving, state.step, seconds)
                self.situation.where = f"step {state.step + 1}"

            with self.stages.stage("training"), self._until_interrupted(watch):
                train(loop, self.state, rng, after_step, self.interrupts.check)
        self.peak_memory = watch.peak_memory
        self.situation.where = "writing the result"
        return self._finish(prepared)

    def _note_start_up(self, evaluation_seconds: float) -> None:
        """Where the time before the first step went; called after what is done before it, and after every step."""
        if self.start_up is not None:
            return
        stages = {**self.stages.seconds, "first evaluation": evaluation_seconds}
        total = time.perf_counter() - self.started
        self.start_up = {**stages, "other": total - sum(stages.values())}

    def _note_graphs(self, state: State) -> None:
        """Tells of compilation in the middle of the run: it costs seconds, and more than once it is a mistake."""
        graphs = self.run.config.kernels.graphs()
        if graphs is None or graphs == self.graphs:
            return
        if self.graphs is not None:
            self.metrics.write("compiled", step=state.step, graphs=graphs)
            self.screen.say(f"step {state.step}: compiled again, {graphs} graphs so far", style="yellow")
        self.graphs = graphs

    def _open_records(self, beginning: Beginning) -> str:
        """Files that every run has, and its tracker; returns the run's id."""
        folder = self.folder
        self.stack.callback(self.screen.close)
        self.screen.keep_log(folder.file("train.log"))
        if beginning.checkpoint is None:
            self._begin_records()
        self.metrics = Metrics(folder.file("metrics.jsonl"))
        self.stack.callback(self.metrics.close)
        run_id = beginning.run_id or new_run_id()
        with self.stages.stage("tracking"):
            self.tracker = self.run.config.track.build(folder.path, run_id, public_config(self.run))
        return run_id

    def _begin_records(self) -> None:
        """The folder is this run's from here on."""
        self.folder.file("summary.json").unlink(missing_ok=True)
        save_run(self.run, self.folder.path)

    def _begin_or_restore(self, ready: Ready, beginning: Beginning, run_id: str) -> dict[str, torch.Tensor]:
        """A fresh state, or that of the checkpoint; returns the generators' states."""
        device = ready.prepared.device
        if beginning.checkpoint is None:
            self._write_manifest(manifest(self.run.config, ready, run_id))
            return rng_state(device)
        self.state = load_state(beginning.checkpoint)
        self.peak_memory = self.state.peak_memory
        rng = load_checkpoint(beginning.checkpoint, ready.adapted, ready.loop.optimizer, device, beginning.changed)
        self._begin_records()  # not before: a run that cannot go on leaves them as they were
        known = self.folder.manifest()
        if known is not None and self.run.config.train.resume is Resume.force:
            self._write_manifest({**known, **data_of(ready.prepared.train_set)})  # what it goes on with from here
        return rng

    def _write_manifest(self, content: dict[str, Any]) -> None:
        write_atomically(self.folder.file("manifest.json"), json.dumps(content, indent=1))

    @contextmanager
    def _until_interrupted(self, watch: Watch) -> Iterator[None]:
        """A signal ends the run after the running micro-batch, with the last whole step saved; so does a row of a
        stream that cannot be used."""
        self.interrupts.deferred = True
        try:
            yield
        except Interrupted as stop:
            watch.save_now(self.state)
            self.peak_memory = watch.peak_memory
            saved = f"The state after step {self.state.step} is saved" if self.state.step else "No step was done yet"
            raise Interrupted(
                stop.exit_code - 128, f"{stop} {saved}; go on with: trainer resume run={self.folder.path}"
            ) from None
        except DataError as error:
            watch.save_now(self.state)
            self.peak_memory = watch.peak_memory
            raise DataError(
                f"{error}\nThe state after step {self.state.step} is saved; once the rows or the settings are mended, "
                "go on with the same command and train.resume=force."
            ) from None
        finally:
            self.interrupts.deferred = False

    def _record(self, state: State) -> None:
        """Starts the recording of allocations before the first step, and tells where it lies after the last."""
        if self.run.config.memory.snapshot == 0:
            return
        if not self.snapshot.started:
            self.snapshot.start()
            self.memory.recording = self.snapshot.mark
            self.stack.callback(self.snapshot.abandon)
            return
        file = self.snapshot.after_step()
        if file is not None:
            self.memory.recording = None
            self.screen.say(f"memory snapshot: {file}; {self.snapshot.shape()}")

    @contextmanager
    def recording_failure(self) -> Iterator[None]:
        """summary.json tells how a run ended that did not complete; the tracker too."""
        try:
            yield
        except BaseException as error:
            status = "interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed"
            message = str(error) if isinstance(error, TrainerError) else f"{type(error).__name__}: {error}"
            with disk_trouble_ignored():
                self._write_summary({**summary_of(self, status), "error": message})
            raise

    def _where(self) -> str:
        """Where the run can be seen besides the screen."""
        return self.tracker.where if self.tracker is not None else "this folder only"

    def _finish(self, prepared: Prepared) -> dict[str, Any]:
        run_dir, ready = self.folder.path, self.ready
        ends = stop_tokens(prepared.steps.ends(), prepared.tokenizer)
        with self.stages.stage("result"), storage_errors(run_dir):
            name = export(ready.adapted, ready.loop.model, prepared.tokenizer, ends, run_dir)
        answers = []
        if prepared.held_out is not None and self.run.config.train.compare_prompts:
            with self.stages.stage("answers"):
                answers = held_out_answers(ready, ends, self.run.config.train.compare_prompts)
        summary = {**summary_of(self, "completed"), "adapter": name, "answers": answers}
        self._write_summary(summary)
        answers_table(self.screen, answers)
        end_table(self.screen, summary, self.stages, self.memory, run_dir, self._where())
        if self.run.config.memory.stats:
            self.screen.table("allocator", statistics(prepared.device))
        return summary

    def _write_summary(self, summary: dict[str, Any]) -> None:
        write_atomically(self.folder.file("summary.json"), json.dumps(summary, indent=1, ensure_ascii=False))
        if self.tracker is not None:
            self.tracker.finish(summary)
