#pragma once

#include <cstdint>

namespace c10d {
class Backend;
}

// Gloo tells the messages of one collective from those of another by a number, of which each rank
// counts its own: ranks that call something else at the same number take each other's bytes, and
// where these are too many Gloo ends the process.
namespace acc::distributed {

// The messages of the next call of `transport`, where it is Gloo, go to ranks alone that have the
// same `history`, and come from such. Other ranks wait, and hear from their ledgers why.
void tag_by_history(c10d::Backend& transport, uint64_t history);

}  // namespace acc::distributed
