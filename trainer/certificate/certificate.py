"""The certificate of a model: what holds of its twin, what was chosen instead, what fails and why."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers

from trainer.certificate.checks import CHECKS, Finding
from trainer.certificate.subject import Choices, subject_of
from trainer.errors import ModelError
from trainer.registry import name_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from trainer.certificate.subject import Subject


@dataclass
class Certificate:
    """What `trainer adopt` found."""

    model: str
    model_type: str
    refused: str | None = None
    """why no check could be made"""
    findings: list[Finding] = field(default_factory=list)
    packing: bool = False
    loss: str | None = None
    attention: str | None = None
    """of the rows as they are trained on"""
    checkpointing: list[str] = field(default_factory=list)
    instead: dict[str, str] = field(default_factory=dict)
    """setting that was chosen instead of the usual one: why"""
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return self.refused is None and all(finding.holds for finding in self.findings)

    @property
    def reason(self) -> str | None:
        """Why it cannot be trained, in one line; None where it can."""
        if self.refused is not None:
            return self.refused
        return next((f"{f.check}: {f.detail}" for f in self.findings if not f.holds), None)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        return {"holds": self.holds, **asdict(self), "versions": versions, "machine": platform.machine()}

    def rows(self) -> list[tuple[str, str]]:
        """Of a table on the screen."""
        if self.refused is not None:
            return [("refused", self.refused)]
        rows = [(finding.check, _line(finding)) for finding in self.findings]
        rows += [("instead", f"{setting}: {why}") for setting, why in self.instead.items()]
        if self.holds:
            packed = "packing=auto packs" if self.packing else "packing=auto pads"
            verdict = f"can be trained: {packed}, loss={self.loss}, attention {self.attention}"
        else:
            verdict = "cannot be trained here"
        return [*rows, ("result", f"{verdict} ({self.seconds:.0f} s)")]


def _line(finding: Finding) -> str:
    return f"holds: {finding.detail}" if finding.holds else f"FAILS: {finding.detail}. {finding.remedy}"


def certify(
    config: PretrainedConfig,
    name: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    told: Callable[[str], None] = lambda check: None,
) -> Certificate:
    """Makes every check on a twin of this configuration; `told` hears of each before it begins."""
    certificate, began = Certificate(name, config.model_type), time.perf_counter()
    try:
        with subject_of(config, tokenizer, name) as subject:
            for check in CHECKS:
                told(check.name)
                certificate.findings.append(check(subject))
            _take(certificate, subject)
    except ModelError as error:
        certificate.refused = str(error)
    certificate.seconds = round(time.perf_counter() - began, 1)
    return certificate


def _take(certificate: Certificate, subject: Subject) -> None:
    choices: Choices = subject.choices
    certificate.packing = choices.packed_attention is not None
    certificate.attention = choices.packed_attention or choices.attention
    certificate.loss = name_of("loss", choices.loss)
    certificate.checkpointing, certificate.instead = choices.checkpointing, choices.said
