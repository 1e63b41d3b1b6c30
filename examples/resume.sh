#!/usr/bin/env bash
# Stop a run with a signal and resume it, as a batch system does. No sample is lost or used twice.
#
#   examples/resume.sh runs/resumed
set -euo pipefail
run=${1:?expected a folder for the run}
train=(mpirun --oversubscribe -np 3 python -m aladdin_mpi.train)

"${train[@]}" --run-dir "$run" --epochs 20 --checkpoint-every 1000 &
job=$!
for _ in $(seq 600); do # wait for a checkpoint, at most two minutes
    compgen -G "$run/checkpoint/samples-*" >/dev/null && break
    kill -0 "$job"
    sleep 0.2
done
kill -USR1 "$job"
status=0
wait "$job" || status=$?
echo "stopped with status $status" # 75: saved, start me again
"${train[@]}" --resume "$run"
