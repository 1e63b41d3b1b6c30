# shellcheck shell=bash disable=SC2034
# OLCF Frontier: 8 GPUs (GCDs of MI250X) and 56 usable cores a node, Cray MPICH. Submit with
#   sbatch -A PROJECT -p batch --gpus-per-node=8 --ntasks-per-node=8 --cpus-per-task=7 --exclusive
# From "PyTorch on Frontier" (docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html):
# modules, srun as the launcher, the cores near each GPU (as with `--gpu-bind=closest` and -c7),
# MIOpen's cache, and mpi4py built with MPICC="cc -shared" and rocm unloaded.
# OLCF recommends copying the environment to the nodes' NVMe with sbcast; set PYTHON accordingly.
# Not tested at this site by the authors.

module load PrgEnv-gnu/8.7.0 cpe/26.03 miniforge3/23.11.0-0 rocm/7.1.1 craype-accel-amd-gfx90a
export LD_LIBRARY_PATH="$CRAY_LD_LIBRARY_PATH:${LD_LIBRARY_PATH:-}"

SRUN_MPI=${SRUN_MPI:-cray_shasta}
INTERFACE=${INTERFACE:-hsn0}
# Workers see all GPUs of their node and use the one with their number.
SITE_SRUN=(--gpu-bind=none --cpu-bind=none)
SITE_CORES=(49-55 57-63 17-23 25-31 1-7 9-15 33-39 41-47)
export MIOPEN_USER_DB_PATH="/tmp/miopen-$USER" MIOPEN_CUSTOM_CACHE_DIR="/tmp/miopen-$USER"
# MPI only sees host memory. With 1, which some modules set, Cray MPICH ends the job at start-up
# unless mpi4py is linked to its GPU library ("GTL library is not linked").
export MPICH_GPU_SUPPORT_ENABLED=0
