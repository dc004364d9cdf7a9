#!/bin/bash
# Train on a Slurm cluster:  sbatch launch/slurm.sh [RECIPE] [section.option=value ...]
# from the repository's folder, which must be on a disk that all machines share. Edit what stands above the line.

#SBATCH --job-name=vit_scale
#SBATCH --nodes=8                  # machines
#SBATCH --gpus-per-node=8          # GPUs of each
#SBATCH --ntasks-per-node=8        # processes on each machine: one for each GPU
#SBATCH --cpus-per-task=12         # cores for each process, which load its images
#SBATCH --time=24:00:00            # then the job is put back into the queue, and goes on from where it was
#SBATCH --output=slurm-%j.log      # one log, also over requeues
##SBATCH --partition=gpu           # what your cluster asks for: remove one # and fill in
##SBATCH --account=project

#SBATCH --signal=USR1@120          # two minutes before the end: time to finish a step and save
#SBATCH --requeue
#SBATCH --open-mode=append

RECIPE=recipes/vit_large.yaml             # where the command names none
OPTIONS=(                                 # for every run of this script; the command's come after them
    # "run.dir=/shared/runs/vit_large"    # default: runs/<recipe> here; must be on a disk that all machines share
    # "parallel.strategy=zero3"
)
PYTHON=.venv/bin/python                   # of the environment that vit_scale is installed in
# export HF_HOME=/scratch/huggingface     # cache of data sets
# export NCCL_SOCKET_IFNAME=ib0           # network between machines, where NCCL picks the wrong one

# --------------------------------------------------------------------------------------------------------------------
# srun starts the training processes themselves, with no launcher in between: Slurm's signals reach each of them, which
# would kill a launcher, and their exit status reaches this script. They find each other by Slurm's variables.
REQUEUE=138 # exit status of a run that SIGUSR1 has stopped and that is saved

cd "${SLURM_SUBMIT_DIR:-.}" || exit 1
if [[ "${1:-}" == *.yaml ]]; then
    RECIPE=$1
    shift
fi
# When one process has ended, the others have a minute to write what they hold.
srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    "$PYTHON" launch/train.py "$RECIPE" "${OPTIONS[@]}" "$@"
status=$?
if [[ $status -eq $REQUEUE ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
