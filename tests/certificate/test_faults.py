"""Planted faults: each makes one thing wrong in a tiny model or in the trainer's own path, and a check must notice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from tests.support import CHATML_TEMPLATE, make_tokenizer
from trainer.certificate import comparison, subject
from trainer.certificate.checks import (
    AdapterGradients,
    Adapters,
    Check,
    Checkpoints,
    Merged,
    Packed,
    Padded,
    Quantised,
    Reloaded,
    Template,
    Weights,
)
from trainer.certificate.subject import Choices, Subject, subject_of
from trainer.data.chat.encoder import Encoder
from trainer.model import attention
from trainer.model.checkpointing import FullCheckpointing
from trainer.model.quant import NF4
from trainer.model.recompute import run_by
from trainer.training import frozen_head, losses
from trainer.training.logits import LogitMap
from trainer.training.losses import Chunked, Full

Patch = Callable[[pytest.MonkeyPatch, Subject], None]

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(48)],
    "long_factor": [2.0 + 0.5 * i for i in range(48)],
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
}
FIELDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "granite": {
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.5,
        "tie_word_embeddings": True,
    },
    "llama": {"tie_word_embeddings": False},
    "phi3": {"original_max_position_embeddings": 4096, "rope_parameters": LONG_ROPE, "pad_token_id": 0},
}


@dataclass(frozen=True)
class Fault:
    name: str
    kind: str
    check: type[Check]
    patch: Patch
    fields: dict[str, Any] = field(default_factory=dict)


def mutated(change: Callable[[torch.nn.Module], Any]) -> Patch:
    """The base as it is loaded here, changed."""

    def patch(monkeypatch, made):
        load = Subject.ours

        def ours(self, *args, **kwargs):
            model = load(self, *args, **kwargs)
            with torch.no_grad():
                change(model)
            return model

        monkeypatch.setattr(Subject, "ours", ours)

    return patch


def configured(**fields: Any) -> Patch:
    """The text decoder built here has other values in its configuration."""

    def patch(monkeypatch, made):
        made.text = copy.deepcopy(made.text)
        for name, value in fields.items():
            setattr(made.text, name, value)

    return patch


def replaced(where: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """A function of ours, made of the right one."""
    return lambda monkeypatch, made: monkeypatch.setattr(where, name, make(getattr(where, name)))


def collated(change: Callable[[Any], Any]) -> Patch:
    """Micro-batches, changed; transformers' own way, which has rows of one sample, is left alone."""

    def make(right):
        def wrong(tokens, indices, packed, source=""):
            batch = right(tokens, indices, packed, source)
            return batch if len(indices) == 1 else replace(batch, **change(batch))

        return wrong

    return replaced(comparison, "collate", make)


def unproven(mapped: LogitMap) -> Patch:
    """The head's map is another, and the proof of it is left out."""

    def patch(monkeypatch, made):
        monkeypatch.setattr("trainer.training.logits.logit_map", lambda config: mapped)
        monkeypatch.setattr(losses.TargetsOnly, "check_model", lambda self, model: None)

    return patch


