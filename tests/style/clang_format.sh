#!/bin/sh
# clang_format.sh ROOT: exits 1 when clang-format 14 would change a file, 77 where it is missing.
# Other versions format differently and are not asked.
set -eu
cd "$1"
for tool in clang-format-14 clang-format; do
  if command -v "$tool" >/dev/null && "$tool" --version | grep -q 'version 14\.'; then
    find src include tests bench fuzz examples tools -type f \
      \( -name '*.h' -o -name '*.hpp' -o -name '*.cc' -o -name '*.c' -o -name '*.inc' \) -print0 |
      xargs -0 "$tool" --dry-run -Werror
    exit 0
  fi
done
echo "skipped: clang-format 14 is not installed (Debian: clang-format-14)"
exit 77
