#!/usr/bin/env bash
#SBATCH --job-name=fmwc-share
#SBATCH --cpus-per-task=1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#
# One campaign, shared by the tasks of a job array, without Ray:
#
#     sbatch --array=0-9 examples/slurm/array.sh 10 crystals -n 100000 --keep 0.1 --out OUT
#     fmwc screen crystals -n 100000 --keep 0.1 --out OUT    # when all tasks have finished
#
# The first argument is the number of tasks; the others are those of fmwc screen. A task that was killed or ran out of
# time goes on where it was when it runs again. With --keep, submit the array twice: the first draws, the second judges.
set -euo pipefail

tasks=${1:?usage: array.sh TASKS CHECKPOINT -n COUNT --out OUT [options of fmwc screen]}
task=${SLURM_ARRAY_TASK_ID:?submit the script as an array: sbatch --array=0-9 array.sh 10 ...}
export OMP_NUM_THREADS=1

exec fmwc screen "${@:2}" --share "$((task + 1))/$tasks"
