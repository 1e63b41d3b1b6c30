#!/bin/bash
# Train on ALCF Aurora (PBS Pro; per node 6 GPUs of two tiles each, and 104 cores). Submit it from
# the folder for the run:
#
#   qsub -A PROJECT -l select=4 -l walltime=01:00:00 -q prod examples/pbs_aurora.sh
#
# or, with options of aladdin_mpi.train:
#
#   OPTIONS="--model resnet50 --run-dir runs/a" qsub -v OPTIONS -A PROJECT ... examples/pbs_aurora.sh
#
# Each tile gets a rank, and the first ranks are the servers: four nodes with one server have 47
# workers. To resume a run, submit the same command again (--resume auto), or submit it several
# times with -W depend=afterany:JOB. Modules, cores and tiles follow ALCF's user guide
# (docs.alcf.anl.gov/aurora). Not tested on Aurora.
#PBS -N aladdin
#PBS -l filesystems=home:flare
#PBS -l place=scatter
#PBS -k doe
#PBS -j oe
set -euo pipefail

cd "${PBS_O_WORKDIR:-.}"
set +u # `module` uses variables that may not be set
module load frameworks
set -u

# Each tile is a device, and a rank sees that of its place on the node, as by ALCF's
# gpu_tile_compact.sh. If all saw all, the workers of the first node would take tiles one place
# before their cores, since the server has the first place.
export ZE_FLAT_DEVICE_HIERARCHY=FLAT
# shellcheck disable=SC2016 # expanded on each rank
WITH_TILE=(bash -c 'ZE_AFFINITY_MASK=$PALS_LOCAL_RANKID exec "$@"' with_tile)
# MPI is given memory of the host only.
export MPIR_CVAR_ENABLE_GPU=0
export OMP_NUM_THREADS=8 PYTHONUNBUFFERED=1

TILES=12
# Eight cores for each rank, near its tile, by the launcher, since torch does not tell where such a
# GPU is; cores 0 and 52 are the system's.
CORES=list:1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100
NODES=$(sort -u "$PBS_NODEFILE" | wc -l)
read -ra options <<<"${OPTIONS:---model resnet50 --dataset synthetic:3x224x224:1000:1281167}"

exec mpiexec -n $((NODES * TILES)) --ppn "$TILES" --cpu-bind "$CORES" \
    "${WITH_TILE[@]}" "${PYTHON:-python}" -m aladdin_mpi.train --device xpu \
    --bind-cores off --run-dir "runs/${PBS_JOBID:-aurora}" --resume auto "${options[@]}"
