"""The checks of a certificate, in order: each with what it compares, and what to do where it fails.

A check may change the choices (`Subject.choices`) to what holds and say why; a later one works with them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from trainer.certificate.comparison import GRADIENT, VALUE, alone, renamed_to, rows, together
from trainer.certificate.subject import CPU, FP32, Subject
from trainer.data.chat.encoder import Encoder
from trainer.data.chat.messages import Dialogue
from trainer.data.data_settings import TrainOn
from trainer.errors import PlanError, TrainerError
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.profile import Shape
from trainer.model import attention
from trainer.model.adapters import decoder_linears
from trainer.model.checkpointing import Attention, EveryK, FullCheckpointing, NoCheckpointing, Selective
from trainer.model.recompute import Keep
from trainer.registry import name_of
from trainer.training.losses import Full


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    check: str
    holds: bool
    detail: str
    remedy: str | None = None
    """what to do where it does not hold"""


class Check(ABC):
    """One thing that must be so before a model is trained."""

    name: ClassVar[str]
    compares: ClassVar[str]
    remedy: ClassVar[str]

    def __call__(self, subject: Subject) -> Finding:
        try:
            wrong, detail = self.find(subject)
        except TrainerError as error:
            wrong, detail = True, str(error)
        except Exception as error:  # a stranger's architecture can meet any line of any library
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            wrong, detail = True, f"{type(error).__name__}: {first}"
        return Finding(self.name, not wrong, detail, self.remedy if wrong else None)

    @abstractmethod
    def find(self, subject: Subject) -> tuple[bool, str]:
        """Whether it is wrong, and in words what was found."""


class Weights(Check):
    name = "weights"
    compares = "every parameter as it is loaded here, and what is tied to what, with transformers' own; bit for bit"
    remedy = "the files hold what is not loaded: this model cannot be trained"

    def find(self, subject):
        renamed = subject.renamed
        plain, ours = subject.plain(), subject.ours()
        theirs = {renamed_to(name, renamed): p for name, p in plain.named_parameters(remove_duplicate=False)}
        mine = dict(ours.named_parameters(remove_duplicate=False))
        for name, parameter in mine.items():
            if name not in theirs:
                return True, f"{name} is no weight of the folder"
            if not torch.equal(parameter, theirs[name]):
                return True, f"{name} has other values than in the folder"
        tied = [_tied(mine), _tied({name: theirs[name] for name in mine})]
        if tied[0] != tied[1]:
            return True, f"tied weights differ: {sorted(tied[0] ^ tied[1])[0]}"
        return False, f"{len(mine)} parameters equal, {len(tied[0])} tied"


def _tied(parameters: dict[str, torch.Tensor]) -> set[tuple[str, ...]]:
    """Names that share a tensor."""
    groups: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(id(parameter), []).append(name)
    return {tuple(sorted(names)) for names in groups.values() if len(names) > 1}


class Padded(Check):
    name = "loss and gradients"
    compares = f"padded rows by the training path with each sample alone by transformers, eager (values {VALUE:.0e}, "
    compares += f"gradients {GRADIENT:.0e})"
    remedy = "nothing that is known here gives this model's own loss: it cannot be trained"

    def find(self, subject):
        choices = subject.choices
        choices.attention, why = attention.choose_padded(subject.text)
        first = None
        for loss in (choices.loss, Full()):
            wrong = self._wrong(subject, loss, choices.attention)
            if wrong is None:
                break
            first = first or wrong
        else:
            return True, first
        if first is not None:
            choices.said[f"loss={name_of('loss', loss)}"] = first
        if choices.attention != "sdpa":
            choices.said[f"attention {choices.attention}"] = why
        choices.loss, loss_name = loss, name_of("loss", loss)
        return False, f"loss={loss_name}, attention {choices.attention}, {len(subject.expected.gradients)} gradients"

    def _wrong(self, subject, loss, implementation):
        """Both ways of a head: it trains, and it is frozen."""
        try:
            model = subject.ours(implementation).requires_grad_(True)
            loss.check_model(model)
            batches = rows(model, subject.tokens, packed=False)
            wrong = _decoder_only(subject, model).apart(together(model, loss, batches))
            head = model.get_output_embeddings()
            if wrong is not None or head is None:
                return wrong
            head.requires_grad_(False)
            frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
            return _decoder_only(subject, model, frozen).apart(together(model, loss, batches))
        except (TrainerError, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _decoder_only(subject, model, without=frozenset()):
    """What is expected of the parameters that the text decoder has."""
    names = {name for name, _ in model.named_parameters()} - set(without)
    expected = subject.expected
    return replace(expected, gradients={n: g for n, g in expected.gradients.items() if n in names})


class Packed(Check):
    name = "packed equals alone"
    compares = "samples in one row, past any window, chunk or scaling length, with each alone by transformers"
    remedy = "packing=none"

    def find(self, subject):
        choices = subject.choices
        usual, why = attention.choose(subject.text, CPU, torch.float32)
        wrong = self._wrong(subject, usual)
        if wrong is None:
            choices.packed_attention = usual
            return False, f"attention {usual} ({why})"
        choices.said["packing=none"] = f"samples of one row see each other: {wrong}"
        return False, f"not proven, so rows are padded: {wrong}"

    def _wrong(self, subject, implementation):
        try:
            model = subject.ours(implementation).requires_grad_(True)
            batches = rows(model, subject.tokens, packed=True)
            return _decoder_only(subject, model).apart(together(model, subject.choices.loss, batches))
        except (TrainerError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError, KeyError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class Quantised(Check):
    name = "quantised"
    compares = "the linear layers of the text decoder with those that NF4 holds, and each with its values before"
    remedy = "quant=none"

    def find(self, subject):
        import bitsandbytes as bnb

        plain = subject.ours()
        subject.config.quant.check_experts(plain)
        wanted, values = decoder_linears(plain), dict(plain.named_parameters())
        base = subject.ours(quant=subject.config.quant)
        for name in wanted:
            layer = base.get_submodule(name)
            if not isinstance(layer, bnb.nn.Linear4bit):
                return True, f"{name} is not quantised"
            found = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
            before = values[f"{name}.weight"]
            if not (found - before).norm() <= NF4_ERROR * before.norm():
                return True, f"{name} holds other values than its weight rounded to NF4"
            bias = values.get(f"{name}.bias")
            if (bias is None) != (layer.bias is None) or (bias is not None and not torch.equal(bias, layer.bias)):
                return True, f"{name} has lost its bias"
        if not wanted:
            return True, "the text decoder has no linear layer"
        kept = [(n, p) for n, p in base.named_parameters() if not isinstance(p, bnb.nn.Params4bit)]
        matrices = [n for n, p in kept if p.ndim >= 2]
        groups = sorted({".".join("*" if part.isdigit() else part for part in n.split(".")) for n in matrices})
        share = sum(p.numel() for n, p in kept if p.ndim >= 3) / sum(v.numel() for v in values.values())
        stacked = f"; stacked tensors, {share:.0%} of this twin, stay unquantised" if share else ""
        return False, f"{len(wanted)} linear layers in NF4; in the compute dtype: {', '.join(groups)}{stacked}"


NF4_ERROR = 0.15
"""NF4 leaves about 0.09 of normally distributed weights' norm as error (Dettmers et al. 2023, its 16 quantiles)."""


