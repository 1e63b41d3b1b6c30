#!/usr/bin/env bash
# Checks the package on a machine with a GPU: python -m benchmarks.gpu_check, from any folder.
#
#   tools/gpu-check.sh [--only PART] [--device test]
#
# PYTHON is the interpreter (.venv's if there is one, else python3).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    [ -x "$root/.venv/bin/python" ] && python=$root/.venv/bin/python
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec "$python" -m benchmarks.gpu_check "$@"
