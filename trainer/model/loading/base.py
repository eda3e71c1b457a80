"""From a model's configuration to its frozen, quantised base on the device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from trainer.errors import ModelError
from trainer.model.adapters import decoder_linears
from trainer.model.families import check_unread, in_whole, text_config
from trainer.model.int8 import keep_no_inputs
from trainer.model.loading import hub
from trainer.model.loading.architecture import building, check_fields, loading, skeleton, written_config
from trainer.model.loading.assemble import Fill, FromFiles, assemble, at_random
from trainer.model.loading.folder import CONFIG, check_folder, own_code, read_json, weight_files
from trainer.model.loading.model_source import ModelSource
from trainer.model.loading.quantized_cache import through_cache
from trainer.model.loading.rope import scaled
from trainer.model.mixtures import decoder_experts
from trainer.model.model_settings import Weights
from trainer.model.precision import Dtypes
from trainer.resources import resolve

if TYPE_CHECKING:
    from trainer.model.model_settings import Model
    from trainer.model.quant import Quant


def find(model: Model) -> ModelSource:
    """The model's folder, its configuration and tokenizer in it; weights may still be on the hub.

    Raises ModelError for what is not there, or not to be loaded: pickled weights, an index that leads out of the
    folder, code of its own.
    """
    path = resolve(model.path)
    asked = f"model.path={model.path}"
    looks_local = path.startswith((".", "/", "~")) or Path(path).exists() or path.count("/") > 1
    if looks_local:
        source = ModelSource(Path(os.path.abspath(os.path.expanduser(path))), asked, None)
        check_folder(source.folder, asked)
    else:
        found = hub.snapshot(path, model.revision)
        source = ModelSource(found.folder, asked, found)
        hub.check_space(found, weight_files(found.folder, asked))
    _check_code(model, source)
    return source


def load_tokenizer(model: Model) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with its chat template. Raises ModelError."""
    folder = Path(resolve(model.random_tokenizer)) if model.weights is Weights.random else find(model).folder
    with building(f"model.path={model.path}: the tokenizer cannot be loaded"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=model.trust_remote_code)


def load_config(model: Model) -> PretrainedConfig:
    """The text decoder's architecture, from the recipe (weights=random) or the model's config.json."""
    if model.weights is Weights.random:
        return scaled(text_config(written_config(model.architecture), "model.architecture")[0], model)
    source = find(model)
    config = scaled(text_config(_own_config(model, source), source.asked)[0], model)
    config._commit_hash = source.commit
    return config


def whole_config(model: Model) -> PretrainedConfig:
    """What the model's config.json says, of all of it. Raises ModelError."""
    return _own_config(model, find(model))


def decoder_in_whole(model: Model) -> str | None:
    """Name of the text decoder in what `AutoModelForCausalLM` builds of a folder that holds more than one."""
    if model.weights is Weights.random:
        return None
    return in_whole(_own_config(model, find(model)))


def adapter_keys(model: Model) -> dict[str, str] | None:
    """How keys of a result's adapter are renamed for the text decoder alone (PEFT's key_mapping)."""
    source = find(model)
    own = _own_config(model, source)
    return None if in_whole(own) is None else text_config(own, source.asked)[1]


def planned_config(model: Model) -> PretrainedConfig:
    """The architecture without a connection: the model's config.json if it is here, else the recipe's block."""
    if model.weights is Weights.pretrained:
        path = resolve(model.path)
        if Path(path).expanduser().exists() or path.startswith((".", "/", "~")):
            return load_config(model)
        cached = try_to_load_from_cache(path, "config.json", revision=model.revision)
        if isinstance(cached, str):
            asked = f"model.path={model.path}"
            return scaled(text_config(_read_config(Path(cached).parent, asked), asked)[0], model)
        if not model.architecture:
            raise ModelError(
                f"model.path={model.path}: its config.json is not here, and the configuration holds no architecture to "
                f"plan with. Fetch it (hf download {model.path} config.json), or pick an option of model that has one"
            )
    return scaled(text_config(written_config(model.architecture), "model.architecture")[0], model)


def differences(model: Model, config: PretrainedConfig) -> str | None:
    """One line where a pretrained model is not what the recipe's architecture block says; its config.json counts."""
    if model.weights is Weights.random or not model.architecture:
        return None
    written = written_config(model.architecture).get_text_config()
    fields = model.architecture.get("text_config", model.architecture)
    pairs = [(key, getattr(written, key, None), getattr(config, key, None)) for key in fields if key != "model_type"]
    other = [f"{key} {theirs} (recipe: {ours})" for key, ours, theirs in pairs if ours != theirs]
    if written.model_type != config.model_type:
        other = [f"model_type {config.model_type} (recipe: {written.model_type})"]
    if not other:
        return None
    return f"{model.path} is not the architecture in the recipe; its own counts: {', '.join(other)}"


def load_base(
    model: Model,
    config: PretrainedConfig,
    quant: Quant,
    dtypes: Dtypes,
    device: torch.device,
    attention: str,
    before: Fill | None = None,
) -> PreTrainedModel:
    """The base model, quantised while it is loaded or made, on `device`; `before` sees each module before that."""
    if model.weights is Weights.random:
        base = assemble(config, quant, dtypes, device, attention, at_random, before=before)
    elif before is not None or (quant.stores_4bit and decoder_experts(skeleton(config, model.trust_remote_code))):
        source = find(model)
        base = assemble(config, quant, dtypes, device, attention, from_files(model, source), before=before)
        quant.mark(base)  # PEFT picks its layers by it
        named(base, source)
    else:
        base = _pretrained_base(model, config, quant, dtypes, device, attention)
    return settled(base)


