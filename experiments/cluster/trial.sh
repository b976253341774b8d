# The run of the trials, and functions to watch and end its processes. To be sourced.

export PYTHON=${PYTHON:-python} JAX_PLATFORMS=cpu
# Small enough to compile in seconds; evaluated on the way, as real runs are.
OPTIONS=(--config=configs/libreoffice.py:fr,tiny --config.train.steps=24 --config.train.log_every=1
    --config.train.eval_every=8 --config.checkpoint.every=4 --config.evaluate.examples=4
    --config.evaluate.decoding.max_new_tokens=8 --config.evaluate.alignment.choose=False)

# Waits until a run has made a step.
reach_step() { # WORKDIR STEP
    local _
    for _ in $(seq 600); do
        grep -q "\"step\": $2, " "$1/metrics.jsonl" 2> /dev/null && return
        sleep 0.5
    done
    echo "$1 did not reach step $2" >&2
    return 1
}

# Prints the id of the process that trains in a work directory and has a variable with a value, its index.
process_with() { # WORKDIR VARIABLE=VALUE
    local pid
    for pid in $(pgrep -f "experiments.train .*--workdir=$1( |$)"); do
        if tr '\0' '\n' < "/proc/$pid/cmdline" | head -n 1 | grep -q python &&
            tr '\0' '\n' < "/proc/$pid/environ" | grep -qx "$2"; then
            echo "$pid"
            return
        fi
    done
    echo "no process with $2" >&2
    return 1
}

say() { echo "$(date +%T) $*"; }

# Kills a process of a run at step 6, and asks another to stop at step 14; a variable holds their index.
disturb() { # WORKDIR VARIABLE
    reach_step "$1" 6
    say "kill -9 of process 2"
    kill -9 "$(process_with "$1" "$2=2")"
    reach_step "$1" 14
    say "SIGTERM to process 1"
    kill -TERM "$(process_with "$1" "$2=1")"
}