class Adapters(Check):
    name = "adapter"
    compares = (
        "every tensor of an adapter on all linear layers: it gets a finite gradient, and moves in a step of AdamW"
    )
    remedy = "adapter.target_modules: name the layers that get a gradient"

    def find(self, subject):
        adapted = subject.adapted()
        trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
        before = {name: p.detach().clone() for name, p in trained.items()}
        model = adapted.get_base_model()
        together(model, subject.choices.loss, rows(model, subject.tokens, packed=False))
        dead = [n for n, p in trained.items() if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()]
        if dead:
            return True, f"{dead[0]} gets no gradient ({len(dead)} of {len(trained)})"
        torch.optim.AdamW(trained.values(), lr=1e-2).step()
        still = [name for name, p in trained.items() if torch.equal(p, before[name])]
        if still:
            return True, f"{still[0]} does not move ({len(still)} of {len(trained)})"
        return False, f"{len(trained)} tensors of {len(trained) // 2} layers"


class AdapterGradients(Check):
    name = "adapter gradients"
    compares = (
        "the adapter's loss and gradients by the training path with PEFT's on transformers' model, sample by sample"
    )
    remedy = "adapter.fused=false"

    def find(self, subject):
        adapted = subject.adapted(subject.choices.packed_attention)
        model = adapted.get_base_model()
        packed = subject.choices.packed_attention is not None
        found = together(model, subject.choices.loss, rows(model, subject.tokens, packed))
        plain = subject.plain_adapted(adapted)
        expected = alone(plain.get_base_model(), subject.tokens, subject.renamed)
        names = found.gradients.keys()
        expected = replace(expected, gradients={n: g for n, g in expected.gradients.items() if n in names})
        wrong = expected.apart(found)
        return wrong is not None, wrong or f"{len(names)} gradients"


class Checkpoints(Check):
    name = "checkpointing"
    compares = "gradients under each policy with those where all is kept"
    remedy = "checkpointing=none"

    def find(self, subject):
        choices = subject.choices
        packed = choices.packed_attention is not None
        adapted = subject.adapted(choices.packed_attention)
        model = adapted.get_base_model()
        batches = rows(model, subject.tokens, packed)
        adapted.train()
        NoCheckpointing().apply(model)
        expected = together(model, choices.loss, batches)
        refused, choices.checkpointing = {}, ["none"]
        policies = [FullCheckpointing(), EveryK(k=2), Selective(keep=Keep.attention), Attention()]
        for policy in policies:
            name = name_of("checkpointing", policy)
            try:
                policy.apply(model)
                wrong = expected.apart(together(model, choices.loss, batches))
                wrong = wrong and f"checkpointing={name}: {wrong}"
            except TrainerError as error:
                wrong = str(error)
            if wrong is None:
                choices.checkpointing.append(name)
            else:
                refused[name] = wrong
            NoCheckpointing().apply(model)
        if "full" in refused:
            return True, refused["full"]
        choices.said |= {f"checkpointing={name}: not": why for name, why in refused.items()}
        return False, f"equal: {', '.join(choices.checkpointing)}" + (f"; not: {', '.join(refused)}" if refused else "")


