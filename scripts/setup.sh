# Sourced by scripts/demo and scripts/test: installs what a fresh Debian 12 lacks, and only that.

# What the library and the command line are built from.
build_packages="ca-certificates cmake g++ libcli11-dev libexpected-dev libfmt-dev
  liburing-dev libxxhash-dev ninja-build nlohmann-json3-dev pkg-config python3"
# What the tests add: their frameworks, clang for the fuzzers, git for the list of tracked files;
# for the Python package, which needs neither, numpy, and venv to install the wheel into.
test_packages="binutils clang clang-format-14 git libclang-rt-14-dev libgtest-dev librapidcheck-dev
  python3-numpy python3-venv"

# install_packages NAME...: apt-get for those that are missing.
install_packages() {
  missing=""
  for package in "$@"; do
    case $(dpkg-query -W -f '${Status}' "$package" 2>/dev/null) in
      "install ok installed") ;;
      *) missing="$missing $package" ;;
    esac
  done
  [ -n "$missing" ] || return 0
  echo "== installing:$missing"
  as_root=""
  if [ "$(id -u)" -ne 0 ]; then
    as_root="sudo"
    command -v sudo >/dev/null || {
      echo "not root and no sudo: install these first:$missing" >&2
      return 1
    }
  fi
  # Names are words: splitting them is wanted.
  # shellcheck disable=SC2086
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq update </dev/null >/dev/null &&
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
      $missing </dev/null >/dev/null
}

# build_preset NAME [CMAKE_ARGUMENT...]: configures and builds build/NAME; ccache where it is there.
build_preset() {
  preset=$1
  shift
  if command -v ccache >/dev/null; then
    set -- -DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache "$@"
  fi
  echo "== configure and build: $preset"
  cmake --preset "$preset" --log-level=WARNING "$@" &&
    NINJA_STATUS='[%f/%t %es] ' cmake --build --preset "$preset" -- $quiet
}

# One line per step where a person looks; nothing but warnings in CI.
quiet=""
if [ "${CI:-}" = true ] || [ ! -t 1 ]; then
  quiet="--quiet"
fi
