#!/usr/bin/env bash
# Memory on a real GPU: predicted against real peak of every policy, stages, the allocator's gap, a snapshot's files.
# Any CUDA GPU, at most 4 minutes:   bash tests/gpu/memory.sh
# Without one, a small dry run:      bash tests/gpu/memory.sh --dry
# PYTHON names the interpreter (default: python3); a JSON line a result, and memory.json in $OUT where that is set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
exec timeout 240 "${PYTHON:-python3}" -m tests.gpu.memory "$@"
