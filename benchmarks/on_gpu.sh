#!/usr/bin/env bash
# The parts of results/ that need a GPU, in calls of ten minutes at most (one H200):
#
#     bash benchmarks/on_gpu.sh PART COMMIT OUT
#
#     flows  the shipped flow of crystals with another seed, and joint training beside them: three calls of ten minutes, each
#            resumes; the third one writes OUT/flows.tar.* and compares samplers: OUT/samplers.tar.*
#     lifts  how well the confidence of crystals finds metastable ones, on fresh seeds, and edits of crystals: OUT/lifts.tar.*
#     draw   the samples of `reproduce crystals` from the shipped field, and all options of `study crystals` (validation
#            seed): OUT/draw.tar.*
#     study  the samples of `study crystals`, on three fresh seeds: OUT/study.tar.*
#     crystals, mnist
#            the cost of confidence: `bench`, alone on the GPU, sampling (also with TF32) and training; and digits read
#            by four probes: OUT/crystals.tar.*, …
#     sweep  smaller and larger batches, read in half precision: OUT/sweep.tar.*
#     curve  crystals read at few and many steps: OUT/curve.tar.*
#
# Data lies in carry/mp20-full, which git ignores. If the machine lacks the packages that judge crystals, unpack their wheels
# (chgnet, pymatgen, pymatgen-core, ase, monty, spglib, orjson, nvidia-ml-py3) into a folder `site`, and pack it as
# carry/site.tar.xz. Crystals that are not judged there are judged afterwards, on a CPU:
#
#     cat draw.tar.* | tar x -C runs
#     python -m experiments reproduce crystals --set flow=crystals --only read:retrofit,read:hutchinson --out runs/draw/reproduce
#     python -m experiments study crystals --wide --only read:edit,read:steps,read:rewind --out runs/draw/wide
#     cat study.tar.* | tar x -C runs
#     python -m experiments study crystals --only read:filter,read:trust,read:edit,read:steps,read:rewind --out runs/study
set -uo pipefail
part=$1 out=$3
export FMWC_COMMIT=$2 PYTHONPATH=$PWD/src:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
work=$(mktemp -d)
mkdir -p "$out" "$work/$part"

experiments() { timeout "$1" python3 -m experiments "${@:2}"; }
crystals() { FMWC_DATA=carry/mp20-full experiments "$@"; }

# Let processes share the GPU, because the kernels of each do not fill it.
shared() { export CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work/mps; mkdir -p "$work/mps"; nvidia-cuda-mps-control -d; }

# Pack a folder into files that are copied back from the machine.
bring() { tar c -C "$work" --exclude='*.resume' "$1" | split -b 15M -d - "$out/$1.tar."; ls -l "$out"; }

# Use the packages that judge crystals, if they were brought along.
judging() { [ ! -f carry/site.tar.xz ] || { tar xJ -C "$work" -f carry/site.tar.xz && export PYTHONPATH=$PYTHONPATH:$work/site; }; }

# Train crystals for at most the given minutes, and resume the next time; runs stay in /tmp while the machine is warm.
trained() { timeout 588 python3 -m fmwc train crystals --out "/tmp/runs/$1" "${@:2}" >"/tmp/runs/$1.log" 2>&1; echo "$1: status $? after $SECONDS s"; }

