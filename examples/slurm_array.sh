#!/usr/bin/env bash
# Submit a Slurm job array with a task for each algorithm and seed; the last task writes the report.
# Arguments are passed to every run; SBATCH_ARGS holds your site's options.
#
#   SBATCH_ARGS="-p gpu --nodes=2" examples/slurm_array.sh --model resnet20 --epochs 10
set -euo pipefail
export ALGORITHMS=${ALGORITHMS:-aladdin-ahead ar-sgd} SEEDS=${SEEDS:-0 1 2}

read -ra algorithms <<<"$ALGORITHMS"
read -ra seeds <<<"$SEEDS"
read -ra site <<<"${SBATCH_ARGS:-}"
last=$((${#algorithms[@]} * ${#seeds[@]} - 1))
exec sbatch "${site[@]}" --array="0-$last" "$(dirname "$0")/../slurm/compare.sbatch" "$@"
