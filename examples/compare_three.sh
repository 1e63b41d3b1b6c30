#!/usr/bin/env bash
# Three algorithms under equal conditions, eight workers of which one is ten times slower, two seeds
# each: a table, plots and a report. The same command goes on after a stop.
#
#   examples/compare_three.sh comparisons/slow-worker --epochs 10
set -euo pipefail
out=${1:?expected a folder for the results}
shift

exec python -m aladdin_mpi.compare --algorithms aladdin-ahead ar-sgd ad-psgd --seeds 0 1 \
    --workers 8 --jobs 2 --out "$out" -- --slowdown 0=10 "$@"
