# shellcheck shell=bash
# Shared functions of the batch scripts: place and start ranks, forward signals, requeue.

# SIGUSR2, which Slurm sends to this shell before the time limit, and SIGUSR1 are forwarded to the
# ranks.
STEP=
RECEIVED_SIGNAL=
SPREAD_SERVERS=${SPREAD_SERVERS:-no}
SURVIVE=${SURVIVE:-auto}
RESTARTS=${RESTARTS:-0}
SPARE_NODES=${SPARE_NODES:-0}
SPARES=${SPARES:-0}
RECLAIM=${RECLAIM:-no}
NODE_CHECK=${NODE_CHECK:-60} # seconds between two looks for nodes that have returned
MISSING=() # nodes that the run could use, but that do not respond
STARTED=0 # number of times the ranks have been started
trap 'forward_signal USR1' USR1
trap 'forward_signal USR2' USR2

ALADDIN_STOPPED=75 # status of a run that wrote a checkpoint and stopped because of a signal

if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "$ALADDIN_SCRIPT: not inside a Slurm job. Submit it: sbatch slurm/$ALADDIN_SCRIPT ..." >&2
    exit 2
fi
# shellcheck source=slurm/site.sh
. "$ALADDIN_SLURM/site.sh"

fail() {
    echo "$ALADDIN_SCRIPT: $*" >&2
    exit 2
}

for number in RESTARTS SPARE_NODES SPARES; do
    [[ ${!number} =~ ^[0-9]{1,6}$ ]] || fail "$number: expected a number, got '${!number}'"
done

# Divide the words after the batch script's name, "$@" here and there: options, which remain, and
# ARGUMENTS of a training script, which are -- and what follows.
OPTIONS=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    OPTIONS+=("$1")
    shift
done
ARGUMENTS=("$@")
set -- "${OPTIONS[@]}"

# option NAME WORDS...: print the value of --NAME among the words; fails if it is missing.
option() {
    local name=$1 found=1 value=
    shift
    while [ $# -gt 0 ]; do
        case $1 in
            "--$name") found=0 value=${2:-} ;;
            "--$name="*) found=0 value=${1#*=} ;;
        esac
        shift
    done
    [ $found = 0 ] && printf '%s\n' "$value"
    return $found
}

# in_config NAME WORDS...: succeed if the file of --config sets the option.
in_config() {
    local name=$1 file
    shift
    file=$(option config "$@") &&
        grep -qsE "^[[:space:]]*${name//-/[-_]}[[:space:]]*=" "$file"
}

# job_name: print the name of this job for scontrol.
job_name() {
    if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
        echo "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
    else
        echo "${SLURM_HET_JOB_ID:-$SLURM_JOB_ID}"
    fi
}

# complete_options WORDS...: set OPTIONS to the words, of which the first may be a training script,
# and RUN_DIR. Add the options that let a requeued job resume (the same run folder, and
# checkpoints), and the number of spare ranks.
complete_options() {
    local name
    OPTIONS=("$@")
    for name in join resume run-dir spares; do
        if in_config "$name" "$@"; then
            fail "--config: $name in a file has no effect here. Pass --$name VALUE on the command" \
                "line, or SPARES=N for spare ranks."
        fi
    done
    check_spares "$@"
    OPTIONS+=(--spares "$SPARES")
    if RUN_DIR=$(option join "$@"); then
        : # the run is resumed, whether another job trains it or not
    elif ! RUN_DIR=$(option resume "$@") || [ "$RUN_DIR" = auto ]; then
        if ! RUN_DIR=$(option run-dir "$@"); then
            RUN_DIR=runs/${SLURM_JOB_NAME:-aladdin}-$(job_name)
            OPTIONS+=(--run-dir "$RUN_DIR")
        fi
        option resume "$@" >/dev/null || OPTIONS+=(--resume auto)
    fi
    option checkpoint-every "$@" >/dev/null || in_config checkpoint-every "$@" ||
        OPTIONS+=(--checkpoint-every 15min)
}

# check_spares WORDS...: fail if SPARES cannot be used with these options.
check_spares() {
    if option spares "$@" >/dev/null; then
        fail "--spares: this script sets it. Use SPARES=1 sbatch ... instead."
    elif [ "$SPARES" -gt 0 ] && [ "$LAUNCHER" != mpirun ]; then
        fail "SPARES=$SPARES: spare ranks require LAUNCHER=mpirun, got '$LAUNCHER'. Use" \
            "LAUNCHER=mpirun, or RESTARTS."
    elif [ "$SPARES" -gt 0 ] && [ "$SURVIVE" = no ]; then
        fail "SPARES=$SPARES: spare ranks require SURVIVE=auto or yes, got no"
    fi
}

