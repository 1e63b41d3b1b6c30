#!/usr/bin/env bash
# Started for each rank: bind it to the cores near its GPU, then become the program.
# ALADDIN_CORES lists those of GPU 0, 1 ...; servers and spare ranks are not bound.
set -euo pipefail

rank=${SLURM_PROCID:-0}
place=${SLURM_LOCALID:-0}
if [ -n "${OMPI_COMM_WORLD_RANK:-}" ]; then # mpirun's ranks see Slurm's numbers of its daemon
    rank=$OMPI_COMM_WORLD_RANK
    place=$OMPI_COMM_WORLD_LOCAL_RANK
fi
if [ "$rank" -ge "$ALADDIN_SERVERS" ] && [ "$rank" -lt "${ALADDIN_TRAINING:-$((rank + 1))}" ]; then
    # Servers come first, on whichever nodes; then the workers, as many on each node.
    if [ -n "${ALADDIN_WORKERS:-}" ]; then
        place=$(((rank - ALADDIN_SERVERS) % ALADDIN_WORKERS))
    fi
    read -ra cores <<<"$ALADDIN_CORES"
    exec taskset -c "${cores[place % ${#cores[@]}]}" "$@"
fi
exec "$@"