case $part in
flows)
    shared
    export FMWC_DATA=$PWD/carry/mp20-full
    mkdir -p /tmp/runs
    if [ ! -f /tmp/runs/flow-1/recipe.json ]; then
        # The joint training is limited to the GPU time of one flow.
        for seed in 0 1; do trained flow-$seed --seed $seed --set minutes=9 --set enough=0.94 & done
        trained joint-0 --preset paper --set iterations=36000 --set minutes=8.6 --set enough=0.7 &
        wait
        tail -qn 2 /tmp/runs/*.log
    else
        tar c -C /tmp/runs --exclude='.fmwc*' flow-0 flow-1 joint-0 | split -b 15M -d - "$out/flows.tar."
        judging
        OMP_NUM_THREADS=1 python3 -m benchmarks.crystal_samplers /tmp/runs/flow-0 \
            --draw --judge --count 1500 --jobs 15 --out "$work/samplers"
        bring samplers
    fi
    ;;
lifts)
    shared
    judging
    timeout 560 python3 -m benchmarks.crystal_edits --count 240 --device cuda --jobs 9 --out "$work/lifts/edits" >"$work/lifts/edits.log" 2>&1 &
    {
        timeout 400 python3 -m benchmarks.lifts draw crystals --seeds 300,301,302 --count 4000 --leads --device cuda --out "$work/lifts/crystals"
        timeout 400 python3 -m benchmarks.lifts judge "$work/lifts/crystals"
    } >"$work/lifts/lifts.log" 2>&1 &
    wait
    tail -n 3 "$work"/lifts/*.log
    bring lifts
    ;;
draw)
    # A folder belongs to one process at a time, so the tasks of a folder run one after another.
    shared
    judging
    reproduced=(reproduce crystals --set flow=crystals --out "$work/draw/reproduce")
    wide=(study crystals --wide --set edited=50 --set replicates=4 --set swept=300 --set rewound=300 --out "$work/draw/wide")
    {
        crystals 560 "${reproduced[@]}" --only draw:retrofit,draw:samplers,draw:sweep
        crystals $((585 - SECONDS)) "${reproduced[@]}" --only read:retrofit,read:hutchinson
    } >"$work/draw/reproduce.log" 2>&1 &
    {
        crystals 560 "${wide[@]}" --only draw:edit,draw:steps,draw:rewind
        crystals $((585 - SECONDS)) "${wide[@]}" --only read:edit,read:steps,read:rewind
    } >"$work/draw/wide.log" 2>&1 &
    wait
    tail -n 12 "$work"/draw/*.log
    bring draw
    ;;
study)
    shared
    judging
    crystals 560 study crystals --set replicates=8 --only draw:edit,draw:steps,draw:rewind,draw:samples --out "$work/study"
    [ ! -d "$work/site" ] || crystals $((585 - SECONDS)) study crystals --only read:filter,read:trust,read:edit,read:steps,read:rewind --out "$work/study"
    bring study
    ;;
crystals | mnist)
    export OMP_NUM_THREADS=3
    declare -A count=([crystals]=512 [mnist]=1024)
    n=${count[$part]}
    for case in few "linearised in bf16" "(1 probe) in" "Taylor-1 in" "Hermite in"; do
        # Compile everything in parallel; the measurements below use torch's cache.
        experiments 200 bench "$part" -n "$n" --steps 2 --rounds 1 --only "$case" --out "$work/warm-$case" >"$work/$case.log" 2>&1 &
    done
    experiments 200 bench "$part" -n 256 --rounds 1 --only training --out "$work/warm-training" >"$work/training.log" 2>&1 &
    experiments 200 bench "$part" -n "$n" --steps 2 --rounds 1 --only "linearised in bf16" --tf32 --out "$work/warm-tf32" >"$work/tf32.log" 2>&1 &
    wait
    echo "compiled after $SECONDS s"
    tail -qn 1 "$work"/*.log | cut -c 1-200
    experiments 200 bench "$part" -n "$n" --steps 50 --rounds 3 --minutes 2.8 --only few,bf16,ensemble --out "$work/$part/bench"
    echo "sampled after $SECONDS s"
    bring "$part" >/dev/null # so far
    experiments 60 bench "$part" -n "$n" --steps 50 --rounds 3 --minutes 0.7 --only "linearised in bf16" --tf32 --out "$work/$part/tf32"
    experiments 90 bench "$part" -n 256 --rounds 20 --minutes 0.8 --only training --out "$work/$part/training"
    echo "trained after $SECONDS s"
    bring "$part" >/dev/null
    if [ "$part" = mnist ]; then
        timeout 200 python3 -m benchmarks.probe_curve --draw "$work/mnist/probes.safetensors"
    fi
    bring "$part"
    ;;
sweep)
    export OMP_NUM_THREADS=3
    for case in "crystals 64" "crystals 2048" "mnist 64" "mnist 8192"; do
        experiments 200 bench ${case% *} -n ${case#* } --steps 2 --rounds 1 --only "linearised in bf16" --out "$work/warm-$case" >"$work/$case.log" 2>&1 &
    done
    wait
    echo "compiled after $SECONDS s"
    for case in "crystals 64" "crystals 2048" "mnist 64" "mnist 8192"; do
        experiments 80 bench ${case% *} -n ${case#* } --steps 50 --rounds 3 --minutes 1 --only "linearised in bf16" --out "$work/sweep/${case/ /-}"
    done
    bring sweep
    ;;
curve)
    # The same command judges the crystals afterwards, on a CPU.
    FMWC_DATA=carry/mp20-full timeout 100 python3 -m benchmarks.schedule_curve crystals --count 2500 --pilot 1000 --draws "$work/curve/crystals" --draw-only
    bring curve
    ;;
*)
    echo "no part is called '$part': flows, lifts, draw, study, crystals, mnist, sweep or curve" >&2
    exit 2
    ;;
esac
