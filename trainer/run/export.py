"""The end of a run: adapter/ or model/, held-out prompts answered side by side, summary.json and the last table."""

from __future__ import annotations

from typing import Any

from peft import PeftModel

from trainer.atomic import write_atomically
from trainer.config.saved import Run
from trainer.data.chat.encoder import Encoder
from trainer.data.data_settings import TrainOn
from trainer.data.tokens.tokenize import openings
from trainer.export.answering import answer, tidied
from trainer.export.model_card import CARD, model_card
from trainer.export.result import export, stop_tokens
from trainer.memory.snapshot import statistics
from trainer.run.build import Ready
from trainer.run.disk import storage_errors
from trainer.run.journal import Journal
from trainer.run.screen_tables import answers_table, end_table
from trainer.training.train_settings import ANSWER_TOKENS


def export_result(run: Run, ready: Ready, journal: Journal) -> dict[str, Any]:
    """Writes the result and tells what came out; returns the summary."""
    journal.doing = "writing the result"
    prepared, run_dir, clock = ready.prepared, journal.folder.path, journal.clock
    ends = stop_tokens(prepared.steps.ends(), prepared.tokenizer)
    with clock.stage("result"), storage_errors(run_dir):
        tokenizer, whole = prepared.tokenizer, prepared.decoder_in_whole
        name = export(ready.adapted, ready.loop.model, tokenizer, ends, run_dir, whole, ready.weight_share)
    answers = []
    if prepared.held_out is not None and run.config.train.compare_prompts:
        with clock.stage("answers"):
            answers = held_out_answers(ready, ends, run.config.train.compare_prompts)
    summary = {**journal.summary("completed"), "adapter": name, "answers": answers}
    if run.config.train.model_card:
        card = model_card(run, journal.folder.manifest() or {}, summary, name)
        write_atomically(run_dir / name / CARD, card)
    journal.finish(summary)
    answers_table(journal.screen, answers)
    report = journal.facts.get("report")
    end_table(journal.screen, summary, clock, journal.memory, run_dir, journal.where, report)
    if run.config.memory.stats:
        journal.screen.table("allocator", statistics(prepared.device))
    return summary


def held_out_answers(ready: Ready, end_tokens: list[int], count: int) -> list[dict[str, str]]:
    """Up to `count` held-out samples: their last prompt, asked as their rows were trained on, the expected answer, the
    base's and the trained one's.

    Without an adapter the base is gone, so only the trained model answers.
    """
    prepared, model = ready.prepared, ready.loop.model
    encoder = Encoder(prepared.tokenizer, TrainOn.assistant, today=prepared.today)
    answers = []
    for opening in openings(prepared.held_out, count):
        prompt = encoder.prompt(opening.asked, opening.tools)

        def ask() -> str:
            text = answer(model, encoder, prompt, end_tokens, ANSWER_TOKENS, prepared.dtypes)  # noqa: B023
            return tidied(opening.asked, text)  # noqa: B023

        row = {"asked_as": "text" if isinstance(opening.asked, str) else "chat"}
        row |= {"prompt": opening.question, "expected": opening.answer}
        if isinstance(ready.adapted, PeftModel):
            with ready.without_adapter():
                row["base"] = ask()
        row["trained"] = ask()
        answers.append(row)
    return answers
