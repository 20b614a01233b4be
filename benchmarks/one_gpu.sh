#!/usr/bin/env bash
# What one GPU can prove of semmoe in nine minutes, in parts: `bash benchmarks/one_gpu.sh [PART ...]`, by default all.
#
#   PYTHON       the interpreter, with torch, Triton, transformers and pytest, and vLLM for its parts (default: python)
#   OUT          the folder of parts.tsv and of each part's log and figures (default: gpu-report)
#   MOST_SECONDS the limit on all parts together (default: 530)
#
# No network is needed: the model is the shipped one. Every part has a time limit, and the parts after a failed one run.
# Without a GPU the same parts are rehearsed on the CPU with fewer sizes, and their times mean nothing. vLLM needs an
# NCCL of 2.32 or newer to put two ranks on a GPU: preload one (LD_PRELOAD, VLLM_NCCL_SO_PATH). Exit code 1 if a part
# failed, 2 for an unknown part.

set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
export PYTHON=${PYTHON:-python} OUT=${OUT:-gpu-report} MOST_SECONDS=${MOST_SECONDS:-530}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
PARTS=(machine kernels graphs kernel-times decode-times prompt-times
  plans tokens-2-dp tokens-2-tp tokens-4-dp tokens-4-tp vllm-dp vllm-tp)
declare -A LIMITS=([machine]=60 [plans]=180 [vllm-dp]=9999 [vllm-tp]=9999) # seconds; vLLM gets the rest of the time
OTHER_LIMIT=110
STOP_SECONDS=15 # from the request to end to the kill
SKIPPED=77      # exit code of a part that cannot run here; the last line of its log is the reason

semmoe() {
  "$PYTHON" -c "from semmoe.cli import main; main()" "$@"
}

needs() { # a module of Python
  "$PYTHON" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" && return
  echo "$1 is not installed"
  exit $SKIPPED
}

machine() { # what the rest runs on
  "$PYTHON" -c "
import platform, torch, transformers
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(platform.machine(), 'Python', platform.python_version(), 'torch', torch.__version__)
print('transformers', transformers.__version__)
print(', '.join(names) or 'no GPU: a rehearsal on the CPU, whose times mean nothing')"
}

kernels() { # Triton's kernels give the results of plain torch, bit for bit
  needs triton
  if ((GPUS)); then
    "$PYTHON" -m pytest -q -rs tests/test_kernels_at_real_shapes.py -k gpu
  else
    TRITON_INTERPRET=1 "$PYTHON" tests/test_kernels_at_real_shapes.py 1
  fi
}

graphs() { # a captured pass is replayed on other batches; without a GPU it is traced
  needs triton
  if ((GPUS)); then
    "$PYTHON" -m pytest -q -rs tests/test_shuffler.py -k cuda_graph
  else
    "$PYTHON" -m pytest -q -rs tests/captured_passes.py
  fi
}

kernel_times() {
  needs triton
  if ((GPUS)); then
    "$PYTHON" benchmarks/bench_kernels.py --tokens 64 1024 8192
  else
    TRITON_INTERPRET=1 "$PYTHON" benchmarks/bench_kernels.py --tokens 64 --width 64
  fi
}

decode_times() { # microseconds that semmoe adds to a layer of a captured pass
  if ((GPUS)); then
    "$PYTHON" benchmarks/bench_captured.py
  else
    "$PYTHON" benchmarks/bench_captured.py --rehearse --layers 2 --width 64 --rows 8
  fi
}

prompt_times() { # the same of a pass over prompts, which is not captured
  if ((GPUS)); then
    "$PYTHON" benchmarks/bench_captured.py --prompts 8 --rows 1024 8192
  else
    "$PYTHON" benchmarks/bench_captured.py --rehearse --layers 2 --width 64 --prompts 2 --rows 64
  fi
}

plans() { # for two and four ranks, with copies of experts
  semmoe profile tiny --limit 48 --max-prompt-tokens 128 --max-new-tokens 4 --out "$OUT/trace" || return
  local attention
  for attention in dp tp; do
    solved 2 $attention "plan-2-$attention" --redundant-experts 4 || return
    solved 4 $attention "plan-4-$attention" --redundant-experts 4 || return
  done
}

