#!/usr/bin/env bash
# Every CUDA path against its slow twin, then Llama-3-8B QLoRA (random weights, no download) at 2,048, 8,192 and 32,768
# tokens a row under each policy: tokens/s, MFU, peaks beside the predicted one, syncs; then TRL and unsloth on the same
# weights. Any CUDA GPU with 24 GB, at most 8 minutes:   bash tests/gpu/bench.sh
# Without one, a small dry run:                          bash tests/gpu/bench.sh --dry
# PYTHON names the interpreter (default: python3), TRAINER_PEERS that of TRL and unsloth (default: the same); a JSON line
# a result, and results.json in $OUT where that is set. What does not fit in the time is named in a line of its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
exec timeout 480 "${PYTHON:-python3}" -m tests.gpu.bench "$@"
