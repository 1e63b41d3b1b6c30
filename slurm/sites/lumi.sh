# shellcheck shell=bash disable=SC2034
# LUMI-G: 8 GPUs (GCDs of MI250X) and 63 usable cores a node, Cray MPICH. Submit with
#   sbatch -A project_ID -p standard-g --gpus-per-node=8 --ntasks-per-node=8 --cpus-per-task=7
# From the LUMI user guide, "LUMI-G example batch scripts"
# (docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/lumig-job/): the masks for cores near
# GPU 0, 1 ... are mask_cpu:7e000000000000,7e00000000000000,7e0000,7e000000,7e,7e00,7e00000000,
# 7e0000000000, without the first and last core of each eight. LUMI requeues jobs after a node
# failure, and they resume with --resume auto.
# Load your environment's modules, or set PYTHON to a wrapper that enters your container.
# Not tested at this site by the authors.

module load LUMI partition/G

SRUN_MPI=${SRUN_MPI:-cray_shasta}
INTERFACE=${INTERFACE:-hsn0}
SITE_SRUN=(--gpu-bind=none --cpu-bind=none)
SITE_CORES=(49-54 57-62 17-22 25-30 1-6 9-14 33-38 41-46)
# MPI only sees host memory. With 1, which some modules set, Cray MPICH ends the job at start-up
# unless mpi4py is linked to its GPU library ("GTL library is not linked").
export MPICH_GPU_SUPPORT_ENABLED=0
