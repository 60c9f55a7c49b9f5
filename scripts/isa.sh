#!/usr/bin/env bash
# Runs the test suite once for each instruction set that XLA's CPU compiler may use:
#
#   uv run scripts/isa.sh                            # AVX2, SSE4_2, and what this machine has
#   uv run scripts/isa.sh SSE4_2 -- tests/parallel   # one of them; pytest's arguments after --
#
# On another CPU the same program rounds differently (fused multiply-adds, sums in another order).
# The programs are optimised here. Without optimisation, as plain `pytest` compiles them, the
# instruction set changed no bit of eight small programs; with it, it changed two (jaxlib 0.11.2).
# Matrix products of jaxlib's libraries choose their instructions themselves and are not limited.
# Exit codes: 0 all passed, 1 some failed, 2 a word that is no instruction set.
set -uo pipefail
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
  exit 0
fi
cd "$(dirname "$0")/.."
declare -A FEATURES=(
  [SSE4_2]=sse4_2 [AVX]=avx [AVX2]=avx2 [AVX512]=avx512f [AVX512_VNNI]=avx512_vnni
  [AVX512_BF16]=avx512_bf16 [AMX]=amx_int8 [AMX_FP16]=amx_fp16 [native]=fpu
)
sets=()
while (($#)) && [[ $1 != -- ]]; do
  # XLA takes a word that it does not know for no limit at all.
  if [[ -z $1 || -z ${FEATURES[$1]:-} ]]; then
    echo "error: $1 is no instruction set; there are ${!FEATURES[*]}" >&2
    exit 2
  fi
  sets+=("$1")
  shift
done
(($#)) && shift
((${#sets[@]})) || sets=(AVX2 SSE4_2 native)

failed=0 summary=()
for name in "${sets[@]}"; do
  if ! grep -qw "${FEATURES[$name]}" /proc/cpuinfo; then
    summary+=("$name: this machine does not have it")
    continue
  fi
  echo "=== $name"
  limit="--xla_cpu_max_isa=$name"
  [[ $name == native ]] && limit=""
  if XLA_FLAGS="--xla_backend_optimization_level=3 $limit" pytest "$@"; then
    summary+=("$name: passed")
  else
    failed=1
    summary+=("$name: FAILED")
  fi
done
printf '%s\n' "${summary[@]}"
exit "$failed"
