#!/usr/bin/env bash
# A search with four cards: task 0 plans, the others work for it: sbatch examples/search_slurm.sh DATABASE_URL
#SBATCH --job-name=oomguard-search
#SBATCH --array=0-3
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=4
#SBATCH --mem=8G
#SBATCH --time=01:00:00
set -euo pipefail

# without a password: PostgreSQL reads that from ~/.pgpass
storage=${1:?"Give a storage: sbatch examples/search_slurm.sh DATABASE_URL"}

if [ "$SLURM_ARRAY_TASK_ID" -eq 0 ]; then
    srun oomguard plan --model lstm --seq 10000 --device cuda --timeout 30min --storage "$storage"
else # Slurm may start this task first
    srun oomguard work --device cuda --wait 30min --storage "$storage"
fi
