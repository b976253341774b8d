#!/bin/bash
# Kills one of four processes under Open MPI and asks another to stop; the run has to end as an undisturbed one.
#
#     experiments/cluster/try_openmpi.sh [FOLDER]
#
# From the root of the repository, with Debian's openmpi-bin installed. mpirun does not start a run again itself:
# the loop below does, as a scheduler around it would. PYTHON names the interpreter, if it is not `python`.
set -eu
folder=$(mkdir -p "${1:-openmpi-trial}" && cd "${1:-openmpi-trial}" && pwd)
source experiments/cluster/trial.sh
[ "$(id -u)" = 0 ] && export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

until_done() { # NAME
    local code=134 start=1
    while [[ $code =~ ^(130|134|137|143)$ ]]; do
        echo "start $((start++)) of $1: 4 processes" >> "$folder/$1.log"
        code=0
        # --bind-to none: or all of a machine's processes may be put on its first cores.
        mpirun -n 4 --oversubscribe --bind-to none --tag-output "$PYTHON" -m experiments.train --distributed \
            "${OPTIONS[@]}" --workdir="$folder/$1" >> "$folder/$1.log" 2>&1 || code=$?
        echo "ended with exit code $code" >> "$folder/$1.log"
    done
    return "$code"
}

say "the run that is left alone"
until_done whole

say "the run that is not"
until_done killed &
disturb "$folder/killed" OMPI_COMM_WORLD_RANK
wait $!
say "it has ended"
$PYTHON -m experiments.cluster.same_end "$folder/whole" "$folder/killed"
