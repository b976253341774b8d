#!/bin/bash
# SLURM on this machine alone, for trials: one node, its daemons under this user, everything in one folder.
#
#     source experiments/cluster/one_node_slurm.sh /tmp/slurm      # starts it; SLURM_CONF is set
#     stop_slurm
#
# Needs slurmctld, slurmd and munged (Debian: apt-get install slurm-wlm).

start_slurm() {
    local folder=$1 user host
    user=$(id -un) host=$(hostname -s)
    mkdir -p "$folder"/{state,spool} && chmod 700 "$folder"
    [ -e "$folder/munge.key" ] || (umask 077 && head -c 128 /dev/urandom > "$folder/munge.key")
    # cred_expire: seconds for which a message is valid, and for which a requeued job waits.
    cat > "$folder/slurm.conf" <<CONF
ClusterName=trial
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=10
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0
ReturnToService=2
KillWait=10
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
    export SLURM_CONF=$folder/slurm.conf
    export PATH=$PATH:/usr/sbin:/sbin
    munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
        --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
    slurmctld -c 2> /dev/null
    slurmd 2> /dev/null
    for _ in $(seq 30); do
        sinfo --noheader --states=idle --format=%n 2> /dev/null | grep -q . && return
        sleep 1
    done
    echo "SLURM did not start; see $folder/slurmctld.log and $folder/slurmd.log" >&2
    return 1
}

stop_slurm() {
    local folder name
    folder=$(dirname "$SLURM_CONF")
    scancel --user="$(id -un)" 2> /dev/null
    for name in slurmd slurmctld munged; do
        [ -s "$folder/$name.pid" ] && kill "$(cat "$folder/$name.pid")"
    done
}

start_slurm "$1"
