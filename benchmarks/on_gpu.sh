#!/usr/bin/env bash
# What results/ needs a GPU for, in calls of ten minutes at most (one H200):
#
#     bash benchmarks/on_gpu.sh PART COMMIT OUT
#
#     draw   what fmwc reproduce crystals draws of the shipped field, what options of fmwc study crystals are chosen
#            from (validation seed), few times to read the variance at, and whether compiled fields work here: OUT/draw.tar.*
#     study  what fmwc study crystals draws, on three fresh seeds: OUT/study.tar.*
#     crystals, mnist
#            what confidence costs there: fmwc bench, alone on the GPU, and the kernels of one reading: OUT/crystals.tar.*, …
#     curve  digits and crystals read at few and many steps: OUT/curve.tar.*
#
# Data lies in carry/mp20, which git ignores. Crystals are judged afterwards, on a CPU:
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
crystals | mnist)
    export OMP_NUM_THREADS=4
    declare -A count=([crystals]=512 [mnist]=1024)
    n=${count[$part]}
    for case in 10th bf16 Taylor; do # compiles everything, all at once; what is measured below finds it in torch's cache
        fmwc 200 bench "$part" -n "$n" --steps 2 --rounds 1 --only $case --out "$work/warm-$case" >"$work/$case.log" 2>&1 &
    done
    fmwc 200 bench "$part" -n 256 --rounds 1 --only training --out "$work/warm-training" >"$work/training.log" 2>&1 &
    fmwc 200 bench "$part" -n "$n" --steps 2 --rounds 1 --only bf16 --tf32 --out "$work/warm-tf32" >"$work/tf32.log" 2>&1 &
    timeout 200 python3 -m pytest -q -p no:cacheprovider tests/sampling/test_compiled.py -k captured >"$work/$part/captured.log" 2>&1 &
    wait
    echo "compiled after $SECONDS s"
    tail -n 2 "$work"/*.log "$work/$part/captured.log" | cut -c 1-300
    timeout 100 python3 benchmarks/profile_reading.py "$part" -n "$n" --kernels 15 --out "$work/$part/evaluations" >"$work/$part/kernels.log"
    grep plain "$work/$part/kernels.log"
    bring "$part" >/dev/null # so far
    fmwc 260 bench "$part" -n "$n" --steps 50 --rounds 3 --minutes 3.5 --only few,every,ensemble --out "$work/$part/bench"
    echo "sampled after $SECONDS s"
    bring "$part" >/dev/null # so far
    fmwc 70 bench "$part" -n "$n" --steps 50 --rounds 3 --minutes 0.7 --only bf16 --tf32 --out "$work/$part/tf32"
    fmwc 90 bench "$part" -n 256 --rounds 20 --minutes 0.8 --only training --out "$work/$part/training"
    echo "trained after $SECONDS s"
    bring "$part"
    ;;
curve)
    # Digits are judged here; crystals are brought home, and judged by the same command there.
    timeout 200 python3 benchmarks/schedule_curve.py mnist --count 10000 --pilot 2000 --costs results/bench/h200/mnist.json --out "$work/curve"
    FMWC_DATA=carry/mp20 timeout 100 python3 benchmarks/schedule_curve.py crystals --count 2500 --pilot 1000 --draws "$work/curve/crystals" --draw-only
    bring curve
    ;;
*)
    echo "no part is called '$part': draw, study, crystals, mnist or curve" >&2
    exit 2
    ;;
esac
