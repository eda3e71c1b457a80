"""The way from a configuration to its result, and of it the training: what surrounds the loop of training/loop.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from trainer.config.saved import Run
from trainer.data.batches.batch import MicroBatch
from trainer.device.find import Device, unused_card
from trainer.errors import DataError, Interrupted, NonFiniteError
from trainer.memory.advice.out_of_memory import advising
from trainer.memory.advice.report import short_plan
from trainer.memory.memory_probe import probe_memory, wanted
from trainer.run import moving
from trainer.run.beginning import Beginning, decide, stays
from trainer.run.build import Ready, build
from trainer.run.clock import Clock
from trainer.run.disk import full_disk, leaving_nothing
from trainer.run.export import export_result
from trainer.run.journal import Journal, keeping_journal
from trainer.run.prepare import prepare
from trainer.run.restore import restore
from trainer.run.retreat import Retreat
from trainer.run.samples import Sampler, asking
from trainer.run.screen_tables import start_table
from trainer.run.watchers import kept_samples, recorded_allocations, told_compilations
from trainer.tracking.console import Screen, quiet_libraries
from trainer.tracking.run_folder import DATA_REPORT, RunFolder
from trainer.training.checkpoint import Checkpoints
from trainer.training.deterministic import deterministic_kernels
from trainer.training.early_stopping import EarlyStopping
from trainer.training.evaluate import Evaluation, evaluate
from trainer.training.interrupts import Interrupts
from trainer.training.loop import train
from trainer.training.state import State
from trainer.training.watch import Watch
from trainer.training.weights import all_finite
from trainer.units import GIB


def run_training(run: Run, run_dir: Path, import_seconds: float = 0.0) -> dict[str, Any]:
    """Trains, or continues, the run in `run_dir`; returns its summary. Raises TrainerError.

    `import_seconds`: what importing this module took, where it was not imported before.
    """
    clock, screen, folder = Clock(import_seconds), Screen(), RunFolder(run_dir)
    quiet_libraries(screen)
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        stack.enter_context(deterministic_kernels(run.config.train.deterministic))
        with leaving_nothing(folder):
            stack.enter_context(folder)
            beginning = decide(run, folder, screen.say)
            if beginning.finished is not None:
                screen.say(f"{run_dir}: this run is completed; nothing to do.")
                return beginning.finished
            prepared = stack.enter_context(closing(prepare(run, beginning, clock)))
            prompts = run.config.train.samples
            sampler = Sampler(prompts, prepared) if prompts else None
            _say_unused_card(run.config.device, prepared.device, screen)
        keep = run.config.train.keep_checkpoints
        checkpoints = Checkpoints(folder.file("checkpoints"), keep, beginning.run_id)
        stack.enter_context(full_disk(run_dir))
        journal = stack.enter_context(keeping_journal(run, folder, beginning, prepared, screen, clock))
        folder.write("plan.json", short_plan(prepared.plan))
        folder.write(DATA_REPORT, prepared.audit(run.config).report)
        if prepared.plan.unplanned is not None:
            screen.say(f"no prediction of memory: {prepared.plan.unplanned}", style="yellow")
        prepared.steps.begin()
        stack.enter_context(advising(lambda: journal.situation(checkpoints.pointer("last"))))
        ready = stack.enter_context(closing(build(run, prepared, journal.memory, clock)))
        rng = restore(run, beginning, folder, ready)
        journal.metrics.keep_only(lambda row: stays(row, beginning.state))
        _tell_start(run, beginning, ready, journal)
        retreat = Retreat(run, beginning, ready, journal, checkpoints, rng)
        _train(run, ready, journal, checkpoints, rng, retreat, interrupts, sampler)
        with run.config.optim.evaluating(ready.loop.optimizer):
            return export_result(run, ready, journal)


def _say_unused_card(asked: Device, device: torch.device, screen: Screen) -> None:
    """device=auto takes the CPU where torch cannot use the machine's card: not in silence."""
    if asked is Device.auto and device.type == "cpu":
        sentence = unused_card(torch.version.cuda)
        if sentence is not None:
            screen.say(sentence, style="yellow")


def _tell_start(run: Run, beginning: Beginning, ready: Ready, journal: Journal) -> None:
    """Whoever watches learns what is about to run."""
    manifest = journal.folder.manifest()
    if journal.tracker is not None and manifest is not None:
        journal.tracker.identify(manifest)
    journal.facts |= {
        "trainable_parameters": ready.trainable_parameters,
        "total_parameters": ready.total_parameters,
    }
    start_table(journal.screen, run, ready, journal.folder.path, journal.memory, journal.where)
    moving.say_start(journal.screen, ready)
    if beginning.checkpoint is not None:
        step = journal.state.step
        journal.screen.say(f"resumed at step {step} from {beginning.checkpoint.name}", style="green")
        journal.row("resumed", step=step)