solved() { # ranks, attention, folder and further options of `semmoe solve`
  semmoe solve "$OUT/trace" --ep-size "$1" --attention "$2" --out "$OUT/$3" --force "${@:4}"
}

tokens() { # ranks and attention: every token of ranks that share the GPU equals plain transformers' own
  "$PYTHON" benchmarks/prove_tokens.py "$OUT/plan-$1-$2"
}

vllm() { # attention: vLLM without a plan, on it with swaps, and without it again
  needs vllm
  solved 2 "$1" "vllm-$1/plan" || return
  solved 2 "$1" "vllm-$1/other" --seed 1 || return # to swap with
  local options=(--engine vllm --attention "$1" --out "$OUT/vllm-$1" --without kernels doctor "profile and solve")
  if ((!GPUS)); then
    "$PYTHON" benchmarks/prove_gpu.py "${options[@]}" --rehearse
    return
  fi
  if ! "$PYTHON" -c "import sys, torch; sys.exit(torch.cuda.nccl.version() < (2, 32))"; then
    echo "NCCL is older than 2.32, which lets no two ranks use one GPU: preload a newer one"
    return $SKIPPED
  fi
  local small=(--dtype float32 --attention-backend TRITON_ATTN --max-model-len 2048 --gpu-memory-utilization 0.15
    --kv-cache-memory-bytes 2000000000 --disable-custom-all-reduce)
  local graphs=(--compilation-config '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,8,32]}')
  [[ $1 == tp ]] && graphs=(--enforce-eager) # captured graphs hold the token tables, which a swap replaces
  "$PYTHON" benchmarks/prove_gpu.py "${options[@]}" --one-gpu -- "${small[@]}" "${graphs[@]}"
}

run() { # a part by its name
  case $1 in
    tokens-* | vllm-*) ${1%%-*} $(tr - ' ' <<<"${1#*-}") ;;
    *) "${1//-/_}" ;;
  esac
}

measured() { # run a part within the time that is left, and write its result
  local part=$1 log="$OUT/$1.log" left=$((MOST_SECONDS - SECONDS)) limit=${LIMITS[$1]:-$OTHER_LIMIT} began=$SECONDS
  local code=0 state reason=""
  ((limit > left)) && limit=$left
  if ((limit <= STOP_SECONDS)); then
    state=skipped reason="no time was left"
  else
    timeout -k $STOP_SECONDS $((limit - STOP_SECONDS)) bash -c 'run "$1"' - "$part" >"$log" 2>&1
    code=$?
    case $code in
      0) state=passed ;;
      "$SKIPPED") state=skipped reason=$(tail -n 1 "$log") ;;
      124 | 137) state=failed reason="not done after $((SECONDS - began)) s" ;;
      *) state=failed reason="exit code $code, $log: $(tail -n 1 "$log" | cut -c 1-200)" ;;
    esac
  fi
  [[ $state == failed ]] && failures=$((failures + 1))
  printf '%s\t%s\t%d\t%s\n' "$part" "$state" $((SECONDS - began)) "$reason" | tee -a "$OUT/parts.tsv"
}

main() {
  local part failures=0
  for part in "$@"; do
    if [[ ! " ${PARTS[*]} " == *" $part "* ]]; then
      echo "no part $part; there are: ${PARTS[*]}" >&2
      exit 2
    fi
  done
  mkdir -p "$OUT"
  : >"$OUT/parts.tsv"
  GPUS=$(timeout 60 "$PYTHON" -c "import torch; print(torch.cuda.device_count())" 2>/dev/null) || GPUS=0
  for part in "${PARTS[@]}"; do
    if (($# == 0)) || [[ " $* " == *" $part "* ]]; then
      measured "$part"
    else
      printf '%s\tskipped\t0\tnot asked for\n' "$part" >>"$OUT/parts.tsv"
    fi
  done
  printf '\nAll parts, in %d s; logs and figures are in %s\n' $SECONDS "$OUT"
  while IFS=$'\t' read -r part state seconds reason; do
    printf '  %-13s%-9s%5s s  %s\n' "$part" "$state" "$seconds" "$reason"
  done <"$OUT/parts.tsv"
  return $((failures > 0))
}

export -f semmoe needs machine kernels graphs kernel_times decode_times prompt_times plans solved tokens vllm run
export GPUS=0 SKIPPED
main "$@"; exit # on one line, since bash reads on in a script that changes meanwhile
