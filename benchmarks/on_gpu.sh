#!/usr/bin/env bash
# What results/ needs a GPU for, in calls of ten minutes at most (one H200):
#
#     bash benchmarks/on_gpu.sh PART COMMIT OUT
#
#     cost       fmwc bench of the three networks, alone on the GPU: OUT/bench
#     study      what fmwc study crystals draws, on three seeds: OUT/study.tar.*
#     reproduce  what fmwc reproduce crystals draws of the shipped field; digits read at few and many steps: OUT/reproduce.tar.*
#     wide       what the study's options are chosen from, on the validation seed: OUT/wide.tar.*
#
# Data lies in carry/mp20 and carry/mnist, which git ignores. Crystals are judged afterwards, on a CPU:
#
#     cat study.tar.* | tar x -C runs && fmwc study crystals --only read:filter,read:trust,read:edit,read:steps,read:rewind --out runs/study
#     cat reproduce.tar.* | tar x -C runs && fmwc reproduce crystals --set flow=crystals --only read:retrofit,read:hutchinson --out runs/reproduce
set -uo pipefail
part=$1 out=$3
export FMWC_COMMIT=$2 PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
work=$(mktemp -d)
mkdir -p "$out"

crystals() { FMWC_DATA=carry/mp20 timeout "$1" python3 -m fmwc "${@:2}"; }

# Processes that share the GPU: each has kernels that fill it badly.
shared() { export CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work/mps; mkdir -p "$work/mps"; nvidia-cuda-mps-control -d; }

# What there is of a folder, in files that come back from the machine.
bring() { tar c -C "$work" --exclude='*.resume' "$1" | split -b 15M -d - "$out/$1.tar."; ls -l "$out"; }

case $part in
cost)
    settings="crystals mnist checkerboard"
    for name in $settings; do # compiles everything, all at once; what is measured below finds it in torch's cache
        timeout 240 python3 -m fmwc bench $name --steps 50 --rounds 1 --minutes 3.5 --only sampling --out "$work/warm-$name" >"$work/$name.log" 2>&1 &
    done
    wait
    tail -n 3 "$work"/*.log
    for name in $settings; do
        timeout 150 python3 -m fmwc bench $name --steps 50 --rounds 5 --minutes 1.7 --only sampling --force --out "$out/bench"
    done
    for name in $settings; do
        timeout 100 python3 -m fmwc bench $name --steps 50 --rounds 3 --minutes 1.2 --only training --force --out "$out/training"
    done
    ;;
study)
    shared
    for task in edit steps rewind samples; do
        crystals 530 study crystals --only "draw:$task" --out "$work/study" &
    done
    wait
    bring study
    ;;
wide)
    shared
    for task in edit steps rewind; do
        crystals 530 study crystals --wide --set edited=50 --set replicates=4 --set swept=300 --set rewound=200 --only "draw:$task" --out "$work/wide" &
    done
    wait
    bring wide
    ;;
reproduce)
    shared
    for task in retrofit sweep samplers; do
        crystals 530 reproduce crystals --set flow=crystals --only "draw:$task" --out "$work/reproduce" &
    done
    FMWC_DATA=carry/mnist timeout 530 python3 benchmarks/schedule_curve.py mnist --count 10000 --pilot 2000 --out "$work/reproduce/bench" &
    wait
    bring reproduce
    ;;
*)
    echo "no part is called '$part': cost, study, reproduce or wide" >&2
    exit 2
    ;;
esac
