#!/usr/bin/env bash
# Compare three algorithms with two seeds each: eight workers, one of them ten times slower. Writes
# a table, plots and a report. Rerun the same command to resume.
#
#   examples/compare_three.sh comparisons/slow-worker --epochs 10
set -euo pipefail
out=${1:?expected a folder for the results}
shift

exec python -m aladdin_mpi.compare --algorithms aladdin-ahead ar-sgd ad-psgd --seeds 0 1 \
    --workers 8 --jobs 2 --out "$out" -- --slowdown 0=10 "$@"
