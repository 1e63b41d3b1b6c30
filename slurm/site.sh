# shellcheck shell=bash disable=SC2034
# Site-specific settings. The batch scripts source this file, so it can set any variable for the
# ranks. ALADDIN_SITE names the profile, a file in slurm/sites; the default is `generic`:
#
#   ALADDIN_SITE=lumi sbatch --account=project_1 --partition=standard-g slurm/train.sbatch ...
#
# A profile can set the variables below. Except for the lists, the environment in which the job is
# submitted overrides them.
#   PYTHON          Python interpreter of the environment with aladdin_mpi
#   LAUNCHER        srun, or mpirun inside the allocation
#   SRUN_MPI        value of srun --mpi; `srun --mpi=list` lists the choices
#   INTERFACE       network interfaces between nodes, comma-separated; empty: default of the MPI
#   SITE_SRUN       list: additional options of srun
#   SITE_MPIRUN     list: additional options of mpirun
#   SITE_CORES      list: cores near GPU 0, 1 ... in the format of taskset; empty: no binding
# A profile also loads the modules that were loaded when mpi4py was installed.

ALADDIN_SITE=${ALADDIN_SITE:-generic}
SITE_SRUN=()
SITE_MPIRUN=()
SITE_CORES=()

if [ ! -f "$ALADDIN_SLURM/sites/$ALADDIN_SITE.sh" ]; then
    echo "site.sh: ALADDIN_SITE: expected one of" \
        "$(cd "$ALADDIN_SLURM/sites" && echo *.sh | sed 's/\.sh//g'), got '$ALADDIN_SITE'" >&2
    exit 2
fi
set +u # `module` may use unset variables
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
