#!/usr/bin/env bash
# Estimate how an algorithm scales before requesting nodes. Only time and messages are simulated,
# for a model of 94 MB (ResNet-50) with steps of 0.45 s, and eight workers per host.
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
