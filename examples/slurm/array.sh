#!/usr/bin/env bash
#SBATCH --job-name=fmwc-parts
#SBATCH --cpus-per-task=1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#
# One part of a campaign per task of a job array, without Ray:
#
#     sbatch --array=0-9 examples/slurm/array.sh 10 OUT CHECKPOINT COUNT [options of fmwc screen]
#     fmwc merge OUT/part-* --out OUT/whole                  # when all tasks have finished
#
# The first argument is the number of parts. Task 7 always draws part 7, so a task that was killed or ran out of time
# goes on where it was when it runs again (sbatch --array=7, and the same arguments).
set -euo pipefail

usage='usage: array.sh TASKS OUT CHECKPOINT COUNT [options of fmwc screen]'
tasks=${1:?$usage} out=${2:?$usage} checkpoint=${3:?$usage} count=${4:?$usage}
batch=${BATCH:-500} # samples drawn together: the same for all parts, on every device
task=${SLURM_ARRAY_TASK_ID:?submit the script as an array: sbatch --array=0-9 array.sh 10 ...}
for number in "$tasks" "$count" "$batch"; do
    [[ $number =~ ^[1-9][0-9]*$ ]] || { echo "expected a positive number, got '$number'; $usage" >&2 && exit 2; }
done
if ((task < 0 || task >= tasks)); then
    echo "task $task is not one of the $tasks parts; use --array=0-$((tasks - 1)), or some of these" >&2
    exit 2
fi
export OMP_NUM_THREADS=1

part=$(((count + tasks * batch - 1) / (tasks * batch) * batch)) # a whole number of batches
first=$((task * part))
((first < count)) || exit 0
((first + part <= count)) || part=$((count - first))

exec fmwc screen "$checkpoint" --first "$first" --count "$part" --batch "$batch" \
    --out "$(printf '%s/part-%04d' "$out" "$task")" "${@:5}"
