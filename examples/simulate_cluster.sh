#!/usr/bin/env bash
# Simulate training with real gradients in one process: 16 workers on four hosts, one worker ten
# times slower. Arguments are passed to the simulation.
#
#   examples/simulate_cluster.sh --algorithm ar-sgd --run-dir runs/slow-ar-sgd
set -euo pipefail

exec python -m aladdin_mpi.simulate --workers 16 --hosts 4 --bandwidth-gbit 10 --slowdown 0=10 "$@"
