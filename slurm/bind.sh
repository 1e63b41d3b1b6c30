#!/usr/bin/env bash
# Bind a rank to the cores near its GPU, then exec the program. Started once per rank.
# ALADDIN_CORES lists the cores of GPU 0, 1 ...; servers and spare ranks are not bound.
set -euo pipefail

rank=${SLURM_PROCID:-0}
place=${SLURM_LOCALID:-0}
if [ -n "${OMPI_COMM_WORLD_RANK:-}" ]; then # under mpirun, Slurm's numbers are those of its daemon
    rank=$OMPI_COMM_WORLD_RANK
    place=$OMPI_COMM_WORLD_LOCAL_RANK
fi
if [ "$rank" -ge "$ALADDIN_SERVERS" ] && [ "$rank" -lt "${ALADDIN_TRAINING:-$((rank + 1))}" ]; then
    # Servers have the first ranks, on any node; then come the workers, equally many per node.
    if [ -n "${ALADDIN_WORKERS:-}" ]; then
        place=$(((rank - ALADDIN_SERVERS) % ALADDIN_WORKERS))
    fi
    read -ra cores <<<"$ALADDIN_CORES"
    exec taskset -c "${cores[place % ${#cores[@]}]}" "$@"
fi
exec "$@"
