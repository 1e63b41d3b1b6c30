# shellcheck shell=bash disable=SC2034
# JSC JUWELS Booster: 4 GPUs (A100) and 48 cores a node, Open MPI or ParaStationMPI. Submit with
#   sbatch -A PROJECT -p booster --gres=gpu:4 --ntasks-per-node=4 --cpus-per-task=12
# GPUs 0 to 3 are on the memory domains 3, 1, 7 and 5 (co-design.pop-coe.eu, "GPU affinity on one
# node with 4 GPUs (JUWELS Booster)"). By default, PSSlurm binds each task to the cores near one GPU
# and hides the others. srun must do neither here, because the first node also has servers.
# For ParaStationMPI, set SRUN_MPI=pspmi. mpi4py must match the loaded MPI.
# Not tested at this site by the authors.

module load GCC OpenMPI mpi4py PyTorch

SRUN_MPI=${SRUN_MPI:-pspmix}
INTERFACE=${INTERFACE:-ib0}
SITE_SRUN=(--gpu-bind=none --cpu-bind=none)
SITE_CORES=("18-23,66-71" "6-11,54-59" "42-47,90-95" "30-35,78-83")