def _train(
    run: Run,
    ready: Ready,
    journal: Journal,
    checkpoints: Checkpoints,
    rng: dict[str, torch.Tensor],
    retreat: Retreat,
    interrupts: Interrupts,
    sampler: Sampler | None,
) -> None:
    """From the state that the run has to its last step.

    Whatever ends the loop, `journal.state` and `rng` are those after the last whole step, and the weights too unless
    the optimizer's own step failed: the loop can be entered again from there.
    """
    config, prepared, loop, state = run.config, ready.prepared, ready.loop, journal.state
    if wanted(config.memory.probe, prepared.device):
        retreat.over(lambda: _probe(ready, journal, retreat.held_out))
    retreat.settled()

    def save(state: State) -> None:
        if not all_finite(loop.parameters):
            raise NonFiniteError(_spoilt_weights(state.step, checkpoints.pointer("last")))
        journal.metrics.sync()
        checkpoints.save(ready.adapted, loop.optimizer, state, rng)

    def amend(state: State) -> None:
        journal.metrics.sync()
        checkpoints.amend(state)

    with (
        journal.screen.bar("training", prepared.steps.num_steps, state.step) as bar,
        recorded_allocations(config.memory.snapshot, prepared.device, journal) as record,
        kept_samples(loop, journal) as keep_samples,
    ):

        def held_out_loss(batches: Iterable[MicroBatch]) -> Evaluation:
            with config.optim.evaluating(loop.optimizer):
                return evaluate(loop.model, config.loss, batches, loop.dtypes, interrupts.check)

        watch = Watch(
            train=config.train,
            loop=loop,
            say=journal.screen.say,
            row=journal.row,
            bar=bar,
            matmul_flops=journal.matmul_flops,
            held_out=retreat.held_out,
            stopping=EarlyStopping(config.train.early_stopping_patience, config.train.early_stopping_metric),
            evaluate=held_out_loss,
            ask=asking(run, sampler, ready),
            save=save,
            amend=amend,
            saved=(state.step, state.evaluated_step),
        )
        tell_compilations, tell_moved = told_compilations(config.kernels, journal), moving.told(ready, journal)

        def after_step(state: State, grad_norm: float) -> None:
            retreat.settled()
            keep_samples(grad_norm)
            journal.doing = f"the evaluation or checkpoint after step {state.step}"
            record()
            with journal.clock.until_first_step("first evaluation"):
                watch.after_step(state, grad_norm)
            tell_compilations()
            tell_moved()
            retreat.settled()
            journal.doing = f"step {state.step + 1}"

        with (
            journal.clock.stage("training"),
            _saved_when_stopped(watch, state, journal.folder.path, interrupts),
            retreat.ready_to_go_back(),
        ):
            retreat.over(lambda: train(loop, state, rng, after_step, interrupts.check))


def _spoilt_weights(step: int, last: str | None) -> str:
    kept = f"the last checkpoint kept is {last}" if last else "there is no checkpoint before it"
    return (
        f"after step {step} trained weights are infinite or no numbers, though its gradient was finite. They are not "
        f"saved; {kept}. Lower optim.learning_rate or lengthen the warm-up."
    )


def _probe(ready: Ready, journal: Journal, held_out: Callable[[], Iterable[MicroBatch]] | None) -> None:
    """The largest micro-batch first."""
    journal.doing = "the probe of the largest micro-batch"
    with journal.clock.stage("memory probe"):
        num_tokens = probe_memory(ready.loop, held_out)
    peak = journal.state.peak_memory = max(journal.state.peak_memory, journal.memory.read().peak)
    journal.row("probe", num_tokens=num_tokens, memory_peak_gib=peak / GIB)
    journal.screen.say(f"probe: the largest micro-batch, {num_tokens:,} tokens, fits")


@contextmanager
def _saved_when_stopped(watch: Watch, state: State, run_dir: Path, interrupts: Interrupts) -> Iterator[None]:
    """A signal ends the run after the running micro-batch, with the last whole step saved; so does a row of a stream
    that cannot be used."""
    interrupts.deferred = True
    try:
        yield
    except Interrupted as stop:
        watch.save_now(state)
        saved = f"The state after step {state.step} is saved" if state.step else "No step was done yet"
        raise Interrupted(stop.exit_code - 128, f"{stop} {saved}; go on with: trainer resume run={run_dir}") from None
    except DataError as error:
        watch.save_now(state)
        raise DataError(
            f"{error}\nThe state after step {state.step} is saved; once the rows or the settings are mended, "
            "go on with the same command and train.resume=force."
        ) from None
    finally:
        interrupts.deferred = False
