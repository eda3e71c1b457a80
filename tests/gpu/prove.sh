#!/usr/bin/env bash
# All that only a card can show, in 9 minutes at most, on a machine with torch and transformers and no network:
#
#   bash tests/gpu/wheels.sh WHEELS           where there is a network: what else is needed, 64 MiB at most
#   bash tests/gpu/prove.sh WHEELS [PART...]  on the machine; without PART all of them, in order of worth
#   bash tests/gpu/prove.sh WHEELS --dry      small, on a CPU
#
# A wheel whose package is there already is not installed. Each result is a JSON line of $OUT/prove.jsonl (without OUT:
# a new folder, named at the end) as soon as it is known, and a part that fails or runs out of time does not end the
# rest; its output is in $OUT/PART.log. PYTHON names the interpreter (default: python3), PROVE_SECONDS the time (525),
# TRAINER_PEERS the interpreter of TRL and unsloth. The exit code is 1 where something failed or differs.
set -euo pipefail
started=$SECONDS
wheels="$(cd "${1:?usage: bash tests/gpu/prove.sh WHEELS [--dry] [PART...]}" && pwd)"
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python="${PYTHON:-python3}"
export OUT="${OUT:-$(mktemp -d)}"
site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT

missing="$("$python" - "$wheels" <<'PYTHON'
import importlib.metadata, pathlib, sys

for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    try:
        importlib.metadata.version(wheel.name.split("-")[0])
    except importlib.metadata.PackageNotFoundError:
        print(wheel)
PYTHON
)"
if [ -n "$missing" ]; then
    xargs -d '\n' "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" <<<"$missing"
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
export PROVE_SECONDS=$((${PROVE_SECONDS:-525} - (SECONDS - started)))
"$python" -m tests.gpu.prove "$@"
