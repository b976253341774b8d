#!/bin/bash
# Kills one of four processes of a SLURM job and asks another to stop; the job has to end as an undisturbed one.
#
#     experiments/cluster/try_slurm.sh [FOLDER]
#
# From the root of the repository, on a machine with SLURM, or with Debian's slurm-wlm installed: then a SLURM of
# one node is started for it. PYTHON names the interpreter, if it is not `python`.
set -eu
folder=$(mkdir -p "${1:-slurm-trial}" && cd "${1:-slurm-trial}" && pwd)
source experiments/cluster/trial.sh
if ! scontrol ping > /dev/null 2>&1; then
    source experiments/cluster/one_node_slurm.sh "$folder/slurm"
    trap stop_slurm EXIT
fi

job() { # NAME
    sbatch --parsable --ntasks=4 --overcommit --output="$folder/$1.log" \
        experiments/cluster/train.sbatch "${OPTIONS[@]}" --workdir="$folder/$1"
}
done_with() { # JOB
    while [ -n "$(squeue --noheader --jobs="$1" 2> /dev/null)" ]; do sleep 1; done
}

whole=$(job whole)
say "job $whole runs to its end"
done_with "$whole"

killed=$(job killed)
say "job $killed runs"
disturb "$folder/killed" SLURM_PROCID
done_with "$killed"
say "job $killed has ended"
$PYTHON -m experiments.cluster.same_end "$folder/whole" "$folder/killed"
