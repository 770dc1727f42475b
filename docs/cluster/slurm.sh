#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --exclusive
#SBATCH --signal=TERM@60
# One worker per node. A minute before the time limit, they save a checkpoint; submit the job again to continue.
. .venv/bin/activate
if [ -e runs/cluster/checkpoint.npz ]; then run="--resume runs/cluster"; else run="--impl highlevel --out runs/cluster"; fi
srun --mpi=pmi2 --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" python scripts/train.py --kvstore mpi $run
