#!/usr/bin/env bash
# Offloading on CUDA: gradients against resident twins, overlap by events, a 70B's blocks at reduced depth, the longest
# row of an 8B at full depth (random weights, no download).
# Any CUDA GPU of 24 GB, at most 5 minutes:   bash tests/gpu/offload.sh
# Without one, a small dry run:               bash tests/gpu/offload.sh --dry
# PYTHON names the interpreter (default: python3); a JSON line a result, and offload.json in $OUT where that is set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
exec timeout 300 "${PYTHON:-python3}" -m tests.gpu.offload "$@"
