#!/usr/bin/env bash
# Makes the environment if it is missing or requirements.lock has changed, then runs the trainer in it.
#
#   ./launch.sh [ARGS]              python -m trainer ARGS; without ARGS: recipe=quickstart
#   ./launch.sh test [PYTEST ARGS]  the tests
#
# PYTHON=/path/to/python           makes the environment with that interpreter (3.11 or newer)
# TRAINER_PYTHON=/path/to/python   runs in that interpreter's own environment and installs nothing
#
# Exit codes are the program's; 2 if the environment cannot be made. What set-up says goes to stderr.
# Written for bash 3.2 (macOS) and without tools that a bare machine may lack.
set -euo pipefail

# The folder of this file, whatever symlinks lead here.
here="${BASH_SOURCE[0]}"
while [ -L "$here" ]; do
    target="$(readlink "$here")"
    case "$target" in
        /*) here="$target" ;;
        *) here="$(dirname "$here")/$target" ;;
    esac
done
ROOT="$(cd "$(dirname "$here")" && pwd -P)"
VENV="$ROOT/.venv"
STAMP="$VENV/setup.stamp" # what the environment was made from; "unfinished" while it is being made
LOG="$VENV/setup.log"

say() { printf 'set-up: %s\n' "$*" >&2; }

fail() {
    say "$1"
    shift
    [ $# -eq 0 ] || printf '        %s\n' "$@" >&2
    exit 2
}

python_version() { "$1" -ISc 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

is_recent() { "$1" -ISc 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# All that the environment depends on, as text. A moved folder counts: a virtual environment holds absolute paths.
wanted_stamp() {
    printf '%s\npython %s\n%s\n%s\n' "$ROOT" "$1" "$(<"$ROOT/requirements.lock")" "$(<"$ROOT/pyproject.toml")"
}

is_ready() {
    [ -f "$STAMP" ] && [ -x "$VENV/bin/python" ] &&
        [ "$(<"$STAMP")" = "$(wanted_stamp "$(python_version "$VENV/bin/python")")" ]
}

# Prints the first Python that is recent enough and can make virtual environments.
find_python() {
    local candidate without_venv=""
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
        if ! command -v "$candidate" >/dev/null 2>&1 || ! is_recent "$candidate"; then
            [ "$candidate" != "${PYTHON:-}" ] || say "PYTHON=$PYTHON is not a Python 3.11 or newer; looking for another"
            continue
        fi
        if "$candidate" -Ic 'import ensurepip, venv' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        without_venv="${without_venv:-$candidate}"
    done
    [ -z "$without_venv" ] || fail \
        "$without_venv cannot make virtual environments: its venv module is missing." \
        "Debian, Ubuntu: apt install python$(python_version "$without_venv")-venv" \
        "Or name another one: PYTHON=/path/to/python3.12 ./launch.sh"
    fail "no Python 3.11 or newer found (tried ${PYTHON:+$PYTHON, }python3, python3.13, python3.12, python3.11)." \
        "Install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python)," \
        "or name it: PYTHON=/path/to/python3.12 ./launch.sh"
}

# Runs a step in the background with its output in LOG, so that a signal ends it at once and a terminal sees what
# it does.
run() {
    local pid status=0 start=$SECONDS columns
    columns="$(tput cols 2>/dev/null || echo 80)"
    "$@" >>"$LOG" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2>/dev/null; exit 130' INT
    trap 'kill "$pid" 2>/dev/null; exit 143' TERM
    while [ -t 2 ] && kill -0 "$pid" 2>/dev/null; do
        printf '\r\033[K%.*s' "$((columns - 1))" "  $((SECONDS - start)) s  $(tail -n 1 "$LOG")" >&2
        sleep 1
    done
    wait "$pid" || status=$?
    trap - INT TERM
    [ ! -t 2 ] || printf '\r\033[K' >&2
    [ "$status" -eq 0 ] && return
    say "$* failed with code $status. The end of $LOG:"
    tail -n 15 "$LOG" >&2
    fail "the environment is not complete." \
        "Put right what is named above (network, disk space, proxy), then run the same command again."
}

# PEP 517 for the one source distribution in the lock: old pips would run its setup.py instead.
run_pip() {
    PIP_USER=0 PIP_USE_PEP517=1 PIP_DISABLE_PIP_VERSION_CHECK=1 run "$VENV/bin/python" -m pip --no-input "$@"
}

# Empties .venv but for the stamp, which says "unfinished" from before to after: a half-emptied folder is not
# mistaken for the user's.
clear_environment() {
    local entry
    mkdir -p "$VENV"
    echo unfinished >"$STAMP"
    for entry in "$VENV"/* "$VENV"/.[!.]*; do
        [ "$entry" = "$STAMP" ] || rm -rf "$entry"
    done
}

make_environment() {
    local python start=$SECONDS clear=""
    if [ ! -x "$VENV/bin/python" ] || ! is_recent "$VENV/bin/python"; then
        # A .venv whose Python works but is too old is somebody's own; one that cannot run is nobody's.
        [ -z "$(python_version "$VENV/bin/python")" ] || fail \
            "$VENV is Python $(python_version "$VENV/bin/python"); the trainer needs 3.11 or newer." \
            "Move it away or delete it, then run the same command again."
        clear=1
    elif [ -f "$STAMP" ]; then
        # Left half-made, or made elsewhere or for another Python: from scratch. Only the lock changed: on top.
        case "$(<"$STAMP")" in
            "$ROOT"$'\n'"python $(python_version "$VENV/bin/python")"$'\n'*) ;;
            *) clear=1 ;;
        esac
    fi
    if [ -n "$clear" ]; then
        python="$(find_python)" || exit $?
        say "[1/3] virtual environment in $VENV with Python $(python_version "$python")"
        clear_environment
        run "$python" -m venv "$VENV"
    else
        say "[1/3] the virtual environment in $VENV is there"
        echo unfinished >"$STAMP"
        : >"$LOG"
        "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || run "$VENV/bin/python" -m ensurepip
    fi
    say "[2/3] $(grep -c "^[^#]*==" "$ROOT/requirements.lock") packages of requirements.lock; the first time takes minutes"
    # torch's hash depends on its build: the rest by hash and without dependencies, then torch with those it brings.
    grep -v '^torch==' "$ROOT/requirements.lock" >"$VENV/hashed.lock" || true
    run_pip install --require-hashes --no-deps -r "$VENV/hashed.lock"
    run_pip install $(grep '^torch==' "$ROOT/requirements.lock")
    say "[3/3] the trainer itself"
    run_pip install --no-deps --no-build-isolation --editable "$ROOT"
    wanted_stamp "$(python_version "$VENV/bin/python")" >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    say "ready after $((SECONDS - start)) s"
}

# One launch makes the environment; others wait for it. The lock goes with the process that holds it.
make_environment_alone() {
    if command -v flock >/dev/null 2>&1; then
        exec 9<>"$ROOT/requirements.lock"
        if ! flock -n 9; then
            say "another launch is making the environment; waiting for it"
            flock 9 || say "waiting failed; going on"
        fi
        is_ready || make_environment
        exec 9>&- # or the program would hold it
    else
        make_environment
    fi
}

if [ -n "${TRAINER_PYTHON:-}" ]; then
    PY="$(command -v "$TRAINER_PYTHON")" || fail "TRAINER_PYTHON=$TRAINER_PYTHON is not a program that can be run." \
        "Give the path of a Python that has the trainer's dependencies, or unset it to have them installed."
    case "$PY" in /*) ;; *) PY="$PWD/$PY" ;; esac
else
    is_ready || make_environment_alone
    PY="$VENV/bin/python"
fi

# This trainer and no other, here and in every process it starts; what lies in the caller's folder cannot stand
# in for a module (a trainer.py or a datasets/ beside the user's data).
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1

# Growing segments instead of fixed ones: less memory lost to fragments. CUDA on Linux only.
if [ -z "${PYTORCH_ALLOC_CONF+x}${PYTORCH_CUDA_ALLOC_CONF+x}" ] && [[ "$OSTYPE" == linux* ]] &&
    { [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null 2>&1; }; then
    export PYTORCH_ALLOC_CONF=expandable_segments:True
fi

if [ "${1:-}" != test ]; then
    [ $# -gt 0 ] || set -- recipe=quickstart
    exec "$PY" -m trainer "$@"
fi

# pytest finds its settings in the repository, so it runs there. A path that exists where the caller stands is
# made absolute; any other argument is passed as it is.
shift
if [ "$PWD" != "$ROOT" ]; then
    for argument in "$@"; do
        shift
        case "$argument" in
            /* | -*) ;;
            *) [ ! -e "${argument%%::*}" ] || argument="$PWD/$argument" ;;
        esac
        set -- "$@" "$argument"
    done
    cd "$ROOT"
fi
exec "$PY" -m pytest "$@"
