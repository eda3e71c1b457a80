"""Every causal model type of the installed transformers through `trainer adopt`, in a process each with a time limit.

    python -m tests.bench adopt [MODEL_TYPE ...]      # without types all of them; `missing`: those without a result

Prints the table of RESULTS.md as it goes and writes trainer/certificate/certified.json (of the types named, if any),
which tells a run what needs no proof, and the README's table that is made from it.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from trainer.certificate.certificate import Certificate, certify
from trainer.certificate.settle import CERTIFIED, certified

LIMIT_SECONDS = 60
README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- certified: begin -->", "<!-- certified: end -->"


def main() -> None:
    """Prints a Markdown table, a row a type."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    named = sys.argv[1:]
    more = [kind for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if kind in TEXT_DECODERS]
    found = {}
    print(
        "| type | trains | packed | loss | attention | not by the usual way, or refused because | s |\n|" + "---|" * 7
    )
    every = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *more}, key=lambda kind: (bool(OLD.search(kind)), kind))
    for kind in every if named in ([], ["missing"]) else named:
        if named == ["missing"] and kind in certified():
            continue
        certificate = _in_a_process(kind)
        found[kind] = certificate
        print(_row(kind, certificate), flush=True)
        _keep({**certified(), kind: _short(certificate)})
    print(f"\n{sum(c['holds'] for c in found.values())} of {len(found)} pass")


OLD = re.compile(
    "bert|bart|electra|xl|pegasus|plbart|whisper|former|ctrl|rwkv|moshi|music|git|blender|openai|trocr|mvp|marian"
)
"""Types that come last."""


def _keep(types: dict[str, dict]) -> None:
    """Writes what is known so far, and the README's table of it."""
    types = dict(sorted(types.items()))
    written = {"transformers": transformers.__version__, "types": types}
    CERTIFIED.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    README.write_text(with_families(README.read_text(encoding="utf-8"), types), encoding="utf-8")


TEXT_DECODERS = "mistral3", "llava", "internvl", "gemma3", "gemma4", "aria", "pixtral"
"""Multimodal types beside those that are causal by name."""


def _in_a_process(kind: str) -> dict:
    """The certificate of a type's default configuration; a forked process, since imports take longer than checks."""
    forked = multiprocessing.get_context("fork")
    ours, theirs = forked.Pipe(duplex=False)
    process = forked.Process(target=_certify, args=(kind, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(LIMIT_SECONDS) else _unanswered(f"no answer in {LIMIT_SECONDS} s")
    except EOFError:
        found = _unanswered("the process ended without an answer")
    process.kill()
    process.join()
    return {**Certificate(kind, kind).plain(), **found}


def _unanswered(why: str) -> dict:
    return {"holds": False, "refused": why, "reason": why}


def _certify(kind: str, answer: Connection) -> None:
    transformers.logging.set_verbosity_error()
    try:
        config = AutoConfig.for_model(kind)
    except Exception as error:
        answer.send(_unanswered(f"no default configuration: {_first(error)}"))
        return
    certificate = certify(config, kind)
    answer.send({**certificate.plain(), "reason": certificate.reason})


def with_families(page: str, types: dict[str, dict]) -> str:
    """The README with the families as they are certified."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{families(types)}\n{END}{after}"


def families(types: dict[str, dict]) -> str:
    """Three rows of Markdown: what trains packed, what padded, what is refused."""
    groups = {
        "packed": [kind for kind, found in types.items() if found.get("packing")],
        "padded (`packing=auto` or `none`)": [kind for kind, found in types.items() if found.get("packing") is False],
        "refused, with the reason that `trainer adopt` gives": [
            kind for kind, found in types.items() if "reason" in found
        ],
    }
    rows = [f"| {name} | {len(kinds)} | {', '.join(f'`{kind}`' for kind in kinds)} |" for name, kinds in groups.items()]
    return "\n".join(["| trains | types | |", "|---|---|---|", *rows])


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _short(found: dict) -> dict:
    """What certified.json keeps."""
    if not found["holds"]:
        return {"reason": found["reason"]}
    return {name: found[name] for name in ("packing", "loss", "attention")}


def _row(kind: str, found: dict) -> str:
    if not found["holds"]:
        return f"| {kind} | no | | | | {_cell(found['reason'])} | {found['seconds']:.0f} |"
    instead = "; ".join(f"{setting}: {why}" for setting, why in found["instead"].items())
    cells = [kind, "yes", "yes" if found["packing"] else "no", found["loss"], found["attention"], _cell(instead)]
    return f"| {' | '.join(cells)} | {found['seconds']:.0f} |"


def _cell(text: str | None) -> str:
    return " ".join((text or "").replace("|", "/").split())[:220]
