#!/bin/sh
# install_test.sh CMAKE SOURCE_DIR BINARY_DIR CC CXX: installs the build into a fresh prefix, then
# uses it as a stranger would: a CMake project in C++, a C program by pkg-config, the command line.
set -eu
cmake=$1 source=$2 binary=$3 cc=$4 cxx=$5
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix

die() {
  echo "install test: $1" >&2
  exit 1
}

"$cmake" --install "$binary" --prefix "$prefix" >"$work/install.log" || {
  cat "$work/install.log"
  die "installing failed"
}
# Installed trees are moved; nothing may remember where it was installed first.
mv "$prefix" "$work/moved"
prefix=$work/moved
for file in include/hotplane/hotplane.h include/hotplane/engine.hpp bin/hotplane \
  share/man/man1/hotplane.1 share/bash-completion/completions/hotplane; do
  [ -f "$prefix/$file" ] || die "expected $file under the prefix, found none"
done

library=$(find "$prefix" -name libhotplane.so)
[ -n "$library" ] || die "expected libhotplane.so under the prefix, found none"
nm -D --defined-only "$library" | awk '{print $3}' >"$work/exported"
grep -q '^hotplane_boot$' "$work/exported" || die "libhotplane.so does not export hotplane_boot"
if grep -v '^hotplane_' "$work/exported"; then
  die "libhotplane.so exports more than hotplane_* (above)"
fi
# Everything declared is exported, and nothing else.
sed -n 's/.*HOTPLANE_API.*[ *]\(hotplane_[a-z0-9_]*\)(.*/\1/p' \
  "$prefix/include/hotplane/hotplane.h" |
  sort >"$work/declared"
sort "$work/exported" | diff "$work/declared" - ||
  die "declared in hotplane.h (<) and exported by libhotplane.so (>) differ"

for file in "$prefix/bin/hotplane" "$library"; do
  if ldd "$file" | grep -E 'libstdc|libgcc|libfmt|libxxhash|liburing|libbenchmark'; then
    die "$file needs a library (above) that a bare machine does not have"
  fi
done

"$prefix/bin/hotplane" build "$source/models/tinymoe-mxfp4" --store "$work/store" -q

echo "== C++ by find_package"
"$cmake" -G Ninja -S "$source/tests/install/cmake_project" -B "$work/cmake" \
  -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_CXX_COMPILER="$cxx" >/dev/null
"$cmake" --build "$work/cmake" >/dev/null
"$work/cmake/with_shared" "$work/store" >"$work/shared.out"
"$work/cmake/with_static" "$work/store" >"$work/static.out"
cat "$work/shared.out"
cmp "$work/shared.out" "$work/static.out"

echo "== C by pkg-config"
PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name hotplane.pc)")
export PKG_CONFIG_PATH
# Flags are words: splitting them is wanted.
# shellcheck disable=SC2046
"$cc" -std=c99 -pedantic -Wall -Werror -o "$work/plain" "$source/tests/install/plain.c" \
  $(pkg-config --cflags --libs hotplane)
LD_LIBRARY_PATH=$(dirname "$library") "$work/plain" "$work/store"

echo "== the examples by pkg-config"
# shellcheck disable=SC2046
"$cc" -std=c99 -pedantic -Wall -Werror -o "$work/boot" "$source/examples/boot.c" \
  $(pkg-config --cflags --libs hotplane)
# shellcheck disable=SC2046
"$cxx" -std=c++17 -Wall -Werror -o "$work/records" "$source/examples/records.cpp" \
  $(pkg-config --cflags --libs hotplane)
LD_LIBRARY_PATH=$(dirname "$library") "$work/boot" "$work/store"
LD_LIBRARY_PATH=$(dirname "$library") "$work/records" "$work/store"

echo "== the language model by find_package"
"$cmake" -G Ninja -S "$source/examples/tinylm" -B "$work/tinylm" -DCMAKE_PREFIX_PATH="$prefix" \
  -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_BUILD_TYPE=Debug >/dev/null
"$cmake" --build "$work/tinylm" >/dev/null
"$work/tinylm/tinylm" generate "$source/models/tinymoe-mxfp4" --store "$work/store" \
  --precision fp4 --tokens 16

[ "$(pkg-config --modversion hotplane)" = "$(cat "$source/VERSION")" ] ||
  die "pkg-config tells another version than VERSION"
