"""data: an audit of the data as it would be trained on, with the tokenizer alone; no weights are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainer.config.compose import compose, started_from
from trainer.errors import ConfigError, DataError, StorageError, listing
from trainer.tracking.run_folder import DATA_REPORT

HELP = """trainer data [key=value ...] [show=N] [output_dir=DIR]

Audits the data as it would be trained on: rows read, used and dropped with the reason and the place of the first few,
tokens and targets, lengths, truncation, repetitions, end tokens, an epoch's size. Takes the settings of train.
Of data.streaming=true it audits the first window, for no more is read; train.max_steps may be left out here.
show=N prints N samples; what is trained on stands in ⟦ ⟧ and in colour.
output_dir=DIR also writes DIR/data_report.json.
"""


def run(words: list[str]) -> int:
    count = 0
    settings = []
    for word in words:
        if word.startswith("show="):
            value = word.removeprefix("show=")
            if not value.isdigit():
                raise ConfigError(f"show={value}: must be a whole number")
            count = int(value)
        else:
            settings.append(word)
    settings, note = started_from(settings)
    composed = compose(settings, trains=False)
    wanted = any(word.lstrip("+").startswith("output_dir=") for word in settings)
    config = composed.config

    from trainer.data.batches.loader import TrainingSteps
    from trainer.data.batches.streamed_steps import StreamedSteps
    from trainer.data.chat.templates import dress
    from trainer.data.tokens.audit import CLOSE, OPEN, audit, lines, shown, to_json
    from trainer.data.tokens.gather import read_data
    from trainer.data.tokens.row_stream import RowStream
    from trainer.model.loading.base import load_tokenizer
    from trainer.tracking.console import Screen, quiet_libraries

    screen = Screen()
    quiet_libraries(screen)
    if note is not None:
        screen.say(note)
    tokenizer = load_tokenizer(config.model)
    dress(tokenizer, config.data.chat_template, config.model.new_tokens)
    loaded = read_data(config.data, config.seed, tokenizer)
    if config.data.streaming:
        stream = RowStream(config.data, tokenizer, lambda window: None)  # thresholds are reported, and stop at the end
        one_step = replace(config.train, max_steps=1)  # lies in the first window, so no other is read
        steps = StreamedSteps(stream, config.packing, one_step, config.seed, pin=False)
        loaded.counts[:0] = steps.first.counts
    else:
        steps = TrainingSteps(loaded.train_set, config.packing, config.train, config.seed)
    row_tokens = config.train.micro_batch_tokens if config.packing.packed else None
    result = audit(config.data, loaded, steps, row_tokens)
    samples = shown(steps.first_rows()[0], count, tokenizer)
    steps.close()
    for sample in samples:
        screen.say(f"{sample.place}, {sample.tokens} tokens", style="bold")
        screen.runs([(f"{OPEN}{text}{CLOSE}", "green") if trained else (text, "dim") for text, trained in sample.runs])
    screen.table("data", lines(result))
    if wanted:
        folder = Path(config.output_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / DATA_REPORT).write_text(to_json(result, samples), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"output_dir={folder}: {DATA_REPORT} cannot be written: {error.strerror}.") from None
        screen.say(f"written: {folder / DATA_REPORT}")
    if result.stops:
        raise DataError(listing(result.stops))
    return 0
