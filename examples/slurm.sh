#!/usr/bin/env bash
# A Slurm job that plans, trains and goes on after every kill and time limit: sbatch examples/slurm.sh waves.npy
#SBATCH --job-name=oomguard
#SBATCH --mem=8G
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# With a card: #SBATCH --gres=gpu:1 and --device cuda below.
set -uo pipefail

data=${1:?"Give a data file: sbatch examples/slurm.sh waves.npy"}
run=runs/${SLURM_JOB_NAME:-oomguard}
mkdir -p "$run"

# the budget is the memory of the job: oomguard reads the limits of its cgroup
if [ ! -f "$run/first-plan.json" ]; then
    srun oomguard plan --model lstm --data "$data" --output "$run/first-plan.json" || exit
fi

# --resume continues from the newest checkpoint, and starts anew where there is none
srun oomguard train "$run/first-plan.json" --epochs 20 --save-every 10min --run "$run" --resume
code=$?
if [ "$code" -eq 130 ]; then # Slurm's signal before the time limit: there is a checkpoint
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
