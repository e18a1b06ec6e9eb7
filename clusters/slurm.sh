#!/usr/bin/env bash
# ReMasker under SLURM: one search on the nodes of one job.
#
# Use it for: a computing centre. Home and storage are on a file system that all nodes share.
# Change: what says REPLACE, all of it in the first block. Then, in the root of the repository:
#   python3.11 -m venv ~/remasker-env && ~/remasker-env/bin/pip install -c constraints.txt '.[cluster]'
#   remasker cluster check clusters/slurm.sh
#   sbatch clusters/slurm.sh data.csv --trials 200
# The same line once more continues a search that ran out of its time.
# Run by us: no; there is no SLURM here. A test runs it with stand-ins for srun that start nothing.
#SBATCH --job-name=remasker
#SBATCH --account=REPLACE-WITH-ACCOUNT
#SBATCH --partition=REPLACE-WITH-PARTITION
#SBATCH --nodes=4
#SBATCH --cpus-per-task=16
#SBATCH --time=02:00:00
# GPU nodes: one more # off, and `--gpus-per-trial 1` at the end of the sbatch line.
##SBATCH --gpus-per-node=1
# Fixed: a node that fails must not end the job, and Ray's clean-up wants its nodes to itself.
#SBATCH --no-kill
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
storage=REPLACE-WITH-SHARED-FOLDER # such as /scratch/$USER/remasker
environment="$HOME/remasker-env"

# ---- nothing below needs a change -------------------------------------------------------------
set -euo pipefail
table="${1:?usage: sbatch slurm.sh DATA [options of remasker tune]}"
shift
export PATH="$environment/bin:$PATH" RAY_USAGE_STATS_ENABLED=0

# Other users of the centre reach these ports too: the token keeps them out. It is made for this job,
# read by its owner alone, and never on a command line.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME/.ray/slurm-$SLURM_JOB_ID"
mkdir -p -m 700 "$HOME/.ray" "$storage"
(umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' >"$RAY_AUTH_TOKEN_PATH")
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT

head_name="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)" # head would end the pipe early, which pipefail takes for a failure
head_address="$(srun --nodes=1 --ntasks=1 --nodelist="$head_name" hostname --ip-address | awk '{print $1}')"
port=$((20000 + SLURM_JOB_ID % 20000)) # two jobs of one user never meet

# Starts Ray on every node, the command on the head, and stops Ray everywhere at the end.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --kill-on-bad-exit=0 \
    ray symmetric-run --address "$head_address:$port" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus="$SLURM_CPUS_PER_TASK" --disable-usage-stats -- \
    remasker tune "$table" --address "$head_address:$port" --storage "$storage" --resume "$@"
