# SPDX-License-Identifier: MIT
#
# Sourced by the other scripts and .ci/run: finds what a build needs, or installs it. Nothing
# outside build/ and the system's package manager is touched.
#
#   setup_tools                    compiler, CMake >= 3.25, Ninja, Python
#   setup_libtorch auto|2.13|1.13  sets LIBTORCH_VERSION (2.13.0, ...) and LIBTORCH_PREFIX
#   setup_header HEADER PACKAGE    a header-only or small library of the system
#   setup_trainer_libraries        what examples/train and the optional headers need
#   configure BUILD_DIR PRESET [CMAKE_ARGUMENT...]
#   run_example NAME [ARGUMENT...] builds an example, optimised, and becomes it

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
venv="$root/build/venv"

say() { printf '\n== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# apt_install PACKAGE...: what of it is missing, if we may; else a message that names the packages.
apt_install() {
  local missing=() package as_root=()
  for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  if ! command -v apt-get >/dev/null; then
    die "this needs, by the names of Debian's packages: ${missing[*]}"
  fi
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null || ! { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
      die "please install, as root: apt-get install ${missing[*]}"
    fi
    as_root=(sudo)
  fi
  say "installing ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# at_least HAVE WANTED: compares versions.
at_least() { [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]; }

make_venv() {
  [ -x "$venv/bin/pip" ] && return
  mkdir -p "$root/build"
  rm -rf "$venv"
  if ! python3 -m venv "$venv" 2>/dev/null; then
    rm -rf "$venv"
    apt_install python3-venv
    python3 -m venv "$venv"
  fi
}

setup_tools() {
  command -v python3 >/dev/null || apt_install python3
  command -v "${CXX:-c++}" >/dev/null || apt_install g++
  command -v ninja >/dev/null || apt_install ninja-build
  command -v cmake >/dev/null || apt_install cmake
  if ! at_least "$(cmake --version | sed -n 's/^cmake version //p')" 3.25; then
    say "the system's CMake is older than 3.25: installing one under build/"
    make_venv
    "$venv/bin/pip" install --quiet cmake
    PATH="$venv/bin:$PATH"
  fi
}

setup_header() {
  printf '#include <%s>\n' "$1" | "${CXX:-c++}" -x c++ -std=c++20 -E -o /dev/null - 2>/dev/null ||
    apt_install "$2"
}

setup_trainer_libraries() {
  setup_header nlohmann/json.hpp nlohmann-json3-dev
  setup_header yaml-cpp/yaml.h libyaml-cpp-dev
  setup_header CLI/CLI.hpp libcli11-dev
  setup_header stb/stb_image.h libstb-dev
}

# torch_of PYTHON: prints "VERSION PREFIX" of the torch of that Python, if a build can use it: a wheel for
# CUDA makes CMake ask for the CUDA toolkit.
torch_of() {
  "$1" - 2>/dev/null <<'END'
import shutil, torch
if torch.version.cuda is None or shutil.which("nvcc"):
    print(torch.__version__.split("+")[0], torch.__path__[0])
END
}

# torch_config_dir PREFIX: prints the folder of TorchConfig.cmake below PREFIX, if there is one.
torch_config_dir() {
  local file
  for file in "$1"/share/cmake/Torch/TorchConfig.cmake "$1"/lib/cmake/Torch/TorchConfig.cmake \
    "$1"/lib/*/cmake/Torch/TorchConfig.cmake; do
    if [ -e "$file" ]; then
      dirname "$file"
      return
    fi
  done
}

# torch_in PREFIX: prints the version of the LibTorch below PREFIX, if there is one.
torch_in() {
  local config_dir
  config_dir="$(torch_config_dir "$1")"
  if [ -n "$config_dir" ]; then
    sed -n 's/^set(PACKAGE_VERSION "\([0-9.]*\).*/\1/p' "$config_dir/TorchConfigVersion.cmake"
  fi
}

# pip_torch: prints "VERSION PREFIX" of the torch in a virtual environment of our own; nothing if pip cannot.
pip_torch() {
  make_venv >&2
  local found index=()
  found="$(torch_of "$venv/bin/python")"
  if [ -z "$found" ]; then
    say "installing torch 2.13.0 under build/" >&2
    # Where the plain wheel is one for CUDA, take the one for CPUs: it builds on every machine.
    if "$venv/bin/pip" install --quiet --dry-run --ignore-installed --report - torch==2.13.0 2>/dev/null |
      grep -q '"nvidia-'; then
      index=(--index-url https://download.pytorch.org/whl/cpu)
    fi
    "$venv/bin/pip" install --quiet "${index[@]}" torch==2.13.0 >&2 || return 0
    found="$(torch_of "$venv/bin/python")"
  fi
  printf '%s' "$found"
}

setup_libtorch() {
  local wanted="$1" prefix version path
  LIBTORCH_VERSION="" LIBTORCH_PREFIX=""
  fits() { [ "$wanted" = auto ] || [[ "$1" == "$wanted" || "$1" == "$wanted".* ]]; }

  local prefixes="${CMAKE_PREFIX_PATH:-}"
  for prefix in ${prefixes//[:;]/ }; do                       # 1: what the user points at
    version="$(torch_in "$prefix")"
    if [ -n "$version" ] && fits "$version"; then
      LIBTORCH_VERSION="$version" LIBTORCH_PREFIX="$prefix"
      return
    fi
  done
  read -r version path <<<"$(torch_of python3)" || true        # 2: the active Python's
  if [ -n "$version" ] && fits "$version"; then
    LIBTORCH_VERSION="$version" LIBTORCH_PREFIX="$path"
    return
  fi
  if fits 2.13.0; then                                         # 3: a wheel of our own
    read -r version path <<<"$(pip_torch)" || true
    if [ -n "$version" ] && fits "$version"; then
      LIBTORCH_VERSION="$version" LIBTORCH_PREFIX="$path"
      return
    fi
    [ "$wanted" = auto ] || die "pip could not install torch==2.13.0"
  fi
  apt_install libtorch-dev                                     # 4: the system's
  version="$(torch_in /usr)"
  if [ -z "$version" ] || ! fits "$version"; then
    die "no LibTorch $wanted here: set CMAKE_PREFIX_PATH to the folder of one"
  fi
  LIBTORCH_VERSION="$version" LIBTORCH_PREFIX=/usr
}

configure() {
  local build_dir="$1" preset="$2" launcher=()
  shift 2
  if command -v ccache >/dev/null; then
    launcher=(-D CMAKE_CXX_COMPILER_LAUNCHER=ccache)
  fi
  (cd "$root" && cmake --preset "$preset" -B "$build_dir" "${launcher[@]}" \
    -D "CMAKE_PREFIX_PATH=$LIBTORCH_PREFIX" \
    -D "Torch_DIR=$(torch_config_dir "$LIBTORCH_PREFIX")" "$@")
}

run_example() {
  local name="$1" build_dir="$root/build/release-$LIBTORCH_VERSION"
  local log="$build_dir/configure.log"
  shift
  say "LibTorch $LIBTORCH_VERSION: building $name, a minute or two the first time"
  # CMake says much, and a newcomer wants to see the program: what it says matters if it fails.
  mkdir -p "$build_dir"
  if ! configure "$build_dir" release -D REMAT_BUILD_BENCHMARKS=OFF >"$log" 2>&1; then
    cat "$log" >&2
    die "CMake failed; its words are above and in $log"
  fi
  cmake --build "$build_dir" --target "$name" ||
    die "the build of $name failed; what CMake found is in $log"
  exec "$(find "$build_dir/examples" -name "$name" -type f -perm -u+x | head -n 1)" "$@"
}
