"""A finished run's loss on any rows, source by source: the base's beside the trained one's, with intervals.

S: samples of a source. N: targets of a batch. H: hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from trainer.data.batches.batch import collate
from trainer.data.tokens.tokenize import Tokens, TokenSet
from trainer.export.reload import Trained
from trainer.model.precision import Dtypes
from trainer.tracking.console import Screen
from trainer.training.logits import check_logit_map, logit_map

CHUNK = 1024
"""Targets whose logits are made at once."""
RESAMPLES, CONFIDENCE = 1000, 0.95
ALL = "all"


def evaluate_sources(trained: Trained, tokens: Tokens, name: str, row_tokens: int, screen: Screen) -> dict[str, Any]:
    """What evaluation.json says of each source, and of all together where there are several.

    `name`: of a source that has none. Raises ModelError for a model whose logits are not known here.
    """
    check_logit_map(trained.model)
    measured: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    parts = tokens.parts()
    with screen.bar("evaluating", sum(len(part) for part in parts)) as bar:
        done = 0
        for part in parts:
            losses = [sample_losses(trained.model, part, trained.dtypes, row_tokens)]
            if trained.adapted is not None:
                with trained.without_adapter():
                    losses.append(sample_losses(trained.model, part, trained.dtypes, row_tokens))
            measured[part.name or name] = np.stack(losses), part.target_counts
            bar.at(done := done + len(part))
    if len(measured) > 1:
        sums, counts = zip(*measured.values(), strict=True)
        measured[ALL] = np.concatenate(sums, axis=1), np.concatenate(counts)
    return {source: summarised(sums, counts) for source, (sums, counts) in measured.items()}


@torch.no_grad()
def sample_losses(model: PreTrainedModel, tokens: TokenSet, dtypes: Dtypes, row_tokens: int) -> np.ndarray:
    """(S,) fp64: each sample's summed cross-entropy over its targets, in padded batches of up to `row_tokens`."""
    model.eval()
    device = next(model.parameters()).device
    head, mapped = model.get_output_embeddings(), logit_map(model.config)
    sums = np.zeros(len(tokens))
    for rows in by_length(tokens.lengths, row_tokens):
        batch = collate(tokens, rows, packed=False).to(device)
        labels = batch.labels.flatten()[batch.target_index]  # (N,)
        with dtypes.autocast():
            hidden = model.get_decoder()(**batch.inputs()).last_hidden_state.flatten(0, 1)[batch.target_index]  # (N, H)
            losses = [
                torch.nn.functional.cross_entropy(mapped(head(h).float()), y, reduction="none")
                for h, y in zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
            ]
        own = torch.zeros(len(rows), dtype=torch.float64, device=device)
        own.index_add_(0, batch.target_index // batch.input_ids.shape[1], torch.cat(losses).double())
        sums[rows] = own.cpu().numpy()
    return sums


def by_length(lengths: np.ndarray, row_tokens: int) -> Iterator[np.ndarray]:
    """Samples of like length together: rows times the longest are at most `row_tokens`, or one row alone."""
    order = np.argsort(lengths, kind="stable")
    start = 0
    for stop in range(1, len(order) + 1):
        if stop == len(order) or int(lengths[order[stop]]) * (stop + 1 - start) > row_tokens:
            yield order[start:stop]
            start = stop


def summarised(sums: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """Token-weighted losses of one source: sums (1 or 2, S), the base's last; counts (S,) targets.

    Intervals: percentiles of the bootstrap over samples (Efron 1979); the base's less the trained one's is paired.
    """
    rows = {"trained": sums[0]}
    if len(sums) > 1:
        rows |= {"base": sums[1], "gain": sums[1] - sums[0]}
    rng, stacked, size = np.random.default_rng(0), np.stack(list(rows.values())), len(counts)
    drawn = np.empty((RESAMPLES, len(rows)))
    for k in range(RESAMPLES):
        chosen = rng.integers(size, size=size)
        drawn[k] = stacked[:, chosen].sum(1) / counts[chosen].sum()
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(drawn, [tail, 100 - tail], axis=0)
    found: dict[str, Any] = {"num_samples": size, "num_targets": int(counts.sum())}
    for k, (name, values) in enumerate(rows.items()):
        loss = float(values.sum() / counts.sum())
        found[name] = {"loss": loss, "loss_low": float(low[k]), "loss_high": float(high[k])}
        if name != "gain":
            found[name] |= {"perplexity": _exp(loss), "perplexity_low": _exp(low[k]), "perplexity_high": _exp(high[k])}
    return found


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def rows_of(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """For the screen: source, samples, targets, and losses with their intervals and perplexities."""
    for source, one in found.items():
        cells = [source, f"{one['num_samples']:,}", f"{one['num_targets']:,}"]
        for name in ("base", "trained"):
            known = one.get(name)
            cells.append("-" if known is None else f"{_span(known)}, perplexity {known['perplexity']:.2f}")
        yield *cells, _span(one["gain"]) if "gain" in one else "-"


def _span(one: dict[str, float]) -> str:
    return f"{one['loss']:.4f} [{one['loss_low']:.4f}, {one['loss_high']:.4f}]"


HEADER = ("source", "samples", "targets", "loss of the base", "of the trained model", "gain")
