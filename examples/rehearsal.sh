#!/usr/bin/env bash
# Before asking for nodes: how an algorithm scales on them. Only time and messages are modelled,
# for a model of 94 MB (ResNet-50) whose step takes 0.45 s, with eight workers to a host.
#
#   examples/rehearsal.sh runs/rehearsal aladdin
set -euo pipefail
out=${1:?expected a folder for the runs}
algorithm=${2:?expected an algorithm}

for hosts in 1 2 8; do
    workers=$((8 * hosts))
    python -m aladdin_mpi.simulate --compute timed --compute-time 0.45 --model size:94 \
        --algorithm "$algorithm" --workers $workers --servers $hosts --hosts $hosts --bandwidth-gbit 25 \
        --jitter 0.05 --samples $((640 * workers)) --run-dir "$out/$algorithm-$workers" |
        grep -E "^  (workers |throughput)"
done
