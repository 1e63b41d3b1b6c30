#!/usr/bin/env bash
# Check the package on a machine with a GPU. Runs python -m benchmarks.gpu_check from any folder.
#
#   tools/gpu-check.sh [--bundle FOLDER] [--only PART] [--device test]
#
# PYTHON is the interpreter (default: .venv's, or python3). --bundle must come first. It names a
# folder written by `make gpu-check-bundle`: the dependencies for a machine that has Python 3.12,
# torch and torchvision, but no network access. Nothing is installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

fail() {
    printf 'gpu-check: %s\n' "$@" >&2
    exit 2
}

bundle=
if [ "${1:-}" = --bundle ]; then
    [ -f "${2:-}/lib/libmpi.so.40" ] ||
        fail "--bundle: expected a folder written by 'make gpu-check-bundle', got '${2:-}'."
    bundle=$(cd "$2" && pwd)
    shift 2
fi

python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    [ -z "$bundle" ] && [ -x "$root/.venv/bin/python" ] && python=$root/.venv/bin/python
fi

if [ -n "$bundle" ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' ||
        fail "the bundle is for Python 3.12; '$python' is $("$python" --version 2>&1)." \
            "Select another one: PYTHON=python3.12 tools/gpu-check.sh --bundle FOLDER"
    export PATH=$bundle/bin:$PATH PYTHONPATH=$bundle${PYTHONPATH:+:$PYTHONPATH}
    # Compile each module once, but not into the bundle.
    export MPI4PY_LIBMPI=$bundle/lib/libmpi.so.40
    export PYTHONPYCACHEPREFIX=${TMPDIR:-/tmp}/gpu-check-bytecode
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec "$python" -m benchmarks.gpu_check "$@"
