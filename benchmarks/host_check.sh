#!/bin/sh
# Measures what docs says of the speed of a machine without a GPU: about two hours, in a third of
# which torch.compile compiles. The machine has to be quiet, and the checkout a commit.
#
#     PYTHON=python3 sh benchmarks/host_check.sh [--dry-run] MACHINE [PART ...]
#
# MACHINE: one word for the names of the files in benchmarks/results/.
# Parts: small medium large threads2 start record limits precision compiled loader overhead steps
# hosts; all without one. The last two are several processes (benchmarks/comm.py), of which hosts
# needs root.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
call=
if [ "${1:-}" = --dry-run ]; then
  call=echo
  shift
fi
machine=${1:?is missing: a word for the machine, such as epyc}
shift
results=benchmarks/results/$(date -u +%F)
host=$results-host-$machine

# Status 4 says that a requirement was missed, as the file does; status 3 that a case had a busy
# neighbour: the other parts are measured all the same, and this script ends with it.
invalid=0
measure() {
  program=benchmarks/$1.py
  shift
  $call "$python" "$program" "$@" && return
  case $? in
    3) invalid=3 ;;
    4) ;;
    *) exit 1 ;;
  esac
}

run() {
  measure run --suite host --window-s 0.5 "$@"
}

parts="small medium large threads2 start record limits precision compiled loader overhead steps hosts"
for part in ${*:-$parts}; do
  case $part in
    small)
      run --threads 1 --alternations 25 --modes eager,compile,acc,capture \
        --case mlp mlp_small optimizer optimizer_fused --json "$host-threads1-small.jsonl"
      ;;
    medium)
      run --threads 1 --alternations 9 --modes eager,compile,acc \
        --case block pointwise lstm lstm_unrolled --json "$host-threads1-medium.jsonl"
      ;;
    large)
      run --threads 1 --alternations 9 --modes eager,compile,acc \
        --case resnet18 resnet18_cifar gpt --json "$host-threads1-large.jsonl"
      ;;
    threads2)
      run --threads 2 --alternations 9 --modes eager,compile,acc --json "$host-threads2.jsonl"
      ;;
    start)
      run --threads 1 --alternations 9 --modes eager,compile,acc --compile-forms model \
        --case mlp_small --startup --json "$host-start.jsonl"
      ;;
    record)
      measure record --json "$results-record-$machine-threads1.jsonl"
      ;;
    limits)
      measure limits --json "$results-limits-$machine.jsonl"
      ;;
    precision | compiled | overhead)
      measure "$part" --json "$results-$part-$machine-threads1.jsonl"
      ;;
    loader)
      measure loader --rounds 61 --json "$results-loader-$machine-threads1.jsonl"
      measure loader --rounds 61 --workers 0 --json "$results-loader-$machine-threads1-workers0.jsonl"
      measure loader --rounds 31 --only-pass --json "$results-loader-$machine-threads1-only.jsonl"
      measure loader --rounds 31 --only-pass --workers 0 \
        --json "$results-loader-$machine-threads1-workers0-only.jsonl"
      ;;
    steps | hosts)
      measure comm --part "$part" --json "$results-comm-$machine-$part.jsonl"
      ;;
    *)
      echo "host_check.sh: no part $part; there are $parts" >&2
      exit 2
      ;;
  esac
done
exit $invalid