# workers_per_node: print the number of GPUs of a node, or of requested tasks if it has none.
workers_per_node() {
    local gpus=${SLURM_GPUS_ON_NODE:-0}
    if [ "$gpus" = 0 ]; then
        gpus=${SLURM_NTASKS_PER_NODE:-1}
    fi
    echo "${WORKERS_PER_NODE:-$gpus}"
}

# count_servers: set SERVERS to the number of server ranks of a run with OPTIONS.
count_servers() {
    SERVERS=$("$PYTHON" -m aladdin_mpi.servers "${OPTIONS[@]}") || exit $?
}

# place_ranks SERVERS WORKERS HOSTS...: place WORKERS workers on each host, and the servers on the
# first host or round-robin. Sets PLACES (the host of each rank) and SLOTS (HOST:RANKS).
place_ranks() {
    local servers=$1 workers=$2 among=1 place count i
    shift 2
    local hosts=("$@")
    case $SPREAD_SERVERS in
        yes) among=$# ;;
        no) ;;
        *) fail "SPREAD_SERVERS: expected yes or no, got '$SPREAD_SERVERS'" ;;
    esac
    PLACES=()
    SLOTS=()
    for ((i = 0; i < servers; i++)); do
        PLACES+=("${hosts[i % among]}")
    done
    for place in "${!hosts[@]}"; do
        count=$((workers + (place < among ? (servers - place + among - 1) / among : 0)))
        SLOTS+=("${hosts[place]}:$count")
        for ((i = 0; i < workers; i++)); do
            PLACES+=("${hosts[place]}")
        done
    done
    export ALADDIN_WORKERS=$workers
}

# expect_workers COUNT: let a training script with OPTIONS refuse another number of workers. It may
# have other servers than counted, because it was not run for that.
expect_workers() {
    if [[ ${OPTIONS[0]} == *.py ]]; then
        export ALADDIN_MPI_LAUNCHED_WORKERS=$1
    fi
}

