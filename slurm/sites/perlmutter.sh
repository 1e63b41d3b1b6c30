# shellcheck shell=bash disable=SC2034
# NERSC Perlmutter: 4 GPUs (A100) and 64 cores a node, Cray MPICH. Submit with
#   sbatch -A PROJECT -C gpu -q regular --gpus-per-node=4 --ntasks-per-node=4 --cpus-per-task=32
# From NERSC's example (github.com/NERSC/nersc-dl-multigpu, submit_batch_modules.sh): 4 tasks per
# node, 32 logical CPUs per task, and the module pytorch. srun must not bind tasks to cores here,
# because the first node also has a server. Each worker is bound to the cores in the memory domain
# of its GPU (3 to 0 for GPU 0 to 3). mpi4py must be built for Cray MPICH.
# Not tested at this site by the authors.

module load pytorch

SRUN_MPI=${SRUN_MPI:-cray_shasta}
SITE_SRUN=(--gpu-bind=none --cpu-bind=none)
SITE_CORES=("48-63,112-127" "32-47,96-111" "16-31,80-95" "0-15,64-79")
# MPI only sees host memory. With 1, which some modules set, Cray MPICH ends the job at start-up
# unless mpi4py is linked to its GPU library ("GTL library is not linked").
export MPICH_GPU_SUPPORT_ENABLED=0