class Template(Check):
    name = "chat template"
    compares = "two turns rendered by the tokenizer's own template with what is tokenised, masked and ended here"
    remedy = "data.chat_template: chatml or another that is shipped"

    def find(self, subject):
        tokenizer = subject.tokenizer
        if tokenizer is None:
            return False, "not looked at: no tokenizer here"
        if tokenizer.chat_template is None:
            return False, "the tokenizer has none: rows of text, or data.chat_template"
        contents = ["What is the capital of Peru?", "Lima.", "And of Chile?", "Santiago."]
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
        encoder = Encoder(tokenizer, TrainOn.assistant)
        ids, is_target = encoder.encode(Dialogue(messages, [False, True, False, True]))
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        own = tokenizer(text, add_special_tokens=False).input_ids
        targets = np.asarray(is_target)
        bos = tokenizer.bos_token_id
        if [i for i in ids if i != bos] != [i for i in own if i != bos]:
            return True, "the tokens are not those of the rendered text"
        trained = tokenizer.decode(np.asarray(ids)[targets])
        missing = [text for text in contents[1::2] if text not in trained]
        leaked = [text for text in contents[::2] if text in trained]
        if missing or leaked:
            return True, f"targets are {trained!r}"
        if not any(targets[-3:]):
            return True, "the end of the last answer is no target, so a trained model would not stop"
        return False, f"{int(targets.sum())} of {len(ids)} tokens are targets"


LOGITS = 2.0**-14
"""Relative difference of logits that another order of sums explains, as of W + BA beside Wx + BAx."""


class Reloaded(Check):
    name = "adapter reloads"
    compares = f"logits of the adapter's files in plain PEFT on plain transformers with those here (to {LOGITS:.0e})"
    remedy = "the adapter would work here only: this model cannot be trained"

    @torch.no_grad()
    def find(self, subject):
        adapted = subject.adapted()
        plain = subject.plain_adapted(adapted)
        wrong = _logits_apart(subject, adapted.get_base_model(), plain.get_base_model())
        if wrong is None and _logits_apart(subject, subject.ours(), plain.get_base_model()) is None:
            wrong = "the adapter changes nothing"
        return wrong is not None, wrong or f"by {type(plain.get_base_model()).__name__}"


class Merged(Check):
    name = "merge"
    compares = "logits of the adapter merged into the weights with those beside them"
    remedy = "keep the adapter apart"

    @torch.no_grad()
    def find(self, subject):
        adapted = subject.adapted()
        apart = [_logits(adapted.get_base_model(), subject.tokens.sample(i)[0]) for i in (0, 2)]
        merged = adapted.merge_and_unload()
        together = [_logits(merged, subject.tokens.sample(i)[0]) for i in (0, 2)]
        share = max(((a - b).norm() / a.norm()).item() for a, b in zip(apart, together, strict=True))
        return not share <= LOGITS, f"logits differ by {share:.0e}"


def _logits(model: torch.nn.Module, ids: np.ndarray) -> torch.Tensor:
    return model(input_ids=torch.from_numpy(np.asarray(ids, dtype=np.int64))[None], use_cache=False).logits.float()


def _logits_apart(subject: Subject, ours: torch.nn.Module, theirs: torch.nn.Module) -> str | None:
    for index in (0, 2):
        ids = subject.tokens.sample(index)[0]
        expected, found = _logits(theirs, ids), _logits(ours, ids)
        share = ((expected - found).norm() / expected.norm()).item()
        if not share <= LOGITS:
            return f"logits differ by {share:.1e}"
    return None


class Planned(Check):
    name = "plan"
    compares = (
        "bytes of the model and of its trainable parameters as planned without values with those of the model made"
    )
    remedy = "the run starts without a prediction of its memory"

    def find(self, subject):
        config = replace(subject.config, checkpointing=FullCheckpointing(), loss=subject.choices.loss)
        shape = Shape(tuple(subject.tokens.lengths.tolist()), 60, packed=False)
        planner = Planner(config, subject.text, shape, FP32)
        base = subject.ours(quant=subject.config.quant)
        adapted = subject.config.adapter.attach(base)
        planned = sum(p.numel() for p in planner.model.trainable())
        made = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        if planned != made:
            return True, f"{planned} trainable numbers planned, {made} made"
        try:
            peak = planner.predict().peak
        except PlanError as error:
            subject.choices.said["no prediction of memory"] = str(error)
            return False, f"{made:,} trainable numbers; a step could not be traced: a run starts without a prediction"
        return False, f"{made:,} trainable numbers; a step of this twin {peak / 2**20:.1f} MiB"


CHECKS: tuple[Check, ...] = (
    Weights(),
    Padded(),
    Packed(),
    Quantised(),
    Adapters(),
    AdapterGradients(),
    Checkpoints(),
    Template(),
    Reloaded(),
    Merged(),
    Planned(),
)
