#!/usr/bin/env bash
# Builds both Python environments: .venv (trainer, Dagster, tests) and .venv-sglang (inference server).
# Each finished environment holds a stamp of what it was built from: an interrupted set-up goes on where it
# stopped, and a finished one has nothing to do.
#   PYTHON           the interpreter to build with (3.11 or newer)
#   TORCH_INDEX_URL  another package index for torch, for a certain CUDA build, say
set -euo pipefail
cd "$(dirname "$0")/.."

torch=2.13.0
sglang=0.5.23
work=.agentrl-setup
worker=

fail() { printf 'error: %s\nmend: %s\n' "$1" "$2" >&2; exit 1; }

# The base interpreter: one inside an active environment of ours must not build that environment anew.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.version_info < (3, 11) and sys.exit(1); print(sys._base_executable)' 2>/dev/null
    then return; fi
  done
}

# install_torch FOLDER: the CPU build where pip finds one, the CUDA build with a GPU
install_torch() {
  local pip=("$1/bin/python" -m pip install --progress-bar off)
  if [ -n "${TORCH_INDEX_URL:-}" ]; then
    "${pip[@]}" "torch==$torch" --index-url "$TORCH_INDEX_URL"
  elif [ "$accelerator" = gpu ]; then
    "${pip[@]}" "torch==$torch"
  else
    "${pip[@]}" "torch==$torch+cpu" || "${pip[@]}" "torch==$torch"
  fi
}

# A half-installed environment is completed by pip; one that is broken, moved, or of another Python is made anew.
make_venv() {
  local folder=$1 version='import sys; print(sys.version_info[:2])'
  if "$folder/bin/python" -m pip --version && grep -qF "$PWD/$folder/bin" "$folder/bin/pip" &&
    [ "$("$folder/bin/python" -c "$version")" = "$("$python" -c "$version")" ]; then return; fi
  rm -rf "$folder"
  if "$python" -m venv "$folder"; then return; fi
  # Debian ships venv apart from Python.
  local package; package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
  rm -rf "$folder"
  if [ "$(id -u)" != 0 ] || ! command -v apt-get; then
    echo "$python cannot make virtual environments; install $package (sudo apt-get install $package)"
    return 1
  fi
  apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y "$package"
  "$python" -m venv "$folder"
}

install_trainer() {
  make_venv .venv
  install_torch .venv
  .venv/bin/python -m pip install --progress-bar off -c scripts/constraints.txt -e '.[local,real,dev]'
}

install_sglang() {
  make_venv .venv-sglang
  if [ "$accelerator" = gpu ]; then
    .venv-sglang/bin/python -m pip install --progress-bar off "sglang==$sglang"
    return
  fi
  install_torch .venv-sglang
  .venv-sglang/bin/python -m pip install --progress-bar off -c scripts/constraints-sglang.txt \
    -r scripts/requirements-sglang-cpu.txt "torch==$torch"
  # Without its dependencies: they name CUDA builds that break the import beside a CPU torch.
  .venv-sglang/bin/python -m pip install --progress-bar off --no-deps "sglang==$sglang"
}

# step NAME FOLDER FILE...: run install_NAME unless FOLDER was built from these files
step() {
  local name=$1 folder=$2 log=$work/$1.log began=$SECONDS key; shift 2
  key="$accelerator $torch $sglang $python $PWD ${TORCH_INDEX_URL:-} $(cat "$@" scripts/setup.sh | sha256sum)"
  if [ -x "$folder/bin/python" ] && [ "$(cat "$folder/.built-from" 2>/dev/null)" = "$key" ]; then return; fi
  printf '[setup] %s ... (log: %s)\n' "$name" "$log"
  set -m  # a process group of its own, which an interrupt ends whole
  "install_$name" >"$log" 2>&1 </dev/null &
  worker=$!
  set +m
  while kill -0 "$worker" 2>/dev/null; do
    sleep 1
    if [ $(((SECONDS - began) % 15)) = 14 ]; then
      printf '[setup] %s: %d s, %s\n' "$name" $((SECONDS - began)) "$(tail -n 1 "$log" | cut -c 1-80)"
    fi
  done
  if ! wait "$worker"; then
    worker=
    tail -n 15 "$log" >&2
    fail "the set-up of $name failed; its last lines are above, all of them in $log" \
      "mend what they say and run the same command again: it goes on from here"
  fi
  worker=
  printf '%s' "$key" >"$folder/.built-from"
  printf '[setup] %s: done in %d s\n' "$name" $((SECONDS - began))
}

trap 'if [ -n "$worker" ]; then kill -TERM -- "-$worker" 2>/dev/null || true; fi' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

python=$(find_python)
if [ -z "$python" ]; then
  fail "${PYTHON:-python3} is not Python 3.11 or newer" "install one and name it: PYTHON=python3.11 make setup"
fi
accelerator=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then accelerator=gpu; fi

mkdir -p "$work"
exec 9>"$work/lock"
if ! flock -n 9; then
  echo "[setup] another set-up is running here; waiting for it"
  flock 9
fi
step trainer .venv pyproject.toml scripts/constraints.txt
step sglang .venv-sglang scripts/requirements-sglang-cpu.txt scripts/constraints-sglang.txt
