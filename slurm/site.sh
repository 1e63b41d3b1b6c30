# shellcheck shell=bash disable=SC2034
# What differs by site, in one place. The batch scripts source it; so it may set anything for the
# ranks. ALADDIN_SITE names the profile, a file of slurm/sites; `generic` is the default:
#
#   ALADDIN_SITE=lumi sbatch --account=project_1 --partition=standard-g slurm/train.sbatch ...
#
# A profile may set these. What stands in the environment when the job is submitted goes over it,
# but for the lists.
#   PYTHON          the interpreter of the environment that has aladdin_mpi
#   LAUNCHER        srun, or mpirun inside the allocation
#   SRUN_MPI        how srun starts MPI; `srun --mpi=list` says what the site has
#   INTERFACE       network interfaces between nodes, by commas; empty: the libraries choose
#   SITE_SRUN       list: further options of srun
#   SITE_MPIRUN     list: further options of mpirun
#   SITE_CORES      list: the cores near GPU 0, 1 ... as taskset takes them; empty: not bound
# Modules are loaded here as well, the same as when mpi4py was installed.

ALADDIN_SITE=${ALADDIN_SITE:-generic}
SITE_SRUN=()
SITE_MPIRUN=()
SITE_CORES=()

if [ ! -f "$ALADDIN_SLURM/sites/$ALADDIN_SITE.sh" ]; then
    echo "site.sh: ALADDIN_SITE: expected one of" \
        "$(cd "$ALADDIN_SLURM/sites" && echo *.sh | sed 's/\.sh//g'), got '$ALADDIN_SITE'" >&2
    exit 2
fi
set +u # `module` uses variables that may not be set
# shellcheck source=slurm/sites/generic.sh
. "$ALADDIN_SLURM/sites/$ALADDIN_SITE.sh"
set -u

PYTHON=${PYTHON:-python}
LAUNCHER=${LAUNCHER:-srun}
SRUN_MPI=${SRUN_MPI:-pmix}
INTERFACE=${INTERFACE:-}

if [ -n "$INTERFACE" ]; then
    export OMPI_MCA_btl_tcp_if_include=$INTERFACE # Open MPI over TCP
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export PYTHONUNBUFFERED=1
