#!/usr/bin/env bash
# Fills a folder with the wheels that prove.sh needs beside torch and transformers, in the lock's versions:
#
#   bash tests/gpu/wheels.sh FOLDER [WITHOUT...]
#
# WITHOUT names packages that the machine is known to have. PYTHON_VERSION is that of the machine (default 3.12), CUDA
# the major version of its torch (default 13): bitsandbytes carries a library a CUDA release, and the others are left
# out of its wheel. PYTHON names the interpreter whose pip is used (default: python3).
set -euo pipefail
folder="${1:?usage: bash tests/gpu/wheels.sh FOLDER [WITHOUT...]}"
shift
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python="${PYTHON:-python3}"
needed=(bitsandbytes hydra-core omegaconf antlr4-python3-runtime accelerate peft psutil pyarrow)
platforms=()
for glibc in 2_28 2_27 2_26 2_24 2_17 2_12; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done

for name in "${needed[@]}"; do
    [[ " $* " != *" $name "* ]] || continue
    row="$(grep -i "^$name==" requirements.lock)"
    if [ "$name" = antlr4-python3-runtime ]; then # a source distribution only: built here, of pure Python
        "$python" -m pip wheel -q --no-deps -w "$folder" "$row"
    else
        "$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp \
            --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" -d "$folder" "$row"
    fi
done

"$python" - "$folder" "${CUDA:-13}" <<'PYTHON'
import pathlib, re, sys, zipfile

folder, cuda = pathlib.Path(sys.argv[1]), sys.argv[2]
for wheel in folder.glob("bitsandbytes-*.whl"):
    slim = wheel.with_suffix(".slim")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(slim, "w", zipfile.ZIP_DEFLATED) as part:
        for entry in whole.infolist():
            if not re.search(rf"/libbitsandbytes_(?!cpu|cuda{cuda})", entry.filename):
                part.writestr(entry, whole.read(entry))
    slim.replace(wheel)
sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(folder.glob("*.whl"))}
for name, size in sizes.items():
    print(f"{size / 2**20:7.2f} MiB  {name}")
total = sum(sizes.values()) / 2**20
print(f"{total:7.2f} MiB  in {folder}")
sys.exit("more than 64 MiB" if total > 64 else 0)
PYTHON
