#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>

namespace c10d {
class Store;
}

namespace acc::distributed {

// What `store` is, with its prefixes and `prefix` behind them, over another connection: whoever
// waits for a key in `store` keeps all others from it. The groups of this process share one, which
// is closed when the last of them lets go, so nothing may wait in it. A connection each would do,
// but that each 25th that torch opens may take five seconds.
std::shared_ptr<c10d::Store> beside(const c10::intrusive_ptr<c10d::Store>& store,
                                    const char* prefix);

}  // namespace acc::distributed
