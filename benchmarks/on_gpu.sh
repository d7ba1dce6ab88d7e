#!/usr/bin/env bash
# The parts of results/ that need a GPU, in calls of ten minutes at most (one H200):
#
#     bash benchmarks/on_gpu.sh PART COMMIT OUT
#
#     flows  the shipped flow of crystals with another seed, and joint training beside them: three calls of ten minutes, each
#            resumes; the third one writes OUT/flows.tar.*
#     lifts  how well the confidence of crystals finds metastable ones, on fresh seeds: OUT/lifts.tar.*
#     draw   the samples of `reproduce crystals` from the shipped field: OUT/draw.tar.*
#     study  the samples of `study crystals`, on three fresh seeds: OUT/study.tar.*
#     crystals, mnist
#            the cost of confidence: `bench`, alone on the GPU, sampling and training: OUT/crystals.tar.*, …
#
# Data lies in carry/mp20-full, which git ignores. If the machine lacks the packages that judge crystals, unpack their wheels
# (chgnet, pymatgen, pymatgen-core, ase, monty, spglib, orjson, nvidia-ml-py3, smact and what it needs) into a folder `site`, and pack it as
# carry/site.tar.xz. Crystals that are not judged there are judged afterwards, on a CPU:
#
#     cat draw.tar.* | tar x -C runs
#     python -m experiments reproduce crystals --set flow=crystals --only read:retrofit,read:hutchinson --out runs/draw/reproduce
#     cat study.tar.* | tar x -C runs
#     python -m experiments study crystals --only read:filter,read:trust,read:edit,read:steps --out runs/study
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
    fi
    ;;
lifts)
    judging
    timeout 560 python3 -m benchmarks.lifts draw crystals --seeds 300,301,302 --count 4000 --device cuda --out "$work/lifts/crystals"
    timeout $((585 - SECONDS)) python3 -m benchmarks.lifts judge "$work/lifts/crystals"
    bring lifts
    ;;
draw)
    judging
    reproduced=(reproduce crystals --set flow=crystals --out "$work/draw/reproduce")
    crystals 560 "${reproduced[@]}" --only draw:retrofit,draw:samplers,draw:sweep
    crystals $((585 - SECONDS)) "${reproduced[@]}" --only read:retrofit,read:hutchinson
    bring draw
    ;;
study)
    judging
    crystals 560 study crystals --set replicates=8 --only draw:edit,draw:steps,draw:samples --out "$work/study"
    [ ! -d "$work/site" ] || crystals $((585 - SECONDS)) study crystals --only read:filter,read:trust,read:edit,read:steps --out "$work/study"
    bring study
    ;;
crystals | mnist)
    export OMP_NUM_THREADS=3
    declare -A count=([crystals]=512 [mnist]=1024)
    n=${count[$part]}
    experiments 300 bench "$part" -n "$n" --steps 50 --rounds 3 --minutes 4.5 --only linearised,diagonal,ensemble --out "$work/$part/bench"
    experiments 120 bench "$part" -n 256 --rounds 20 --minutes 1.5 --only training --out "$work/$part/training"
    bring "$part"
    ;;
*)
    echo "no part is called '$part': flows, lifts, draw, study, crystals or mnist" >&2
    exit 2
    ;;
esac
