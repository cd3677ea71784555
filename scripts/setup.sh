#!/usr/bin/env bash
# Makes the virtual environment VENV (argument 1) and installs the project in place with everything demo, test, lint
# and bench need. Argument 2 is `cuda13` (a machine with an NVIDIA driver) or `cpu`. JAX_VERSION, where set, pins JAX.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 backend=$2 jax_version=${JAX_VERSION:-}
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'setup: %s\n' "$*"; }

# A Python counts only if it runs (pyenv's shims exist without running), is new enough and can make environments
# (Debian ships python3 without ensurepip).
usable() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.14; do
    if [ -n "$candidate" ] && usable "$candidate"; then command -v "$candidate"; return; fi
  done
  for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python; do
    if usable "$candidate"; then echo "$candidate"; return; fi
  done
  if command -v uv >/dev/null 2>&1; then
    # From the root folder: here uv would find the environments that this script makes.
    candidate=$(cd / && uv python find '>=3.12' 2>/dev/null) || {
      say "uv installs Python 3.12" >&2
      uv python install --quiet 3.12 && candidate=$(cd / && uv python find '>=3.12')
    }
    if usable "$candidate"; then echo "$candidate"; return; fi
  fi
  return 1
}

python=$venv/bin/python
if ! usable "$python"; then
  base=$(find_python) || {
    echo "setup: install Python 3.12 or newer with its venv module (apt install python3.12-venv, pyenv install 3.12," \
      "or uv python install 3.12), or name one with PYTHON=/path/to/python3." >&2
    exit 1
  }
  say "$venv from $("$base" --version) at $base"
  "$base" -m venv --clear "$venv"
fi
# An environment that uv made has no pip.
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null

extras=dev
if [ "$backend" = cuda13 ]; then extras+=,cuda13; fi
pins=()
if [ -n "$jax_version" ]; then pins=("jax==$jax_version" "jaxlib==$jax_version"); fi

say "installing jaxtaxfree[$extras] in place${jax_version:+ with JAX $jax_version} (a minute or two the first time)"
"$python" -m pip install --quiet --editable ".[$extras]" ${pins[@]+"${pins[@]}"}

# Iris needs PyTorch and a GPU's libraries, its kernels need neither.
iris=$("$python" -c '
import tomllib
print(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["iris"][0])')
say "installing $iris alone, for its kernels"
"$python" -m pip install --quiet --no-deps "$iris"

if [ "$backend" = cpu ]; then
  # The plugin package alone (no driver, none of the CUDA libraries) lets the tests lower for CUDA on this machine.
  # JAX's own metadata says which version goes with it.
  plugin=$("$python" -c '
from importlib.metadata import requires
found = [r.split(";")[0].replace("[with-cuda]", "") for r in requires("jax") if r.startswith("jax-cuda13-plugin")]
print(found[0].strip())')
  say "no NVIDIA driver: installing $plugin alone, to compile for CUDA in the tests"
  "$python" -m pip install --quiet --no-deps "$plugin"
fi
say "done: $("$python" -c '
from importlib.metadata import version
print(", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "jax-triton", "triton", "jax-cuda13-plugin")))')"
