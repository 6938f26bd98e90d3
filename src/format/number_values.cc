#include "format/number_values.h"

#include <cmath>
#include <limits>

namespace hotplane {

double E4m3Value(uint8_t byte) {
  const int field = byte >> 3 & 15;
  const int fraction = byte & 7;
  if (field == 15 && fraction == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      field == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, field - 10);
  return (byte & 0x80) != 0 ? -magnitude : magnitude;
}

double F16Value(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  double magnitude = 0;
  if (exponent == 31) {
    magnitude = fraction == 0 ? HUGE_VAL : std::nan("");
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, -24);
  } else {
    magnitude = std::ldexp(1024 + fraction, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

}  // namespace hotplane
