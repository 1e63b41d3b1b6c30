#!/usr/bin/env bash
# A cluster that you do not have: real training of 16 workers on four hosts, one of them ten times
# slower, in virtual time, in one process. Options behind the script's name go to the simulation.
#
#   examples/simulate_cluster.sh --algorithm ar-sgd --run-dir runs/slow-ar-sgd
set -euo pipefail

exec python -m aladdin_mpi.simulate --workers 16 --hosts 4 --bandwidth-gbit 10 --slowdown 0=10 "$@"
