#!/usr/bin/env bash
#SBATCH --job-name=fmwc-screen
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#
# One campaign on all nodes of a job: starts Ray on each of them, and fmwc screen on the first. GPUs are used if the job
# has them (sbatch --gpus-per-node=4 …).
#
#     sbatch examples/slurm/ray.sh crystals -n 1000000 --keep 0.1 --out campaign
#
# A job that was killed or ran out of time goes on where it was when it runs again.
set -euo pipefail

export OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0
# Whoever can talk to Ray can run any code on the nodes, so only processes that have this token may.
RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ip=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | cut -d ' ' -f 1)
address=$ip:$((20000 + SLURM_JOB_ID % 20000))
cpus=${SLURM_CPUS_PER_TASK:-$(nproc)}

# Usage: node NAME OPTIONS...; runs Ray on a node until the job ends.
node() {
    srun --nodes=1 --ntasks=1 --nodelist="$1" --cpus-per-task="$cpus" --overlap \
        ray start --block --num-cpus="$cpus" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" --disable-usage-stats "${@:2}" &
}

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
node "$head" --head --node-ip-address="$ip" --port="${address#*:}" --include-dashboard=false
until (exec 3<>"/dev/tcp/$ip/${address#*:}") 2>/dev/null; do sleep 1; done
for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n +2); do
    node "$name" --address="$address"
done
for _ in {1..100}; do # then with the nodes that have come
    (($(ray status --address="$address" | grep -c '^ 1 node_') < SLURM_JOB_NUM_NODES)) || break
    sleep 2
done

fmwc screen "$@" --address "$address"
