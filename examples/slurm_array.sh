#!/usr/bin/env bash
# A job array under Slurm: each algorithm with each seed is a task, and the last one writes the
# report. What follows the script's name goes to every run; SBATCH_ARGS are your site's options.
#
#   SBATCH_ARGS="-p gpu --nodes=2" examples/slurm_array.sh --model resnet20 --epochs 10
set -euo pipefail
export ALGORITHMS=${ALGORITHMS:-aladdin-ahead ar-sgd} SEEDS=${SEEDS:-0 1 2}

read -ra algorithms <<<"$ALGORITHMS"
read -ra seeds <<<"$SEEDS"
read -ra site <<<"${SBATCH_ARGS:-}"
last=$((${#algorithms[@]} * ${#seeds[@]} - 1))
exec sbatch "${site[@]}" --array="0-$last" "$(dirname "$0")/../slurm/compare.sbatch" "$@"
