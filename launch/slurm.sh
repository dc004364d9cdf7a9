#!/bin/bash
# Train on a Slurm cluster:  sbatch launch/slurm.sh [RECIPE] [section.option=value ...]
# from the repository directory, which must be on a file system shared by all nodes. Edit the settings above the line.

#SBATCH --job-name=vit_scale
#SBATCH --nodes=8                  # nodes
#SBATCH --gpus-per-node=8          # GPUs per node
#SBATCH --ntasks-per-node=8        # processes per node: one per GPU
#SBATCH --cpus-per-task=12         # cores per process, for data loading
#SBATCH --time=24:00:00            # then the job is requeued and resumes
#SBATCH --output=slurm-%j.log      # one log across requeues
##SBATCH --partition=gpu           # if your cluster requires it: remove one # and fill in
##SBATCH --account=project

#SBATCH --signal=USR1@120          # two minutes before the end: enough to finish a step and save a checkpoint
#SBATCH --requeue
#SBATCH --open-mode=append

RECIPE=recipes/vit_large.yaml             # default if the command names no recipe
OPTIONS=(                                 # for every run of this script; options of the command are appended
    # "run.dir=/shared/runs/vit_large"    # default: runs/<recipe>; must be on a file system shared by all nodes
    # "parallel.strategy=zero3"
)
PYTHON=.venv/bin/python                   # of the environment with vit_scale installed
# export HF_HOME=/scratch/huggingface     # dataset cache
# export NCCL_SOCKET_IFNAME=ib0           # network between nodes, if NCCL picks the wrong one (`ip addr` lists them)
# export GLOO_SOCKET_IFNAME=ib0           # the same for gloo, which exchanges signals between nodes

# --------------------------------------------------------------------------------------------------------------------
# srun starts the training processes directly, without a launcher: Slurm's signals, which would kill a launcher, reach
# every process, and their exit code reaches this script. They find each other through Slurm's environment variables.
REQUEUE=138 # exit code of a run that was stopped by SIGUSR1 and has saved a checkpoint

cd "${SLURM_SUBMIT_DIR:-.}" || exit 1
if [[ "${1:-}" == *.yaml ]]; then
    RECIPE=$1
    shift
fi
# After one process exits, the others have one minute to save their state.
srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    "$PYTHON" launch/train.py "$RECIPE" "${OPTIONS[@]}" "$@"
status=$?
if [[ $status -eq $REQUEUE ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
