#!/usr/bin/env bash
# Every CUDA path against its slow twin, then Llama-3-8B QLoRA (random weights, no download) a policy and row length.
# Any CUDA GPU, at most 8 minutes:   bash tests/gpu/bench.sh
# Without one, a small dry run:      bash tests/gpu/bench.sh --dry
# PYTHON names the interpreter (default: python3); a JSON line a result, and results.json in $OUT where that is set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
exec timeout 480 "${PYTHON:-python3}" -m tests.gpu.bench "$@"
