#include "moe/routing.h"

namespace hotplane {

Routing RouteByExpert(std::span<const int32_t> ids, size_t experts) {
  std::vector<size_t> ends(experts + 1);
  for (const int32_t id : ids) ++ends[static_cast<size_t>(id) + 1];
  Routing routing;
  for (size_t e = 0; e < experts; ++e) {
    const size_t count = ends[e + 1];
    ends[e + 1] = ends[e] + count;
    if (count > 0) routing.groups.push_back({static_cast<uint32_t>(e), ends[e], ends[e + 1]});
  }
  routing.order.resize(ids.size());
  std::vector<size_t> next(ends.begin(), ends.end() - 1);
  for (size_t i = 0; i < ids.size(); ++i)
    routing.order[next[static_cast<size_t>(ids[i])]++] = static_cast<uint32_t>(i);
  return routing;
}

}  // namespace hotplane
