// From ids by token to tokens by expert, and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hotplane {

// Assignments (token, slot) are numbered token * top_k + slot.
struct Routing {
  // The assignments of each expert that has any, experts ascending, assignments ascending.
  struct Group {
    uint32_t expert = 0;
    size_t begin = 0;  // in `order`
    size_t end = 0;
  };
  std::vector<Group> groups;
  std::vector<uint32_t> order;
};

// A stable counting sort. REQUIRES ids in [0, experts).
Routing RouteByExpert(std::span<const int32_t> ids, size_t experts);

}  // namespace hotplane
