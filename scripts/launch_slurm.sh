#!/usr/bin/env bash
# A training job under SLURM: one process a host, which finds the others by itself.
#
#   sbatch --nodes=4 --time=24:00:00 scripts/launch_slurm.sh --preset=llama3_8b --mesh.tensor=8 ...
#
# Everything after the script's name goes to experiments/pretrain.py. Submit from the repository.
# Before the time limit, at a preemption and at `scancel --signal=TERM --batch JOB` the run saves;
# it then goes on in a requeued job from its last step. A run that fails is requeued too, at most
# MAX_RESTARTS (3) times; wrong flags (exit code 2), a step that fails again and again (70) and a run
# that another has taken over (76) are not tried again. PYTHON: the interpreter.
# SUPERVISE=1: scripts/supervise.py runs the job on SUPERVISE_HOSTS of its nodes (default: all; the
# rest are hot spares), restarts it after a fault, and a requeued job avoids the nodes it excluded.
#
# A job on unlike GPUs is a heterogeneous job, a component for each kind. The options below count for
# the first one; KINDS names the kinds in the order of the components (--kind of each):
#
#   KINDS=h100,l4 sbatch --nodes=2 : --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --exclusive \
#     scripts/launch_slurm.sh --precisions=FILE --preset=llama3_8b ...
#
# With SUPERVISE=1 all hosts run one command: no KINDS, the file then names kinds as their cards.
#SBATCH --job-name=megajax
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
set -uo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then # of this script; the trainer's: pretrain.py --help
  sed -n '2,/^#SBATCH/{/^#SBATCH/!s/^# \{0,1\}//p}' "$0"
  exit 0
fi
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" || exit 1

python=${PYTHON:-.venv/bin/python}
asked= told= step=
components=${SLURM_HET_SIZE:-1} nodes=${SLURM_NNODES:-} kinds=() groups=()
[[ -z ${KINDS:-} ]] || IFS=, read -ra kinds <<<"$KINDS"
if [[ -n ${KINDS:-} && (${#kinds[@]} != "$components" || -n ${SUPERVISE:-}) ]]; then
  echo "error: KINDS=$KINDS must name a kind for each component of the job, of which there are" \
    "$components (sbatch ... : ...), and cannot be combined with SUPERVISE" >&2
  exit 2
fi
if [[ $components -gt 1 ]]; then
  nodes=0 groups=("--het-group=0-$((components - 1))")
  for ((i = 0; i < components; i++)); do
    count=SLURM_NNODES_HET_GROUP_$i
    nodes=$((nodes + ${!count}))
  done
fi
# The trap comes before the step: a SIGTERM between the two would end this shell, and not the run.
trap 'asked=1; tell' TERM
tell() {
  [[ -n $step ]] || return
  told=1
  if [[ -n ${SUPERVISE:-} ]]; then
    kill -TERM "$step" # the driver lets all ranks save and stop
  else
    # scancel tells the processes and not this shell; srun would make a SIGTERM of its own a SIGKILL
    # of theirs. jax lets them stop, and save, at the same step.
    scancel --signal=TERM "$SLURM_JOB_ID"
  fi
}
address=$(hostname):$((20000 + SLURM_JOB_ID % 20000))
if [[ -n ${SUPERVISE:-} ]]; then
  out=runs/supervised/slurm-$SLURM_JOB_ID
  MEGAJAX_TOKEN=$("$python" -c 'import secrets; print(secrets.token_hex(16))')
  export MEGAJAX_TOKEN
  srun ${groups[@]+"${groups[@]}"} --ntasks-per-node=1 --kill-on-bad-exit=0 \
    "$python" scripts/supervise.py --agent="$address" &
  "$python" scripts/supervise.py --agents=elsewhere --listen="0.0.0.0:${address##*:}" \
    --hosts="${SUPERVISE_HOSTS:-$nodes}" --out="$out" \
    -- "$python" experiments/pretrain.py "$@" &
  step=$!
elif [[ $components -gt 1 ]]; then
  # One step, whose tasks are numbered through all components. jax would read from SLURM_LOCALID that
  # there is one process a GPU.
  export JAX_COORDINATOR_ADDRESS=$address
  task='unset SLURM_LOCALID
    JAX_NUM_PROCESSES=$SLURM_NTASKS JAX_PROCESS_ID=$SLURM_PROCID exec "$@"'
  words=()
  for ((i = 0; i < components; i++)); do
    [[ $i == 0 ]] || words+=(:)
    words+=("--het-group=$i" --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c "$task" task)
    words+=("$python" experiments/pretrain.py --told_code=143 "$@" ${kinds[i]:+"--kind=${kinds[i]}"})
  done
  srun "${words[@]}" &
  step=$!
else
  srun --ntasks-per-node=1 --kill-on-bad-exit=1 "$python" experiments/pretrain.py --told_code=143 "$@" \
    ${kinds[0]:+"--kind=${kinds[0]}"} &
  step=$!
fi
[[ -z $asked || -n $told ]] || tell

code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do # the signal ended the wait, not the step
  code=0
  wait "$step" || code=$?
done

if [[ $code == 0 || $code == 2 || $code == 70 || $code == 76 ]]; then
  exit "$code"
fi
if [[ -n ${SUPERVISE:-} && -s $out/blocklist ]]; then
  scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$(sort -u "$out/blocklist" | paste -sd,)"
fi
restarts=${SLURM_RESTART_COUNT:-0}
if [[ -n $asked || $restarts -lt ${MAX_RESTARTS:-3} ]]; then
  echo "exit code $code; requeueing job ${SLURM_JOB_ID:-?} (restarts so far: $restarts)" >&2
  scontrol requeue "${SLURM_JOB_ID:?not inside a SLURM job}"
fi
exit "$code"
