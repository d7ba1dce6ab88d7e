#!/usr/bin/env bash
# What results/ needs a GPU for, in calls of ten minutes at most (one H200):
#
#     bash benchmarks/on_gpu.sh PART COMMIT OUT
#
#     draw   what fmwc reproduce crystals draws of the shipped field, what options of fmwc study crystals are chosen
#            from (validation seed), few times to read the variance at, and whether compiled fields work here: OUT/draw.tar.*
#     study  what fmwc study crystals draws, on three fresh seeds: OUT/study.tar.*
#     cost   fmwc bench of the three networks, alone on the GPU, and digits read at few and many steps: OUT/cost.tar.*
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
    export OMP_NUM_THREADS=4
    timeout 150 python3 benchmarks/fit_schedule.py mnist --pilot 2000 --readings 2 >"$work/schedule.log" 2>&1 &
    declare -A count=([crystals]=256 [mnist]=1024)
    for name in crystals mnist; do # compiles everything, all at once; what is measured below finds it in torch's cache
        for case in 10th bf16 Taylor; do
            fmwc 200 bench $name -n "${count[$name]}" --steps 2 --rounds 1 --only $case --out "$work/warm-$name-$case" >"$work/$name-$case.log" 2>&1 &
        done
    done
    for name in crystals mnist; do
        fmwc 200 bench $name -n 256 --rounds 1 --only training --out "$work/warm-$name-training" >"$work/$name-training.log" 2>&1 &
    done
    fmwc 200 bench crystals -n 256 --steps 2 --rounds 1 --only bf16 --tf32 --out "$work/warm-tf32" >"$work/tf32.log" 2>&1 &
    timeout 200 python3 -m pytest -q -p no:cacheprovider tests/sampling/test_compiled.py -k captured 2>&1 | tail -n 30 >"$work/cost/captured.log" &
    wait
    echo "compiled after $SECONDS s"
    bring cost >/dev/null # so far
    tail -n 2 "$work"/*.log | cut -c 1-300
    cp src/fmwc/weights/mnist/schedule.json "$work/schedule.log" "$work/cost"
    fmwc 150 bench crystals -n 256 --steps 50 --rounds 3 --minutes 2 --only linearised,diagonal,ensemble --force --out "$work/cost/bench"
    echo "crystals after $SECONDS s"
    bring cost >/dev/null # so far
    fmwc 110 bench mnist --steps 50 --rounds 3 --minutes 1.5 --only linearised,diagonal,ensemble --force --out "$work/cost/bench"
    echo "digits after $SECONDS s"
    bring cost >/dev/null # so far
    fmwc 60 bench crystals -n 256 --steps 50 --rounds 3 --minutes 0.7 --only bf16 --tf32 --out "$work/cost/tf32"
    FMWC_DATA=carry/mp20 timeout 60 python3 benchmarks/schedule_curve.py crystals --count 2500 --pilot 1000 --draws "$work/cost/curve" --draw-only
    echo "drawn after $SECONDS s"
    bring cost >/dev/null # so far
    timeout 70 python3 benchmarks/schedule_curve.py mnist --count 10000 --pilot 2000 --costs "$work/cost/bench/mnist.json" --out "$work/cost/bench"
    echo "curve after $SECONDS s"
    bring cost >/dev/null # so far
    for name in crystals mnist; do
        fmwc 75 bench $name -n 256 --rounds 20 --minutes 0.6 --only training --force --out "$work/cost/training"
        echo "trained after $SECONDS s"
        bring cost >/dev/null # so far
    done
    fmwc 40 bench checkerboard --steps 50 --rounds 3 --minutes 0.5 --only linearised,diagonal,ensemble --force --out "$work/cost/bench"
    bring cost
    ;;
*)
    echo "no part is called '$part': draw, study or cost" >&2
    exit 2
    ;;
esac