def both_losses(change: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    """Every loss, changed."""

    def patch(monkeypatch, made):
        for option in (Full, losses.TargetsOnly):
            right = option.sum
            monkeypatch.setattr(
                option, "sum", lambda self, model, batch, right=right: change(right(self, model, batch))
            )

    return patch


def block(model: torch.nn.Module, index: int = 0) -> torch.nn.Module:
    return model.get_decoder().layers[index]


def chosen(padded: str | None = None, packed: str | None = None) -> Patch:
    def patch(monkeypatch, made):
        if padded is not None:
            monkeypatch.setattr(attention, "choose_padded", lambda config: (padded, "a fault"))
        if packed is not None:
            monkeypatch.setattr(attention, "choose", lambda *_: (packed, "a fault"))
            monkeypatch.setattr(attention, "beyond_sdpa", lambda config: None)

    return patch


def _swap(model):
    layers = model.get_decoder().layers
    for one, other in zip(layers[0].mlp.parameters(), layers[1].mlp.parameters(), strict=True):
        one.data, other.data = other.data.clone(), one.data.clone()


def _untie(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())


def _tie(model):
    model.lm_head.weight = model.get_input_embeddings().weight


def _bias_lost(model):
    block(model).self_attn.q_proj.bias.zero_()


def _skip(monkeypatch, made):
    """One linear layer is left out of what is quantised."""
    right = NF4.linear
    load = subject.load_base

    def base(*args, **kwargs):
        model = load(*args, **kwargs)
        if made.config.quant is args[2]:
            layer = block(model).mlp.down_proj
            block(model).mlp.down_proj = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
        return model

    assert right is NF4.linear
    monkeypatch.setattr(subject, "load_base", base)


def _quantised(change: Callable[[torch.nn.Module], None]) -> Patch:
    """The first quantised layer's content, changed."""

    def patch(monkeypatch, made):
        load = subject.load_base

        def base(*args, **kwargs):
            model = load(*args, **kwargs)
            if made.config.quant is args[2]:
                change(block(model).self_attn.q_proj)
            return model

        monkeypatch.setattr(subject, "load_base", base)

    return patch


def adapter(change: Callable[[torch.nn.Module], Any]) -> Patch:
    """The adapted model, changed."""

    def patch(monkeypatch, made):
        right = Subject.adapted

        def adapted(self, *args):
            model = right(self, *args)
            with torch.no_grad():
                change(model)
            return model

        monkeypatch.setattr(Subject, "adapted", adapted)

    return patch


def _lora(model: torch.nn.Module) -> torch.nn.Module:
    return block(model.get_base_model()).self_attn.q_proj


def _zero_gradient(model):
    _lora(model).lora_B["default"].weight.register_hook(torch.zeros_like)


def _nan_gradient(model):
    _lora(model).lora_A["default"].weight.register_hook(lambda g: g * float("nan"))


def _bypassed(model):
    _lora(model).forward = _lora(model).base_layer.forward


def saved(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Patch:
    """The adapter's file, changed after it is written."""

    def make(right):
        from safetensors.torch import load_file, save_file

        def save(model, folder):
            right(model, folder)
            file = folder / "adapter_model.safetensors"
            save_file(change(load_file(file)), file, metadata={"format": "pt"})

        return save

    return replaced(subject, "save_trainable", make)


def policy(function: Callable[..., Any]) -> Patch:
    """Full checkpointing runs each block by this function."""
    return lambda monkeypatch, made: monkeypatch.setattr(
        FullCheckpointing, "apply_block", lambda self, one: run_by(one, function)
    )


def _no_positions(function, *args, **kwargs):
    return function(
        *args, **{**kwargs, "position_embeddings": tuple(torch.roll(x, 1, 1) for x in kwargs["position_embeddings"])}
    )


def _no_gradient(function, *args, **kwargs):
    with torch.no_grad():
        return function(*args, **kwargs)


def _merged_twice(monkeypatch, made):
    from peft.tuners.lora import Linear

    right = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, name: 2 * right(self, name))


def template(text: str) -> Patch:
    """The tokenizer's own template."""
    return lambda monkeypatch, made: setattr(made, "tokenizer", make_tokenizer(text))


def encoded(change: Callable[[np.ndarray, np.ndarray], tuple]) -> Patch:
    """What our encoder makes of a dialogue."""

    def make(right):
        def encode(self, sample):
            return change(*map(np.asarray, right(self, sample)))

        return encode

    return replaced(Encoder, "encode", make)


def _labels_over_borders(batch):
    labels = batch.labels.clone()
    labels[:, :-1] = batch.input_ids[:, 1:]
    return {"labels": labels, "target_index": (labels.flatten() != -100).nonzero().flatten()}


def _second_border_gone(batch):
    bounds = batch.cu_seqlens[[0, *range(2, len(batch.cu_seqlens))]]
    return {"cu_seqlens": bounds, "max_length": int(bounds.diff().max())}


def _border_off(batch):
    bounds = batch.cu_seqlens.clone()
    bounds[1] += 1
    return {"cu_seqlens": bounds}


def _fewer_targets(batch):
    labels = batch.labels.clone().flatten()
    labels[batch.target_index[-1]] = -100
    return {"labels": labels.view_as(batch.labels), "target_index": batch.target_index[:-1]}


def _later(batch):
    return {"labels": batch.labels.roll(1, 1), "target_index": batch.target_index + 1}


def _slopeless(right):
    def chunk(*args):
        loss, probabilities, _ = right(*args)
        return loss, probabilities, None

    return chunk


FAULTS = [
    Fault("a head's scale dropped", "granite", Padded, unproven(LogitMap())),
    Fault("a head's scale inverted", "granite", Padded, unproven(LogitMap(8.0))),
    Fault("a cap on logits ignored", "gemma2", Padded, unproven(LogitMap())),
    Fault("a cap on logits twice as high", "gemma2", Padded, unproven(LogitMap(cap=10.0))),
    Fault("the cap's slope left out of the gradient", "gemma2", Padded, replaced(frozen_head, "_chunk", _slopeless)),
    Fault("a cap on attention ignored, padded", "gemma2", Padded, chosen(padded="sdpa")),
    Fault("a cap on attention ignored, packed", "gemma2", Packed, chosen(packed=attention.PACKED)),
    Fault("attention sinks ignored, padded", "gpt_oss", Padded, chosen(padded="sdpa")),
    Fault("attention sinks ignored, packed", "gpt_oss", Packed, chosen(packed=attention.PACKED)),
    Fault("a window one wider", "mistral", Padded, configured(sliding_window=9)),
    Fault("a window one narrower, packed", "mistral", Packed, configured(sliding_window=7)),
    Fault("a window ignored", "mistral", Padded, configured(sliding_window=None)),
    Fault("a chunk ignored", "llama4_text", Packed, chosen(packed=attention.PACKED)),
    Fault("positions not reset", "gpt_neo", Packed,
          collated(lambda b: {"position_ids": torch.arange(b.input_ids.shape[1])[None] % 64})),
    Fault("a border of samples gone", "llama", Packed, collated(_second_border_gone)),
    Fault("a border of samples off by one", "llama", Packed, collated(_border_off)),
    Fault("targets over borders and prompts", "llama", Packed, collated(_labels_over_borders)),
    Fault("the last target lost", "llama", Padded, collated(_fewer_targets)),
    Fault("labels one later", "llama", Padded, collated(_later)),
    Fault("a mean for a sum", "llama", Padded, both_losses(lambda loss: loss / 50)),
    Fault("a gradient half as long, the value right", "llama", Padded,
          both_losses(lambda loss: 0.5 * loss + 0.5 * loss.detach())),
    Fault("a recurrent layer's samples in one row", "mamba2", Packed, lambda monkeypatch, made: None),
    Fault("a bias of a projection lost", "qwen2", Weights, mutated(_bias_lost)),
    Fault("a bias lost, by its effect", "qwen2", Padded, mutated(_bias_lost)),
    Fault("a norm's weight begun anew", "llama", Weights, mutated(lambda m: m.get_decoder().norm.weight.fill_(1))),
    Fault("a norm of queries left out", "qwen3", Padded,
          mutated(lambda m: setattr(block(m).self_attn, "q_norm", torch.nn.Identity()))),
    Fault("an embedding's multiplier left out", "granite", Padded, configured(embedding_multiplier=1.0)),
    Fault("a residual's multiplier left out", "granite", Padded, configured(residual_multiplier=1.0)),
    Fault("an attention's multiplier left out", "granite", Padded, configured(attention_multiplier=0.25)),
    Fault("tied weights untied", "granite", Weights, mutated(_untie)),
    Fault("separate weights tied", "llama", Weights, mutated(_tie)),
    Fault("two layers swapped", "llama", Weights, mutated(_swap)),
    Fault("a layer left out", "llama", Padded, mutated(lambda m: m.get_decoder().layers.__delitem__(1))),
    Fault("another base of rotary angles", "llama", Padded,
          configured(rope_parameters={"rope_type": "default", "rope_theta": 5e3})),
    Fault("samples on both sides of a rotary boundary in one row", "phi3", Packed,
          replaced(comparison, "rotary_boundary", lambda right: lambda *_: None)),
    Fault("rotary factors of a longer length", "phi3", Padded,
          configured(rope_parameters={**LONG_ROPE, "short_factor": [3.0] * 8, "long_factor": [3.0] * 8,
                                      "original_max_position_embeddings": 16})),
    Fault("another activation", "llama", Padded, mutated(lambda m: setattr(block(m).mlp, "act_fn", torch.nn.GELU()))),
    Fault("another epsilon of norms", "llama", Padded, configured(rms_norm_eps=1e-2)),
    Fault("fewer experts a token", "mixtral", Padded, configured(num_experts_per_tok=1)),
    Fault("one layer not quantised", "llama", Quantised, _skip),
    Fault("a quantised layer with other values", "llama", Quantised,
          _quantised(lambda layer: layer.weight.data.copy_(layer.weight.data.flip(0)))),
    Fault("a quantised layer without its bias", "qwen2", Quantised,
          _quantised(lambda layer: setattr(layer, "bias", None))),
    Fault("an adapter without a gradient", "llama", Adapters, adapter(_zero_gradient)),
    Fault("an adapter with a gradient of no numbers", "llama", Adapters, adapter(_nan_gradient)),
    Fault("an adapter that its layer goes around", "llama", Adapters, adapter(_bypassed)),
    Fault("an adapter's update twice as large", "llama", AdapterGradients,
          adapter(lambda m: _lora(m).scaling.update(default=2 * _lora(m).scaling["default"]))),
    Fault("a tensor left out of the adapter's file", "llama", Reloaded,
          saved(lambda found: {name: t for name, t in found.items() if name != min(found)})),
    Fault("an adapter's file of other values", "llama", Reloaded,
          saved(lambda found: {name: 1.01 * t for name, t in found.items()})),
    Fault("an update merged twice", "llama", Merged, _merged_twice),
    Fault("a block run again with other positions", "llama", Checkpoints, policy(_no_positions)),
    Fault("a block without its gradient", "llama", Checkpoints, policy(_no_gradient)),
    Fault("a template that drops answers", "llama", Template,
          template(CHATML_TEMPLATE.replace("m.content", "(m.content if m.role == 'user' else 'yes')"))),
    Fault("prompts among the targets", "llama", Template,
          encoded(lambda ids, is_target: (ids, np.ones_like(is_target)))),
    Fault("an end that is no target", "llama", Template,
          encoded(lambda ids, is_target: (ids, is_target & (np.arange(len(ids)) < len(ids) - 4)))),
    Fault("tokens that are not the template's", "llama", Template,
          encoded(lambda ids, is_target: (ids[1:], is_target[1:]))),
]  # fmt: skip

QUICK = {"a head's scale dropped", "a window one wider", "a border of samples gone", "one layer not quantised",
         "an adapter without a gradient", "prompts among the targets"}  # fmt: skip


@pytest.fixture(scope="module")
def subjects() -> Iterator[Callable[[str], Subject]]:
    """Twins by model type, each made once."""
    with ExitStack() as stack:
        made: dict[str, Subject] = {}

        def of(kind: str) -> Subject:
            if kind not in made:
                config = AutoConfig.for_model(kind, **FIELDS.get(kind, {}))
                made[kind] = stack.enter_context(subject_of(config, make_tokenizer(CHATML_TEMPLATE)))
                assert made[kind].expected.loss > 0
            fresh = replace(made[kind], choices=Choices(Chunked(16), attention.choose_padded(made[kind].text)[0]))
            fresh.__dict__["expected"] = made[kind].expected
            return fresh

        yield of


def notices(check: Check, made: Subject) -> tuple[bool, frozenset[str], str]:
    """Whether a check fails, what it chose instead, and what it says."""
    finding = check(made)
    return not finding.holds, frozenset(made.choices.said), finding.detail


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f.name, marks=[] if f.name in QUICK else [pytest.mark.slow]) for f in FAULTS]
)
def test_a_planted_fault_is_noticed(fault, subjects, monkeypatch):
    """The check fails, or chooses something else, with the fault, and does neither without it."""
    made = subjects(fault.kind)
    right = notices(fault.check(), subjects(fault.kind))
    fault.patch(monkeypatch, made)
    wrong = notices(fault.check(), made)
    if fault.kind == "mamba2":  # the model itself is what must not be packed
        assert "packing=none" in wrong[1]
        return
    assert not right[0], right[2]
    assert wrong[0] or wrong[1] - right[1], wrong[2]


def test_there_are_fifty():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 50
