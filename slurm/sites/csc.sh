# shellcheck shell=bash disable=SC2034
# CSC Puhti and Mahti: 4 GPUs (V100, A100) a node, 40 and 128 cores, Open MPI. Submit with
#   sbatch -A project_ID -p gpu --gres=gpu:v100:4 --ntasks-per-node=4 --cpus-per-task=10 --mem=0
#   sbatch -A project_ID -p gpumedium --gres=gpu:a100:4 --ntasks-per-node=4 --cpus-per-task=32
# From CSC's "Multi-GPU and multi-node machine learning"
# (docs.csc.fi/support/tutorials/ml-multi/): cores in proportion to GPUs, srun with one task
# per GPU, and the module pytorch, which includes mpi4py.
# Not tested at this site by the authors.

module purge
module load pytorch