# place_run HOSTS...: place the ranks of a run with OPTIONS. The SPARES are the last ranks, on the
# hosts in turn from the last host backwards.
place_run() {
    local hosts=("$@") place i
    place_ranks "$SERVERS" "$(workers_per_node)" "$@"
    export ALADDIN_TRAINING=${#PLACES[@]}
    expect_workers $((ALADDIN_TRAINING - SERVERS))
    for ((i = 0; i < SPARES; i++)); do
        place=$((${#hosts[@]} - 1 - i % ${#hosts[@]}))
        PLACES+=("${hosts[place]}")
        SLOTS[place]=${hosts[place]}:$((${SLOTS[place]##*:} + 1))
    done
}

# print_placement: print the placement of the run's ranks.
print_placement() {
    local spares=
    if [ "$SPARES" -gt 0 ]; then
        spares=", spare ranks: $SPARES"
    fi
    echo "${#PLACES[@]} ranks (servers: $SERVERS$spares); host:ranks ${SLOTS[*]}"
}

# start_ranks PROGRAM...: start the program on all PLACES and wait for it. It runs in the background
# so that this shell can forward signals. Returns its status.
start_ranks() {
    local bind=()
    if [ ${#SITE_CORES[@]} -gt 0 ]; then
        export ALADDIN_CORES="${SITE_CORES[*]}" ALADDIN_SERVERS=$SERVERS
        bind=(bash "$ALADDIN_SLURM/bind.sh")
    fi
    case $LAUNCHER in
        srun) start_srun "${bind[@]}" "$@" ;;
        mpirun) start_mpirun "${bind[@]}" "$@" ;;
        *) fail "LAUNCHER: expected srun or mpirun, got '$LAUNCHER'" ;;
    esac
    await_step
}

start_srun() {
    if [ -n "${HET_GROUPS:-}" ]; then # Slurm places the tasks
        srun --het-group="$HET_GROUPS" --mpi="$SRUN_MPI" --kill-on-bad-exit=0 --wait=60 \
            "${SITE_SRUN[@]}" "$@" &
        STEP=$!
        return
    fi
    # A list of places instead of a number per node, because the first node has more ranks than the
    # others. Its servers share cores (--overcommit): they wait for messages most of the time.
    # When a signal stops the run, every rank exits with a non-zero status at its own time, which
    # must not kill the others (--kill-on-bad-exit=0). A rank that fails ends the job after at most
    # a minute (--wait).
    PLACES_FILE=$(mktemp "${TMPDIR:-/tmp}/aladdin-places.XXXXXX")
    printf '%s\n' "${PLACES[@]}" >"$PLACES_FILE"
    (
        unset SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE
        export SLURM_HOSTFILE=$PLACES_FILE
        exec srun --mpi="$SRUN_MPI" --ntasks="${#PLACES[@]}" --distribution=arbitrary \
            --overcommit --kill-on-bad-exit=0 --wait=60 \
            "${SITE_SRUN[@]}" "$@"
    ) &
    STEP=$!
}

start_mpirun() {
    PLACES_FILE=$(mktemp "${TMPDIR:-/tmp}/aladdin-places.XXXXXX")
    printf '%s\n' "${PLACES[@]}" >"$PLACES_FILE"
    set_survival
    mpirun "${SURVIVAL[@]}" -np "${#PLACES[@]}" --hostfile "$PLACES_FILE" --map-by seq:OVERSUBSCRIBE \
        --bind-to none "${SITE_MPIRUN[@]}" "$@" &
    STEP=$!
}

# set_survival: set SURVIVAL to the options of mpirun with which the surviving ranks continue after
# a failure, if SURVIVE requests it and Open MPI supports it.
set_survival() {
    SURVIVAL=()
    case $SURVIVE in
        no) return ;;
        yes | auto) ;;
        *) fail "SURVIVE: expected yes, no or auto, got '$SURVIVE'" ;;
    esac
    if [[ "${SITE_MPIRUN[*]}" == *--with-ft* ]]; then
        return
    elif [[ "$(mpirun --version 2>/dev/null)" =~ \(Open\ MPI\)\ ([5-9]|[1-9][0-9])\. ]]; then
        SURVIVAL=(--with-ft ulfm)
    elif [ "$SPARES" -gt 0 ]; then
        fail "SPARES=$SPARES: spare ranks require the mpirun of Open MPI 5 or later. Use that," \
            "or RESTARTS."
    elif [ "$SURVIVE" = yes ]; then
        fail "SURVIVE=yes requires the mpirun of Open MPI 5 or later. Use SURVIVE=auto, or RESTARTS."
    fi
}

await_step() {
    local status=0 watcher=
    if [ "$RECLAIM" = yes ] && [ ${#MISSING[@]} -gt 0 ]; then
        watch_nodes &
        watcher=$!
    fi
    if [ -n "$RECEIVED_SIGNAL" ]; then
        forward_signal "$RECEIVED_SIGNAL"
    fi
    # A signal interrupts `wait` before the step has ended.
    while status=0 && { wait "$STEP" || status=$?; } && kill -0 "$STEP" 2>/dev/null; do :; done
    STEP=
    [ -z "$watcher" ] || kill "$watcher" 2>/dev/null || true
    rm -f "${PLACES_FILE:-}"
    return "$status"
}

forward_signal() {
    RECEIVED_SIGNAL=$1
    if [ -n "$STEP" ]; then
        echo "$ALADDIN_SCRIPT: forwarding SIG$1 to the ranks"
        kill -s "$1" "$STEP" 2>/dev/null || true
    fi
}

# last_checkpoint: print the name of the last checkpoint, or nothing.
last_checkpoint() {
    local path name last=
    for path in "$RUN_DIR"/checkpoint/samples-*/manifest.json; do
        name=$(basename "$(dirname "$path")")
        # Skip the user's copies, which have other names.
        if [[ $name =~ ^samples-[0-9]{12,}$ ]]; then
            last=$name
        fi
    done
    echo "$last"
}

# place_on_nodes: place the ranks of a run with OPTIONS on the job's nodes, except SPARE_NODES.
# After a failure, use only nodes that still respond.
place_on_nodes() {
    local node wanted responding=() all=()
    MISSING=()
    mapfile -t all < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    if [ "$SPARE_NODES" -ge ${#all[@]} ]; then
        fail "SPARE_NODES: expected fewer than the job's ${#all[@]} nodes, got '$SPARE_NODES'"
    fi
    wanted=$((${#all[@]} - SPARE_NODES))
    for node in "${all[@]}"; do
        if [ "$STARTED" = 0 ] || responds "$node"; then
            responding+=("$node")
        else
            MISSING+=("$node")
            echo "$ALADDIN_SCRIPT: node $node does not respond; the run continues without it" >&2
        fi
    done
    [ ${#responding[@]} -gt 0 ] || return 1
    if [ ${#responding[@]} -ge "$wanted" ]; then
        MISSING=()
    fi
    place_run "${responding[@]:0:$wanted}"
}

responds() {
    timeout 30 srun --overlap --nodelist="$1" --nodes=1 --ntasks=1 --gpus=0 true \
        >/dev/null 2>&1 </dev/null
}

# watch_nodes: stop the run once all nodes in MISSING are free again. Slurm has taken a failed node
# from the job for good, so the job has to be requeued.
watch_nodes() {
    local names
    names=$(IFS=,; echo "${MISSING[*]}")
    while sleep "$NODE_CHECK"; do
        if [ "$(sinfo --noheader --nodes="$names" --format=%T | sort -u)" = idle ]; then
            echo "$ALADDIN_SCRIPT: $names: free again; the run is saved, to continue on all nodes"
            kill -s USR2 "$STEP"
            return
        fi
    done
}

# taken_over: succeed if another job has taken over the run by --join, and waits until that job has
# locked the run's folder.
taken_over() {
    local i
    for ((i = 0; i < 300; i++)); do
        [ -e "$RUN_DIR/.join" ] || break
        sleep 1
    done
    [ -e "$RUN_DIR/.lock" ]
}

# may_restart STATUS CHECKPOINT: succeed if the run should be restarted: it failed, its options are
# valid, and it has written a checkpoint since CHECKPOINT, with which it began.
may_restart() {
    [ "$1" != 0 ] && [ "$1" != 2 ] && [ "$1" != $ALADDIN_STOPPED ] && [ -z "$RECEIVED_SIGNAL" ] &&
        [ "$STARTED" -le "$RESTARTS" ] && [ -z "${HET_GROUPS:-}" ] &&
        [ "$(last_checkpoint)" != "$2" ]
}

# train OPTIONS...: train on PLACES. Requeue the job if a signal stops the run; restart the run up
# to RESTARTS times if it fails. Returns the status of the training.
train() {
    local status before ranks
    if [ "$RESTARTS" -gt 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
        set -- "$@" --allow-resize # it may have been restarted with fewer nodes before
    fi
    while :; do
        status=0
        before=$(last_checkpoint)
        STARTED=$((STARTED + 1))
        start_ranks "$PYTHON" -m aladdin_mpi.train "$@" "${ARGUMENTS[@]}" || status=$?
        if [ $status = $ALADDIN_STOPPED ] && taken_over; then
            echo "$ALADDIN_SCRIPT: another job continues the run in $RUN_DIR"
            return 0
        fi
        if [ $status = 0 ] && [ ! -e "$RUN_DIR/summary.json" ]; then
            # Open MPI's mpirun exits like this when it loses a host.
            echo "$ALADDIN_SCRIPT: the run ended without a summary.json. Submit it again with" \
                "--run-dir $RUN_DIR --resume auto" >&2
            status=1
        fi
        may_restart $status "$before" || break
        ranks=${#PLACES[@]}
        place_on_nodes || break
        if [ ${#PLACES[@]} != "$ranks" ]; then
            set -- "$@" --allow-resize
        fi
        echo "$ALADDIN_SCRIPT: the run failed (status $status); restart $STARTED of $RESTARTS" \
            "from $(last_checkpoint), ${#PLACES[@]} ranks; host:ranks ${SLOTS[*]}"
    done
    if [ $status = $ALADDIN_STOPPED ]; then
        requeue "$before"
    fi
    return $status
}

requeue() {
    if [ "$(last_checkpoint)" = "$1" ]; then
        echo "$ALADDIN_SCRIPT: not requeued, because no checkpoint has been written since" \
            "the job started. Request a longer time limit." >&2
        return
    fi
    echo "$ALADDIN_SCRIPT: stopped at $(last_checkpoint); requeueing job $(job_name)"
    if ! scontrol requeue "$(job_name)"; then
        echo "$ALADDIN_SCRIPT: the job could not be requeued. Submit it again with" \
            "--run-dir $RUN_DIR --resume auto" >&2
        return
    fi
    sleep 60 # Slurm ends this shell
}
