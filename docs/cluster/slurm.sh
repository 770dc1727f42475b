#!/bin/bash
#SBATCH --nodes=3 --ntasks-per-node=1 --exclusive
# Node 0 runs the scheduler; every node runs a server and a worker.
export DMLC_PS_ROOT_URI=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
export DMLC_PS_ROOT_PORT=9091 DMLC_NUM_WORKER=$SLURM_NNODES DMLC_NUM_SERVER=$SLURM_NNODES
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" bash -c '
  train="python scripts/train.py --impl highlevel --kvstore dist_sync --out runs/cluster"
  export DMLC_TASK_ID=$SLURM_PROCID
  trap : TERM  # bash waits for its processes, which get SIGTERM too
  [ "$SLURM_PROCID" = 0 ] && DMLC_ROLE=scheduler $train &
  DMLC_ROLE=server $train &
  DMLC_ROLE=worker $train; status=$?
  wait
  exit $status'