def settled(base: PreTrainedModel) -> PreTrainedModel:
    """The same model, as every run wants it."""
    for module in base.modules():
        # On CPUs with AVX512-BF16 bitsandbytes would repack a 4-bit weight in its first evaluation pass.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    keep_no_inputs(base)
    base.config.use_cache = False
    return base


def _pretrained_base(
    model: Model, config: PretrainedConfig, quant: Quant, dtypes: Dtypes, device: torch.device, attention: str
) -> PreTrainedModel:
    source = find(model)
    if not model.quantized_cache:
        return _from_files(model, source, config, quant, dtypes, device, attention)
    with loading(f"{source.asked}: the quantised cache cannot be used"):
        base = through_cache(
            source,
            config,
            quant.config(dtypes.compute),
            dtypes.compute,
            device,
            attention,
            lambda: _from_files(model, source, config, quant, dtypes, device, attention),
        )
    return named(base, source)


def _from_files(
    model: Model,
    source: ModelSource,
    config: PretrainedConfig,
    quant: Quant,
    dtypes: Dtypes,
    device: torch.device,
    attention: str,
) -> PreTrainedModel:
    _fetch(source)
    own = _own_config(model, source)
    shape = skeleton(config, model.trust_remote_code)
    _fill(model, source, shape).check_shapes(shape)
    quantization = quant.config(dtypes.compute)
    with loading(f"{source.asked}: the weights cannot be loaded"):
        base, report = AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=config,
            dtype=dtypes.compute,
            quantization_config=quantization,
            device_map={"": device},
            attn_implementation=attention,
            use_safetensors=True,
            key_mapping=text_config(own, source.asked)[1],
            trust_remote_code=model.trust_remote_code,
            output_loading_info=True,
        )
    missing = sorted(report["missing_keys"])
    if missing:  # transformers fills them with random numbers and goes on
        raise ModelError(
            f"{source.asked}: the weights do not belong to this architecture ({config.model_type}): {len(missing)} "
            f"parameters are not in the files, such as {missing[0]}."
        )
    check_unread(report["unexpected_keys"], own.model_type, type(base), source.asked)
    if quantization is None:  # transformers does not know it: the option makes its layers itself
        for name in decoder_linears(base):
            parent, _, child = name.rpartition(".")
            holder = base.get_submodule(parent)
            setattr(holder, child, quant.linear(getattr(holder, child), dtypes.compute, device))
    return named(base, source)


def _fetch(source: ModelSource) -> None:
    """Downloads the weights of a model on the hub."""
    if source.hub is not None:
        hub.download_weights(source.hub, weight_files(source.folder, source.asked))
        check_folder(source.folder, source.asked)


def from_files(model: Model, source: ModelSource) -> FromFiles:
    """What fills modules one by one from the model's files, where the base is never whole on the device."""
    _fetch(source)
    own = _own_config(model, source)
    shape = skeleton(text_config(own, source.asked)[0], model.trust_remote_code)
    fill = _fill(model, source, shape)
    fill.check_shapes(shape)
    check_unread(fill.unread(shape), own.model_type, type(shape), source.asked)
    return fill


def _fill(model: Model, source: ModelSource, shape: PreTrainedModel) -> FromFiles:
    renamed = text_config(_own_config(model, source), source.asked)[1]
    return FromFiles(source.folder, weight_files(source.folder, source.asked), renamed, source.asked, shape)


def named(base: PreTrainedModel, source: ModelSource) -> PreTrainedModel:
    """What the adapter's files name as its base is the hub's model or the user's folder, never one of a cache."""
    base.name_or_path = base.config._name_or_path = source.hub.path if source.hub is not None else str(source.folder)
    return base


def _own_config(model: Model, source: ModelSource) -> PretrainedConfig:
    return _read_config(source.folder, source.asked, model.trust_remote_code)


def _read_config(folder: Path, asked: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration in a folder's config.json. Raises ModelError."""
    check_fields(read_json(folder / CONFIG, asked), f"{asked}: {CONFIG}")
    with building(f"{asked}: {CONFIG} cannot be loaded"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        config._attn_implementation = None  # the run's to choose; a name of the hub's would fetch and run its kernels
    return config


def _check_code(model: Model, source: ModelSource) -> None:
    """Raises ModelError for a model that brings code of its own, unless the command line asks for it by commit."""
    files = own_code(source.folder, source.asked)
    if not files or model.trust_remote_code:
        return
    known = read_json(source.folder / CONFIG, source.asked).get("model_type") in CONFIG_MAPPING_NAMES
    raise ModelError(
        f"{source.asked}: brings Python code of its own (auto_map in {' and '.join(files)}), which is not run. "
        + ("transformers knows this architecture itself: take auto_map out of a local copy. " if known else "")
        + "To run that code after reading it: model.trust_remote_code=true model.revision=COMMIT, on the command line."
    )
