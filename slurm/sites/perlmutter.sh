# shellcheck shell=bash disable=SC2034
# NERSC Perlmutter: 4 GPUs (A100) and 64 cores a node, Cray MPICH. Submit with
#   sbatch -A PROJECT -C gpu -q regular --gpus-per-node=4 --ntasks-per-node=4 --cpus-per-task=32
# From NERSC's own example (github.com/NERSC/nersc-dl-multigpu, submit_batch_modules.sh): 4 tasks
# a node, 32 logical CPUs a task, the module pytorch. srun must not bind tasks to cores here, since
# the server of the first node comes on top of them. mpi4py must be the one for Cray MPICH.
# Not tried there by the authors.

module load pytorch

SRUN_MPI=${SRUN_MPI:-cray_shasta}
SITE_SRUN=(--gpu-bind=none --cpu-bind=none)
