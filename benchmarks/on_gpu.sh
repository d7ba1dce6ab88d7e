#!/usr/bin/env bash
# What results/ needs a GPU for, in calls of ten minutes at most (one H200):
#
#     bash benchmarks/on_gpu.sh PART COMMIT OUT
#
#     draw   what fmwc reproduce crystals draws of the shipped field, what options of fmwc study crystals are chosen
#            from (validation seed), few times to read the variance at, and whether compiled fields work here: OUT/draw.tar.*
#     study  what fmwc study crystals draws, on three fresh seeds: OUT/study.tar.*
#     cost   fmwc bench of the three networks, alone on the GPU, and digits read at few and many steps: OUT/bench
#
# Data lies in carry/mp20 and carry/mnist, which git ignores. Crystals are judged afterwards, on a CPU:
#
#     cat draw.tar.* | tar x -C runs
#     fmwc reproduce crystals --set flow=crystals --only read:retrofit,read:hutchinson --out runs/draw/reproduce
#     fmwc study crystals --wide --only read:edit,read:steps,read:rewind --out runs/draw/wide
#     cat study.tar.* | tar x -C runs
#     fmwc study crystals --only read:filter,read:trust,read:edit,read:steps,read:rewind --out runs/study
set -uo pipefail
part=$1 out=$3
export FMWC_COMMIT=$2 PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
work=$(mktemp -d)
mkdir -p "$out" "$work/$part"

fmwc() { timeout "$1" python3 -m fmwc "${@:2}"; }
crystals() { FMWC_DATA=carry/mp20 fmwc "$@"; }

# Processes that share the GPU: each has kernels that fill it badly.
shared() { export CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work/mps; mkdir -p "$work/mps"; nvidia-cuda-mps-control -d; }

# What there is of a folder, in files that come back from the machine.
bring() { tar c -C "$work" --exclude='*.resume' "$1" | split -b 15M -d - "$out/$1.tar."; ls -l "$out"; }

case $part in
draw)
    shared
    for task in retrofit sweep samplers; do
        crystals 530 reproduce crystals --set flow=crystals --only "draw:$task" --out "$work/draw/reproduce" &
    done
    for task in edit steps rewind; do
        crystals 530 study crystals --wide --set edited=50 --set replicates=4 --set swept=300 --set rewound=300 --only "draw:$task" --out "$work/draw/wide" &
    done
    for name in crystals mnist; do
        FMWC_DATA=carry/mp20 timeout 400 python3 benchmarks/fit_schedule.py $name --pilot 2000 --out "$work/draw/schedule-$name" >"$work/draw/schedule-$name.log" 2>&1 &
        fmwc 300 bench $name --steps 50 --rounds 1 --minutes 4 --only readings --out "$work/draw/tried-$name" >"$work/draw/tried-$name.log" 2>&1 &
    done
    timeout 300 python3 -m pytest -q -p no:cacheprovider tests/sampling/test_compiled.py >"$work/draw/compiled.log" 2>&1 &
    wait
    tail -n 12 "$work"/draw/*.log
    bring draw
    ;;
study)
    shared
    for task in edit steps rewind samples; do
        crystals 530 study crystals --only "draw:$task" --out "$work/study" &
    done
    wait
    bring study
    ;;
cost)
    settings="crystals mnist checkerboard"
    for name in $settings; do # compiles everything, all at once; what is measured below finds it in torch's cache
        fmwc 170 bench $name --steps 50 --rounds 1 --minutes 2.5 --only sampling --out "$work/warm-$name" >"$work/$name.log" 2>&1 &
    done
    wait
    tail -n 3 "$work"/*.log
    for name in $settings; do
        fmwc 110 bench $name --steps 50 --rounds 5 --minutes 1.3 --only sampling --force --out "$out/bench"
    done
    fmwc 60 bench crystals --steps 50 --rounds 5 --minutes 0.7 --only "linearised" --tf32 --out "$out/tf32"
    for name in crystals mnist; do
        fmwc 80 bench $name --steps 50 --rounds 3 --minutes 1 --only training --force --out "$out/training"
    done
    FMWC_DATA=carry/mnist timeout 120 python3 benchmarks/schedule_curve.py mnist --count 10000 --pilot 2000 --costs "$out/bench/mnist.json" --out "$out/bench"
    ;;
*)
    echo "no part is called '$part': draw, study or cost" >&2
    exit 2
    ;;
esac
