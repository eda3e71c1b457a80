"""Templates that a user gives: a chat template for a base model, and a row template for rows of any other shape.

Both are Jinja and run in a process of their own: they can neither reach Python nor run away (sandbox.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.chat.messages import BadRow
from trainer.data.chat.rendering import ChatTemplate
from trainer.data.chat.sandbox import BrokenTemplate, RanAway, TemplateRefuses, sandbox
from trainer.errors import DataError, closest
from trainer.resources import PACKAGE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHIPPED = PACKAGE / "assets" / "templates"


def shipped_templates() -> list[str]:
    """Names of the chat templates that come with the trainer."""
    return sorted(file.stem for file in SHIPPED.glob("*.jinja"))


def dress(tokenizer: PreTrainedTokenizerBase, chosen: str | None, new_tokens: Sequence[str]) -> None:
    """Gives the tokenizer model.new_tokens and the template of data.chat_template; null leaves its own.

    Raises DataError or ModelError for a template that cannot be used.
    """
    text = _chat_template(chosen) if chosen is not None else tokenizer.chat_template
    add_new_tokens(tokenizer, new_tokens, text or "")
    if chosen is None:
        ChatTemplate(tokenizer, None).check()
        return
    missing = [
        token for token in _control_tokens(text) if len(tokenizer(token, add_special_tokens=False).input_ids) > 1
    ]
    if missing:
        names = ", ".join(f"'{token}'" for token in missing)
        raise DataError(
            f"data.chat_template={chosen}: {names} are no tokens of this tokenizer, so the ends of turns would be "
            f"words. Add them: model.new_tokens=[{names}], or choose plain or instruction."
        )
    tokenizer.chat_template = text
    ChatTemplate(tokenizer, chosen).check()


def add_new_tokens(tokenizer: PreTrainedTokenizerBase, new_tokens: Sequence[str], template: str) -> None:
    """Gives the tokenizer tokens that are never split; those that the chat template writes are control tokens."""
    from tokenizers import AddedToken

    vocabulary = tokenizer.get_vocab()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=token in template, normalized=False)
            for token in new_tokens
            if token not in vocabulary
        ]
    )


def _chat_template(chosen: str) -> str:
    file = SHIPPED / f"{chosen}.jinja"
    if "/" in chosen or "." in chosen or not file.is_file():
        file = Path(chosen)
    if not file.is_file():
        names = shipped_templates()
        raise DataError(
            f"data.chat_template={chosen}: no such template or file{closest(chosen, names)}. "
            f"There are: {', '.join(names)}; anything else is a Jinja file."
        )
    text = _read(file, f"data.chat_template={chosen}")
    return text.removesuffix("\n")


def _control_tokens(template: str) -> list[str]:
    """Words of the form <|...|> that the template writes."""
    return sorted(set(re.findall(r"<\|[a-z_]+\|>", template)))


def row_template(file: str) -> Callable[[dict[str, Any]], str]:
    """A function from a row's fields to the text that the template file writes of them. Raises DataError."""
    what = f"data.row_template={file}"
    if not Path(file).is_file():
        raise DataError(f"{what}: there is no such file.")
    template = _read(Path(file), what)
    try:
        sandbox().check(template, strict=True)
    except BrokenTemplate as error:
        raise DataError(f"{what}{error}.") from None
    except RanAway as error:
        raise DataError(f"{what}: was stopped: {error}.") from None

    def render(fields: dict[str, Any]) -> str:
        try:
            return sandbox().render(template, {**fields, "row": fields}, strict=True)
        except RanAway as error:
            raise DataError(f"{what}: was stopped: {error}.") from None
        except TemplateRefuses as error:
            raise BadRow(f"{what}: {error}") from None

    return render


def _read(file: Path, what: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{what}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}.") from None
