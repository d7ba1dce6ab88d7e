#!/usr/bin/env bash
#SBATCH --job-name=fmwc-parts
#SBATCH --array=0-9
#SBATCH --cpus-per-task=1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#
# One part of a campaign per task of a job array, without Ray:
#
#     sbatch examples/slurm/array.sh OUT CHECKPOINT COUNT [options of fmwc screen]
#     fmwc merge OUT/part-* --out OUT/whole                  # when all tasks have finished
#
# A task that was killed or ran out of time goes on where it was when it runs again.
set -euo pipefail

out=${1:?folder of the campaign} checkpoint=${2:?checkpoint} count=${3:?number of samples}
batch=${BATCH:-500} # samples drawn together: the same for all parts, on every device
export OMP_NUM_THREADS=1

tasks=${SLURM_ARRAY_TASK_COUNT:-1}
task=$((${SLURM_ARRAY_TASK_ID:-0} - ${SLURM_ARRAY_TASK_MIN:-0}))
part=$(((count + tasks * batch - 1) / (tasks * batch) * batch)) # a whole number of batches
first=$((task * part))
((first < count)) || exit 0
((first + part <= count)) || part=$((count - first))

exec fmwc screen "$checkpoint" --first "$first" --count "$part" --batch "$batch" \
    --out "$(printf '%s/part-%04d' "$out" "$task")" "${@:4}"
