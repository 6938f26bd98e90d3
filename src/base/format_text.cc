#define FMT_HEADER_ONLY 1
#include "base/format_text.h"

namespace hotplane {

std::string VFormatText(fmt::string_view format, fmt::format_args arguments) {
  return fmt::vformat(format, arguments);
}

}  // namespace hotplane
